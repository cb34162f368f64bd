"""Experts of TritonKernels in the interpreter: each layout of rows, both kinds of weight."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dispatch.base import CombineForm, Layout, Received, ScaleFormat, WireFormat
from dispatch.fp8 import dequantise, quantise
from models.deepseek.experts import run_experts
from models.deepseek.fp8 import Fp8Rows, linear_w8a8, quantise_weight
from models.deepseek.kernels.errors import KernelArgumentError
from models.deepseek.kernels.gpu.triton_kernels import TritonKernels
from models.deepseek.kernels.torch_kernels import TorchKernels

SLOTS, ROOM, HIDDEN, WIDE = 3, 5, 144, 40  # neither a multiple of the block
ROUTES = torch.tensor([[2, 0], [-1, 2], [-1, -1], [0, 2]], dtype=torch.int32)
GAINS = torch.tensor([[0.5, 2.0], [0.0, 3.0], [0.0, 0.0], [1.5, 0.25]])
# The pairs by slot: (slot, row, k); slot 1 has none.
ORDER = [(0, 0, 1), (0, 3, 0), (2, 0, 0), (2, 1, 1), (2, 3, 1)]
COUNTS = torch.tensor([2, 0, 3])
BF16 = torch.bfloat16
KERNELS = TritonKernels()


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def expert(slot: int) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (WIDE, HIDDEN), (WIDE, HIDDEN), (HIDDEN, WIDE)
    parts = [normal(*shape, seed=3 * slot + i) * 0.1 for i, shape in enumerate(shapes)]
    return parts[0], parts[1], parts[2]


def stored(fp8: bool, ue8m0: bool = False) -> tuple[Any, list[Any]]:
    """Weights of KERNELS, and what they hold: tensors, or codes and scales, of each slot."""
    if not fp8:
        weights = KERNELS.allocate_experts(SLOTS, HIDDEN, WIDE, BF16)
        for slot in range(SLOTS):
            weights.store(slot, *(part.to(BF16) for part in expert(slot)))
        return weights, [tuple(p.to(BF16) for p in expert(slot)) for slot in range(SLOTS)]
    kept = KERNELS.allocate_fp8_experts(SLOTS, HIDDEN, WIDE, BF16)
    held = []
    for slot in range(SLOTS):
        parts = [quantise_weight(part, ue8m0=ue8m0) for part in expert(slot)]
        kept.store_fp8(slot, *(Fp8Rows.of(*part) for part in parts))
        held.append(parts)
    kept.ue8m0 = ue8m0  # as the loader finds all scales of a layer to be
    return kept, held


def wanted(row: Tensor, part: Any, fp8: bool, ue8m0: bool = False) -> Tensor:
    """One row [D] bf16 through one expert -> [D] bf16, rounded where the kernels round."""
    x = row[None]
    if fp8:
        gate, up, down = part
        both = [linear_w8a8(x, *w, ue8m0=ue8m0).to(BF16).float() for w in (gate, up)]
        hidden = (torch.nn.functional.silu(both[0]) * both[1]).to(BF16)
        return linear_w8a8(hidden, *down, ue8m0=ue8m0).to(BF16)[0]
    gate, up, down = part
    both = [(x.float() @ w.float().T).to(BF16).float() for w in (gate, up)]
    hidden = (torch.nn.functional.silu(both[0]) * both[1]).to(BF16)
    return (hidden.float() @ down.float().T).to(BF16)[0]


def layouts(x: Tensor, scales: Tensor | None, form: ScaleFormat) -> dict[str, Received]:
    """The same pairs as ROUTED, EXPANDED (packed and with gaps) and MASKED, poison elsewhere."""
    poison = float("nan")

    def placed(places: list[int], size: int, source: Tensor) -> Tensor:
        out = torch.zeros(size, source.shape[1], dtype=source.dtype)
        out.view(torch.uint8).fill_(0x7F)  # NaN of e4m3; of bf16 and fp32 3e38
        out[places] = source[[row for _, row, _ in ORDER]]
        return out

    def slots_at(places: list[int], size: int) -> tuple[Tensor, Tensor]:
        slots = torch.full((size, 1), -1, dtype=torch.int32)
        gains = torch.full((size, 1), poison)
        for place, (slot, row, k) in zip(places, ORDER, strict=True):
            slots[place], gains[place] = slot, GAINS[row, k]
        return slots, gains

    def received(layout: Layout, places: list[int], size: int, **more: Any) -> Received:
        values = placed(places, size, x)
        beside = None if scales is None else placed(places, size, scales)
        return Received(layout, values, *slots_at(places, size), COUNTS, beside, form, **more)

    packed, gaps = list(range(5)), [0, 1, 8, 9, 10]
    in_room = [0, 1, 2 * ROOM, 2 * ROOM + 1, 2 * ROOM + 2]
    flat = received(Layout.MASKED, in_room, SLOTS * ROOM)
    masked = replace(
        flat,
        x=flat.x.view(SLOTS, ROOM, -1),
        weights=flat.weights.view(SLOTS, ROOM),
        scales=None if flat.scales is None else flat.scales.view(SLOTS, ROOM, -1),
    )
    return {
        "routed": Received(Layout.ROUTED, x, ROUTES, GAINS, COUNTS, scales, form),
        "expanded": received(Layout.EXPANDED, packed, 5),
        "gaps": received(Layout.EXPANDED, gaps, 14, starts=torch.tensor([0, 4, 8])),
        "masked": masked,
    }


def pairs_of(name: str, y: Tensor, index: Tensor | None) -> Tensor:
    """[5, D]: results in ORDER."""
    if index is not None:
        return torch.stack([y[index[row, k]] for _, row, k in ORDER])
    places = {"expanded": range(5), "gaps": (0, 1, 8, 9, 10)}
    if name == "masked":
        return torch.stack([y[0, 0], y[0, 1], y[2, 0], y[2, 1], y[2, 2]])
    return y[list(places[name])]


@pytest.mark.parametrize("name", ["routed", "expanded", "gaps", "masked"])
@pytest.mark.parametrize(
    ("fp8", "wire", "ue8m0"),
    [
        (False, WireFormat.MODEL, False),
        (False, WireFormat.FP8, False),
        (True, WireFormat.MODEL, False),
        (True, WireFormat.MODEL, True),
        (True, WireFormat.FP8, False),
        (True, WireFormat.FP8_UE8M0, True),
    ],
)
def test_layouts(name: str, fp8: bool, wire: WireFormat, ue8m0: bool) -> None:
    weights, held = stored(fp8, ue8m0)
    x = normal(4, HIDDEN, seed=99).to(BF16)
    sent = None if wire is WireFormat.MODEL else quantise(x, wire)
    values = x if sent is None else sent.values
    scales, form = (None, ScaleFormat.NONE) if sent is None else (sent.scales, sent.scale_format)
    seen = x if sent is None else dequantise(sent.values, sent.scales, sent.scale_format, BF16)
    got = layouts(values, scales, form)
    want = torch.stack([wanted(seen[row], held[slot], fp8, ue8m0) for slot, row, _ in ORDER])
    y, index = run_experts(KERNELS, got[name], weights, CombineForm.PAIRS, BF16)
    pairs = pairs_of(name, y, index)
    assert pairs.dtype == BF16
    # Rows of e4m3 are rounded to bf16 for the twin, which may move a code: 2^-4 of one product.
    bound = 0.02 if wire is WireFormat.MODEL else 0.05
    assert float((pairs.float() - want.float()).abs().max() / want.float().abs().max()) < bound
    summed, none = run_experts(KERNELS, got[name], weights, CombineForm.SUMMED, BF16)
    assert none is None and summed.dtype == BF16
    gains = torch.stack([GAINS[row, k] for _, row, k in ORDER])
    if name == "routed":
        total = TorchKernels().combine_pairs(y, index, GAINS)
        assert torch.equal(summed, total.to(BF16))
    else:
        assert torch.equal(pairs_of(name, summed, None), (pairs.float() * gains[:, None]).to(BF16))


@pytest.mark.parametrize("fp8", [False, True])
def test_no_rows(fp8: bool) -> None:
    weights, _ = stored(fp8)
    nobody = torch.zeros(SLOTS, dtype=torch.int64)
    none = torch.zeros(0, HIDDEN, dtype=BF16)
    slots = torch.zeros(0, 2, dtype=torch.int32)
    routed = Received(Layout.ROUTED, none, slots, torch.zeros(0, 2), nobody)
    expanded = Received(Layout.EXPANDED, none, slots[:, :1], torch.zeros(0, 1), nobody)
    for received in (routed, expanded):
        for form in CombineForm:
            assert run_experts(KERNELS, received, weights, form)[0].shape == (0, HIDDEN)
    absent = torch.full((2, 2), -1, dtype=torch.int32)
    x = normal(2, HIDDEN).to(BF16)
    away = Received(Layout.ROUTED, x, absent, torch.zeros(2, 2), nobody)
    assert not run_experts(KERNELS, away, weights, CombineForm.SUMMED, BF16)[0].any()


def test_a_bundle_is_the_whole_expert() -> None:
    """Bytes moved to another slot compute there what they computed here (law 3)."""
    for fp8 in (False, True):
        weights, _ = stored(fp8)
        x = normal(1, HIDDEN, seed=5).to(BF16)

        def alone(slot: int, x: Tensor = x, weights: Any = weights) -> Tensor:
            pairs = KERNELS.sort_pairs(torch.tensor([[slot]], dtype=torch.int32), SLOTS)
            return KERNELS.experts(x, pairs[0], pairs[1], weights)

        before = alone(2)
        assert not torch.equal(alone(0), before)
        weights.bundle(0).copy_from(weights.bundle(2).cut())
        assert torch.equal(alone(0), before)
        assert weights.nbytes == SLOTS * weights.bundle(0).nbytes


def test_foreign_weights_are_refused() -> None:
    twin = TorchKernels()
    x = normal(2, HIDDEN).to(BF16)
    with pytest.raises(KernelArgumentError, match="TorchLinearWeight"):
        KERNELS.linear(x, twin.linear_weight(normal(3, HIDDEN), BF16))
    with pytest.raises(KernelArgumentError, match="TorchExpertWeights"):
        rows, offsets, _ = KERNELS.sort_pairs(torch.zeros(2, 1, dtype=torch.int32), 1)
        KERNELS.experts(x, rows, offsets, twin.allocate_experts(1, HIDDEN, WIDE, BF16))
    weights, _ = stored(True)
    with pytest.raises(KernelArgumentError, match="store_fp8"):
        weights.store(0, *expert(0))
