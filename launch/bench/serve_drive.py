"""Driving a load: conversations begun at their times or by so many clients, in one process.

Measures itself: how late calls were sent, how late the event loop was, the share of a core it
used. A signal ends it early with what was done. Knows asyncio; nothing of what calls come to.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from launch.bench.serve_call import CUT, Call, Target, make_call
from launch.bench.serve_load import Conversation, Load
from launch.bench.serve_prompts import PromptMaker

TICK = 0.02  # seconds between two looks at how late the event loop is
_LOOK_SECONDS = 5.0
SOON = 0.002  # a call that is due within this is sent by yielding, not by a timer


@dataclass
class Tally:
    """How far a run has come; what progress shows."""

    sent: int = 0
    ended: int = 0
    failed: int = 0
    tokens: int = 0

    def numbers(self) -> tuple[int, int, int, int]:
        return self.sent, self.ended, self.failed, self.tokens


@dataclass
class Driven:
    """All calls of a run, and what the generator was like. lags: seconds each loop tick was late.
    prompts: what calls carried, where that is to be recorded, in the order of calls. left_out:
    turns that were not asked because one before them failed."""

    calls: list[Call] = field(default_factory=list)
    prompts: list[Any] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)
    left_out: int = 0
    cpu_share: float = 0.0
    seconds: float = 0.0
    interrupted: bool = False
    workers: int = 1


@dataclass(frozen=True)
class Share:
    """Which conversations are this process's: those whose number is `index` modulo `workers`."""

    index: int = 0
    workers: int = 1

    def of(self, conversations: Iterator[Conversation]) -> Iterator[Conversation]:
        return (x for x in conversations if x.number % self.workers == self.index)

    def clients(self, concurrency: int) -> int:
        return len(range(self.index, concurrency, self.workers))


def drive(
    load: Load,
    target: Target,
    maker: PromptMaker,
    tally: Tally,
    *,
    share: Share | None = None,
    start: float | None = None,
    watch: Callable[[], None] = lambda: None,
    keep_prompts: bool = False,
    stop_signal: signal.Signals = signal.SIGINT,
) -> Driven:
    """Do all of it. start: of time.monotonic, the same in all processes; None: now. watch: called
    now and then, to show progress. stop_signal: ends it with what was done."""
    run = _Run(load, target, maker, tally, share or Share(), watch, keep_prompts, stop_signal)
    return _loop(run.run(start))


def look(target: Target) -> None:
    """Ask for the server's models as calls are sent, so that the first call does not wait for what
    a client needs once. What comes of it does not count."""

    async def ask() -> None:
        with contextlib.suppress(TimeoutError, httpx.HTTPError):
            async with asyncio.timeout(_LOOK_SECONDS), target.client() as http:
                await http.get("/v1/models")

    _loop(ask())


def _loop(work: Any) -> Any:
    try:
        import uvloop
    except ImportError:  # Windows
        return asyncio.run(work)
    if threading.current_thread() is not threading.main_thread():
        return uvloop.run(work)
    before = signal.getsignal(signal.SIGINT)
    try:
        return uvloop.run(work)
    finally:  # uvloop leaves a handler of its closed loop, which would swallow the next Ctrl-C
        signal.signal(signal.SIGINT, before)


