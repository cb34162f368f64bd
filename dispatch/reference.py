"""ReferenceWorld: all ranks of a dispatch in one process, with plain loops. For tests.

The slow, obvious twin of the dispatchers: what each rank receives, row by row, and what comes
home. Knows nothing of process groups or of speed.

Shape letters: T tokens, D hidden, K top-k, R ranks, e local slots, N received rows, Q pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dispatch.base import CombineForm, Fp8Tokens, Layout, Received


@dataclass(frozen=True)
class Origin:
    """Where a received row came from."""

    rank: int
    token: int


class ReferenceWorld:
    """One layer of all ranks. Lists hold one entry a rank: x [T, D], slots, weights [T, K]."""

    def __init__(self, num_ranks: int, num_local_experts: int) -> None:
        self.num_ranks = num_ranks
        self.num_local_experts = num_local_experts

    def dispatch(
        self, xs: Sequence[Tensor | Fp8Tokens], slots: list[Tensor], weights: list[Tensor]
    ) -> tuple[list[Received], list[list[Origin]]]:
        """xs: all in the model dtype or all in FP8; rows arrive as they are sent."""
        received, origins = [], []
        for rank in range(self.num_ranks):
            first = rank * self.num_local_experts
            origin: list[Origin] = []
            local_rows, weight_rows = [], []
            for source in range(self.num_ranks):
                for token in range(xs[source].shape[0]):
                    picks = slots[source][token].tolist()
                    local = [s - first if self.owner(s) == rank else -1 for s in picks]
                    if max(local, default=-1) < 0:
                        continue
                    origin.append(Origin(source, token))
                    local_rows.append(local)
                    mine = torch.tensor(local) >= 0
                    weight_rows.append(torch.where(mine, weights[source][token], 0.0))
            top_k = slots[0].shape[1]
            counts = [
                sum(row.count(s) for row in local_rows) for s in range(self.num_local_experts)
            ]
            got = Received(
                Layout.ROUTED,
                _rows([x.values if isinstance(x, Fp8Tokens) else x for x in xs], origin),
                torch.tensor(local_rows, dtype=torch.int32).reshape(len(origin), top_k),
                torch.stack(weight_rows) if origin else torch.zeros(0, top_k),
                torch.tensor(counts, dtype=torch.int64),
            )
            quantised = [x for x in xs if isinstance(x, Fp8Tokens)]
            if quantised:
                scales = _rows([x.scales for x in quantised], origin)
                got = replace(got, scales=scales, scale_format=quantised[0].scale_format)
            received.append(got)
            origins.append(origin)
        return received, origins

    def combine(
        self,
        form: CombineForm,
        ys: list[Tensor],
        received: list[Received],
        origins: list[list[Origin]],
        slots: list[Tensor],
        weights: list[Tensor],
    ) -> list[Tensor]:
        """ys: what each rank's experts hand back, as `form` says -> [T, D] fp32 for each rank."""
        hidden = ys[0].shape[1]
        home = [torch.zeros(s.shape[0], hidden) for s in slots]
        if form is CombineForm.SUMMED:
            for rank in range(self.num_ranks):
                for row, origin in enumerate(origins[rank]):
                    home[origin.rank][origin.token] += ys[rank][row].to(torch.float32)
            return home
        # PAIRS: collect the row of each (source, token, k), then sum in routing order.
        rows: dict[tuple[int, int, int], Tensor] = {}
        for rank in range(self.num_ranks):
            pair = 0
            for row, origin in enumerate(origins[rank]):
                for k, slot in enumerate(received[rank].slots[row].tolist()):
                    if slot >= 0:
                        rows[origin.rank, origin.token, k] = ys[rank][pair]
                        pair += 1
        for source, picks in enumerate(slots):
            for token in range(picks.shape[0]):
                for k in range(picks.shape[1]):
                    if int(picks[token, k]) >= 0:
                        row_of = rows[source, token, k].to(torch.float32)
                        home[source][token] += row_of * weights[source][token, k]
        return home

    def owner(self, slot: int) -> int:
        """Rank of a physical slot; -1 for a masked pick."""
        return slot // self.num_local_experts if slot >= 0 else -1


def _rows(parts: list[Tensor], origins: list[Origin]) -> Tensor:
    """The rows [N, ..] that came from there, one by one. parts: of each rank."""
    out = torch.empty(len(origins), parts[0].shape[1], dtype=parts[0].dtype)
    for row, origin in enumerate(origins):
        out[row] = parts[origin.rank][origin.token]
    return out
