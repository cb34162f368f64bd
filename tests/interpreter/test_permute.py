"""Sorting of pairs, permute and unpermute in the interpreter, against plain twins."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from dispatch.combine import combine_pairs
from models.deepseek.kernels.gpu.errors import ShapeRefused
from models.deepseek.kernels.gpu.permute import (
    permute,
    permute_twin,
    unpermute,
    unpermute_twin,
)
from models.deepseek.kernels.gpu.sort_pairs import (
    CHUNK,
    PairLayout,
    room_for,
    sort_pairs,
    sort_pairs_twin,
)
from models.deepseek.kernels.torch_kernels import TorchKernels


def picks(tokens: int, top_k: int, num_slots: int, absent: float = 0.3, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    slots = torch.randint(0, num_slots, (tokens, top_k), generator=random, dtype=torch.int32)
    slots[torch.rand(tokens, top_k, generator=random) < absent] = -1
    return slots


def same(got: PairLayout, want: PairLayout) -> bool:
    return all(torch.equal(getattr(got, f.name), getattr(want, f.name)) for f in fields(PairLayout))


SIZES = [(1, 1, 1), (3, 8, 5), (50, 8, 9), (CHUNK, 1, 3), (70, 6, 33), (0, 8, 4)]


@pytest.mark.parametrize(("tokens", "top_k", "num_slots"), SIZES)
@pytest.mark.parametrize(("alignment", "capacity"), [(1, None), (16, None), (128, None), (1, 12)])
def test_sorted(
    tokens: int, top_k: int, num_slots: int, alignment: int, capacity: int | None
) -> None:
    slots = picks(tokens, top_k, num_slots)
    got = sort_pairs(slots, num_slots, alignment, capacity)
    assert same(got, sort_pairs_twin(slots, num_slots, alignment, capacity))


@pytest.mark.parametrize(
    "slots",
    [
        torch.full((5, 3), -1, dtype=torch.int32),  # nobody
        torch.full((90, 3), 2, dtype=torch.int32),  # one slot gets all, the others are empty
        torch.tensor([[0, 7], [6, -5], [2**30, 3]], dtype=torch.int32),  # what is no slot
    ],
)
def test_empty_and_full_slots(slots: Tensor) -> None:
    for alignment in (1, 8):
        assert same(sort_pairs(slots, 5, alignment), sort_pairs_twin(slots, 5, alignment))
    assert same(sort_pairs(slots, 5, capacity=4), sort_pairs_twin(slots, 5, capacity=4))


def test_order_is_that_of_the_torch_kernels() -> None:
    slots = picks(60, 8, 7)
    rows, offsets, index = TorchKernels().sort_pairs(slots, 7)
    got = sort_pairs(slots, 7)
    assert torch.equal(got.pair_rows[: len(rows)], rows) and (got.pair_rows[len(rows) :] < 0).all()
    assert torch.equal(got.starts, offsets) and torch.equal(got.index, index)


@pytest.mark.parametrize(("pairs", "slots", "alignment"), [(0, 3, 128), (1, 3, 128), (9, 2, 4)])
def test_room_is_enough(pairs: int, slots: int, alignment: int) -> None:
    """The worst case: as many slots as can be with one pair over an aligned number."""
    used = min(pairs, slots)
    counts = [1] * used
    if used:
        counts[0] += pairs - used
    need = sum(-(-n // alignment) * alignment for n in counts)
    assert need <= room_for(pairs, slots, alignment)


def test_wrong_pairs_are_refused() -> None:
    with pytest.raises(ShapeRefused, match="slots"):
        sort_pairs(torch.zeros(2, 3, dtype=torch.int64), 2)
    with pytest.raises(ShapeRefused, match="num_slots"):
        sort_pairs(torch.zeros(2, 3, dtype=torch.int32), 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("width", [1, 40, 2050])
def test_permute(dtype: torch.dtype, width: int) -> None:
    layout = sort_pairs(picks(6, 3, 4), 4, alignment=4)
    x = torch.full((7, width + 3), float("nan")).to(dtype)[:6, :width]
    x.copy_(torch.randn(6, width, generator=torch.Generator().manual_seed(1)).to(dtype))
    groups = -(-width // 128)
    scales = torch.full((7, groups + 2), float("nan"))[:6, :groups]
    scales.copy_(torch.rand(6, groups))
    got, got_scales = permute(x, layout.pair_rows, scales, zero_gaps=True)
    assert got.dtype == dtype and got_scales is not None
    want = permute_twin(x, layout.pair_rows)
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(got_scales, permute_twin(scales, layout.pair_rows))
    plain, none = permute(x, layout.pair_rows)
    real = layout.pair_rows >= 0
    assert none is None
    assert torch.equal(plain[real].view(torch.uint8), want[real].view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tokens", "top_k", "width"), [(5, 8, 40), (2, 3, 1030), (0, 8, 16)])
def test_unpermute(dtype: torch.dtype, tokens: int, top_k: int, width: int) -> None:
    random = torch.Generator().manual_seed(0)
    layout = sort_pairs(picks(tokens, top_k, 4), 4, alignment=8)
    y = torch.full((layout.pair_rows.shape[0], width), float("nan"), dtype=dtype)
    real = layout.pair_rows >= 0
    y[real] = torch.randn(int(real.sum()), width, generator=random).to(dtype)
    weights = torch.rand(tokens, top_k, generator=random)
    weights[layout.index < 0] = float("nan")
    got = unpermute(y, layout.index, weights)
    assert torch.equal(got, unpermute_twin(y, layout.index, weights))
    safe = weights.nan_to_num()
    assert torch.equal(got, TorchKernels().combine_pairs(y, layout.index, safe))
    clean = torch.where(real[:, None], y, 0.0)
    assert torch.equal(got, combine_pairs(clean, layout.index, safe))
    half = unpermute(y, layout.index, weights, torch.bfloat16)
    assert torch.equal(half, got.bfloat16())
    for token in range(tokens):
        alone = unpermute(y, layout.index[token : token + 1], weights[token : token + 1])
        assert torch.equal(alone[0], got[token])


def test_wrong_rows_are_refused() -> None:
    index = torch.zeros(2, 2, dtype=torch.int64)
    with pytest.raises(ShapeRefused, match="index"):
        unpermute(torch.zeros(2, 4), index.int(), torch.zeros(2, 2))
    with pytest.raises(ShapeRefused, match="pair_rows"):
        permute(torch.zeros(2, 4), index[0])
    with pytest.raises(ShapeRefused, match="scales"):
        permute(torch.zeros(2, 4), index[0].int(), torch.zeros(3, 1))
