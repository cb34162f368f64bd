"""Paged MLA decode: absorbed queries over the latent cache, split over the context.

The work is cut by mla_plan.py into units, a span of absolute positions of one row each; its
programs stay and take units in turn, so that a captured launch costs no more than what there is to
do. A row with one unit is finished here, the others by mla_merge.py. Knows the cache's rows
(mla_rows.py). Knows nothing of requests or drafts but where a row's positions lie.

Law 5: within a unit tiles of `tile` positions go in order, a unit belongs to one row, and neither
the tile nor the matrix shape follows from how many rows there are: a row's bits are its own for
every batch company, chunk size, block size, prefix hit and tree of drafts, as far as the plan cuts
it at fixed positions.

Shape letters: T rows, H heads, c latent width (rank), r rope width, P units, S sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.deepseek.kernels.gpu.aot import CompileCase
from models.deepseek.kernels.gpu.cost import KernelCost
from models.deepseek.kernels.gpu.dot import dot
from models.deepseek.kernels.gpu.errors import ShapeRefused
from models.deepseek.kernels.gpu.language import HAVE_TRITON, tl, triton
from models.deepseek.kernels.gpu.mla_decode_config import DecodeConfig, choose_config, fill
from models.deepseek.kernels.gpu.mla_merge import merge_units
from models.deepseek.kernels.gpu.mla_plan import DETERMINISTIC, TILE, ByLoad, Cuts, DecodePlan
from models.deepseek.kernels.gpu.mla_rows import CacheViews, cache_views, check_widths, row_bytes
from models.deepseek.kernels.gpu.rounding import to_bf16

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# Which of two ways to write a value that is never used costs no 8 KiB of shared memory: triton 3.7
# and later hold a constant once, earlier ones for good.
CONSTANT_DEFAULT = HAVE_TRITON and tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7)


@triton.jit
def _read_heads(base, left, stride: tl.constexpr, h, c, ragged: tl.constexpr):
    """Columns c of heads h, rows `stride` apart: [heads, columns]; ragged: 0 from `left` on."""
    at = base + h[:, None] * stride + c[None, :]
    if ragged:  # noqa: SIM108 (a constant of the compiler)
        y = tl.load(at, mask=h[:, None] < left, other=0.0)
    else:
        y = tl.load(at)
    return y


@triton.jit
def _write_heads(base, y, left, stride: tl.constexpr, h, c, ragged: tl.constexpr):
    """y [heads, columns] to where _read_heads would read it."""
    at = base + h[:, None] * stride + c[None, :]
    if ragged:
        tl.store(at, y, mask=h[:, None] < left)
    else:
        tl.store(at, y)


@triton.jit
def _slots(table, path, at, high, prefix, block_size: tl.constexpr, tree: tl.constexpr):
    """Slots of the positions `at` that lie before `high`; those from `prefix` on by the path."""
    block = tl.load(table + at // block_size, mask=at < tl.minimum(high, prefix), other=0.0)
    slot = block.to(tl.int64) * block_size + at % block_size
    if tree:
        own = tl.load(path + (at - prefix), mask=(at >= prefix) & (at < high), other=0.0)
        slot = tl.where(at >= prefix, own.to(tl.int64), slot)
    return slot


@triton.jit
def _latents(
    latents, scales, slot, seen, c, first, stride: tl.constexpr, rank: tl.constexpr,
    fp8: tl.constexpr,
):  # fmt: skip
    """Channels first + c of the rows at `slot` in bf16; zeros where not seen."""
    rows = latents + first + slot[:, None] * stride
    kv = tl.load(rows + c[None, :], mask=seen[:, None], other=0.0)
    if fp8:
        at = scales + rank // 4 + first // 128 + slot * (stride // 4)
        factor = tl.load(at, mask=seen, other=0.0)
        kv = to_bf16(kv.to(tl.float32) * factor[:, None])
    return kv


@triton.jit
def _softmax_step(score, seen, peak, weight):
    """One step of the online softmax in base 2 -> chances, peak, weight, what sums shrink by."""
    score = tl.where(seen[None, :], score, float("-inf"))
    higher = tl.maximum(peak, tl.max(score, axis=1))
    chance = tl.exp2(score - higher[:, None])
    shrink = tl.exp2(peak - higher)
    return to_bf16(chance), higher, weight * shrink + tl.sum(chance, axis=1), shrink


@triton.jit(do_not_specialize=["num_rows", "table_row"])
def mla_decode_kernel(
    q, latents, scales, ropes, tables, positions, sequences, ancestors, unit_rows, spans,
    work_start, out, lse, part_out, part_lse, scale, num_rows, table_row,
    heads: tl.constexpr, rank: tl.constexpr, rope: tl.constexpr, block_size: tl.constexpr,
    fp8: tl.constexpr, depth: tl.constexpr, block_h: tl.constexpr, tile: tl.constexpr,
    halves: tl.constexpr, guarded: tl.constexpr, constant_default: tl.constexpr,
    stages: tl.constexpr,
):  # fmt: skip
    """q [T, H, c + r] bf16, cache rows as in mla_rows.py, tables [S, .] int32, positions [T] int64
    (-1: a row of padding), sequences [T] int32, ancestors [T, depth] int32 (depth 0: none),
    unit_rows [P], spans [P, 2] and work_start [T + 1] int32 of the plan -> out [T, H, c] bf16 and
    lse [T, H] fp32 (natural) of rows with one unit, part_out [P, H, c] and part_lse [P, H] fp32 of
    the others. Bytes: a position's row once (2c + 2r in bf16; c + c / 32 + 2r in FP8), 2H (2c + r)
    + 4H a row, 8H (c + 1) a unit of those with more than one (`cost` counts). FLOPs 2H (2c + r) a
    row and position.

    The latents come in 4 pieces: the compiler keeps four small accumulators in registers where
    one of [block_h, c] spills. halves 2: a program sums half of the channels, for chips whose
    accumulators do not fit otherwise; scores are then taken twice. guarded 1: the scores stand in
    an `if` that is always true, or else the compiler, seeing that another product follows, has both
    warp groups compute all of them. guarded 2: the sums in another one as well; then loads of the
    next tile are issued before this one's products, not behind them, for 8 KiB more of shared
    memory, which only FP8 has left. constant_default: see CONSTANT_DEFAULT.
    """
    piece: tl.constexpr = rank // 4
    groups: tl.constexpr = rank // 128 if fp8 else 0
    stride: tl.constexpr = rank + 4 * groups + 2 * rope if fp8 else rank + rope
    rope_stride: tl.constexpr = stride // 2 if fp8 else stride
    rope_at: tl.constexpr = (rank + 4 * groups) // 2 if fp8 else rank
    head_tiles: tl.constexpr = (heads + block_h - 1) // block_h
    ragged: tl.constexpr = heads % block_h != 0
    shares: tl.constexpr = head_tiles * halves

    total = tl.load(work_start + num_rows) * shares
    c = tl.arange(0, piece)
    h = tl.arange(0, block_h)
    r = tl.arange(0, rope)
    n = tl.arange(0, tile)
    none = tl.zeros([block_h, tile], tl.float32)
    for item in tl.range(tl.program_id(0), total, tl.num_programs(0)):
        unit = item // shares
        # Always 0, which the compiler does not know: offsets that are not the same for all items
        # are not kept in registers from one to the next. Which of them spill was tried out.
        zero = tl.multiple_of(tl.load(work_start), 16)
        if not constant_default:
            n = tl.arange(0, tile) + zero
        elif depth > 0:
            h = tl.arange(0, block_h) + zero
        else:
            c = tl.arange(0, piece) + zero
            r = tl.arange(0, rope) + zero
        row = tl.load(unit_rows + unit)
        alone = tl.load(work_start + row + 1) - tl.load(work_start + row) == 1
        position = tl.load(positions + row).to(tl.int32)
        table = tables + tl.load(sequences + row).to(tl.int64) * table_row
        path = ancestors + row.to(tl.int64) * depth
        low = tl.load(spans + 2 * unit)
        high = tl.load(spans + 2 * unit + 1)
        prefix = position + 1
        if depth > 0:
            w = tl.arange(0, triton.next_power_of_2(depth))
            nodes = tl.load(path + w, mask=w < depth, other=-1)
            prefix -= tl.sum((nodes >= 0).to(tl.int32), axis=0)

        first_head = (item % head_tiles) * block_h
        left = heads - first_head
        c0 = 0
        c1 = piece
        c2 = 2 * piece
        c3 = 3 * piece
        if halves == 2:  # the half that is summed comes first
            c0 = (item // head_tiles % 2) * c2
            c1 = c0 + piece
            c2 = c2 - c0
            c3 = c2 + piece
        q_at = q + (row.to(tl.int64) * heads + first_head) * (rank + rope)
        q0 = _read_heads(q_at + c0, left, rank + rope, h, c, ragged)
        q1 = _read_heads(q_at + c1, left, rank + rope, h, c, ragged)
        q2 = _read_heads(q_at + c2, left, rank + rope, h, c, ragged)
        q3 = _read_heads(q_at + c3, left, rank + rope, h, c, ragged)
        qr = _read_heads(q_at + rank, left, rank + rope, h, r, ragged)

        peak = tl.full([block_h], float("-inf"), tl.float32)
        weight = tl.zeros([block_h], tl.float32)
        v0 = tl.zeros([block_h, piece], tl.float32)
        v1 = tl.zeros([block_h, piece], tl.float32)
        if halves == 1:
            v2 = tl.zeros([block_h, piece], tl.float32)
            v3 = tl.zeros([block_h, piece], tl.float32)
        for begin in tl.range(low, high, tile, num_stages=stages):
            at = begin + n
            seen = at < high
            slot = _slots(table, path, at, high, prefix, block_size, depth > 0)
            k0 = _latents(latents, scales, slot, seen, c, c0, stride, rank, fp8)
            k1 = _latents(latents, scales, slot, seen, c, c1, stride, rank, fp8)
            k2 = _latents(latents, scales, slot, seen, c, c2, stride, rank, fp8)
            k3 = _latents(latents, scales, slot, seen, c, c3, stride, rank, fp8)
            rope_rows = ropes + rope_at + slot[:, None] * rope_stride
            kr = tl.load(rope_rows + r[None, :], mask=seen[:, None], other=0.0)
            factor = scale * LOG2E
            if guarded > 0:
                if constant_default:
                    chance = tl.zeros([block_h, tile], tl.bfloat16)
                else:
                    chance = to_bf16(none + begin)
                shrink = tl.full([block_h], 1.0, tl.float32)
                if begin < high:
                    # Each product times the factor: added up as they are, they would become one
                    # chain, which has the same fault as above.
                    score = dot(q0, tl.trans(k0), none) * factor
                    score += dot(q1, tl.trans(k1), none) * factor
                    score += dot(q2, tl.trans(k2), none) * factor
                    score += dot(q3, tl.trans(k3), none) * factor
                    score += dot(qr, tl.trans(kr), none) * factor
                    chance, peak, weight, shrink = _softmax_step(score, seen, peak, weight)
            else:
                score = dot(q0, tl.trans(k0), none)
                score = dot(q1, tl.trans(k1), score)
                score = dot(q2, tl.trans(k2), score)
                score = dot(q3, tl.trans(k3), score)
                score = dot(qr, tl.trans(kr), score) * factor
                chance, peak, weight, shrink = _softmax_step(score, seen, peak, weight)
            if guarded == 2:
                if low <= begin:
                    v0 = dot(chance, k0, v0 * shrink[:, None])
                    v1 = dot(chance, k1, v1 * shrink[:, None])
                    v2 = dot(chance, k2, v2 * shrink[:, None])
                    v3 = dot(chance, k3, v3 * shrink[:, None])
            else:
                v0 = dot(chance, k0, v0 * shrink[:, None])
                v1 = dot(chance, k1, v1 * shrink[:, None])
                if halves == 1:
                    v2 = dot(chance, k2, v2 * shrink[:, None])
                    v3 = dot(chance, k3, v3 * shrink[:, None])

        # A weight of 0 saw nothing; one that is no number saw something, and has it told.
        inverse = tl.where(weight == 0, 0.0, 1.0 / weight)[:, None]
        log_sum = tl.where(weight == 0, float("-inf"), (peak + tl.log2(weight)) * LN2)
        if alone:
            at_head = row.to(tl.int64) * heads + first_head
            tl.store(lse + at_head + h, log_sum, mask=(h < left) & (c0 == 0))
            whole = out + at_head * rank
            _write_heads(whole + c0, to_bf16(v0 * inverse), left, rank, h, c, ragged)
            _write_heads(whole + c1, to_bf16(v1 * inverse), left, rank, h, c, ragged)
            if halves == 1:
                _write_heads(whole + c2, to_bf16(v2 * inverse), left, rank, h, c, ragged)
                _write_heads(whole + c3, to_bf16(v3 * inverse), left, rank, h, c, ragged)
        else:
            at_head = unit.to(tl.int64) * heads + first_head
            tl.store(part_lse + at_head + h, log_sum, mask=(h < left) & (c0 == 0))
            part = part_out + at_head * rank
            _write_heads(part + c0, v0 * inverse, left, rank, h, c, ragged)
            _write_heads(part + c1, v1 * inverse, left, rank, h, c, ragged)
            if halves == 1:
                _write_heads(part + c2, v2 * inverse, left, rank, h, c, ragged)
                _write_heads(part + c3, v3 * inverse, left, rank, h, c, ragged)


def mla_decode(
    q: Tensor, layer: Tensor, plan: DecodePlan, tables: Tensor, scale: float, *,
    rope: int = 64, config: DecodeConfig | None = None, programs: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q [T, H, c + r] bf16 (latent part first) attends to positions 0 .. p of its row's sequence in
    `layer` (mla_rows.py), found through tables [S, B] int32 and the plan -> out [T, H, c] bf16,
    lse [T, H] fp32 (natural logarithm; -inf and zeros for rows of padding). Workspace: what
    plan.workspace_bytes says. programs: how many share the work; None: as many as the GPU holds.
    ShapeRefused for what the kernel cannot take."""
    rows, heads, width = q.shape
    rank = width - rope
    views = cache_views(layer, rank, rope)
    check_widths(rank, rope, q.dtype, f"q {tuple(q.shape)}")
    if rows != plan.num_rows:
        raise ShapeRefused(f"q has {rows} rows: the plan was made for {plan.num_rows}")
    if tables.dtype != torch.int32 or (tables.numel() and tables.stride(-1) != 1):
        raise ShapeRefused(f"tables are {tables.dtype}: must be int32 [S, B] with rows together")
    config = config or choose_config(heads, _arch(q.device), views.fp8)
    q = q.contiguous()
    out = q.new_empty(rows, heads, rank)
    lse = torch.empty(rows, heads, dtype=torch.float32, device=q.device)
    for (first, last), part in zip(plan.launches, plan.pieces or (plan,), strict=False):
        units = part.max_units
        room = units if plan.max_parts > 1 else 1
        part_out = torch.empty(room, heads, rank, dtype=torch.float32, device=q.device)
        part_lse = torch.empty(room, heads, dtype=torch.float32, device=q.device)
        shares = triton.cdiv(heads, config.block_h) * config.halves
        resident = programs or _processors(q.device) * config.per_chip
        _launch(
            min(units * shares, resident), q[first:last], views, tables, part, out[first:last],
            lse[first:last], part_out, part_lse, scale, rank, rope, config,
        )  # fmt: skip
        if plan.max_parts > 1:
            merge_units(part_out, part_lse, part.work_start, out[first:last], lse[first:last])
    return out, lse


