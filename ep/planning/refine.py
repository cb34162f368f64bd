"""From a previous placement to a better one, slot by slot, only where it pays.

Knows: what a previous placement leaves on the live GPUs, search from there, and the price of each
step in moved slots. Knows nothing of: which layers should change how much (`ep.planning.moves`).

Shape letters: L layers, E experts, G GPUs, k slots a GPU; of a block: B rows, F experts, H GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ep.planning.grouping import Block
from ep.planning.local_search import Moves, SlotTable, Work, relieve_busiest
from ep.planning.replicate import FloatArray, IntArray
from ep.planning.shapes import BoolArray

_STEPS = 400
_WORK_PER_SLOT = 600
_FEW_SLOTS_WORK = 150  # with two slots a GPU: a search that is longer moves more than a fresh table


@dataclass(frozen=True, eq=False)
class Walk:
    """A search from a previous table. Of a block's rows, before any step and after each:
    busiest [steps + 1, B] (a load), moved [steps + 1, B] slots."""

    block: Block
    start: IntArray  # [B, H, k] in the search's own terms, see `SlotTable`
    moves: Moves
    busiest: FloatArray
    moved: IntArray

    def table(self, stop: IntArray) -> IntArray:
        """[B, H, k] (-1 empty) after stop [B] steps of each row."""
        table = self.moves.replay(self.start, stop)
        return np.where(table >= self.block.experts.shape[1], -1, table)


def carry_over(previous: IntArray, gpus: IntArray, slots_per_gpu: int) -> IntArray:
    """previous [L, G', p], gpus [H] -> [L, H, k]: what these GPUs host already, each expert once,
    the first k of them, -1 where there is none."""
    kept = np.full((len(previous), len(gpus), max(slots_per_gpu, previous.shape[2])), -1)
    known = gpus < previous.shape[1]
    mine = previous[:, gpus[known]]
    order = np.argsort(mine, axis=2, kind="stable")
    experts = np.take_along_axis(mine, order, axis=2)
    again = np.zeros(experts.shape, dtype=bool)
    again[:, :, 1:] = experts[:, :, 1:] == experts[:, :, :-1]
    np.put_along_axis(experts, order, np.where(again, -1, experts), axis=2)
    front = np.argsort(experts < 0, axis=2, kind="stable")
    kept[:, known, : experts.shape[2]] = np.take_along_axis(experts, front, axis=2)
    return kept[:, :, :slots_per_gpu]


def host_missing(weights: FloatArray, table: IntArray) -> IntArray:
    """weights [B, F], table [B, H, k] with -1 and experts without a slot -> the same with a slot
    for each: an empty one on the least busy GPU, else that of a copy that is missed least."""
    table = table.copy()
    for row in range(len(table)):
        counts = np.bincount(table[row][table[row] >= 0], minlength=weights.shape[1])
        missing = np.flatnonzero(counts == 0)
        for expert in missing[np.argsort(-weights[row, missing], kind="stable")]:
            _host(weights[row], table[row], counts, int(expert))
    return table


def _host(weights: FloatArray, table: IntArray, counts: IntArray, expert: int) -> None:
    share = np.append(weights / np.maximum(counts, 1), 0.0)
    load = np.cumsum(share[table], axis=1)[:, -1]
    empty = table < 0
    if empty.any():
        gpu = int(np.where(empty.any(axis=1), load, np.inf).argmin())
        place = int(empty[gpu].argmax())
    else:
        # What the other copies of the one that goes take over, or this GPU, whichever is busier.
        spare = np.append(counts, 0)[table] > 1
        alone = np.append(weights / np.maximum(counts - 1, 1), 0.0)[table]
        cost = np.maximum(load[:, None] - share[table] + weights[expert], alone)
        flat = int(np.where(spare, cost, np.inf).argmin())
        gpu, place = divmod(flat, table.shape[1])
        counts[table[gpu, place]] -= 1
    table[gpu, place] = expert
    counts[expert] += 1


def walk(
    block: Block,
    loads: FloatArray,
    start: IntArray,
    before: BoolArray,
    target: FloatArray,
) -> Walk:
    """Search from start [B, H, k] (in the block's experts, all hosted). before [L, G, E]: who
    hosted whom; target [B]: the load of the busiest GPU at which a row needs no more."""
    weights = block.weights(loads)
    slots = SlotTable(weights, start)
    first = slots.table.copy()
    moves = Moves()
    busiest = [slots.load.max(axis=1)]
    per_slot = _WORK_PER_SLOT if start.shape[2] > 2 else _FEW_SLOTS_WORK
    relieve_busiest(slots, _STEPS, target, Work(slots.table.size * per_slot), moves)
    experts = block.experts.shape[1]

    def known(row: IntArray, gpu: IntArray, expert: IntArray) -> BoolArray:
        """Whether the GPU had it before; an empty slot never counts as moved."""
        named = block.experts[row, np.minimum(expert, experts - 1)]
        there: BoolArray = before[block.layer[row], block.gpus[row, gpu], named]
        return there | (expert >= experts)

    every = np.arange(len(first))[:, None, None], np.arange(first.shape[1])[:, None]
    moved = [(~known(*every, first)).sum(axis=(1, 2))]
    table = first.copy()
    for step, load in zip(moves.steps, moves.busiest, strict=True):
        at, on, place, expert = step
        change = np.zeros(len(first), dtype=np.int64)
        np.add.at(change, at, ~known(at, on, expert))
        np.add.at(change, at, -(~known(at, on, table[at, on, place])).astype(np.int64))
        table[at, on, place] = expert
        moved.append(moved[-1] + change)
        busiest.append(load)
    return Walk(block, first, moves, np.array(busiest), np.array(moved))
