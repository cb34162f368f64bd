"""RoPE against complex numbers in float64, and rows into the cache, in the interpreter."""

from __future__ import annotations

import pytest
import torch

from models.deepseek.kernels.gpu.errors import ShapeRefused
from models.deepseek.kernels.gpu.rope import rope, rope_twin
from models.deepseek.kernels.gpu.scatter_rows import scatter_rows, scatter_rows_twin


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("tokens", "heads", "dim"), [(1, 1, 2), (3, 5, 16), (2, 40, 12), (0, 2, 8)]
)
def test_rope(dtype: torch.dtype, tokens: int, heads: int, dim: int) -> None:
    random = torch.Generator().manual_seed(0)
    whole = torch.full((tokens, heads, dim + 6), float("nan"), dtype=dtype)
    x = whole[..., 4 : 4 + dim]
    x.copy_(torch.randn(tokens, heads, dim, generator=random).to(dtype))
    angles = torch.rand(50, dim // 2, generator=random) * 7
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    positions = torch.randint(0, 50, (tokens,), generator=random)
    room = torch.full((tokens, heads, dim + 3), 9.0, dtype=dtype)
    got = rope(x, positions, cos_sin, room[..., 1 : 1 + dim])
    assert (room[..., 0] == 9).all() and (room[..., 1 + dim :] == 9).all()
    want = rope_twin(x, positions, cos_sin)
    # Two products and a sum in fp32, then one rounding to the dtype.
    step = 2**-8 if dtype == torch.bfloat16 else 0.0
    assert ((got.double() - want).abs() <= step * want.abs() + 1e-6).all()
    assert torch.equal(rope(x, positions, cos_sin), got)
    for row in range(tokens):
        assert torch.equal(rope(x[row : row + 1], positions[row : row + 1], cos_sin)[0], got[row])


def test_a_row_that_pads_reads_nothing_outside() -> None:
    x, table = torch.ones(2, 1, 4), torch.full((3, 4), 0.5)
    got = rope(x, torch.tensor([-1, 2]), table)
    assert torch.equal(got[0], got[1])


def test_wrong_shapes_are_refused() -> None:
    x, table = torch.zeros(2, 1, 8), torch.zeros(4, 8)
    with pytest.raises(ShapeRefused, match="cos_sin"):
        rope(x, torch.zeros(2, dtype=torch.int64), table[:, :6])
    with pytest.raises(ShapeRefused, match="positions"):
        rope(x, torch.zeros(2, dtype=torch.int32), table)
    with pytest.raises(ShapeRefused, match="out"):
        rope(x, torch.zeros(2, dtype=torch.int64), table, torch.zeros(2, 2, 8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rank", "dim"), [(1, 1), (40, 6), (64, 16)])
def test_scatter_rows(dtype: torch.dtype, rank: int, dim: int) -> None:
    random = torch.Generator().manual_seed(0)
    layer = torch.randn(5, 4, rank + dim, generator=random).to(dtype)
    source = torch.randn(4, rank + dim + 2, generator=random).to(dtype)
    latent, key = source[:, :rank], source[:, rank : rank + dim]
    slots = torch.tensor([7, -1, 19, 20])
    want = layer.clone()
    scatter_rows_twin(want, latent, key, slots)
    scatter_rows(layer, latent, key, slots)
    assert torch.equal(layer, want)
    scatter_rows(layer, latent[:0], key[:0], slots[:0])
    assert torch.equal(layer, want)
    with pytest.raises(ShapeRefused, match="slots"):
        scatter_rows(layer, latent, key, slots.int())
    with pytest.raises(ShapeRefused, match="layer"):
        scatter_rows(layer[:, :2], latent, key, slots)