def _launch(
    programs: int, q: Tensor, views: CacheViews, tables: Tensor, plan: DecodePlan, out: Tensor,
    lse: Tensor, part_out: Tensor, part_lse: Tensor, scale: float, rank: int, rope: int,
    config: DecodeConfig,
) -> None:  # fmt: skip
    depth = 0 if plan.ancestors is None else plan.ancestors.shape[1]
    mla_decode_kernel[(programs,)](
        q, views.latents, views.scales, views.ropes, tables, plan.positions, plan.sequences,
        plan.sequences if plan.ancestors is None else plan.ancestors, plan.unit_rows,
        plan.spans, plan.work_start, out, lse, part_out, part_lse, scale, q.shape[0],
        tables.stride(0),
        heads=q.shape[1], rank=rank, rope=rope, block_size=views.block_size, fp8=views.fp8,
        depth=depth, block_h=config.block_h, tile=TILE, halves=config.halves,
        guarded=config.guarded, constant_default=CONSTANT_DEFAULT, stages=config.stages,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip


def cuts_by_load(heads: int, device: torch.device, fp8: bool) -> ByLoad:
    """Those that fill this device about twice (fast mode)."""
    return fill(heads, _processors(device), choose_config(heads, _arch(device), fp8))


def _arch(device: torch.device) -> int:
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 3  # the interpreter: few, so that a program takes several units
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


# -- cost, compile cases ------------------------------------------------------------------------


def cost(
    contexts: list[int], heads: int, rank: int = 512, rope: int = 64, *, fp8: bool = False,
    rows_each: int = 1, partitions: Cuts = DETERMINISTIC,
) -> KernelCost:  # fmt: skip
    """contexts: positions each sequence attends to; rows_each: query rows of a sequence (1 + its
    drafts), which share its latents. Bytes: each latent once, q, out, and fp32 parts of rows with
    more than one unit, written and read. Flops: 2 H (2c + r) a row and position."""
    width = row_bytes(rank, rope, fp8)
    flops = sum(2 * heads * (2 * rank + rope) * n * rows_each for n in contexts)
    cache = sum(contexts) * width
    ends = len(contexts) * rows_each * heads * ((rank + rope) * 2 + rank * 2 + 4)
    parts = partitions.parts(contexts, rows_each)
    kept = sum(n for n in parts if n > 1) * rows_each * heads * 2 * 4 * (rank + 1)
    return KernelCost(cache + ends + kept, flops)


def compile_cases() -> list[CompileCase]:
    cases = []
    for heads in (128, 64, 32, 16):
        for fp8 in (False, True):
            for depth in (0, 8) if heads == 128 else (0,):
                for arch in (90, 100):
                    cases.append(_case(heads, fp8, depth, arch))
    return cases


def _case(heads: int, fp8: bool, depth: int, arch: int) -> CompileCase:
    config = choose_config(heads, arch, fp8)
    matrix = (
        {90: "wgmma.mma_async", 100: "tcgen05.mma"}
        if heads >= 64
        else dict.fromkeys((90, 100), "mma.sync")
    )
    signature = dict.fromkeys(("q", "ropes", "out"), "*bf16")
    signature |= {"latents": "*fp8e4nv" if fp8 else "*bf16", "positions": "*i64", "scale": "fp32"}
    signature |= dict.fromkeys(("scales", "lse", "part_out", "part_lse"), "*fp32")
    signature |= dict.fromkeys(
        ("tables", "sequences", "ancestors", "unit_rows", "spans", "work_start"), "*i32"
    )
    signature |= dict.fromkeys(("num_rows", "table_row"), "i32")
    return CompileCase(
        mla_decode_kernel,
        "mla_decode",
        f"h{heads} {config.name(fp8, depth)} for sm_{arch}",
        signature,
        {"heads": heads, "rank": 512, "rope": 64, "block_size": 64, "fp8": fp8, "depth": depth,
         "block_h": config.block_h, "tile": TILE, "halves": config.halves,
         "guarded": config.guarded, "constant_default": CONSTANT_DEFAULT, "stages": config.stages},
        num_warps=config.warps,
        num_stages=config.stages,
        wants={arch: (matrix[arch], "wide loads")},
        archs=(arch,),
    )  # fmt: skip
