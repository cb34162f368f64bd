"""TraceDesk: the front end's hold on traces: one at a time, asked of all ranks, awaited.

Lives in the client's event loop. Knows wire messages and who has answered. Knows nothing of
sockets or HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

from moeserve import wire
from moeserve.errors import InvalidRequest, MoeserveError, NotReady
from moeserve.tracing_job import JobTrace, TraceCollector
from moeserve.wire_trace import MAX_TRACE_STEPS, FromRank, StartTrace, StopTrace

MAX_BYTES = 256 << 20  # of spans, all ranks: a trace that gets there ends early
MAX_SECONDS = 600.0
ANSWER_SECONDS = 10.0  # ranks answer between two steps
LOOK_EVERY = 0.1


class TraceConflict(MoeserveError):
    """HTTP 409: a trace is being taken already."""


def check_trace(steps: int, seconds: float) -> None:
    """InvalidRequest, by name."""
    if not 1 <= steps <= MAX_TRACE_STEPS:
        raise InvalidRequest("steps", steps, f"must be 1 to {MAX_TRACE_STEPS}")
    if not 0 < seconds <= MAX_SECONDS:
        raise InvalidRequest("seconds", seconds, f"must be above 0, {MAX_SECONDS:g} at most")


class TraceDesk:
    """send(rank, message) reaches a rank."""

    def __init__(self, num_ranks: int, send: Callable[[int, wire.ToRank], None]) -> None:
        self._num_ranks, self._send = num_ranks, send
        self._number = 0
        self._collector: TraceCollector | None = None  # of the trace being taken
        self._changed = asyncio.Event()
        self._lost: str | None = None
        self._stopped = False  # by whoever called `stop`

    def state(self) -> dict[str, Any]:
        """As plain data."""
        if self._collector is None:
            return {"status": "none", "traces": self._number}
        return {
            "status": "tracing",
            "trace": self._number,
            "num_steps": self._collector.num_steps,
            "wanted_steps": self._collector.wanted_steps,
            "bytes": self._collector.nbytes,
        }

    def stop(self) -> None:
        """End the trace that is being taken, with the steps it has; whoever awaits it gets them.
        TraceConflict: there is none."""
        if self._collector is None:
            raise TraceConflict("no trace is being taken: POST /debug/trace")
        self._stopped = True
        self._changed.set()

    async def take(
        self, steps: int, seconds: float, hurry: Callable[[], str | None] = lambda: None
    ) -> JobTrace:
        """Trace the next `steps` steps that have tokens, on all ranks, from a step that they agree
        on. Whatever comes first ends it: the steps, so many seconds, hurry() (a reason, or None),
        room; then it is cut short, as it says. So it is where a rank dies, if all had told
        something by then; else NotReady. TraceConflict: one is being taken."""
        check_trace(steps, seconds)
        if self._collector is not None:
            raise TraceConflict(
                f"trace {self._number} is being taken ({self._collector.num_steps} of "
                f"{self._collector.wanted_steps} steps so far); wait for its end"
            )
        self._number += 1
        number, self._stopped = self._number, False
        collector = self._collector = TraceCollector(number, self._num_ranks, steps)
        try:
            self._tell(StartTrace(number, steps))
            reason = await self._end_of(collector, seconds, hurry)
            if reason is not None and self._lost is None:
                self._tell(StopTrace(number))
                self._stopped = False
                late = await self._end_of(collector, ANSWER_SECONDS, lambda: None)
                if late is not None and self._lost is None:
                    ranks = ", ".join(map(str, collector.silent[:4]))
                    reason = f"{reason}; not every rank has answered (missing: {ranks})"
            if self._lost is not None and not collector.ended:
                if not collector.num_steps:
                    raise NotReady(self._lost)
                reason = self._lost
            return await asyncio.to_thread(collector.result, reason)
        except asyncio.CancelledError:  # whoever asked has left
            self._tell(StopTrace(number))
            raise
        finally:
            self._collector = None

    def heard(self, message: FromRank) -> None:
        if self._collector is not None and message.trace == self._number:
            self._collector.heard(message)
            self._changed.set()

    def lost(self, reason: str) -> None:
        """The job ends: nobody waits any longer."""
        self._lost = reason
        self._changed.set()

    async def _end_of(
        self, collector: TraceCollector, seconds: float, hurry: Callable[[], str | None]
    ) -> str | None:
        """None: it has ended by itself. Else why it is to end now."""
        deadline = time.monotonic() + seconds
        while not collector.ended:
            if self._lost is not None:
                return self._lost
            if self._stopped:
                return "it was told to stop"
            if (reason := hurry()) is not None:
                return reason
            left = deadline - time.monotonic()
            if left <= 0:
                return (
                    f"{collector.wanted_steps} steps with tokens did not come in {seconds:g} s"
                    if collector.num_steps
                    else f"no step had tokens in {seconds:g} s"
                )
            if collector.nbytes > MAX_BYTES:
                return f"more than {MAX_BYTES >> 20} MiB of spans"
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), min(left, LOOK_EVERY))
        return None

    def _tell(self, message: StartTrace | StopTrace) -> None:
        for rank in range(self._num_ranks):
            self._send(rank, message)
