"""(row, k) pairs in the order in which grouped GEMMs want them: a stable counting sort by slot.

Three small kernels: how many pairs of each slot every chunk of CHUNK pairs has; where each slot and
each chunk in it begins; where each pair goes. No atomics, so the order is that of base.sort_pairs:
by slot, then row, then k, each time. Nothing is told to the host: results have the size that the
worst case needs, and say on the device how far they are filled.

Three layouts: slots one after the other (alignment 1), each beginning at a multiple of `alignment`
(contiguous grouped GEMM, psum form), or with `capacity` rows a slot (masked grouped GEMM).

Shape letters: T tokens, K top-k, e local slots, Q places of the layout, C chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from models.deepseek.kernels.gpu.aot import CompileCase
from models.deepseek.kernels.gpu.cost import KernelCost
from models.deepseek.kernels.gpu.errors import ShapeRefused
from models.deepseek.kernels.gpu.language import tl, triton

CHUNK = 128  # pairs of a program: a rank among them is a sum over a square of comparisons
SCAN_TILE = 4096  # counts that the scan holds at a time
MAX_SLOTS = 1024


@dataclass(frozen=True)
class PairLayout:
    """pair_rows [Q] int32: row of the pair at each place, -1 where there is none. starts [e + 1]
    int32: where each slot begins, and the end of the last one's room. ends [e] int32: where its
    pairs end (DeepGEMM's psum form). counts [e] int32: pairs of a slot, those of no room included.
    index [T, K] int64: place of each pair, or -1."""

    pair_rows: Tensor
    starts: Tensor
    ends: Tensor
    counts: Tensor
    index: Tensor


@triton.jit(do_not_specialize=["pairs"])
def count_kernel(slots, counts, pairs, num_slots, chunk: tl.constexpr, block_e: tl.constexpr):
    """slots [TK] int32 -> counts [C, e] int32. Bytes: 4TK + 4Ce. FLOPs none.
    One program a chunk."""
    at = tl.program_id(0) * chunk + tl.arange(0, chunk)
    slot = tl.load(slots + at, mask=at < pairs, other=-1)
    number = tl.arange(0, block_e)
    for begin in range(0, num_slots, block_e):
        mine = begin + number
        here = tl.sum((slot[:, None] == mine[None, :]).to(tl.int32), axis=0)
        tl.store(counts + tl.program_id(0) * num_slots + mine, here, mask=mine < num_slots)


@triton.jit(do_not_specialize=["chunks"])
def scan_kernel(
    counts, starts, ends, totals, chunks, num_slots, alignment, capacity,
    block_c: tl.constexpr, block_e: tl.constexpr,
):  # fmt: skip
    """counts [C, e] int32, in place: pairs of the slot in chunks before. -> starts [e + 1], ends
    [e], totals [e] int32. Bytes: 8Ce. FLOPs none. One program: the counts of a step are
    few."""
    slot, chunk = tl.arange(0, block_e), tl.arange(0, block_c)
    running = tl.zeros((block_e,), tl.int32)
    for begin in range(0, chunks, block_c):
        at = (begin + chunk)[:, None] * num_slots + slot[None, :]
        inside = (begin + chunk < chunks)[:, None] & (slot < num_slots)[None, :]
        here = tl.load(counts + at, mask=inside, other=0)
        before = tl.cumsum(here, axis=0) - here + running[None, :]
        tl.store(counts + at, before, mask=inside)
        running += tl.sum(here, axis=0)
    if capacity > 0:
        room = tl.where(slot < num_slots, capacity, 0)
        filled = tl.minimum(running, capacity)
    else:
        room = (running + alignment - 1) // alignment * alignment
        filled = running
    until = tl.cumsum(room, axis=0)
    real = slot < num_slots
    tl.store(starts + slot, until - room, mask=real)
    tl.store(ends + slot, until - room + filled, mask=real)
    tl.store(totals + slot, running, mask=real)
    tl.store(starts + num_slots, tl.sum(room, axis=0))


@triton.jit(do_not_specialize=["pairs"])
def place_kernel(
    slots, before, starts, pair_rows, index, pairs, num_slots, top_k, capacity,
    chunk: tl.constexpr,
):  # fmt: skip
    """slots [TK] int32, before [C, e], starts [e + 1] -> pair_rows [Q] int32, only where pairs
    are, index [TK] int64. Bytes: 16TK + 4Ce. FLOPs none: bound by bytes. One
    program a chunk."""
    first = tl.program_id(0) * chunk
    i, j = tl.arange(0, chunk), tl.arange(0, chunk)
    slot = tl.load(slots + first + i, mask=first + i < pairs, other=-1)
    other = tl.load(slots + first + j, mask=first + j < pairs, other=-1)
    same = (other[None, :] == slot[:, None]) & (j[None, :] < i[:, None])
    rank = tl.sum(same.to(tl.int32), axis=1)
    valid = (slot >= 0) & (slot < num_slots)
    rank += tl.load(before + tl.program_id(0) * num_slots + slot, mask=valid, other=0)
    if capacity > 0:
        valid = valid & (rank < capacity)
    place = tl.load(starts + slot, mask=valid, other=0) + rank
    pair = first + i
    tl.store(pair_rows + place, pair // top_k, mask=valid)
    place = tl.where(valid, place, -1)
    tl.store(index + pair, place.to(tl.int64), mask=pair < pairs)


def sort_pairs(
    slots: Tensor,
    num_slots: int,
    alignment: int = 1,
    capacity: int | None = None,
    num_pairs: int | None = None,
) -> PairLayout:
    """slots [T, K] int32, local slot or -1 (numbers beyond are taken as -1). capacity: the masked
    layout, Q = e * capacity; pairs for which a slot has no room get no place, and its count tells.
    Otherwise Q is what num_pairs need at most (never fewer than there are: places are not checked),
    None: T * K."""
    if slots.dim() != 2 or slots.dtype != torch.int32:
        raise ShapeRefused(f"slots is {slots.dtype} {tuple(slots.shape)}: must be int32 [T, K]")
    if not 0 < num_slots <= MAX_SLOTS or alignment < 1 or (capacity is not None and capacity < 1):
        raise ShapeRefused(
            f"num_slots={num_slots}, alignment={alignment}, capacity={capacity}: must be at least "
            f"1, num_slots at most {MAX_SLOTS}"
        )
    slots = slots.contiguous()
    pairs, device = slots.numel(), slots.device
    chunks = triton.cdiv(pairs, CHUNK)
    counts = torch.empty(chunks, num_slots, dtype=torch.int32, device=device)
    starts, ends, totals = torch.empty(3, num_slots + 1, dtype=torch.int32, device=device)
    known = pairs if num_pairs is None else min(num_pairs, pairs)
    size = room_for(known, num_slots, alignment) if capacity is None else num_slots * capacity
    pair_rows = torch.full((size,), -1, dtype=torch.int32, device=device)
    index = torch.empty(slots.shape, dtype=torch.int64, device=device)
    if chunks:
        block_e = min(32, triton.next_power_of_2(num_slots))
        count_kernel[(chunks,)](slots, counts, pairs, num_slots, chunk=CHUNK, block_e=block_e)
    block_c, block_e = scan_tile(num_slots)
    scan_kernel[(1,)](
        counts, starts, ends, totals, chunks, num_slots, alignment, capacity or 0,
        block_c=block_c, block_e=block_e,
    )  # fmt: skip
    if chunks:
        place_kernel[(chunks,)](
            slots, counts, starts, pair_rows, index, pairs, num_slots, slots.shape[1],
            capacity or 0, chunk=CHUNK,
        )  # fmt: skip
    return PairLayout(pair_rows, starts, ends[:num_slots], totals[:num_slots], index)


def room_for(pairs: int, num_slots: int, alignment: int) -> int:
    """Places that `pairs` pairs can need at most, whatever their slots."""
    return triton.cdiv(pairs + min(pairs, num_slots) * (alignment - 1), alignment) * alignment


def scan_tile(num_slots: int) -> tuple[int, int]:
    """Chunks and slots of a tile of the scan."""
    block_e = triton.next_power_of_2(num_slots)
    return max(1, min(64, SCAN_TILE // block_e)), block_e


def sort_pairs_twin(
    slots: Tensor, num_slots: int, alignment: int = 1, capacity: int | None = None
) -> PairLayout:
    """One pair after the other."""
    flat, top_k = slots.flatten().tolist(), slots.shape[1]
    members: list[list[int]] = [[] for _ in range(num_slots)]
    for pair, slot in enumerate(flat):
        if 0 <= slot < num_slots:
            members[slot].append(pair)
    pairs = len(flat)
    size = room_for(pairs, num_slots, alignment) if capacity is None else num_slots * capacity
    rows, index = [-1] * size, [-1] * pairs
    starts, ends = [0], []
    for mine in members:
        kept = mine if capacity is None else mine[:capacity]
        for place, pair in enumerate(kept, start=starts[-1]):
            rows[place], index[pair] = pair // top_k, place
        ends.append(starts[-1] + len(kept))
        room = -(-len(mine) // alignment) * alignment if capacity is None else capacity
        starts.append(starts[-1] + room)

    def numbers(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    counts = numbers([len(mine) for mine in members])
    places = torch.tensor(index, dtype=torch.int64).view(slots.shape)
    return PairLayout(numbers(rows), numbers(starts), numbers(ends), counts, places)


def sort_pairs_cost(tokens: int, top_k: int, num_slots: int) -> KernelCost:
    """The three kernels, and the filling of pair_rows with -1."""
    pairs = tokens * top_k
    chunks = -(-pairs // CHUNK)
    return KernelCost(24 * pairs + 16 * chunks * num_slots, 0)


def compile_cases() -> list[CompileCase]:
    numbers = {"pairs": "i32", "num_slots": "i32", "top_k": "i32", "capacity": "i32"}
    cases = [
        CompileCase(
            place_kernel,
            "sort_place",
            f"{CHUNK} w4",
            {"slots": "*i32", "before": "*i32", "starts": "*i32", "pair_rows": "*i32",
             "index": "*i64", **numbers},
            {"chunk": CHUNK},
        ),
        CompileCase(
            count_kernel,
            "sort_count",
            f"{CHUNK}x32 w4",
            {"slots": "*i32", "counts": "*i32", **numbers},
            {"chunk": CHUNK, "block_e": 32},
        ),
    ]  # fmt: skip
    for slots in (9, 32, 256):
        block_c, block_e = scan_tile(slots)
        cases.append(
            CompileCase(
                scan_kernel,
                "sort_scan",
                f"{block_c}x{block_e} w4",
                {"counts": "*i32", "starts": "*i32", "ends": "*i32", "totals": "*i32",
                 "chunks": "i32", "num_slots": "i32", "alignment": "i32", "capacity": "i32"},
                {"block_c": block_c, "block_e": block_e},
            )
        )  # fmt: skip
    return cases
