"""FP8 rows: the arithmetic, the wire, the bytes, and dispatchers that carry them (threads as ranks;
real processes: tests/dist/test_dispatch_fp8_gloo.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from dispatch_cases import config_for
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from thread_ranks import World, thread_world  # noqa: F401

from dispatch.allgather import AllGatherDispatcher
from dispatch.base import (
    CombineForm,
    DispatchConfig,
    Dispatcher,
    DispatchError,
    Fp8Tokens,
    PeerError,
    Received,
    ScaleFormat,
    WireFormat,
)
from dispatch.collective import CollectiveDispatcher
from dispatch.fp8 import dequantise, pack_exponents, quantise, scale_bytes, unpack_exponents
from dispatch.ideal import ideal_bytes
from dispatch.local import LocalDispatcher
from dispatch.selfcheck import (
    CheckCase,
    differences,
    expected,
    make_case,
    random_placement,
    run_case,
)
from dispatch.wire import RowFormat
from ep.group import EPGroup

FP8 = (WireFormat.FP8, WireFormat.FP8_UE8M0)
SMALL_WORK = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def rows(tokens: int, hidden: int, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    spread = torch.exp(3 * torch.randn(tokens, 1, generator=g))
    return (torch.randn(tokens, hidden, generator=g) * spread).bfloat16()


def fp8_config(config: DispatchConfig, wire: WireFormat) -> DispatchConfig:
    return replace(config, wire=wire)


# -- arithmetic -------------------------------------------------------------------------------


def e4m3_codes() -> np.ndarray:
    """All magnitudes that e4m3 has, from its definition: 4 exponent bits, 3 of mantissa, bias 7;
    the largest code is NaN."""
    codes = np.arange(127)
    exponent, mantissa = codes >> 3, codes & 7
    return np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))


def by_formula(x: np.ndarray, ue8m0: bool) -> tuple[np.ndarray, np.ndarray]:
    """float64 [D] -> the scale of each block, and what comes back: the nearest code, ties to even,
    times the scale."""
    scales, back = [], np.empty_like(x)
    for start in range(0, len(x), 128):
        block = x[start : start + 128]
        scale = max(np.abs(block).max(), 1e-4) / 448
        if ue8m0:
            scale = 2.0 ** np.ceil(np.log2(scale))
        codes = e4m3_codes()
        away = np.abs(np.abs(block / scale)[:, None] - codes[None])
        lower = away.argmin(1)
        upper = np.minimum(lower + 1, len(codes) - 1)
        at = np.arange(len(block))
        tie = (away[at, lower] == away[at, upper]) & (lower % 2 == 1)
        nearest = codes[np.where(tie, upper, lower)]
        back[start : start + 128] = np.copysign(nearest * scale, block)
        scales.append(scale)
    return np.array(scales), back


@pytest.mark.parametrize("wire", FP8)
@pytest.mark.parametrize("hidden", [1, 7, 127, 128, 130, 512, 700])
def test_the_twin_is_the_formula(hidden: int, wire: WireFormat) -> None:
    x = rows(5, hidden, hidden)
    x[3] = 0
    q = quantise(x, wire)
    assert q.values.dtype == torch.float8_e4m3fn and q.values.shape == x.shape
    scale = q.scales
    if wire is WireFormat.FP8_UE8M0:
        assert scale.dtype == torch.int32 and scale.shape == (5, -(-hidden // 512))
        scale = unpack_exponents(scale, -(-hidden // 128))
    back = dequantise(q.values, q.scales, q.scale_format, torch.float32)
    for row, got_scale, got in zip(x.double().numpy(), scale.numpy(), back.numpy(), strict=True):
        want_scale, want = by_formula(row, wire is WireFormat.FP8_UE8M0)
        np.testing.assert_allclose(got_scale, want_scale, rtol=1e-6)
        off = np.abs(got - want) > 1e-6 * np.abs(want)
        if wire is WireFormat.FP8_UE8M0:  # division by a power of two is exact
            assert not off.any()
        else:  # what lies in the middle of two codes may go either way in fp32
            step = np.abs(want) / 8 + want_scale.max() * 2.0**-9
            assert off.sum() <= 1 + hidden / 100 and (np.abs(got - want) <= step).all()
    assert not back[3].any()


@pytest.mark.parametrize("wire", FP8)
def test_zeros_tiny_and_huge(wire: WireFormat) -> None:
    x = torch.tensor([[0.0], [1e-30], [-3e38], [448.0], [1e-4]]).expand(5, 130).contiguous()
    q = quantise(x, wire)
    back = dequantise(q.values, q.scales, q.scale_format, torch.float32)
    assert not back[:2].any(), "below the floor of 1e-4 / 448 nothing is left"
    assert torch.allclose(back[2:], x[2:], rtol=1 / 16, atol=0)
    largest = q.values[2:].float().abs().amax(1)
    # Scales that are powers of two leave up to half of the range unused.
    assert (largest == 448).all() if wire is WireFormat.FP8 else (largest > 223).all()


@pytest.mark.parametrize("wire", FP8)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_block_with_no_number_in_it_is_nan_throughout(bad: float, wire: WireFormat) -> None:
    x = torch.ones(2, 300)
    x[0, 200] = bad
    q = quantise(x, wire)
    back = dequantise(q.values, q.scales, q.scale_format, torch.bfloat16)
    assert back[0, 128:256].isnan().all()
    assert back[0, :128].eq(1).all() and back[0, 256:].eq(1).all() and back[1].eq(1).all()


@pytest.mark.parametrize("form", [f for f in ScaleFormat if f is not ScaleFormat.NONE])
@pytest.mark.parametrize("lead", [(), (3,)])
def test_all_four_formats_of_scales_are_read(form: ScaleFormat, lead: tuple[int, ...]) -> None:
    """Rows [N, D] and masked rows [e, M, D]; columns: the dimension before the last is dense."""
    packed = form in (ScaleFormat.UE8M0_ROW, ScaleFormat.UE8M0_COLUMN)
    wire = WireFormat.FP8_UE8M0 if packed else WireFormat.FP8
    x = rows(6 * (lead or (1,))[0], 650)
    q = quantise(x, wire)
    want = dequantise(q.values, q.scales, q.scale_format, torch.bfloat16)
    values, scales = q.values.view(*lead, 6, 650), q.scales.view(*lead, 6, -1)
    if form in (ScaleFormat.F32_COLUMN, ScaleFormat.UE8M0_COLUMN):
        scales = scales.transpose(-1, -2).contiguous().transpose(-1, -2)
        assert scales.stride(-2) == 1
    got = dequantise(values, scales, form, torch.bfloat16)
    assert got.is_contiguous() and torch.equal(got, want.view(got.shape))


def test_rows_without_scales_are_refused() -> None:
    q = quantise(rows(1, 8), WireFormat.FP8)
    with pytest.raises(DispatchError, match="scale_format=none"):
        dequantise(q.values, q.scales, ScaleFormat.NONE, torch.bfloat16)
    with pytest.raises(DispatchError, match="wire=model"):
        quantise(rows(1, 8), WireFormat.MODEL)


@given(blocks=st.integers(1, 9), tokens=st.integers(0, 4), data=st.data())
@SMALL_WORK
def test_packed_exponents_come_back(blocks: int, tokens: int, data: st.DataObject) -> None:
    drawn = data.draw(
        st.lists(st.integers(-126, 127), min_size=tokens * blocks, max_size=tokens * blocks)
    )
    scale = torch.tensor(drawn, dtype=torch.float32).exp2().view(tokens, blocks)
    packed = pack_exponents(scale)
    assert packed.shape == (tokens, -(-blocks // 4))
    assert torch.equal(unpack_exponents(packed, blocks), scale)


@given(hidden=st.integers(1, 400), seed=st.integers(0, 99), wire=st.sampled_from(FP8))
@SMALL_WORK
def test_a_row_is_rounded_alone(hidden: int, seed: int, wire: WireFormat) -> None:
    x = rows(5, hidden, seed)
    together, alone = quantise(x, wire), quantise(x[2:3], wire)
    assert torch.equal(together.values[2:3].view(torch.uint8), alone.values.view(torch.uint8))
    assert torch.equal(together.scales[2:3], alone.scales)


# -- the wire ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hidden", "top_k", "wire", "row_bytes"),
    [
        (7168, 8, WireFormat.FP8, 7168 + 32 + 16 + 224),
        (7168, 8, WireFormat.FP8_UE8M0, 7168 + 32 + 16 + 56),
        (131, 3, WireFormat.FP8, 132 + 12 + 8 + 8),
        (131, 3, WireFormat.FP8_UE8M0, 132 + 12 + 8 + 4),
    ],
)
def test_rows_of_bytes(hidden: int, top_k: int, wire: WireFormat, row_bytes: int) -> None:
    form = RowFormat.choose(hidden, top_k, torch.bfloat16, 9, wire)
    assert form.row_bytes == row_bytes
    x = quantise(rows(3, hidden), wire)
    buffer = torch.zeros(3, row_bytes, dtype=torch.uint8)
    written = (
        x.values.view(torch.uint8),
        torch.rand(3, top_k),
        torch.arange(3 * top_k, dtype=torch.int16).view(3, top_k),
        x.scales,
    )
    for part, value in zip(form.split(buffer), written, strict=True):
        part.copy_(value)
    for part, value in zip(form.split(buffer), written, strict=True):
        assert torch.equal(part, value)


PADDED = partial(CollectiveDispatcher, eager_bytes=1 << 30)  # where a bound is agreed
DISPATCHERS = (CollectiveDispatcher, PADDED, AllGatherDispatcher)


@pytest.mark.parametrize("kind", DISPATCHERS, ids=["exact", "padded", "allgather"])
@given(data=st.data())
@SMALL_WORK
def test_any_work_equals_the_slow_twin(
    world: World, kind: Callable[..., Dispatcher], data: st.DataObject
) -> None:
    num_ranks, seed = data.draw(st.sampled_from([2, 3, 4])), data.draw(st.integers(0, 10**6))
    wire = data.draw(st.sampled_from(FP8))
    placement = random_placement(8, num_ranks, data.draw(st.integers(0, 9)), seed)
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    hidden = data.draw(st.one_of(st.integers(1, 9), st.sampled_from([127, 128, 129, 514, 640])))
    config = fp8_config(config_for(placement, dtype, hidden, data.draw(st.integers(1, 4))), wire)
    tokens = data.draw(st.lists(st.integers(0, 6), min_size=num_ranks, max_size=num_ranks))
    bound = data.draw(st.none() | st.integers(max(tokens), max(tokens) + 3))
    form = data.draw(st.sampled_from(list(CombineForm)))
    case = make_case(
        config, placement, tokens, seed, masked=data.draw(st.sampled_from([0.0, 0.4, 1.1]))
    )
    wanted = expected(case, form, wire)
    exact = form is CombineForm.PAIRS or kind is not AllGatherDispatcher
    # Reduce-scatter rounds each addition to the model dtype.
    tolerance = 0.0 if exact else 0.2

    def body(group: EPGroup) -> list[str]:
        d = kind(group, config, combine_form=form)
        d.set_step_bound(bound)
        return differences(d, case, group.rank, tolerance, wanted)

    assert world(num_ranks, body) == [[]] * num_ranks


@pytest.mark.parametrize("wire", FP8)
def test_one_rank_passes_rows_through(wire: WireFormat) -> None:
    placement = random_placement(8, 1, 3, 0)
    config = fp8_config(config_for(placement, hidden=130), wire)
    case = make_case(config, placement, [5], 0, masked=0.3)
    d = LocalDispatcher(EPGroup.single(), config)
    sent = case.rows(0, wire)
    assert isinstance(sent, Fp8Tokens)
    got = d.dispatch_finish(d.dispatch_start(sent, case.slots[0], case.weights[0]))
    assert got.x is sent.values and got.scales is sent.scales
    assert got.scale_format is sent.scale_format
    assert differences(d, case, 0) == []


def test_a_wrong_scale_is_found(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: one rank's scales are off by a factor."""
    placement = random_placement(4, 2, 0, 0)
    config = fp8_config(config_for(placement, hidden=130), WireFormat.FP8)
    case = make_case(config, placement, [3, 3], 0)
    start = CollectiveDispatcher.dispatch_start

    def wrong(self: CollectiveDispatcher, x: Fp8Tokens, *more: torch.Tensor) -> object:
        return start(self, replace(x, scales=x.scales * (2 if self.group.rank else 1)), *more)

    monkeypatch.setattr(CollectiveDispatcher, "dispatch_start", wrong)
    found = world(2, lambda g: differences(CollectiveDispatcher(g, config), case, g.rank))
    assert any("received.scales" in line for line in found[0])


