"""One buffer for both of DeepEP's modes: who may use it when, what it takes, when it goes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dispatch.base import CombineForm, DispatchConfig, Dispatcher, DispatchError, WireFormat
from dispatch.choice import EMULATED, Choice, PhaseChoice
from dispatch.collective import CollectiveDispatcher
from dispatch.deepep_buffer import Mode, SharedBuffer, shared_hooks, shared_plan
from dispatch.deepep_ll import EmulatedLowLatencyDispatcher
from dispatch.deepep_normal import EmulatedNormalDispatcher
from dispatch.deepep_plan import BufferNeed, ll_need, ll_passing
from dispatch.emulation import BufferRuleError
from dispatch.fp8 import dequantise
from dispatch.phased import PhasedDispatcher
from dispatch.selfcheck import CheckCase, expected, expert_output, make_case, random_placement
from dispatch.selfcheck import outputs as routed_outputs
from dispatch.thread_group import ThreadBoard

PREFILL = DispatchConfig(2048, 3, 8, 16, torch.bfloat16, deterministic=False)
DECODE = replace(PREFILL, max_tokens_per_rank=4)
KINDS = (EmulatedNormalDispatcher, EmulatedLowLatencyDispatcher)


def case_of(seed: int, tokens: list[int]) -> CheckCase:
    """Another placement each time: slots hold other experts."""
    ranks = len(tokens)
    placement = random_placement(max(6, ranks - 2), ranks, 2, seed, generation=seed)
    return make_case(PREFILL, placement, tokens, seed, masked=0.2)


def layer(d: Dispatcher, case: CheckCase, rank: int) -> torch.Tensor:
    wire = WireFormat.MODEL if d.quantises else d.config.wire
    handle = d.dispatch_start(case.rows(rank, wire), case.slots[rank], case.weights[rank])
    received = d.dispatch_finish(handle)
    if not d.quantises:  # rows ROUTED
        d.combine_start(handle, routed_outputs(received, case, rank, CombineForm.SUMMED))
        return d.combine_finish(handle)
    held, local = case.placement.physical_to_logical[0], case.placement.num_local_experts
    y = torch.full(received.x.shape, torch.nan, dtype=torch.bfloat16)
    for slot, n in enumerate(received.counts.tolist()):
        x = received.x[slot, :n]
        if received.scales is not None:
            scales = received.scales[slot, :n]
            x = dequantise(x, scales, received.scale_format, torch.bfloat16)
        y[slot, :n] = expert_output(x, torch.full((n,), int(held[rank * local + slot])))
    d.combine_start(handle, y)
    return d.combine_finish(handle)


@pytest.mark.parametrize(
    ("wire", "ranks"), [*((wire, 2) for wire in WireFormat), (WireFormat.FP8, 16)]
)
def test_phases_alternate_over_one_buffer(wire: WireFormat, ranks: int) -> None:
    """Also as one dispatcher: what a phase leaves behind changes nothing for the other, whatever
    the placement. 16 ranks are two nodes."""
    tokens = [[3, 4] * (ranks // 2), [4, 0] * (ranks // 2)]
    cases = [case_of(seed, tokens[seed % 3 == 0]) for seed in range(6 if ranks == 2 else 2)]
    homes = [expected(case, CombineForm.PAIRS)[1] for case in cases]
    slots = cases[0].placement.num_physical_experts
    configs = [
        replace(config, wire=wire, num_physical_experts=slots) for config in (PREFILL, DECODE)
    ]
    board = ThreadBoard(ranks)
    buffers: list[Any] = [None] * ranks

    def body(rank: int) -> None:
        group = board.group(rank, min(ranks, 8))
        hooks = shared_hooks(group, list(zip(KINDS, configs, strict=True)))
        buffers[rank] = hooks["buffer"].buffer
        made = [kind.open(group, c, **hooks) for kind, c in zip(KINDS, configs, strict=True)]
        both = PhasedDispatcher(*made)
        for step, (case, home) in enumerate(zip(cases, homes, strict=True)):
            both.set_step_bound(4, decode_only=step % 2 == 1)
            assert both.in_use is made[step % 2]
            for _ in range(2 if ranks == 2 else 1):
                got = layer(both, case, rank)
                error = float((got - home[rank]).norm()) / max(float(home[rank].norm()), 1.0)
                assert error < (0.01 if wire is WireFormat.MODEL else 0.05), (step, error)
        both.close()
        with pytest.raises(DispatchError, match="closed"):
            made[0].dispatch_start(cases[0].rows(rank, wire), *_picks(cases[0], rank))
        with pytest.raises(DispatchError, match="buffer: it is closed"):
            EmulatedNormalDispatcher(group, configs[0], **hooks)

    board.run(body)
    assert buffers[0] is not buffers[1]


def _picks(case: CheckCase, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    return case.slots[rank], case.weights[rank]


def test_a_switch_that_does_not_clean_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    case, board = case_of(0, [3, 4]), ThreadBoard(2)

    def body(rank: int) -> None:
        group = board.group(rank)
        shared = SharedBuffer.open(group, normal=PREFILL, low_latency=DECODE, emulate=True)
        normal = EmulatedNormalDispatcher(group, PREFILL, buffer=shared)
        low = EmulatedLowLatencyDispatcher(group, DECODE, buffer=shared)
        layer(normal, case, rank)
        with pytest.raises(BufferRuleError, match="clean_low_latency_buffer must come first"):
            layer(low, case, rank)

    monkeypatch.setattr(SharedBuffer, "turn_of", lambda self, lease: None)
    board.run(body)


def test_phases_do_not_interrupt_each_other() -> None:
    case, board = case_of(0, [3, 4]), ThreadBoard(2)

    def body(rank: int) -> None:
        group = board.group(rank)
        shared = SharedBuffer.open(group, normal=PREFILL, low_latency=DECODE, emulate=True)
        normal = EmulatedNormalDispatcher(group, PREFILL, buffer=shared)
        low = EmulatedLowLatencyDispatcher(group, DECODE, buffer=shared)
        for first, second in ((low, normal), (normal, low)):
            handle = first.dispatch_start(case.xs[rank], *_picks(case, rank))
            with pytest.raises(
                DispatchError, match="1 layers of .* mode are in flight on the same"
            ):
                second.dispatch_start(case.xs[rank], *_picks(case, rank))
            y = first.dispatch_finish(handle).x.nan_to_num()
            first.combine_start(handle, y)
            first.combine_finish(handle)
        # The library itself, past the lease: what is on its way would be overwritten.
        handle = low.dispatch_start(case.xs[rank], *_picks(case, rank))
        picks = case.slots[rank].long()
        layout = shared.buffer.get_dispatch_layout(picks, 8)
        with pytest.raises(BufferRuleError, match="normal mode while a low-latency result is in"):
            shared.buffer.dispatch(
                case.xs[rank],
                num_tokens_per_rank=layout[0],
                is_token_in_rank=layout[3],
                num_tokens_per_expert=layout[2],
                topk_idx=picks,
                topk_weights=case.weights[rank],
            )
        low.dispatch_finish(handle)

    board.run(body)


def test_low_latency_layouts_of_two_sizes_are_cleaned_between() -> None:
    """Two dispatchers of one mode lay out the buffer each in its way."""
    board, cleaned = ThreadBoard(2), []
    case = case_of(1, [3, 4])

    def body(rank: int) -> None:
        group = board.group(rank)
        shared = SharedBuffer.open(group, low_latency=replace(DECODE, max_tokens_per_rank=8))
        clean = shared.buffer.clean_low_latency_buffer
        shared.buffer.clean_low_latency_buffer = lambda *sizes: (
            cleaned.append(sizes),
            clean(*sizes),
        )
        few, many = (
            EmulatedLowLatencyDispatcher(
                group, replace(DECODE, max_tokens_per_rank=most), buffer=shared
            )
            for most in (4, 8)
        )
        for d in (few, few, many, few):
            layer(d, case, rank)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dispatch.deepep_buffer.deepep.load", _emulation)
        board.run(body)
    assert sorted(cleaned) == [(4, 2048, 8)] * 2 + [(8, 2048, 8)] * 2


def _emulation(emulate: bool = False) -> Any:
    import dispatch.emulation

    return dispatch.emulation


def test_the_last_one_destroys_it() -> None:
    board = ThreadBoard(2)

    def body(rank: int) -> None:
        group = board.group(rank)
        shared = SharedBuffer.open(group, normal=PREFILL, low_latency=DECODE, emulate=True)
        normal = EmulatedNormalDispatcher(group, PREFILL, buffer=shared)
        low = EmulatedLowLatencyDispatcher(group, DECODE, buffer=shared)
        normal.close()
        normal.close()
        layer(low, case_of(0, [1, 2]), rank)
        shared.close()  # somebody still uses it
        layer(low, case_of(0, [1, 2]), rank)
        low.close()
        with pytest.raises(RuntimeError, match="not destroyed"):
            shared.buffer.clean_low_latency_buffer(4, 2048, 8)

    board.run(body)


def test_a_buffer_serves_only_what_it_was_made_for() -> None:
    board = ThreadBoard(1)
    group: Any = SimpleNamespace(rank=0, size=1, cpu_group=None, ranks_per_node=1)
    shared = SharedBuffer.open(group, low_latency=DECODE, emulate=True)
    assert shared.need == ll_need(group, DECODE)
    with pytest.raises(DispatchError, match="buffer: made for .*; open it with the configurations"):
        EmulatedLowLatencyDispatcher(group, replace(DECODE, max_tokens_per_rank=16), buffer=shared)
    with pytest.raises(DispatchError, match="enable_shrink=True: the buffer was opened with False"):
        EmulatedLowLatencyDispatcher(group, DECODE, buffer=shared, enable_shrink=True)
    with pytest.raises(DispatchError, match="buffer: made for"):
        shared.lease(Mode.NORMAL, BufferNeed(nvl=128), (4, 2048, 8))
    assert board.size == 1


def test_what_shares_is_planned_once() -> None:
    group: Any = SimpleNamespace(rank=0, size=8, cpu_group=None, ranks_per_node=8)
    decode = replace(DECODE, hidden_size=7168, top_k=8, num_physical_experts=288)
    decode = replace(decode, max_tokens_per_rank=128)
    prefill = replace(decode, max_tokens_per_rank=4096)
    parts = [(EmulatedNormalDispatcher, prefill), (EmulatedLowLatencyDispatcher, decode)]
    plans = [kind.plan(group, config) for kind, config in parts]
    both = shared_plan(group, parts)
    assert both is not None
    # NVLink queues and the low-latency buffer lie side by side; layers of one mode pass at a time.
    assert both.held == sum(p.held for p in plans)
    assert both.passing == max(p.passing for p in plans)
    assert shared_plan(group, parts[:1]) is None
    mixed = [(CollectiveDispatcher, prefill), parts[1]]
    assert shared_plan(group, mixed) is None and shared_hooks(group, mixed) == {}


def test_a_choice_of_both_opens_one_buffer() -> None:
    parts = [
        PhaseChoice(kind.name.removesuffix(EMULATED), kind, config, "it can", emulated=True)
        for kind, config in zip(KINDS, (PREFILL, DECODE), strict=True)
    ]
    choice, board = Choice("both", *parts, refused={}), ThreadBoard(2)
    opened: list[Any] = []

    def body(rank: int) -> None:
        group = board.group(rank)
        both = choice.open(group)
        assert isinstance(both, PhasedDispatcher)
        needs = [
            kind.buffer_need(group, part.config) for kind, part in zip(KINDS, parts, strict=True)
        ]
        assert choice.plan(group).held == (needs[0] | needs[1]).size
        both.close()
        with pytest.raises(DispatchError, match="must be SUMMED"):
            choice.open(group, combine_form=CombineForm.PAIRS)

    with pytest.MonkeyPatch.context() as patch:
        make = SharedBuffer.__init__

        def counted(self: SharedBuffer, *args: Any, **options: Any) -> None:
            make(self, *args, **options)
            opened.append(self)

        patch.setattr(SharedBuffer, "__init__", counted)
        board.run(body)
    assert len(opened) == 4  # one a rank each time
    for shared in opened:  # and none is left open, also where its dispatchers refused
        with pytest.raises(DispatchError, match="it is closed"):
            shared.lease(Mode.NORMAL, BufferNeed(), (4, 2048, 8))


@pytest.mark.parametrize(
    ("tokens", "hidden", "experts", "wire", "passing"),
    [
        # held is in test_dispatch_emulation.py: 1.78, 2.00, 7.11, 16.0 GiB
        (128, 7168, 256, WireFormat.FP8, 1.34),
        (128, 7168, 288, WireFormat.FP8, 1.50),
        (128, 7168, 288, WireFormat.FP8_UE8M0, 1.49),
        (128, 7168, 288, WireFormat.MODEL, 1.98),
        (512, 7168, 256, WireFormat.FP8, 5.35),
        (1024, 7168, 288, WireFormat.FP8, 12.02),
    ],
)
def test_what_passes_at_the_published_sizes(
    tokens: int, hidden: int, experts: int, wire: WireFormat, passing: float
) -> None:
    """Two layers in flight: rows as they arrive, what experts hand back, results; in GiB."""
    config = DispatchConfig(hidden, 8, experts, tokens, torch.bfloat16, False, wire)
    sizes = set()
    for ranks in (8, 32):
        group: Any = SimpleNamespace(rank=0, size=ranks)
        sizes.add(EmulatedLowLatencyDispatcher.plan(group, config).passing)
    (size,) = sizes  # e * R = P: the number of ranks does not matter
    assert size == ll_passing(group, config)
    assert size / 2**30 == pytest.approx(passing, abs=0.006)


def test_rows_in_flight_fit_the_plan() -> None:
    """The tensors that a layer really holds, against the formula."""
    case, board = case_of(0, [4, 4]), ThreadBoard(2)
    config = replace(DECODE, wire=WireFormat.FP8)

    def body(rank: int) -> None:
        group = board.group(rank)
        d = EmulatedLowLatencyDispatcher(group, config)
        handle = d.dispatch_start(case.xs[rank], *_picks(case, rank))
        received = d.dispatch_finish(handle)
        y = torch.zeros(received.x.shape, dtype=torch.bfloat16)
        d.combine_start(handle, y)
        home = d.combine_finish(handle)
        assert received.scales is not None
        held = [received.x, received.scales, y, home, home.to(torch.bfloat16)]
        sources = received.x.shape[0] * received.x.shape[1] * 4
        size = sum(t.numel() * t.itemsize for t in held) + sources
        assert d.plan(group, config).passing == 2 * size

    board.run(body)
