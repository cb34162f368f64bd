"""The adapter of DeepEP's second API on both emulations: rows there and back, against the twin.
With processes: tests/dist/test_dispatch_conformance.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_threads import gloo_threads
from torch import Tensor

from dispatch import deepep_v2
from dispatch import deepep_v2_limits as limits
from dispatch.base import (
    CombineForm,
    DispatchConfig,
    DispatchError,
    Fp8Tokens,
    HandleError,
    Layout,
    PeerError,
    Received,
    ScaleFormat,
    WireFormat,
)
from dispatch.deepep_v2 import ElasticDispatcher, EmulatedElasticDispatcher, EmulatedEPDispatcher
from dispatch.fp8 import dequantise
from dispatch.selfcheck import CheckCase, expected, expert_output, make_case, random_placement
from ep.group import EPGroup
from ep.placement import ExpertPlacement
from models.deepseek.experts import run_experts
from models.deepseek.kernels.torch_kernels import TorchExpertWeights, TorchKernels

KINDS = pytest.mark.parametrize("kind", [EmulatedElasticDispatcher, EmulatedEPDispatcher])
FORMS = pytest.mark.parametrize(
    ("expand", "cpu_sync"), [(False, True), (False, False), (True, True), (True, False)]
)
HIDDEN, TOP_K, EXPERTS, MOST = 256, 4, 12, 8
CONFIG = DispatchConfig(HIDDEN, TOP_K, EXPERTS, MOST, torch.bfloat16, False)


def case_of(config: DispatchConfig, size: int, seed: int = 0, **options: Any) -> CheckCase:
    placement = random_placement(config.num_physical_experts, size, 0, seed)
    tokens = [(5, 0, MOST, 3)[(rank + seed) % 4] for rank in range(size)]
    return make_case(config, placement, tokens, seed, **options)


def start(d: ElasticDispatcher, case: CheckCase, rank: int) -> Any:
    rows = case.rows(rank, d.config.wire)
    return d.dispatch_start(rows, case.slots[rank], case.weights[rank])


def experts(case: CheckCase, rank: int, received: Received, valid: Tensor) -> Tensor:
    """What the rows `valid` [N, K] or [N, 1] come to, each weighted; x in the model dtype."""
    placement = case.placement
    held = torch.from_numpy(placement.physical_to_logical[0].copy())
    mine = held[list(placement.slots_of(rank))]
    y = torch.zeros(received.x.shape)
    for k in range(valid.shape[1]):
        rows = valid[:, k].nonzero().squeeze(1)
        ids = mine[received.slots[rows, k].to(torch.int64)]
        y[rows] += expert_output(received.x[rows], ids).float() * received.weights[rows, k, None]
    return y.to(torch.bfloat16)


@KINDS
@FORMS
def test_rows_come_in_the_stated_layout(
    kind: type[ElasticDispatcher], expand: bool, cpu_sync: bool
) -> None:
    case = case_of(CONFIG, 2, masked=0.2)
    wanted, homes = expected(case, CombineForm.SUMMED)

    def body(group: EPGroup) -> None:
        rank = group.rank
        d = kind(group, CONFIG, expand=expand, cpu_sync=cpu_sync, combine_form=CombineForm.SUMMED)
        assert d.graph_safe is not cpu_sync and d.notes == []
        handle = start(d, case, rank)
        got = d.dispatch_finish(handle)
        want = wanted[rank]
        assert torch.equal(got.counts, want.counts) and got.counts.dtype == torch.int64
        assert got.slots.dtype == torch.int32 and got.weights.dtype == torch.float32
        valid = got.slots >= 0
        local = EXPERTS // 2
        if expand:
            assert got.layout is Layout.EXPANDED and got.weights.shape == (got.x.shape[0], 1)
            assert got.starts is not None
            for slot in range(local):
                begin, rows = int(got.starts[slot]), int(got.counts[slot])
                assert begin % deepep_v2.ALIGNMENT == 0
                assert (got.slots[begin : begin + rows] == slot).all()
            assert int(valid.sum()) == int(want.counts.sum())
            most = limits.expanded_rows(2, MOST, TOP_K, local, deepep_v2.ALIGNMENT)
        else:
            assert got.layout is Layout.ROUTED and got.starts is None
            keys = [tuple(x) for x in torch.cat((got.weights, got.slots), 1)[valid.any(1)].tolist()]
            assert sorted(keys) == sorted(
                tuple(x) for x in torch.cat((want.weights, want.slots), 1).tolist()
            )
            most = 2 * MOST
        assert (got.x.shape[0] == most) is (not cpu_sync)
        assert (got.weights[~valid] == 0).all()
        assert got.x[~valid.any(1)].isnan().all()  # padding is poison
        assert got.x[valid.any(1)].isfinite().all()
        d.combine_start(handle, experts(case, rank, got, valid))
        home = d.combine_finish(handle)
        assert home.dtype == torch.float32
        torch.testing.assert_close(home, homes[rank], rtol=0.02, atol=0.1)
        d.close()

    gloo_threads(2, body)


@KINDS
def test_a_reader_of_padding_is_caught(kind: type[ElasticDispatcher]) -> None:
    """Wrong on purpose: segments that begin a row early, or rows that are all taken as valid."""
    case = case_of(CONFIG, 2)

    def body(group: EPGroup) -> list[bool]:
        homes = []
        for expand in (True, False):
            d = kind(group, CONFIG, expand=expand, cpu_sync=False)
            handle = start(d, case, group.rank)
            got = d.dispatch_finish(handle)
            mean = got.x.float().mean(0).to(torch.bfloat16)
            d.combine_start(handle, got.x.roll(1, 0) if expand else mean.expand(got.x.shape))
            homes.append(d.combine_finish(handle))
        return [bool(home.isnan().any()) for home in homes]

    assert gloo_threads(2, body)[0] == [True, True]


@KINDS
@pytest.mark.parametrize("wire", list(WireFormat))
@FORMS
def test_each_weight_is_applied_once_by_real_experts(
    kind: type[ElasticDispatcher], wire: WireFormat, expand: bool, cpu_sync: bool
) -> None:
    config = replace(CONFIG, wire=wire, num_physical_experts=6, top_k=2)
    placement = ExpertPlacement.trivial(1, 6, 2)
    case = make_case(config, placement, [4, 2], 0, masked=0.1)
    generator = torch.Generator().manual_seed(0)
    everyone = TorchExpertWeights(6, HIDDEN, 8, torch.bfloat16)
    everyone.data.copy_(torch.randn(everyone.data.shape, generator=generator) / 32)

    def dense(rank: int) -> Tensor:
        total, rows = torch.zeros(case.xs[rank].shape), case.rows(rank, wire)
        if isinstance(rows, Fp8Tokens):
            rows = dequantise(rows.values, rows.scales, rows.scale_format, torch.bfloat16)
        for t, k in (case.slots[rank] >= 0).nonzero().tolist():
            weights = everyone.fetch(int(case.slots[rank][t, k]))
            gate, up, down = (w.float() for w in weights)
            row = rows[t].float()
            y = down @ (torch.nn.functional.silu(gate @ row) * (up @ row))
            total[t] += case.weights[rank][t, k] * y
        return total

    def body(group: EPGroup) -> float:
        rank, local = group.rank, 3
        mine = TorchExpertWeights(local, HIDDEN, 8, torch.bfloat16)
        mine.data.copy_(everyone.data[rank * local : (rank + 1) * local])
        d = kind(group, config, expand=expand, cpu_sync=cpu_sync)
        handle = start(d, case, rank)
        received = d.dispatch_finish(handle)
        columns = {
            WireFormat.MODEL: ScaleFormat.NONE,
            WireFormat.FP8: ScaleFormat.F32_COLUMN,
            WireFormat.FP8_UE8M0: ScaleFormat.UE8M0_COLUMN,
        }
        assert received.scale_format is columns[wire]
        y, index = run_experts(TorchKernels(), received, mine, d.combine_form, torch.bfloat16)
        d.combine_start(handle, y, index)
        home, want = d.combine_finish(handle), dense(rank)
        return float((home - want).norm() / want.norm())

    assert max(gloo_threads(2, body)) < 0.01


@KINDS
def test_sent_bytes_are_the_formula(kind: type[ElasticDispatcher]) -> None:
    config = replace(CONFIG, hidden_size=7168, top_k=8, wire=WireFormat.FP8)
    case = case_of(config, 2)

    def body(group: EPGroup) -> Any:
        d = kind(group, config, expand=group.rank == 0)  # each rank's own choice
        handle = start(d, case, group.rank)
        received = d.dispatch_finish(handle)
        d.combine_start(handle, torch.zeros(received.x.shape, dtype=torch.bfloat16))
        d.combine_finish(handle)
        return d.stats

    stats = gloo_threads(2, body)
    api = kind._load()[1]
    for rank, mine in enumerate(stats):
        owner = case.slots[rank].div(EXPERTS // 2, rounding_mode="floor")
        assert mine.rows_sent_to_rank == [int((owner == r).any(1).sum()) for r in range(2)]
        rows = mine.rows_sent_to_rank[1 - rank]
        ideal = 7168 + 4 * 56 + 8 * (4 + 4)
        counts = 8 * (1 + EXPERTS // 2)
        row = limits.row_bytes(api, 7168, 4 * 56, 8, True)
        assert mine.dispatch_bytes == rows * row + counts and row <= 1.02 * ideal
        back = stats[1 - rank].rows_sent_to_rank[rank]
        assert mine.combine_bytes == back * limits.row_bytes(api, 2 * 7168, 0, 8, False)
        assert mine.bytes_sent == mine.dispatch_bytes + mine.combine_bytes and mine.calls == 1


@KINDS
def test_what_is_refused_before_anything_is_sent(kind: type[ElasticDispatcher]) -> None:
    with pytest.raises(DispatchError, match="sums at home; must be SUMMED"):
        kind(EPGroup.single(), CONFIG, combine_form=CombineForm.PAIRS)
    with pytest.raises(DispatchError, match="alignment=0"):
        kind(EPGroup.single(), CONFIG, alignment=0)
    d = kind(EPGroup.single(), CONFIG)
    x, slots = torch.zeros(3, HIDDEN).bfloat16(), torch.arange(4, dtype=torch.int32).repeat(3, 1)
    w = torch.ones(3, TOP_K)
    for change, said in (
        ({"x": x.float()}, "must be torch.bfloat16"),
        ({"slots": slots + 10}, "slots: 10..13; valid are -1"),
        ({"weights": w.double()}, "weights"),
    ):
        given = {"x": x, "slots": slots, "weights": w, **change}
        with pytest.raises(DispatchError, match=said):
            d.dispatch_start(**given)
    big = torch.zeros(MOST + 1, HIDDEN).bfloat16()
    many = torch.zeros(MOST + 1, TOP_K)
    with pytest.raises(DispatchError, match="at most max_tokens_per_rank=8"):
        d.dispatch_start(big, many.to(torch.int32), many)
    handle = d.dispatch_start(x, slots, w)
    with pytest.raises(HandleError, match="next call is dispatch_finish"):
        d.combine_start(handle, x)
    received = d.dispatch_finish(handle)
    with pytest.raises(DispatchError, match=r"y: \[2, 256\]; must be \[3, 256\]"):
        d.combine_start(handle, x[:2])
    with pytest.raises(DispatchError, match="index: only the PAIRS form"):
        d.combine_start(handle, x, received.slots.long())
    d.combine_start(handle, received.x)
    assert torch.equal(d.combine_finish(handle), torch.zeros(3, HIDDEN))
    with pytest.raises(HandleError):
        d.combine_finish(handle)
    with pytest.raises(DispatchError, match="cannot leave ranks out"):
        d.set_mask(0, False)
    assert d.active_mask() is None
    d.close()
    d.close()
    with pytest.raises(DispatchError, match="is closed"):
        d.dispatch_start(x, slots, w)


@KINDS
def test_three_batches_are_in_flight(kind: type[ElasticDispatcher]) -> None:
    """What 2.5 defers is fetched before the next call writes over it."""
    cases = [case_of(CONFIG, 2, seed) for seed in range(3)]
    homes = [expected(case, CombineForm.SUMMED)[1] for case in cases]

    def body(group: EPGroup) -> None:
        rank = group.rank
        d = kind(group, CONFIG, expand=True)
        handles = [start(d, case, rank) for case in cases]
        for handle, case in reversed([*zip(handles, cases, strict=True)]):
            got = d.dispatch_finish(handle)
            d.combine_start(handle, experts(case, rank, got, got.slots >= 0))
        for handle, home in zip(handles, homes, strict=True):
            torch.testing.assert_close(d.combine_finish(handle), home[rank], rtol=0.02, atol=0.1)

    gloo_threads(2, body)


def test_a_caller_may_write_to_its_slots_meanwhile() -> None:
    """The library holds what it was given; that is a copy."""
    d = EmulatedEPDispatcher(EPGroup.single(), replace(CONFIG, num_physical_experts=4))
    x = torch.ones(2, HIDDEN).bfloat16()
    slots = torch.arange(4, dtype=torch.int32).repeat(2, 1)
    handle = d.dispatch_start(x, slots, torch.ones(2, TOP_K))
    slots.fill_(-1)
    received = d.dispatch_finish(handle)
    d.combine_start(handle, received.x)
    assert torch.equal(d.combine_finish(handle), x.float())


@KINDS
def test_a_rank_that_is_gone_is_named(kind: type[ElasticDispatcher]) -> None:
    case = case_of(CONFIG, 2)

    def body(group: EPGroup) -> str:
        d = kind(group, CONFIG)
        if group.rank == 1:
            d._buffer._exchange.close()
            return "gone"
        try:
            d.dispatch_finish(start(d, case, 0))
        except PeerError as error:
            return str(error)
        return "nothing"

    said, _ = gloo_threads(2, body, leaving=(1,))
    assert f"dispatcher '{kind.name}'" in said and "rank 1" in said


def test_an_engine_generates_over_it(tmp_path: Path) -> None:
    """Whole layers through a buffer of one rank: the tokens that need no dispatcher at all."""
    from models.deepseek.random_checkpoint import write_random_checkpoint
    from models.deepseek.random_families import family_config
    from moeserve.llm import LLM, SamplingParams

    shape = {"hidden_size": HIDDEN, "num_hidden_layers": 2, "num_nextn_predict_layers": 0}
    config = family_config("v3", "tiny", **shape)
    folder = write_random_checkpoint(tmp_path / "wide", config, dtype=torch.bfloat16)
    tokens = []
    for dispatch in ("auto", "deepep_v2"):
        with LLM(
            folder,
            ep=1,
            kv_tokens=1024,
            max_model_len=128,
            threads=1,
            dispatch=dispatch,
            emulate=dispatch != "auto",
            dtype="bfloat16",
            deterministic=False,
            token_budget=32,
        ) as llm:
            prompts = [list(range(5, 45)), [7, 8, 9]]
            outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=6))
            tokens.append([out.token_ids for out in outputs])
    assert [len(t) for t in tokens[0]] == [6, 6]
    assert [t[0] for t in tokens[0]] == [t[0] for t in tokens[1]]
