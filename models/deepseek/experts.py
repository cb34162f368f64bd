"""Received rows through this rank's experts, in whichever layout they arrived.

Knows: the three layouts, the two combine forms. Knows nothing of gates, ranks or transports.

Shape letters: N received rows, D hidden, K top-k, e local slots, M rows a slot (MASKED), Q pairs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dispatch.base import CombineForm, Layout, Received, ScaleFormat
from dispatch.fp8 import dequantise
from models.deepseek.kernels.base import ExpertWeights, Kernels


def run_experts(
    kernels: Kernels,
    received: Received,
    weights: ExpertWeights,
    form: CombineForm,
    dtype: torch.dtype = torch.bfloat16,
    expected_pairs: int | None = None,
    most_pairs: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """What `combine_start` wants: y and, for ROUTED rows in the PAIRS form, the index of pairs.
    dtype: the model's; rows in FP8 are dequantised to it. expected_pairs: (token, slot) pairs that
    are likely here, where only the device knows how many are: it chooses among tiles, no more.
    most_pairs: for how many there is room at once (None: all) where kernels take rows as they lie;
    of ROUTED rows that may have more, so many are computed at a time. No bit depends on it.

    SUMMED: y [N, D] in the dtype of x, weighted here. PAIRS: y [Q, D] unweighted.

    Kernels that take rows as they lie (`experts_masked`, `experts_in_segments`, `experts_routed`)
    get them so: on a device nothing is gathered, no host waits for a count, and e4m3 meets e4m3 as
    it is. Rows that belong to nobody then come back with anything in them.
    """
    if hasattr(kernels, "experts_masked"):
        return _as_they_lie(kernels, received, weights, form, dtype, expected_pairs, most_pairs)
    if received.layout is Layout.MASKED:
        return _masked(kernels, received, weights, form, dtype), None
    if received.scales is not None:
        x = dequantise(received.x, received.scales, received.scale_format, dtype)
        received = replace(received, x=x, scales=None, scale_format=ScaleFormat.NONE)
    if received.layout is Layout.ROUTED:
        return _routed(kernels, received, weights, form)
    return _expanded(kernels, received, weights, form), None


def _routed(
    kernels: Kernels, received: Received, weights: ExpertWeights, form: CombineForm
) -> tuple[Tensor, Tensor | None]:
    pair_rows, offsets, index = kernels.sort_pairs(received.slots, weights.num_slots)
    y = kernels.experts(received.x, pair_rows, offsets, weights)
    if form is CombineForm.PAIRS:
        return y, index
    return kernels.combine_pairs(y, index, received.weights).to(received.x.dtype), None


def _expanded(
    kernels: Kernels, received: Received, weights: ExpertWeights, form: CombineForm
) -> Tensor:
    """A row once per (token, expert), grouped by slot; weights [N, 1] beside it. Where segments are
    aligned the rows between them stay 0."""
    rows = torch.arange(received.x.shape[0], device=received.x.device)
    if received.starts is not None:
        rows = (received.slots[:, 0] >= 0).nonzero().squeeze(1)
    y = kernels.experts(received.x, rows.to(torch.int32), _offsets(received.counts), weights)
    if received.starts is not None:
        return _spread(y, rows, received, form)
    return _weighted(y, received.weights) if form is CombineForm.SUMMED else y


def _masked(
    kernels: Kernels,
    received: Received,
    weights: ExpertWeights,
    form: CombineForm,
    dtype: torch.dtype,
) -> Tensor:
    """x [e, M, D] padded per slot: only counts[s] rows of slot s are computed, the rest stay 0.
    Rows in FP8 are gathered before they are dequantised: padding may be most of x, and is NaN."""
    slots, width, hidden = received.x.shape
    column = torch.arange(width, device=received.x.device)
    at = (column[None, :] < received.counts[:, None]).nonzero(as_tuple=True)
    rows, x = at[0] * width + at[1], received.x.reshape(-1, hidden)
    picked = rows
    if received.scales is not None:
        x = dequantise(x[rows], received.scales[at], received.scale_format, dtype)
        picked = torch.arange(rows.shape[0], device=rows.device)
    y = kernels.experts(x, picked.to(torch.int32), _offsets(received.counts), weights)
    return _spread(y, rows, received, form).view(slots, width, hidden)


def _as_they_lie(
    kernels: Any,
    received: Received,
    weights: ExpertWeights,
    form: CombineForm,
    dtype: torch.dtype,
    expected_pairs: int | None,
    most_pairs: int | None,
) -> tuple[Tensor, Tensor | None]:
    r = received
    rows = None if expected_pairs is None else -(-expected_pairs // max(1, weights.num_slots))
    if r.scales is not None and not hasattr(weights, "store_fp8"):
        x = dequantise(r.x, r.scales, r.scale_format, dtype)
        r = replace(r, x=x, scales=None, scale_format=ScaleFormat.NONE)
    if r.layout is Layout.ROUTED:
        # At least those of a row, which are never parted.
        most = r.slots.numel() if most_pairs is None else max(most_pairs, r.slots.shape[1])
        made = _Routed(kernels, r, weights, dtype, rows, most)
        return made.pairs() if form is CombineForm.PAIRS else (made.summed(), None)
    if r.layout is Layout.MASKED:
        y = kernels.experts_masked(r.x, r.scales, r.counts, weights, dtype, rows)
    else:
        y = kernels.experts_in_segments(
            r.x, r.scales, r.starts, r.counts, weights, dtype, rows, r.alignment
        )
    if form is not CombineForm.SUMMED:
        return y, None
    return (y.to(torch.float32) * r.weights.view(*y.shape[:-1], 1)).to(y.dtype), None


class _Routed:
    """ROUTED rows on a device, in parts of so few that `most` places for pairs do: how many of the
    N * K picks are valid the host knows at the best (`Received.num_pairs`), and if all ranks send
    all they have to this one, they are R times as many as there is room for."""

    def __init__(
        self,
        kernels: Any,
        received: Received,
        weights: ExpertWeights,
        dtype: torch.dtype,
        expected_rows: int | None,
        most: int,
    ) -> None:
        self.kernels, self.received, self.weights, self.dtype = kernels, received, weights, dtype
        rows, top_k = received.slots.shape
        self.step = max(1, most // max(1, top_k))  # rows at a time
        known = received.num_pairs
        self.whole = rows <= self.step or (known is not None and known <= most)
        # The same for each part as for all: what it chooses is no matter of parts.
        self.expected = expected_rows or -(-received.slots.numel() // max(1, weights.num_slots))

    def summed(self) -> Tensor:
        """[N, D], weighted and summed."""
        r, rows = self.received, self.received.slots.shape[0]
        out = torch.empty(rows, r.x.shape[1], dtype=self.dtype, device=r.x.device)
        y, index = self._experts(slice(0, rows)) if self.whole else (None, None)
        for part in self._parts():
            if self.whole:
                assert y is not None and index is not None
                of_rows = index[part]
            else:
                y, of_rows = self._experts(part)
            out[part] = self.kernels.combine_pairs(y, of_rows, r.weights[part])  # fp32 until here
        return out

    def pairs(self) -> tuple[Tensor, Tensor]:
        """[Q, D] unweighted, and the index. Of parts, valid pairs only are kept, row-major: the
        host waits for each, as backends do whose rows come so many."""
        r = self.received
        if self.whole:
            return self._experts(slice(0, r.slots.shape[0]))
        total = int(r.counts.sum()) if r.num_pairs is None else r.num_pairs
        out = torch.empty(total, r.x.shape[1], dtype=self.dtype, device=r.x.device)
        valid = r.slots >= 0
        numbers = (valid.reshape(-1).cumsum(0) - 1).view(r.slots.shape)
        done = 0
        for part in self._parts():
            y, index = self._experts(part)
            places = index[valid[part]]
            torch.index_select(y, 0, places, out=out[done : done + places.shape[0]])
            done += places.shape[0]
        return out, torch.where(valid, numbers, -1)

    def _parts(self) -> list[slice]:
        rows = self.received.slots.shape[0]
        return [slice(at, min(at + self.step, rows)) for at in range(0, rows, self.step)]

    def _experts(self, part: slice) -> tuple[Tensor, Tensor]:
        r = self.received
        scales = None if r.scales is None else r.scales[part]
        known = r.num_pairs if self.whole else None
        y, index = self.kernels.experts_routed(
            r.x[part], scales, r.slots[part], self.weights, self.dtype, self.expected, known
        )
        return y, index


def _spread(y: Tensor, rows: Tensor, received: Received, form: CombineForm) -> Tensor:
    """y [Q, D], rows [Q] int64: which of the N received rows they belong to -> [N, D], 0 in all
    others."""
    if form is CombineForm.SUMMED:
        y = _weighted(y, received.weights.reshape(-1, 1)[rows])
    out = y.new_zeros(received.x.shape[:-1].numel(), y.shape[1])
    out[rows] = y
    return out


def _offsets(counts: Tensor) -> Tensor:
    zero = torch.zeros(1, dtype=torch.int64, device=counts.device)
    return torch.cat((zero, counts.cumsum(0))).to(torch.int32)


def _weighted(y: Tensor, weights: Tensor) -> Tensor:
    return (y.to(torch.float32) * weights.reshape(-1, 1)).to(y.dtype)
