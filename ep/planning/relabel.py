"""What moves between two placements, and numbering GPUs so that little does.

Knows: tables of experts on GPUs, layer by layer, nodes. A slot has moved if its expert was not on
that GPU before. Knows nothing of: loads: a new numbering changes no balance.

Shape letters: L layers, G GPUs, k slots a GPU (p of them before), E experts, N nodes.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import linear_sum_assignment

from ep.planning.duplicates import is_duplicate
from ep.planning.replicate import IntArray
from ep.planning.shapes import BoolArray


def hosts(table: IntArray, num_gpus: int, num_experts: int) -> BoolArray:
    """table [L, G', k] (-1 empty) -> [L, num_gpus, E]; GPUs beyond G' host nothing."""
    layers, gpus = table.shape[0], min(table.shape[1], num_gpus)
    out = np.zeros((layers, num_gpus, num_experts + 1), dtype=bool)
    at = (np.arange(layers)[:, None, None], np.arange(gpus)[:, None], table[:, :gpus])
    out[at] = True  # -1 lands in the column that is cut off
    return out[:, :, :num_experts]


def moved_slots(table: IntArray, before: BoolArray) -> IntArray:
    """table [L, G, k], before [L, G, E] -> [L]: slots whose expert was not on that GPU."""
    layers, gpus, _ = table.shape
    there = before[np.arange(layers)[:, None, None], np.arange(gpus)[:, None], table]
    moved: IntArray = (~there & (table >= 0)).sum(axis=(1, 2))
    return moved


def relabel_gpus(table: IntArray, before: BoolArray, live: BoolArray, num_nodes: int) -> IntArray:
    """table with its live GPUs renumbered, layer by layer, so that as few slots as can be moved.

    num_nodes > 1: whole nodes change numbers (those with as many live GPUs), and GPUs inside them;
    1: any two GPUs may. An assignment problem a layer (and a pair of nodes), solved exactly.
    """
    same = _ExpertsInCommon(table, before)
    out = table.copy()
    per_node = len(live) // num_nodes
    gpus_of = [
        node * per_node + np.flatnonzero(live[node * per_node : (node + 1) * per_node])
        for node in range(num_nodes)
    ]
    for layer in range(len(table)):
        for old, new in _best_numbers(same.of_layer(layer), gpus_of):
            out[layer, new] = table[layer, old]
    return out


class _ExpertsInCommon:
    """table [L, G, k], before [L, G, E] -> layer by layer [G, G]: experts that a GPU's part of the
    table shares with what a GPU hosted before."""

    def __init__(self, table: IntArray, before: BoolArray) -> None:
        layers, self.gpus, _ = table.shape
        experts = before.shape[2]
        layer, old, expert = np.nonzero(before)
        key = layer * experts + expert
        old = old[np.argsort(key, kind="stable")]
        times = np.bincount(key, minlength=layers * experts)
        first = np.cumsum(times) - times
        # Every slot of the table meets each GPU that hosted its expert before.
        used = (table >= 0) & ~is_duplicate(table)
        named = (table + np.arange(layers)[:, None, None] * experts)[used]
        gpu = np.broadcast_to(np.arange(self.gpus)[:, None], table.shape)[used]
        met = times[named]
        nth = np.arange(met.sum()) - np.repeat(np.cumsum(met) - met, met)
        self.pairs = np.repeat(gpu, met) * self.gpus + old[np.repeat(first[named], met) + nth]
        ends = np.append(0, np.cumsum(met))
        self.part = ends[np.append(0, np.cumsum(used.sum(axis=(1, 2))))]

    def of_layer(self, layer: int) -> IntArray:
        pairs = self.pairs[self.part[layer] : self.part[layer + 1]]
        return np.bincount(pairs, minlength=self.gpus**2).reshape(self.gpus, self.gpus)


def _best_numbers(same: IntArray, gpus_of: list[IntArray]) -> list[tuple[IntArray, IntArray]]:
    """(GPUs as numbered now, their new numbers), node by node."""
    nodes = len(gpus_of)
    worth = np.full((nodes, nodes), -1.0)
    inside = {}
    for a, mine in enumerate(gpus_of):
        for b, theirs in enumerate(gpus_of):
            if len(mine) == len(theirs):
                part = same[np.ix_(mine, theirs)]
                rows, columns = linear_sum_assignment(part, maximize=True)
                worth[a, b] = part[rows, columns].sum()
                inside[a, b] = (mine[rows], theirs[columns])
    # A pair of nodes of unequal size is worth less than all others together.
    worth[worth < 0] = -1.0 - float(worth.clip(0).sum())
    pairs = zip(*linear_sum_assignment(worth, maximize=True), strict=True)
    return [inside[int(a), int(b)] for a, b in pairs]


def keep_places(table: IntArray, previous: IntArray) -> IntArray:
    """table [L, G, k] -> the same experts on each GPU; those that were in a slot of the same number
    before (previous [L, G', p]) are in it again, the others fill up in order, empty slots last."""
    layers, gpus, room = table.shape
    shared = min(gpus, previous.shape[1])
    places = min(room, previous.shape[2])
    old = np.full(table.shape, -1, dtype=np.int64)
    old[:, :shared, :places] = previous[:, :shared, :places]
    # A place beyond what the layer uses stays empty.
    used = (table >= 0).sum(axis=1) > 0  # [L, k]
    within = np.cumsum(used[:, ::-1], axis=1)[:, ::-1] > 0
    old = np.where(within[:, None, :], old, -1)
    match = (old[:, :, :, None] == table[:, :, None, :]) & (old >= 0)[:, :, :, None]
    match &= np.cumsum(match, axis=2) == 1  # a duplicate keeps one place
    match &= np.cumsum(match, axis=3) == 1
    kept = match.any(axis=3)  # [L, G, place]
    stays = match.any(axis=2)  # [L, G, slot of table]
    out = np.where(kept, old, -1)
    # Those that do not stay, in order (empty ones last), into the places that are left, in order.
    key = np.where(stays, 2, np.where(table < 0, 1, 0))
    source = np.argsort(key, axis=2, kind="stable")
    target = np.argsort(kept, axis=2, kind="stable")
    rest = np.take_along_axis(np.where(stays, -1, table), source, axis=2)
    filled = np.take_along_axis(out, target, axis=2)
    left = ~np.take_along_axis(kept, target, axis=2)
    np.put_along_axis(out, target, np.where(left, rest, filled), axis=2)
    return out
