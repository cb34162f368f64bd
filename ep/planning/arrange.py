"""Arranging experts on equal GPUs: copies and places together, row by row, all rows at once.

Knows: loads of independent rows (a layer, or one node of a layer), GPUs that are alike. Several
starts, each improved by local search; the best of them and of the EPLB-equivalent is kept per row.
Knows nothing of: nodes, groups, dead GPUs, previous placements.

Shape letters: B rows, E experts of a row, G GPUs, k slots a GPU.
"""

from __future__ import annotations

import numpy as np

from ep.planning.balance import table_balance
from ep.planning.duplicates import part_duplicates
from ep.planning.eplb import one_node
from ep.planning.local_search import SlotTable, Work, even_pairs, relieve_busiest
from ep.planning.replicate import FloatArray, IntArray, add_replicas, balance_bound, in_order_sum
from ep.planning.starts import copies_by, every_count_of, pattern, spread

# Good enough to stop: a share of the bound.
_CLOSE = 5e-4
# A row that is still this far above its bound is worth other numbers of copies.
_WORTH_A_START = 2e-3
# Other numbers of copies to start from, see `ep.planning.starts.copies_by`.
_STARTS = ((0.85, 0.97), (0.7, 0.97), (0.5, 0.85), (0.3, 0.85), (0.7, 0.85), (1.0, 0.95))
_ROUNDING = 1e-9
_MOST_DUPLICATES = 64  # of a row: more of them are not worth parting one by one
_PAIR_ROUNDS = 24
_STEPS = 300
# Candidates that searches may look at, a slot (and in all at least): from the first start, and from
# all others together, of which one gets this part of what is left.
_FIRST_WORK = 400
_FEW_SLOTS_WORK = 80  # with two slots a GPU swaps find little, other numbers of copies do
_OTHER_WORK = 100
_LEAST_WORK = 2_000_000
_PART = 0.5
_SHAKE_WORK = 1_000_000
_BELOW_EPLB = 5e-4  # rows this much less even than the EPLB-equivalent are searched further
_FLOOR_WORK = 3_000_000  # of each round for rows less even than the EPLB-equivalent
_COUNTS_WORK = 2_000_000
# Rounds: most and least starts of a row, whether of all rows.
_TRIES = ((32, 16, True), (128, 32, True), (512, 32, False), (2048, 128, False))
_SMALL_NODE = 32
_FEW_SLOTS = 4096  # of rows together that are worth many tries
_MOST_COUNTS = 2000
_MOST_OF_A_COUNT = 24
_SMALL_ROW = 128
_TRY_STEPS = 20


def arrange(weights: FloatArray, num_gpus: int, slots_per_gpu: int) -> IntArray:
    """weights [B, E] >= 0, E <= G * k, k <= E -> table [B, G, k]: no expert twice on a GPU. Takes
    about 3 us a slot on one core."""
    num_slots = num_gpus * slots_per_gpu
    counts, _ = add_replicas(weights, num_slots, num_gpus)
    best = spread(weights, counts, num_gpus, slots_per_gpu)
    if slots_per_gpu == 1 or num_gpus == 1:
        return best
    bound = balance_bound(weights, num_slots, num_gpus, counts)
    first, others = (
        Work(max(_LEAST_WORK, best.size * per_slot))
        for per_slot in (_FIRST_WORK if slots_per_gpu > 2 else _FEW_SLOTS_WORK, _OTHER_WORK)
    )
    best, balance = _improve(weights, best, bound, first)
    for power, ceiling in _STARTS:
        far = np.flatnonzero(balance > bound + _WORTH_A_START)
        if not len(far) or others.left <= 0:
            break
        other, possible = copies_by(weights[far], num_gpus, num_slots, power, ceiling)
        far = far[possible]
        if not len(far):
            continue
        table = spread(weights[far], other[possible], num_gpus, slots_per_gpu)
        part = Work(int(others.left * _PART))
        others.left -= part.left
        _keep_better(best, balance, far, *_improve(weights[far], table, bound[far], part))
        others.left += max(part.left, 0)
    floor = _not_below_eplb(weights, num_gpus, best, balance, bound, Work(_LEAST_WORK))
    _shake(weights, bound, best, balance, floor)
    return best


