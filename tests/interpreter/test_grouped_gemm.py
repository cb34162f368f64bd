"""Grouped block-FP8 GEMM in both layouts against the float64 twin of each expert alone.

Rows that belong to no expert are NaN in A and in its scales: none may reach a result, and none of
the result's own may be written. Tolerance: as for the dense GEMM (test_fp8_gemm.py).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dispatch.base import ScaleFormat
from models.deepseek.fp8 import quantise_weight
from models.deepseek.kernels.gpu import grouped_gemm as module
from models.deepseek.kernels.gpu.errors import ShapeRefused
from models.deepseek.kernels.gpu.fp8_gemm import CONFIGS, fp8_gemm, fp8_gemm_twin
from models.deepseek.kernels.gpu.gemm_tile import TileConfig
from models.deepseek.kernels.gpu.grouped_gemm import (
    grouped_gemm_contiguous,
    grouped_gemm_masked,
    grouped_gemm_twin,
    segments,
)
from models.deepseek.kernels.gpu.quant import quantise
from models.deepseek.kernels.gpu.scales import empty_scales

FORMS = [ScaleFormat.F32_ROW, ScaleFormat.F32_COLUMN, ScaleFormat.UE8M0_ROW]
FORMS.append(ScaleFormat.UE8M0_COLUMN)
FP8 = torch.float8_e4m3fn


def weights(experts: int, columns: int, width: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(experts + columns + width)
    both = [quantise_weight(torch.randn(columns, width)) for _ in range(experts)]
    codes = torch.stack([values.view(torch.uint8) for values, _ in both])
    return codes.view(FP8), torch.stack([scale for _, scale in both])


def poison(values: Tensor, scales: Tensor) -> None:
    values.view(torch.uint8).fill_(0x7F)
    scales.fill_(torch.nan if scales.dtype == torch.float32 else -1)


def masked_rows(counts: list[int], room: int, width: int, form: ScaleFormat):
    torch.manual_seed(sum(counts) + width)
    a = torch.empty(len(counts), room, width, dtype=FP8)
    scales = empty_scales(room, width, form, a.device, len(counts))
    poison(a, scales)
    for expert, count in enumerate(counts):
        x = torch.randn(count, width) * torch.randn(count, 1).exp()
        values, scale = quantise(x, form)
        a[expert, :count].view(torch.uint8).copy_(values.view(torch.uint8))
        scales[expert, :count].copy_(scale)
    return a, scales, torch.tensor(counts, dtype=torch.int32)


def contiguous_rows(counts: list[int], alignment: int, width: int, form: ScaleFormat):
    ends: list[int] = []
    for count in counts:
        ends.append(-(-(ends[-1] if ends else 0) // alignment) * alignment + count)
    parts = segments(ends, alignment)
    rows = -(-ends[-1] // alignment) * alignment + 5
    a, scales = (
        torch.empty(rows, width, dtype=FP8),
        empty_scales(rows, width, form, torch.device("cpu")),
    )
    poison(a, scales)
    torch.manual_seed(rows + width)
    for begin, end in parts:
        values, scale = quantise(torch.randn(end - begin, width), form)
        a[begin:end].view(torch.uint8).copy_(values.view(torch.uint8))
        scales[begin:end].copy_(scale)
    return a, scales, torch.tensor(ends, dtype=torch.int32), parts


@pytest.fixture(autouse=True)
def _marked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernel does not write is 7777."""
    make = torch.empty

    def marked(*args: object, **kwargs: object) -> Tensor:
        out = make(*args, **kwargs)
        return out.fill_(7777) if out.dtype in (torch.bfloat16, torch.float32) else out

    monkeypatch.setattr(module.torch, "empty", marked)


def check(ours: Tensor, truth: Tensor, width: int) -> None:
    """Rows of nobody (NaN in the twin) are untouched; the others are near, relative to the largest
    sum of magnitudes, which is below the norms' product: here bounded by 40 * sqrt(K)."""
    nobody = truth.isnan()
    assert (ours[nobody] == torch.tensor(7777.0, dtype=ours.dtype)).all()
    near, exact = ours.double()[~nobody], truth[~nobody]
    slack = width * 2**-24 * 40 * width**0.5 * (1 + exact.abs().max() if exact.numel() else 1)
    relative = 2**-8 if ours.dtype == torch.bfloat16 else 0
    assert ((near - exact).abs() <= slack + relative * exact.abs()).all()


