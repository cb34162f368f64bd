"""The few likeliest tokens of rows, in an order that ties do not leave to chance.

torch.topk gives equal values in any order, another one on another device; here the lowest id comes
first, wherever the rows are, and nothing is asked of the device.

Shape letters: A rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

_TAKEN = -1.0  # below any probability


def likeliest(probs: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """probs [A, V], spoilt -> values, ids [A, min(width, V)], the largest first, of equal ones the
    lowest id. A row of NaN has ids that mean nothing, with values of 0."""
    values: list[Tensor] = []
    ids: list[Tensor] = []
    for _ in range(min(width, probs.shape[-1])):
        most, at = probs.max(dim=-1, keepdim=True)  # the first of equal ones
        values.append(most)
        ids.append(at)
        probs.scatter_(-1, at, _TAKEN)
    return torch.cat(values, dim=-1).nan_to_num(0.0), torch.cat(ids, dim=-1)
