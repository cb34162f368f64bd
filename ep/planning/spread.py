"""Which GPU gets which part of a fresh plan: nodes even in each layer, GPUs even over all layers.

What a search gives orders GPUs by load, so that the first node would host the hottest experts of
every layer and its links carry most of the traffic. Parts (what one GPU hosts in one layer) can
change places without any change to the balance of the layer.

Knows: tables, loads, nodes. Knows nothing of previous placements: against one, parts stay put.

Shape letters: L layers, G GPUs, k slots a GPU, N nodes.
"""

from __future__ import annotations

import numpy as np

from ep.planning.balance import gpu_loads
from ep.planning.replicate import FloatArray, IntArray, in_order_sum
from ep.planning.shapes import BoolArray, Shape


def spread(loads: FloatArray, table: IntArray, shape: Shape, grouped: BoolArray) -> IntArray:
    """table [L, G, k] -> the same parts in each layer, on other GPUs; grouped [L]: what is on one
    node stays together. With dead GPUs the table is left as it is."""
    if not shape.live.all() or shape.num_gpus == 1:
        return table
    busy = gpu_loads(loads, table)  # [L, G]
    mean = in_order_sum(busy)[:, None] / shape.num_gpus
    busy = np.divide(busy, mean, out=np.zeros_like(busy), where=mean > 0)
    so_far = np.zeros(shape.num_gpus)  # each GPU's load of the layers before, in multiples of mean
    out = np.empty_like(table)
    for layer, parts in enumerate(busy):
        nodes = _stay_together if grouped[layer] else _deal
        by_node = nodes(parts, shape.num_nodes)  # [N, G / N] parts of each set, hottest first
        gpus = so_far.reshape(shape.num_nodes, -1)
        # The hottest set goes to the node that has had least, and so within the node.
        sets = np.argsort(-in_order_sum(parts[by_node]), kind="stable")
        coolest = np.argsort(in_order_sum(gpus), kind="stable")
        places = np.argsort(gpus, axis=1, kind="stable")
        for chosen, node in zip(sets, coolest, strict=True):
            where = node * shape.gpus_per_node + places[node]
            out[layer, where] = table[layer, by_node[chosen]]
            so_far[where] += parts[by_node[chosen]]
    return out


def _deal(parts: FloatArray, num_nodes: int) -> IntArray:
    """parts [G] loads -> [N, G / N]: dealt hottest first, to and fro over the nodes."""
    order = np.argsort(-parts, kind="stable").reshape(-1, num_nodes)
    order[1::2] = order[1::2, ::-1]
    return np.ascontiguousarray(order.T)


def _stay_together(parts: FloatArray, num_nodes: int) -> IntArray:
    """parts [G] -> [N, G / N]: those of each node, hottest first."""
    by_node = parts.reshape(num_nodes, -1)
    first = np.arange(num_nodes)[:, None] * by_node.shape[1]
    order: IntArray = np.argsort(-by_node, axis=1, kind="stable") + first
    return order
