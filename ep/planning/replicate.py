"""How many copies of each expert: greedy replication, and the bound that it proves.

Knows: loads and counts of independent rows. Knows nothing of: GPUs, where a copy goes.

Shape letters: B rows (a layer, or one node of a layer), E experts of a row, P slots of a row.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


def add_replicas(
    weights: NDArray[np.floating], num_slots: int, limit: int | None = None
) -> tuple[IntArray, IntArray]:
    """weights [B, E] -> (counts [B, E], order [B, P]): every expert once, then copy after copy to
    the expert with the largest load per copy, lowest id first. P = num_slots >= E.

    order: expert of each slot in the order of choice (0..E-1 first). limit: most copies of one
    expert (E * limit >= P). Least possible maximum of load per copy; arithmetic in weights' dtype.
    """
    rows, experts = weights.shape
    counts = np.ones((rows, experts), dtype=np.int64)
    order = np.empty((rows, num_slots), dtype=np.int64)
    order[:, :experts] = np.arange(experts)
    share = weights.copy()
    if limit == 1:
        share.fill(-1)
    flat_share, flat_count, flat_weight = share.ravel(), counts.ravel(), weights.ravel()
    base = np.arange(rows) * experts
    dtype = weights.dtype.type
    for place in range(experts, num_slots):
        chosen = share.argmax(axis=1)
        order[:, place] = chosen
        at = base + chosen
        count = flat_count[at] + 1
        flat_count[at] = count
        smaller = flat_weight[at] / count.astype(dtype)
        if limit is not None:
            smaller[count >= limit] = -1  # below every load: chosen no more
        flat_share[at] = smaller
    return counts, order


def balance_bound(
    weights: FloatArray, num_slots: int, num_gpus: int, counts: IntArray | None = None
) -> FloatArray:
    """[B]: least load of the busiest GPU that any placement could have, as a multiple of the mean.

    The larger of the mean and the least M with sum(ceil(w_e / M)) <= P, each expert on at most
    num_gpus of them (more copies cannot lighten a GPU). Holds for uneven splits too; not tight
    where GPUs have one or two slots. counts: those of `add_replicas` with that limit, if at hand.
    """
    if counts is None:
        slots = min(num_slots, weights.shape[1] * num_gpus)
        counts, _ = add_replicas(weights, slots, num_gpus)
    mean = in_order_sum(weights) / num_gpus
    bound = np.ones(len(weights))
    np.divide((weights / counts).max(axis=1), mean, out=bound, where=mean > 0)
    return np.maximum(bound, 1.0)


def in_order_sum(values: FloatArray) -> FloatArray:
    """[..., N] -> [...]: summed from the first to the last, so that every machine rounds alike
    (numpy's own sum groups terms by the width of the machine's vectors)."""
    if values.shape[-1] == 0:
        return np.zeros(values.shape[:-1])
    total: FloatArray = np.cumsum(values, axis=-1)[..., -1]
    return total
