"""Quantisation and block-FP8 GEMMs on a device: what the interpreter cannot prove.

The division by three steps that quant.py makes of one, rounding by the device's own instructions,
sums of the matrix units (about 14 bits wide), and law 5 over tiles of every shape: whichever
operand comes first, whoever else is in the tile, the same bits. In triton's interpreter
(TRITON_INTERPRET=1) each body runs on a CPU at small sizes, so that no line runs first on a GPU.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dispatch.base import ScaleFormat
from models.deepseek.fp8 import quantise_weight
from models.deepseek.kernels.gpu import fp8_gemm as dense
from models.deepseek.kernels.gpu.fp8_gemm import CONFIGS, config_for, fp8_gemm, fp8_gemm_twin
from models.deepseek.kernels.gpu.grouped_gemm import (
    grouped_gemm_contiguous,
    grouped_gemm_masked,
    grouped_gemm_twin,
)
from models.deepseek.kernels.gpu.language import INTERPRETED
from models.deepseek.kernels.gpu.norm_quant import rms_norm_quantise, rms_norm_quantise_twin
from models.deepseek.kernels.gpu.quant import quantise, quantise_silu_mul, quantise_twin

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
LARGE = ON_GPU and not INTERPRETED
FORMS = [ScaleFormat.F32_ROW, ScaleFormat.F32_COLUMN, ScaleFormat.UE8M0_ROW]
FORMS.append(ScaleFormat.UE8M0_COLUMN)
UNITS = 2**-13 if LARGE else 2**-20  # error of a sum of 128, of the sum of magnitudes
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ON_GPU and not INTERPRETED, reason="needs a CUDA device"),
]


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    torch.manual_seed(sum(shape))
    spread = torch.randn(*shape[:-1], 1).exp()
    return (torch.randn(*shape) * spread).to(DEVICE, dtype)


def same(a: Tensor, b: Tensor) -> bool:
    kind = torch.uint8 if a.element_size() == 1 else torch.int32
    return torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.value)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_quantise_bit_for_bit(form: ScaleFormat, dtype: torch.dtype) -> None:
    x = normal(2000 if LARGE else 5, 7168 if LARGE else 640, dtype=dtype)
    values, scales = quantise(x, form)
    twin, twin_scales = quantise_twin(x, form)
    assert same(values, twin) and same(scales, twin_scales)


def test_norm_then_quantise() -> None:
    rows, width = (300, 7168) if LARGE else (3, 512)
    x, residual = normal(rows, width), normal(rows, width) + 1
    weight, twin_residual = torch.rand(width, device=DEVICE) + 0.5, residual.clone()
    form = ScaleFormat.F32_ROW
    ours = rms_norm_quantise(x, weight, 1e-6, form, residual=residual, keep=True)
    twin = rms_norm_quantise_twin(x, weight, 1e-6, form, residual=twin_residual)
    assert torch.equal(residual, twin_residual)
    torch.testing.assert_close(ours.plain, twin.plain, rtol=2**-7, atol=0)
    values, scales = quantise_twin(ours.plain, form)
    assert same(ours.values, values) and same(ours.scales, scales)


def operands(rows: int, columns: int, width: int, form: ScaleFormat = ScaleFormat.F32_COLUMN):
    a, a_scales = quantise(normal(rows, width), form)
    b, b_scales = quantise_weight(normal(columns, width, dtype=torch.float32))
    return a, a_scales, b, b_scales


def check(ours: Tensor, truth: Tensor, magnitude: Tensor) -> None:
    bound = magnitude * UNITS + (truth.abs() * 2**-8 if ours.dtype == torch.bfloat16 else 0)
    assert ((ours.double() - truth).abs() <= bound).all()


SHAPES = [
    (1, 7168, 2048),
    (40, 2112, 7168),
    (128, 4096, 7168),
    (700, 576, 1536),
    (4096, 7168, 2048),
]
SMALL = [(1, 128, 256), (40, 200, 128), (130, 300, 128)]


@pytest.mark.parametrize(("rows", "columns", "width"), SHAPES if LARGE else SMALL)
@pytest.mark.parametrize("form", FORMS[1:4:2], ids=lambda form: form.value)
def test_gemm(rows: int, columns: int, width: int, form: ScaleFormat) -> None:
    given = operands(rows, columns, width, form)
    truth = fp8_gemm_twin(*given)
    a, a_scales, b, b_scales = given
    sizes = a_scales.abs() if a_scales.dtype == torch.float32 else a_scales
    magnitude = fp8_gemm_twin(
        a.float().abs().to(a.dtype), sizes, b.float().abs().to(b.dtype), b_scales
    )
    for dtype in (torch.bfloat16, torch.float32):
        check(fp8_gemm(*given, dtype), truth, magnitude)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_tile_has_the_same_bits(config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real activations: the units' own rounding is part of what must not differ. Only on a device;
    numpy's sums in the interpreter go by the tile's shape."""
    given = operands(300 if LARGE else 20, 1000 if LARGE else 300, 2048 if LARGE else 256)
    monkeypatch.setattr(dense, "config_for", lambda rows, columns: config)
    ours = fp8_gemm(*given, torch.float32)
    monkeypatch.setattr(dense, "config_for", config_for)
    theirs = fp8_gemm(*given, torch.float32)
    if INTERPRETED:
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    else:
        assert torch.equal(ours, theirs)


