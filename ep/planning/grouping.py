"""Which experts may live where: all on all GPUs, or each group of experts on one node.

Knows: groups, nodes, live GPUs; blocks, which are rows that can be arranged apart (a layer, or one
node of a layer). Knows nothing of: copies, how a block is arranged.

Shape letters: L layers, E experts, N nodes, g groups; of a block: B rows, F experts, H GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from math import comb

import numpy as np

from ep.planning.plan_loads import PlanError
from ep.planning.relabel import hosts
from ep.planning.replicate import FloatArray, IntArray, balance_bound, in_order_sum
from ep.planning.shapes import BoolArray, Shape

# More maps of groups to nodes than this are searched, not enumerated.
_MOST_MAPS = 5000
_SWEEPS = 64


@dataclass(frozen=True, eq=False)
class Block:
    """Rows of one size. layer [B]; gpus [B, H] and experts [B, F]: which GPUs and experts of the
    layer the row is about; split [F]: over how many rows an expert's load is spread."""

    layer: IntArray
    gpus: IntArray
    experts: IntArray
    split: IntArray

    def weights(self, loads: FloatArray) -> FloatArray:
        """loads [L, E] -> [B, F]."""
        taken: FloatArray = loads[self.layer[:, None], self.experts] / self.split
        return taken

    def take(self, rows: list[int]) -> Block:
        return Block(self.layer[rows], self.gpus[rows], self.experts[rows], self.split)

    def write(self, table: IntArray, out: IntArray) -> None:
        """table [B, H, k] of the row's experts (-1 empty) -> out [L, G, >= k]."""
        rows = np.arange(len(table))[:, None, None]
        named = np.where(table < 0, -1, self.experts[rows, table])
        out[self.layer[:, None], self.gpus, : table.shape[2]] = named


def free_blocks(shape: Shape, num_layers: int) -> list[Block]:
    gpus = np.flatnonzero(shape.live)
    experts = np.arange(shape.num_experts)
    return [
        Block(
            np.arange(num_layers),
            np.tile(gpus, (num_layers, 1)),
            np.tile(experts, (num_layers, 1)),
            np.ones(shape.num_experts, dtype=np.int64),
        )
    ]


def node_blocks(shape: Shape, node_of_group: IntArray) -> list[Block]:
    """node_of_group [L, g]: blocks of rows (layer, node). Ungrouped experts live on every node."""
    layers, groups = node_of_group.shape
    size = shape.grouped_experts // groups
    extra = np.arange(shape.grouped_experts, shape.num_experts)
    live = shape.live.reshape(shape.num_nodes, -1)
    hosting = live.any(axis=1)
    found: dict[tuple[int, int], list[tuple[int, IntArray, IntArray]]] = {}
    held = (node_of_group[:, :, None] == np.arange(shape.num_nodes)).sum(axis=1)
    for node in np.flatnonzero(hosting):
        gpus = node * shape.gpus_per_node + np.flatnonzero(live[node])
        for layer in range(layers):
            own = np.flatnonzero(node_of_group[layer] == node)
            experts = (own[:, None] * size + np.arange(size)).ravel()
            key = (len(gpus), int(held[layer, node]))
            found.setdefault(key, []).append((layer, gpus, np.concatenate([experts, extra])))
    blocks = []
    for key in sorted(found):
        rows = found[key]
        split = np.ones(len(rows[0][2]), dtype=np.int64)
        split[key[1] * size :] = hosting.sum()
        if len(split):  # a node without groups and without ungrouped experts hosts nothing
            columns = [np.array(column) for column in zip(*rows, strict=True)]
            blocks.append(Block(columns[0], columns[1], columns[2], split))
    return blocks


