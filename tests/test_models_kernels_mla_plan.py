"""How attention's work is cut and what room is made for it: on the host, without a kernel."""

from __future__ import annotations

import sys
import warnings
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_cuda import CUDA, fake_cuda
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.deepseek.kernels.gpu import triton_attention
from models.deepseek.kernels.gpu.mla_decode_config import choose_config, fill
from models.deepseek.kernels.gpu.mla_flashinfer import FlashInferMla, flat_metadata
from models.deepseek.kernels.gpu.mla_plan import (
    CAPTURED_WORKSPACE,
    DETERMINISTIC,
    TILE,
    WORKSPACE,
    ByLoad,
    Cuts,
    DecodePlan,
    Partitions,
    known_lengths,
    part_bytes,
    plan_decode,
)
from models.deepseek.kernels.gpu.triton_attention import TritonAttention
from models.interface import ForwardBatch
from moeserve.device.ladder import MOST_CONTEXT
from moeserve.device.ledger import ATTENTION_PARTS

HEADS, LONGEST = 128, 131072
BLOCK = 64


def decode(lengths: list[int], padding: int = 0) -> ForwardBatch:
    """A row a sequence, of so many positions with itself; then rows of padding."""
    n = len(lengths)
    at = torch.tensor([*(length - 1 for length in lengths), *[-1] * padding])
    starts = torch.arange(n + padding + 1, dtype=torch.int32).clamp(max=n)
    return ForwardBatch(
        token_ids=torch.zeros(n + padding, dtype=torch.int64),
        positions=at.long(),
        slot_mapping=at.long(),
        query_start=starts,
        context_len=(at + 1).int(),
        block_tables=torch.zeros(n + padding, 1, dtype=torch.int32),
        logits_rows=torch.arange(n + padding),
        max_query_len=1,
        max_context_len=max(lengths, default=0),
    )


def cut_rightly(plan: DecodePlan, lengths: list[int], workspace: int, heads: int) -> None:
    """Every row is in one launch, no launch has more units than there is room for, a row's units
    are those of its own length, one after the other."""
    rows = [row for first, last in plan.launches for row in range(first, last)]
    assert rows == list(range(plan.num_rows))
    for (first, last), piece in zip(plan.launches, plan.pieces or (plan,), strict=True):
        starts = piece.work_start.tolist()
        assert starts[-1] <= piece.max_units
        counts = [b - a for a, b in zip(starts, starts[1:], strict=False)]
        assert counts == plan.partitions.parts(lengths[first:last])
        assert max(counts) <= plan.max_parts
        owners = piece.unit_rows[: starts[-1]]
        assert owners.tolist() == [row for row, n in enumerate(counts) for _ in range(n)]
        spans = piece.spans[: starts[-1]].tolist()
        for n, begin, end in zip(lengths[first:last], starts, starts[1:], strict=False):
            borders = [low for low, _ in spans[begin:end]] + [n]
            assert [high for _, high in spans[begin:end]] == borders[1:] and borders[0] == 0
            assert all(low < high for low, high in pairwise(borders)) or n == 0
            assert not any(low % TILE for low in borders[:-1])
        if last - first > 1 and plan.max_parts > 1:
            assert part_bytes(piece.max_units, heads, 512) <= workspace


SHORT, LONG = st.integers(1, 3000), st.integers(1, LONGEST)
CUTS = st.sampled_from(
    [DETERMINISTIC, Partitions(64, 128, 128), Partitions(256, 0, 256), ByLoad(132), ByLoad(3)]
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.one_of(st.just(1), SHORT, LONG), min_size=1, max_size=40),
    st.integers(0, 5),
    CUTS,
    st.sampled_from([16, 128]),
    st.sampled_from([1, 1 << 20, 16 << 20, WORKSPACE]),
    st.integers(0, 5000),
)
def test_room_is_made_for_what_there_can_be(
    lengths: list[int], padding: int, cuts: Cuts, heads: int, workspace: int, slack: int
) -> None:
    batch = decode(lengths, padding)
    every = [*lengths, *[0] * padding]
    total = sum(lengths) + slack
    longest = replace(batch, max_context_len=max(lengths) + slack)
    plans = [
        plan_decode(known, heads, partitions=cuts, workspace=workspace)
        for known in (
            replace(longest, host=batch, total_context=total),
            replace(longest, total_context=total),
            longest,
        )
    ]
    for plan in plans:
        cut_rightly(plan, every, workspace, heads)
    # The more is known the less room there is, in fewer launches.
    if isinstance(cuts, ByLoad):
        assert all(p.max_units <= len(every) + cuts.units for p in plans[0].pieces or plans[:1])
    else:
        assert plans[0].max_units == sum(map(cuts.count, every))
    assert {p.longest for p in plans} == {max(lengths), max(lengths) + slack}
    units, launches = [p.max_units for p in plans], [len(p.launches) for p in plans]
    assert units == sorted(units) and launches == sorted(launches)


