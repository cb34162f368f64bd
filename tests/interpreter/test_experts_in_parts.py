"""ROUTED rows in parts, and with room for the pairs that are there: the bits are those of all rows
at once with room for all that could be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dispatch.base import CombineForm, Layout, Received, ScaleFormat, WireFormat
from dispatch.fp8 import quantise
from models.deepseek.experts import run_experts
from models.deepseek.fp8 import Fp8Rows, quantise_weight
from models.deepseek.kernels.gpu import triton_dense
from models.deepseek.kernels.gpu.sort_pairs import sort_pairs, sort_pairs_twin
from models.deepseek.kernels.gpu.triton_kernels import TritonKernels

SLOTS, HIDDEN, WIDE, ROWS, PICKS = 3, 144, 40, 7, 2
BF16 = torch.bfloat16
KERNELS = TritonKernels()
# Rows of no pair, of one and of all; slot 1 has one.
ROUTES = torch.tensor(
    [[2, 0], [-1, 2], [-1, -1], [0, 2], [-1, -1], [1, -1], [2, 0]], dtype=torch.int32
)
PAIRS = 8


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weights_of(fp8: bool) -> Any:
    made: Any = (KERNELS.allocate_fp8_experts if fp8 else KERNELS.allocate_experts)(
        SLOTS, HIDDEN, WIDE, BF16
    )
    for slot in range(SLOTS):
        shapes = (WIDE, HIDDEN), (WIDE, HIDDEN), (HIDDEN, WIDE)
        parts = [normal(*s, seed=3 * slot + i) * 0.1 for i, s in enumerate(shapes)]
        if fp8:
            made.store_fp8(slot, *(Fp8Rows.of(*quantise_weight(p, ue8m0=False)) for p in parts))
        else:
            made.store(slot, *(part.to(BF16) for part in parts))
    return made


def arrived(wire: WireFormat, column: bool) -> Received:
    x = normal(ROWS, HIDDEN, seed=99).to(BF16)
    gains = normal(ROWS, PICKS, seed=7).abs().masked_fill(ROUTES < 0, 0.0)
    counts = torch.tensor([int(ROUTES.eq(slot).sum()) for slot in range(SLOTS)])
    if wire is WireFormat.MODEL:
        return Received(Layout.ROUTED, x, ROUTES, gains, counts)
    sent = quantise(x, wire)
    scales, form = sent.scales, sent.scale_format
    if column:
        scales, form = scales.t().contiguous().t(), ScaleFormat.F32_COLUMN
    return Received(Layout.ROUTED, sent.values, ROUTES, gains, counts, scales, form)


@pytest.mark.parametrize(
    ("fp8", "wire", "column"),
    [
        (True, WireFormat.MODEL, False),
        (True, WireFormat.FP8, True),
        (False, WireFormat.FP8, False),
    ],
)
def test_the_bits_are_the_same(
    monkeypatch: pytest.MonkeyPatch, fp8: bool, wire: WireFormat, column: bool
) -> None:
    weights, rows = weights_of(fp8), arrived(wire, column)
    places: list[int] = []

    def counted(*args: Any, **more: Any) -> Any:
        layout = sort_pairs(*args, **more)
        places.append(layout.pair_rows.shape[0])
        return layout

    monkeypatch.setattr(triton_dense, "sort_pairs", counted)
    there = ROUTES >= 0
    y, index = run_experts(KERNELS, rows, weights, CombineForm.PAIRS, BF16)
    assert index is not None and places == [ROWS * PICKS]
    want = y[index[there]]
    whole, _ = run_experts(KERNELS, rows, weights, CombineForm.SUMMED, BF16)
    for known, most in ((None, 5), (PAIRS, 5), (PAIRS, PAIRS)):
        places.clear()
        told: Any = {"received": replace(rows, num_pairs=known), "most_pairs": most, "dtype": BF16}
        got, none = run_experts(KERNELS, weights=weights, form=CombineForm.SUMMED, **told)
        assert none is None and torch.equal(got, whole), (known, most)
        y, index = run_experts(KERNELS, weights=weights, form=CombineForm.PAIRS, **told)
        assert index is not None and index.dtype == torch.int64
        assert torch.equal(index >= 0, there) and torch.equal(y[index[there]], want)
        if known == most:  # all at once, in no more room than there is need for
            assert places == [PAIRS] * 2
        else:  # rows are not parted
            assert places == [4, 4, 4, 2] * 2


def test_room_for_pairs_that_are_known() -> None:
    for alignment in (1, 4):
        got = sort_pairs(ROUTES, SLOTS, alignment, num_pairs=PAIRS)
        want = sort_pairs_twin(ROUTES, SLOTS, alignment)
        size = got.pair_rows.shape[0]
        assert PAIRS <= size <= want.pair_rows.shape[0] and size % alignment == 0
        assert torch.equal(got.index, want.index) and torch.equal(got.starts, want.starts)
        assert torch.equal(got.pair_rows, want.pair_rows[:size])
    none = torch.full((3, 2), -1, dtype=torch.int32)
    assert sort_pairs(none, SLOTS, num_pairs=0).pair_rows.shape == (0,)
    rows = Received(
        Layout.ROUTED, normal(3, HIDDEN).to(BF16), none, torch.zeros(3, 2),
        torch.zeros(SLOTS, dtype=torch.int64), num_pairs=0,
    )  # fmt: skip
    for fp8 in (False, True):
        summed, _ = run_experts(KERNELS, rows, weights_of(fp8), CombineForm.SUMMED, BF16)
        assert summed.shape == (3, HIDDEN) and not summed.any()