class _Run:
    def __init__(
        self,
        load: Load,
        target: Target,
        maker: PromptMaker,
        tally: Tally,
        share: Share,
        watch: Callable[[], None],
        keep_prompts: bool,
        stop_signal: signal.Signals,
    ) -> None:
        self._load, self._target, self._maker = load, target, maker
        self._tally, self._share, self._watch = tally, share, watch
        self._keep, self._stop_signal = keep_prompts, stop_signal
        self._driven = Driven()
        self._stop = asyncio.Event()
        self._clock = 0.0

    async def run(self, start: float | None) -> Driven:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):  # not main thread
            loop.add_signal_handler(self._stop_signal, self._interrupt)
        async with self._target.client() as http:  # reads certificates: before the clock runs
            if start is not None:
                await asyncio.sleep(max(0.0, start - time.monotonic()))
            self._clock = time.monotonic() if start is None else start
            cpu = time.process_time()
            ticker = asyncio.create_task(self._tick())
            work = asyncio.create_task(
                self._open(http) if self._load.open_loop else self._closed(http)
            )
            stopped = asyncio.create_task(self._stop.wait())
            await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                work.cancel()
            stopped.cancel()
            ticker.cancel()
            await asyncio.gather(work, stopped, ticker, return_exceptions=True)
            if work.done() and not work.cancelled() and (error := work.exception()) is not None:
                raise error
            driven = self._driven
            driven.seconds = time.monotonic() - self._clock
            driven.cpu_share = (time.process_time() - cpu) / max(driven.seconds, 1e-9)
        return driven

    def _interrupt(self) -> None:
        self._driven.interrupted = True
        asyncio.get_running_loop().remove_signal_handler(self._stop_signal)  # the next one kills
        self._stop.set()

    def _now(self) -> float:
        return time.monotonic() - self._clock

    # ---- when ------------------------------------------------------------------------------

    async def _open(self, http: httpx.AsyncClient) -> None:
        """Each conversation at its time, whatever became of the others."""
        async with asyncio.TaskGroup() as tasks:
            async for conversation in self._at_their_times():
                tasks.create_task(self._talk(http, conversation, conversation.at))

    async def _at_their_times(self) -> AsyncIterator[Conversation]:
        for conversation in self._share.of(self._load.conversations()):
            await self._until(conversation.at or 0.0)
            yield conversation

    async def _until(self, at: float) -> None:
        wait = at - self._now()
        await asyncio.sleep(wait if wait > SOON else 0)

    async def _closed(self, http: httpx.AsyncClient) -> None:
        """So many clients, each with one call in flight until nothing is left."""
        assert self._load.concurrency is not None
        left = self._share.of(self._load.conversations())
        limit = self._load.seconds

        async def client() -> None:
            while limit is None or self._now() < limit:
                conversation = next(left, None)
                if conversation is None:
                    return
                await self._talk(http, conversation, None)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._share.clients(self._load.concurrency)):
                tasks.create_task(client())

    # ---- what ------------------------------------------------------------------------------

    async def _talk(
        self, http: httpx.AsyncClient, conversation: Conversation, due: float | None
    ) -> None:
        """Turn after turn, those of a trace not before their time; it ends with the first that
        fails, and where the time to begin calls is over."""
        said: list[dict[str, Any]] = []
        limit = self._load.seconds
        for number, turn in enumerate(conversation.turns):
            asked = (turn.input_tokens, turn.output_tokens)
            call = Call(conversation.number, number, *asked, due if not number else None)
            if number:
                answered = self._now()
                if limit is not None and max(answered, turn.at or 0.0) > limit:
                    return
                if turn.at is not None:
                    call.due = max(turn.at, answered)
                    call.held = max(0.0, answered - turn.at)
                    await self._until(turn.at)
            prompt = self._maker.of(conversation.number, number, turn)
            if self._target.chat:
                recorded = isinstance(prompt, list)  # messages
                said = prompt if recorded else [*said, {"role": "user", "content": prompt}]
                prompt = said
            self._driven.calls.append(call)
            if self._keep:
                self._driven.prompts.append(prompt)
            self._tally.sent += 1
            try:
                await make_call(http, self._target, call, prompt, self._clock)
            finally:
                self._count(call)
            if not call.good:
                if call.fault != CUT:
                    self._driven.left_out += len(conversation.turns) - number - 1
                return
            said = [*said, {"role": "assistant", "content": call.text}]
            if not self._target.keep_text:
                call.text = ""

    def _count(self, call: Call) -> None:
        if call.fault == CUT:
            return
        self._tally.ended += 1
        self._tally.failed += not call.good
        self._tally.tokens += call.num_output

    async def _tick(self) -> None:
        shown = 0.0
        while True:
            before = time.monotonic()
            await asyncio.sleep(TICK)
            now = time.monotonic()
            self._driven.lags.append(now - before - TICK)
            if now - shown > 0.2:
                shown = now
                self._watch()