def test_pairs_are_bitwise_equal_for_every_degree(world: World) -> None:
    """The same 20 tokens over 1 to 8 ranks, with copies, chunked in two, by each backend."""
    experts, total, hidden = 12, 20, 200
    x = rows(total, hidden, 5)
    g = torch.Generator().manual_seed(3)
    ids = torch.rand(total, experts, generator=g).argsort(1)[:, :4]
    weights = torch.rand(total, 4, generator=g)
    for wire in WireFormat:
        results = []
        for num_ranks, redundant, kind in (
            (1, 0, LocalDispatcher),
            (1, 5, LocalDispatcher),
            (2, 2, CollectiveDispatcher),
            (3, 3, AllGatherDispatcher),
            (4, 12, PADDED),
            (4, 0, AllGatherDispatcher),
            (8, 4, CollectiveDispatcher),
        ):
            placement = random_placement(experts, num_ranks, redundant, num_ranks + redundant)
            copies = torch.from_numpy(placement.replica_count[0].copy())[ids]
            turn = torch.arange(total)[:, None] % copies
            slots = torch.from_numpy(placement.logical_to_physical[0].copy())[ids, turn].int()
            config = fp8_config(config_for(placement, hidden=hidden, top_k=4), wire)
            home = torch.zeros(total, hidden)
            for chunk in (slice(0, 7), slice(7, total)):
                numbers = torch.arange(total)[chunk]
                parts = [numbers[numbers % 5 % num_ranks == r] for r in range(num_ranks)]
                case = CheckCase(
                    [x[p] for p in parts],
                    [slots[p] for p in parts],
                    [weights[p] for p in parts],
                    placement,
                )
                if kind is LocalDispatcher:
                    got = [run_case(kind(EPGroup.single(), config), case, 0)[1]]
                else:

                    def body(group: EPGroup, config=config, case=case, kind=kind) -> torch.Tensor:
                        return run_case(kind(group, config), case, group.rank)[1]

                    got = world(num_ranks, body)
                for p, result in zip(parts, got, strict=True):
                    home[p] = result
            results.append(home)
        assert results[0].abs().sum() > 0
        assert all(torch.equal(results[0], other) for other in results[1:]), wire


