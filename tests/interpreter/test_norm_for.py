"""A norm handed on as its one reader wants it: bits as of norm, quantisation, product in turn."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from models.deepseek.kernels.errors import KernelArgumentError
from models.deepseek.kernels.gpu.triton_dense import CodedRows
from models.deepseek.kernels.gpu.triton_kernels import TritonKernels
from models.deepseek.kernels.gpu.weights import TritonFp8LinearWeight

BF16 = torch.bfloat16
EPS = 1e-6


def fp8_weight(rows: int, width: int, ue8m0: bool) -> TritonFp8LinearWeight:
    g = torch.Generator().manual_seed(rows)
    scales = torch.rand(-(-rows // 128), -(-width // 128), generator=g) + 0.5
    codes = torch.randn(rows, width, generator=g).to(torch.float8_e4m3fn)
    return TritonFp8LinearWeight(codes, 2.0 ** scales.round() if ue8m0 else scales, BF16)


def inputs(rows: int, width: int, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(width)
    residual, x = (torch.randn(rows, width, generator=g).to(dtype) for _ in range(2))
    return residual, x, torch.rand(width, generator=g) + 0.5


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(3, 256), (1, 200), (0, 128)])
def test_nothing_changes_bitwise(rows: int, width: int, ue8m0: bool, dtype: torch.dtype) -> None:
    kernels = TritonKernels()
    first, second = fp8_weight(96, width, ue8m0), fp8_weight(width, 48, ue8m0)
    residual, x, norm = inputs(rows, width, dtype)
    plain_sum, fused_sum = residual.clone(), residual.clone()
    plain = kernels.add_rms_norm(plain_sum, x, norm, EPS)
    fused = kernels.add_rms_norm_for(fused_sum, x, norm, EPS, first)
    assert isinstance(fused, CodedRows) and torch.equal(plain_sum, fused_sum)
    assert (fused.shape, fused.dtype, fused.device) == (plain.shape, plain.dtype, plain.device)
    assert torch.equal(kernels.linear(plain, first), kernels.linear(fused, first))
    wide = kernels.linear(fused, first, torch.float32)
    assert torch.equal(kernels.linear(plain, first, torch.float32), wide)
    assert torch.equal(kernels.mlp(plain, first, second), kernels.mlp(fused, first, second))


def test_a_row_does_not_see_its_company() -> None:
    kernels, weight = TritonKernels(), fp8_weight(64, 256, False)
    residual, x, norm = inputs(5, 256)
    whole = kernels.add_rms_norm_for(residual.clone(), x, norm, EPS, weight)
    alone = kernels.add_rms_norm_for(residual[3:4].clone(), x[3:4], norm, EPS, weight)
    assert torch.equal(kernels.linear(whole, weight)[3:4], kernels.linear(alone, weight))


def test_rows_that_do_not_lie_together() -> None:
    kernels, weight = TritonKernels(), fp8_weight(64, 256, False)
    residual, x, norm = inputs(3, 256)
    across = x.T.contiguous().T
    got = kernels.add_rms_norm_for(residual.clone(), across, norm, EPS, weight)
    want = kernels.add_rms_norm_for(residual.clone(), x, norm, EPS, weight)
    assert torch.equal(kernels.linear(got, weight), kernels.linear(want, weight))


def test_they_are_for_one_reader() -> None:
    kernels = TritonKernels()
    weight, other = fp8_weight(64, 256, True), fp8_weight(64, 256, False)
    rows = kernels.add_rms_norm_for(*inputs(2, 256), EPS, weight)
    with pytest.raises(KernelArgumentError, match="another weight"):
        kernels.linear(rows, other)


def test_a_reader_in_the_models_dtype_reads_the_norm() -> None:
    kernels = TritonKernels()
    weight = kernels.linear_weight(torch.ones(16, 128), BF16)
    residual, x, norm = inputs(2, 128)
    got = kernels.add_rms_norm_for(residual.clone(), x, norm, EPS, weight)
    assert isinstance(got, Tensor)
    assert torch.equal(got, kernels.add_rms_norm(residual.clone(), x, norm, EPS))
