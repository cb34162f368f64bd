"""The normal-mode adapter on the emulation, against the slow twin; its limits."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gloo_threads import gloo_threads

from dispatch.base import (
    CombineForm,
    DispatchConfig,
    DispatchError,
    HandleError,
    WireFormat,
)
from dispatch.deepep_normal import EmulatedNormalDispatcher, NormalDispatcher
from dispatch.mib import mib
from dispatch.selfcheck import differences, expected, make_case, outputs, random_placement
from ep.group import EPGroup

CONFIG = DispatchConfig(16, 3, 8, 12, torch.bfloat16, deterministic=False)


@pytest.mark.parametrize("size", [2, 4])
def test_rows_arrive_as_the_twin_says_and_come_home(size: int) -> None:
    cases = []
    for seed in range(2):
        placement = random_placement(6, size, 2 + seed, seed)
        config = replace(CONFIG, num_physical_experts=placement.num_physical_experts)
        some = [(5 * rank + 3 * seed) % 8 for rank in range(size)]
        for tokens, options in (
            (some, {"masked": 0.3}),
            ([8] * size, {}),
            (some, {"to_rank": seed % size}),
            ([0] * (size - 1) + [12], {}),
            ([0] * size, {}),
            ([2] * size, {"masked": 1.1}),
        ):
            case = make_case(config, placement, tokens, seed, **options)
            cases.append((config, case, expected(case, CombineForm.SUMMED)))

    def body(group: EPGroup) -> list[str]:
        found = []
        for config, case, wanted in cases:
            d = EmulatedNormalDispatcher(group, config)
            for _ in range(2):
                # Sums of a few bfloat16 of size 30 or so, rounded once more at the end.
                found += differences(d, case, group.rank, tolerance=0.13, wanted=wanted)
            d.close()
        return found

    assert gloo_threads(size, body) == [[]] * size


def test_two_in_flight_bytes_and_order() -> None:
    placement = random_placement(6, 2, 2, 0)
    case = make_case(CONFIG, placement, [7, 2], 0, masked=0.2)
    received = expected(case, CombineForm.SUMMED)[0]

    def body(group: EPGroup) -> tuple[int, list[int]]:
        rank = group.rank
        d = EmulatedNormalDispatcher(group, CONFIG)
        handles = [
            d.dispatch_start(case.xs[rank], case.slots[rank], case.weights[rank]) for _ in range(2)
        ]
        with pytest.raises(HandleError, match="next call is dispatch_finish"):
            d.combine_finish(handles[0])
        got = [d.dispatch_finish(h) for h in reversed(handles)]
        y = outputs(got[0], case, rank, d.combine_form)
        with pytest.raises(DispatchError, match="only the PAIRS form"):
            d.combine_start(handles[0], y, torch.zeros(1))
        for handle in handles:
            d.combine_start(handle, y)
        homes = [d.combine_finish(h) for h in handles]
        assert torch.equal(homes[0], homes[1])
        d.close()
        with pytest.raises(DispatchError, match="closed"):
            d.dispatch_start(case.xs[rank], case.slots[rank], case.weights[rank])
        return d.stats.bytes_sent, d.stats.rows_sent_to_rank

    results = gloo_threads(2, body)
    for rank, (sent, rows) in enumerate(results):
        away = rows[1 - rank]
        back = len(received[rank].x) - rows[rank]
        assert sent == 2 * (away * (16 * 2 + 3 * 12) + back * 16 * 2)


@pytest.mark.parametrize(
    ("change", "ranks", "reason"),
    [
        ({"deterministic": True}, 8, "deterministic mode"),
        ({"dtype": torch.float32}, 8, "must be torch.bfloat16"),
        ({}, 1, "1 rank: valid are 2, 4, 8, 16"),
        ({}, 12, "12 ranks: valid are"),
        ({"top_k": 33}, 8, "top_k=33: valid are 1..32"),
        ({"num_physical_experts": 9}, 8, "nearest are 8 and 16"),
        ({"num_physical_experts": 2050}, 2, "2050, 1025 a rank: at most 1024, 2048 in all"),
        ({"hidden_size": 12}, 8, "hidden_size=12: must be a multiple of 8; nearest are 8 and 16"),
        (
            {"hidden_size": 2880, "num_physical_experts": 16},
            16,
            "a multiple of 256; nearest are 2816 and 3072",
        ),
        (
            {"hidden_size": 24, "wire": WireFormat.FP8},
            8,
            "hidden_size=24: must be a multiple of 16; nearest are",
        ),
        ({"hidden_size": 16512, "wire": WireFormat.FP8_UE8M0}, 8, "in FP8 at most 16384"),
    ],
)
def test_the_probe_names_each_limit(change: dict[str, Any], ranks: int, reason: str) -> None:
    group: Any = SimpleNamespace(size=ranks, rank=0, ranks_per_node=min(ranks, 8), cpu_group=None)
    answer = EmulatedNormalDispatcher.probe(group, replace(CONFIG, **change))
    assert not answer.ok and reason in answer.reason and "\n" not in answer.reason
    with pytest.raises(DispatchError):
        EmulatedNormalDispatcher(group, replace(CONFIG, **change))


def test_nodes_have_eight_ranks() -> None:
    config = replace(CONFIG, hidden_size=7168, num_physical_experts=256)
    group: Any = SimpleNamespace(size=16, rank=0, ranks_per_node=4)
    assert "4 ranks a node: must be 8" in EmulatedNormalDispatcher.probe(group, config).reason
    group.size = 8
    assert "up to 8 must share one" in EmulatedNormalDispatcher.probe(group, config).reason
    group.ranks_per_node = 8
    size = EmulatedNormalDispatcher.plan(group, config).held
    assert EmulatedNormalDispatcher.probe(group, config).reason.endswith(f"buffer of {mib(size)}")


def test_without_the_library_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    answer = NormalDispatcher.probe(EPGroup.single(), CONFIG)
    assert not answer.ok and answer.reason == "deep_ep is not installed"
    # What it would take is known all the same, where the number of ranks is one of its own.
    group: Any = SimpleNamespace(size=32, rank=0, ranks_per_node=8)
    config = replace(CONFIG, hidden_size=7168, num_physical_experts=288)
    plan = NormalDispatcher.plan(group, config)
    assert plan == EmulatedNormalDispatcher.plan(group, config) and plan.held > 2**28
    group.size = 20
    with pytest.raises(DispatchError, match="'deepep_normal': 20 ranks: valid are 2, 4, 8, 16"):
        NormalDispatcher.plan(group, config)