COUNTS = [[5], [0, 3, 17, 0, 1], [40, 0, 0, 33], [0, 0], [16, 16, 16]]


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_masked(counts: list[int], dtype: torch.dtype) -> None:
    a, scales, bounds = masked_rows(counts, 40, 256, ScaleFormat.F32_COLUMN)
    b, b_scales = weights(len(counts), 136, 256)
    ours = grouped_gemm_masked(a, scales, b, b_scales, bounds, dtype)
    check(ours, grouped_gemm_twin(a, scales, b, b_scales, bounds), 256)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("alignment", [1, 8, 128])
def test_contiguous(counts: list[int], alignment: int) -> None:
    a, scales, ends, _ = contiguous_rows(counts, alignment, 256, ScaleFormat.F32_COLUMN)
    b, b_scales = weights(len(counts), 136, 256)
    ours = grouped_gemm_contiguous(
        a, scales, b, b_scales, ends, torch.float32, alignment=alignment, expected_rows=20
    )
    check(ours, grouped_gemm_twin(a, scales, b, b_scales, ends, alignment), 256)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.value)
@pytest.mark.parametrize("width", [128, 200, 272])  # 200: no multiple of 16, so not by TMA
def test_scales_in_every_format_and_ragged_k(form: ScaleFormat, width: int) -> None:
    counts = [3, 0, 18]
    b, b_scales = weights(3, 70, width)
    a, scales, bounds = masked_rows(counts, 24, width, form)
    ours = grouped_gemm_masked(a, scales, b, b_scales, bounds, torch.float32)
    check(ours, grouped_gemm_twin(a, scales, b, b_scales, bounds), width)
    a, scales, ends, _ = contiguous_rows(counts, 16, width, form)
    ours = grouped_gemm_contiguous(a, scales, b, b_scales, ends, torch.float32, alignment=16)
    check(ours, grouped_gemm_twin(a, scales, b, b_scales, ends, 16), width)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_tile(config: TileConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """expected_rows chooses the tile, never who is computed: 150 rows with a tile of 16 too."""
    counts = [1, 0, 150]
    b, b_scales = weights(3, 264, 128)
    a, scales, bounds = masked_rows(counts, 150, 128, ScaleFormat.F32_COLUMN)
    monkeypatch.setattr(module, "config_for", lambda rows, columns, experts: config)
    ours = grouped_gemm_masked(a, scales, b, b_scales, bounds, torch.float32)
    check(ours, grouped_gemm_twin(a, scales, b, b_scales, bounds), 128)


def test_a_row_is_that_of_its_expert_alone() -> None:
    """Whole numbers as codes: sums of 128 are exact, K blocks of either kernel in one order."""
    counts = [4, 0, 9]
    torch.manual_seed(1)
    a, scales, bounds = masked_rows(counts, 12, 640, ScaleFormat.F32_ROW)
    b, b_scales = weights(3, 70, 640)
    for codes in (a, b):
        codes.view(torch.uint8).copy_(torch.randint(-16, 17, codes.shape).to(FP8).view(torch.uint8))
    ours = grouped_gemm_masked(a, scales, b, b_scales, bounds, torch.float32)
    for expert, count in enumerate(counts):
        for row in range(count):
            at = slice(row, row + 1)
            alone = fp8_gemm(
                a[expert, at], scales[expert, at], b[expert], b_scales[expert], torch.float32
            )
            assert torch.equal(ours[expert, at], alone)


def test_experts_that_lie_apart() -> None:
    """Codes that do not lie back to back: other bytes (NaN) between an expert and the next."""
    counts, width = [3, 0, 5], 256
    a, scales, bounds = masked_rows(counts, 6, width, ScaleFormat.F32_COLUMN)
    b, b_scales = weights(3, 70, width)
    table = torch.full((3, 73, width), 0x7F, dtype=torch.uint8).view(FP8)
    table[:, :70].view(torch.uint8).copy_(b.view(torch.uint8))
    ours = grouped_gemm_masked(a, scales, table[:, :70], b_scales, bounds, torch.float32)
    packed = grouped_gemm_masked(a, scales, b, b_scales, bounds, torch.float32)
    for expert, count in enumerate(counts):
        assert torch.equal(ours[expert, :count], packed[expert, :count])


def test_segments_that_begin_where_they_are_said_to() -> None:
    """Wide gaps, and the third segment before the second."""
    a, scales, _ = masked_rows([20], 20, 256, ScaleFormat.F32_COLUMN)
    b, b_scales = weights(3, 70, 256)
    starts, ends = (torch.tensor(x, dtype=torch.int32) for x in ([1, 15, 7], [4, 19, 7]))
    ours = grouped_gemm_contiguous(a[0], scales[0], b, b_scales, ends, torch.float32, starts=starts)
    for expert, (begin, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        rows = slice(begin, end)
        want = fp8_gemm_twin(a[0, rows], scales[0, rows], b[expert], b_scales[expert])
        check(ours[rows], want, 256)


def test_more_counted_than_there_is_room_for() -> None:
    """A count beyond the room (a dispatcher's fault) reads and writes nothing outside."""
    a, scales, _ = masked_rows([8, 8], 8, 128, ScaleFormat.F32_ROW)
    b, b_scales = weights(2, 64, 128)
    full = torch.tensor([8, 8], dtype=torch.int32)
    over = torch.tensor([100, 9], dtype=torch.int32)
    ours = grouped_gemm_masked(a, scales, b, b_scales, over, torch.float32)
    assert torch.equal(ours, grouped_gemm_masked(a, scales, b, b_scales, full, torch.float32))


def test_no_room_at_all() -> None:
    b, b_scales = weights(2, 64, 128)
    a, scales = torch.empty(2, 0, 128, dtype=FP8), torch.empty(2, 0, 1)
    bounds = torch.zeros(2, dtype=torch.int32)
    assert grouped_gemm_masked(a, scales, b, b_scales, bounds).shape == (2, 0, 64)
    assert grouped_gemm_contiguous(a[0], scales[0], b, b_scales, bounds).shape == (0, 64)


@pytest.mark.parametrize("rows", [0, 5])
def test_no_expert_at_all(rows: int) -> None:
    """Nobody has the rows: they are not written."""
    b, b_scales = weights(2, 64, 128)
    b, b_scales, bounds = b[:0], b_scales[:0], torch.zeros(0, dtype=torch.int32)
    a, scales = torch.empty(rows, 128, dtype=FP8), torch.empty(rows, 1)
    assert grouped_gemm_contiguous(a, scales, b, b_scales, bounds).shape == (rows, 64)
    out = grouped_gemm_contiguous(a, scales, b, b_scales, bounds, starts=bounds)
    assert out.shape == (rows, 64)
    held = torch.empty(0, rows, 128, dtype=FP8), torch.empty(0, rows, 1)
    assert grouped_gemm_masked(*held, b, b_scales, bounds).shape == (0, rows, 64)


def test_refusals() -> None:
    a, scales, bounds = masked_rows([2, 2], 4, 128, ScaleFormat.F32_ROW)
    b, b_scales = weights(2, 64, 128)
    with pytest.raises(ShapeRefused, match="int32 \\[2\\]"):
        grouped_gemm_masked(a, scales, b, b_scales, bounds[:1])
    with pytest.raises(ShapeRefused, match="back to back"):
        grouped_gemm_masked(a[:, :3], scales[:, :3], b, b_scales, bounds)
    with pytest.raises(ShapeRefused, match="whole rows apart"):
        grouped_gemm_masked(
            a, scales, b.transpose(0, 1).contiguous().transpose(0, 1), b_scales, bounds
        )
    with pytest.raises(ShapeRefused, match="a_scales"):
        grouped_gemm_masked(a, scales[0], b, b_scales, bounds)
    with pytest.raises(ShapeRefused, match="alignment=0"):
        grouped_gemm_contiguous(a[0], scales[0], b, b_scales, bounds, alignment=0)
