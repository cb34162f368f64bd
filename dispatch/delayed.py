"""DelayedDispatcher: a slow network for a dispatcher that has a fast one. A teaching aid.

To see, on a laptop, what overlap hides: rows and results are handed out no sooner than a stated
time after they were sent, and the wait is counted. With a clock of its own a test can assert whole
schedules exactly; with the real one a benchmark measures them. Not in the registry: nobody serves
with it.

What it does not model: two transfers in flight do not slow each other down.

Shape letters: T tokens on this rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable
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
class _DelayedHandle:
    owner: DelayedDispatcher
    inner: Handle
    num_tokens: int
    ready: float  # by the owner's clock: when what was sent last may be handed out


class DelayedDispatcher(Dispatcher):
    """inner: whose rows these are. Each way takes latency + T * per_token seconds from the call
    that starts it, T the tokens of this rank, or as long as inner takes, if that is more. clock
    (seconds) and sleep: the real ones, or a test's own."""

    def __init__(
        self,
        inner: Dispatcher,
        latency: float,
        per_token: float = 0.0,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if latency < 0 or per_token < 0:
            raise DispatchError(f"latency={latency}, per_token={per_token}: must be at least 0")
        self.inner, self.latency, self.per_token = inner, latency, per_token
        self.name = f"{inner.name}_delayed"
        self.config, self.combine_form = inner.config, inner.combine_form
        self.max_in_flight = inner.max_in_flight
        self.waited = 0.0  # seconds of sleep so far: what nothing covered
        self._clock, self._sleep = clock, sleep

    @classmethod
    def probe(cls, group: Any, config: DispatchConfig) -> Probe:
        return Probe(False, "made around another dispatcher, which is asked instead")

    @classmethod
    def plan(cls, group: Any, config: DispatchConfig) -> BufferPlan:
        raise DispatchError("plan: made around another dispatcher, which is asked instead")

    # -- a layer -------------------------------------------------------------------------------

    def set_step_bound(self, max_tokens: int | None, decode_only: bool = False) -> None:
        self.inner.set_step_bound(max_tokens, decode_only)

    def dispatch_start(self, x: Tensor | Fp8Tokens, slots: Tensor, weights: Tensor) -> Handle:
        began = self._clock()
        inner = self.inner.dispatch_start(x, slots, weights)  # it looks at the arguments
        ready = began + self._takes(x.shape[0])
        return _DelayedHandle(self, inner, x.shape[0], ready)

    def dispatch_finish(self, handle: Handle) -> Received:
        mine = self._expect("dispatch_finish", handle)
        received = self.inner.dispatch_finish(mine.inner)
        self._wait(mine)
        return received

    def combine_start(self, handle: Handle, y: Tensor, index: Tensor | None = None) -> None:
        mine = self._expect("combine_start", handle)
        ready = self._clock() + self._takes(mine.num_tokens)
        self.inner.combine_start(mine.inner, y, index)
        mine.ready = ready

    def combine_finish(self, handle: Handle) -> Tensor:
        mine = self._expect("combine_finish", handle)
        total = self.inner.combine_finish(mine.inner)
        self._wait(mine)
        return total

    def close(self) -> None:
        self.inner.close()

    # -- state: inner's ------------------------------------------------------------------------

    @property
    def quantises(self) -> bool:  # type: ignore[override]  # read-only here, as all below
        return self.inner.quantises

    @property
    def stats(self) -> DispatchStats:  # type: ignore[override]
        return self.inner.stats

    @property
    def notes(self) -> list[str]:
        slow = f"each way takes {self.latency:g} s + {self.per_token:g} s a token: for show"
        return [*self.inner.notes, slow]

    def active_mask(self) -> list[int] | None:
        return self.inner.active_mask()

    def set_mask(self, rank: int, active: bool) -> None:
        self.inner.set_mask(rank, active)

    def check_peers(self) -> None:
        self.inner.check_peers()

    # -- parts ---------------------------------------------------------------------------------

    def _takes(self, num_tokens: int) -> float:
        return self.latency + num_tokens * self.per_token

    def _wait(self, handle: _DelayedHandle) -> None:
        left = handle.ready - self._clock()
        if left > 0:
            self._sleep(left)
            self.waited += left

    def _expect(self, call: str, handle: Handle) -> _DelayedHandle:
        if not isinstance(handle, _DelayedHandle) or handle.owner is not self:
            raise HandleError(f"{call}: the handle is not one that this dispatcher made")
        return handle
