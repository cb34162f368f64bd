"""From a previous placement to the next: walk from the old table where that is enough, else the
fresh one under other GPU numbers; under a cap on moved slots.

Knows: which layers can be walked (alone or node by node), and their goals. Knows nothing of: how
fresh tables are made.

Shape letters: L layers, E experts, G GPUs, k slots a GPU; of a block: B rows, F experts, H GPUs.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ep.planning.balance import gpu_loads
from ep.planning.fresh import Fresh
from ep.planning.grouping import Block, free_blocks, node_blocks, nodes_of_groups
from ep.planning.moves import Point, choose, points_of_layer, stops
from ep.planning.policy import EPLB_MARGIN
from ep.planning.refine import Walk, carry_over, host_missing, walk
from ep.planning.relabel import hosts, moved_slots, relabel_gpus
from ep.planning.replicate import FloatArray, IntArray, in_order_sum
from ep.planning.shapes import BoolArray, Shape

# A walk that moves more than this share of a layer's slots is compared with the fresh table.
_MANY = 0.15


def settle(
    loads: FloatArray,
    shape: Shape,
    fresh: Fresh,
    previous: IntArray,
    cap: int | None,
    slack: float,
    may_stay_free: bool,
) -> tuple[IntArray, BoolArray]:
    """previous [L, G', k'] -> (table [L, G, k], which layers keep groups on nodes [L]): near enough
    to the best (`_goal`), with few moved slots, at most cap in all. may_stay_free: a layer that
    fresh groups, and the old table does not, may be walked as it is."""
    mean = in_order_sum(loads) / shape.num_live
    goal = _goal(fresh, slack) * mean
    before = hosts(previous, shape.num_gpus, shape.num_experts)
    walks = [
        (layers, walk(block, loads, start, before, goal[block.layer]))
        for layers, block, start in _starts(loads, shape, fresh, previous, may_stay_free)
    ]
    rows: list[list[tuple[Walk, int]]] = [[] for _ in loads]
    for _, one in walks:
        for row, layer in enumerate(one.block.layer):
            rows[layer].append((one, row))
    points = [points_of_layer(of_layer) if of_layer else [] for of_layer in rows]
    many = _MANY * shape.num_live * fresh.slots
    unmet = np.array(
        [
            not any(p.busiest <= g * (1 + 1e-12) and p.moved <= m for p in layer)
            for layer, g, m in zip(points, goal, many, strict=True)
        ]
    )
    table = fresh.table.copy()
    table[unmet] = _renumbered(fresh, shape, before, unmet)
    busiest = gpu_loads(loads, table).max(axis=1)
    moved = moved_slots(table, before)
    for layer in np.flatnonzero(unmet):
        points[layer].append(Point(int(moved[layer]), float(busiest[layer]), None))
    chosen = choose(points, goal, cap)
    grouped = fresh.grouped.copy()
    ends: dict[int, IntArray] = {}
    for layer, point in enumerate(chosen):
        if point.steps is not None:
            table[layer] = -1
            grouped[layer] &= len(rows[layer][0][0].block.gpus[0]) < shape.num_live
            stops(point, rows[layer], ends)
    for _, one in walks:
        if id(one) not in ends:
            continue
        made = one.table(ends[id(one)])
        for row, layer in enumerate(one.block.layer):
            if chosen[layer].steps is not None:
                one.block.take([row]).write(made[row : row + 1], table)
    return table, grouped


def _goal(fresh: Fresh, slack: float) -> FloatArray:
    """[L]: the balance at which a layer needs no more moves. Slack above the bound where the fresh
    table is within it, else above the fresh table; but no further above the EPLB-equivalent than
    leaves the mean of the layers within EPLB_MARGIN of its mean."""
    near = np.where(fresh.balance <= fresh.bound + slack, fresh.bound, fresh.balance) + slack
    excess = np.maximum(fresh.balance - fresh.floor, 0.0)
    room = max(EPLB_MARGIN - float(in_order_sum(excess)) / len(excess), 0.0)
    return np.maximum(fresh.balance, np.minimum(near, fresh.floor + room))


def _renumbered(fresh: Fresh, shape: Shape, before: BoolArray, layers: BoolArray) -> IntArray:
    """The fresh tables of some layers under the GPU numbers that move fewest slots."""
    out = fresh.table.copy()
    for nodes, which in (
        (1, layers & ~fresh.grouped),
        (shape.num_nodes, layers & fresh.grouped),
    ):
        at = np.flatnonzero(which)
        if len(at):
            out[at] = relabel_gpus(fresh.table[at], before[at], shape.live, nodes)
    return out[layers]


def _starts(
    loads: FloatArray, shape: Shape, fresh: Fresh, previous: IntArray, may_stay_free: bool
) -> list[tuple[IntArray, Block, IntArray]]:
    """(layers, block, start [B, H, k] in the block's experts): where walks may begin. Layers of
    equal slots and group policy together; grouped ones only where the old table keeps groups."""
    out = []
    for slots in np.unique(fresh.slots):
        free = np.flatnonzero((fresh.slots == slots) & ~fresh.grouped)
        grouped = np.flatnonzero((fresh.slots == slots) & fresh.grouped)
        parts: list[tuple[IntArray, list[Block]]] = []
        if len(grouped):
            nodes, whole = nodes_of_groups(previous[grouped], shape, int(slots))
            if whole.any():
                parts.append((grouped[whole], node_blocks(shape, nodes[whole])))
            if may_stay_free:
                free = np.sort(np.concatenate([free, grouped[~whole]]))
        if len(free):
            parts.append((free, free_blocks(shape, len(free))))
        for layers, blocks in parts:
            for block in blocks:
                block = replace(block, layer=layers[block.layer])
                start = _start(loads, block, previous, int(slots))
                out.append((layers, block, start))
    return out


def _start(loads: FloatArray, block: Block, previous: IntArray, slots: int) -> IntArray:
    room = min(slots, block.experts.shape[1])
    experts = previous.max() + 1
    local = np.full((len(block.layer), experts + 1), -1, dtype=np.int64)
    rows = np.arange(len(block.layer))
    local[rows[:, None], block.experts] = np.arange(block.experts.shape[1])
    start = np.empty((*block.gpus.shape, room), dtype=np.int64)
    for row, layer in enumerate(block.layer):
        own = previous[layer : layer + 1]
        named = np.where(own < 0, -1, local[row, own])
        start[row] = carry_over(named, block.gpus[row], room)[0]
    return host_missing(block.weights(loads), start)
