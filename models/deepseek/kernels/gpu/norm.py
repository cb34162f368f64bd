"""RMSNorm, residual add + RMSNorm, and SiLU-mul, all from and to the model dtype.

What is quantised as it leaves is quant.py's. Memory-bound: each row is read once into registers and
written once. One program a row, and the tile's width follows from the row's alone, so that its sum
of squares has one order whatever comes along (law 5).

Shape letters: T tokens, D hidden, I intermediate.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from models.deepseek.kernels.gpu.aot import CompileCase
from models.deepseek.kernels.gpu.cost import KernelCost
from models.deepseek.kernels.gpu.errors import ShapeRefused
from models.deepseek.kernels.gpu.language import tl, triton
from models.deepseek.kernels.gpu.narrow import narrow

MAX_WIDTH = 16384  # a row lies in the registers of one program
SILU_BLOCK = 1024


def norm_warps(width: int) -> int:
    """Warps of a program for rows of this width: 8 to 32 values a thread."""
    return 1 if width <= 512 else 4 if width <= 2048 else 8


@triton.jit
def rms_norm_kernel(
    x, residual, weight, out, x_stride, residual_stride, out_stride, eps,
    width: tl.constexpr, block: tl.constexpr, has_residual: tl.constexpr,
):  # fmt: skip
    """x [T, D] bf16 or fp32 (rows strided), weight [D] fp32 -> out [T, D]. has_residual: residual
    [T, D] += x first, in place and rounded to its dtype; the norm is of what was rounded. Bytes
    (bf16): 4TD + 4D, with residual 8TD + 4D. FLOPs 4TD, with residual 5TD: bound by bytes. One
    program a row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    inside = at < width
    value = tl.load(x + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    if has_residual:
        place = residual + row * residual_stride + at
        value += tl.load(place, mask=inside, other=0.0).to(tl.float32)
        rounded = narrow(value, residual.dtype.element_ty)
        tl.store(place, rounded, mask=inside)
        value = rounded.to(tl.float32)
    mean = tl.sum(value * value, axis=0) / width
    gain = tl.load(weight + at, mask=inside, other=0.0)
    value = value * tl.div_rn(1.0, tl.sqrt_rn(mean + eps)) * gain
    tl.store(out + row * out_stride + at, narrow(value, out.dtype.element_ty), mask=inside)


@triton.jit
def silu_mul_kernel(
    x, limit, out, x_stride, out_stride, width, block: tl.constexpr, limited: tl.constexpr
):
    """x [T, 2I], gate then up -> out [T, I] = silu(gate) * up, fp32 inside, one rounding. limited:
    of the first limit[0] rows only. x and out bf16 or fp32. Bytes (bf16): 6TI. FLOPs 5TI: bound by
    bytes. Programs: rows by blocks of columns."""
    row = tl.program_id(0).to(tl.int64)
    wanted = row >= 0
    if limited:
        wanted = row < tl.load(limit)
    if wanted:
        at = tl.program_id(1) * block + tl.arange(0, block)
        inside = at < width
        source = x + row * x_stride
        gate = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(source + width + at, mask=inside, other=0.0).to(tl.float32)
        value = tl.div_rn(gate, 1.0 + tl.exp(-gate)) * up
        tl.store(out + row * out_stride + at, narrow(value, out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, D] (rows may be strided), weight [D] fp32 -> [T, D] contiguous in x's dtype."""
    return _norm(x, None, weight, eps)


def add_rms_norm(residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual [T, D] += x in place, then rms_norm(residual)."""
    return _norm(x, residual, weight, eps)


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    rows, width = x.shape
    if width > MAX_WIDTH or weight.shape != (width,) or weight.dtype != torch.float32:
        raise ShapeRefused(
            f"weight is {tuple(weight.shape)} {weight.dtype}, x {tuple(x.shape)}: weight must be "
            f"[D] float32, D at most {MAX_WIDTH}"
        )
    if residual is not None and (residual.shape != x.shape or residual.stride(1) != 1):
        raise ShapeRefused(
            f"residual is {tuple(residual.shape)} with strides {residual.stride()}: must be "
            f"{tuple(x.shape)} with rows that lie together"
        )
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    if rows:
        added = x if residual is None else residual
        rms_norm_kernel[(rows,)](
            x, added, weight, out, x.stride(0), added.stride(0), out.stride(0), eps,
            width=width, block=triton.next_power_of_2(width), has_residual=residual is not None,
            num_warps=norm_warps(width),
        )  # fmt: skip
    return out


def silu_mul(x: Tensor, limit: Tensor | None = None) -> Tensor:
    """x [T, 2I], gate's columns first -> [T, I] in x's dtype. limit [1] int32: only so many first
    rows are read and written."""
    rows, both = x.shape
    if both % 2:
        raise ShapeRefused(f"x is {tuple(x.shape)}: must be [T, 2I], gate then up")
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(rows, both // 2, dtype=x.dtype, device=x.device)
    if out.numel():
        grid = (rows, triton.cdiv(both // 2, SILU_BLOCK))
        silu_mul_kernel[grid](
            x, x if limit is None else limit, out, x.stride(0), out.stride(0), both // 2,
            block=SILU_BLOCK, limited=limit is not None, num_warps=4,
        )  # fmt: skip
    return out


# -- twins, costs, compile cases ----------------------------------------------------------------


def rms_norm_twin(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[T, D] -> [T, D] float64, not rounded."""
    wide = x.double()
    return wide * torch.rsqrt(wide.square().mean(dim=1, keepdim=True) + eps) * weight.double()


def silu_mul_twin(x: Tensor) -> Tensor:
    """[T, 2I] -> [T, I] float64, not rounded."""
    gate, up = x.double().chunk(2, dim=1)
    return F.silu(gate) * up


def rms_norm_cost(tokens: int, width: int, itemsize: int = 2, residual: bool = False) -> KernelCost:
    passes = 4 if residual else 2
    return KernelCost(passes * tokens * width * itemsize + 4 * width, 4 * tokens * width)


def silu_mul_cost(tokens: int, intermediate: int, itemsize: int = 2) -> KernelCost:
    return KernelCost(3 * tokens * intermediate * itemsize, 5 * tokens * intermediate)


def compile_cases() -> list[CompileCase]:
    cases = []
    wide = {90: ("wide loads",), 100: ("wide loads",)}
    for width, residual in ((7168, True), (7168, False), (1536, False), (512, False)):
        cases.append(
            CompileCase(
                rms_norm_kernel,
                "rms_norm",
                f"bf16 {width}{' add' if residual else ''} w{norm_warps(width)}",
                {"x": "*bf16", "residual": "*bf16", "weight": "*fp32", "out": "*bf16",
                 "x_stride": "i32", "residual_stride": "i32", "out_stride": "i32", "eps": "fp32"},
                {"width": width, "block": triton.next_power_of_2(width), "has_residual": residual},
                num_warps=norm_warps(width),
                divisible=("x_stride", "residual_stride", "out_stride"),
                wants=wide,
            )
        )  # fmt: skip
    for limited in (False, True):
        cases.append(
            CompileCase(
                silu_mul_kernel,
                "silu_mul",
                f"bf16 {SILU_BLOCK}{' limited' if limited else ''} w4",
                {"x": "*bf16", "limit": "*i32", "out": "*bf16", "x_stride": "i32",
                 "out_stride": "i32", "width": "i32"},
                {"block": SILU_BLOCK, "limited": limited},
                divisible=("x_stride", "out_stride", "width"),
                wants=wide,
            )
        )  # fmt: skip
    return cases
