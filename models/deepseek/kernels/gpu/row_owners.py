"""Which expert each row of a contiguous layout belongs to: what DeepGEMM is told on sm_90.

One launch in place of a dozen small ones of torch, twice a layer. Knows segments (grouped_gemm.py's
layouts); nothing of who reads the answer.

Shape letters: M rows, e experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.deepseek.kernels.gpu.aot import CompileCase
from models.deepseek.kernels.gpu.cost import KernelCost
from models.deepseek.kernels.gpu.errors import ShapeRefused
from models.deepseek.kernels.gpu.grouped_gemm import segments
from models.deepseek.kernels.gpu.language import tl, triton

BLOCK = 512  # rows of a program


@triton.jit(do_not_specialize=["rows", "experts"])
def row_owners_kernel(
    starts, ends, owners, rows, experts, alignment, STARTS: tl.constexpr, BLOCK_M: tl.constexpr
):
    """ends int32 [e] -> owners int32 [M]: i for rows from where segment i begins to ends[i], else
    -1. STARTS: it begins at starts int32 [e], else at the end before, aligned. Bytes: 4M,
    and 4e (8 with starts) for each program. FLOPs none. One program a block of rows."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    owner = tl.full((BLOCK_M,), -1, tl.int32)
    for expert in range(experts):
        if STARTS:
            begin = tl.load(starts + expert)
        else:
            before = tl.load(ends + expert - 1, mask=expert > 0, other=0)
            begin = tl.cdiv(before, alignment) * alignment
        inside = (row >= begin) & (row < tl.load(ends + expert))
        owner = tl.where(inside, expert, owner)
    tl.store(owners + row, owner, mask=row < rows)


def row_owners(rows: int, ends: Tensor, alignment: int, starts: Tensor | None = None) -> Tensor:
    """ends and starts [e] int32 -> [rows] int32, the expert that each row belongs to, -1 for none.
    Segments do not overlap. Nobody waits for the device."""
    for numbers in (ends,) if starts is None else (ends, starts):
        if numbers.dtype != torch.int32 or numbers.shape != ends.shape:
            raise ShapeRefused(f"{numbers.dtype} {list(numbers.shape)} of rows: int32 [e]")
    owners = torch.empty(rows, dtype=torch.int32, device=ends.device)
    if rows:
        row_owners_kernel[(triton.cdiv(rows, BLOCK),)](
            ends if starts is None else starts, ends, owners, rows, ends.shape[0], alignment,
            STARTS=starts is not None, BLOCK_M=BLOCK, num_warps=4,
        )  # fmt: skip
    return owners


def row_owners_twin(
    rows: int, ends: Tensor, alignment: int, starts: Tensor | None = None
) -> Tensor:
    """One segment after the other."""
    held = segments(ends.tolist(), alignment)
    if starts is not None:
        held = list(zip(starts.tolist(), ends.tolist(), strict=True))
    owners = torch.full((rows,), -1, dtype=torch.int32)
    for expert, (begin, end) in enumerate(held):
        owners[begin : max(begin, end)] = expert
    return owners


def cost(rows: int, experts: int) -> KernelCost:
    return KernelCost(4 * rows + 4 * experts * -(-rows // BLOCK), 0)


def compile_cases() -> list[CompileCase]:
    return [
        CompileCase(
            row_owners_kernel,
            "row_owners",
            f"{BLOCK}{' starts' if starts else ''} w4",
            {"starts": "*i32", "ends": "*i32", "owners": "*i32", "rows": "i32", "experts": "i32",
             "alignment": "i32"},
            {"STARTS": starts, "BLOCK_M": BLOCK},
        )
        for starts in (False, True)
    ]  # fmt: skip
