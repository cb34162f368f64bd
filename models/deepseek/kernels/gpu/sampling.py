"""The next token of each row: greedy, or drawn with temperature, top-k, top-p and min-p.

The rule is the engine's (its CPU draw says why), so that the same probabilities, seed and position
give the same token there and here:

1. Tokens stand in order of descending probability, ties by ascending id. top-k keeps the first k,
   min-p those of at least min_p times the first one's probability, top-p those before which stands
   less than top_p times the mass of the first k (1 without top-k). The first is always kept.
2. Without top-k and min-p, blocks of 128 ids race, then the tokens of the one that wins; if top-p
   keeps the winner, it is the choice. Else, and with top-k or min-p, the tokens race that these
   keep and that stand before the loser, until top-p keeps the winner.

Nothing is sorted. "Before token i" is a comparison with its probability and id; the k-th in order
is found digit by digit of its bits, three passes, ties by counting. A row reads nothing of another
and its sums have one order (law 5). Nothing is told to the host: rows that need no cut leave early.

Shape letters: B rows, V vocabulary, C chunks of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from models.deepseek.kernels.gpu.aot import CompileCase
from models.deepseek.kernels.gpu.cost import KernelCost
from models.deepseek.kernels.gpu.errors import ShapeRefused
from models.deepseek.kernels.gpu.language import tl, triton
from models.deepseek.kernels.gpu.race import ALONE, BLOCKS, RACE_BLOCK, WITHIN, arrival, race_state
from models.deepseek.kernels.gpu.row_peaks import CHUNK, argmax, best_of_row, row_peaks

TILE = 4096  # ids that a program holds where it walks a row alone
DIGIT = 1024  # values of a digit of a probability's bits: three make 30 bits, up to 1.0
_ALONE, _BLOCKS, _WITHIN = tl.constexpr(ALONE), tl.constexpr(BLOCKS), tl.constexpr(WITHIN)


@dataclass(frozen=True)
class Cuts:
    """What each of B rows draws with, on its device. temperature [B] fp32, 0: greedy; top_k [B]
    int32, 0: off; top_p [B] fp64, 1: off; min_p [B] fp32, 0: off; seeds, positions [B] int64 (the
    64 bits of the seed; how many tokens are out)."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    positions: Tensor


@dataclass(frozen=True)
class Tokens:
    """tokens [B] int64; failed [B] bool: the row's best is no finite number (its token is an id,
    and means nothing); probs [B, V] fp32 after temperature, None where all were greedy. Rows that
    are greedy or failed have none."""

    tokens: Tensor
    failed: Tensor
    probs: Tensor | None


@triton.jit
def probs_kernel(
    logits, temperature, peaks, sums, seeds, positions, probs, keys, blocks, firsts,
    stride, vocab, chunks,
    chunk: tl.constexpr, block: tl.constexpr, block_c: tl.constexpr, given: tl.constexpr,
):  # fmt: skip
    """logits [B, V] -> probs [B, V] fp32 (given: probs are there, nothing is written), and of each
    chunk the winner of the race of blocks: keys [B, C] fp64, blocks [B, C] int32; and the first in
    order of probabilities: firsts [B, C] int32. Of logits that are not equal probabilities may be.
    Bytes: 8BV. FLOPs none on matrix units: bound by bytes, about 6BV operations in fp32 and a race
    in fp64 for each block of 128. Programs: rows, chunks. Greedy rows leave at once."""
    row, number = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heat = tl.load(temperature + row)
    if heat > 0:
        per: tl.constexpr = chunk // block
        runner = number * per + tl.arange(0, per)
        at = runner[:, None] * block + tl.arange(0, block)[None, :]
        inside = at < vocab
        if given:
            p = tl.load(probs + row * vocab + at, mask=inside, other=0.0)
        else:
            of_chunk = tl.arange(0, block_c)
            there = of_chunk < chunks
            peak = tl.load(peaks + row * chunks + of_chunk, mask=there, other=float("-inf"))
            top = tl.div_rn(tl.max(peak, axis=0), heat)
            scale = tl.exp(tl.div_rn(tl.where(there, peak, 0.0), heat) - top)
            part = tl.load(sums + row * chunks + of_chunk, mask=there, other=0.0)
            total = tl.sum(tl.where(part > 0, part * scale, 0.0), axis=0)
            value = tl.load(logits + row * stride + at, mask=inside, other=float("-inf"))
            p = tl.div_rn(tl.exp(tl.div_rn(value, heat) - top), total)
            tl.store(probs + row * vocab + at, p, mask=inside)
        most = tl.max(tl.max(p, axis=1), axis=0)
        lead = tl.where((p == most) & inside, at, vocab - 1)
        tl.store(firsts + row * chunks + number, tl.min(tl.min(lead, axis=1), axis=0))
        state = race_state(tl.load(seeds + row), tl.load(positions + row), _BLOCKS)
        key = arrival(state, runner, tl.sum(p, axis=1))
        key = tl.where(runner * block < vocab, key, float("inf"))
        least = tl.min(key, axis=0)
        first = tl.min(tl.where(key == least, runner, chunks * per), axis=0)
        tl.store(keys + row * chunks + number, least)
        tl.store(blocks + row * chunks + number, first)


