"""Arranging experts on equal GPUs: copies and places together, row by row, all rows at once.

Knows: loads of independent rows (a layer, or one node of a layer), GPUs that are alike. Several
starts, each improved by local search; the best of them and of the EPLB-equivalent is kept per row.
Knows nothing of: nodes, groups, dead GPUs, previous placements.

Shape letters: B rows, E experts of a row, G GPUs, k slots a GPU.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ep.balance import table_balance
from ep.duplicates import part_duplicates
from ep.eplb import one_node
from ep.local_search import SlotTable, even_pairs, relieve_busiest
from ep.replicate import FloatArray, IntArray, add_replicas, balance_bound, in_order_sum

# Good enough to stop: a share of the bound.
_CLOSE = 5e-4
# A row that is still this far above its bound is worth other numbers of copies.
_WORTH_A_START = 2e-3
# The most load a copy has, in mean GPU loads, where a few experts hold most of it.
_CEILINGS = (1.0, 0.95, 0.9, 0.8, 0.65, 0.5)
_ROUNDING = 1e-9
_MOST_DUPLICATES = 64  # of a row: more of them are not worth parting one by one
_PAIR_ROUNDS = 24
_STEPS = 400


def arrange(weights: FloatArray, num_gpus: int, slots_per_gpu: int) -> IntArray:
    """weights [B, E] >= 0, E <= G * k, k <= E -> table [B, G, k]: no expert twice on a GPU."""
    num_slots = num_gpus * slots_per_gpu
    counts, _ = add_replicas(weights, num_slots, num_gpus)
    best = spread(weights, counts, num_gpus, slots_per_gpu)
    if slots_per_gpu == 1 or num_gpus == 1:
        return best
    bound = balance_bound(weights, num_slots, num_gpus, counts)
    best, balance = _improve(weights, best, bound)
    for ceiling in _CEILINGS:
        far = np.flatnonzero(balance > bound + _WORTH_A_START)
        if not len(far):
            break
        other, possible = counts_under(weights[far], num_gpus, num_slots, ceiling)
        far = far[possible]
        if not len(far):
            continue
        table = spread(weights[far], other[possible], num_gpus, slots_per_gpu)
        _keep_better(best, balance, far, *_improve(weights[far], table, bound[far]))
    _not_below_eplb(weights, num_gpus, best, balance, bound)
    return best


def _not_below_eplb(
    weights: FloatArray, num_gpus: int, best: IntArray, balance: FloatArray, bound: FloatArray
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
        _keep_better(best, balance, worse, *_improve(weights[worse], table[clean], bound[worse]))


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


def counts_under(
    weights: FloatArray, num_gpus: int, num_slots: int, ceiling: float
) -> tuple[IntArray, NDArray[np.bool_]]:
    """(counts [B, E], possible [B]): no more copies of an expert than keep each under ceiling mean
    GPU loads; what is left over goes to the experts that are on less than a third of the GPUs.

    Copies that even out the largest share (`add_replicas`) leave none for the others where one
    expert has most of the load.
    """
    mean = in_order_sum(weights)[:, None] / num_gpus
    needed = np.ones(weights.shape)
    np.divide(weights, ceiling * mean, out=needed, where=mean > 0)
    counts = np.clip(np.ceil(needed), 1, num_gpus).astype(np.int64)
    left = num_slots - counts.sum(axis=1)
    possible = left >= 0
    share = np.where(counts * 3 >= num_gpus, -1.0, weights / counts)
    share[counts >= num_gpus] = -2.0  # no GPU is left for it
    while True:
        rows = np.flatnonzero(left > 0)
        if not len(rows):
            return counts, possible
        chosen = share[rows].argmax(axis=1)
        counts[rows, chosen] += 1
        count = counts[rows, chosen]
        worth = np.where(share[rows, chosen] < 0, -1.0, weights[rows, chosen] / count)
        share[rows, chosen] = np.where(count >= num_gpus, -2.0, worth)
        left[rows] -= 1


def _improve(
    weights: FloatArray, table: IntArray, bound: FloatArray
) -> tuple[IntArray, FloatArray]:
    slots = SlotTable(weights, table)
    target = slots.mean * bound * (1 + _CLOSE)
    even_pairs(slots, _PAIR_ROUNDS, target)
    relieve_busiest(slots, _STEPS, target)
    return slots.table, slots.balance()


def _keep_better(
    best: IntArray, balance: FloatArray, rows: IntArray, table: IntArray, other: FloatArray
) -> None:
    better = other < balance[rows]
    best[rows[better]] = table[better]
    balance[rows[better]] = other[better]
