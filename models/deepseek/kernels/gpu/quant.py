"""Rows to e4m3 with a scale for each 128 channels: alone, or of silu(gate) * up as it is computed.

The sums of DeepSeek-V3 3.3.2: largest magnitude of a block, at least 1e-4, over 448; for UE8M0 the
next power of two. A block with a NaN or an infinity comes back as NaN throughout. Bound by memory:
a value is read once and written once, a program takes whole blocks of 128, and a block's result
depends on that block alone (law 5). After RMSNorm: norm_quant.py. How scales lie: scales.py. The
twin of the plain form is dispatch/fp8.py.

Shape letters: T rows, D their width, I width after SiLU-mul (D = I), G = ceil(D / 128), e experts.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from dispatch.base import ScaleFormat
from dispatch.fp8 import BLOCK, FLOOR, num_blocks, pack_exponents, quantise_rows
from models.deepseek.kernels.gpu.aot import CompileCase
from models.deepseek.kernels.gpu.cost import KernelCost
from models.deepseek.kernels.gpu.errors import ShapeRefused
from models.deepseek.kernels.gpu.language import INTERPRET, tl, triton
from models.deepseek.kernels.gpu.rounding import to_bf16, to_e4m3
from models.deepseek.kernels.gpu.scales import PACKED, empty_scales, view_scales

BLOCKS = 32  # blocks of 128 that a program takes at a time: 32 values a thread
WARPS = 4
MAX_PROGRAMS = 4096  # each then takes several rounds; also bounds what masked rows cost
_FLOOR = tl.constexpr(FLOOR)


@triton.jit
def block_scale(x, ue8m0: tl.constexpr):
    """x fp32 [B, 128] -> scale fp32 [B], its inverse (for exact use by quantise_block). The largest
    magnitude is taken of the bits, where NaN is above infinity is above all numbers."""
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(bits, axis=1).to(tl.float32, bitcast=True)
    largest = tl.where(largest < _FLOOR, _FLOOR, largest)
    scale = tl.div_rn(largest, 448.0)
    if ue8m0:
        bits = scale.to(tl.int32, bitcast=True)
        power = (bits >> 23) + tl.where((bits & 0x7FFFFF) != 0, 1, 0)
        power = tl.minimum(power, 255)
        scale = (power << 23).to(tl.float32, bitcast=True)
        inverse = ((254 - power) << 23).to(tl.float32, bitcast=True)
        inverse = tl.where(power == 255, float("nan"), inverse)
    else:
        inverse = tl.div_rn(1.0, scale)
    return scale, inverse


@triton.jit
def quantise_block(x, scale, inverse, ue8m0: tl.constexpr):
    """x / scale, rounded as a division is, to e4m3. The inverse of a power of two is exact. Else
    one correction by the exact remainder makes the product with the rounded inverse the quotient
    (Markstein): three cheap steps a value where a division has ten. The interpreter's fma rounds
    twice, so there the division itself is done."""
    if ue8m0:
        y = x * inverse[:, None]
    elif INTERPRET:
        y = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
    else:
        near = x * inverse[:, None]
        y = tl.fma(tl.fma(-near, tl.broadcast_to(scale[:, None], x.shape), x),
                   tl.broadcast_to(inverse[:, None], x.shape), near)  # fmt: skip
    return to_e4m3(y)


@triton.jit
def silu_mul(gate, up, dtype: tl.constexpr):
    """fp32 silu(gate) * up, rounded to dtype as if it had been stored, back in fp32."""
    y = tl.div_rn(gate, 1.0 + tl.exp(-gate)) * up
    if dtype == tl.bfloat16:
        y = to_bf16(y).to(tl.float32)
    return y


@triton.jit(do_not_specialize=["rows"])  # not compiled anew for a batch of one or of sixteen
def quant_kernel(
    x, out, scales, counts, rows, width, blocks,
    x_expert, x_row, out_expert, out_row, scale_expert, scale_row, scale_word,
    silu: tl.constexpr, masked: tl.constexpr, ue8m0: tl.constexpr, packed: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """x [e, T, D] (silu: [e, T, 2I], gate then up) bf16 or fp32 -> out e4m3 [e, T, D], scales fp32
    [e, T, G] or, packed, int32 [e, T, ceil(G / 4)]. masked: of expert i only the first counts[i]
    rows are read and written. blocks: G, or for packed G rounded up to 4, so that a program owns
    whole words. Grid: programs that share an expert's blocks, experts. Bytes (bf16): T * (3D + 4G),
    silu T * (5I + 4G). FLOPs none on matrix units: bound by bytes, about 5TD operations, silu
    10TI."""
    expert = tl.program_id(1).to(tl.int64)
    x += expert * x_expert
    out += expert * out_expert
    scales += expert * scale_expert
    if masked:
        rows = tl.minimum(tl.load(counts + expert), rows)
    lane = tl.arange(0, 128)
    total = rows * blocks
    for first in range(tl.program_id(0) * BLOCKS, total, tl.num_programs(0) * BLOCKS):
        at = first + tl.arange(0, BLOCKS)
        row, block = (at // blocks).to(tl.int64), at % blocks
        column = (block * 128)[:, None] + lane[None, :]
        inside = (at < total)[:, None] & (column < width)
        source = x + row[:, None] * x_row + column
        value = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        if silu:
            up = tl.load(source + width, mask=inside, other=0.0).to(tl.float32)
            value = silu_mul(value, up, x.dtype.element_ty)
        scale, inverse = block_scale(value, ue8m0)
        code = quantise_block(value, scale, inverse, ue8m0)
        tl.store(out + row[:, None] * out_row + column, code, mask=inside)
        if packed:
            power = scale.to(tl.int32, bitcast=True) >> 23
            power = tl.where(block * 128 < width, power, 0)
            shifted = tl.reshape(power, (BLOCKS // 4, 4)) << (tl.arange(0, 4) * 8)[None, :]
            word = first // 4 + tl.arange(0, BLOCKS // 4)
            row, block = word // (blocks // 4), word % (blocks // 4)
            place = scales + row.to(tl.int64) * scale_row + block * scale_word
            tl.store(place, tl.sum(shifted, axis=1), mask=word < total // 4)
        else:
            tl.store(scales + row * scale_row + block * scale_word, scale, mask=at < total)


def quantise(
    x: Tensor,
    form: ScaleFormat = ScaleFormat.F32_COLUMN,
    *,
    ue8m0: bool = False,
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """x [T, D] or [e, T, D] (bf16 or fp32; rows may be strided) -> e4m3 of that shape, scales in
    `form`. ue8m0: scales are powers of two also where `form` is fp32 (packed forms always are).
    counts int32 [e] (or [1] for two dimensions): only so many first rows are valid; the others are
    neither read nor written. ShapeRefused for other dtypes and strides."""
    return _launch(x, form, ue8m0, counts, silu=False)


def quantise_silu_mul(
    x: Tensor,
    form: ScaleFormat = ScaleFormat.F32_COLUMN,
    *,
    ue8m0: bool = False,
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """x [T, 2I] or [e, T, 2I], gate then up -> quantise(silu(gate) * up) without the round trip:
    fp32 inside, rounded to x's dtype between the two."""
    return _launch(x, form, ue8m0, counts, silu=True)


