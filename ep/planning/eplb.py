"""The policy that the field knows as EPLB, from its published description (deepseek-ai/EPLB).

Knows: groups packed to nodes, copies inside a node, copies packed to the node's GPUs; all layers at
once. Kept for comparison and as a floor for ours; replicas of one expert may meet on one GPU.
Knows nothing of: previous placements, dead GPUs. Arguments are checked by the caller.

Shape letters: L layers, E experts, P slots, G GPUs, N nodes, k slots a GPU.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ep.planning.pack import pack_heaviest_first
from ep.planning.replicate import IntArray, add_replicas

Float32Array = NDArray[np.float32]


def eplb_tables(
    loads: NDArray[np.floating], num_slots: int, num_groups: int, num_nodes: int, num_gpus: int
) -> tuple[IntArray, IntArray]:
    """loads [L, E] -> (expert of each slot [L, P], number of that copy among its expert's [L, P]).

    Groups stay on one node each if num_groups % num_nodes == 0, else they and the nodes are
    ignored. Loads are taken as float32, as EPLB does; ties go to the lowest id.
    """
    weights = np.ascontiguousarray(loads, dtype=np.float32)
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    layers, experts = weights.shape
    if num_groups == 1:
        table, copy = one_node(weights, num_slots, num_gpus)
        return table.reshape(layers, -1), copy.reshape(layers, -1)
    by_node = group_order(weights, num_groups, num_nodes)  # experts in order of their node
    inside = np.take_along_axis(weights, by_node, axis=1).reshape(layers * num_nodes, -1)
    table, copy = one_node(inside, num_slots // num_nodes, num_gpus // num_nodes)
    first = np.tile(np.arange(num_nodes) * (experts // num_nodes), layers)
    table = (table + first[:, None, None]).reshape(layers, -1)
    return np.take_along_axis(by_node, table, axis=1), copy.reshape(layers, -1)


def group_order(weights: Float32Array, num_groups: int, num_nodes: int) -> IntArray:
    """[L, E]: the experts of node 0, then those of node 1 ...; whole groups, heaviest first to the
    lightest node with room, the same number of groups on each."""
    layers, experts = weights.shape
    size = experts // num_groups
    # Exact sums (float64), then EPLB's precision: the order of the sum does not show.
    groups = weights.reshape(layers, num_groups, size).astype(np.float64)
    totals = np.cumsum(groups, axis=2)[:, :, -1].astype(np.float32)
    node, place = pack_heaviest_first(totals, num_nodes)
    position = node * (num_groups // num_nodes) + place
    group_at = np.argsort(position, axis=1, kind="stable")
    experts_at = group_at[:, :, None] * size + np.arange(size)
    return experts_at.reshape(layers, experts)


def one_node(weights: Float32Array, num_slots: int, num_gpus: int) -> tuple[IntArray, IntArray]:
    """weights [B, E] -> (expert, copy) [B, G, k]."""
    rows, experts = weights.shape
    counts, order = add_replicas(weights, num_slots)
    copy = np.zeros((rows, num_slots), dtype=np.int64)
    # A redundant slot's copy number: how often its expert came before.
    seen = np.ones((rows, experts), dtype=np.int64)
    every = np.arange(rows)
    for place in range(experts, num_slots):
        expert = order[:, place]
        copy[:, place] = seen[every, expert]
        seen[every, expert] += 1
    share = np.divide(weights, counts.astype(np.float32), dtype=np.float32)
    pack, place_in_pack = pack_heaviest_first(np.take_along_axis(share, order, axis=1), num_gpus)
    per_gpu = num_slots // num_gpus
    slot = pack * per_gpu + place_in_pack
    table = np.empty_like(order)
    copies = np.empty_like(copy)
    np.put_along_axis(table, slot, order, axis=1)
    np.put_along_axis(copies, slot, copy, axis=1)
    shape = (rows, num_gpus, per_gpu)
    return table.reshape(shape), copies.reshape(shape)
