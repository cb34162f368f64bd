"""Where experts live when nothing is known of their loads and the shared expert is in slots.

The prior is uniform routing: each of E routed experts gets K / E of the tokens, each of n pieces of
the shared expert all of them. Copies go where a replica has most to do, the shared expert first
among equals; replicas then go to ranks, the heaviest first, each to the rank with the least so far,
two of one expert to two ranks where that can be. A pure function, the same on every platform.

Shape letters: L layers, E routed experts, n pieces of the shared expert (logical experts E ..
E + n - 1), K picks a token, H slots that host something, P slots.
"""

from __future__ import annotations

import heapq
from fractions import Fraction

import numpy as np

from ep.placement import EMPTY, ExpertPlacement


def place_with_shared(
    num_layers: int,
    num_routed: int,
    num_shared: int,
    top_k: int,
    num_ranks: int,
    num_redundant: int,
) -> ExpertPlacement:
    """The same row in every layer; a rank has ceil(H / ranks) slots, those left over are EMPTY."""
    experts = num_routed + num_shared
    # Loads times E, so that they are whole numbers; those of one replica are exact fractions.
    load = [top_k] * num_routed + [num_routed] * num_shared
    counts = [1] * experts
    heap = [(-Fraction(load[e]), e < num_routed, e) for e in range(experts)]
    heapq.heapify(heap)
    for _ in range(num_redundant):
        _, routed, expert = heap[0]
        counts[expert] += 1
        heapq.heapreplace(heap, (-Fraction(load[expert], counts[expert]), routed, expert))
    replicas = sorted(
        (-Fraction(load[e], counts[e]), e) for e in range(experts) for _ in range(counts[e])
    )
    width = -(-len(replicas) // num_ranks)
    room = np.full(num_ranks, width)
    hosted: list[list[int]] = [[] for _ in range(num_ranks)]
    total = np.zeros(num_ranks)
    has = np.zeros((num_ranks, experts), bool)
    for weight, expert in replicas:
        cost = np.where(room > 0, total, np.inf)
        apart = np.where(has[:, expert], np.inf, cost)
        rank = int(np.argmin(apart if np.isfinite(apart).any() else cost))
        hosted[rank].append(expert)
        room[rank] -= 1
        has[rank, expert] = True
        total[rank] -= float(weight)
    row = [slot for mine in hosted for slot in (*sorted(mine), *[EMPTY] * (width - len(mine)))]
    return ExpertPlacement(np.tile(row, (num_layers, 1)), experts, num_ranks)
