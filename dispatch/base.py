"""The one interface by which tokens travel to experts and back.

Knows: rows, physical expert slots, weights, handles. Knows nothing of what an expert computes.

Shape letters: T tokens on this rank, D hidden, K top-k, P physical slots (all ranks),
e local slots, R ranks, N received rows, Q valid (row, expert) pairs among the received rows.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Protocol, Self

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


class WireFormat(enum.Enum):
    """How a row's hidden values travel to the experts; results always come home in the model dtype.

    MODEL: as they are. FP8: e4m3 with one fp32 scale for 128 channels; FP8_UE8M0: the scales are
    powers of two, a byte each (what a checkpoint with `scale_fmt: ue8m0` was trained with).
    """

    MODEL = "model"
    FP8 = "fp8"
    FP8_UE8M0 = "fp8_ue8m0"


class ScaleFormat(enum.Enum):
    """What `scales` beside e4m3 rows [.., N, D] are. G = ceil(D / 128) blocks a row.

    F32_*: fp32 [.., N, G]. UE8M0_*: int32 [.., N, ceil(G / 4)], four exponent bytes each, the first
    block's lowest; a scale is 2**(byte - 127). ROW: the last dimension is contiguous; COLUMN: the
    one before it (what grouped GEMMs on GPUs take).
    """

    NONE = "none"
    F32_ROW = "f32_row"
    F32_COLUMN = "f32_column"
    UE8M0_ROW = "ue8m0_row"
    UE8M0_COLUMN = "ue8m0_column"


MAX_PICKS = 2**31 - 1  # of a rank in a step


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
class BufferPlan:
    """Bytes on this rank's device. held: from `open` to `close`. passing: more, while layers are in
    flight at the largest step (results, padding). Known before the KV cache is sized."""

    held: int = 0
    passing: int = 0

    @property
    def total(self) -> int:
        return self.held + self.passing


@dataclass(frozen=True)
class DispatchConfig:
    """What a backend must know when it is made. max_tokens_per_rank bounds T of any step, drafts
    counted. wire: how rows travel to the experts. The four numbers are at least 1, and a step has
    no more picks (tokens x top_k) than int32 can number; else DispatchError."""

    hidden_size: int
    top_k: int
    num_physical_experts: int
    max_tokens_per_rank: int
    dtype: torch.dtype
    deterministic: bool
    wire: WireFormat = WireFormat.MODEL

    def __post_init__(self) -> None:
        found = []
        for name in ("hidden_size", "top_k", "num_physical_experts", "max_tokens_per_rank"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < 1:
                found.append(f"{name}={value!r}: must be a whole number, at least 1")
        if not found and self.max_tokens_per_rank * self.top_k > MAX_PICKS:
            found.append(
                f"max_tokens_per_rank={self.max_tokens_per_rank}: at most "
                f"{max(1, MAX_PICKS // self.top_k)} with top_k={self.top_k}, picks are numbered "
                "by int32"
            )
        if not (isinstance(self.dtype, torch.dtype) and self.dtype.is_floating_point):
            found.append(f"dtype={self.dtype!r}: must be a floating-point dtype of torch")
        if not isinstance(self.wire, WireFormat):
            valid = ", ".join(str(wire) for wire in WireFormat)
            found.append(f"wire={self.wire!r}: must be one of {valid}")
        if found:
            raise DispatchError("; ".join(found))


@dataclass(frozen=True)
class Fp8Tokens:
    """Tokens quantised for the wire (`dispatch.fp8`): values e4m3 [T, D], scales as ROW formats
    say."""

    values: Tensor
    scales: Tensor
    scale_format: ScaleFormat

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def device(self) -> torch.device:
        return self.values.device


@dataclass(frozen=True)
class Received:
    """Rows that arrived for the local experts, in one of the three layouts.

    ROUTED: x [N, D]; slots [N, K] int32, local slot index or -1; weights [N, K] fp32 (0 where -1);
    counts [e] int64 rows per local slot. The order of rows is by source rank, then source token
    (`deepep_v2`: by source rank alone).
    EXPANDED: x [N, D], a row for each (token, slot), grouped by slot; slots, weights [N, 1]. The
    segments of slots lie one behind the other or, where they are aligned, begin at starts [e]
    int64, multiples of `alignment`; then slots are -1 in the rows between and behind them, which
    nobody may read, and what the experts hand back is y [N, D], each row where its x lies.
    MASKED: x [e, M, D]; only the first counts[s] rows of slot s may be read.
    Rows in e4m3 have `scales`, and scale_format says what these are.
    num_pairs: of ROUTED rows, how many slots are not -1 (Q), where the host knows without a wait or
    a wait is worth it (more rows than this rank may send); None: it does not.
    """

    layout: Layout
    x: Tensor
    slots: Tensor
    weights: Tensor
    counts: Tensor
    scales: Tensor | None = None
    scale_format: ScaleFormat = ScaleFormat.NONE
    starts: Tensor | None = None
    alignment: int = 1
    num_pairs: int | None = None


class Handle(Protocol):
    """Opaque, single use: made by dispatch_start, spent by combine_finish."""


@dataclass
class DispatchStats:
    """For metrics and load recording: totals since the start, where not said otherwise."""

    rows_sent_to_rank: list[int] = field(default_factory=list)  # [R] rows, last dispatch
    # [nodes] rows, last dispatch; empty where rows do not go once to a node
    rows_sent_to_node: list[int] = field(default_factory=list)
    bytes_sent: int = 0  # all that was sent to other ranks: the two below
    dispatch_bytes: int = 0  # counts, rows, padding
    combine_bytes: int = 0  # results
    calls: int = 0

    def sent(self, *, dispatch: int = 0, combine: int = 0) -> None:
        """Bytes that left this rank."""
        self.dispatch_bytes += dispatch
        self.combine_bytes += combine
        self.bytes_sent += dispatch + combine


class Dispatcher(Protocol):
    """Two all-to-alls a layer. Every rank calls every method the same number of times, T = 0 too.
    Backends inherit from it: what has a body here is what most of them do.

    dispatch_start(x, slots [T, K] int32 physical, weights [T, K] fp32) -> handle
        x: [T, D] in the model dtype; where `config.wire` is FP8 and the backend does not quantise
        by itself (`quantises`), Fp8Tokens. A token's slots are distinct, but for -1: on CPUs every
        backend looks and refuses; on a device those that never wait for it do not look. Nothing is
        differentiated: arguments that require grad are refused while gradients are recorded
    dispatch_finish(handle) -> Received
    combine_start(handle, y)   y as `combine_form` says, of a floating-point dtype
    combine_start(handle, y, index)   PAIRS only: y [Q, D] in any order, index [N, K] int64 the row
        of y of each valid pair, -1 elsewhere (what `permute` gives): spares a copy
    combine_finish(handle) -> [T, D] fp32: sum over K of weight * expert output
    """

    name: str
    config: DispatchConfig
    combine_form: CombineForm
    stats: DispatchStats
    quantises: bool = False  # takes rows in the model dtype and makes FP8 of them by itself
    graph_safe: bool = False  # may be captured: no shape depends on what ranks send
    max_in_flight: int | None = None  # layers between dispatch_start and combine_finish; None: any
    _bound: int | None = None  # of tokens, as agreed for the layers to come

    def __init__(self, group: Any, config: DispatchConfig, **hooks: Any) -> None: ...

    # -- before there is one: no collective, CPU-safe ------------------------------------------

    @classmethod
    def probe(cls, group: Any, config: DispatchConfig) -> Probe:
        """Can it run here? If not, why: package, version, limit, bytes needed against free."""
        ...

    @classmethod
    def plan(cls, group: Any, config: DispatchConfig) -> BufferPlan:
        """Bytes that a dispatcher made of these takes on this rank."""
        ...

    @classmethod
    def expert_rows(cls, group: Any, config: DispatchConfig) -> int:
        """Rows that this rank's experts are handed at the largest step, valid or not, where their
        number depends on configuration alone (MASKED, EXPANDED in buffers): what kernels compute
        with has that size. 0: as many as come (ROUTED), which kernels take in parts."""
        return 0

    @classmethod
    def open(cls, group: Any, config: DispatchConfig, **hooks: Any) -> Self:
        """Collective: make it, buffers included. DispatchError if `probe` refuses."""
        return cls(group, config, **hooks)

    # -- a layer -------------------------------------------------------------------------------

    def set_step_bound(self, max_tokens: int | None, decode_only: bool = False) -> None:
        """What all ranks agreed for the layers to come (`Lockstep`): no rank dispatches more than
        max_tokens at once (who does is refused); decode_only: none computes prompt tokens. The same
        call on every rank. None, as at the start: not agreed. A backend may use it to send fewer
        messages; it holds until the next call. DispatchError for what is no number of tokens."""
        self._bound = self.checked_bound(max_tokens)

    def checked_bound(self, max_tokens: int | None) -> int | None:
        """max_tokens, no more than the dispatcher was made for: what no rank may exceed needs no
        room."""
        if max_tokens is None:
            return None
        if (
            isinstance(max_tokens, bool)
            or not isinstance(max_tokens, Integral)
            or int(max_tokens) < 0
        ):
            raise DispatchError(
                f"set_step_bound: max_tokens={max_tokens!r}; must be None or a whole number, "
                "at least 0"
            )
        return min(int(max_tokens), self.config.max_tokens_per_rank)

    def dispatch_start(self, x: Tensor | Fp8Tokens, slots: Tensor, weights: Tensor) -> Handle: ...

    def dispatch_finish(self, handle: Handle) -> Received: ...

    def combine_start(self, handle: Handle, y: Tensor, index: Tensor | None = None) -> None: ...

    def combine_finish(self, handle: Handle) -> Tensor: ...

    def close(self) -> None: ...

    # -- its state -----------------------------------------------------------------------------

    @property
    def notes(self) -> list[str]:
        """Fallbacks that are in force, to be printed once."""
        return []

    def active_mask(self) -> list[int] | None:
        """[R]: 1 for a rank that takes part, 0 for one that is left out; None: it has no masks."""
        return None

    def set_mask(self, rank: int, active: bool) -> None:
        """Leave a rank out, or take it in again, where the backend can."""
        raise DispatchError(f"dispatcher {self.name!r} cannot leave ranks out")

    def check_peers(self) -> None:
        """PeerError if a rank stopped answering since the last look: once a step, by all ranks."""
        return None