def spread(cuts: Cuts, lengths: list[int]) -> float:
    """Positions of the busiest of 132 programs by those of all in the mean: two tiles of heads,
    units in turn, as the kernel takes them."""
    plan = plan_decode(decode(lengths), HEADS, partitions=cuts)
    units = int(plan.work_start[-1])
    size = (plan.spans[:units, 1] - plan.spans[:units, 0]).repeat_interleave(2)
    busy = [int(size[at::132].sum()) for at in range(132)]
    return max(busy) / (sum(busy) / 132)


def test_cut_by_load_a_step_fills_the_gpu_and_merges_little() -> None:
    cuts = fill(HEADS, 132, choose_config(HEADS, 90))
    assert cuts == ByLoad(132)
    for rows, length in ((4, 32768), (8, 4096), (8, 32768), (40, 4096)):
        assert spread(cuts, [length] * rows) < 1.3
    assert spread(DETERMINISTIC, [4096] * 8) > 2
    # One that is far longer than the others does not hold them up.
    assert spread(cuts, [LONGEST] + [4096] * 63) < 1.5
    # As many rows as fill it are not cut at all: nothing is merged.
    for rows, length in ((64, 4096), (128, 4096), (256, 1024), (100, 30000)):
        batch = decode([length] * rows)
        plan = plan_decode(replace(batch, host=batch), HEADS, partitions=cuts)
        assert (plan.max_parts, plan.max_units) == (1, rows)
        assert cuts.parts([length] * rows) == [1] * rows
    # Rows of drafts are rows.
    assert cuts.parts([4096] * 32, rows_each=4) == [1] * 32 != cuts.parts([4096] * 32)
    # A captured step has room without knowing more than its rows.
    captured = replace(decode([1] * 256), max_context_len=LONGEST, total_context=MOST_CONTEXT)
    plan = plan_decode(captured, HEADS, partitions=cuts)
    assert (len(plan.launches), plan.max_units) == (1, 256 + 132)


@pytest.mark.skipif(sys.platform != "linux", reason="triton is built for Linux only")
def test_fast_mode_alone_cuts_by_load(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Cuts] = []

    def planned(*args: Any, **settings: Any) -> DecodePlan:
        found.append(settings["partitions"])
        return plan_decode(*args, **settings)

    monkeypatch.setattr(triton_attention, "plan_decode", planned)
    with warnings.catch_warnings(), fake_cuda() as fake, torch.inference_mode():
        warnings.simplefilter("ignore")
        batch = decode([70, 3000])
        there = {n: x.to(CUDA) for n, x in vars(batch).items() if isinstance(x, Tensor)}
        batch = replace(batch, **there)
        layer = torch.zeros(64, BLOCK, 576, dtype=torch.bfloat16, device=CUDA)
        q = torch.zeros(2, HEADS, 576, dtype=torch.bfloat16, device=CUDA)
        fake.waits.clear()
        for fast in (False, True):
            kernels = TritonAttention(CUDA, fast=fast)
            kernels.latent_attention(q[..., :512], q[..., 512:], layer, batch, 1.0)
        assert fake.waits == []
    assert found == [DETERMINISTIC, ByLoad(132)]


def test_256_rows_of_which_each_may_be_the_longest() -> None:
    """What BENCHMARKS.md says of it."""
    bound = decode([1] * 256)
    bound = replace(bound, max_context_len=LONGEST)
    before = plan_decode(bound, HEADS)
    captured = replace(bound, total_context=MOST_CONTEXT, padding=bound.positions < 0)
    after = plan_decode(captured, HEADS)
    assert (len(before.launches), before.max_units) == (10, 18432)
    assert (len(after.launches), after.max_units) == (1, 3328)
    sizes = before.workspace_bytes(HEADS), after.workspace_bytes(HEADS)
    assert [round(n / 2**20) for n in sizes] == [505, 834]
    assert sizes[0] <= WORKSPACE == ATTENTION_PARTS and sizes[1] <= CAPTURED_WORKSPACE
    # More rows than one launch has room for take two, not one for each few of the longest.
    many = decode([1] * 1024)
    many = replace(
        many, max_context_len=LONGEST, total_context=MOST_CONTEXT, padding=many.positions < 0
    )
    assert [last - first for first, last in plan_decode(many, HEADS).launches] == [1016, 8]
    few = replace(decode([1] * 8), max_context_len=LONGEST, total_context=MOST_CONTEXT)
    assert plan_decode(few, HEADS).max_units == 8 * 72
    # An eager step knows its lengths: one long row among short ones is no reason for more.
    lengths = [LONGEST] + [4096] * 255
    batch = decode(lengths)
    plan = plan_decode(replace(batch, host=batch), HEADS)
    assert (len(plan.launches), plan.max_units) == (1, 72 + 255 * 4)
    full = decode([LONGEST] * 256)
    plan = plan_decode(replace(full, host=full), HEADS)
    assert len(plan.launches) == 10 and sum(p.max_units for p in plan.pieces) == 18432


