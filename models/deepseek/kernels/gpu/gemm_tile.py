"""One tile of a block-FP8 product: what the dense and the grouped GEMM share on the device.

Both operands are e4m3 with K contiguous; A has a scale for 1x128 values, B for 128x128. The matrix
units add 128 of K (their own sums are about 14 bits wide), then that sum times both scales is added
in fp32 registers: acc += dot * (scale_a * scale_b), K blocks in order. That order is the same
for every shape of tile, so a row's result does not depend on how many rows come along (law 5); that
the units add 128 products alike whichever operand is first is theirs to keep, and is checked on a
device (`make gpu-check`), as the interpreter cannot.

How it is made quick. Tiles come by TMA (hardware fills with zeros what lies outside), several
stages ahead; where pitch or alignment forbids that, by masked loads of 16 bytes. Scales of the next
block are asked for before this block's product. On Hopper two warpgroups take 64 rows each and run
apart: while one promotes, the other's product has the matrix units. PAIR: 256 columns as two
products of 128, one after the other, since a thread cannot hold two accumulators and two products.
SWAP: few rows. The weights' columns take the units' 64-high side and the tokens the other, which
may be as narrow as 16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from models.deepseek.kernels.gpu.language import INTERPRET, tl, triton
from models.deepseek.kernels.gpu.rounding import to_bf16

BLOCK_K = 128  # one scale; the same in every configuration (law 5)
GROUP_ROWS = 8  # row tiles that walk the columns together
TMA_ALIGNMENT = 16  # bytes, of the base and of a row


@dataclass(frozen=True)
class TileConfig:
    """rows x (columns, twice that if pair) of the result a program makes at a time.

    cycles: what an SM takes for a K block of a tile, estimated for Hopper (only ratios matter):
    4096 products a cycle and the promotions that nothing hides, or 40 bytes a cycle from L2.
    """

    rows: int
    columns: int
    warps: int
    stages: int
    pair: bool = False
    swap: bool = False
    programs_per_sm: int = 1
    cycles: int = 0

    def __str__(self) -> str:
        shape = f"{self.rows}x{self.columns * (2 if self.pair else 1)}x{BLOCK_K}"
        return f"{shape} w{self.warps} s{self.stages}{' swap' if self.swap else ''}"

    @property
    def width(self) -> int:
        return self.columns * (2 if self.pair else 1)

    @property
    def constants(self) -> dict[str, object]:
        """The kernel's constants that are the tile's."""
        return {
            "ROWS": self.rows,
            "COLUMNS": self.columns,
            "PAIR": self.pair,
            "SWAP": self.swap,
        }


@triton.jit
def tile_place(tile, row_tiles, column_tiles, GROUP: tl.constexpr):
    """Row tile and column tile of the tile-th: GROUP row tiles walk the columns together, rows
    first, so that what runs at one time reads few columns of B and few rows of A (L2)."""
    group = tile // (GROUP * column_tiles)
    tall = tl.minimum(row_tiles - group * GROUP, GROUP)
    within = tile % (GROUP * column_tiles)
    return group * GROUP + within % tall, within // tall


@triton.jit
def load_tile(source, row, column, row_end, width, pitch, ROWS: tl.constexpr, TMA: tl.constexpr):
    """[ROWS, 128] e4m3 from (row, column) on; 0 outside of [row_end, width]. source: a descriptor
    of blocks of that shape (TMA) or a pointer to rows `pitch` apart."""
    if TMA:
        tile = source.load([row, column])
    else:
        rows = row + tl.arange(0, ROWS)
        columns = column + tl.arange(0, 128)
        inside = (rows < row_end)[:, None] & (columns < width)[None, :]
        place = source + rows.to(tl.int64)[:, None] * pitch + columns[None, :]
        tile = tl.load(place, mask=inside, other=0.0)
    return tile


@triton.jit
def load_scale(place, inside, block, scale_word, PACKED: tl.constexpr):
    """fp32 [R]: the scale in K block `block` of the rows whose scales begin at `place`; 0 where not
    inside."""
    if PACKED:
        word = tl.load(place + (block // 4) * scale_word, mask=inside, other=0)
        scale = (((word >> (block % 4 * 8)) & 0xFF) << 23).to(tl.float32, bitcast=True)
    else:
        scale = tl.load(place + block * scale_word, mask=inside, other=0.0)
    return scale


@triton.jit
def settle(x):
    """x, computed by here: the compiler may not put off what x is made of, and with it keep the
    operands in registers. Nothing is done."""
    if not INTERPRET:
        x = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=False, pack=1
        )
    return x


@triton.jit
def tile_product(
    a, b, a_scales, b_scales,
    a_row, a_end, b_row, b_end, b_block, K, a_pitch, b_pitch, scale_row, scale_word, b_scale_row,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PAIR: tl.constexpr, SWAP: tl.constexpr,
    TMA: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Rows a_row.. of A times columns b_row.. of B: fp32 [ROWS, COLUMNS] (SWAP: [COLUMNS, ROWS]),
    and for PAIR that of the next 128 columns (else the first again). a_end, b_end: where rows of A
    and of B stop being ours. b_block: the row of b_scales, whose rows are b_scale_row apart."""
    blocks = tl.cdiv(K, 128)
    rows = a_row + tl.arange(0, ROWS)
    inside = rows < a_end
    b_scales += b_block.to(tl.int64) * b_scale_row
    # A column block that lies outside of B has no scale: any will do, it is not stored.
    beside = tl.where(b_row + COLUMNS < b_end, b_scale_row, 0)
    place = a_scales + rows.to(tl.int64) * scale_row
    scale = load_scale(place, inside, 0, scale_word, PACKED)
    by = tl.load(b_scales)
    if PAIR:
        by_next = tl.load(b_scales + beside)
    high: tl.constexpr = COLUMNS if SWAP else ROWS
    wide: tl.constexpr = ROWS if SWAP else COLUMNS
    first = tl.zeros((high, wide), tl.float32)
    second = first
    for block in range(0, blocks):
        x = load_tile(a, a_row, block * 128, a_end, K, a_pitch, ROWS, TMA)
        y = load_tile(b, b_row, block * 128, b_end, K, b_pitch, COLUMNS, TMA)
        factor = scale * by
        if PAIR:
            z = load_tile(b, b_row + COLUMNS, block * 128, b_end, K, b_pitch, COLUMNS, TMA)
            factor_next = scale * by_next
        ahead = block + 1
        scale = load_scale(place, inside & (ahead < blocks), ahead, scale_word, PACKED)
        by = tl.load(b_scales + ahead, mask=ahead < blocks, other=0.0)
        if PAIR:
            by_next = tl.load(b_scales + beside + ahead, mask=ahead < blocks, other=0.0)
        if SWAP:
            first += tl.dot(y, x.T) * factor[None, :]
        else:
            first += tl.dot(x, y.T) * factor[:, None]
        if PAIR:
            first = settle(first)
            second += tl.dot(x, z.T) * factor_next[:, None]
            second = settle(second)  # or triton 3.6 spills a register
    return first, second


