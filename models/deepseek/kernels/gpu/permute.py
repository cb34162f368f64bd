"""Rows to where grouped GEMMs read them, and their results home: copies, and a weighted sum.

permute: a row of x at each place of a layout (sort_pairs.py), bf16 or e4m3 with its scales.
unpermute: each token's results, times their weights, summed in routing order in fp32, each product
and each sum rounded on its own: bit for bit what dispatch.combine gives (law 5), where the compiler
would make a fused multiply-add of them.

Shape letters: T tokens, D hidden, K top-k, Q places of the layout, G scales a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.deepseek.kernels.gpu.aot import CompileCase
from models.deepseek.kernels.gpu.cost import KernelCost
from models.deepseek.kernels.gpu.errors import ShapeRefused
from models.deepseek.kernels.gpu.language import INTERPRET, tl, triton
from models.deepseek.kernels.gpu.narrow import narrow

COPY_BLOCK = 4096  # bytes of a row that a program copies
SUM_BLOCK = 1024  # columns of a row that a program sums


@triton.jit
def permute_kernel(
    x, scales, pair_rows, out, out_scales, x_stride, scales_stride, width, groups,
    block: tl.constexpr, block_g: tl.constexpr, has_scales: tl.constexpr, zero_gaps: tl.constexpr,
):  # fmt: skip
    """x [N, D] bf16, fp32 or bytes (e4m3), scales [N, G] fp32 or int32, pair_rows [Q] int32 -> out
    [Q, D], out_scales [Q, G]; of places without a pair (-1) nothing is written, or zeros. Bytes:
    2QD times the item, + 8QG with scales. FLOPs none: bound by bytes, a copy. Programs: places,
    blocks of columns."""
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(pair_rows + place).to(tl.int64)
    if zero_gaps or row >= 0:
        at = tl.program_id(1) * block + tl.arange(0, block)
        inside = at < width
        value = tl.load(x + row * x_stride + at, mask=inside & (row >= 0), other=0)
        tl.store(out + place * width + at, value, mask=inside)
        if has_scales:  # noqa: SIM102 (a constant of the compiler, then a value)
            if tl.program_id(1) == 0:
                group = tl.arange(0, block_g)
                there = group < groups
                scale = tl.load(
                    scales + row * scales_stride + group, mask=there & (row >= 0), other=0.0
                )
                tl.store(out_scales + place * groups + group, scale, mask=there)


@triton.jit
def rounded_product(a, b):
    """a * b in fp32 that no addition after it is fused with."""
    if INTERPRET:
        product = a * b
    else:
        product = tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], tl.float32, is_pure=True, pack=1
        )
    return product


@triton.jit
def unpermute_kernel(
    y, index, weights, out, y_stride, width, top_k: tl.constexpr, block: tl.constexpr
):
    """y [Q, D] bf16 or fp32, index [T, K] int64 (place or -1), weights [T, K] fp32 -> out [T, D]:
    the sum over k in order. Bytes (bf16 y, fp32 out, V valid pairs): 2VD + 4TD. FLOPs 2VD:
    bound by bytes. Programs: tokens, blocks of columns."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < width
    total = tl.zeros((block,), tl.float32)
    for k in tl.static_range(top_k):
        place = tl.load(index + token * top_k + k)
        weight = tl.load(weights + token * top_k + k)
        value = tl.load(y + place * y_stride + at, mask=inside & (place >= 0), other=0.0)
        weight = tl.where(place >= 0, weight, 0.0)
        total += rounded_product(value.to(tl.float32), tl.broadcast_to(weight, (block,)))
    tl.store(out + token * width + at, narrow(total, out.dtype.element_ty), mask=inside)


def permute(
    x: Tensor, pair_rows: Tensor, scales: Tensor | None = None, zero_gaps: bool = False
) -> tuple[Tensor, Tensor | None]:
    """x [N, D] (any dtype), pair_rows [Q] int32, scales [N, G] fp32 -> [Q, D] and [Q, G]. Places of
    row -1 hold anything, or zeros (zero_gaps)."""
    if x.dim() != 2 or pair_rows.dtype != torch.int32 or pair_rows.dim() != 1:
        raise ShapeRefused(
            f"x is {tuple(x.shape)}, pair_rows {pair_rows.dtype} {tuple(pair_rows.shape)}: must be "
            "[N, D] and int32 [Q]"
        )
    if scales is not None and (scales.dim() != 2 or scales.shape[0] != x.shape[0]):
        raise ShapeRefused(f"scales is {tuple(scales.shape)}: must be [{x.shape[0]}, groups]")
    places, width = pair_rows.shape[0], x.shape[1]
    source = x if x.stride(1) == 1 else x.contiguous()
    if source.dtype.itemsize == 1:
        source = source.view(torch.uint8)
    out = torch.empty(places, width, dtype=source.dtype, device=x.device)
    groups, out_scales = 0, None
    if scales is not None:
        groups = scales.shape[1]
        scales = scales if scales.stride(1) == 1 else scales.contiguous()
        out_scales = torch.empty(places, groups, dtype=scales.dtype, device=x.device)
    if places and width:
        block = COPY_BLOCK // source.dtype.itemsize
        permute_kernel[(places, triton.cdiv(width, block))](
            source, out if scales is None else scales, pair_rows, out,
            out if out_scales is None else out_scales, source.stride(0),
            0 if scales is None else scales.stride(0), width, groups, block=block,
            block_g=triton.next_power_of_2(max(1, groups)), has_scales=scales is not None,
            zero_gaps=zero_gaps, num_warps=4,
        )  # fmt: skip
    return out.view(x.dtype), out_scales