def refusals() -> list[tuple[WireFormat, object, str]]:
    x = rows(2, 130)
    good = {wire: quantise(x, wire) for wire in FP8}
    f32, packed = good[WireFormat.FP8], good[WireFormat.FP8_UE8M0]
    return [
        (WireFormat.MODEL, f32, "FP8 rows; must be torch.bfloat16, as wire=model"),
        (WireFormat.FP8, x, "torch.bfloat16 rows; must be Fp8Tokens, as wire=fp8"),
        (WireFormat.FP8, packed, "scale_format=ue8m0_row: must be f32_row, as wire=fp8"),
        (WireFormat.FP8_UE8M0, f32, "scale_format=f32_row: must be ue8m0_row, as wire=fp8_ue8m0"),
        (WireFormat.FP8, replace(f32, scales=f32.scales[:, :1]), r"float32 \[2, 2\], as wire=fp8"),
        (WireFormat.FP8, replace(f32, scales=f32.scales[:1]), r"float32 \[1, 2\]; must be"),
        (WireFormat.FP8, replace(f32, scales=f32.scales.double()), "torch.float64"),
        (WireFormat.FP8_UE8M0, replace(packed, scales=packed.scales.long()), "torch.int64"),
        (WireFormat.FP8, replace(f32, values=x), r"x.values: torch.bfloat16 \[2, 130\]"),
        (WireFormat.FP8, replace(f32, values=f32.values[:, :9]), r"float8_e4m3fn \[T, 130\]"),
    ]


