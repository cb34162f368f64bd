"""Norm + quantisation in one kernel against the three steps one after the other.

The norm here is fp32's, in the twin float64's: rounded to bf16 they differ in few values, by one
rounding; quantised, a code differs by one step at most, and most do not.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dispatch.base import ScaleFormat
from dispatch.fp8 import dequantise_rows
from models.deepseek.kernels.gpu.errors import ShapeRefused
from models.deepseek.kernels.gpu.norm_quant import rms_norm_quantise, rms_norm_quantise_twin
from models.deepseek.kernels.gpu.quant import quantise_twin

FORMS = [ScaleFormat.F32_ROW, ScaleFormat.F32_COLUMN, ScaleFormat.UE8M0_ROW]
FORMS.append(ScaleFormat.UE8M0_COLUMN)


def poisoned(rows: int, width: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    torch.manual_seed(rows * 1000 + width + seed)
    whole = torch.full((rows, width + 8), torch.nan, dtype=dtype)
    whole[:, :width] = torch.randn(rows, width) * torch.randn(rows, 1).exp()
    return whole[:, :width]


def weight_of(width: int) -> Tensor:
    torch.manual_seed(width)
    return torch.rand(width) + 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(1, 128), (3, 200), (5, 7), (2, 1536), (4, 640)])
def test_against_the_three_steps(rows: int, width: int, residual: bool, dtype: torch.dtype) -> None:
    for form in FORMS:
        x, weight = poisoned(rows, width, dtype), weight_of(width)
        ours_sum = poisoned(rows, width, dtype, 7) if residual else None
        twin_sum = ours_sum.clone() if ours_sum is not None else None
        ours = rms_norm_quantise(x, weight, 1e-6, form, residual=ours_sum, keep=True)
        twin = rms_norm_quantise_twin(x, weight, 1e-6, form, residual=twin_sum)
        if ours_sum is not None:
            assert torch.equal(ours_sum, twin_sum)
        near = 2**-7 if dtype == torch.bfloat16 else 2e-6
        torch.testing.assert_close(ours.plain, twin.plain, rtol=near, atol=0)
        # The quantisation itself is exact: of our own norm it is the twin's, bit for bit.
        values, scales = quantise_twin(ours.plain, form)
        assert torch.equal(ours.values.view(torch.uint8), values.view(torch.uint8))
        assert torch.equal(ours.scales.contiguous().view(torch.int32), scales.view(torch.int32))
        codes = ours.values.view(torch.uint8).int() - twin.values.view(torch.uint8).int()
        assert codes.abs().max() <= 1 and (codes != 0).float().mean() < 0.02


def test_the_norm_is_kept_only_when_asked_for() -> None:
    x, weight = poisoned(3, 256, torch.bfloat16), weight_of(256)
    kept = rms_norm_quantise(x, weight, 1e-6, keep=True)
    bare = rms_norm_quantise(x, weight, 1e-6)
    assert bare.plain is None
    assert torch.equal(kept.values.view(torch.uint8), bare.values.view(torch.uint8))


def test_a_row_alone_is_the_row_in_company_and_rows_do_not_mix() -> None:
    x, weight = poisoned(9, 300, torch.bfloat16), weight_of(300)
    x[4, 17] = torch.nan
    whole = rms_norm_quantise(x, weight, 1e-6, ScaleFormat.F32_ROW)
    back = dequantise_rows(whole.values, whole.scales)
    assert back[4].isnan().all() and back[[0, 1, 2, 3, 5, 6, 7, 8]].isfinite().all()
    for row in (0, 3, 8):
        alone = rms_norm_quantise(x[row : row + 1], weight, 1e-6, ScaleFormat.F32_ROW)
        assert torch.equal(alone.values.view(torch.uint8)[0], whole.values.view(torch.uint8)[row])
        assert torch.equal(alone.scales[0], whole.scales[row])


def test_no_tokens_and_refusals() -> None:
    weight = weight_of(64)
    none = rms_norm_quantise(torch.empty(0, 64), weight, 1e-6, keep=True)
    assert none.values.shape == (0, 64) and none.plain.shape == (0, 64)
    with pytest.raises(ShapeRefused, match="float32 \\[64\\]"):
        rms_norm_quantise(torch.zeros(1, 64), weight.bfloat16(), 1e-6)
    with pytest.raises(ShapeRefused, match="as x"):
        rms_norm_quantise(torch.zeros(1, 64), weight, 1e-6, residual=torch.zeros(2, 64))
    with pytest.raises(ShapeRefused, match="16384"):
        rms_norm_quantise(torch.zeros(1, 20000), torch.ones(20000), 1e-6)
