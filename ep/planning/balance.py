"""How even a table of experts is: loads of GPUs when each expert's load is split over its copies.

Knows: tables of slots, loads, live GPUs. Knows nothing of: how a table came about.

Shape letters: L layers, E experts, G GPUs, k slots a GPU.
"""

from __future__ import annotations

import numpy as np

from ep.planning.replicate import FloatArray, IntArray, in_order_sum
from ep.planning.shapes import BoolArray


def gpu_loads(loads: FloatArray, table: IntArray) -> FloatArray:
    """loads [L, E], table [L, G, k] (-1 empty) -> [L, G]. An expert without a copy loads nobody."""
    layers, experts = loads.shape
    named = table + np.arange(layers)[:, None, None] * experts
    counts = np.bincount(named[table >= 0], minlength=layers * experts).reshape(loads.shape)
    share = loads / np.maximum(counts, 1)
    share = np.concatenate([share, np.zeros((layers, 1))], axis=1)  # what -1 indexes
    return in_order_sum(share[np.arange(layers)[:, None, None], table])


def table_balance(loads: FloatArray, table: IntArray, live: BoolArray | None = None) -> FloatArray:
    """[L]: busiest GPU / mean of the live GPUs; 1 for a layer without load."""
    busy = gpu_loads(loads, table)
    gpus = table.shape[1] if live is None else int(live.sum())
    mean = in_order_sum(busy) / gpus
    out = np.ones(len(busy))
    np.divide(busy.max(axis=1), mean, out=out, where=mean > 0)
    return out
