"""LoadDesk: the front end's hold on expert load: one recording at a time, and questions to ranks.

Lives in the client's event loop. Knows wire messages and who has answered. Knows nothing of
sockets or HTTP; sums are made by `collector`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

from ep.recording import ExpertRecording
from moeserve import wire
from moeserve.collector import JobLoad, RecordingCollector, experts_of, recording_info
from moeserve.errors import EngineFailed, InvalidRequest, MoeserveError, NotReady
from moeserve.wire_experts import AskLoad, FromRank, LoadReport, StartRecording, StopRecording

INTERVAL_STEPS = 64
MAX_INTERVAL_STEPS = 1 << 20
ANSWER_SECONDS = 10.0  # ranks answer between two steps


class RecordingConflict(MoeserveError):
    """HTTP 409: a recording runs already, or there is none."""


def check_recording(interval_steps: int, max_steps: int) -> None:
    """InvalidRequest, by name."""
    if not 1 <= interval_steps <= MAX_INTERVAL_STEPS:
        raise InvalidRequest("interval_steps", interval_steps, f"must be 1 to {MAX_INTERVAL_STEPS}")
    if not 0 <= max_steps < 1 << 62:
        raise InvalidRequest("max_steps", max_steps, "must be at least 1, or 0 for no end")


class LoadDesk:
    """send(rank, message) reaches a rank; info() is what rank 0 said of itself when ready."""

    def __init__(
        self,
        num_ranks: int,
        send: Callable[[int, wire.ToRank], None],
        info: Callable[[], dict[str, Any]],
    ) -> None:
        self._num_ranks, self._send, self._info = num_ranks, send, info
        self._number = 0
        self._max_steps = 0
        self._started = 0.0
        self._collector: RecordingCollector | None = None  # of the last recording
        self._fault: str | None = None  # why it cannot be had
        self._asks = 0
        self._answers: dict[int, dict[int, LoadReport]] = {}
        self._changed = asyncio.Event()
        self._lost: str | None = None

    # -- recording -----------------------------------------------------------------------------

    @property
    def status(self) -> str:
        """none | recording | finished | failed. Of a recording that ended by itself: finished."""
        if self._collector is None:
            return "none"
        if self._fault is not None:
            return "failed"
        if self._collector.ended:
            return "finished"
        return "recording" if self._lost is None else "failed"

    @property
    def number(self) -> int:
        """Of the last recording, from 1."""
        return self._number

    @property
    def cut_short(self) -> str | None:
        """Why the last recording ended before it was told to; None where it did not."""
        return self._lost if self.status == "failed" else None

    def start(self, interval_steps: int = INTERVAL_STEPS, max_steps: int = 0) -> None:
        """Begin a recording at the next step that all ranks agree on; the last one is forgotten.
        max_steps: end by itself after so many steps that had tokens; 0: at `stop`."""
        check_recording(interval_steps, max_steps)
        if self.status == "recording":
            raise RecordingConflict(
                f"recording {self._number} runs ({self._progress()}); stop it first: "
                "POST /experts/recording/stop"
            )
        self._number += 1
        self._max_steps, self._started, self._fault = max_steps, time.time(), None
        info = recording_info(self._info(), self._num_ranks, interval_steps, self._started)
        self._collector = RecordingCollector(self._number, info, experts_of(self._info()))
        message = StartRecording(self._number, interval_steps, max_steps)
        for rank in range(self._num_ranks):
            self._send(rank, message)

    async def stop(self, seconds: float = ANSWER_SECONDS) -> ExpertRecording:
        """End the recording, or take the one that has ended; it can be taken again until the next
        start. Of a job that has ended: what all ranks had told by then (`cut_short` says why).
        RecordingConflict: there is none. NotReady: ranks have not answered in time. EngineFailed:
        what ranks told does not go together."""
        collector = self._collector
        if collector is None:
            raise RecordingConflict("no recording was started: POST /experts/recording/start")
        if self.status == "recording":
            for rank in range(self._num_ranks):
                self._send(rank, StopRecording(self._number))
            await self._until(lambda: self.status != "recording", seconds)
        if self._fault is not None:
            raise EngineFailed(self._fault)
        return await asyncio.to_thread(collector.result)  # large ones take their time

    async def ended(self, hurry: Callable[[], bool], look_every: float = 0.1) -> None:
        """Return when no recording runs, or hurry() is true; that is asked every so many
        seconds."""
        while self.status == "recording" and not hurry():
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), look_every)

    def state(self) -> dict[str, Any]:
        """The recording as plain data."""
        state: dict[str, Any] = {"status": self.status}
        collector = self._collector
        if collector is not None:
            state |= {
                "recording": self._number,
                "started_at": collector.info.started_at,
                "interval_steps": collector.info.interval_steps,
                "max_steps": self._max_steps,
                "num_steps": collector.num_steps,
                "num_intervals": collector.num_intervals,
                "num_tokens": collector.num_tokens,
                "bytes": collector.nbytes,
            }
        if self.status == "failed":
            state["reason"] = self._fault or self._lost
        return state

    # -- questions -----------------------------------------------------------------------------

    async def load(self, seconds: float = ANSWER_SECONDS) -> JobLoad:
        """The load of all ranks now. NotReady: not all have answered in time."""
        self._asks += 1
        number = self._asks
        answers = self._answers[number] = {}
        try:
            for rank in range(self._num_ranks):
                self._send(rank, AskLoad(number))
            await self._until(lambda: len(answers) == self._num_ranks, seconds)
        finally:
            del self._answers[number]
        return JobLoad.of(answers.values(), self._num_ranks)

    # -- the wire ------------------------------------------------------------------------------

    def heard(self, message: FromRank) -> None:
        if isinstance(message, LoadReport):
            if message.ask in self._answers:
                self._answers[message.ask][message.rank] = message
        elif self._collector is not None and message.recording == self._number:
            try:
                self._collector.heard(message)
            except (MoeserveError, ValueError) as error:
                self._fault = str(error)
        self._changed.set()

    def lost(self, reason: str) -> None:
        """The job ends: nobody waits any longer."""
        self._lost = reason
        self._changed.set()

    async def _until(self, done: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            if self._lost is not None:
                raise NotReady(self._lost)
            left = deadline - time.monotonic()
            if left <= 0:
                raise NotReady(f"not every rank has answered within {seconds:g} s")
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), left)
            except TimeoutError:
                continue

    def _progress(self) -> str:
        assert self._collector is not None
        return f"{self._collector.num_steps} steps so far"