def groups_to_nodes(loads: FloatArray, shape: Shape, slots_per_gpu: int) -> IntArray:
    """loads [L, E] -> node of each group [L, g], so that the largest bound of a node is least.

    With all GPUs alive each node takes the same number of groups, and all maps are tried where
    they are few (8 groups on 4 nodes: 105); else the heaviest groups first, then swaps.
    """
    if not shape.groups_fit_nodes:
        raise PlanError(
            f"group_policy='node': {shape.num_groups} groups do not divide over "
            f"{shape.num_nodes} nodes; valid are 'free', or a number of groups that does"
        )
    room = groups_that_fit(shape, slots_per_gpu)
    if room.sum() < shape.num_groups:
        raise PlanError(
            f"group_policy='node': the live GPUs of {shape.num_nodes} nodes hold {room.tolist()} "
            f"whole groups, {shape.num_groups} are needed; valid is 'free', or more slots a GPU"
        )
    each = shape.num_groups // shape.num_nodes
    if shape.live.all() and (room >= each).all():
        if _num_maps(shape.num_groups, shape.num_nodes) <= _MOST_MAPS:
            return _best_map(loads, shape, slots_per_gpu)
        room = np.minimum(room, each)
    return _searched_map(loads, shape, room)


def groups_that_fit(shape: Shape, slots_per_gpu: int) -> IntArray:
    """[N]: whole groups that the live slots of a node hold beside the ungrouped experts."""
    size = shape.grouped_experts // shape.num_groups
    extra = shape.num_experts - shape.grouped_experts
    slots = shape.live.reshape(shape.num_nodes, -1).sum(axis=1) * slots_per_gpu
    fit: IntArray = np.maximum(slots - extra, 0) // size
    return fit


def _num_maps(groups: int, nodes: int) -> int:
    """Ways to part groups into nodes equal sets that have no order."""
    each = groups // nodes
    ways = 1
    for left in range(groups, 0, -each):
        ways *= comb(left - 1, each - 1)
        if ways > _MOST_MAPS:
            break
    return ways


def best_map_bound(loads: FloatArray, shape: Shape, slots_per_gpu: int) -> FloatArray:
    """[L]: least busiest GPU / mean of any map of groups to whole nodes, the same number on each;
    1 where there are too many maps to try."""
    if _num_maps(shape.num_groups, shape.num_nodes) > _MOST_MAPS:
        return np.ones(len(loads))
    # Ungrouped experts may load nodes unevenly: only what is certain to be there counts.
    grouped = loads.copy()
    grouped[:, shape.grouped_experts :] = 0
    _, _, worst = _all_maps(grouped, shape, slots_per_gpu)
    mean = in_order_sum(loads) / shape.num_gpus
    return np.maximum(worst.max(axis=2).min(axis=1) / mean, 1.0)


def _all_maps(
    loads: FloatArray, shape: Shape, slots_per_gpu: int
) -> tuple[IntArray, IntArray, FloatArray]:
    """(sets of groups [n, each], maps [m, N] of sets, bound of each node [L, m, N])."""
    groups = shape.num_groups
    each = groups // shape.num_nodes
    sets = list(combinations(range(groups), each))
    number = {one: index for index, one in enumerate(sets)}
    cost = set_bounds(loads, shape, slots_per_gpu, np.array(sets))  # [L, n]
    parts = _partitions(tuple(range(groups)), each)
    maps = np.array([[number[one] for one in part] for part in parts])
    return np.array(sets), maps, cost[:, maps]


def _best_map(loads: FloatArray, shape: Shape, slots_per_gpu: int) -> IntArray:
    layers, groups, nodes = len(loads), shape.num_groups, shape.num_nodes
    sets, maps, worst = _all_maps(loads, shape, slots_per_gpu)
    # The least busiest node; among equals the least next, and so on.
    ordered = -np.sort(-worst, axis=2)
    best = np.zeros(layers, dtype=np.int64)
    for layer in range(layers):
        best[layer] = np.lexsort(ordered[layer].T[::-1])[0]
    out = np.empty((layers, groups), dtype=np.int64)
    members = sets[maps]  # [maps, N, each]
    for node in range(nodes):
        np.put_along_axis(out, members[best, node], node, axis=1)
    return out


