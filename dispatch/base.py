"""The one interface by which tokens travel to experts and back.

Knows: rows, physical expert slots, weights, handles. Knows nothing of what an expert computes.

Shape letters: T tokens on this rank, D hidden, K top-k, P physical slots (all ranks),
e local slots, R ranks, N received rows, Q valid (row, expert) pairs among the received rows.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor


class Layout(enum.Enum):
    """How received rows relate to experts: the three layouts that real backends produce."""

    ROUTED = "routed"  # a row once per destination rank, with its local slots and weights
    EXPANDED = "expanded"  # a row once per (token, expert), grouped by local slot
    MASKED = "masked"  # [e, M, D] padded per local slot, with counts


class CombineForm(enum.Enum):
    """What the experts hand back to `combine_start`.

    SUMMED: y [N, D], each received row already weighted and summed over its local experts (fewest
    bytes; the sum's order depends on where experts live). PAIRS: y [Q, D], one unweighted row for
    each valid (row, k) in row-major order; home weights and sums them in routing order in fp32,
    so the result does not depend on the placement (deterministic mode, law 5).
    """

    SUMMED = "summed"
    PAIRS = "pairs"


class DispatchError(RuntimeError):
    """A call that a dispatcher refuses: names the argument, its value and what would be valid."""


class HandleError(DispatchError):
    """A handle used twice, out of order, or with a dispatcher that did not make it."""


class PeerError(DispatchError):
    """Another rank refused its call; every rank of the group stops at the same place."""


@dataclass(frozen=True)
class Probe:
    """The answer of a backend asked whether it can run here: no collective, CPU-safe."""

    ok: bool
    reason: str  # one line; when ok, what was chosen (versions, transport)


@dataclass(frozen=True)
class DispatchConfig:
    """What a backend must know when it is made. max_tokens_per_rank bounds T of any step."""

    hidden_size: int
    top_k: int
    num_physical_experts: int
    max_tokens_per_rank: int
    dtype: torch.dtype
    deterministic: bool


@dataclass(frozen=True)
class Received:
    """Rows that arrived for the local experts, in one of the three layouts.

    ROUTED: x [N, D]; slots [N, K] int32, local slot index or -1; weights [N, K] fp32 (0 where -1);
    counts [e] int64 rows per local slot. The order of rows is by source rank, then source token.
    """

    layout: Layout
    x: Tensor
    slots: Tensor
    weights: Tensor
    counts: Tensor
    scales: Tensor | None = None  # FP8 wire formats: fp32 [N, D/128]


class Handle(Protocol):
    """Opaque, single use: made by dispatch_start, spent by combine_finish."""


@dataclass
class DispatchStats:
    """For metrics and load recording: totals since the start, where not said otherwise."""

    rows_sent_to_rank: list[int] = field(default_factory=list)  # [R] rows, last dispatch
    bytes_sent: int = 0  # all that was sent to other ranks: counts, rows, padding, results
    calls: int = 0


class Dispatcher(Protocol):
    """Two all-to-alls a layer. Every rank calls every method the same number of times, T = 0 too.

    dispatch_start(x [T, D], slots [T, K] int32 physical, weights [T, K] fp32) -> handle
    dispatch_finish(handle) -> Received
    combine_start(handle, y)   y as `combine_form` says
    combine_start(handle, y, index)   PAIRS only: y [Q, D] in any order, index [N, K] int64 the row
        of y of each valid pair, -1 elsewhere (what `permute` gives): spares a copy
    combine_finish(handle) -> [T, D] fp32: sum over K of weight * expert output
    """

    name: str
    combine_form: CombineForm
    stats: DispatchStats

    @staticmethod
    def probe(group: Any, config: DispatchConfig) -> Probe: ...

    @staticmethod
    def plan(group: Any, config: DispatchConfig) -> int:
        """Bytes of buffers that a dispatcher made of these will hold on this rank."""
        ...

    def set_step_bound(self, max_tokens: int | None) -> None:
        """What all ranks agreed for the layers to come (`Lockstep`): no rank dispatches more than
        max_tokens at once. The same call on every rank. None, as at the start: not agreed. A
        backend may use it to send fewer messages; it holds until the next call."""
        ...

    def dispatch_start(self, x: Tensor, slots: Tensor, weights: Tensor) -> Handle: ...

    def dispatch_finish(self, handle: Handle) -> Received: ...

    def combine_start(self, handle: Handle, y: Tensor, index: Tensor | None = None) -> None: ...

    def combine_finish(self, handle: Handle) -> Tensor: ...

    def close(self) -> None: ...
