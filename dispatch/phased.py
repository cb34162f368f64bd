"""PhasedDispatcher: one backend for steps with prompt tokens, another for steps that only decode.

Which one a step takes follows from what all ranks agreed (`set_step_bound`), never from a rank's
own tokens (law 1). Knows two dispatchers and their interface; nothing of transports.

Shape letters: T tokens on this rank, D hidden, K top-k, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dispatch.base import (
    BufferPlan,
    DispatchConfig,
    Dispatcher,
    DispatchError,
    DispatchStats,
    Fp8Tokens,
    Handle,
    HandleError,
    Probe,
    Received,
)


@dataclass(eq=False)
class _PhasedHandle:
    """A backend's handle and whose it is: it goes back there, whichever is in use by then."""

    owner: PhasedDispatcher
    backend: Dispatcher
    inner: Handle


class PhasedDispatcher(Dispatcher):
    """prefill and decode: open dispatchers of one group, closed with this one. decode takes the
    steps that only decode and are agreed to have no more tokens than its `max_tokens_per_rank`."""

    def __init__(self, prefill: Dispatcher, decode: Dispatcher) -> None:
        if prefill.combine_form is not decode.combine_form:
            raise DispatchError(
                f"decode={decode.name}: hands results home {decode.combine_form.name}, but "
                f"prefill={prefill.name} {prefill.combine_form.name}: the experts' kernels are set "
                f"up for one form; choose {prefill.name} for both, or backends of one form"
            )
        self.prefill, self.decode = prefill, decode
        self.name = f"prefill={prefill.name},decode={decode.name}"
        self.config = prefill.config
        self.combine_form = prefill.combine_form
        bounds = [d.max_in_flight for d in (prefill, decode) if d.max_in_flight is not None]
        self.max_in_flight = min(bounds, default=None)  # of both: a step's code asks once
        self._use(prefill)

    @classmethod
    def probe(cls, group: Any, config: DispatchConfig) -> Probe:
        return Probe(False, "made of two dispatchers, which are asked apart")

    @classmethod
    def plan(cls, group: Any, config: DispatchConfig) -> BufferPlan:
        """Of its two dispatchers: see `Choice.plan`."""
        raise DispatchError("plan: made of two dispatchers, which are asked apart")

    def set_step_bound(self, max_tokens: int | None, decode_only: bool = False) -> None:
        max_tokens = self.checked_bound(max_tokens)
        few = max_tokens is not None and max_tokens <= self.decode.config.max_tokens_per_rank
        self._use(self.decode if decode_only and few else self.prefill)
        self.in_use.set_step_bound(max_tokens, decode_only)

    def _use(self, backend: Dispatcher) -> None:
        """What differs between the two and is asked for at each layer follows the one in use."""
        self.in_use = backend
        self.quantises, self.graph_safe = backend.quantises, backend.graph_safe

    # -- a layer -------------------------------------------------------------------------------

    def dispatch_start(self, x: Tensor | Fp8Tokens, slots: Tensor, weights: Tensor) -> Handle:
        return _PhasedHandle(self, self.in_use, self.in_use.dispatch_start(x, slots, weights))

    def dispatch_finish(self, handle: Handle) -> Received:
        mine = self._expect("dispatch_finish", handle)
        return mine.backend.dispatch_finish(mine.inner)

    def combine_start(self, handle: Handle, y: Tensor, index: Tensor | None = None) -> None:
        mine = self._expect("combine_start", handle)
        mine.backend.combine_start(mine.inner, y, index)

    def combine_finish(self, handle: Handle) -> Tensor:
        mine = self._expect("combine_finish", handle)
        return mine.backend.combine_finish(mine.inner)

    def close(self) -> None:
        try:
            self.decode.close()
        finally:
            self.prefill.close()

    def _expect(self, call: str, handle: Handle) -> _PhasedHandle:
        if not isinstance(handle, _PhasedHandle) or handle.owner is not self:
            raise HandleError(f"{call}: the handle is not one that this dispatcher made")
        return handle

    # -- state ---------------------------------------------------------------------------------

    @property
    def _both(self) -> dict[str, Dispatcher]:
        return {"prefill": self.prefill, "decode": self.decode}

    @property
    def stats(self) -> DispatchStats:  # type: ignore[override]  # read-only here: made on demand
        """Sums; rows of the last dispatch are those of the backend in use."""
        one, other = self.prefill.stats, self.decode.stats
        last = one if self.in_use is self.prefill else other
        return DispatchStats(
            rows_sent_to_rank=last.rows_sent_to_rank,
            rows_sent_to_node=last.rows_sent_to_node,
            bytes_sent=one.bytes_sent + other.bytes_sent,
            dispatch_bytes=one.dispatch_bytes + other.dispatch_bytes,
            combine_bytes=one.combine_bytes + other.combine_bytes,
            calls=one.calls + other.calls,
        )

    @property
    def notes(self) -> list[str]:
        return [f"{phase}: {note}" for phase, d in self._both.items() for note in d.notes]

    def active_mask(self) -> list[int] | None:
        """[R]: 0 where either leaves a rank out; None where neither has masks."""
        masks = [m for d in self._both.values() if (m := d.active_mask()) is not None]
        return [min(rank) for rank in zip(*masks, strict=True)] if masks else None

    def set_mask(self, rank: int, active: bool) -> None:
        """In both or, with DispatchError, in none: a rank that one still waits for is not out."""
        for phase, backend in self._both.items():
            if backend.active_mask() is None:
                raise DispatchError(f"{phase}: dispatcher {backend.name!r} cannot leave ranks out")
        self.prefill.set_mask(rank, active)
        try:
            self.decode.set_mask(rank, active)
        except DispatchError:
            self.prefill.set_mask(rank, not active)
            raise

    def check_peers(self) -> None:
        """Of both, each at each step: a rank may have been masked in either."""
        self.prefill.check_peers()
        self.decode.check_peers()