@triton.jit
def _is_before(p, at, edge, edge_id):
    """Whether tokens stand before the one of probability `edge` and id `edge_id`."""
    return (p > edge) | ((p == edge) & (at < edge_id))


@triton.jit
def _race_alone(probs, state, edge, edge_id, vocab, best, tile: tl.constexpr):
    """The token that arrives first among those before the edge, each running alone; the best one
    if none does."""
    lane = tl.arange(0, tile)
    keys = tl.full((tile,), float("inf"), tl.float64)
    ids = tl.full((tile,), 0x7FFFFFFF, tl.int32)
    for begin in range(0, vocab, tile):
        at = begin + lane
        p = tl.load(probs + at, mask=at < vocab, other=-1.0)
        runs = _is_before(p, at, edge, edge_id) & (at < vocab)
        if tl.max(runs.to(tl.int32), axis=0) > 0:
            key = tl.where(runs, arrival(state, at, p), float("inf"))
            # Ids only grow here: of a tie the first stays. An id is taken even where none arrives.
            better = (key < keys) | (runs & (ids == 0x7FFFFFFF))
            keys = tl.where(better, key, keys)
            ids = tl.where(better, at, ids)
    least = tl.min(keys, axis=0)
    found = tl.min(tl.where(keys == least, ids, 0x7FFFFFFF), axis=0)
    return tl.where(found < vocab, found, best)


@triton.jit
def _mass_before(probs, edge, edge_id, vocab, tile: tl.constexpr):
    """fp64 sum of the probabilities of all tokens before the edge."""
    lane = tl.arange(0, tile)
    mass = tl.zeros((tile,), tl.float64)
    for begin in range(0, vocab, tile):
        at = begin + lane
        p = tl.load(probs + at, mask=at < vocab, other=-1.0)
        runs = _is_before(p, at, edge, edge_id) & (at < vocab)
        mass += tl.where(runs, p, 0.0).to(tl.float64)
    return tl.sum(mass, axis=0)


@triton.jit
def _after_kth(probs, k, vocab, tile: tl.constexpr, digit: tl.constexpr):
    """The edge behind the k-th token in order (k < vocab): its probability, its id + 1."""
    lane, value = tl.arange(0, tile), tl.arange(0, digit)
    prefix = k * 0  # the digits found so far
    left = k  # how many of those that share them are still to be taken
    level = 0  # how many there are of the last one
    for step in range(3):
        shift = 20 - 10 * step
        counts = tl.zeros((digit,), tl.int32)
        for begin in range(0, vocab, tile):
            at = begin + lane
            p = tl.load(probs + at, mask=at < vocab, other=-1.0)
            bits = p.to(tl.int32, bitcast=True)
            mine = (at < vocab) & ((bits >> (shift + 10)) == prefix)
            counts += tl.histogram((bits >> shift) & (digit - 1), digit, mask=mine)
        reached = tl.cumsum(counts, axis=0, reverse=True)  # with this digit or a higher one
        found = tl.max(tl.where(reached >= left, value, 0), axis=0)
        level = tl.sum(tl.where(value == found, counts, 0), axis=0)
        left = left - tl.sum(tl.where(value > found, counts, 0), axis=0)
        prefix = (prefix << 10) | found
    edge_id = vocab
    if left < level:  # a tie at the edge: the lowest ids
        seen = 0
        for begin in range(0, vocab, tile):
            at = begin + lane
            p = tl.load(probs + at, mask=at < vocab, other=-1.0)
            tied = ((p.to(tl.int32, bitcast=True) == prefix) & (at < vocab)).to(tl.int32)
            nth = seen + tl.cumsum(tied, axis=0)
            edge_id = tl.minimum(
                edge_id, tl.min(tl.where((tied > 0) & (nth == left), at + 1, vocab), axis=0)
            )
            seen += tl.sum(tied, axis=0)
    return prefix.to(tl.float32, bitcast=True), edge_id


