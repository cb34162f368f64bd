"""RMSNorm with the residual's add before it and 1x128 quantisation after it, a row in one go.

The row stays in registers between the three: with the residual 7D bytes move (bf16) where the three
kernels alone move 15D. What is quantised is the norm rounded to the model dtype, so
that the result is that of the three one after another. One program a row; its sum of squares has
one order whatever comes along (law 5). quant.py has the arithmetic of a block.

Shape letters: T tokens, D hidden, G = ceil(D / 128).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dispatch.base import ScaleFormat
from dispatch.fp8 import num_blocks
from models.deepseek.kernels.gpu.aot import CompileCase
from models.deepseek.kernels.gpu.cost import KernelCost
from models.deepseek.kernels.gpu.errors import ShapeRefused
from models.deepseek.kernels.gpu.language import tl, triton
from models.deepseek.kernels.gpu.quant import block_scale, quantise_block, quantise_twin
from models.deepseek.kernels.gpu.rounding import to_bf16
from models.deepseek.kernels.gpu.scales import PACKED, empty_scales, view_scales

MAX_WIDTH = 16384  # a row lies in the registers of one program


class NormedRows(NamedTuple):
    """values e4m3 [T, D], scales as asked for, plain [T, D] in x's dtype (None: not asked for)."""

    values: Tensor
    scales: Tensor
    plain: Tensor | None


def row_warps(width: int) -> int:
    """Warps of a program for rows of this width: 32 values a thread, at most 8 warps."""
    return 1 if width <= 1024 else 4 if width <= 4096 else 8


@triton.jit
def norm_quant_kernel(
    x, residual, weight, out, scales, plain,
    x_row, residual_row, out_row, plain_row, scale_row, scale_word, eps,
    width: tl.constexpr, BLOCKS: tl.constexpr,
    has_residual: tl.constexpr, keeps: tl.constexpr, ue8m0: tl.constexpr, packed: tl.constexpr,
):  # fmt: skip
    """x [T, D] bf16 or fp32, weight [D] fp32 -> out e4m3 [T, D], scales fp32 [T, G] or, packed,
    int32 [T, ceil(G / 4)]. has_residual: residual [T, D] += x first, in place, as its dtype has it.
    keeps: plain [T, D], the norm as the gate wants it, is stored too. BLOCKS: G up to a power of
    two, at least 4. Bytes (bf16): T * (3D + 4G), residual + 4D a row, keeps + 2D. FLOPs none
    on matrix units: bound by bytes, about 9TD operations (+ TD with residual). Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    at = (block * 128)[:, None] + tl.arange(0, 128)[None, :]
    inside = at < width
    value = tl.load(x + row * x_row + at, mask=inside, other=0.0).to(tl.float32)
    narrow: tl.constexpr = x.dtype.element_ty == tl.bfloat16
    if has_residual:
        place = residual + row * residual_row + at
        value += tl.load(place, mask=inside, other=0.0).to(tl.float32)
        if narrow:
            tl.store(place, to_bf16(value), mask=inside)
            value = to_bf16(value).to(tl.float32)
        else:
            tl.store(place, value, mask=inside)
    mean = tl.sum(tl.sum(value * value, axis=1), axis=0) / width
    gain = tl.load(weight + at, mask=inside, other=0.0)
    value = value * tl.div_rn(1.0, tl.sqrt_rn(mean + eps)) * gain
    if narrow:
        value = to_bf16(value).to(tl.float32)
    if keeps:
        kept = to_bf16(value) if narrow else value
        tl.store(plain + row * plain_row + at, kept, mask=inside)
    scale, inverse = block_scale(value, ue8m0)
    tl.store(out + row * out_row + at, quantise_block(value, scale, inverse, ue8m0), mask=inside)
    target = scales + row * scale_row
    if packed:
        power = tl.where(block * 128 < width, scale.to(tl.int32, bitcast=True) >> 23, 0)
        shifted = tl.reshape(power, (BLOCKS // 4, 4)) << (tl.arange(0, 4) * 8)[None, :]
        word = tl.arange(0, BLOCKS // 4)
        tl.store(target + word * scale_word, tl.sum(shifted, axis=1), mask=word * 512 < width)
    else:
        tl.store(target + block * scale_word, scale, mask=block * 128 < width)


def rms_norm_quantise(
    x: Tensor,
    weight: Tensor,
    eps: float,
    form: ScaleFormat = ScaleFormat.F32_COLUMN,
    *,
    residual: Tensor | None = None,
    ue8m0: bool = False,
    keep: bool = False,
) -> NormedRows:
    """x [T, D] bf16 or fp32 (rows may be strided), weight [D] fp32 -> quantise(rms_norm(x)).

    residual [T, D]: x is added to it first, in place, and the norm is of the rounded sum. keep: the
    norm in x's dtype is returned as well (the gate reads it). ShapeRefused for what does not fit.
    """
    _check(x, weight, residual)
    rows, width = x.shape
    out = torch.empty((rows, width), dtype=torch.float8_e4m3fn, device=x.device)
    scales = empty_scales(rows, width, form, x.device)
    plain = torch.empty((rows, width), dtype=x.dtype, device=x.device) if keep else None
    if rows:
        packed = form in PACKED
        view = view_scales(scales, rows, width)
        norm_quant_kernel[(rows,)](
            x, residual, weight, out, scales, plain,
            x.stride(0), 0 if residual is None else residual.stride(0), out.stride(0), width,
            view.row_stride, view.word_stride, eps,
            width=width, BLOCKS=max(4, triton.next_power_of_2(num_blocks(width))),
            has_residual=residual is not None, keeps=keep, ue8m0=ue8m0 or packed, packed=packed,
            num_warps=row_warps(width),
        )  # fmt: skip
    return NormedRows(out, scales, plain)


def _check(x: Tensor, weight: Tensor, residual: Tensor | None) -> None:
    if x.dtype not in (torch.bfloat16, torch.float32) or x.dim() != 2 or x.stride(1) != 1:
        raise ShapeRefused(f"x={x.dtype} {list(x.shape)}: bfloat16 or float32 [T, D]")
    width = x.shape[1]
    if not 0 < width <= MAX_WIDTH:
        raise ShapeRefused(f"x={list(x.shape)}: rows of 1 to {MAX_WIDTH} values")
    if weight.dtype != torch.float32 or weight.shape != (width,) or weight.stride(0) != 1:
        raise ShapeRefused(f"weight={weight.dtype} {list(weight.shape)}: float32 [{width}]")
    if residual is not None and (
        residual.dtype != x.dtype or residual.shape != x.shape or residual.stride(1) != 1
    ):
        raise ShapeRefused(
            f"residual={residual.dtype} {list(residual.shape)}: as x, {x.dtype} {list(x.shape)}"
        )


def rms_norm_quantise_twin(
    x: Tensor,
    weight: Tensor,
    eps: float,
    form: ScaleFormat,
    *,
    residual: Tensor | None = None,
    ue8m0: bool = False,
) -> NormedRows:
    """The same, one step after the other; the norm in float64, rounded once to x's dtype."""
    if residual is not None:
        residual.copy_(residual.float() + x.float())
        x = residual
    wide = x.double()
    normed = wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + eps) * weight.double()
    plain = normed.to(x.dtype)
    return NormedRows(*quantise_twin(plain, form, ue8m0=ue8m0), plain)


