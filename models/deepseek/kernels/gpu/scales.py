"""How the scales of e4m3 rows lie in memory, for kernels: strides, padding, views of the bytes.

The four formats are dispatch/base.py's. COLUMN formats are what grouped GEMMs on GPUs load by TMA:
the rows' stride is 1 and a column starts at a multiple of 16 bytes, so that T is rounded up to 4.
Knows no kernel.

Shape letters: T rows, G = ceil(D / 128) blocks a row, P = ceil(G / 4) packed words a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dispatch.base import ScaleFormat
from dispatch.fp8 import num_blocks
from models.deepseek.kernels.gpu.errors import ShapeRefused

COLUMN_ALIGNMENT = 4  # words of 4 bytes: 16 bytes, as TMA wants
PACKED = (ScaleFormat.UE8M0_ROW, ScaleFormat.UE8M0_COLUMN)
COLUMN = (ScaleFormat.F32_COLUMN, ScaleFormat.UE8M0_COLUMN)


@dataclass(frozen=True)
class ScaleView:
    """Scales as a kernel walks them: element strides of experts, rows and words (of 4 bytes)."""

    tensor: Tensor
    packed: bool
    expert_stride: int
    row_stride: int
    word_stride: int


def empty_scales(
    rows: int, hidden: int, form: ScaleFormat, device: torch.device, experts: int | None = None
) -> Tensor:
    """Room for the scales of rows of `hidden` values: [T, G] fp32 or [T, P] int32, with experts
    [e, T, ..]. Rows that pad a column are part of the storage, not of the shape."""
    if form is ScaleFormat.NONE:
        raise ShapeRefused("scale_format=none: e4m3 rows have scales")
    words = num_blocks(hidden)
    dtype = torch.float32
    if form in PACKED:
        words, dtype = -(-words // 4), torch.int32
    stack = 1 if experts is None else experts
    if form in COLUMN:
        padded = -(-rows // COLUMN_ALIGNMENT) * COLUMN_ALIGNMENT
        storage = torch.empty((stack, words, padded), dtype=dtype, device=device)
        scales = storage.transpose(1, 2)[:, :rows]
    else:
        scales = torch.empty((stack, rows, words), dtype=dtype, device=device)
    return scales[0] if experts is None else scales


def view_scales(scales: Tensor, rows: int, hidden: int) -> ScaleView:
    """Scales [T, G] fp32 or [T, P] int32 (or [e, T, ..]), by whatever strides, as kernels take
    them. ShapeRefused when they do not fit rows of `hidden` values."""
    packed = scales.dtype == torch.int32
    words = -(-num_blocks(hidden) // 4) if packed else num_blocks(hidden)
    if scales.dtype not in (torch.float32, torch.int32) or scales.shape[-2:] != (rows, words):
        raise ShapeRefused(
            f"scales={scales.dtype} {list(scales.shape)}: rows of {hidden} in e4m3 have "
            f"float32 [.., {rows}, {num_blocks(hidden)}] or int32 [.., {rows}, "
            f"{-(-num_blocks(hidden) // 4)}]"
        )
    expert = scales.stride(0) if scales.dim() == 3 else 0
    return ScaleView(scales, packed, expert, scales.stride(-2), scales.stride(-1))