def _launch(
    x: Tensor, form: ScaleFormat, ue8m0: bool, counts: Tensor | None, silu: bool
) -> tuple[Tensor, Tensor]:
    if x.dtype not in (torch.bfloat16, torch.float32) or x.dim() not in (2, 3) or x.stride(-1) != 1:
        raise ShapeRefused(
            f"x={x.dtype} {list(x.shape)}, strides {x.stride()}: bfloat16 or float32 [T, D] or "
            "[e, T, D] with contiguous rows"
        )
    if silu and x.shape[-1] % 2:
        raise ShapeRefused(f"x={list(x.shape)}: gate and up are halves, the width is even")
    stack = x if x.dim() == 3 else x[None]
    experts, rows, width = stack.shape
    width = width // 2 if silu else width
    if counts is not None and (counts.dtype != torch.int32 or counts.shape != (experts,)):
        raise ShapeRefused(f"counts={counts.dtype} {list(counts.shape)}: int32 [{experts}]")
    out = torch.empty((experts, rows, width), dtype=torch.float8_e4m3fn, device=x.device)
    scales = empty_scales(rows, width, form, x.device, experts)
    packed = form in PACKED
    blocks = num_blocks(width)
    blocks = -(-blocks // 4) * 4 if packed else blocks
    if rows * blocks >= 2**31 - MAX_PROGRAMS * BLOCKS:
        raise ShapeRefused(
            f"x={list(x.shape)}: {rows * blocks} blocks, less than 2^31 can be counted"
        )
    if out.numel():
        view = view_scales(scales, rows, width)
        programs = min(triton.cdiv(rows * blocks, BLOCKS), max(1, MAX_PROGRAMS // experts))
        quant_kernel[(programs, experts)](
            stack, out, scales, counts, rows, width, blocks,
            stack.stride(0), stack.stride(1), out.stride(0), out.stride(1),
            view.expert_stride, view.row_stride, view.word_stride,
            silu=silu, masked=counts is not None, ue8m0=ue8m0 or packed, packed=packed,
            BLOCKS=BLOCKS, num_warps=WARPS,
        )  # fmt: skip
    return (out, scales) if x.dim() == 3 else (out[0], scales[0])


def quantise_twin(x: Tensor, form: ScaleFormat, *, ue8m0: bool = False) -> tuple[Tensor, Tensor]:
    """[T, D] -> bitwise what quantise gives, in plain torch; scales contiguous."""
    if form in PACKED:
        values, scale = quantise_rows(x, ue8m0=True)
        return values, pack_exponents(scale)
    return quantise_rows(x, ue8m0=ue8m0)


def quantise_silu_mul_twin(
    x: Tensor, form: ScaleFormat, *, ue8m0: bool = False
) -> tuple[Tensor, Tensor]:
    """[T, 2I]: SiLU in float64, rounded to x's dtype, then quantise_twin. The kernel's exp may
    differ by an ulp of fp32, and so a value by a rounding of x's dtype."""
    gate, up = x.double().chunk(2, -1)
    return quantise_twin((functional.silu(gate) * up).to(x.dtype), form, ue8m0=ue8m0)


def cost(rows: int, width: int, *, silu: bool = False, itemsize: int = 2) -> KernelCost:
    """Of `rows` valid rows, `width` values each in e4m3: reads, codes, 4 bytes a block."""
    read = rows * width * itemsize * (2 if silu else 1)
    return KernelCost(read + rows * width + 4 * rows * num_blocks(width), 0)


def compile_cases() -> list[CompileCase]:
    cases = []
    strides = ("x_expert", "x_row", "out_expert", "out_row", "scale_expert", "scale_row",
               "scale_word")  # fmt: skip
    for silu in (False, True):
        for packed in (False, True):
            cases.append(
                CompileCase(
                    quant_kernel,
                    "quant_silu_mul" if silu else "quant",
                    f"{BLOCKS}x{BLOCK} w{WARPS} {'ue8m0' if packed else 'fp32'}",
                    {
                        "x": "*bf16",
                        "out": "*fp8e4nv",
                        "scales": "*i32" if packed else "*fp32",
                        "counts": "*i32",
                        **dict.fromkeys(("rows", "width", "blocks", *strides), "i32"),
                    },
                    {
                        "silu": silu,
                        "masked": silu,
                        "ue8m0": packed,
                        "packed": packed,
                        "BLOCKS": BLOCKS,
                    },
                    num_warps=WARPS,
                    divisible=("width", "x_row", "out_row", "x_expert", "out_expert"),
                    wants={90: ("ld.global.v4",), 100: ("ld.global.v4",)},
                )
            )
    return cases
