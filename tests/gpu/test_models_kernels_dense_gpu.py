"""Gate, pairs, permutation, norms, dense GEMMs and sampling on a device.

What the interpreter cannot prove: that matrix units add alike for tiles of every shape and either
operand order (law 5), that no multiply-add is fused where CPU code has two roundings, that a draw
takes the engine's token at real vocabularies. In triton's interpreter (TRITON_INTERPRET=1) each
body runs on a CPU at small sizes, so that no line runs first on a GPU.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from dispatch.combine import combine_pairs
from models.deepseek.kernels.base import GateSpec
from models.deepseek.kernels.gpu.dense import (
    TILES,
    dense,
    dense_grouped,
    dense_grouped_twin,
    dense_per_head,
    dense_twin,
)
from models.deepseek.kernels.gpu.gate import choose, choose_twin, gate
from models.deepseek.kernels.gpu.language import INTERPRETED
from models.deepseek.kernels.gpu.norm import (
    add_rms_norm,
    rms_norm,
    rms_norm_twin,
    silu_mul,
    silu_mul_twin,
)
from models.deepseek.kernels.gpu.permute import permute, unpermute
from models.deepseek.kernels.gpu.rope import rope, rope_twin
from models.deepseek.kernels.gpu.router import PART, router_logits, router_twin
from models.deepseek.kernels.gpu.row_peaks import argmax
from models.deepseek.kernels.gpu.sampling import Cuts, draw, sample
from models.deepseek.kernels.gpu.sort_pairs import sort_pairs
from moeserve.draw import draw as engine_draw
from moeserve.request import SamplingParams

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
LARGE = ON_GPU and not INTERPRETED
BF16 = torch.bfloat16
V3 = GateSpec(8, 8, 4, "sigmoid", "top2", True, 2.5)
K2 = GateSpec(8, 1, 1, "sigmoid", "top2", True, 2.827)
V2 = GateSpec(6, 8, 3, "softmax", "max", False, 16.0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ON_GPU and not INTERPRETED, reason="needs a CUDA device"),
]


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_router_in_parts_and_whole(dtype: torch.dtype) -> None:
    tokens, experts, hidden = (300, 256, 7168) if LARGE else (5, 70, 2 * PART)
    x, weight = normal(tokens, hidden, dtype=dtype), normal(experts, hidden, seed=1) * 0.02
    number = hidden // PART
    whole = router_logits(x, weight, (1, number))[0]
    total = torch.zeros_like(whole)
    for part in router_logits(x, weight, (number, 1)):
        total = total + part
    assert torch.equal(whole, total)
    want, size = router_twin(x, weight), router_twin(x.abs(), weight.abs())
    assert ((whole - want).abs() <= 2**-20 * size).all()
    for rows in (1, 17, 40):
        alone = router_logits(x[:rows], weight, (1, number))[0]
        assert torch.equal(alone, whole[:rows])


@pytest.mark.parametrize(("spec", "experts"), [(V3, 256), (K2, 384), (V2, 160)])
def test_gate(spec: GateSpec, experts: int) -> None:
    tokens, hidden = (500, 7168) if LARGE else (3, 64)
    x, weight = normal(tokens, hidden, dtype=BF16), normal(experts, hidden, seed=1) * 0.02
    bias = normal(experts, seed=2) if spec.scoring == "sigmoid" else None
    ids, weights = gate(x, weight, bias, spec)
    parts = router_logits(x, weight)
    total = torch.zeros_like(parts[0])
    for part in parts:
        total = total + part
    want_ids, want = choose_twin(total, bias, spec)
    # exp of the device is within two units of fp32's last place: choices that close are rare.
    same = (ids == want_ids).all(dim=1)
    assert float(same.float().mean()) > 0.99
    torch.testing.assert_close(weights[same].double(), want[same], rtol=1e-5, atol=0)
    levels = normal(tokens, experts, seed=3).round()
    none = None if bias is None else bias.round()
    assert torch.equal(choose(levels[None], none, spec)[0], choose_twin(levels, none, spec)[0])
    alone = gate(x[1:2], weight, bias, spec)
    assert torch.equal(alone[0][0], ids[1]) and torch.equal(alone[1][0], weights[1])


@pytest.mark.parametrize("slots", [1, 9, 256])
@pytest.mark.parametrize("alignment", [1, 128])
def test_pairs(slots: int, alignment: int) -> None:
    tokens = 16384 if LARGE else 40
    random = torch.Generator().manual_seed(slots)
    picks = torch.randint(-2, slots, (tokens, 8), generator=random, dtype=torch.int32).to(DEVICE)
    layout = sort_pairs(picks, slots, alignment)
    flat = picks.flatten().long()
    counts = torch.bincount(flat[flat >= 0], minlength=slots)
    room = (counts + alignment - 1) // alignment * alignment
    starts = room.cumsum(0) - room
    assert torch.equal(layout.starts[:-1].long(), starts)
    assert torch.equal(layout.ends.long(), starts + counts)
    order = flat.argsort(stable=True)[int((flat < 0).sum()) :]
    within = torch.arange(len(order), device=DEVICE) - (counts.cumsum(0) - counts)[flat[order]]
    index = torch.full_like(flat, -1)
    index[order] = starts[flat[order]] + within
    assert torch.equal(layout.index, index.view(picks.shape))
    held = layout.pair_rows[index[order]]
    assert torch.equal(held.long(), order // 8)
    assert int((layout.pair_rows >= 0).sum()) == len(order)


def test_rows_there_and_back() -> None:
    tokens, width = (4096, 7168) if LARGE else (6, 300)
    random = torch.Generator().manual_seed(0)
    picks = torch.randint(-1, 16, (tokens, 8), generator=random, dtype=torch.int32).to(DEVICE)
    layout = sort_pairs(picks, 16)
    x = normal(tokens, width, dtype=BF16)
    scales = normal(tokens, width // 128 + 1)
    y, y_scales = permute(x, layout.pair_rows, scales, zero_gaps=True)
    rows, real = layout.pair_rows.long().clamp(min=0), (layout.pair_rows >= 0)[:, None]
    assert torch.equal(y, torch.where(real, x[rows], 0.0))
    assert y_scales is not None and torch.equal(y_scales, torch.where(real, scales[rows], 0.0))
    weights = torch.rand(tokens, 8, generator=random).to(DEVICE)
    noisy = y + normal(*y.shape, dtype=BF16, seed=4)
    got = unpermute(noisy, layout.index, weights)
    assert torch.equal(got, combine_pairs(noisy, layout.index, weights))


@pytest.mark.parametrize("width", [7168, 1536, 512] if LARGE else [200])
def test_norms(width: int) -> None:
    rows = 2000 if LARGE else 3
    x, residual = normal(rows, width, dtype=BF16), normal(rows, width, dtype=BF16, seed=1)
    weight, summed = normal(width, seed=2), (x.float() + residual.float()).to(BF16)
    got = add_rms_norm(residual, x, weight, 1e-6)
    assert torch.equal(residual, summed)
    want = rms_norm_twin(summed, weight, 1e-6)
    assert ((got.double() - want).abs() <= 2**-8 * want.abs() + 1e-9).all()
    assert torch.equal(rms_norm(summed[1:2], weight, 1e-6), got[1:2])
    both = silu_mul(x[:, : width // 2 * 2])
    want = silu_mul_twin(x[:, : width // 2 * 2])
    assert ((both.double() - want).abs() <= 2**-7.9 * want.abs() + 1e-9).all()


def test_rope() -> None:
    tokens, heads = (500, 128) if LARGE else (2, 3)
    x = normal(tokens, heads, 192, dtype=BF16)[..., 128:]
    angles = normal(5000, 32)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    positions = torch.randint(0, 5000, (tokens,), generator=torch.Generator().manual_seed(0))
    got, want = rope(x, positions.to(DEVICE), cos_sin), rope_twin(x, positions.to(DEVICE), cos_sin)
    assert ((got.double() - want).abs() <= 2**-8 * want.abs() + 1e-6).all()


@pytest.mark.parametrize(("columns", "width"), [(2112, 7168), (576, 512)] if LARGE else [(70, 96)])
def test_dense_tiles_agree_bit_for_bit(columns: int, width: int) -> None:
    rows = 600 if LARGE else 20
    x = normal(rows, width, dtype=BF16)
    weight = normal(columns, width, dtype=BF16, seed=1)
    want, size = dense_twin(x, weight), dense_twin(x.abs(), weight.abs())
    results = [dense(x, weight, torch.float32, tile) for tile in TILES.values()]
    for result in results:
        assert ((result - want).abs() <= 2**-18 * size).all()
        if LARGE:  # the interpreter's products are numpy's, whose order follows the shape
            assert torch.equal(result, results[0])
            assert torch.equal(dense(x[5:6], weight, torch.float32), result[5:6])
    assert torch.equal(dense(x, weight), dense(x, weight, torch.float32).to(BF16))


def test_dense_of_heads_and_of_slots() -> None:
    rows, heads, width, columns = (100, 128, 128, 512) if LARGE else (3, 2, 32, 48)
    x = normal(rows, heads, width, dtype=BF16)
    weight = normal(heads, columns, width, dtype=BF16, seed=1)
    got = dense_per_head(x, weight)
    want = torch.einsum("thk,hnk->thn", x.double(), weight.double())
    assert ((got.double() - want).abs() <= 2**-8 * want.abs() + 1e-2).all()
    picks = torch.randint(-1, 5, (rows, 4), generator=torch.Generator().manual_seed(0))
    layout = sort_pairs(picks.to(DEVICE, torch.int32), 6)
    flat, stacked = x[:, 0].contiguous(), weight[:1].repeat(6, 1, 1) * normal(6, 1, 1, dtype=BF16)
    real = layout.pair_rows >= 0
    parts = layout.pair_rows, layout.starts, layout.ends
    want = dense_grouped_twin(flat.cpu(), stacked.cpu(), *(part.cpu() for part in parts))
    for tile in TILES.values():
        got = dense_grouped(flat, stacked, *parts, 1, tile)
        error = (got.cpu().double() - want)[real.cpu()].abs()
        assert (error <= 2**-8 * want[real.cpu()].abs() + 1e-2).all()


def cuts_of(params: list[SamplingParams], seeds: list[int], positions: list[int]) -> Cuts:
    def column(values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=DEVICE)

    return Cuts(
        column([p.temperature for p in params], torch.float32),
        column([p.top_k for p in params], torch.int32),
        column([p.top_p for p in params], torch.float64),
        column([p.min_p for p in params], torch.float32),
        column(seeds, torch.int64),
        column(positions, torch.int64),
    )


def test_draws_are_the_engines() -> None:
    rows, vocab = (256, 129280) if LARGE else (8, 700)
    kinds = [
        SamplingParams(),
        SamplingParams(top_p=0.95),
        SamplingParams(top_p=0.3),
        SamplingParams(top_k=50),
        SamplingParams(top_k=40, top_p=0.9),
        SamplingParams(min_p=0.05),
        SamplingParams(top_k=vocab - 1, min_p=1e-9, top_p=0.999),
        SamplingParams(top_p=1e-6),
    ]
    params = [kinds[row % len(kinds)] for row in range(rows)]
    random = np.random.default_rng(0)
    seeds = random.integers(0, 2**63, rows).tolist()
    positions = random.integers(0, 10000, rows).tolist()
    spread = torch.linspace(0.5, 6, rows, device=DEVICE)[:, None]
    logits = normal(rows, vocab) * spread
    logits[::3] = logits[::3].round()  # many ties
    probs = torch.softmax(logits, dim=1)
    cuts = cuts_of(params, seeds, positions)
    got = draw(probs, cuts)
    assert not got.failed.any()
    want = engine_draw(probs.cpu().numpy(), params, seeds, positions)
    wrong = [j for j, (a, b) in enumerate(zip(got.tokens.tolist(), want, strict=True)) if a != b]
    assert wrong == []
    from_logits = sample(logits, cuts)
    assert from_logits.probs is not None
    torch.testing.assert_close(from_logits.probs, probs, rtol=2e-5, atol=1e-30)
    again = sample(logits[3:4], cuts_of(params[3:4], seeds[3:4], positions[3:4]))
    assert torch.equal(again.tokens, from_logits.tokens[3:4])
    greedy = sample(logits, replace(cuts, temperature=torch.zeros_like(cuts.temperature)))
    first = torch.tensor(logits.cpu().numpy().argmax(axis=1), device=DEVICE)
    assert torch.equal(greedy.tokens, first) and torch.equal(argmax(logits)[0], first)
