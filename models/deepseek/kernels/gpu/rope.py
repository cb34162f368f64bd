"""RoPE: interleaved pairs of each head's rope part rotated by the position's angles.

The cached key's rotation is mla_cache.py's, with all else that is done to it; this is the queries',
written where attention reads them, and the plain kernel that the protocol asks for.

Shape letters: T tokens, H heads, r rope dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.deepseek.kernels.gpu.aot import CompileCase
from models.deepseek.kernels.gpu.cost import KernelCost
from models.deepseek.kernels.gpu.errors import ShapeRefused
from models.deepseek.kernels.gpu.language import tl, triton
from models.deepseek.kernels.gpu.narrow import narrow

BLOCK_H = 32  # heads of a program


@triton.jit
def rope_kernel(
    x, positions, cos_sin, out, x_row, x_head, out_row, out_head, heads,
    half: tl.constexpr, block_half: tl.constexpr, block_h: tl.constexpr,
):  # fmt: skip
    """x [T, H, r] bf16 or fp32 by strides, positions [T] int64, cos_sin [P, r] fp32 (cosines, then
    sines) -> out [T, H, r] by strides: (2i, 2i + 1) as complex numbers times the position's, in
    fp32. Bytes (bf16): 4THr + 4Tr. FLOPs 3THr: bound by bytes. Programs: tokens, blocks of
    heads."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * block_h + tl.arange(0, block_h)
    pair = tl.arange(0, block_half)
    # A row that pads a captured step has position -1.
    turn = cos_sin + tl.maximum(tl.load(positions + token), 0) * (2 * half) + pair
    cos = tl.load(turn, mask=pair < half, other=0.0)[None, :]
    sin = tl.load(turn + half, mask=pair < half, other=0.0)[None, :]
    # Both of a pair by one wide load: taken apart and put together again in registers.
    at = tl.arange(0, 2 * block_half)
    inside = (head < heads)[:, None] & (at < 2 * half)[None, :]
    source = x + token * x_row + head[:, None] * x_head + at[None, :]
    value = tl.load(source, mask=inside, other=0.0)
    even, odd = tl.split(tl.reshape(value.to(tl.float32), (block_h, block_half, 2)))
    turned = tl.join(even * cos - odd * sin, even * sin + odd * cos)
    turned = narrow(tl.reshape(turned, (block_h, 2 * block_half)), out.dtype.element_ty)
    target = out + token * out_row + head[:, None] * out_head + at[None, :]
    tl.store(target, turned, mask=inside)


def rope(x: Tensor, positions: Tensor, cos_sin: Tensor, out: Tensor | None = None) -> Tensor:
    """x [T, H, r] (strided), positions [T] int64, cos_sin [P, r] fp32 -> [T, H, r] in x's dtype.
    out: where to put it (strided)."""
    tokens, heads, dim = x.shape
    if dim % 2 or cos_sin.shape[1] != dim or cos_sin.dtype != torch.float32:
        raise ShapeRefused(
            f"x is {tuple(x.shape)}, cos_sin {cos_sin.dtype} {tuple(cos_sin.shape)}: must be "
            "[T, H, r], r even, and float32 [positions, r]"
        )
    if positions.dtype != torch.int64 or positions.shape != (tokens,):
        raise ShapeRefused(
            f"positions is {positions.dtype} {tuple(positions.shape)}: must be int64 [{tokens}]"
        )
    x = x if x.stride(2) == 1 else x.contiguous()
    if out is None:
        out = torch.empty(tokens, heads, dim, dtype=x.dtype, device=x.device)
    if out.shape != x.shape or out.stride(2) != 1:
        raise ShapeRefused(f"out is {tuple(out.shape)}: must be {tuple(x.shape)}")
    if x.numel():
        block_h = min(BLOCK_H, triton.next_power_of_2(heads))
        rope_kernel[(tokens, triton.cdiv(heads, block_h))](
            x, positions, cos_sin.contiguous(), out, x.stride(0), x.stride(1), out.stride(0),
            out.stride(1), heads, half=dim // 2, block_half=triton.next_power_of_2(dim // 2),
            block_h=block_h, num_warps=4,
        )  # fmt: skip
    return out


def rope_twin(x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
    """[T, H, r] float64."""
    cos, sin = cos_sin[positions].double().unsqueeze(1).chunk(2, dim=-1)
    turned = torch.view_as_complex(x.double().unflatten(-1, (-1, 2))) * torch.complex(cos, sin)
    return torch.view_as_real(turned).flatten(-2)


def rope_cost(tokens: int, heads: int, dim: int, itemsize: int = 2) -> KernelCost:
    return KernelCost(tokens * (2 * heads * dim * itemsize + 4 * dim), 3 * tokens * heads * dim)


def compile_cases() -> list[CompileCase]:
    return [
        CompileCase(
            rope_kernel,
            "rope",
            f"bf16 64 {BLOCK_H} w4",
            {"x": "*bf16", "positions": "*i64", "cos_sin": "*fp32", "out": "*bf16", "x_row": "i32",
             "x_head": "i32", "out_row": "i32", "out_head": "i32", "heads": "i32"},
            {"half": 32, "block_half": 32, "block_h": BLOCK_H},
            divisible=("x_row", "x_head", "out_row", "out_head"),
            wants={90: ("wide loads",), 100: ("wide loads",)},
        )
    ]  # fmt: skip
