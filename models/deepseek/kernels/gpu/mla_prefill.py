"""MLA prefill: new tokens over keys and values expanded from the latent cache, chunk by chunk.

Flash attention with wide keys (nope + rope, 192) and narrow values (128), causal by position. Each
round of mla_prefill_plan.py gathers latents (mla_gather.py), has them expanded by the caller's
projection and runs one launch here; a row's sums go on from round to round by their logarithm. No
more is held than the plan's workspace_bytes. Fewer multiplications than the absorbed form where
queries are many, another rounding: fast mode only.

Law 5: tiles of one size from the beginning of each chunk, chunks at fixed positions, rows of
a tile independent of each other. A row's bits are its own as long as `expand`'s are.

Shape letters: T rows, H heads, c latent width, n nope, r rope, v value width, N positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from models.deepseek.kernels.gpu.aot import CompileCase
from models.deepseek.kernels.gpu.cost import KernelCost
from models.deepseek.kernels.gpu.dot import dot
from models.deepseek.kernels.gpu.errors import ShapeRefused
from models.deepseek.kernels.gpu.language import tl, triton
from models.deepseek.kernels.gpu.mla_gather import gather_latents, room
from models.deepseek.kernels.gpu.mla_prefill_plan import CHUNK, QUERY_TILE, PrefillPlan
from models.deepseek.kernels.gpu.mla_rows import row_bytes
from models.deepseek.kernels.gpu.rounding import to_bf16

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

# latents [N, c] bf16 -> [N, H, n + v] bf16, contiguous: each head's key part, then its value
Expand = Callable[[Tensor], Tensor]


@triton.jit
def _step(
    q_nope, q_rope, acc, peak, weight, keys, ropes, begin, count, last_seen, factor,
    key_row: tl.constexpr, nope: tl.constexpr, rope: tl.constexpr, value: tl.constexpr,
    tile: tl.constexpr, masked: tl.constexpr,
):  # fmt: skip
    """One tile of positions. last_seen [M]: the last position of the chunk that each row sees."""
    at = begin + tl.arange(0, tile)
    d = tl.arange(0, nope)
    r = tl.arange(0, rope)
    e = tl.arange(0, value)
    key_at = keys + at[:, None] * key_row + d[None, :]
    rope_at = ropes + at[:, None] * rope + r[None, :]
    value_at = keys + nope + at[:, None] * key_row + e[None, :]
    if masked:
        there = (at < count)[:, None]
        k = tl.load(key_at, mask=there, other=0.0)
        kr = tl.load(rope_at, mask=there, other=0.0)
        v = tl.load(value_at, mask=there, other=0.0)
    else:
        k = tl.load(key_at)
        kr = tl.load(rope_at)
        v = tl.load(value_at)
    score = dot(q_nope, tl.trans(k), tl.zeros([q_nope.shape[0], tile], tl.float32))
    score = dot(q_rope, tl.trans(kr), score) * factor
    if masked:
        score = tl.where(at[None, :] <= last_seen[:, None], score, float("-inf"))
    higher = tl.maximum(peak, tl.max(score, axis=1))
    chance = tl.exp2(score - higher[:, None])
    shrink = tl.exp2(peak - higher)
    weight = weight * shrink + tl.sum(chance, axis=1)
    acc = dot(to_bf16(chance), v, acc * shrink[:, None])
    return acc, higher, weight


@triton.jit
def mla_prefill_kernel(
    q, keys, ropes, tiles, carried, out, lse, scale, q_row, q_head,
    heads: tl.constexpr, nope: tl.constexpr, rope: tl.constexpr, value: tl.constexpr,
    chunk: tl.constexpr, block_m: tl.constexpr, tile: tl.constexpr, carries: tl.constexpr,
):  # fmt: skip
    """q [T, H, n + r] bf16 by strides, keys [N, H, n + v] and ropes [N, r] bf16 of the round,
    tiles [A, 6] int32 (mla_prefill_plan.py) -> out [T, H, v] bf16 of rows whose last position
    lies in the chunk, lse [T, H] fp32 (natural) of all, carried [T, H, v] fp32 of rows that go on
    (and read where the chunk is not the first). Programs: tiles by heads. Flops:
    2 (n + r + v) H a pair. Bytes: 2 H (n + v) + 2 r a position, 2 H (n + r + v) a row; carried
    8 H v a row."""
    meta = tiles + tl.program_id(0).to(tl.int64) * 6
    head = tl.program_id(1)
    row, rows = tl.load(meta).to(tl.int64), tl.load(meta + 1)
    position, buffer = tl.load(meta + 2), tl.load(meta + 3).to(tl.int64)
    start, count = tl.load(meta + 4), tl.load(meta + 5)
    m = tl.arange(0, block_m)
    real = m < rows
    q_at = q + row * q_row + head.to(tl.int64) * q_head + m[:, None] * q_row
    q_nope = tl.load(q_at + tl.arange(0, nope)[None, :], mask=real[:, None], other=0.0)
    q_rope = tl.load(q_at + nope + tl.arange(0, rope)[None, :], mask=real[:, None], other=0.0)
    keys += buffer * (heads * (nope + value)) + head * (nope + value)
    ropes += buffer * rope

    e = tl.arange(0, value)
    base = row * heads + head
    own = m * heads
    acc = tl.zeros([block_m, value], tl.float32)
    peak = tl.full([block_m], float("-inf"), tl.float32)
    weight = tl.zeros([block_m], tl.float32)
    if carries:
        before = real & (start > 0)
        at = carried + base * value + (own[:, None] * value + e[None, :])
        acc = tl.load(at, mask=before[:, None], other=0.0)
        peak = tl.load(lse + base + own, mask=before, other=float("-inf")) * LOG2E
        weight = tl.where(before, 1.0, 0.0)

    factor = scale * LOG2E
    last_seen = position - start + m
    whole = tl.minimum(count, position - start + 1) // tile * tile  # seen by every row
    end = tl.minimum(count, position - start + rows)
    for begin in tl.range(0, whole, tile):
        acc, peak, weight = _step(
            q_nope, q_rope, acc, peak, weight, keys, ropes, begin, count, last_seen, factor,
            heads * (nope + value), nope, rope, value, tile, False,
        )  # fmt: skip
    for begin in tl.range(whole, end, tile):
        acc, peak, weight = _step(
            q_nope, q_rope, acc, peak, weight, keys, ropes, begin, count, last_seen, factor,
            heads * (nope + value), nope, rope, value, tile, True,
        )  # fmt: skip
    acc = acc / weight[:, None]
    tl.store(lse + base + own, (peak + tl.log2(weight)) * LN2, mask=real)
    target = own[:, None] * value + e[None, :]
    out += base * value
    carried += base * value
    if carries:
        done = real & (last_seen < chunk)
        tl.store(out + target, to_bf16(acc), mask=done[:, None])
        tl.store(carried + target, acc, mask=(real & (last_seen >= chunk))[:, None])
    else:
        tl.store(out + target, to_bf16(acc), mask=real[:, None])


@dataclass(frozen=True)
class PrefillConfig:
    """tile: positions a step of the online softmax, one for all shapes of a chip (law 5)."""

    tile: int
    warps: int
    stages: int

    def name(self, carries: bool) -> str:
        kind = " carries" if carries else ""
        return f"bf16 {QUERY_TILE}x{self.tile} w{self.warps} s{self.stages}{kind}"


CONFIGS = {90: PrefillConfig(128, 8, 2), 100: PrefillConfig(64, 8, 3)}


def mla_prefill(
    q: Tensor, layer: Tensor, tables: Tensor, plan: PrefillPlan, expand: Expand, scale: float, *,
    rank: int = 512, nope: int = 128, value: int = 128, rows: Tensor | None = None,
    config: PrefillConfig | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q [T, H, n + r] bf16 (rope part rotated), rows of the batch as the plan's `new` says; layer:
    the cache (mla_rows.py), this step's latents already written; tables [S, B] int32; expand: see
    Expand; rows [T, c + r] bf16: this step's latents not quantised (mla_cache.py `keep`), used in
    place of the cache's -> out [T, H, v] bf16, lse [T, H] fp32. ShapeRefused for what the kernel
    cannot take."""
    tokens, heads, width = q.shape
    rope = width - nope
    _check(q, plan, rope, nope, value, rows, rank)
    config = config or CONFIGS[90 if _is_before_blackwell(q.device) else 100]
    out = q.new_empty(tokens, heads, value)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    size = tokens if plan.carries else 0
    carried = torch.empty(size, heads, value, dtype=torch.float32, device=q.device)
    most = max((r.positions for r in plan.rounds), default=0)
    latent, key = room(most, rank, rope, q.device)
    for turn in plan.rounds:
        gather_latents(plan.gather[slice(*turn.gather)], tables, layer, latent, key, rows)
        keys = expand(latent[: turn.positions])
        if keys.shape != (turn.positions, heads, nope + value) or not keys.is_contiguous():
            raise ShapeRefused(
                f"expand gave {tuple(keys.shape)}: must be [{turn.positions}, {heads}, "
                f"{nope + value}], contiguous"
            )
        first, last = turn.attend
        mla_prefill_kernel[(last - first, heads)](
            q, keys, key, plan.attend[first:last], carried, out, lse, scale, q.stride(0),
            q.stride(1),
            heads=heads, nope=nope, rope=rope, value=value, chunk=plan.chunk,
            block_m=QUERY_TILE, tile=config.tile, carries=plan.carries, num_warps=config.warps,
            num_stages=config.stages,
        )  # fmt: skip
        del keys  # before the next round's are made: the workspace holds one round
    return out, lse