def test_a_row_alone_is_the_row_in_company() -> None:
    a, a_scales, b, b_scales = operands(2000 if LARGE else 40, 512 if LARGE else 70, 1024)
    whole = fp8_gemm(a, a_scales, b, b_scales)
    for first, last in ((0, 1), (3, 20), (5, 38), (0, 40)):
        part = fp8_gemm(a[first:last], a_scales[first:last], b, b_scales)
        if INTERPRETED:
            torch.testing.assert_close(part, whole[first:last], rtol=2**-7, atol=1e-3)
        else:
            assert torch.equal(part, whole[first:last])


def test_grouped_in_both_layouts() -> None:
    experts, room, columns, width = (8, 256, 4096, 7168) if LARGE else (3, 20, 140, 256)
    weights = [quantise_weight(normal(columns, width, dtype=torch.float32)) for _ in range(experts)]
    b = torch.stack([w.view(torch.uint8) for w, _ in weights]).view(torch.float8_e4m3fn)
    b_scales = torch.stack([scale for _, scale in weights])
    counts = (
        torch.tensor([(7 * i) % room if i != 1 else 0 for i in range(experts)]).int().to(DEVICE)
    )
    x = normal(experts, room, width)
    for expert, count in enumerate(counts.tolist()):
        x[expert, count:] = torch.nan
    a, a_scales = quantise(x, ScaleFormat.F32_COLUMN, counts=counts)
    masked = grouped_gemm_masked(a, a_scales, b, b_scales, counts, expected_rows=16)
    truth = grouped_gemm_twin(a.cpu(), a_scales.cpu(), b.cpu(), b_scales.cpu(), counts.cpu())
    size = width * 448.0 * 448.0  # never reached: bounds a sum of codes
    scale = a_scales.nan_to_num(0, 0, 0).abs().amax() * b_scales.amax()
    for expert, count in enumerate(counts.tolist()):
        near, exact = masked[expert, :count].double().cpu(), truth[expert, :count]
        limit = size**0.5 * 448 * float(scale) * UNITS * 8 + exact.abs() * 2**-8
        assert ((near - exact).abs() <= limit).all()
    # The same rows one segment after another: the same bits.
    starts = [0, *counts.cumsum(0).tolist()]
    rows = torch.cat([a[i, :n].view(torch.uint8) for i, n in enumerate(counts.tolist())])
    row_scales = torch.cat([a_scales[i, :n] for i, n in enumerate(counts.tolist())])
    ends = counts.cumsum(0).int()
    together = grouped_gemm_contiguous(
        rows.view(torch.float8_e4m3fn), row_scales, b, b_scales, ends, alignment=1, expected_rows=16
    )
    for expert, count in enumerate(counts.tolist()):
        part = together[starts[expert] : starts[expert] + count]
        assert torch.equal(part, masked[expert, :count])


def test_silu_mul_then_quantise_of_a_row_alone() -> None:
    x = normal(70 if LARGE else 9, 4096 if LARGE else 512)
    whole = quantise_silu_mul(x, ScaleFormat.F32_ROW)
    for row in (0, 4, 8):
        alone = quantise_silu_mul(x[row : row + 1], ScaleFormat.F32_ROW)
        assert same(alone[0], whole[0][row : row + 1]) and same(alone[1], whole[1][row : row + 1])
