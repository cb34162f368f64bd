"""GEMMs of weights kept as they are (bf16, or fp32 in tests): linear, per head, grouped by expert.

x [M, K] times weight [N, K] transposed, fp32 sums over K in blocks of BLOCK_K in order, whatever
the tile: a row's result does not depend on how many rows come along (law 5). Few rows: the weight's
rows take the 64-high side of the matrix units and the tokens the other, as narrow as 16, and the
GEMM is bound by reading the weight: narrow tiles, many loads under way. Many rows: square tiles.

Three forms of one kernel: one weight; a weight a head, of heads that lie side by side in x and out
(absorbing W_UK, applying W_UV); a weight a slot, of rows picked by pair and sorted by slot.
Weights in e4m3 are fp8_gemm.py's and grouped_gemm.py's.

Shape letters: M rows, N outputs, K inputs, H heads, e slots, Q places of sorted pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from models.deepseek.kernels.gpu.aot import CompileCase
from models.deepseek.kernels.gpu.cost import KernelCost
from models.deepseek.kernels.gpu.errors import ShapeRefused
from models.deepseek.kernels.gpu.language import HAVE_TRITON, INTERPRET, tl, triton
from models.deepseek.kernels.gpu.narrow import narrow

BLOCK_K = 64  # the same in every configuration (law 5)
GROUP = 8  # row tiles that share the columns of a weight in L2


@dataclass(frozen=True)
class DenseTile:
    """rows x columns of the result; swap: columns of the result are the units' rows."""

    rows: int
    columns: int
    warps: int
    stages: int
    swap: bool = False

    def __str__(self) -> str:
        swap = " swap" if self.swap else ""
        return f"{self.rows}x{self.columns}x{BLOCK_K} w{self.warps} s{self.stages}{swap}"


# On sm_100a triton 3.6 spills 8 bytes with five stages and none with six, 3.8 none and 24.
MIDDLE_STAGES = 6 if HAVE_TRITON and triton.__version__.startswith("3.6.") else 5
# Up to so many rows (of a head, or of a slot in the mean), this tile.
TILES: dict[int, DenseTile] = {
    16: DenseTile(16, 64, warps=4, stages=6, swap=True),
    32: DenseTile(32, 64, warps=4, stages=6, swap=True),
    64: DenseTile(64, 64, warps=4, stages=MIDDLE_STAGES, swap=True),
    512: DenseTile(128, 128, warps=8, stages=4),
    2**31: DenseTile(128, 256, warps=8, stages=3),
}
PLAIN = DenseTile(32, 32, warps=4, stages=2)  # fp32: multiply-adds, no matrix units


def tile_for(rows: int, dtype: torch.dtype) -> DenseTile:
    if dtype == torch.float32:
        return PLAIN
    return next(tile for most, tile in TILES.items() if rows <= most)


