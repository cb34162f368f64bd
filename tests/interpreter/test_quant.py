"""1x128 quantisation against its torch twin: bitwise, in every layout of scales, ragged and masked.

Against float64 the bound is that of e4m3 itself: half a step of 2^-3, that is 2^-4 of the value, or
half of the smallest step, 2^-10, times the scale.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from dispatch.base import ScaleFormat
from dispatch.fp8 import dequantise_rows, unpack_exponents
from models.deepseek.kernels.gpu.errors import ShapeRefused
from models.deepseek.kernels.gpu.quant import (
    quantise,
    quantise_silu_mul,
    quantise_silu_mul_twin,
    quantise_twin,
)
from models.deepseek.kernels.gpu.scales import empty_scales

FORMS = [ScaleFormat.F32_ROW, ScaleFormat.F32_COLUMN, ScaleFormat.UE8M0_ROW]
FORMS.append(ScaleFormat.UE8M0_COLUMN)
SHAPES = [(1, 128), (3, 512), (5, 200), (37, 7), (9, 1160), (33, 640)]


def poisoned(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """[rows, width] of a wider tensor: what lies between the rows is NaN."""
    torch.manual_seed(rows * 1000 + width)
    whole = torch.full((rows, width + 24), torch.nan, dtype=dtype)
    x = whole[:, :width]
    scale = torch.randn(rows, 1).mul(3).exp()
    x.copy_(torch.randn(rows, width) * scale)
    return x


def same(ours: tuple[Tensor, Tensor], twin: tuple[Tensor, Tensor]) -> bool:
    codes = torch.equal(ours[0].view(torch.uint8), twin[0].view(torch.uint8))
    return codes and torch.equal(ours[1].contiguous().view(torch.int32), twin[1].view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.value)
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_quantise_is_its_twin(rows: int, width: int, form: ScaleFormat, dtype: torch.dtype) -> None:
    x = poisoned(rows, width, dtype)
    assert same(quantise(x, form), quantise_twin(x, form))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.value)
def test_layout_of_the_scales(form: ScaleFormat) -> None:
    _, scales = quantise(poisoned(5, 640, torch.bfloat16), form)
    words = 2 if scales.dtype == torch.int32 else 5
    assert scales.shape == (5, words)
    assert scales.stride() == ((1, 8) if form.value.endswith("column") else (words, 1))


def test_power_of_two_scales_in_fp32() -> None:
    x = poisoned(6, 300, torch.bfloat16)
    ours = quantise(x, ScaleFormat.F32_ROW, ue8m0=True)
    assert same(ours, quantise_twin(x, ScaleFormat.F32_ROW, ue8m0=True))
    assert torch.equal(ours[1].log2(), ours[1].log2().round())
    packed = quantise(x, ScaleFormat.UE8M0_ROW)
    assert torch.equal(unpack_exponents(packed[1], 3), ours[1])


@pytest.mark.parametrize("ue8m0", [False, True])
def test_within_the_grid_of_e4m3_of_the_truth(ue8m0: bool) -> None:
    x = poisoned(16, 512, torch.float32)
    values, scale = quantise(x, ScaleFormat.F32_ROW, ue8m0=ue8m0)
    error = (dequantise_rows(values, scale).double() - x.double()).abs()
    bound = torch.maximum(
        x.double().abs() * 2**-4, scale.double().repeat_interleave(128, 1) * 2**-10
    )
    assert (error <= bound * (1 + 1e-6)).all()


def test_extremes() -> None:
    """Zeros, values below the floor, subnormals, the largest, ties between codes."""
    x = torch.zeros(6, 256)
    x[1], x[2], x[3] = 1e-7, 1e-42, 3e38
    x[4, :128], x[4, 128:] = 448.0, torch.linspace(-448, 448, 128)
    x[5] = torch.arange(256) * 1.75
    for form in FORMS:
        assert same(quantise(x, form), quantise_twin(x, form))
    values, scale = quantise(x, ScaleFormat.F32_ROW)
    assert (dequantise_rows(values, scale)[0] == 0).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("ue8m0", [False, True])
def test_a_block_with_a_fault_is_nan_and_no_other(bad: float, ue8m0: bool) -> None:
    x = poisoned(2, 384, torch.bfloat16).contiguous()
    x[1, 130] = bad
    values, scale = quantise(x, ScaleFormat.F32_ROW, ue8m0=ue8m0)
    twin, _ = quantise_twin(x, ScaleFormat.F32_ROW, ue8m0=ue8m0)
    if ue8m0:
        assert values[1, 128:256].float().isnan().all()
        assert torch.equal(values.float().isnan(), twin.float().isnan())
    back = dequantise_rows(values, scale)
    assert back[1, 128:256].isnan().all()
    assert dequantise_rows(twin, scale)[1, 128:256].isnan().all()
    back[1, 128:256] = 0
    assert back.isfinite().all()


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.value)
@pytest.mark.parametrize("silu", [False, True])
def test_masked_experts(silu: bool, form: ScaleFormat) -> None:
    """Only the first counts[e] rows are read (all others are NaN) and written."""
    counts, room, width = [0, 3, 7, 1, 40], 40, 264
    x = torch.full((5, room, width * (1 + silu)), torch.nan, dtype=torch.bfloat16)
    for expert, count in enumerate(counts):
        x[expert, :count] = poisoned(max(1, count), x.shape[-1], torch.bfloat16)[:count]
    call, twin = (quantise_silu_mul, quantise_silu_mul_twin) if silu else (quantise, quantise_twin)
    values, scales = call(x, form, counts=torch.tensor(counts, dtype=torch.int32))
    assert values.shape == (5, room, width)
    assert scales.stride()[1:] == empty_scales(room, width, form, x.device, 5).stride()[1:]
    for expert, count in enumerate(counts):
        ours = values[expert, :count], scales[expert, :count]
        if silu:
            alone = quantise_silu_mul(x[expert, :count], form)
            assert same((ours[0], ours[1]), (alone[0], alone[1].contiguous()))
        else:
            assert same(ours, twin(x[expert, :count], form))


def test_rows_that_are_not_counted_stay_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    make = torch.empty

    def marked(*args: object, **kwargs: object) -> Tensor:
        out = make(*args, **kwargs)
        out.view(torch.uint8).fill_(0x55)
        return out

    monkeypatch.setattr(torch, "empty", marked)
    x = torch.full((2, 9, 256), torch.nan)
    x[1, :4] = 1
    counts = torch.tensor([0, 4], dtype=torch.int32)
    values, scales = quantise(x, ScaleFormat.F32_ROW, counts=counts)
    rest = [values[0], values[1, 4:], scales[0], scales[1, 4:]]
    assert all((part.view(torch.uint8) == 0x55).all() for part in rest)


def ordinal(values: Tensor) -> Tensor:
    """Codes counted from zero: neighbours are one apart, both zeros are 0."""
    code = values.view(torch.uint8).int()
    return torch.where(code < 128, code, 128 - code)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "width"), [(1, 128), (4, 200), (9, 704)])
def test_silu_mul_then_quantise(rows: int, width: int, dtype: torch.dtype) -> None:
    """Within one step of e4m3 of the twin (SiLU there is float64's, ours fp32's), most equal."""
    x = poisoned(rows, 2 * width, dtype)
    for form in (ScaleFormat.F32_ROW, ScaleFormat.UE8M0_ROW):
        (values, scales), (twin, twin_scales) = (
            quantise_silu_mul(x, form),
            quantise_silu_mul_twin(x, form),
        )
        if form is ScaleFormat.F32_ROW:
            torch.testing.assert_close(scales, twin_scales, rtol=2**-7, atol=0)
        else:
            assert torch.equal(scales, twin_scales)
        steps = (ordinal(values) - ordinal(twin)).abs()
        assert steps.max() <= 1 and (steps > 0).float().mean() < 0.02


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.value)
def test_a_row_alone_is_the_row_in_company(form: ScaleFormat) -> None:
    x = poisoned(21, 520, torch.bfloat16)
    whole = quantise_silu_mul(x, form)
    for row in (0, 13, 20):
        one = quantise_silu_mul(x[row : row + 1], form)
        assert same(
            (one[0], one[1]), (whole[0][row : row + 1], whole[1][row : row + 1].contiguous())
        )


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.value)
def test_nothing_in_nothing_out(form: ScaleFormat) -> None:
    values, scales = quantise(torch.empty(0, 256), form)
    assert values.shape == (0, 256) and scales.shape[0] == 0
    values, scales = quantise_silu_mul(torch.empty(2, 0, 256), form)
    assert values.shape == (2, 0, 128) and scales.shape[:2] == (2, 0)


def test_refusals() -> None:
    with pytest.raises(ShapeRefused, match="float16"):
        quantise(torch.zeros(2, 128, dtype=torch.float16))
    with pytest.raises(ShapeRefused, match="contiguous rows"):
        quantise(torch.zeros(128, 2).t())
    with pytest.raises(ShapeRefused, match="int32 \\[2\\]"):
        quantise(torch.zeros(2, 3, 128), counts=torch.zeros(3, dtype=torch.int32))
    with pytest.raises(ShapeRefused, match="even"):
        quantise_silu_mul(torch.zeros(2, 129))


def test_the_devices_division_is_a_division() -> None:
    """What quantise_block does on a device where the interpreter divides: fma in float64, which
    holds the product of two fp32 exactly."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal(400_000).astype(np.float32) * np.float32(100)
    largest = np.abs(rng.standard_normal(400_000)).astype(np.float32) * 300 + np.float32(1e-4)
    x = np.clip(x, -largest, largest)
    scale = largest / np.float32(448)
    inverse = np.float32(1) / scale
    near = x * inverse
    wide = [v.astype(np.float64) for v in (x, scale, inverse, near)]
    rest = (wide[0] - wide[3] * wide[1]).astype(np.float32)
    result = (wide[3] + rest.astype(np.float64) * wide[2]).astype(np.float32)
    assert np.array_equal(result, x / scale)
