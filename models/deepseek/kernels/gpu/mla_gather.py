"""Latents and rope keys of some positions out of the paged cache, into plain rows of bf16.

What prefill expands to keys and values. Positions of the step itself may come from the rows that
were just computed instead: an FP8 cache holds them rounded. Bound by memory.

Shape letters: N positions, c latent width (rank), r rope width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.deepseek.kernels.gpu.aot import CompileCase
from models.deepseek.kernels.gpu.cost import KernelCost
from models.deepseek.kernels.gpu.language import tl, triton
from models.deepseek.kernels.gpu.mla_prefill_plan import GATHER_TILE
from models.deepseek.kernels.gpu.mla_rows import cache_views, check_widths, row_bytes
from models.deepseek.kernels.gpu.rounding import to_bf16


@triton.jit(do_not_specialize=["table_row"])
def mla_gather_kernel(
    tiles, tables, latents, scales, ropes, rows, out_latent, out_rope, table_row,
    rank: tl.constexpr, rope: tl.constexpr, block_size: tl.constexpr, fp8: tl.constexpr,
    fresh: tl.constexpr, piece: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """tiles [G, 6] as in mla_prefill_plan.py, tables [S, .] int32, cache rows as in mla_rows.py ->
    out_latent [N, c], out_rope [N, r] bf16. fresh: positions from the prefix on are taken from
    rows [T, c + r] bf16. Bytes: a row of the cache and 2 (c + r) a position. FLOPs
    none (FP8: c a position). One program a tile."""
    groups: tl.constexpr = rank // 128 if fp8 else 0
    stride: tl.constexpr = rank + 4 * groups + 2 * rope if fp8 else rank + rope
    rope_stride: tl.constexpr = stride // 2 if fp8 else stride
    rope_at: tl.constexpr = (rank + 4 * groups) // 2 if fp8 else rank
    meta = tiles + tl.program_id(0).to(tl.int64) * 6
    start, count = tl.load(meta + 1), tl.load(meta + 2)
    buffer, prefix = tl.load(meta + 3).to(tl.int64), tl.load(meta + 4)
    n = tl.arange(0, tile)
    at = start + n
    cached = n < count
    if fresh:
        new = cached & (at >= prefix)
        cached = cached & (at < prefix)
        own = (tl.load(meta + 5) + at - prefix).to(tl.int64)
    table = tables + tl.load(meta).to(tl.int64) * table_row
    slot = tl.load(table + at // block_size, mask=cached, other=0).to(tl.int64) * block_size
    slot += at % block_size
    for first in tl.static_range(0, rank, piece):
        c = first + tl.arange(0, piece)
        value = tl.load(
            latents + slot[:, None] * stride + c[None, :], mask=cached[:, None], other=0.0
        )
        if fp8:
            place = scales + slot * (stride // 4) + rank // 4 + first // 128
            factor = tl.load(place, mask=cached, other=0.0)
            value = to_bf16(value.to(tl.float32) * factor[:, None])
        if fresh:
            kept = tl.load(
                rows + own[:, None] * (rank + rope) + c[None, :], mask=new[:, None], other=0.0
            )
            value = tl.where(new[:, None], kept, value)
        target = out_latent + (buffer + n)[:, None] * rank + c[None, :]
        tl.store(target, value, mask=(n < count)[:, None])
    r = tl.arange(0, rope)
    source = ropes + rope_at + slot[:, None] * rope_stride + r[None, :]
    key = tl.load(source, mask=cached[:, None], other=0.0)
    if fresh:
        kept = rows + rank + own[:, None] * (rank + rope) + r[None, :]
        key = tl.where(new[:, None], tl.load(kept, mask=new[:, None], other=0.0), key)
    tl.store(out_rope + (buffer + n)[:, None] * rope + r[None, :], key, mask=(n < count)[:, None])


def gather_latents(
    tiles: Tensor, tables: Tensor, layer: Tensor, latent: Tensor, key: Tensor,
    rows: Tensor | None = None,
) -> None:  # fmt: skip
    """See mla_gather_kernel; latent [N, c] and key [N, r] bf16 are written where tiles say."""
    rank, rope = latent.shape[1], key.shape[1]
    views = cache_views(layer, rank, rope)
    check_widths(rank, rope, latent.dtype, f"latent {tuple(latent.shape)}")
    if tiles.shape[0]:
        mla_gather_kernel[(tiles.shape[0],)](
            tiles, tables, views.latents, views.scales, views.ropes,
            latent if rows is None else rows, latent, key, tables.stride(0),
            rank=rank, rope=rope, block_size=views.block_size, fp8=views.fp8,
            fresh=rows is not None, piece=min(rank, 128), tile=GATHER_TILE, num_warps=4,
        )  # fmt: skip


# -- cost, compile cases --------------------------------------------------------------------------


def cost(positions: int, rank: int = 512, rope: int = 64, fp8: bool = False) -> KernelCost:
    return KernelCost(positions * (row_bytes(rank, rope, fp8) + 2 * (rank + rope)), 0)


def compile_cases() -> list[CompileCase]:
    signature = dict.fromkeys(("ropes", "rows", "out_latent", "out_rope"), "*bf16")
    signature |= {"tiles": "*i32", "tables": "*i32", "scales": "*fp32", "table_row": "i32"}
    return [
        CompileCase(
            mla_gather_kernel,
            "mla_gather",
            f"{'fp8' if fp8 else 'bf16'}{' fresh' if fresh else ''} w4",
            signature | {"latents": "*fp8e4nv" if fp8 else "*bf16"},
            {"rank": 512, "rope": 64, "block_size": 64, "fp8": fp8, "fresh": fresh, "piece": 128,
             "tile": GATHER_TILE},
            num_warps=4,
            wants={90: ("wide loads",), 100: ("wide loads",)},
        )
        for fp8, fresh in ((False, False), (True, False), (True, True))
    ]  # fmt: skip


def room(positions: int, rank: int, rope: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where gather_latents puts that many positions."""
    latent = torch.empty(positions, rank, dtype=torch.bfloat16, device=device)
    return latent, torch.empty(positions, rope, dtype=torch.bfloat16, device=device)
