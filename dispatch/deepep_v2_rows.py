"""What DeepEP's second API gives a receiver, as `Received` wants it.

Knows: which of its rows are valid and what is undefined. Knows nothing of how they came.

Shape letters: N received rows, K top-k, e local slots.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dispatch.base import Layout, Received, ScaleFormat


def routed(
    x: Tensor,
    scales: Tensor | None,
    form: ScaleFormat,
    picks: Tensor,
    weights: Tensor,
    total: Tensor | None,
    num_local: int,
) -> Received:
    """picks [N, K] local or -1, weights [N, K]: both are undefined from row `total` on (None: all
    rows are valid), and weights also where the pick lies elsewhere."""
    valid = picks >= 0
    if total is not None:
        valid &= torch.arange(picks.shape[0], device=picks.device)[:, None] < total
    slots = torch.where(valid, picks, -1).to(torch.int32)
    counts = torch.zeros(num_local + 1, dtype=torch.int64, device=picks.device)
    flat = slots.reshape(-1).to(torch.int64) + 1
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    shares = torch.where(valid, weights, 0.0)
    return Received(Layout.ROUTED, x, slots, shares, counts[1:], scales, form)


def expanded(
    x: Tensor,
    scales: Tensor | None,
    form: ScaleFormat,
    weights: Tensor,
    ticket: Any,
    alignment: int,
) -> Received:
    """weights [N]; alignment: at whose multiples segments begin; the ticket says where each slot's
    rows end and how many they are."""
    counts = ticket.num_unaligned_recv_tokens_per_expert.to(torch.int64)
    starts = ticket.psum_num_recv_tokens_per_expert.to(torch.int64) - counts
    rows = torch.arange(x.shape[0], device=x.device)
    slot = torch.searchsorted(starts, rows, right=True) - 1
    valid = rows - starts[slot] < counts[slot]
    slots = torch.where(valid, slot, -1).to(torch.int32)[:, None]
    shares = torch.where(valid, weights, 0.0)[:, None]
    return Received(Layout.EXPANDED, x, slots, shares, counts, scales, form, starts, alignment)
