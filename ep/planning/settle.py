"""What each layer of the next placement becomes: its old table with a few slots changed where that
is good enough, else the fresh table; under a cap on moved slots.

Two ways lead from the previous table to a better one:

- a *walk* (`ep.planning.refine`): a search that starts at the previous table and changes a slot or
  swaps two at each step. A layer may stop after any step, so that a walk offers many tables, each
  with its busiest GPU and the slots that had to move for it;
- the *fresh* table (`ep.planning.fresh`), made from the loads alone, under the GPU numbers that
  leave most experts where they are. It is better, and moves most slots.

Each is a `Point` (`ep.planning.moves`): moved slots against the load of the busiest GPU. Among the
points of a layer the cheapest that is good enough (`_good_enough`) is taken, as far as the cap
allows.

Knows: which layers can be walked (whole, or node by node where groups keep to nodes), and what is
good enough. Knows nothing of: how fresh tables are made, how a walk finds its steps.

Shape letters: L layers, E experts, G GPUs, k slots a GPU; of a block (layers that are walked in one
search): B rows, F experts, H GPUs.
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

# A walk that is good enough but moves more than this share of a layer's slots is compared with the
# fresh table all the same: that one may move fewer.
_MANY = 0.15
# A layer more than so many times the slack above its best is far off, and has this part of it.
_FAR = 8
_SLACK_WHEN_FAR = 0.3
# So far above the fresh table a walk would move about as much, and takes long.
_TOO_FAR = 0.5
_ROUNDING = 1 + 1e-12  # of loads that are compared


def settle(
    loads: FloatArray,
    shape: Shape,
    fresh: Fresh,
    previous: IntArray,
    cap: int | None,
    slack: float,
    may_stay_free: bool,
) -> tuple[IntArray, BoolArray]:
    """loads [L, E], previous [L, G', k'] -> (table [L, G, k], which layers keep groups on nodes
    [L]).

    cap: most moved slots of all layers; None: any number. slack: how far above the best a layer's
    balance may stay, for fewer moves (0.01: 1 %). may_stay_free: a layer that `fresh` keeps on
    nodes, and the old table does not, may be walked as it is.
    """
    mean = in_order_sum(loads) / shape.num_live
    starts = _starts(loads, shape, fresh, previous, may_stay_free)
    now = _busiest(loads, starts) / mean
    enough = _good_enough(fresh, slack, now) * mean  # [L] load of the busiest GPU
    if cap is None:
        starts = _worth_a_walk(starts, now <= fresh.balance + _TOO_FAR)
    before = hosts(previous, shape.num_gpus, shape.num_experts)
    walks = [walk(block, loads, start, before, enough[block.layer]) for block, start in starts]
    # Of each layer: the walks that make it up (one, or one a node), and its row in each.
    walked: list[list[tuple[Walk, int]]] = [[] for _ in loads]
    for one in walks:
        for row, layer in enumerate(one.block.layer):
            walked[layer].append((one, row))
    points = [points_of_layer(of_layer) if of_layer else [] for of_layer in walked]

    many = _MANY * shape.num_live * fresh.slots
    wants_fresh = np.array(
        [
            not any(p.busiest <= good * _ROUNDING and p.moved <= most for p in of_layer)
            for of_layer, good, most in zip(points, enough, many, strict=True)
        ]
    )
    table = fresh.table.copy()
    table[wants_fresh] = _renumbered(fresh, shape, before, wants_fresh)
    busiest = gpu_loads(loads, table).max(axis=1)
    moved = moved_slots(table, before)
    for layer in np.flatnonzero(wants_fresh):
        points[layer].append(Point(int(moved[layer]), float(busiest[layer]), None))

    chosen = choose(points, enough, cap)
    grouped = fresh.grouped.copy()
    steps_taken: dict[int, IntArray] = {}  # by id of the walk: [B] steps of each row
    for layer, point in enumerate(chosen):
        if point.steps is not None:
            table[layer] = -1
            one, _ = walked[layer][0]
            grouped[layer] &= len(one.block.gpus[0]) < shape.num_live  # walked node by node
            stops(point, walked[layer], steps_taken)
    for one in walks:
        if id(one) not in steps_taken:
            continue
        made = one.table(steps_taken[id(one)])
        for row, layer in enumerate(one.block.layer):
            if chosen[layer].steps is not None:
                one.block.take([row]).write(made[row : row + 1], table)
    return table, grouped


def _busiest(loads: FloatArray, starts: list[tuple[Block, IntArray]]) -> FloatArray:
    """[L]: load of the busiest GPU where walks begin; infinite for a layer that has no walk."""
    out = np.zeros(len(loads))
    for block, start in starts:
        busy = gpu_loads(block.weights(loads), start).max(axis=1)
        np.maximum.at(out, block.layer, busy)
    return np.where(out > 0, out, np.inf)


def _worth_a_walk(
    starts: list[tuple[Block, IntArray]], layers: BoolArray
) -> list[tuple[Block, IntArray]]:
    """The rows of these layers [L] alone."""
    out = []
    for block, start in starts:
        rows = np.flatnonzero(layers[block.layer])
        if len(rows):
            out.append((block.take(rows.tolist()), start[rows]))
    return out


def _good_enough(fresh: Fresh, slack: float, now: FloatArray) -> FloatArray:
    """[L]: the balance (busiest GPU over mean) at which a layer needs no more moves. now [L]: the
    balance that the previous table has, or begins with.

    A layer that is far off changes much in any case, and then so that it is near its best: it has
    but a part of the slack, so that what is kept small is what a small drift moves.

    Slack above the bound (what no table can be below) where the fresh table is itself that near;
    else slack above the fresh table. But never so far above the EPLB-equivalent (`fresh.floor`)
    that the mean over layers would exceed its mean by more than EPLB_MARGIN: fewer moves are no
    reason to be worse than EPLB. And never below the fresh table, which is what can be had.
    """
    far = now > fresh.balance + slack * _FAR
    slack_of = np.where(far, slack * _SLACK_WHEN_FAR, slack)
    best = np.where(fresh.balance <= fresh.bound + slack_of, fresh.bound, fresh.balance)
    already_above = np.maximum(fresh.balance - fresh.floor, 0.0)
    room = max(EPLB_MARGIN - float(in_order_sum(already_above)) / len(already_above), 0.0)
    return np.maximum(fresh.balance, np.minimum(best + slack_of, fresh.floor + room))


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
) -> list[tuple[Block, IntArray]]:
    """(block, start [B, H, k] in the block's experts): where walks begin. Layers with as many slots
    and the same group policy are one search; those that keep groups on nodes can be walked (a block
    a node) only where the old table keeps them too."""
    out = []
    for slots in np.unique(fresh.slots):
        free = np.flatnonzero((fresh.slots == slots) & ~fresh.grouped)
        grouped = np.flatnonzero((fresh.slots == slots) & fresh.grouped)
        parts: list[tuple[IntArray, list[Block]]] = []  # layers, and blocks whose layers index them
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
                out.append((block, _start(loads, block, previous, int(slots))))
    return out


def _start(loads: FloatArray, block: Block, previous: IntArray, slots: int) -> IntArray:
    """[B, H, k] in the block's experts: what its GPUs hosted before, and a slot for each expert."""
    room = min(slots, block.experts.shape[1])
    experts = previous.max() + 1
    # [B, E + 1] number of an expert within the block; -1: it belongs to another block
    local = np.full((len(block.layer), experts + 1), -1, dtype=np.int64)
    rows = np.arange(len(block.layer))
    local[rows[:, None], block.experts] = np.arange(block.experts.shape[1])
    start = np.empty((*block.gpus.shape, room), dtype=np.int64)
    for row, layer in enumerate(block.layer):
        own = previous[layer : layer + 1]
        named = np.where(own < 0, -1, local[row, own])
        start[row] = carry_over(named, block.gpus[row], room)[0]
    return host_missing(block.weights(loads), start)
