"""The three layouts of received rows give the same expert outputs, row for row."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dispatch.base import CombineForm, Layout, Received, WireFormat
from dispatch.fp8 import dequantise, quantise
from models.deepseek.experts import run_experts
from models.deepseek.kernels.torch_kernels import TorchExpertWeights, TorchKernels

KERNELS = TorchKernels()
SLOTS, WIDTH, HIDDEN = 3, 5, 8
# Row 0 goes to the slots 2 and 0, row 1 to 2, row 2 nowhere, row 3 to 0 and 2: slot 1 gets none.
ROUTES = torch.tensor([[2, 0], [-1, 2], [-1, -1], [0, 2]], dtype=torch.int32)
GAINS = torch.tensor([[0.5, 2.0], [0.0, 3.0], [0.0, 0.0], [1.5, 0.25]])


@pytest.fixture
def weights() -> TorchExpertWeights:
    generator = torch.Generator().manual_seed(0)
    out = TorchExpertWeights(SLOTS, HIDDEN, 4, torch.float32)
    out.data.normal_(generator=generator)
    return out


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(1))


def expert(weights: TorchExpertWeights, slot: int, row: torch.Tensor) -> torch.Tensor:
    gate, up, down = weights.fetch(slot)
    return down @ (torch.nn.functional.silu(gate @ row) * (up @ row))


def counts() -> torch.Tensor:
    return torch.tensor([2, 0, 3])


def test_routed(weights: TorchExpertWeights, x: torch.Tensor) -> None:
    received = Received(Layout.ROUTED, x, ROUTES, GAINS, counts())
    pairs, index = run_experts(KERNELS, received, weights, CombineForm.PAIRS)
    assert index is not None and pairs.shape == (5, HIDDEN)
    summed, none = run_experts(KERNELS, received, weights, CombineForm.SUMMED)
    assert none is None and summed.dtype == x.dtype
    for row in range(4):
        total = torch.zeros(HIDDEN)
        for k in range(2):
            slot = int(ROUTES[row, k])
            assert (index[row, k] == -1) == (slot == -1)
            if slot >= 0:
                wanted = expert(weights, slot, x[row])
                torch.testing.assert_close(pairs[index[row, k]], wanted)
                total += GAINS[row, k] * wanted
        torch.testing.assert_close(summed[row], total)


def _aligned(rows: torch.Tensor, slots: torch.Tensor, gains: torch.Tensor) -> Received:
    """EXPANDED, slots 0, 1, 2 at rows 0, 4, 8, an empty slot with a segment of its own."""
    places = torch.tensor([0, 1, 8, 9, 10])
    x = torch.full((WIDTH * 4, HIDDEN), float("nan"))
    where = torch.full((len(x), 1), -1, dtype=torch.int32)
    weights = torch.full((len(x), 1), float("nan"))
    x[places], where[places], weights[places] = rows, slots, gains[:, None]
    starts = torch.tensor([0, 4, 8])
    return Received(Layout.EXPANDED, x, where, weights, counts(), starts=starts)


def test_expanded_and_masked(weights: TorchExpertWeights, x: torch.Tensor) -> None:
    """The same five pairs, grouped by slot: in a row, and padded per slot with rubbish."""
    order = [(0, 0, 1), (0, 3, 0), (2, 0, 0), (2, 1, 1), (2, 3, 1)]  # slot, row, k
    rows = torch.stack([x[row] for _, row, _ in order])
    gains = torch.stack([GAINS[row, k] for _, row, k in order])
    slots = torch.tensor([[slot] for slot, _, _ in order], dtype=torch.int32)
    wanted = torch.stack([expert(weights, slot, x[row]) for slot, row, _ in order])
    received = Received(Layout.EXPANDED, rows, slots, gains[:, None], counts())
    padded = torch.full((SLOTS, WIDTH, HIDDEN), float("nan"))
    padded_gains = torch.zeros(SLOTS, WIDTH)
    places = [(0, 0), (0, 1), (2, 0), (2, 1), (2, 2)]
    for (slot, column), row, gain in zip(places, rows, gains, strict=True):
        padded[slot, column], padded_gains[slot, column] = row, gain
    masked = Received(Layout.MASKED, padded, slots, padded_gains, counts())
    aligned = _aligned(rows, slots, gains)
    held = aligned.slots[:, 0] >= 0
    for form, target in (
        (CombineForm.PAIRS, wanted),
        (CombineForm.SUMMED, wanted * gains[:, None]),
    ):
        y, index = run_experts(KERNELS, received, weights, form)
        assert index is None
        torch.testing.assert_close(y, target)
        y, index = run_experts(KERNELS, aligned, weights, form)
        assert index is None and y.shape == aligned.x.shape
        torch.testing.assert_close(y[held], target)
        assert not bool(y[~held].any())
        y, index = run_experts(KERNELS, masked, weights, form)
        assert index is None and y.shape == padded.shape
        torch.testing.assert_close(torch.stack([y[place] for place in places]), target)
        assert bool(y.isfinite().all())  # rows beyond the counts are zero, whatever lay there


@pytest.mark.parametrize("form", list(CombineForm))
def test_no_rows_at_all(form: CombineForm, weights: TorchExpertWeights) -> None:
    none = torch.zeros(SLOTS, dtype=torch.int64)
    empty = torch.zeros(0, HIDDEN)
    routes = torch.zeros(0, 2, dtype=torch.int32)
    routed = Received(Layout.ROUTED, empty, routes, torch.zeros(0, 2), none)
    assert run_experts(KERNELS, routed, weights, form)[0].shape == (0, HIDDEN)
    expanded = Received(Layout.EXPANDED, empty, routes[:, :1], torch.zeros(0, 1), none)
    assert run_experts(KERNELS, expanded, weights, form)[0].shape == (0, HIDDEN)
    slab = torch.ones(SLOTS, WIDTH, HIDDEN)
    masked = Received(Layout.MASKED, slab, routes, torch.ones(SLOTS, WIDTH), none)
    assert not bool(run_experts(KERNELS, masked, weights, form)[0].any())


@pytest.mark.parametrize("wire", [WireFormat.FP8, WireFormat.FP8_UE8M0])
def test_fp8_rows_are_dequantised(
    weights: TorchExpertWeights, x: torch.Tensor, wire: WireFormat
) -> None:
    rows = quantise(x, wire)
    sent = Received(
        Layout.ROUTED, rows.values, ROUTES, GAINS, counts(), rows.scales, rows.scale_format
    )
    seen = dequantise(rows.values, rows.scales, rows.scale_format, x.dtype)
    plain = Received(Layout.ROUTED, seen, ROUTES, GAINS, counts())
    y, _ = run_experts(KERNELS, sent, weights, CombineForm.PAIRS, x.dtype)
    assert torch.equal(y, run_experts(KERNELS, plain, weights, CombineForm.PAIRS)[0])
    assert not torch.equal(
        y, run_experts(KERNELS, replace(plain, x=x), weights, CombineForm.PAIRS)[0]
    )
