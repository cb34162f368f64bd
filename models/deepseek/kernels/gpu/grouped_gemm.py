"""Block-FP8 GEMMs of stacked experts in one launch: each expert's rows times its own weight.

Two layouts of rows, as dispatchers deliver them. Contiguous: segments one after another, each
from a multiple of the alignment on; ends[i] is where expert i's rows end (the psum layout of
DeepGEMM and DeepEP V2). Masked: [e, M, K] of which expert i has counts[i] rows. How many rows there
are is known on the device only, so the grid is persistent: programs count tiles expert by expert
and take every n-th. An expert without rows costs one load of its count. Rows that belong to nobody
are not written, and what is read of them reaches no other row. A tile: gemm_tile.py; operands and
twin: fp8_gemm.py.

Shape letters: e experts here, M rows (in the masked form, room for an expert), N, K, G as there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dispatch.fp8 import num_blocks
from models.deepseek.kernels.gpu.aot import CompileCase
from models.deepseek.kernels.gpu.cost import KernelCost
from models.deepseek.kernels.gpu.errors import ShapeRefused
from models.deepseek.kernels.gpu.fp8_gemm import (
    CONFIGS,
    check_operands,
    config_for,
    fp8_gemm_twin,
)
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

ALIGNMENT = 128  # where segments start, unless said otherwise
V3_COLUMNS = 4096  # of gate and up of DeepSeek-V3: rows from one expert to the next, stacked


@triton.jit(do_not_specialize=["room"])
def grouped_gemm_kernel(
    a, b, out, a_scales, b_scales, starts, bounds, experts, room, alignment, N, K,
    a_pitch, b_pitch, out_pitch, scale_expert, scale_row, scale_word, b_scale_expert, b_scale_row,
    B_EXPERT: tl.constexpr, MASKED: tl.constexpr, STARTS: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PAIR: tl.constexpr, SWAP: tl.constexpr,
    TMA: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """a e4m3 [e * room, K] or, contiguous, [room, K]; b e4m3 [.., K], where expert i's N rows begin
    at i * B_EXPERT; out [.., N] by a's rows; scales as in fp8_gemm with a stride for experts.
    bounds int32 [e]: counts (MASKED) or ends. STARTS: segments begin at starts int32 [e], else at
    the end before, aligned. With r_i rows for expert i: FLOPs 2NK * sum r_i;
    bytes (K + N * out) * sum r_i + NK for each expert that has rows. Grid: programs that share all
    tiles."""
    width: tl.constexpr = COLUMNS * 2 if PAIR else COLUMNS
    column_tiles = tl.cdiv(N, width)
    tile = tl.program_id(0)  # counted from this expert's first
    expert = 0
    while expert < experts:
        bound = tl.load(bounds + expert)
        if MASKED:
            begin = expert * room
            end = begin + tl.minimum(bound, room)
            shift = tl.cast(expert, tl.int64) * scale_expert - tl.cast(begin, tl.int64) * scale_row
        else:
            if STARTS:
                begin = tl.load(starts + expert)
            else:
                before = tl.load(bounds + expert - 1, mask=expert > 0, other=0)
                begin = tl.cdiv(before, alignment) * alignment
            end = tl.minimum(bound, room)
            shift = 0
        row_tiles = tl.cdiv(tl.maximum(end - begin, 0), ROWS)
        if tile < row_tiles * column_tiles:
            row_tile, column_tile = tile_place(tile, row_tiles, column_tiles, GROUP)
            row, column = begin + row_tile * ROWS, column_tile * width
            first, second = tile_product(
                a, b, a_scales + shift, b_scales + tl.cast(expert, tl.int64) * b_scale_expert,
                row, end, expert * B_EXPERT + column, expert * B_EXPERT + N, column // 128, K,
                a_pitch, b_pitch, scale_row, scale_word, b_scale_row,
                ROWS, COLUMNS, PAIR, SWAP, TMA, PACKED,
            )  # fmt: skip
            store_tile(out, first, row, end, column, N, out_pitch, ROWS, COLUMNS, SWAP)
            if PAIR:
                column += COLUMNS
                store_tile(out, second, row, end, column, N, out_pitch, ROWS, COLUMNS, SWAP)
            tile += tl.num_programs(0)
        else:
            tile -= row_tiles * column_tiles
            expert += 1


def grouped_gemm_masked(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    counts: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    *,
    expected_rows: int | None = None,
) -> Tensor:
    """a e4m3 [e, M, K] with scales [e, M, ..] of any format, b e4m3 [e, N, K] (an expert may begin
    any number of whole rows after the last one) and fp32 [e, ceil(N / 128), G], counts int32 [e] ->
    [e, M, N]; only the first counts[i] rows of expert i are written. expected_rows: what an expert
    is likely to have, which chooses the tile and nothing else (default: all of M). ShapeRefused for
    what does not fit."""
    if a.dim() != 3 or (a.numel() and a.stride(0) != a.shape[1] * a.stride(1)):
        raise ShapeRefused(f"a={list(a.shape)}, strides {a.stride()}: [e, M, K] back to back")
    experts, room, _ = a.shape
    if a_scales.dim() != 3 or a_scales.shape[0] != experts:
        raise ShapeRefused(f"a_scales={list(a_scales.shape)}: [{experts}, {room}, ..]")
    out = torch.empty((experts, room, b.shape[1]), dtype=dtype, device=a.device)
    expected = room if expected_rows is None else expected_rows
    _launch(a.flatten(0, 1), a_scales, b, b_scales, counts, out.flatten(0, 1), room, None, expected)
    return out


def grouped_gemm_contiguous(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    ends: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    *,
    alignment: int = ALIGNMENT,
    starts: Tensor | None = None,
    expected_rows: int | None = None,
) -> Tensor:
    """a e4m3 [M, K] with scales of any format, b and b_scales as above, ends int32 [e] -> [M, N].
    Expert i has rows [begin, ends[i]), begin being ends[i - 1] (0 for the first) rounded up to the
    alignment, or starts[i] where starts int32 [e] say so; other rows are not written.
    expected_rows: as above (default: M / e)."""
    if a.dim() != 2:
        raise ShapeRefused(f"a={list(a.shape)}: [M, K]")
    if alignment < 1:
        raise ShapeRefused(f"alignment={alignment}: at least 1")
    rows = a.shape[0]
    out = torch.empty((rows, b.shape[1]), dtype=dtype, device=a.device)
    expected = -(-rows // max(1, b.shape[0])) if expected_rows is None else expected_rows
    _launch(a, a_scales, b, b_scales, ends, out, rows, alignment, expected, starts)
    return out


def _launch(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    bounds: Tensor,
    out: Tensor,
    room: int,
    alignment: int | None,
    expected: int,
    starts: Tensor | None = None,
) -> None:
    """a and out two-dimensional; alignment None: masked, `room` rows an expert."""
    experts, columns, width = b.shape
    masked = alignment is None
    view = check_operands(
        a.unflatten(0, (experts, room)) if masked else a, a_scales, b, b_scales, out.dtype
    )
    for numbers in (bounds,) if starts is None else (bounds, starts):
        if numbers.dtype != torch.int32 or numbers.shape != (experts,):
            raise ShapeRefused(f"{numbers.dtype} {list(numbers.shape)} of rows: int32 [{experts}]")
    apart, rest = divmod(b.stride(0), b.stride(1))
    if rest or apart < columns:
        raise ShapeRefused(
            f"b={list(b.shape)}, strides {b.stride()}: experts must be whole rows apart, N or more"
        )
    if not a.shape[0] or not experts:
        return
    config = config_for(expected, columns, experts)
    flat = b.as_strided(((experts - 1) * apart + columns, width), (b.stride(1), 1))
    tma = tma_can(a, flat)
    row_tiles = triton.cdiv(room, config.rows)
    row_tiles = row_tiles * experts if masked else row_tiles + experts
    tiles = row_tiles * triton.cdiv(columns, config.width)
    grouped_gemm_kernel[(num_programs(a.device, tiles, config.programs_per_sm),)](
        operand(a, config.rows, tma), operand(flat, config.columns, tma), out, a_scales, b_scales,
        bounds if starts is None else starts, bounds, experts, room,
        1 if alignment is None else alignment, columns, width,
        a.stride(0), b.stride(1), out.stride(0),
        view.expert_stride, view.row_stride, view.word_stride,
        b_scales.stride(0), b_scales.stride(1),
        B_EXPERT=apart, MASKED=masked, STARTS=starts is not None, GROUP=GROUP_ROWS, TMA=tma,
        PACKED=view.packed, **config.constants, num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip


def segments(ends: Sequence[int], alignment: int) -> list[tuple[int, int]]:
    """[begin, end) of each expert in the contiguous layout."""
    begins = [-(-end // alignment) * alignment for end in (0, *ends[:-1])]
    return [(begin, max(begin, end)) for begin, end in zip(begins, ends, strict=True)]


def grouped_gemm_twin(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    bounds: Tensor,
    alignment: int | None = None,
) -> Tensor:
    """float64 of fp8_gemm_twin for each expert, NaN where no row is: a [e, M, K] and counts, or,
    with an alignment, a [M, K] and ends."""
    out = torch.full((*a.shape[:-1], b.shape[1]), torch.nan, dtype=torch.float64)
    if alignment is None:
        parts = [(i, slice(0, count)) for i, count in enumerate(bounds.tolist())]
        for i, rows in parts:
            out[i, rows] = fp8_gemm_twin(a[i, rows], a_scales[i, rows], b[i], b_scales[i])
        return out
    for i, (begin, end) in enumerate(segments(bounds.tolist(), alignment)):
        rows = slice(begin, end)
        out[rows] = fp8_gemm_twin(a[rows], a_scales[rows], b[i], b_scales[i])
    return out


def cost(rows: Sequence[int], columns: int, width: int, out_bytes: int = 2) -> KernelCost:
    """rows of each expert, N, K. The weight of an expert without rows is not read."""
    total, used = sum(rows), sum(1 for count in rows if count)
    of_rows = total * (width + 4 * num_blocks(width) + columns * out_bytes)
    of_weights = used * (columns * width + 4 * num_blocks(width) * num_blocks(columns))
    return KernelCost(of_rows + of_weights, 2 * total * columns * width)


def compile_cases() -> list[CompileCase]:
    forms = [(config, masked, False, False) for masked in (True, False) for config in CONFIGS]
    widest, narrow = CONFIGS[-1], CONFIGS[2]
    forms += [(config, masked, True, False) for config, masked in ((widest, False), (narrow, True))]
    forms += [
        (widest, True, True, False),
        (widest, False, False, True),
        (narrow, False, False, True),
    ]
    return [_compile_case(*form) for form in forms]


def _compile_case(config: TileConfig, masked: bool, packed: bool, starts: bool) -> CompileCase:
    layout = "masked" if masked else "contiguous"
    numbers = (
        *("experts", "room", "alignment", "N", "K", "a_pitch", "b_pitch", "out_pitch"),
        *("scale_expert", "scale_row", "scale_word", "b_scale_expert", "b_scale_row"),
    )
    return CompileCase(
        grouped_gemm_kernel,
        f"grouped_gemm_{layout}",
        f"{config} {'ue8m0' if packed else 'fp32'}{' starts' if starts else ''}",
        {
            **operand_types(config, True),
            "out": "*bf16",
            "a_scales": "*i32" if packed else "*fp32",
            "b_scales": "*fp32",
            "starts": "*i32",
            "bounds": "*i32",
            **dict.fromkeys(numbers, "i32"),
        },
        {
            "B_EXPERT": V3_COLUMNS,
            "MASKED": masked,
            "STARTS": starts,
            "GROUP": GROUP_ROWS,
            "TMA": True,
            "PACKED": packed,
            **config.constants,
        },
        num_warps=config.warps,
        num_stages=config.stages,
        divisible=("N", "K", "a_pitch", "b_pitch", "out_pitch"),
        wants={90: ("wgmma", "wide loads"), 100: ("tcgen05.mma", "wide loads")},
    )