def cost(
    rows: int, width: int, *, residual: bool = True, keep: bool = False, itemsize: int = 2
) -> KernelCost:
    """Rows in and out, residual in and out, codes and 4 bytes a block, the weight once."""
    values = (1 + 2 * residual + keep) * itemsize + 1
    return KernelCost(rows * (width * values + 4 * num_blocks(width)) + 4 * width, 0)


def compile_cases() -> list[CompileCase]:
    cases = []
    # The latent q norm has no residual; what one linear alone reads is not kept.
    for width, fused, keeps in ((1536, False, False), (7168, True, True), (7168, True, False)):
        for packed in (False, True):
            cases.append(
                CompileCase(
                    norm_quant_kernel,
                    "norm_quant",
                    f"{width} w{row_warps(width)} {'residual ' if fused else ''}"
                    f"{'alone ' if fused and not keeps else ''}"
                    f"{'ue8m0' if packed else 'fp32'}",
                    {
                        "x": "*bf16",
                        "residual": "*bf16",
                        "weight": "*fp32",
                        "out": "*fp8e4nv",
                        "scales": "*i32" if packed else "*fp32",
                        "plain": "*bf16",
                        **dict.fromkeys(("x_row", "residual_row", "out_row", "plain_row"), "i32"),
                        "scale_row": "i32",
                        "scale_word": "i32",
                        "eps": "fp32",
                    },
                    {
                        "width": width,
                        "BLOCKS": triton.next_power_of_2(num_blocks(width)),
                        "has_residual": fused,
                        "keeps": keeps,
                        "ue8m0": packed,
                        "packed": packed,
                    },
                    num_warps=row_warps(width),
                    divisible=("x_row", "residual_row", "out_row", "plain_row"),
                    wants={90: ("ld.global.v4",), 100: ("ld.global.v4",)},
                )
            )
    return cases