@triton.jit
def draw_kernel(
    probs, temperature, top_ks, top_ps, min_ps, seeds, positions, peaks, ids, keys, blocks, firsts,
    tokens, failed, vocab, chunks,
    block: tl.constexpr, block_c: tl.constexpr, tile: tl.constexpr, digit: tl.constexpr,
):  # fmt: skip
    """probs [B, V] fp32, keys, blocks and firsts [B, C] of probs_kernel, peaks and ids [B, C] of
    peak_kernel -> tokens [B] int64, failed [B]. Bytes of a row: none of V where nothing is cut;
    4V a pass with top-p (one where it keeps the winner: mostly), five or more with top-k or min-p.
    FLOPs none on matrix units: 3V to 6V comparisons a pass, V in fp64 where a race is run. One
    program a row."""
    row = tl.program_id(0).to(tl.int64)
    top, best = best_of_row(peaks, ids, row, chunks, vocab, block_c)
    lost = (top == float("inf")) | (top == float("-inf"))
    tl.store(failed + row, lost)
    top_k, min_p = tl.load(top_ks + row), tl.load(min_ps + row)
    chosen = best
    heat = tl.load(temperature + row)
    scaled = tl.abs(tl.div_rn(top, tl.where(heat > 0, heat, 1.0)))
    if (heat > 0) & (top_k != 1) & (scaled < float("inf")):  # else probabilities are no numbers
        seed, position = tl.load(seeds + row), tl.load(positions + row)
        top_p = tl.load(top_ps + row)
        probs += row * vocab
        alone = race_state(seed, position, _ALONE)
        cut_k = (top_k > 0) & (top_k < vocab)
        limit = top_p
        if cut_k | (min_p > 0):
            edge, edge_id = -1.0, 0  # before it stand all
            if cut_k:
                edge, edge_id = _after_kth(probs, top_k, vocab, tile, digit)
                if top_p < 1:
                    limit = top_p * _mass_before(probs, edge, edge_id, vocab, tile)
            if min_p > 0:
                floor = min_p * tl.load(probs + best)
                if (floor > edge) & (floor > 0):  # all of that or more: before the next below it
                    bits = floor.to(tl.int32, bitcast=True) - 1
                    edge, edge_id = bits.to(tl.float32, bitcast=True), 0
            chosen = _race_alone(probs, alone, edge, edge_id, vocab, best, tile)
        else:
            of_chunk = tl.arange(0, block_c)
            there = of_chunk < chunks
            key = tl.load(keys + row * chunks + of_chunk, mask=there, other=float("inf"))
            mine = tl.load(blocks + row * chunks + of_chunk, mask=there, other=0x7FFFFFFF)
            won = tl.min(tl.where(key == tl.min(key, axis=0), mine, 0x7FFFFFFF), axis=0)
            at = won * block + tl.arange(0, block)
            p = tl.load(probs + at, mask=at < vocab, other=0.0)
            key = arrival(race_state(seed, position, _WITHIN), at, p)
            chosen = tl.min(tl.where(key == tl.min(key, axis=0), at, vocab), axis=0)
        of_chunk = tl.arange(0, block_c)
        there = of_chunk < chunks
        first = tl.load(firsts + row * chunks + of_chunk, mask=there, other=0)
        p = tl.load(probs + first, mask=there, other=-1.0)
        first = tl.min(tl.where(p == tl.max(p, axis=0), first, vocab), axis=0)
        again = (top_p < 1) & (chosen != first)
        while again:
            edge = tl.load(probs + chosen)
            if _mass_before(probs, edge, chosen, vocab, tile) < limit:
                again = chosen < 0
            else:
                chosen = _race_alone(probs, alone, edge, chosen, vocab, best, tile)
                again = chosen != first
    tl.store(tokens + row, chosen.to(tl.int64))


