"""Block-FP8 GEMM: A [M, K] e4m3 with 1x128 scales times B [N, K] e4m3 with 128x128 scales.

A persistent grid walks the result's tiles in groups of rows, so that the B columns of a group stay
in L2. What a tile is: gemm_tile.py. Several experts at once: grouped_gemm.py. M, N and K may be
ragged.

Shape letters: M rows, N columns of the result (rows of B), K their width, G = ceil(K / 128).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dispatch.fp8 import BLOCK, num_blocks, unpack_exponents
from models.deepseek.fp8 import scale_shape
from models.deepseek.kernels.gpu.aot import CompileCase
from models.deepseek.kernels.gpu.cost import KernelCost
from models.deepseek.kernels.gpu.errors import ShapeRefused
from models.deepseek.kernels.gpu.gemm_tile import (
    GROUP_ROWS,
    TileConfig,
    operand,
    operand_types,
    store_tile,
    tile_place,
    tile_product,
    tma_can,
)
from models.deepseek.kernels.gpu.grid import num_programs
from models.deepseek.kernels.gpu.language import tl, triton
from models.deepseek.kernels.gpu.scales import ScaleView, view_scales

# Up to so many rows, this tile. Few rows are bound by reading B: narrow tiles make programs enough
# for all SMs, and stages keep 80 KiB under way in each, more than latency times bandwidth asks for.
FEW_ROWS: dict[int, TileConfig] = {
    16: TileConfig(16, 64, warps=4, stages=8, swap=True, programs_per_sm=2),
    32: TileConfig(32, 64, warps=4, stages=7, swap=True, programs_per_sm=2),
    64: TileConfig(64, 64, warps=4, stages=5, swap=True, programs_per_sm=2),
    128: TileConfig(128, 64, warps=4, stages=4, swap=True, programs_per_sm=2, cycles=600),
}
# Many rows are bound by the matrix units, and by L2 where tiles are small.
MANY_ROWS: tuple[TileConfig, ...] = (
    FEW_ROWS[128],
    TileConfig(128, 128, warps=8, stages=5, cycles=800),
    TileConfig(128, 128, warps=8, stages=4, pair=True, cycles=1480),
)
CONFIGS: tuple[TileConfig, ...] = (*FEW_ROWS.values(), *MANY_ROWS[1:])
SMS = 132  # of an H100 or H200: the choice is the same wherever it is made


def config_for(rows: int, columns: int, experts: int = 1) -> TileConfig:
    """The tile for so many rows (each of `experts`): a pure function of the shape, so that ranks
    and captured graphs agree. Of the large ones the one that has done first: whole rounds of all
    SMs times its cycles."""
    for most, config in FEW_ROWS.items():
        if rows <= most:
            return config

    def cycles(config: TileConfig) -> int:
        tiles = experts * -(-rows // config.rows) * -(-columns // config.width)
        return -(-tiles // SMS) * config.cycles

    return min(MANY_ROWS, key=cycles)


@triton.jit(do_not_specialize=["M"])
def fp8_gemm_kernel(
    a, b, out, a_scales, b_scales, M, N, K,
    a_pitch, b_pitch, out_pitch, scale_row, scale_word, b_scale_row,
    GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PAIR: tl.constexpr,
    SWAP: tl.constexpr, TMA: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """a e4m3 [M, K], a_scales fp32 [M, G] or packed int32 [M, ceil(G / 4)] by strides, b e4m3
    [N, K], b_scales fp32 [ceil(N / 128), G] -> out [M, N] bf16 or fp32. FLOPs 2MNK; bytes MK + NK +
    4MG + 4NG / 128 + out. Grid: programs that share all tiles."""
    width: tl.constexpr = COLUMNS * 2 if PAIR else COLUMNS
    row_tiles = tl.cdiv(M, ROWS)
    column_tiles = tl.cdiv(N, width)
    for tile in range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0)):
        row_tile, column_tile = tile_place(tile, row_tiles, column_tiles, GROUP)
        row, column = row_tile * ROWS, column_tile * width
        first, second = tile_product(
            a, b, a_scales, b_scales, row, M, column, N, column // 128, K,
            a_pitch, b_pitch, scale_row, scale_word, b_scale_row,
            ROWS, COLUMNS, PAIR, SWAP, TMA, PACKED,
        )  # fmt: skip
        store_tile(out, first, row, M, column, N, out_pitch, ROWS, COLUMNS, SWAP)
        if PAIR:
            store_tile(out, second, row, M, column + COLUMNS, N, out_pitch, ROWS, COLUMNS, SWAP)


def fp8_gemm(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """a e4m3 [M, K] (rows may be strided) with scales of any of the four formats, b e4m3 [N, K] and
    fp32 [ceil(N / 128), G] -> [M, N] in dtype (bf16, fp32). out: where to put it instead.
    ShapeRefused for what does not fit."""
    view = check_operands(a, a_scales, b[None], b_scales[None], dtype)
    (rows, width), columns = a.shape, b.shape[0]
    if out is None:
        out = torch.empty((rows, columns), dtype=dtype, device=a.device)
    if out.shape != (rows, columns) or out.dtype != dtype or out.stride(1) != 1:
        raise ShapeRefused(f"out={out.dtype} {list(out.shape)}: {dtype} {[rows, columns]}")
    if rows:
        config = config_for(rows, columns)
        tma = tma_can(a, b)
        tiles = triton.cdiv(rows, config.rows) * triton.cdiv(columns, config.width)
        fp8_gemm_kernel[(num_programs(a.device, tiles, config.programs_per_sm),)](
            operand(a, config.rows, tma), operand(b, config.columns, tma), out, a_scales, b_scales,
            rows, columns, width, a.stride(0), b.stride(0), out.stride(0),
            view.row_stride, view.word_stride, b_scales.stride(0),
            GROUP=GROUP_ROWS, TMA=tma, PACKED=view.packed, **config.constants,
            num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip
    return out


def check_operands(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, dtype: torch.dtype
) -> ScaleView:
    """a [.., M, K], b [e, N, K] and their scales belong together; the view of a's scales.
    ShapeRefused, naming what does not."""
    check_codes(a, b, dtype)
    experts, columns, width = b.shape
    wanted = (experts, *scale_shape((columns, width), BLOCK))
    if (
        b_scales.dtype != torch.float32
        or tuple(b_scales.shape) != wanted
        or b_scales.stride(2) != 1
    ):
        raise ShapeRefused(f"b_scales={b_scales.dtype} {list(b_scales.shape)}: float32 {wanted}")
    return view_scales(a_scales, a.shape[-2], width)


def check_codes(a: Tensor, b: Tensor, dtype: torch.dtype) -> None:
    """As check_operands, without scales."""
    if dtype not in (torch.bfloat16, torch.float32):
        raise ShapeRefused(f"dtype={dtype}: torch.bfloat16 or torch.float32")
    for name, tensor in (("a", a), ("b", b)):
        if tensor.dtype != torch.float8_e4m3fn or tensor.stride(-1) != 1:
            raise ShapeRefused(
                f"{name}={tensor.dtype}, strides {tensor.stride()}: float8_e4m3fn, K contiguous"
            )
    _, columns, width = b.shape
    if not width or not columns or a.shape[-1] != width:
        raise ShapeRefused(f"a={list(a.shape)}, b={list(b.shape)}: the same K, at least 1, N >= 1")


def fp8_gemm_twin(a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor) -> Tensor:
    """[M, N] float64 of what the codes and scales say. The kernel adds K blocks in fp32: it is
    within (K + 2G) * 2^-24 of the sum of magnitudes, and then rounds once to its dtype. On a
    device the sum of 128 has about 14 bits: 2^-13 of the sum of magnitudes."""
    return widen_rows(a, a_scales) @ widen_weight(b, b_scales).T


def widen_rows(values: Tensor, scales: Tensor) -> Tensor:
    """e4m3 [M, K] and its scales in any format -> float64 [M, K]."""
    if scales.dtype == torch.int32:
        scales = unpack_exponents(scales.contiguous(), num_blocks(values.shape[1]))
    return values.double() * scales.double().repeat_interleave(BLOCK, 1)[:, : values.shape[1]]


def widen_weight(values: Tensor, scales: Tensor) -> Tensor:
    """e4m3 [N, K], fp32 [ceil(N / 128), G] -> float64 [N, K]."""
    wide = scales.double().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return values.double() * wide[: values.shape[0], : values.shape[1]]


def cost(rows: int, columns: int, width: int, out_bytes: int = 2) -> KernelCost:
    """M, N, K: codes of both and their scales once, the result once; 2MNK."""
    scales = 4 * num_blocks(width) * (rows + num_blocks(columns))
    moved = (rows + columns) * width + scales + rows * columns * out_bytes
    return KernelCost(moved, 2 * rows * columns * width)


def compile_cases() -> list[CompileCase]:
    configs = [(config, True, False, "*bf16") for config in CONFIGS]
    configs += [(CONFIGS[-1], True, True, "*bf16"), (CONFIGS[-2], False, False, "*fp32")]
    return [
        CompileCase(
            fp8_gemm_kernel,
            "fp8_gemm",
            f"{config} {'tma' if tma else 'cp.async'} {'ue8m0' if packed else 'fp32'} {out[1:]}",
            {
                **operand_types(config, tma),
                "out": out,
                "a_scales": "*i32" if packed else "*fp32",
                "b_scales": "*fp32",
                **dict.fromkeys(("M", "N", "K", "a_pitch", "b_pitch", "out_pitch"), "i32"),
                **dict.fromkeys(("scale_row", "scale_word", "b_scale_row"), "i32"),
            },
            {"GROUP": GROUP_ROWS, "TMA": tma, "PACKED": packed, **config.constants},
            num_warps=config.warps,
            num_stages=config.stages,
            divisible=("N", "K", "a_pitch", "b_pitch", "out_pitch"),
            wants={90: ("wgmma", "wide loads"), 100: ("tcgen05.mma", "wide loads")},
        )
        for config, tma, packed, out in configs
    ]