def _check(
    q: Tensor, plan: PrefillPlan, rope: int, nope: int, value: int, rows: Tensor | None, rank: int
) -> None:
    sizes = (rope, nope, value)
    if any(n < 16 or n & (n - 1) for n in sizes) or q.dtype != torch.bfloat16 or q.stride(2) != 1:
        raise ShapeRefused(
            f"q {q.dtype} {tuple(q.shape)}, rope {rope}, nope {nope}, value {value}: must be bf16, "
            "rows together, powers of two of 16 or more"
        )
    if q.shape[0] != plan.num_rows:
        raise ShapeRefused(f"q has {q.shape[0]} rows: the plan was made for {plan.num_rows}")
    if rows is not None and (rows.shape != (q.shape[0], rank + rope) or not rows.is_contiguous()):
        raise ShapeRefused(
            f"rows {tuple(rows.shape)}: must be [{q.shape[0]}, {rank + rope}], contiguous"
        )


def _is_before_blackwell(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < 10


# -- twin, cost, compile cases --------------------------------------------------------------------


def mla_prefill_twin(
    q: Tensor, latents: Tensor, kv_b: Tensor, first: int, scale: float, value: int
) -> tuple[Tensor, Tensor]:
    """One sequence: q [T, H, n + r] at positions first .. first + T - 1, latents [N, c + r] of
    positions 0 .. N - 1, kv_b [H * (n + v), c] -> [T, H, v], lse [T, H], float64. Keys and values
    are rounded to bf16 once expanded, as the projection gives them."""
    heads, rope = q.shape[1], latents.shape[1] - kv_b.shape[1]
    wide = latents[:, : kv_b.shape[1]].float() @ kv_b.float().T
    wide = wide.bfloat16().double().view(latents.shape[0], heads, kv_b.shape[0] // heads)
    nope = q.shape[2] - rope
    scores = torch.einsum("thd,nhd->htn", q[..., :nope].double(), wide[..., :nope])
    scores += torch.einsum("thr,nr->htn", q[..., nope:].double(), latents[:, -rope:].double())
    at = torch.arange(latents.shape[0])
    hidden = at[None, :] > (first + torch.arange(q.shape[0]))[:, None]
    scores = (scores * scale).masked_fill(hidden, float("-inf"))
    out = torch.einsum("htn,nhv->thv", torch.softmax(scores, dim=2), wide[..., -value:])
    return out, torch.logsumexp(scores, dim=2).T


def cost(
    context: list[int], new: list[int], heads: int = 128, *, rank: int = 512, rope: int = 64,
    nope: int = 128, value: int = 128, fp8: bool = False, chunk: int = CHUNK,
) -> KernelCost:  # fmt: skip
    """All rounds of a prefill, its expansions too. Flops: 2 (n + r + v) H a pair of row and
    position, 2 c (n + v) H a position. Bytes: the cache's rows, latents gathered and keys expanded
    written and read once, q and out, sums carried from chunk to chunk."""
    pairs = sum(n * (c - n) + n * (n + 1) // 2 for c, n in zip(context, new, strict=True))
    positions = sum(c for c, n in zip(context, new, strict=True) if n)
    flops = 2 * heads * ((nope + rope + value) * pairs + rank * (nope + value) * positions)
    moved = positions * (row_bytes(rank, rope, fp8) + 4 * (rank + rope))
    moved += positions * 4 * heads * (nope + value)
    moved += sum(new) * heads * (2 * (nope + rope + value) + 4)
    for length, rows in zip(context, new, strict=True):
        more = sum(length - max(at, length - rows) for at in range(chunk, length, chunk))
        moved += more * heads * 8 * value
    return KernelCost(moved, flops)


def compile_cases() -> list[CompileCase]:
    signature = dict.fromkeys(("q", "keys", "ropes", "out"), "*bf16")
    signature |= {"tiles": "*i32", "carried": "*fp32", "lse": "*fp32", "scale": "fp32"}
    signature |= {"q_row": "i32", "q_head": "i32"}
    matrix = {90: "wgmma.mma_async", 100: "tcgen05.mma"}
    return [
        CompileCase(
            mla_prefill_kernel,
            "mla_prefill",
            f"h{heads} {config.name(carries)} for sm_{arch}",
            signature,
            {"heads": heads, "nope": 128, "rope": 64, "value": 128, "chunk": CHUNK,
             "block_m": QUERY_TILE, "tile": config.tile, "carries": carries},
            num_warps=config.warps,
            num_stages=config.stages,
            divisible=("q_row", "q_head"),
            wants={arch: (matrix[arch], "wide loads")},
            archs=(arch,),
        )
        for heads in (128, 16)
        for arch, config in CONFIGS.items()
        for carries in (False, True)
    ]  # fmt: skip