@triton.jit
def store_tile(
    out, acc, row, row_end, column, width, pitch,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """acc to out[row.., column..], in out's dtype (bf16, fp32); not from row_end or width on."""
    if SWAP:
        acc = tl.trans(acc)
    value = to_bf16(acc) if out.dtype.element_ty == tl.bfloat16 else acc
    rows = row + tl.arange(0, ROWS)
    columns = column + tl.arange(0, COLUMNS)
    inside = (rows < row_end)[:, None] & (columns < width)[None, :]
    tl.store(out + rows.to(tl.int64)[:, None] * pitch + columns[None, :], value, mask=inside)


def tma_can(*operands: Tensor) -> bool:
    """Whether TMA takes these: base and rows at multiples of 16 bytes, none of no rows."""
    return all(
        t.data_ptr() % TMA_ALIGNMENT == 0
        and all(s * t.element_size() % TMA_ALIGNMENT == 0 for s in t.stride()[:-1])
        and t.numel() > 0
        for t in operands
    )


def operand(matrix: Tensor, rows: int, tma: bool) -> Any:
    """matrix [R, K] as a kernel takes it: a descriptor of [rows, 128] blocks, or itself."""
    if not tma:
        return matrix
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(matrix, [rows, BLOCK_K])


def operand_types(config: TileConfig, tma: bool) -> dict[str, str]:
    """The types of `a` and `b` in a compile case."""
    if not tma:
        return {"a": "*fp8e4nv", "b": "*fp8e4nv"}
    return {
        name: f"tensordesc<fp8e4nv[{rows}, {BLOCK_K}]>"
        for name, rows in (("a", config.rows), ("b", config.columns))
    }
