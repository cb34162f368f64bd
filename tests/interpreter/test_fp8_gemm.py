"""Block-FP8 GEMM against its float64 twin, in every tile, by TMA and by masked loads.

Tolerance: products of e4m3 are exact in fp32; 128 of them and then the K blocks are added in fp32,
so the error is at most (K + 2G) * 2^-24 of the sum of magnitudes (here bounded by the product of
magnitudes), and bf16 adds one rounding, 2^-8 of the result.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dispatch.base import ScaleFormat
from models.deepseek.fp8 import quantise_weight
from models.deepseek.kernels.gpu import fp8_gemm as module
from models.deepseek.kernels.gpu.errors import ShapeRefused
from models.deepseek.kernels.gpu.fp8_gemm import (
    CONFIGS,
    config_for,
    fp8_gemm,
    fp8_gemm_twin,
    widen_rows,
    widen_weight,
)
from models.deepseek.kernels.gpu.gemm_tile import TileConfig
from models.deepseek.kernels.gpu.quant import quantise_twin

FORMS = [ScaleFormat.F32_ROW, ScaleFormat.F32_COLUMN, ScaleFormat.UE8M0_ROW]
FORMS.append(ScaleFormat.UE8M0_COLUMN)
Operands = tuple[Tensor, Tensor, Tensor, Tensor]


def operands(
    rows: int, columns: int, width: int, form: ScaleFormat = ScaleFormat.F32_ROW, pitch: int = 0
) -> Operands:
    """A in rows `pitch` apart with NaN between them, its scales as quantise lays them with NaN in
    the rows that pad a column; B and its scales."""
    torch.manual_seed(rows + 7 * columns + 11 * width)
    a, scales = quantise_twin(torch.randn(rows, width) * torch.randn(rows, 1).exp(), form)
    weight, weight_scales = quantise_weight(torch.randn(columns, width))
    return spread(a, pitch or width), laid_out(scales, form), weight, weight_scales


def spread(a: Tensor, pitch: int) -> Tensor:
    rows, width = a.shape
    whole = torch.full((rows + 2, pitch), 0x7F, dtype=torch.uint8)  # NaN
    whole[:rows, :width] = a.view(torch.uint8)
    return whole.view(torch.float8_e4m3fn)[:rows, :width]


def laid_out(scales: Tensor, form: ScaleFormat) -> Tensor:
    if not form.value.endswith("column"):
        return scales
    padded = -(-scales.shape[0] // 4) * 4
    poison = torch.nan if scales.dtype == torch.float32 else -1
    storage = torch.full((scales.shape[1], padded), poison, dtype=scales.dtype)
    view = storage.t()[: scales.shape[0]]
    view.copy_(scales)
    return view


def whole_numbers(rows: int, columns: int, width: int, pitch: int = 0) -> Operands:
    """Codes are whole numbers up to 16 in magnitude: sums of 128 products are exact in fp32 in any
    order, as numpy's in the interpreter differs with the shape of a tile. What is left to differ is
    the order of K blocks: their scales round at each."""
    torch.manual_seed(rows)
    a = torch.randint(-16, 17, (rows, width)).to(torch.float8_e4m3fn)
    b = torch.randint(-16, 17, (columns, width)).to(torch.float8_e4m3fn)
    blocks = -(-width // 128)
    return (
        spread(a, pitch or width),
        torch.rand(rows, blocks),
        b,
        torch.rand(-(-columns // 128), blocks),
    )


def check(ours: Tensor, given: Operands) -> None:
    truth = fp8_gemm_twin(*given)
    a, a_scales, b, b_scales = given
    magnitude = widen_rows(a, a_scales).abs() @ widen_weight(b, b_scales).abs().T
    width = a.shape[1]
    bound = magnitude * (width + 2 * -(-width // 128)) * 2**-24
    if ours.dtype == torch.bfloat16:
        bound = bound * (1 + 2**-8) + truth.abs() * 2**-8
    assert ((ours.double() - truth).abs() <= bound).all()


SHAPES = [(1, 64, 128), (5, 100, 384), (17, 130, 256), (33, 576, 272), (70, 200, 128)]


@pytest.mark.parametrize(("rows", "columns", "width"), SHAPES)
@pytest.mark.parametrize("pitch", ["aligned", "odd"])
def test_against_float64(rows: int, columns: int, width: int, pitch: str) -> None:
    """aligned: TMA's way. odd: rows at no multiple of 16 bytes, by masked loads."""
    given = operands(rows, columns, width, pitch=width + (16 if pitch == "aligned" else 13))
    assert module.tma_can(given[0]) == (pitch == "aligned")
    check(fp8_gemm(*given), given)
    check(fp8_gemm(*given, torch.float32), given)