def unpermute(
    y: Tensor, index: Tensor, weights: Tensor, out_dtype: torch.dtype = torch.float32
) -> Tensor:
    """base.Kernels.combine_pairs: y [Q, D], index [T, K] int64, weights [T, K] fp32 -> [T, D]."""
    if index.dtype != torch.int64 or weights.shape != index.shape:
        raise ShapeRefused(
            f"index is {index.dtype} {tuple(index.shape)}, weights {tuple(weights.shape)}: must be "
            "int64 and fp32 [T, K]"
        )
    tokens, top_k = index.shape
    width = y.shape[1]
    y = y if y.stride(1) == 1 else y.contiguous()
    out = torch.empty(tokens, width, dtype=out_dtype, device=y.device)
    if tokens and width:
        unpermute_kernel[(tokens, triton.cdiv(width, SUM_BLOCK))](
            y, index.contiguous(), weights.float().contiguous(), out, y.stride(0), width,
            top_k=top_k, block=SUM_BLOCK, num_warps=4,
        )  # fmt: skip
    return out


def permute_twin(x: Tensor, pair_rows: Tensor) -> Tensor:
    """[N, D] -> [Q, D], zeros at places without a pair; dtypes of 8 bits as bytes."""
    source = x.view(torch.uint8) if x.dtype.itemsize == 1 else x
    out = source.new_zeros(pair_rows.shape[0], x.shape[1])
    for place, row in enumerate(pair_rows.tolist()):
        if row >= 0:
            out[place] = source[row]
    return out.view(x.dtype)


def unpermute_twin(y: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """[T, D] fp32, bit for bit: one product and one sum after the other."""
    total = torch.zeros(index.shape[0], y.shape[1])
    for token in range(index.shape[0]):
        for k in range(index.shape[1]):
            if int(index[token, k]) >= 0:
                total[token] += y[index[token, k]].float() * weights[token, k].float()
    return total


def permute_cost(places: int, width: int, itemsize: int, groups: int = 0) -> KernelCost:
    return KernelCost(places * (2 * width * itemsize + 8 * groups + 4), 0)


def unpermute_cost(
    tokens: int, pairs: int, width: int, itemsize: int = 2, out_itemsize: int = 4
) -> KernelCost:
    moved = pairs * (width * itemsize + 12) + tokens * width * out_itemsize
    return KernelCost(moved, 2 * pairs * width)


_SCALES = {"": "", "fp32": " scales", "i32": " ue8m0 scales"}  # i32: four exponents a word


def compile_cases() -> list[CompileCase]:
    cases = []
    wide = {90: ("wide loads",), 100: ("wide loads",)}
    for dtype, size, scaled in (("bf16", 2, ""), ("u8", 1, "fp32"), ("u8", 1, "i32")):
        block = COPY_BLOCK // size
        cases.append(
            CompileCase(
                permute_kernel,
                "permute",
                f"{dtype}{_SCALES[scaled]} {block} w4",
                {"x": f"*{dtype}", "scales": f"*{scaled or 'fp32'}", "pair_rows": "*i32",
                 "out": f"*{dtype}", "out_scales": f"*{scaled or 'fp32'}", "x_stride": "i32",
                 "scales_stride": "i32", "width": "i32",
                 "groups": "i32"},
                {"block": block, "block_g": 64 if scaled else 1, "has_scales": bool(scaled),
                 "zero_gaps": False},
                divisible=("x_stride", "width"),
                wants=wide,
            )
        )  # fmt: skip
    for top_k, out in ((8, "fp32"), (8, "bf16"), (6, "fp32"), (9, "fp32")):
        cases.append(
            CompileCase(
                unpermute_kernel,
                "unpermute",
                f"bf16 to {out} k{top_k} {SUM_BLOCK} w4",
                {"y": "*bf16", "index": "*i64", "weights": "*fp32", "out": f"*{out}",
                 "y_stride": "i32", "width": "i32"},
                {"top_k": top_k, "block": SUM_BLOCK},
                divisible=("y_stride", "width"),
                wants=wide,
            )
        )  # fmt: skip
    return cases