@triton.jit(do_not_specialize=["M"])
def dense_kernel(
    x, weight, out, pair_rows, starts, ends, M, N, K, slots,
    x_pitch, x_head, w_pitch, w_head, out_pitch, out_head,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
    SWAP: tl.constexpr, GROUPED: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """x [M, K] (GROUPED: rows picked by pair_rows [Q] int32), weight [N, K] at head * w_head (of a
    slot: slot * w_head) -> out [M, N] (GROUPED: [Q, N], of each slot s only starts[s] .. ends[s] -
    1). FLOPs 2MNK; bytes NK + MK + MN items. Programs: tiles, heads. M: for GROUPED, Q."""
    column_tiles = tl.cdiv(N, COLUMNS)
    number = tl.program_id(0)
    if GROUPED:
        # Each slot's tiles follow the last one's: which slot is it, and which of its tiles?
        s = tl.arange(0, SLOTS)
        first = tl.load(starts + s, mask=s < slots, other=0)
        last = tl.load(ends + s, mask=s < slots, other=0)
        until = tl.cumsum(tl.cdiv(last - first, ROWS), axis=0)
        column = (number % column_tiles) * COLUMNS
        tile = number // column_tiles
        head = tl.sum((until <= tile).to(tl.int32), axis=0)
        before = tl.max(tl.where(s == head - 1, until, 0), axis=0)
        row = tl.load(starts + head, mask=head < slots, other=0) + (tile - before) * ROWS
        end = tl.load(ends + head, mask=head < slots, other=0)
        busy = head < slots
    else:
        head = tl.program_id(1)
        row_tiles = tl.cdiv(M, ROWS)
        group = number // (GROUP * column_tiles)
        tall = tl.minimum(row_tiles - group * GROUP, GROUP)
        within = number % (GROUP * column_tiles)
        row = (group * GROUP + within % tall) * ROWS
        column = (within // tall) * COLUMNS
        end = M
        busy = row < M
    if busy:
        rows, columns = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
        k = tl.arange(0, DEPTH)
        inside = rows < end
        source = rows.to(tl.int64)
        if GROUPED:
            source = tl.load(pair_rows + rows, mask=inside, other=0).to(tl.int64)
            inside = inside & (source >= 0)
        else:
            x += head.to(tl.int64) * x_head
            out += head.to(tl.int64) * out_head
        weight += head.to(tl.int64) * w_head
        x_rows = x + source * x_pitch
        w_rows = weight + columns.to(tl.int64) * w_pitch
        here = columns < N
        high: tl.constexpr = COLUMNS if SWAP else ROWS
        wide: tl.constexpr = ROWS if SWAP else COLUMNS
        total = tl.zeros((high, wide), tl.float32)
        for begin in range(0, K, DEPTH):
            at = begin + k
            left = at < K
            if SWAP:
                a = tl.load(
                    w_rows[:, None] + at[None, :], mask=here[:, None] & left[None, :], other=0.0
                )
                b = tl.load(
                    x_rows[None, :] + at[:, None], mask=inside[None, :] & left[:, None], other=0.0
                )
            else:
                a = tl.load(
                    x_rows[:, None] + at[None, :], mask=inside[:, None] & left[None, :], other=0.0
                )
                b = tl.load(
                    w_rows[None, :] + at[:, None], mask=here[None, :] & left[:, None], other=0.0
                )
            if x.dtype.element_ty == tl.float32:
                total = tl.dot(a, b, total, input_precision="ieee")
            elif INTERPRET:
                total = tl.dot(a.to(tl.float32), b.to(tl.float32), total)
            else:
                total = tl.dot(a, b, total)
        value = narrow(total, out.dtype.element_ty)
        if SWAP:
            value = tl.trans(value)
        place = out + rows.to(tl.int64)[:, None] * out_pitch + columns[None, :]
        tl.store(place, value, mask=(rows < end)[:, None] & here[None, :])


def dense(
    x: Tensor,
    weight: Tensor,
    out_dtype: torch.dtype | None = None,
    tile: DenseTile | None = None,
) -> Tensor:
    """x [M, K] (rows may be strided), weight [N, K] -> [M, N]; dtypes as base.Kernels.linear. tile:
    instead of the table's (here and below)."""
    _check(x, weight, x.shape[1:])
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, columns = x.shape[0], weight.shape[0]
    out = torch.empty(rows, columns, dtype=out_dtype or x.dtype, device=x.device)
    if rows and columns:
        tile = tile or tile_for(rows, x.dtype)
        grid = (triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns), 1)
        dense_kernel[grid](
            x, weight, out, x, x, x, rows, columns, x.shape[1], 0,
            x.stride(0), 0, weight.stride(0), 0, out.stride(0), 0,
            **_constants(tile, grouped=False), num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return out


def dense_per_head(
    x: Tensor, weight: Tensor, out: Tensor | None = None, tile: DenseTile | None = None
) -> Tensor:
    """x [M, H, K] (strided), weight [H, N, K] -> [M, H, N] in x's dtype; out: where to put it."""
    rows, heads, width = x.shape
    columns = weight.shape[1]
    if weight.shape != (heads, columns, width):
        raise ShapeRefused(f"weight is {tuple(weight.shape)}: must be [{heads}, N, {width}]")
    _check(x, weight, (width,))
    x = x if x.stride(2) == 1 else x.contiguous()
    if out is None:
        out = torch.empty(rows, heads, columns, dtype=x.dtype, device=x.device)
    if out.shape != (rows, heads, columns) or out.stride(2) != 1:
        raise ShapeRefused(f"out is {tuple(out.shape)}: must be {(rows, heads, columns)}")
    if out.numel():
        tile = tile or tile_for(rows, x.dtype)
        grid = (triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns), heads)
        dense_kernel[grid](
            x, weight, out, x, x, x, rows, columns, width, 0,
            x.stride(0), x.stride(1), weight.stride(1), weight.stride(0), out.stride(0),
            out.stride(1),
            **_constants(tile, grouped=False), num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return out


def dense_grouped(
    x: Tensor,
    weight: Tensor,
    pair_rows: Tensor,
    starts: Tensor,
    ends: Tensor,
    expected: int,
    tile: DenseTile | None = None,
) -> Tensor:
    """x [M, K], weight [e, N, K] (slots may be strided), pair_rows [Q], starts, ends [e] int32
    (sort_pairs.PairLayout) -> [Q, N] in x's dtype; places that no slot owns hold anything.
    expected: rows of a slot in the mean, which only chooses the tile."""
    _check(x, weight, (weight.shape[2],))
    slots, columns, width = weight.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    places = pair_rows.shape[0]
    out = torch.empty(places, columns, dtype=x.dtype, device=x.device)
    if out.numel() and slots:
        tile = tile or tile_for(expected, x.dtype)
        tiles = triton.cdiv(places, tile.rows) + min(slots, places)  # the most that there can be
        dense_kernel[(tiles * triton.cdiv(columns, tile.columns), 1)](
            x, weight, out, pair_rows, starts, ends, places, columns, width, slots,
            x.stride(0), 0, weight.stride(1), weight.stride(0), out.stride(0), 0,
            **_constants(tile, grouped=True, slots=slots), num_warps=tile.warps,
            num_stages=tile.stages,
        )  # fmt: skip
    return out


def _check(x: Tensor, weight: Tensor, width: tuple[int, ...]) -> None:
    if x.dtype not in (torch.bfloat16, torch.float32) or weight.dtype != x.dtype:
        raise ShapeRefused(
            f"x is {x.dtype}, weight {weight.dtype}: must both be bfloat16 or float32"
        )
    if weight.stride(-1) != 1 or weight.shape[-1:] != width or x.shape[-1:] != width:
        raise ShapeRefused(
            f"x is {tuple(x.shape)}, weight {tuple(weight.shape)} with strides {weight.stride()}: "
            "must have the same last size, which lies together"
        )


def _constants(tile: DenseTile, grouped: bool, slots: int = 1) -> dict[str, object]:
    return {
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "DEPTH": BLOCK_K,
        "GROUP": GROUP,
        "SWAP": tile.swap,
        "GROUPED": grouped,
        "SLOTS": triton.next_power_of_2(slots),
    }


def dense_twin(x: Tensor, weight: Tensor) -> Tensor:
    """[M, N] float64. Sums of K products in fp32 are within K * 2^-24 of the sum of magnitudes."""
    return x.double() @ weight.double().T


def dense_grouped_twin(
    x: Tensor, weight: Tensor, pair_rows: Tensor, starts: Tensor, ends: Tensor
) -> Tensor:
    """[Q, N] float64, 0 at places that no slot owns."""
    out = torch.zeros(pair_rows.shape[0], weight.shape[1], dtype=torch.float64)
    for slot in range(weight.shape[0]):
        mine = slice(int(starts[slot]), int(ends[slot]))
        out[mine] = dense_twin(x[pair_rows[mine].long()], weight[slot])
    return out


def dense_cost(
    rows: int, columns: int, width: int, heads: int = 1, itemsize: int = 2, out_itemsize: int = 2
) -> KernelCost:
    """heads: of one weight each (or slots that have rows, `rows` in each)."""
    moved = itemsize * (columns * width + rows * width) + out_itemsize * rows * columns
    return KernelCost(heads * moved, 2 * heads * rows * columns * width)


def compile_cases() -> list[CompileCase]:
    types = {
        "pair_rows": "*i32", "starts": "*i32", "ends": "*i32",
        **dict.fromkeys(("M", "N", "K", "slots", "x_pitch", "x_head", "w_pitch", "w_head",
                         "out_pitch", "out_head"), "i32"),
    }  # fmt: skip
    whole = ("N", "K", "x_pitch", "x_head", "w_pitch", "w_head", "out_pitch", "out_head")
    units = {90: ("wgmma", "wide loads"), 100: ("tcgen05.mma", "wide loads")}
    cases = []
    for grouped in (False, True):
        for tile in TILES.values():
            cases.append(
                CompileCase(
                    dense_kernel,
                    "dense_grouped" if grouped else "dense",
                    f"bf16 {tile}",
                    {"x": "*bf16", "weight": "*bf16", "out": "*bf16", **types},
                    _constants(tile, grouped, 32),
                    tile.warps,
                    tile.stages,
                    divisible=whole,
                    wants=units,
                )
            )
    cases.append(
        CompileCase(
            dense_kernel,
            "dense",
            f"fp32 {PLAIN}",
            {"x": "*fp32", "weight": "*fp32", "out": "*fp32", **types},
            _constants(PLAIN, False),
            PLAIN.warps,
            PLAIN.stages,
            divisible=whole,
        )
    )
    cases.append(
        CompileCase(
            dense_kernel,
            "dense",
            f"bf16 to fp32 {TILES[16]}",  # logits
            {"x": "*bf16", "weight": "*bf16", "out": "*fp32", **types},
            _constants(TILES[16], False),
            TILES[16].warps,
            TILES[16].stages,
            divisible=whole,
            wants=units,
        )
    )
    return cases
