"""Copies of one expert that meet on one GPU: finding them, parting them by swaps.

Knows: tables of experts on GPUs, row by row. Knows nothing of: how many copies there should be.

Shape letters: B rows, G GPUs, k slots a GPU, E experts of a row.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ep.planning.replicate import FloatArray, IntArray, in_order_sum

BoolArray = NDArray[np.bool_]


def is_duplicate(table: IntArray) -> BoolArray:
    """table [B, G, k], -1 for empty -> [B, G, k]: slots whose expert has an earlier slot there."""
    order = np.argsort(table, axis=2, kind="stable")
    experts = np.take_along_axis(table, order, axis=2)
    same = np.zeros(table.shape, dtype=bool)
    same[:, :, 1:] = (experts[:, :, 1:] == experts[:, :, :-1]) & (experts[:, :, 1:] >= 0)
    out = np.zeros(table.shape, dtype=bool)
    np.put_along_axis(out, order, same, axis=2)
    return out


def empty_wasted(table: IntArray) -> IntArray:
    """table [B, G, k]: where all copies of an expert are on one GPU, all but one become empty: that
    GPU's load stays what it is."""
    table = table.copy()
    duplicate = is_duplicate(table)
    for row in np.flatnonzero(duplicate.any(axis=(1, 2))):
        for gpu, place in np.argwhere(duplicate[row]):
            expert = table[row, gpu, place]
            if (table[row] == expert).any(axis=1).sum() == 1:
                table[row, gpu, place] = -1
    return table


def part_duplicates(weights: FloatArray, table: IntArray, most: int) -> tuple[IntArray, BoolArray]:
    """weights [B, E], full table [B, G, k], k <= E -> (table, clean [B]): each duplicate is swapped
    with the slot that leaves the less busy pair of GPUs, or, where no swap parts it, passes to the
    expert not there that leaves the GPU least busy. Rows with more than `most` duplicates are not
    clean, and are as they were."""
    table = table.copy()
    duplicate = is_duplicate(table)
    clean = duplicate.sum(axis=(1, 2)) <= most
    for row in np.flatnonzero(clean & duplicate.any(axis=(1, 2))):
        _part_row(weights[row], table[row], duplicate[row])
    return table, clean


def _part_row(weights: FloatArray, table: IntArray, duplicate: BoolArray) -> None:
    gpus, room = table.shape
    counts = np.bincount(table.ravel(), minlength=len(weights))
    hosts = np.zeros((gpus, len(weights)), dtype=np.int64)
    np.add.at(hosts, (np.arange(gpus)[:, None], table), 1)
    for gpu, place in np.argwhere(duplicate):
        share = weights / counts
        load = in_order_sum(share[table])
        expert = table[gpu, place]
        less = share[expert] - share[table]
        after = np.maximum(load[gpu] - less, load[:, None] + less)
        after[hosts[:, expert] > 0] = np.inf
        after[hosts[gpu, table] > 0] = np.inf
        best = int(after.argmin())
        other, at = divmod(best, room)
        if np.isfinite(after[other, at]):
            moved = table[other, at]
            table[other, at] = expert
            hosts[other, moved] -= 1
            hosts[other, expert] += 1
        else:
            new = np.where(hosts[gpu] > 0, np.inf, weights / (counts + 1))
            moved = int(new.argmin())
            counts[expert] -= 1
            counts[moved] += 1
        table[gpu, place] = moved
        hosts[gpu, expert] -= 1
        hosts[gpu, moved] += 1
