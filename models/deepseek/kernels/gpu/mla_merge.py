"""Parts of a softmax put together: by their logarithms of sums, in the order of positions.

Knows parts [P, H, c] in fp32 with a logarithm each. Knows nothing of caches. A row's parts are
added one after the other, so its bits are a function of its own parts (law 5). A part that saw
nothing has the logarithm -inf: it counts for nothing whatever its values are, NaN included. One
whose logarithm is NaN saw something that is no number: then so is the row.

Shape letters: T rows, H heads, c width, P parts of all rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.deepseek.kernels.gpu.aot import CompileCase
from models.deepseek.kernels.gpu.cost import KernelCost
from models.deepseek.kernels.gpu.language import tl, triton
from models.deepseek.kernels.gpu.rounding import to_bf16


@triton.jit
def merge_kernel(
    part_out, part_lse, work_start, out, lse, heads: tl.constexpr, width: tl.constexpr
):
    """part_out [P, H, c], part_lse [P, H] fp32 (natural), work_start [T + 1] int32: the parts of a
    row -> out [T, H, c] bf16, lse [T, H] fp32 of rows with two parts or more; others are left as
    they are. Bytes: 4 (c + 1) a head and part, 2c + 4 a head and row. FLOPs
    2Hc a part: bound by bytes. One program a row, head."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(work_start + row)
    last = tl.load(work_start + row + 1)
    if last - first > 1:
        c = tl.arange(0, width)
        base = first.to(tl.int64) * heads + head
        peak = tl.load(part_lse + base)
        for part in tl.range(1, last - first):
            peak = tl.maximum(peak, tl.load(part_lse + base + part * heads))
        weight = tl.zeros([], tl.float32)
        value = tl.zeros([width], tl.float32)
        for part in tl.range(0, last - first):
            at = base + part * heads
            log_sum = tl.load(part_lse + at)
            seen = log_sum != float("-inf")
            share = tl.where(seen, tl.exp(log_sum - peak), 0.0)
            weight += share
            value += tl.where(seen, tl.load(part_out + at * width + c) * share, 0.0)
        some = weight != 0
        at = row.to(tl.int64) * heads + head
        tl.store(out + at * width + c, to_bf16(value / tl.where(some, weight, 1.0)))
        tl.store(lse + at, tl.where(some, peak + tl.log(weight), float("-inf")))


def merge_units(
    part_out: Tensor, part_lse: Tensor, work_start: Tensor, out: Tensor, lse: Tensor
) -> None:
    """See merge_kernel; out [T, H, c] bf16 and lse [T, H] are written in place."""
    rows, heads, width = out.shape
    if rows:
        merge_kernel[(rows, heads)](
            part_out, part_lse, work_start, out, lse, heads=heads, width=width, num_warps=4
        )


# -- twin, cost, compile cases --------------------------------------------------------------------


def merge_twin(part_out: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """[parts, H, c], [parts, H] of one row -> [H, c], [H], float64."""
    total = torch.logsumexp(part_lse.double(), dim=0)
    share = torch.exp(part_lse.double() - total.clamp(min=-1e300))
    share = share.masked_fill(part_lse == float("-inf"), 0.0)
    seen = torch.where(share[..., None] == 0, 0.0, part_out.double())
    return (seen * share[..., None]).sum(0), total


def merge_cost(parts: int, rows: int, heads: int, width: int = 512) -> KernelCost:
    """Of `parts` parts in all that belong to `rows` rows."""
    moved = parts * heads * 4 * (width + 1) + rows * heads * (2 * width + 4)
    return KernelCost(moved, 2 * parts * heads * width)


def compile_cases() -> list[CompileCase]:
    signature = {"part_out": "*fp32", "part_lse": "*fp32", "work_start": "*i32", "out": "*bf16",
                 "lse": "*fp32"}  # fmt: skip
    return [
        CompileCase(
            merge_kernel,
            "mla_merge",
            f"h{heads} 512 w4",
            signature,
            {"heads": heads, "width": 512},
            num_warps=4,
            wants={90: ("wide loads",), 100: ("wide loads",)},
        )
        for heads in (128, 16)
    ]