def test_what_the_host_knows_of_rows() -> None:
    batch = decode([5, 9], padding=2)
    assert known_lengths(batch) is None
    assert known_lengths(replace(batch, host=batch)).tolist() == [5, 9, 0, 0]  # type: ignore[union-attr]
    # Rows behind the last sequence's are padding whatever stands there.
    old = replace(batch, positions=torch.tensor([4, 8, 70, 3]))
    lengths = known_lengths(replace(batch, host=old))
    assert lengths is not None and lengths.tolist() == [5, 9, 0, 0]
    assert old.positions.tolist() == [4, 8, 70, 3]
    empty = decode([])
    plan = plan_decode(replace(empty, host=empty), HEADS)
    assert plan.launches == () and plan.max_units == 0


class Wrapper:
    """FlashInfer 0.7's, of which nothing is computed."""

    planned: dict[str, Any]

    def __init__(self, float_workspace_buffer: Tensor) -> None:
        pass

    def plan(self, *, metadata: dict[str, Tensor], **settings: Any) -> None:
        Wrapper.planned = metadata
        for name in ("qo_indptr", "kv_indptr", "kv_len_arr"):
            metadata[name].tolist()  # it plans on the host

    def run(self, *, query: Tensor, kv_cache: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
        return query[..., :512], query[..., 0].float()


MODULE = SimpleNamespace(
    BatchMLAPagedAttentionWrapper=Wrapper, MLAPlanMetadata=SimpleNamespace(csr=lambda **all_: all_)
)


@pytest.mark.skipif(sys.platform != "linux", reason="triton is built for Linux only")
def test_flashinfer_plans_without_a_wait_where_the_host_knows_lengths() -> None:
    host = decode([70, 3, 200])
    kernels = TritonAttention(CUDA, decode_backends=(FlashInferMla(MODULE),))
    layer = torch.zeros(8, BLOCK, 576, dtype=torch.bfloat16)
    q = torch.zeros(3, HEADS, 576, dtype=torch.bfloat16)
    with warnings.catch_warnings(), fake_cuda() as fake, torch.inference_mode():
        warnings.simplefilter("ignore")
        there = {n: x.to(CUDA) for n, x in vars(host).items() if isinstance(x, Tensor)}
        parts = q[..., :512].to(CUDA), q[..., 512:].to(CUDA), layer.to(CUDA)
        for known in (host, None):
            batch = replace(host, host=known, **there)
            fake.waits.clear()
            for _ in range(2):  # layers
                kernels.latent_attention(*parts, batch, 1.0)
            assert fake.waits == []
            if known is not None:
                assert Wrapper.planned["kv_len_arr"].tolist() == [70, 3, 200]
                assert Wrapper.planned["kv_indptr"].tolist() == [0, 2, 3, 7]
                assert Wrapper.planned["kv_indices"].shape == (7,)
    first, second = kernels.choices
    assert first == "mla decode: flashinfer"
    assert "mla decode: triton" in second and "does not know these lengths" in second


def test_blocks_of_rows_one_after_the_other() -> None:
    tables = [[5, 2, -1, -1], [7, -1, -1, -1], [1, 3, 4, 6], [0, 0, 0, 0]]
    batch = decode([70, 3, 200], padding=1)
    batch = replace(batch, block_tables=torch.tensor(tables, dtype=torch.int32))
    step = SimpleNamespace(
        plan=plan_decode(batch, HEADS), tables=batch.block_tables, lengths=[70, 3, 200, 0]
    )
    found = flat_metadata(step, BLOCK)  # type: ignore[arg-type]
    assert found["kv_indices"].tolist() == [5, 2, 7, 1, 3, 4, 6, 5]
    assert found["kv_indptr"].tolist() == [0, 2, 3, 7, 8]
    assert found["kv_len_arr"].tolist() == [70, 3, 200, 1]
    assert {x.dtype for x in found.values()} == {torch.int32}