@pytest.mark.parametrize("width", [1, 9, 127, 129, 200, 300])
def test_ragged_k(width: int) -> None:
    given = operands(6, 70, width)
    check(fp8_gemm(*given, torch.float32), given)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.value)
def test_every_format_of_scales(form: ScaleFormat) -> None:
    given = operands(6, 150, 640, form)
    check(fp8_gemm(*given, torch.float32), given)
    row_form = ScaleFormat.UE8M0_ROW if "ue8m0" in form.value else ScaleFormat.F32_ROW
    given_by_rows = operands(6, 150, 640, row_form)
    assert torch.equal(fp8_gemm(*given), fp8_gemm(*given_by_rows))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("tma", [True, False])
def test_every_tile(config: TileConfig, tma: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits from each: one K order (law 5)."""
    monkeypatch.setattr(module, "config_for", lambda rows, columns: config)
    given = whole_numbers(19, 300, 528, pitch=544 if tma else 537)
    ours = fp8_gemm(*given, torch.float32)
    check(ours, given)
    monkeypatch.setattr(module, "config_for", config_for)
    assert torch.equal(ours, fp8_gemm(*given, torch.float32))


def test_a_row_alone_is_the_row_in_company() -> None:
    a, a_scales, b, b_scales = whole_numbers(150, 70, 900)
    whole = fp8_gemm(a, a_scales, b, b_scales, torch.float32)
    for first, last in ((0, 1), (3, 4), (0, 20), (100, 150)):
        part = fp8_gemm(a[first:last], a_scales[first:last], b, b_scales, torch.float32)
        assert torch.equal(part, whole[first:last])


def test_a_fault_in_a_row_or_a_column_stays_there() -> None:
    a, a_scales, b, b_scales = operands(9, 140, 256)
    b_scales[1, 0] = torch.nan  # columns 128 to 139
    a_scales[4, 1] = torch.inf
    ours = fp8_gemm(a, a_scales, b, b_scales, torch.float32)
    assert ours[:, 128:].isnan().all()
    assert not ours[4].isfinite().any()
    assert ours[[0, 1, 2, 3, 5, 6, 7, 8], :128].isfinite().all()


def test_into_a_given_place_and_nothing_beside_it() -> None:
    given = operands(5, 70, 128)
    whole = torch.full((8, 90), torch.nan)
    out = fp8_gemm(*given, torch.float32, out=whole[1:6, 3:73])
    check(out, given)
    whole[1:6, 3:73] = torch.nan
    assert whole.isnan().all()


def test_no_rows() -> None:
    a, a_scales, b, b_scales = operands(1, 64, 128)
    assert fp8_gemm(a[:0], a_scales[:0], b, b_scales).shape == (0, 64)


def test_which_tile() -> None:
    """Few rows: by rows. Many: so that all SMs have work, in whole rounds."""
    few = [config_for(n, 4096).rows for n in (1, 16, 17, 64, 65, 128)]
    assert few == [16, 16, 32, 64, 128, 128]
    assert config_for(200, 4096).width == 64  # 128 tiles, where 128 columns would make 64
    assert config_for(512, 4096).width == 128  # 128 tiles; of 64 columns two rounds
    assert config_for(16384, 7168).pair and config_for(4096, 24576).pair


def test_refusals() -> None:
    a, a_scales, b, b_scales = operands(4, 130, 256)
    with pytest.raises(ShapeRefused, match="the same K"):
        fp8_gemm(a[:, :128], a_scales, b, b_scales)
    with pytest.raises(ShapeRefused, match="scales=torch.float32"):
        fp8_gemm(a, a_scales[:, :1], b, b_scales)
    with pytest.raises(ShapeRefused, match="b_scales"):
        fp8_gemm(a, a_scales, b, b_scales[:1])
    with pytest.raises(ShapeRefused, match="float8_e4m3fn"):
        fp8_gemm(a.float(), a_scales, b, b_scales)
    with pytest.raises(ShapeRefused, match="torch.bfloat16 or torch.float32"):
        fp8_gemm(a, a_scales, b, b_scales, torch.float16)
    with pytest.raises(ShapeRefused, match="out="):
        fp8_gemm(a, a_scales, b, b_scales, out=torch.empty(4, 129, dtype=torch.bfloat16))
