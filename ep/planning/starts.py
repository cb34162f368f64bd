"""Where searches start: numbers of copies of each expert, and a first table for given numbers.

Knows: loads of independent rows, GPUs that are alike. Knows nothing of: how a table is improved.

Shape letters: B rows, E experts of a row, G GPUs, k slots a GPU.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ep.planning.replicate import FloatArray, IntArray, in_order_sum

_TINY = 16  # more loaded experts have too many numbers of copies to look through


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


def every_count(experts: int, least: int, slots: int, limit: int, most: int) -> IntArray | None:
    """[n, E]: all ways to give each expert 1..limit copies, least..slots in all; None if more than
    `most` (or as many beginnings of them)."""
    made = np.zeros((1, 0), dtype=np.int64)
    for left in range(experts - 1, -1, -1):
        number = np.arange(1, limit + 1)
        total = made.sum(axis=1)[:, None] + number
        row, at = np.nonzero((total + left <= slots) & (total + left * limit >= least))
        made = np.concatenate([made[row], number[at][:, None]], axis=1)
        if len(made) > most:
            return None
    return made


def every_count_of(
    weights: FloatArray, num_gpus: int, num_slots: int, most: int
) -> IntArray | None:
    """weights [E] of one row -> [n, E] all numbers of copies that could matter: experts without
    load share evenly what slots the others leave. None if more than `most`."""
    idle = weights <= 0
    num_idle = int(idle.sum())
    least, slots = num_slots - num_idle * num_gpus, num_slots - num_idle
    if len(weights) - num_idle > _TINY:
        return None
    loaded = every_count(len(weights) - num_idle, least, slots, num_gpus, most)
    if loaded is None:
        return None
    out = np.empty((len(loaded), len(weights)), dtype=np.int64)
    out[:, ~idle] = loaded
    rest = num_slots - loaded.sum(axis=1)[:, None]
    if num_idle:
        out[:, idle] = rest // num_idle + (np.arange(num_idle) < rest % num_idle)
    return out


def pattern(first: int, tries: int, experts: int) -> tuple[FloatArray, FloatArray]:
    """(numbers in [0, 1) [tries, E], strength in [0, 1) [tries, 1]) of the tries first + 1 .. on:
    multiples of irrational numbers, modulo 1: spread evenly, without a random generator."""
    number = np.arange(first + 1, first + tries + 1)[:, None]
    out = np.mod(number * 0.6180339887498949 + np.arange(experts) * 0.7548776662466927, 1.0)
    out = np.mod(out * (1 + np.arange(experts) % 7) + number * 0.5698402909980532, 1.0)
    return out, np.mod(number * 0.4142135623730951, 1.0)