def sample(logits: Tensor, cuts: Cuts | None) -> Tokens:
    """logits [B, V] fp32, penalties and biases in them already. cuts None: all rows are greedy."""
    if cuts is None:
        return Tokens(*argmax(logits), None)
    peaks, ids, sums = row_peaks(logits, cuts.temperature)
    probs = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    return _draw(logits, probs, cuts, peaks, ids, sums, given=False)


def draw(probs: Tensor, cuts: Cuts) -> Tokens:
    """probs [B, V] fp32, whose largest decide where `cuts` say greedy: steps 1 and 2 alone."""
    peaks, ids, _ = row_peaks(probs, None)
    return _draw(probs, probs.contiguous(), cuts, peaks, ids, peaks, given=True)


def _draw(
    logits: Tensor, probs: Tensor, cuts: Cuts, peaks: Tensor, ids: Tensor, sums: Tensor, given: bool
) -> Tokens:
    rows, vocab = logits.shape
    _check_cuts(cuts, rows)
    device, chunks = logits.device, peaks.shape[1]
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    failed = torch.empty(rows, dtype=torch.bool, device=device)
    keys = torch.empty(rows, chunks, dtype=torch.float64, device=device)
    blocks, firsts = torch.empty(2, rows, chunks, dtype=torch.int32, device=device)
    block_c = triton.next_power_of_2(chunks)
    if rows:
        probs_kernel[(rows, chunks)](
            logits, cuts.temperature, peaks, sums, cuts.seeds, cuts.positions, probs, keys, blocks,
            firsts, logits.stride(0), vocab, chunks,
            chunk=CHUNK, block=RACE_BLOCK, block_c=block_c, given=given, num_warps=8,
        )  # fmt: skip
        draw_kernel[(rows,)](
            probs, cuts.temperature, cuts.top_k, cuts.top_p, cuts.min_p, cuts.seeds,
            cuts.positions, peaks, ids, keys, blocks, firsts, tokens, failed, vocab, chunks,
            block=RACE_BLOCK, block_c=block_c, tile=TILE, digit=DIGIT, num_warps=8,
        )  # fmt: skip
    return Tokens(tokens, failed, probs)


def _check_cuts(cuts: Cuts, rows: int) -> None:
    wanted = {
        "temperature": torch.float32, "top_k": torch.int32, "top_p": torch.float64,
        "min_p": torch.float32, "seeds": torch.int64, "positions": torch.int64,
    }  # fmt: skip
    for name, dtype in wanted.items():
        value = getattr(cuts, name)
        if value.dtype != dtype or value.shape != (rows,) or not value.is_contiguous():
            raise ShapeRefused(
                f"{name} is {value.dtype} {tuple(value.shape)}: must be {dtype} [{rows}]"
            )


def sample_cost(rows: int, vocab: int, passes: int = 0) -> KernelCost:
    """passes: of draw_kernel over its row (see there). fp64 work of races is not counted."""
    return KernelCost(4 * rows * vocab * (3 + passes), 6 * rows * vocab)


def compile_cases() -> list[CompileCase]:
    chunks = {"stride": "i32", "vocab": "i32", "chunks": "i32"}
    partial = {"peaks": "*fp32", "ids": "*i32", "sums": "*fp32", "keys": "*fp64", "blocks": "*i32",
               "firsts": "*i32"}  # fmt: skip
    cuts = {"temperature": "*fp32", "top_ks": "*i32", "top_ps": "*fp64", "min_ps": "*fp32",
            "seeds": "*i64", "positions": "*i64"}  # fmt: skip
    rows = {"logits": "*fp32", "probs": "*fp32", "tokens": "*i64", "failed": "*i1"}
    types = {**chunks, **partial, **cuts, **rows}
    wide = {90: ("wide loads",), 100: ("wide loads",)}
    whole = ("stride", "vocab")
    block_c = 32  # of 129280 ids
    return [
        CompileCase(
            probs_kernel, "sample_probs", f"{CHUNK} w8", types,
            {"chunk": CHUNK, "block": RACE_BLOCK, "block_c": block_c, "given": False},
            num_warps=8, divisible=whole, wants=wide,
        ),
        CompileCase(
            draw_kernel, "sample_draw", f"{TILE} w8", types,
            {"block": RACE_BLOCK, "block_c": block_c, "tile": TILE, "digit": DIGIT},
            num_warps=8, divisible=whole, wants=wide,
        ),
    ]  # fmt: skip