@pytest.mark.parametrize("case", range(10))
def test_rows_that_are_not_the_wires_are_refused_by_all(world: World, case: int) -> None:
    """Rank 0 gives them; rank 1 stops at the same layer instead of waiting."""
    wire, given_rows, said = refusals()[case]
    placement = random_placement(4, 2, 0, 0)
    config = fp8_config(config_for(placement, hidden=130), wire)
    slots, weights = torch.arange(3, dtype=torch.int32).repeat(2, 1), torch.ones(2, 3)
    good = make_case(config, placement, [2, 2], 0).rows(1, wire)
    for kind in DISPATCHERS:
        for bound in (None, 2):

            def body(group: EPGroup, kind=kind, bound=bound) -> None:
                d = kind(group, config)
                d.set_step_bound(bound)
                x = given_rows if group.rank == 0 else good
                d.dispatch_finish(d.dispatch_start(x, slots, weights))

            mine, theirs = world.outcomes(2, body)
            assert type(mine) is DispatchError
            with pytest.raises(DispatchError, match=said):
                raise mine
            assert isinstance(theirs, PeerError)
    alone = LocalDispatcher(EPGroup.single(), config)
    with pytest.raises(DispatchError, match=said):
        alone.dispatch_start(given_rows, slots, weights)


# -- bytes ------------------------------------------------------------------------------------


