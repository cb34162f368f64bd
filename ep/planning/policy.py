"""Named policies: contiguous, EPLB-equivalent, and ours. From loads to a table, nothing kept.

Knows: which blocks a policy arranges and how its result is held to the EPLB-equivalent. Knows
nothing of: previous placements, budgets, prices, explanations.

Shape letters: L layers, E experts, G GPUs, k slots a GPU, N nodes.
"""

from __future__ import annotations

import numpy as np

from ep.planning.arrange import arrange
from ep.planning.balance import table_balance
from ep.planning.duplicates import is_duplicate
from ep.planning.eplb import eplb_tables
from ep.planning.grouping import (
    Block,
    best_map_bound,
    free_blocks,
    groups_to_nodes,
    node_blocks,
    nodes_of_groups,
)
from ep.planning.replicate import FloatArray, IntArray, balance_bound
from ep.planning.shapes import Shape

POLICIES = ("ours", "eplb", "contiguous")
# The mean over layers may lie above the EPLB-equivalent's by no more than this.
EPLB_MARGIN = 1e-3


def contiguous_table(shape: Shape, num_layers: int, slots_per_gpu: int) -> IntArray:
    """[L, G, k]: experts in order over the live GPUs, then from the first again."""
    gpus = np.flatnonzero(shape.live)
    table = np.full((num_layers, shape.num_gpus, slots_per_gpu), -1, dtype=np.int64)
    row = np.arange(len(gpus) * slots_per_gpu) % shape.num_experts
    table[:, gpus] = row.reshape(len(gpus), slots_per_gpu)
    return table


def eplb_table(loads: FloatArray, shape: Shape, slots_per_gpu: int, grouped: bool) -> IntArray:
    """[L, G, k]: what EPLB gives; over the live GPUs as one node if some are dead."""
    gpus = np.flatnonzero(shape.live)
    groups, nodes = 1, 1
    if grouped and eplb_can_group(shape):
        groups, nodes = shape.num_groups, shape.num_nodes
    inside, _ = eplb_tables(loads, len(gpus) * slots_per_gpu, groups, nodes, len(gpus))
    table = np.full((len(loads), shape.num_gpus, slots_per_gpu), -1, dtype=np.int64)
    table[:, gpus] = inside.reshape(len(loads), len(gpus), slots_per_gpu)
    return table


def eplb_can_group(shape: Shape) -> bool:
    """EPLB knows neither dead GPUs nor experts outside of the groups."""
    whole = shape.num_experts == shape.grouped_experts
    return shape.groups_fit_nodes and shape.num_live == shape.num_gpus and whole


def our_table(
    loads: FloatArray, shape: Shape, slots_per_gpu: int, grouped: bool
) -> tuple[IntArray, IntArray, FloatArray]:
    """-> (table [L, G, k], layers [n] that keep duplicates because parting them costs balance, how
    even the EPLB-equivalent is [L], infinite where it has none).

    No expert is twice on a GPU, slots that could only hold such a copy are empty, unless the mean
    of the layers would come out more than EPLB_MARGIN above the EPLB-equivalent's.
    """
    grouped = grouped and shape.num_nodes > 1
    if grouped:
        nodes = groups_to_nodes(loads, shape, slots_per_gpu)
        table = _arranged(loads, shape, slots_per_gpu, node_blocks(shape, nodes))
        if not eplb_can_group(shape):
            return table, np.zeros(0, dtype=np.int64), np.full(len(loads), np.inf)
    else:
        table = _arranged(loads, shape, slots_per_gpu, free_blocks(shape, len(loads)))
    floor = eplb_table(loads, shape, slots_per_gpu, grouped)
    theirs = table_balance(loads, floor, shape.live)
    if grouped:
        _try_their_nodes(loads, shape, table, floor, theirs)
    return *_held_to_eplb(loads, shape, table, floor, theirs), theirs


def _arranged(loads: FloatArray, shape: Shape, slots_per_gpu: int, blocks: list[Block]) -> IntArray:
    table = np.full((len(loads), shape.num_gpus, slots_per_gpu), -1, dtype=np.int64)
    for block in blocks:
        weights = block.weights(loads)
        room = min(slots_per_gpu, weights.shape[1])
        block.write(arrange(weights, block.gpus.shape[1], room), table)
    return table


def _try_their_nodes(
    loads: FloatArray, shape: Shape, table: IntArray, floor: IntArray, theirs: FloatArray
) -> None:
    """Where EPLB's table is more even, its map of groups to nodes, arranged our way, into table."""
    worse = np.flatnonzero(table_balance(loads, table, shape.live) > theirs)
    if not len(worse):
        return
    nodes, whole = nodes_of_groups(floor[worse], shape, table.shape[2])
    worse, nodes = worse[whole], nodes[whole]
    if not len(worse):
        return
    made = _arranged(loads[worse], shape, table.shape[2], node_blocks(shape, nodes))
    better = table_balance(loads[worse], made, shape.live) < table_balance(
        loads[worse], table[worse], shape.live
    )
    table[worse[better]] = made[better]


def _held_to_eplb(
    loads: FloatArray, shape: Shape, table: IntArray, floor: IntArray, theirs: FloatArray
) -> tuple[IntArray, IntArray]:
    ours = table_balance(loads, table, shape.live)
    excess = ours - theirs
    free_of_duplicates = ~is_duplicate(floor).any(axis=(1, 2))
    taken = (excess > 0) & free_of_duplicates
    allowed = EPLB_MARGIN * len(loads)
    kept = []
    rest = np.where(taken, 0.0, excess)
    total = float(np.cumsum(rest)[-1])
    for layer in np.argsort(-rest, kind="stable"):
        if total <= allowed or rest[layer] <= 0:
            break
        total -= float(rest[layer])
        taken[layer] = True
        kept.append(int(layer))
    table[taken] = floor[taken]
    return table, np.array(sorted(kept), dtype=np.int64)


def policy_bound(loads: FloatArray, shape: Shape, slots_per_gpu: int, grouped: bool) -> FloatArray:
    """[L]: least busiest GPU / mean of any placement; grouped: of any that `our_table` may give.

    Grouped and all alive, each node takes the same number of groups; exact over the maps where they
    are few. With dead GPUs the ungrouped bound stands in (still a bound).
    """
    free = balance_bound(loads, shape.num_live * slots_per_gpu, shape.num_live)
    if not grouped or shape.num_live < shape.num_gpus or shape.num_nodes == 1:
        return free
    return np.maximum(free, best_map_bound(loads, shape, slots_per_gpu))