def _shake(
    weights: FloatArray, bound: FloatArray, best: IntArray, balance: FloatArray, floor: FloatArray
) -> None:
    """Many starts more where rows are so small that these cost little: each made as if the loads
    were somewhat different, in a fixed pattern. Small rows have few good tables, far apart.

    In rounds of ever more starts, for the rows that are still far from their bound; the last ones
    only for rows less even than the EPLB-equivalent (floor [B]), whose duplicates would be needed.
    """
    _, gpus, room = best.shape
    if gpus * room > _SMALL_ROW or gpus > _SMALL_NODE:
        return
    done = 0
    work = _SHAKE_WORK
    for most, least, all_rows in _TRIES:
        far = balance > bound + _WORTH_A_START
        if not all_rows:
            far = balance > floor + _BELOW_EPLB
        rows = np.flatnonzero(far)
        few = _FEW_SLOTS if all_rows else _FEW_SLOTS // 4
        if not len(rows) or len(rows) * gpus * room > few:
            continue
        work += 0 if all_rows else _FLOOR_WORK
        one = len(rows) * gpus * room * room * _TRY_STEPS
        tries = min(most, work // one)
        if tries < least:
            continue
        work -= tries * one
        _shake_rows(weights[rows], bound[rows], best, balance, rows, done, tries)
        done += tries
    _all_counts(weights, bound, best, balance, floor)


def _shake_rows(
    weights: FloatArray,
    bound: FloatArray,
    best: IntArray,
    balance: FloatArray,
    rows: IntArray,
    first: int,
    tries: int,
) -> None:
    """Starts first + 1 .. first + tries of some rows; weights, bound: those of the rows alone."""
    _, gpus, room = best.shape
    noise, strength = pattern(first, tries, weights.shape[1])
    wanted = np.repeat(weights, tries, axis=0)
    other = wanted * np.tile(1 + strength * (noise - 0.5), (len(rows), 1))
    # Every third start: a load more for each, else experts of little load never have copies.
    mean = in_order_sum(wanted)[:, None] / (gpus * room)
    more = np.tile(
        np.where(np.arange(tries)[:, None] % 3 == 0, noise * strength * 2, 0.0), (len(rows), 1)
    )
    other += mean * more
    counts, _ = add_replicas(other, gpus * room, gpus)
    table = spread(other, counts, gpus, room)
    made, found = _improve(wanted, table, np.repeat(bound, tries), Work(4 * _SHAKE_WORK))
    winner = found.reshape(len(rows), tries).argmin(axis=1) + np.arange(len(rows)) * tries
    _keep_better(best, balance, rows, made[winner], found[winner])


def _all_counts(
    weights: FloatArray, bound: FloatArray, best: IntArray, balance: FloatArray, floor: FloatArray
) -> None:
    """Tiny rows: starts from every number of copies that could be better, several of each; first
    for rows less even than the EPLB-equivalent, for all others as far as the work allows."""
    _, gpus, room = best.shape
    far = np.flatnonzero((balance > bound + _WORTH_A_START) | (balance > floor + _BELOW_EPLB))
    if gpus * room > _SMALL_ROW or len(far) * gpus * room > _FEW_SLOTS:
        return
    worse = balance[far] > floor[far] + _BELOW_EPLB
    work = _COUNTS_WORK * (1 + int(worse.sum()))
    for row in far[np.argsort(~worse, kind="stable")]:
        every = every_count_of(weights[row], gpus, gpus * room, _MOST_COUNTS)
        if every is None:
            continue
        mean = float(in_order_sum(weights[row])) / gpus
        counts = every[(weights[row] / every).max(axis=1) < balance[row] * mean * (1 - _ROUNDING)]
        one = len(counts) * gpus * room * room * _TRY_STEPS
        tries = min(_MOST_OF_A_COUNT, work // max(one, 1))
        if not len(counts) or tries < 1:
            continue
        work -= tries * one
        noise, strength = pattern(0, tries, weights.shape[1])
        factor = 1 + strength * (noise - 0.5)
        factor[0] = 1
        counts = np.repeat(counts, tries, axis=0)
        other = weights[row] * np.tile(factor, (len(counts) // tries, 1))
        wanted = np.repeat(weights[row : row + 1], len(counts), axis=0)
        table = spread(other, counts, gpus, room)
        made, found = _improve(
            wanted, table, np.repeat(bound[row], len(counts)), Work(4 * _SHAKE_WORK)
        )
        winner = np.array([found.argmin()])
        _keep_better(best, balance, np.array([row]), made[winner], found[winner])


def _not_below_eplb(
    weights: FloatArray,
    num_gpus: int,
    best: IntArray,
    balance: FloatArray,
    bound: FloatArray,
    work: Work,
) -> FloatArray:
    """Rows where the EPLB-equivalent table is more even start from that one, duplicates parted.
    -> [B] how even that is."""
    rows, gpus, room = best.shape
    table, _ = one_node(weights.astype(np.float32), gpus * room, num_gpus)
    floor = table_balance(weights, table)
    worse = np.flatnonzero(floor < balance - _ROUNDING)
    if not len(worse):
        return floor
    table, clean = part_duplicates(weights[worse], table[worse], _MOST_DUPLICATES)
    worse = worse[clean]
    if len(worse):
        _keep_better(
            best, balance, worse, *_improve(weights[worse], table[clean], bound[worse], work)
        )
    return floor


def _improve(
    weights: FloatArray, table: IntArray, bound: FloatArray, work: Work
) -> tuple[IntArray, FloatArray]:
    slots = SlotTable(weights, table)
    target = slots.mean * bound * (1 + _CLOSE)
    # With two slots a GPU, the heaviest-to-lightest start leaves little to gain by swaps.
    rounds = _PAIR_ROUNDS if table.shape[2] > 2 else _PAIR_ROUNDS // 4
    even_pairs(slots, rounds, target, work)
    relieve_busiest(slots, _STEPS, target, work)
    return slots.table, slots.balance()


def _keep_better(
    best: IntArray, balance: FloatArray, rows: IntArray, table: IntArray, other: FloatArray
) -> None:
    better = other < balance[rows]
    best[rows[better]] = table[better]
    balance[rows[better]] = other[better]