def sent_bytes(
    world: World,
    config: DispatchConfig,
    case: CheckCase,
    form: CombineForm,
    bound: int | None = None,
    eager: int | None = None,
) -> list[tuple[int, int, int]]:
    """(dispatch, combine, all) of each rank, for one layer."""

    def body(group: EPGroup) -> tuple[int, int, int]:
        d = CollectiveDispatcher(group, config, combine_form=form, eager_bytes=eager)
        d.set_step_bound(bound)
        rank = group.rank
        handle = d.dispatch_start(
            case.rows(rank, config.wire), case.slots[rank], case.weights[rank]
        )
        got: Received = d.dispatch_finish(handle)
        pairs = int((got.slots >= 0).sum())
        y = torch.zeros(pairs if form is CombineForm.PAIRS else len(got.x), config.hidden_size)
        d.combine_start(handle, y.to(config.dtype))
        d.combine_finish(handle)
        return d.stats.dispatch_bytes, d.stats.combine_bytes, d.stats.bytes_sent

    return world(len(case.xs), body)


@pytest.mark.parametrize("form", list(CombineForm))
@pytest.mark.parametrize("wire", list(WireFormat))
@pytest.mark.parametrize(
    ("hidden", "experts", "tokens"),
    [(7168, 64, [32, 1, 0, 64, 7, 32, 32, 9]), (2048, 64, [32] * 8), (2048, 16, [1, 0, 2, 1])],
)
def test_exact_rows_are_within_two_percent_of_the_ideal(
    world: World,
    hidden: int,
    experts: int,
    tokens: list[int],
    wire: WireFormat,
    form: CombineForm,
) -> None:
    num_ranks, top_k = len(tokens), 8
    placement = random_placement(experts, num_ranks, 8, 1)
    config = fp8_config(config_for(placement, hidden=hidden, top_k=top_k), wire)
    case = make_case(config, placement, tokens, 2, masked=0.05)
    sent = sent_bytes(world, config, case, form)
    ideals = [ideal_bytes(config, s, rank, num_ranks, form) for rank, s in enumerate(case.slots)]
    width = 2 if wire is WireFormat.MODEL else 1
    scale = {WireFormat.MODEL: 0, WireFormat.FP8: hidden // 32}.get(wire, hidden // 128)
    for rank, ((dispatch, combine, total), ideal) in enumerate(zip(sent, ideals, strict=True)):
        assert total == dispatch + combine
        owners = [
            {s // placement.num_local_experts for s in row if s >= 0} - {rank}
            for row in case.slots[rank].tolist()
        ]
        away = sum(len(o) for o in owners)
        assert ideal.dispatch == away * (hidden * width + scale + top_k * (2 + 4))
        assert dispatch == ideal.dispatch + 2 * (num_ranks - 1), "hidden % 512 == 0: no padding"
        if away:
            assert dispatch <= 1.02 * ideal.dispatch
    # What comes home to some is what others send.
    assert sum(c for _, c, _ in sent) == sum(ideal.combine for ideal in ideals)


@pytest.mark.parametrize("wire", list(WireFormat))
@pytest.mark.parametrize("hidden", [7, 131, 514])
def test_padded_and_ragged_rows_have_the_bytes_of_the_formula(
    world: World, hidden: int, wire: WireFormat
) -> None:
    placement = random_placement(8, 4, 4, 2)
    config = fp8_config(config_for(placement, hidden=hidden), wire)
    case = make_case(config, placement, [5, 0, 8, 1], 4, masked=0.2)
    values = hidden * (2 if wire is WireFormat.MODEL else 1)
    row_bytes = -(-values // 4) * 4 + 12 + 8 + scale_bytes(hidden, wire)
    exact = sent_bytes(world, config, case, CombineForm.SUMMED)
    padded = sent_bytes(world, config, case, CombineForm.SUMMED, bound=9, eager=1 << 30)
    beyond = sent_bytes(world, config, case, CombineForm.SUMMED, bound=9, eager=0)
    usual = sent_bytes(world, config, case, CombineForm.SUMMED, bound=9)
    for rank in range(4):
        ideal = ideal_bytes(config, case.slots[rank], rank, 4, CombineForm.SUMMED)
        per_row = (
            values
            + 18
            + {
                WireFormat.MODEL: 0,
                WireFormat.FP8: 4 * -(-hidden // 128),
                WireFormat.FP8_UE8M0: -(-hidden // 128),
            }[wire]
        )
        assert ideal.dispatch % per_row == 0
        assert exact[rank][0] == 2 * 3 + ideal.dispatch // per_row * row_bytes
        assert padded[rank][0] == 3 * (9 + 1) * row_bytes
        assert beyond[rank] == exact[rank] and padded[rank][1] == exact[rank][1]
        assert usual[rank] == (padded if wire is WireFormat.MODEL else exact)[rank]


def test_the_bytes_of_an_allgather(world: World) -> None:
    placement = random_placement(8, 3, 4, 2)
    config = fp8_config(config_for(placement, hidden=131), WireFormat.FP8)
    case = make_case(config, placement, [5, 0, 3], 4)

    def body(group: EPGroup) -> tuple[int, int, int]:
        d = AllGatherDispatcher(group, config)
        run_case(d, case, group.rank)
        return d.stats.dispatch_bytes, d.stats.combine_bytes, d.stats.bytes_sent

    there = 2 * (5 + 1) * (132 + 12 + 8 + 8) + 2 * 2
    back = 2 * 5 * 3 * 131 * 2
    assert world(3, body) == [(there, back, there + back)] * 3


def test_nothing_to_send_costs_only_counts() -> None:
    placement = random_placement(8, 2, 0, 0)
    config = fp8_config(config_for(placement), WireFormat.FP8)
    nothing = torch.zeros(0, 3, dtype=torch.int32)
    masked = torch.full((4, 3), -1, dtype=torch.int32)
    for slots in (nothing, masked):
        assert ideal_bytes(config, slots, 0, 2, CombineForm.PAIRS).total == 0
