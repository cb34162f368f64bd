"""Arranging experts on equal GPUs: copies and places together, row by row, all rows at once.

Knows: loads of independent rows (a layer, or one node of a layer), GPUs that are alike. Several
starts, each improved by local search; the best of them and of the EPLB-equivalent is kept per row.
Knows nothing of: nodes, groups, dead GPUs, previous placements.

Shape letters: B rows, E experts of a row, G GPUs, k slots a GPU.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ep.planning.balance import table_balance
from ep.planning.duplicates import part_duplicates
from ep.planning.eplb import one_node
from ep.planning.local_search import SlotTable, Work, even_pairs, relieve_busiest
from ep.planning.replicate import FloatArray, IntArray, add_replicas, balance_bound, in_order_sum

# Good enough to stop: a share of the bound.
_CLOSE = 5e-4
# A row that is still this far above its bound is worth other numbers of copies.
_WORTH_A_START = 2e-3
# Other numbers of copies to start from, see `copies_by`.
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
_SHAKE_WORK = 3_000_000
_MOST_TRIES = 64
_LEAST_TRIES = 8
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
    _not_below_eplb(weights, num_gpus, best, balance, bound, Work(_LEAST_WORK))
    far = np.flatnonzero(balance > bound + _WORTH_A_START)
    if len(far):
        _shake(weights, bound, best, balance, far)
    return best


def _shake(
    weights: FloatArray, bound: FloatArray, best: IntArray, balance: FloatArray, far: IntArray
) -> None:
    """Many starts more where rows are so small that these cost little: each made as if the loads
    were somewhat different, in a fixed pattern. Small rows have few good tables, far apart."""
    _, gpus, room = best.shape
    experts = weights.shape[1]
    if gpus * room > _SMALL_ROW:
        return
    tries = min(_MOST_TRIES, _SHAKE_WORK // (len(far) * gpus * room * room * _TRY_STEPS))
    if tries < _LEAST_TRIES:
        return
    # Multiples of irrational numbers, modulo 1: spread evenly, without a random generator.
    number = np.arange(1, tries + 1)[:, None]
    pattern = np.mod(number * 0.6180339887498949 + np.arange(experts) * 0.7548776662466927, 1.0)
    pattern = np.mod(pattern * (1 + np.arange(experts) % 7) + number * 0.5698402909980532, 1.0)
    strength = np.mod(number * 0.4142135623730951, 1.0)
    rows = np.repeat(far, tries)
    factor = np.tile(1 + strength * (pattern - 0.5), (len(far), 1))
    shaken = weights[rows] * factor
    counts, _ = add_replicas(shaken, gpus * room, gpus)
    table = spread(shaken, counts, gpus, room)
    made, found = _improve(weights[rows], table, bound[rows], Work(2 * _SHAKE_WORK))
    winner = found.reshape(len(far), tries).argmin(axis=1) + np.arange(len(far)) * tries
    _keep_better(best, balance, far, made[winner], found[winner])


def _not_below_eplb(
    weights: FloatArray,
    num_gpus: int,
    best: IntArray,
    balance: FloatArray,
    bound: FloatArray,
    work: Work,
) -> None:
    """Rows where the EPLB-equivalent table is more even start from that one, duplicates parted."""
    rows, gpus, room = best.shape
    table, _ = one_node(weights.astype(np.float32), gpus * room, num_gpus)
    worse = np.flatnonzero(table_balance(weights, table) < balance - _ROUNDING)
    if not len(worse):
        return
    table, clean = part_duplicates(weights[worse], table[worse], _MOST_DUPLICATES)
    worse = worse[clean]
    if len(worse):
        _keep_better(
            best, balance, worse, *_improve(weights[worse], table[clean], bound[worse], work)
        )


def spread(weights: FloatArray, counts: IntArray, num_gpus: int, slots_per_gpu: int) -> IntArray:
    """A first table [B, G, k] for given counts [B, E] (each 1..G, G * k in all): the copies in
    order of load, in k rounds of one a GPU, the heaviest to the lightest GPU. An expert whose
    copies straddle two rounds comes second to GPUs that have it, so none has it twice."""
    rows = np.arange(len(weights))
    share = weights / counts
    order = np.argsort(-share, axis=1, kind="stable")
    times = np.take_along_axis(counts, order, axis=1)
    items = np.repeat(order.ravel(), times.ravel()).reshape(len(weights), -1)
    table = np.empty((len(weights), num_gpus, slots_per_gpu), dtype=np.int64)
    load = np.zeros((len(weights), num_gpus))
    for place in range(slots_per_gpu):
        item = items[:, place * num_gpus : (place + 1) * num_gpus]
        key = load
        if place:
            key = np.where(table[:, :, place - 1] == item[:, :1], np.inf, load)
        gpu = np.argsort(key, axis=1, kind="stable")
        table[rows[:, None], gpu, place] = item
        load[rows[:, None], gpu] += np.take_along_axis(share, item, axis=1)
    return table


def copies_by(
    weights: FloatArray, num_gpus: int, num_slots: int, power: float, ceiling: float
) -> tuple[IntArray, NDArray[np.bool_]]:
    """(counts [B, E], possible [B]): first as many copies as keep each at or under ceiling mean GPU
    loads, then copy after copy to the expert with the largest weight ** power per copy.

    `add_replicas` makes the largest shares equal; with a power below 1 the copies of heavy experts
    stay heavier than those of light ones, so that GPUs can pair unlike shares.
    """
    mean = in_order_sum(weights)[:, None] / num_gpus
    needed = np.ones(weights.shape)
    np.divide(weights, ceiling * mean, out=needed, where=mean > 0)
    counts = np.clip(np.ceil(needed), 1, num_gpus).astype(np.int64)
    left = num_slots - counts.sum(axis=1)
    possible = left >= 0
    worth = _root(weights, power)
    per_copy = np.where(counts >= num_gpus, -1.0, worth / counts)  # -1: no GPU is left for it
    while True:
        rows = np.flatnonzero(left > 0)
        if not len(rows):
            return counts, possible
        chosen = per_copy[rows].argmax(axis=1)
        counts[rows, chosen] += 1
        count = counts[rows, chosen]
        per_copy[rows, chosen] = np.where(count >= num_gpus, -1.0, worth[rows, chosen] / count)
        left[rows] -= 1


def _root(weights: FloatArray, power: float) -> FloatArray:
    """About weights ** power, by square roots and products alone: those round alike everywhere,
    pow does not."""
    out = np.ones(weights.shape)
    root = weights
    rest = power
    for _ in range(8):
        if rest >= 1:
            out, rest = out * root, rest - 1
        root, rest = np.sqrt(root), rest * 2
    return out


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
