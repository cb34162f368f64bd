"""The weighted sum of rows that came home, in routing order: plain torch, the slow obvious twin.

Knows: rows, an index, weights. Knows nothing of ranks. The order of the sum over K is fixed and
each product and sum is rounded on its own, so a row's result depends on nothing but its own rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# y [M, D], index [T, K] int64 row of y or -1, weights [T, K] fp32 -> [T, D] fp32
CombinePairs = Callable[[Tensor, Tensor, Tensor], Tensor]


def combine_pairs(y: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """y [M, D]; index [T, K] int64, row of y or -1; weights [T, K] fp32 -> [T, D] fp32."""
    total = torch.zeros(index.shape[0], y.shape[1], dtype=torch.float32, device=y.device)
    if y.shape[0] == 0:
        return total
    valid = index >= 0
    rows = index.clamp(min=0)
    for k in range(index.shape[1]):
        # Product and sum apart: a fused multiply-add would round by where a row lies in memory.
        term = y.index_select(0, rows[:, k]).to(torch.float32) * weights[:, k : k + 1]
        total += torch.where(valid[:, k : k + 1], term, 0.0)
    return total
