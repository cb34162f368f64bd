"""Dense, per-head and grouped GEMMs in the interpreter, against float64 twins."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from models.deepseek.kernels.gpu.dense import (
    PLAIN,
    TILES,
    DenseTile,
    dense,
    dense_grouped,
    dense_grouped_twin,
    dense_per_head,
    dense_twin,
)
from models.deepseek.kernels.gpu.errors import ShapeRefused
from models.deepseek.kernels.gpu.sort_pairs import sort_pairs

BF16, FP32 = torch.bfloat16, torch.float32
EVERY_TILE = [*((BF16, tile) for tile in TILES.values()), (FP32, PLAIN)]


def normal(*shape: int, dtype: torch.dtype = FP32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def in_poison(x: Tensor) -> Tensor:
    """The same values as a view into NaN, with more of it beside and after each row."""
    shape = [*(n + 1 for n in x.shape[:-1]), x.shape[-1] + 3]
    view = torch.full(shape, float("nan"), dtype=x.dtype)[tuple(slice(n) for n in x.shape)]
    view.copy_(x)
    return view


def close(got: Tensor, want: Tensor, x: Tensor, weight: Tensor) -> bool:
    """K fp32 sums: K * 2^-24 of the magnitudes' sum; then one rounding to bf16."""
    size = dense_twin(x.abs(), weight.abs()).max()
    bound = x.shape[-1] * 2**-24 * size + (2**-8 * want.abs() if got.dtype == BF16 else 0)
    return bool(((got.double() - want).abs() <= bound).all())


@pytest.mark.parametrize(("dtype", "tile"), EVERY_TILE)
@pytest.mark.parametrize(("rows", "columns", "width"), [(1, 1, 1), (5, 70, 130), (33, 17, 64)])
def test_linear(dtype: torch.dtype, tile: DenseTile, rows: int, columns: int, width: int) -> None:
    x, weight = normal(rows, width, dtype=dtype), normal(columns, width, dtype=dtype, seed=1)
    want = dense_twin(x, weight)
    for out in (None, FP32):
        got = dense(in_poison(x), in_poison(weight), out, tile)
        assert got.dtype == (out or dtype)
        assert close(got, want, x, weight)


def test_company_changes_no_bit() -> None:
    """Rows at the same places of a tile, the others there or not. (A row's place decides how the
    interpreter's own product, numpy's, adds; on a device it does not.)"""
    x, weight = normal(40, 200, dtype=BF16), normal(40, 200, dtype=BF16, seed=1)
    whole = dense(x, weight, FP32, TILES[32])
    for rows in (1, 7, 33):
        assert torch.equal(dense(x[:rows], weight, FP32, TILES[32]), whole[:rows])


def test_no_rows() -> None:
    assert dense(normal(0, 8), normal(3, 8)).shape == (0, 3)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize(("rows", "heads", "width", "columns"), [(1, 3, 16, 40), (18, 2, 70, 5)])
def test_per_head(dtype: torch.dtype, rows: int, heads: int, width: int, columns: int) -> None:
    x = normal(rows, heads, width, dtype=dtype)
    weight = normal(heads, columns, width, dtype=dtype, seed=1)
    room = torch.full((rows, heads, columns + 4), 7.0, dtype=dtype)
    got = dense_per_head(in_poison(x), in_poison(weight), room[..., :columns])
    assert (room[..., columns:] == 7).all()
    assert torch.equal(got, dense_per_head(x, weight))
    for head in range(heads):
        want = dense_twin(x[:, head], weight[head])
        assert close(got[:, head], want, x[:, head], weight[head])


@pytest.mark.parametrize(("dtype", "tile"), [EVERY_TILE[0], EVERY_TILE[3], EVERY_TILE[5]])
@pytest.mark.parametrize("alignment", [1, 16])
def test_grouped(dtype: torch.dtype, tile: DenseTile, alignment: int) -> None:
    random = torch.Generator().manual_seed(0)
    slots = torch.randint(-1, 5, (30, 3), generator=random, dtype=torch.int32)
    slots[slots == 2] = 4  # an empty slot, and one with more rows than a tile
    layout = sort_pairs(slots, 6, alignment)
    x, weight = normal(30, 70, dtype=dtype), normal(6, 20, 70, dtype=dtype, seed=1)
    x[(slots < 0).all(dim=1)] = float("nan")
    got = dense_grouped(
        in_poison(x), in_poison(weight), layout.pair_rows, layout.starts, layout.ends, 8, tile
    )
    want = dense_grouped_twin(x, weight, layout.pair_rows, layout.starts, layout.ends)
    real = layout.pair_rows >= 0
    assert close(got[real], want[real], x.nan_to_num(), weight.view(-1, 70))


@pytest.mark.parametrize("places", [0, 5])
def test_grouped_without_slots(places: int) -> None:
    none = torch.zeros(0, dtype=torch.int32)
    rows = torch.full((places,), -1, dtype=torch.int32)
    x, weight = torch.ones(3, 64).bfloat16(), torch.ones(0, 16, 64).bfloat16()
    assert dense_grouped(x, weight, rows, none, none, 4).shape == (places, 16)


def test_grouped_without_pairs() -> None:
    layout = sort_pairs(torch.full((4, 2), -1, dtype=torch.int32), 3)
    x, weight = normal(4, 8), normal(3, 5, 8)
    got = dense_grouped(x, weight, layout.pair_rows, layout.starts, layout.ends, 1)
    assert got.shape == (8, 5)
    none = sort_pairs(torch.zeros(0, 2, dtype=torch.int32), 3)
    assert dense_grouped(x[:0], weight, none.pair_rows, none.starts, none.ends, 1).shape == (0, 5)


def test_wrong_operands_are_refused() -> None:
    with pytest.raises(ShapeRefused, match="bfloat16 or float32"):
        dense(normal(2, 8), normal(3, 8, dtype=BF16))
    with pytest.raises(ShapeRefused, match="same last size"):
        dense(normal(2, 8), normal(3, 9))
    with pytest.raises(ShapeRefused, match="weight"):
        dense_per_head(normal(2, 3, 8), normal(2, 4, 8))
    with pytest.raises(ShapeRefused, match="out"):
        dense_per_head(normal(2, 3, 8), normal(3, 4, 8), normal(2, 3, 5))