def set_bounds(loads: FloatArray, shape: Shape, slots_per_gpu: int, sets: IntArray) -> FloatArray:
    """sets [n, each] of groups -> [L, n]: least load of the busiest GPU of a whole node that holds
    the set (and its part of the ungrouped experts)."""
    layers, gpus = len(loads), shape.gpus_per_node
    size = shape.grouped_experts // shape.num_groups
    experts = (sets[:, :, None] * size + np.arange(size)).reshape(len(sets), -1)
    inside = loads[:, experts].reshape(layers * len(sets), -1)
    extra = loads[:, shape.grouped_experts :] / shape.num_nodes
    inside = np.concatenate([inside, np.repeat(extra, len(sets), axis=0)], axis=1)
    mean = in_order_sum(inside) / gpus
    bound: FloatArray = balance_bound(inside, gpus * slots_per_gpu, gpus) * mean
    return bound.reshape(layers, len(sets))


def _partitions(items: tuple[int, ...], each: int) -> list[list[tuple[int, ...]]]:
    if not items:
        return [[]]
    first, rest = items[0], items[1:]
    out = []
    for others in combinations(rest, each - 1):
        left = tuple(item for item in rest if item not in others)
        out += [[(first, *others), *more] for more in _partitions(left, each)]
    return out


def _searched_map(loads: FloatArray, shape: Shape, room: IntArray) -> IntArray:
    """Load per live GPU of the busiest node: groups heaviest first, then swaps and moves."""
    layers, groups, nodes = len(loads), shape.num_groups, shape.num_nodes
    weight = in_order_sum(loads[:, : shape.grouped_experts].reshape(layers, groups, -1))
    gpus = np.maximum(shape.live.reshape(nodes, -1).sum(axis=1), 1)
    out = np.empty((layers, groups), dtype=np.int64)
    for layer in range(layers):
        out[layer] = _map_of_layer(weight[layer], gpus, room)
    return out


def _map_of_layer(weight: FloatArray, gpus: IntArray, room: IntArray) -> IntArray:
    node_of = np.empty(len(weight), dtype=np.int64)
    load, held = np.zeros(len(gpus)), np.zeros(len(gpus), dtype=np.int64)
    for group in np.argsort(-weight, kind="stable"):
        after = np.where(held < room, (load + weight[group]) / gpus, np.inf)
        node = int(after.argmin())
        node_of[group] = node
        load[node] += weight[group]
        held[node] += 1
    for _ in range(_SWEEPS):
        busy = int((load / gpus).argmax())
        peak = load[busy] / gpus[busy]
        best, move = peak * (1 - 1e-9), None
        for mine in np.flatnonzero(node_of == busy):
            for other in [*np.flatnonzero(node_of != busy), *(~np.flatnonzero(held < room))]:
                # A negative number is a node with room: the group moves there alone.
                node = ~other if other < 0 else node_of[other]
                less = weight[mine] - (0.0 if other < 0 else weight[other])
                if node == busy:
                    continue
                after = max((load[busy] - less) / gpus[busy], (load[node] + less) / gpus[node])
                if after < best:
                    best, move = after, (mine, other, node, less)
        if move is None:
            break
        mine, other, node, less = move
        node_of[mine] = node
        if other >= 0:
            node_of[other] = busy
        else:
            held[busy] -= 1
            held[node] += 1
        load[busy] -= less
        load[node] += less
    return node_of


def nodes_of_groups(table: IntArray, shape: Shape, slots: int) -> tuple[IntArray, BoolArray]:
    """(node of each group [L, g], whether the live GPUs hold groups as node policy asks [L])."""
    layers = len(table)
    per_node = shape.gpus_per_node
    there = hosts(table, shape.num_gpus, shape.num_experts) & shape.live[:, None]
    by_node = there.reshape(layers, shape.num_nodes, per_node, -1).sum(axis=2)
    grouped = by_node[:, :, : shape.grouped_experts]
    of_group = grouped.reshape(layers, shape.num_nodes, shape.num_groups, -1).sum(axis=3) > 0
    nodes = of_group.argmax(axis=1)  # [L, g]
    held = (nodes[:, :, None] == np.arange(shape.num_nodes)).sum(axis=1)
    room = groups_that_fit(shape, slots)
    if shape.live.all():
        room = np.minimum(room, shape.num_groups // shape.num_nodes)
    alone = (of_group.sum(axis=1) == 1).sum(axis=1) == shape.num_groups
    fits = (held <= room).sum(axis=1) == shape.num_nodes
    return nodes, np.logical_and(alone, fits)
