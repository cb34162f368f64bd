"""RMSNorm, add + RMSNorm and SiLU-mul in the interpreter, against float64 twins."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from models.deepseek.kernels.gpu.errors import ShapeRefused
from models.deepseek.kernels.gpu.norm import (
    add_rms_norm,
    rms_norm,
    rms_norm_twin,
    silu_mul,
    silu_mul_twin,
)

DTYPES = [torch.float32, torch.bfloat16]
# One rounding at the end (half a unit of 2**-8 for bf16) and fp32 sums of a few hundred squares.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8}


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def in_poison(x: Tensor, pad: int = 5) -> Tensor:
    """The same rows as a strided view into NaN."""
    big = torch.full((x.shape[0] + 1, x.shape[1] + pad), float("nan"), dtype=x.dtype)
    big[: x.shape[0], : x.shape[1]] = x
    return big[: x.shape[0], : x.shape[1]]


def close(got: Tensor, want: Tensor, dtype: torch.dtype) -> bool:
    return bool(((got.double() - want).abs() <= TOLERANCE[dtype] * want.abs() + 1e-9).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 7), (4, 64), (2, 513), (5, 100), (0, 16)])
def test_rms_norm(dtype: torch.dtype, rows: int, width: int) -> None:
    x, weight = normal(rows, width, dtype=dtype), normal(width, seed=1)
    got = rms_norm(in_poison(x), weight, 1e-5)
    assert got.dtype == dtype and got.is_contiguous()
    assert close(got, rms_norm_twin(x, weight, 1e-5), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 130])
def test_add_rms_norm_rounds_the_residual_first(dtype: torch.dtype, width: int) -> None:
    residual, x = normal(4, width, dtype=dtype), normal(4, width, dtype=dtype, seed=2)
    weight, place = normal(width, seed=1), in_poison(residual)
    summed = (residual.float() + x.float()).to(dtype)
    got = add_rms_norm(place, in_poison(x, 3), weight, 1e-6)
    assert torch.equal(place, summed)
    assert close(got, rms_norm_twin(summed, weight, 1e-6), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 33), (2, 1030), (0, 8)])
def test_silu_mul(dtype: torch.dtype, rows: int, width: int) -> None:
    x = normal(rows, 2 * width, dtype=dtype) * 4
    assert close(silu_mul(in_poison(x)), silu_mul_twin(x), dtype)


def test_silu_mul_of_some_rows() -> None:
    """Rows beyond the limit are neither read nor written: the room keeps what it held."""
    x = normal(5, 32)
    x[3:] = float("nan")
    limit = torch.tensor([3], dtype=torch.int32)
    assert torch.equal(silu_mul(x, limit)[:3], silu_mul(x[:3]))


def test_silu_of_large_values_is_finite() -> None:
    x = torch.tensor([[-1e4, -100.0, 100.0, 1e4, 1.0, 1.0, 1.0, 1.0]])
    assert torch.equal(silu_mul(x), torch.tensor([[0.0, 0.0, 100.0, 1e4]]))


def test_a_row_alone_is_the_row_in_company() -> None:
    x, weight = normal(6, 200, dtype=torch.bfloat16), normal(200, seed=1)
    whole, both = rms_norm(x, weight, 1e-6), silu_mul(x)
    for row in range(6):
        assert torch.equal(rms_norm(x[row : row + 1], weight, 1e-6)[0], whole[row])
        assert torch.equal(silu_mul(x[row : row + 1])[0], both[row])


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ShapeRefused, match="weight"):
        rms_norm(normal(2, 8), normal(9), 1e-6)
    with pytest.raises(ShapeRefused, match="residual"):
        add_rms_norm(normal(3, 8), normal(2, 8), normal(8), 1e-6)
    with pytest.raises(ShapeRefused, match="2I"):
        silu_mul(normal(2, 7))
