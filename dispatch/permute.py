"""Between dispatch and the grouped experts: pairs sorted by local slot, and the way back.

Knows: received slots. Knows nothing of what experts compute, of weights, of ranks.

Shape letters: N received rows, K top-k, Q valid (row, k) pairs, e local slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Permutation:
    """The order in which `Kernels.experts` wants the pairs.

    pair_rows [Q] int32: received row of each pair, sorted by slot, within a slot by (row, k).
    offsets [e + 1] int32: the pairs of slot s are offsets[s] .. offsets[s + 1] - 1.
    index [N, K] int64: where the pair (row, k) went, -1 where there is none; what `combine_pairs`
    and `combine_start` take to bring the experts' output back into order.
    """

    pair_rows: Tensor
    offsets: Tensor
    index: Tensor


def permute(slots: Tensor, counts: Tensor) -> Permutation:
    """slots [N, K] int32, local slot or -1; counts [e] int64, pairs of each slot (`Received`).

    Stable: pairs of one slot keep their row-major order.
    """
    top_k = slots.shape[1]
    flat = slots.reshape(-1)
    pairs = flat.shape[0]
    order = flat.argsort(stable=True)  # the -1 come first
    offsets = torch.zeros(counts.shape[0] + 1, dtype=torch.int32, device=slots.device)
    torch.cumsum(counts, 0, dtype=torch.int32, out=offsets[1:])
    index = torch.full((pairs,), -1, dtype=torch.int64, device=slots.device)
    # counts says how many pairs are valid; on a GPU this read is the one synchronisation.
    valid = int(offsets[-1])
    order = order[pairs - valid :]
    index.scatter_(0, order, torch.arange(valid, device=slots.device))
    pair_rows = order.div(top_k, rounding_mode="floor").to(torch.int32)
    return Permutation(pair_rows, offsets, index.view(slots.shape))


def to_row_major(y: Tensor, index: Tensor) -> Tensor:
    """y [Q, D] in any order, index [N, K] as in Permutation -> [Q, D] in row-major order of valid
    pairs (the PAIRS form)."""
    flat = index.reshape(-1)
    return y.index_select(0, flat[flat >= 0])


def permute_slow(slots: Tensor, counts: Tensor) -> Permutation:
    """The slow, obvious twin of `permute`."""
    rows, top_k = slots.shape
    pair_rows: list[int] = []
    index = torch.full((rows, top_k), -1, dtype=torch.int64)
    offsets = [0]
    for slot in range(counts.shape[0]):
        for row in range(rows):
            for k in range(top_k):
                if int(slots[row, k]) == slot:
                    index[row, k] = len(pair_rows)
                    pair_rows.append(row)
        offsets.append(len(pair_rows))
    return Permutation(
        torch.tensor(pair_rows, dtype=torch.int32), torch.tensor(offsets, dtype=torch.int32), index
    )
