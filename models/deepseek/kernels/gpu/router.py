"""Router GEMM: fp32 logits of every expert, bf16 rows on matrix units without loss of the weight.

The weight is fp32. Matrix units would cut it to 11 bits (TF32), and another choice of expert is no
rounding error. An fp32 number is the sum of three bf16 ones, and products of bf16 are exact in
fp32: so a product with bf16 rows is three products, split where they are read. fp32 rows take plain
multiply-adds, which only tests and the CPU's dtype need.

Channels are summed in parts of PART, and parts in order: by one program where tiles are many, by
one program a part where they are few (gate.py then adds the parts). The bits are the same (law 5).

Shape letters: T tokens, D hidden, E experts, S parts of the channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.deepseek.kernels.gpu.aot import CompileCase
from models.deepseek.kernels.gpu.cost import KernelCost
from models.deepseek.kernels.gpu.errors import ShapeRefused
from models.deepseek.kernels.gpu.language import INTERPRET, tl, triton
from models.deepseek.kernels.gpu.rounding import to_bf16

PART = 512  # channels
BLOCK_K = 64
BLOCK_E = 64  # experts: the rows of a matrix instruction, for every number of tokens
MANY_TILES = 96  # from here on a program sums all parts: most of a GPU has work without


@triton.jit(do_not_specialize=["tokens"])
def router_kernel(
    x, weight, out, x_stride, weight_stride, tokens, experts, hidden,
    part: tl.constexpr, block_k: tl.constexpr, block_e: tl.constexpr, block_t: tl.constexpr,
    parts_here: tl.constexpr,
):  # fmt: skip
    """x [T, D] bf16 or fp32, weight [E, D] fp32 -> out [S, T, E] fp32, S the grid's third size:
    sums of `parts_here` parts each. Bytes: 4ED + 2TD + 4STE; FLOPs 2TED (three times that on matrix
    units). Programs: expert tiles, token tiles, S."""
    expert = tl.program_id(0) * block_e + tl.arange(0, block_e)
    token = tl.program_id(1) * block_t + tl.arange(0, block_t)
    channel = tl.arange(0, block_k)
    total = tl.zeros((block_e, block_t), tl.float32)
    rows = weight + expert.to(tl.int64)[:, None] * weight_stride
    columns = x + token.to(tl.int64)[None, :] * x_stride
    for number in range(parts_here):
        begin = (tl.program_id(2) * parts_here + number) * part
        summed = tl.zeros((block_e, block_t), tl.float32)
        for step in range(0, part, block_k):
            at = begin + step + channel
            inside = at < hidden
            w = tl.load(
                rows + at[None, :], mask=(expert < experts)[:, None] & inside[None, :], other=0.0
            )
            v = tl.load(
                columns + at[:, None], mask=(token < tokens)[None, :] & inside[:, None], other=0.0
            )
            if x.dtype.element_ty == tl.float32:
                summed = tl.dot(w, v, summed, input_precision="ieee")
            else:
                high = to_bf16(w)
                rest = w - high.to(tl.float32)
                middle = to_bf16(rest)
                low = to_bf16(rest - middle.to(tl.float32))
                if INTERPRET:
                    v = v.to(tl.float32)
                    high, middle = high.to(tl.float32), middle.to(tl.float32)
                    low = low.to(tl.float32)
                summed = tl.dot(high, v, summed)
                summed = tl.dot(middle, v, summed)
                summed = tl.dot(low, v, summed)
        total += summed
    place = tl.program_id(2).to(tl.int64) * tokens * experts
    place += token.to(tl.int64)[None, :] * experts + expert[:, None]
    tl.store(out + place, total, mask=(expert < experts)[:, None] & (token < tokens)[None, :])


def router_tile(tokens: int) -> tuple[int, int]:
    """Tokens of a tile, warps."""
    return (16, 4) if tokens <= 16 else (32, 4) if tokens <= 32 else (64, 4)


def router_parts(tokens: int, experts: int, hidden: int) -> tuple[int, int]:
    """(S, parts that a program sums): all in one where tiles alone fill a GPU."""
    parts = triton.cdiv(hidden, PART)
    tiles = triton.cdiv(tokens, router_tile(tokens)[0]) * triton.cdiv(experts, BLOCK_E)
    return (1, parts) if tiles >= MANY_TILES else (parts, 1)


def router_logits(x: Tensor, weight: Tensor, parts: tuple[int, int] | None = None) -> Tensor:
    """x [T, D] bf16 or fp32, weight [E, D] fp32 -> [S, T, E] fp32: the logits are the sum over S,
    in that order. parts: router_parts' answer, for those who will not have its choice."""
    (tokens, hidden), experts = x.shape, weight.shape[0]
    if weight.shape[1] != hidden or weight.dtype != torch.float32 or weight.stride(1) != 1:
        raise ShapeRefused(
            f"weight is {weight.dtype} {tuple(weight.shape)}: must be float32 [E, {hidden}]"
        )
    x = x if x.stride(1) == 1 else x.contiguous()
    sums, parts_here = router_parts(tokens, experts, hidden) if parts is None else parts
    out = torch.empty(sums, tokens, experts, dtype=torch.float32, device=x.device)
    if tokens:
        block_t, warps = router_tile(tokens)
        grid = (triton.cdiv(experts, BLOCK_E), triton.cdiv(tokens, block_t), sums)
        router_kernel[grid](
            x, weight, out, x.stride(0), weight.stride(0), tokens, experts, hidden,
            part=PART, block_k=BLOCK_K, block_e=BLOCK_E, block_t=block_t, parts_here=parts_here,
            num_warps=warps,
        )  # fmt: skip
    return out


def router_twin(x: Tensor, weight: Tensor) -> Tensor:
    """[T, E] float64."""
    return x.double() @ weight.double().T


def router_cost(tokens: int, hidden: int, experts: int) -> KernelCost:
    """bf16 rows: FLOPs are those of matrix units, three products for one."""
    sums = router_parts(tokens, experts, hidden)[0]
    moved = 4 * experts * hidden + 2 * tokens * hidden + 4 * sums * tokens * experts
    return KernelCost(moved, 6 * tokens * experts * hidden)


def compile_cases() -> list[CompileCase]:
    cases = []
    for tokens, parts_here, dtype in (
        (16, 1, "bf16"),
        (32, 1, "bf16"),
        (64, 1, "bf16"),
        (64, 14, "bf16"),
        (64, 1, "fp32"),
    ):
        block_t, warps = router_tile(tokens)
        units = {90: ("wgmma", "wide loads"), 100: ("tcgen05.mma", "wide loads")}
        cases.append(
            CompileCase(
                router_kernel,
                "router",
                f"{dtype} {BLOCK_E}x{block_t}x{BLOCK_K} parts{parts_here} w{warps}",
                {"x": f"*{dtype}", "weight": "*fp32", "out": "*fp32", "x_stride": "i32",
                 "weight_stride": "i32", "tokens": "i32", "experts": "i32", "hidden": "i32"},
                {"part": PART, "block_k": BLOCK_K, "block_e": BLOCK_E, "block_t": block_t,
                 "parts_here": parts_here},
                num_warps=warps,
                divisible=("x_stride", "weight_stride", "experts", "hidden"),
                wants=units if dtype == "bf16" else {},
            )
        )  # fmt: skip
    return cases
