"""FP8 rows over real gloo processes: both backends, both kinds of scales, idle ranks, T = M, masked
picks, everything to one rank, ragged hidden sizes, exact and padded, two layers in flight, a
refusal. Against the slow twin, bit by bit.

Run as a script this file is the ranks (gloo_ranks.py).
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from dispatch_cases import config_for
from gloo_ranks import fork_ranks, run_ranks

from dispatch.allgather import AllGatherDispatcher
from dispatch.base import CombineForm, DispatchError, WireFormat
from dispatch.collective import CollectiveDispatcher
from dispatch.ideal import ideal_bytes
from dispatch.selfcheck import differences, expected, make_case, outputs, random_placement
from ep.group import EPGroup

PADDED = partial(CollectiveDispatcher, eager_bytes=1 << 30)
KINDS = (
    (CollectiveDispatcher, None),
    (PADDED, True),
    (AllGatherDispatcher, None),
    (AllGatherDispatcher, True),
)
SIZES = ((1, 1), (131, 3), (512, 11), (7168, 8))  # hidden, top-k
MOST = 64  # tokens a rank


@pytest.mark.dist
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_fp8_over_gloo(num_ranks: int, tmp_path: Path) -> None:
    reports = run_ranks(__file__, num_ranks, tmp_path, timeout=120)
    for rank, report in enumerate(reports):
        assert report["differences"] == [], f"rank {rank}"
        assert report["layers"] == 2 * len(SIZES) * 4 * len(KINDS)
        assert report["two_in_flight"] is True
        sent, ideal, rows = report["bytes"]
        assert rows > 0 and sent == ideal + 2 * (num_ranks - 1) <= 1.02 * ideal
    said = [report["refusal"] for report in reports]
    assert said.pop(1) == "DispatchError: x: torch.bfloat16 rows; must be Fp8Tokens, as wire=fp8"
    assert set(said) == {"PeerError: dispatch: refused by ranks [1]; see their errors"}


def check_layers(group: EPGroup) -> tuple[int, list[str]]:
    size, layers, found = group.size, 0, []
    for wire in (WireFormat.FP8, WireFormat.FP8_UE8M0):
        for seed, (hidden, top_k) in enumerate(SIZES):
            placement = random_placement(16, size, 3 * seed, seed, generation=seed)
            config = replace(config_for(placement, hidden=hidden, top_k=top_k), wire=wire)
            full = MOST if hidden < 1000 else 3
            some = [(3 * rank + seed) % 5 for rank in range(size)]
            busy = [full if rank == seed % size else 0 for rank in range(size)]
            for tokens, to_rank in ((some, None), (busy, None), ([0] * size, None), (some, 1)):
                case = make_case(config, placement, tokens, seed, masked=0.2, to_rank=to_rank)
                wanted = expected(case, CombineForm.PAIRS, wire)
                for kind, bounded in KINDS:
                    dispatcher = kind(group, config)
                    dispatcher.set_step_bound(max(tokens) if bounded else None)
                    found += differences(dispatcher, case, group.rank, wanted=wanted)
                    layers += 1
    return layers, found


def check_two_in_flight(group: EPGroup) -> bool:
    placements = [random_placement(8, group.size, group.size, seed, seed) for seed in (0, 1)]
    config = replace(config_for(placements[0], hidden=300), wire=WireFormat.FP8)
    tokens = [40 - 13 * rank for rank in range(group.size)]
    cases = [make_case(config, p, tokens, p.generation) for p in placements]
    d, rank = CollectiveDispatcher(group, config), group.rank
    handles = [
        d.dispatch_start(c.rows(rank, config.wire), c.slots[rank], c.weights[rank]) for c in cases
    ]
    got = [d.dispatch_finish(handle) for handle in handles]
    for handle, received, case in zip(handles, got, cases, strict=True):
        d.combine_start(handle, outputs(received, case, rank, d.combine_form))
    home = [d.combine_finish(handle) for handle in handles]
    wanted = [expected(case, d.combine_form, config.wire)[1][rank] for case in cases]
    return all(torch.equal(a, b) for a, b in zip(home, wanted, strict=True))


def check_refusal(group: EPGroup) -> str:
    placement = random_placement(8, group.size, 0, 0)
    config = replace(config_for(placement), wire=WireFormat.FP8)
    case = make_case(config, placement, [1] * group.size, 0)
    rows = case.rows(group.rank, WireFormat.MODEL if group.rank == 1 else config.wire)
    d = CollectiveDispatcher(group, config)
    try:
        d.dispatch_start(rows, case.slots[group.rank], case.weights[group.rank])
    except DispatchError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def count_bytes(group: EPGroup) -> tuple[int, int, int]:
    """Sent, ideal, rows: of one layer at the sizes of DeepSeek-V3."""
    placement = random_placement(64, group.size, 8, 0)
    config = replace(config_for(placement, hidden=7168, top_k=8), wire=WireFormat.FP8)
    case = make_case(config, placement, [8] * group.size, 0)
    d, rank = CollectiveDispatcher(group, config), group.rank
    d.dispatch_finish(
        d.dispatch_start(case.rows(rank, config.wire), case.slots[rank], case.weights[rank])
    )
    ideal = ideal_bytes(config, case.slots[rank], rank, group.size, d.combine_form)
    rows = sum(d.stats.rows_sent_to_rank) - d.stats.rows_sent_to_rank[rank]
    return d.stats.dispatch_bytes, ideal.dispatch, rows


def rank_main(group: EPGroup, folder: Path) -> dict[str, Any]:
    layers, found = check_layers(group)
    return {
        "layers": layers,
        "differences": found,
        "two_in_flight": check_two_in_flight(group),
        "refusal": check_refusal(group),
        "bytes": count_bytes(group),
    }


if __name__ == "__main__":
    sys.exit(fork_ranks(rank_main))
