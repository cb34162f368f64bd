"""The low-latency adapter on the emulation: against the slow twin, in order, within its limits.

Ranks are threads with gloo groups of their own; tests/dist/test_dispatch_deepep.py has processes.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gloo_threads import gloo_threads

from dispatch import create_dispatcher, deepep
from dispatch.base import (
    CombineForm,
    DispatchConfig,
    DispatchError,
    DispatchStats,
    HandleError,
    Layout,
    PeerError,
    Received,
    ScaleFormat,
    WireFormat,
)
from dispatch.deepep_ll import EmulatedLowLatencyDispatcher, LowLatencyDispatcher
from dispatch.fp8 import dequantise
from dispatch.mib import mib
from dispatch.selfcheck import CheckCase, expected, expert_output, make_case, random_placement
from ep.group import EPGroup
from ep.placement import ExpertPlacement

CONFIG = DispatchConfig(2048, 3, 8, 8, torch.bfloat16, deterministic=False)


def config_of(placement: ExpertPlacement, top_k: int = 3) -> DispatchConfig:
    return replace(CONFIG, top_k=top_k, num_physical_experts=placement.num_physical_experts)


def experts_masked(received: Received, case: CheckCase, rank: int) -> torch.Tensor:
    """The twin's stand-in experts on valid rows; what is not valid stays unread and comes back as
    NaN, which combine must not read either."""
    assert received.layout is Layout.MASKED
    held = case.placement.physical_to_logical[0]
    local = case.placement.num_local_experts
    y = torch.full(received.x.shape, torch.nan, dtype=received.x.dtype)
    for slot, n in enumerate(received.counts.tolist()):
        expert = torch.full((n,), int(held[rank * local + slot]))
        y[slot, :n] = expert_output(received.x[slot, :n], expert)
        assert (received.weights[slot, :n] == 1).all() and (received.slots[slot] == slot).all()
    return y


def run(d: LowLatencyDispatcher, case: CheckCase, rank: int) -> tuple[Received, torch.Tensor]:
    handle = d.dispatch_start(case.xs[rank], case.slots[rank], case.weights[rank])
    received = d.dispatch_finish(handle)
    d.combine_start(handle, experts_masked(received, case, rank))
    return received, d.combine_finish(handle)


def rows_of_twin(want: Received, slot: int) -> list[Any]:
    return sorted(want.x[(want.slots == slot).any(1)][:, :6].tolist())


def cases_of(size: int) -> list[CheckCase]:
    """Idle ranks, masked picks, skew, everything to one rank or to one slot, nothing at all."""
    cases = []
    for seed in range(2):
        placement = random_placement(6, size, 2 + seed, seed)
        config = config_of(placement)
        some = [(5 * rank + 3 * seed) % 8 for rank in range(size)]
        for tokens, options in (
            (some, {"masked": 0.3}),
            ([8] * size, {}),
            (some, {"to_rank": seed % size}),
            ([0] * (size - 1) + [8], {}),
            ([0] * size, {}),
            ([2] * size, {"masked": 1.1}),
        ):
            cases.append(make_case(config, placement, tokens, seed, **options))
    placement = random_placement(6, size, 0, 3)
    skewed = make_case(config_of(placement), placement, [8] * size, 9)
    target = int((placement.physical_to_logical[0] >= 0).nonzero()[0][-1])
    for slots in skewed.slots:
        slots[:, 0], slots[:, 1:] = target, -1
    return [*cases, skewed]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_row_arrives_and_comes_home(size: int) -> None:
    cases = cases_of(size)
    wanted = [expected(case, CombineForm.PAIRS) for case in cases]

    def body(group: EPGroup) -> int:
        rank = group.rank
        for case, (received, home) in zip(cases, wanted, strict=True):
            config = config_of(case.placement)
            d = EmulatedLowLatencyDispatcher(group, config)
            for _ in range(2):  # back to back, the rows in another order
                got, out = run(d, case, rank)
                assert torch.equal(got.counts, received[rank].counts)
                for slot, n in enumerate(got.counts.tolist()):
                    rows = sorted(got.x[slot, :n, :6].tolist())
                    assert rows == rows_of_twin(received[rank], slot)
                    assert got.x[slot, n:].isnan().all()
                # Each product and sum as the twin does it; only the end is rounded.
                assert out.dtype == torch.float32
                assert torch.equal(out, home[rank].to(torch.bfloat16).float())
            d.close()
        return len(cases)

    results = [body(EPGroup.single())] if size == 1 else gloo_threads(size, body)
    assert results == [13] * size


@pytest.mark.parametrize("wire", [WireFormat.FP8, WireFormat.FP8_UE8M0])
def test_fp8_on_the_wire_is_near(wire: WireFormat) -> None:
    placement = random_placement(6, 2, 2, 0)
    config = replace(config_of(placement), wire=wire)
    case = make_case(config, placement, [8, 3], 0, masked=0.2)
    received, home = expected(case, CombineForm.PAIRS)

    def body(group: EPGroup) -> int:
        d = EmulatedLowLatencyDispatcher(group, config)
        assert d.quantises and d.notes == []
        handle = d.dispatch_start(*(v[group.rank] for v in (case.xs, case.slots, case.weights)))
        got = d.dispatch_finish(handle)
        assert got.x.dtype == torch.float8_e4m3fn and got.scales is not None
        assert got.scales.stride(1) == 1  # the rows' dimension: what grouped GEMMs take
        if wire is WireFormat.FP8:
            assert got.scale_format is ScaleFormat.F32_COLUMN
            assert got.scales.dtype == torch.float32 and got.scales.shape[2] == 2048 // 128
        else:
            assert got.scale_format is ScaleFormat.UE8M0_COLUMN
            assert got.scales.dtype == torch.int32 and got.scales.shape[2] == 2048 // 512
        rows = torch.full(got.x.shape, torch.nan, dtype=torch.bfloat16)
        for slot, n in enumerate(got.counts.tolist()):
            rows[slot, :n] = dequantise(
                got.x[slot, :n], got.scales[slot, :n], got.scale_format, torch.bfloat16
            )
            near = torch.tensor(rows_of_twin(received[group.rank], slot)).view(n, 6)
            mine = torch.tensor(sorted(rows[slot, :n, :6].tolist())).view(n, 6)
            torch.testing.assert_close(mine, near, rtol=0.07, atol=0.02)
        d.combine_start(handle, experts_masked(replace(got, x=rows), case, group.rank))
        want = home[group.rank]
        error = float((d.combine_finish(handle) - want).norm() / want.norm())
        assert 0.005 < error < 0.05, error
        return 1

    assert gloo_threads(2, body) == [1, 1]


def test_two_layers_in_flight_in_any_order() -> None:
    placements = [random_placement(6, 2, 2, seed) for seed in (0, 1)]
    cases = [make_case(config_of(p), p, [8, 3], s) for s, p in enumerate(placements)]
    homes = [expected(case, CombineForm.PAIRS)[1] for case in cases]

    def body(group: EPGroup) -> int:
        rank = group.rank
        d = EmulatedLowLatencyDispatcher(group, config_of(placements[0]))

        def start(case: CheckCase) -> Any:
            return d.dispatch_start(case.xs[rank], case.slots[rank], case.weights[rank])

        for _ in range(3):
            first = start(cases[0])
            second = start(cases[1])
            with pytest.raises(DispatchError, match="2 layers are in flight; at most 2"):
                start(cases[0])
            got_second, got_first = d.dispatch_finish(second), d.dispatch_finish(first)
            d.combine_start(first, experts_masked(got_first, cases[0], rank))
            # The other's combine while this one's is still on its way.
            d.combine_start(second, experts_masked(got_second, cases[1], rank))
            outs = d.combine_finish(second), d.combine_finish(first)
            for out, home in zip(reversed(outs), homes, strict=True):
                assert torch.equal(out, home[rank].to(torch.bfloat16).float())
            # dispatch(b1) while combine(b0) is in flight: the adapter lands it first.
            first = start(cases[0])
            d.combine_start(first, experts_masked(d.dispatch_finish(first), cases[0], rank))
            second = start(cases[1])
            out = d.combine_finish(first)
            assert torch.equal(out, homes[0][rank].to(torch.bfloat16).float())
            d.combine_start(second, experts_masked(d.dispatch_finish(second), cases[1], rank))
            d.combine_finish(second)
        for _ in range(3):
            d.dispatch_finish(start(cases[0]))  # let go of: in flight no more
        return 1

    assert gloo_threads(2, body) == [1, 1]


def test_handles_are_single_use_and_in_order() -> None:
    case = make_case(CONFIG, ExpertPlacement.trivial(1, 8, 1), [4], 0)
    d, other = (EmulatedLowLatencyDispatcher(EPGroup.single(), CONFIG) for _ in range(2))
    handle = d.dispatch_start(case.xs[0], case.slots[0], case.weights[0])
    with pytest.raises(HandleError, match="next call is dispatch_finish"):
        d.combine_finish(handle)
    with pytest.raises(HandleError, match="not one that this dispatcher made"):
        other.dispatch_finish(handle)
    y = experts_masked(d.dispatch_finish(handle), case, 0)
    with pytest.raises(HandleError, match="next call is combine_start"):
        d.dispatch_finish(handle)
    with pytest.raises(DispatchError, match="index: only the PAIRS form"):
        d.combine_start(handle, y, torch.zeros(4, 3, dtype=torch.int64))
    with pytest.raises(DispatchError, match=r"y: torch.float32 .* must be bfloat16 \[8, 8, 2048\]"):
        d.combine_start(handle, y.float())
    with pytest.raises(DispatchError, match=r"y: torch.bfloat16 \[8, 4, 2048\]"):
        d.combine_start(handle, y[:, :4])
    d.combine_start(handle, y)
    d.combine_finish(handle)
    with pytest.raises(HandleError, match="it is spent"):
        d.combine_finish(handle)
    d.close()
    d.close()
    with pytest.raises(DispatchError, match="closed"):
        d.dispatch_start(case.xs[0], case.slots[0], case.weights[0])


@pytest.mark.parametrize(
    ("wire", "row"),
    [
        (WireFormat.MODEL, 4096),
        (WireFormat.FP8, 2048 + 16 * 4),
        (WireFormat.FP8_UE8M0, 2048 + 16),
    ],
)
def test_bytes_and_rows_are_counted(wire: WireFormat, row: int) -> None:
    placement = ExpertPlacement.trivial(1, 8, 2)
    case = make_case(CONFIG, placement, [5, 2], 1, masked=0.2)

    def body(group: EPGroup) -> tuple[list[int], DispatchStats]:
        d = EmulatedLowLatencyDispatcher(group, replace(CONFIG, wire=wire))
        for _ in range(2):
            handle = d.dispatch_start(*(v[group.rank] for v in (case.xs, case.slots, case.weights)))
            received = d.dispatch_finish(handle)
            d.combine_start(handle, torch.zeros(received.x.shape, dtype=torch.bfloat16))
            d.combine_finish(handle)
        return d.stats.rows_sent_to_rank, d.stats

    results = gloo_threads(2, body)
    picks = [[int(((s >= 0) & (s // 4 == r)).sum()) for r in range(2)] for s in case.slots]
    for rank, (rows, stats) in enumerate(results):
        assert rows == picks[rank] and stats.calls == 2
        away, back = picks[rank][1 - rank], picks[1 - rank][rank]
        assert stats.dispatch_bytes == 2 * away * (16 + row)
        assert stats.combine_bytes == 2 * back * 4096
        assert stats.bytes_sent == stats.dispatch_bytes + stats.combine_bytes


def test_a_rank_that_does_not_answer_is_masked() -> None:
    placement = ExpertPlacement.trivial(1, 8, 4)
    case = make_case(CONFIG, placement, [4] * 4, 2)
    gone = 3

    def body(group: EPGroup) -> list[int]:
        rank = group.rank
        d = EmulatedLowLatencyDispatcher(group, CONFIG, enable_shrink=True)
        run(d, case, rank)
        d.check_peers()
        assert d.active_mask() == [1, 1, 1, 1]
        if rank == gone:
            return []
        received, out = run(d, case, rank)
        with pytest.raises(PeerError, match=r"ranks \[3\] did not answer"):
            d.check_peers()
        # The rows that others sent are there, and the experts that are left give their part.
        slots = torch.where(case.slots[rank] // 2 == gone, -1, case.slots[rank])
        held = CheckCase(
            case.xs,
            [s if r != gone else s[:0] for r, s in enumerate(case.slots)],
            case.weights,
            placement,
        )
        held.slots[rank] = slots
        want = torch.zeros(4, 2048)
        for k in range(3):
            y = expert_output(case.xs[rank], slots[:, k].clamp(min=0)).float()
            want += torch.where(slots[:, k : k + 1] >= 0, y * case.weights[rank][:, k, None], 0)
        assert torch.equal(out, want.to(torch.bfloat16).float())
        assert int(received.counts.sum()) == sum(
            int((s // 2 == rank).sum()) for r, s in enumerate(case.slots) if r != gone
        )
        with pytest.raises(DispatchError, match="set_mask: rank 4; valid are the others of 4"):
            d.set_mask(4, False)
        run(d, case, rank)  # and on without it, waiting for nobody
        d.set_mask(gone, True)
        return d.active_mask()

    assert gloo_threads(4, body, leaving=(gone,)) == [[1, 1, 1, 1]] * 3 + [[]]


def test_masks_need_shrink() -> None:
    d = EmulatedLowLatencyDispatcher(EPGroup.single(), CONFIG)
    assert d.active_mask() == [1]
    d.check_peers()
    with pytest.raises(DispatchError, match="enable_shrink=False"):
        d.set_mask(0, False)


# -- limits ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "ranks", "reason"),
    [
        ({"deterministic": True}, 1, "deterministic mode: the library rounds"),
        ({"dtype": torch.float32}, 1, "dtype=torch.float32: must be torch.bfloat16"),
        ({"hidden_size": 2880}, 1, "hidden_size=2880: kernels exist for 2048, 2560, 3072, 4096"),
        ({"top_k": 12}, 1, "top_k=12: valid are 1..11"),
        ({"num_physical_experts": 9}, 4, "does not divide by 4 ranks: nearest are 8 and 12"),
        ({"num_physical_experts": 20}, 10, "10 ranks: above 8 a multiple of it, such as 8 or 16"),
        ({"max_tokens_per_rank": 6}, 1, "must be a multiple of 4; the largest .* below is 4"),
        ({"max_tokens_per_rank": 7}, 2, "must be a multiple of 4; the largest .* below is 6"),
        ({"max_tokens_per_rank": 1028}, 1, "max_tokens_per_rank=1028: at most 1024"),
        ({"max_tokens_per_rank": 2048}, 1, r"= max_num_sequences x \(1 \+ drafts\)"),
        (
            {"max_tokens_per_rank": 1024, "num_physical_experts": 768, "hidden_size": 7168},
            8,
            r"buffer of 43680.0 MiB, the library addresses 32768.0 MiB; at most 768 tokens",
        ),
    ],
)
def test_the_probe_names_each_limit(change: dict[str, Any], ranks: int, reason: str) -> None:
    group: Any = SimpleNamespace(size=ranks, rank=0, cpu_group=None)
    answer = EmulatedLowLatencyDispatcher.probe(group, replace(CONFIG, **change))
    assert not answer.ok and "\n" not in answer.reason
    assert re.search(reason, answer.reason), answer.reason
    with pytest.raises(DispatchError, match=reason):
        EmulatedLowLatencyDispatcher(group, replace(CONFIG, **change))


def test_the_largest_value_named_is_valid_and_the_next_is_not() -> None:
    for experts, hidden, ranks in ((448, 5120, 16), (288, 7168, 6), (768, 8192, 3), (8, 2048, 1)):
        most = deepep.ll_largest_tokens(ranks, hidden, experts, None)
        step = deepep.ll_token_step(ranks)

        def problems(tokens: int) -> list[str]:
            return deepep.ll_problems(
                num_ranks=ranks,  # noqa: B023
                hidden=hidden,  # noqa: B023
                top_k=8,
                num_experts=experts,  # noqa: B023
                max_tokens=tokens,
                qp_depth=None,
            )

        assert problems(most) == [] and len(problems(most + step)) >= 1


def test_queue_depth_is_set_or_named(monkeypatch: pytest.MonkeyPatch) -> None:
    group, config = EPGroup.single(), replace(CONFIG, max_tokens_per_rank=600)
    monkeypatch.setenv("NVSHMEM_QP_DEPTH", "1024")
    answer = EmulatedLowLatencyDispatcher.probe(group, config)
    assert "NVSHMEM_QP_DEPTH=1024: at most 508; a depth of 2048 would do" in answer.reason
    monkeypatch.delenv("NVSHMEM_QP_DEPTH")
    d = EmulatedLowLatencyDispatcher(group, config)
    assert d._lease.buffer.nvshmem_qp_depth == 2048
    # What it set meanwhile is not left behind to pass for the user's.
    assert "NVSHMEM_QP_DEPTH" not in os.environ
    assert EmulatedLowLatencyDispatcher.probe(group, replace(config, max_tokens_per_rank=1024)).ok


def test_plan_is_the_formula_and_an_ok_probe_says_what_it_takes() -> None:
    group: Any = SimpleNamespace(size=32, rank=0)
    config = replace(
        CONFIG, hidden_size=7168, top_k=8, num_physical_experts=288, max_tokens_per_rank=128
    )
    size = EmulatedLowLatencyDispatcher.plan(group, config).held
    assert size / 2**30 == pytest.approx(2.0, abs=0.005)
    answer = EmulatedLowLatencyDispatcher.probe(group, config)
    assert answer.ok
    assert answer.reason == (
        "deep_ep 2.1.0+emulated low latency, 32 ranks, max_tokens_per_rank=128, "
        f"buffer of {mib(size)}"
    )


@pytest.mark.parametrize(
    ("library", "reason"),
    [
        (None, "deep_ep is not installed"),
        (SimpleNamespace(__version__="2.5.0"), "deep_ep 2.5.0: has no Buffer"),
        (
            SimpleNamespace(Buffer=type("Buffer", (), {})),
            "deep_ep of unknown version: Buffer.__init__ takes no",
        ),
    ],
)
def test_without_the_library_there_is_one_line(
    monkeypatch: pytest.MonkeyPatch, library: Any, reason: str
) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", library)  # None: the import fails
    answer = LowLatencyDispatcher.probe(EPGroup.single(), CONFIG)
    assert not answer.ok and answer.reason.startswith(reason) and "\n" not in answer.reason


def test_what_is_asked_for_is_had_or_refused() -> None:
    group = EPGroup.single()
    with pytest.raises(DispatchError, match="combine_form=CombineForm.PAIRS: .* must be SUMMED"):
        EmulatedLowLatencyDispatcher(group, CONFIG, combine_form=CombineForm.PAIRS)
    d = EmulatedLowLatencyDispatcher(group, CONFIG)
    x, weights = torch.zeros(3, 2048).bfloat16(), torch.ones(3, 3)
    slots = torch.arange(3, dtype=torch.int32).repeat(3, 1)
    with pytest.raises(DispatchError, match="9 tokens; at most max_tokens_per_rank=8"):
        d.dispatch_start(x[:1].repeat(9, 1), slots[:1].repeat(9, 1), weights[:1].repeat(9, 1))
    with pytest.raises(DispatchError, match=r"valid are -1 \(masked\) and 0..7"):
        d.dispatch_start(x, slots + 8, weights)
    with pytest.raises(DispatchError, match="x: torch.float32"):
        d.dispatch_start(x.float(), slots, weights)
    d.set_step_bound(3)
    handle = d.dispatch_start(x, slots, weights)
    assert d.dispatch_finish(handle).counts.sum() == 9


def test_by_name_from_the_registry_and_never_by_auto() -> None:
    choice = create_dispatcher("deepep_ll_emulated", EPGroup.single(), CONFIG)
    assert isinstance(choice.dispatcher, EmulatedLowLatencyDispatcher)
    said = choice.describe()
    assert said.startswith("dispatcher deepep_ll_emulated: deep_ep 2.1.0+emulated low latency, 1 r")
    auto = create_dispatcher("auto", EPGroup.single(), CONFIG)
    assert auto.dispatcher.name == "local"
    assert "not deepep_ll" in auto.describe() and "emulated" not in auto.describe()
    with pytest.raises(DispatchError, match="'deepep_ll_emulated' refuses: .*deterministic mode"):
        create_dispatcher(
            "deepep_ll_emulated", EPGroup.single(), replace(CONFIG, deterministic=True)
        )
