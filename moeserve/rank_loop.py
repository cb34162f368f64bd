"""One rank as a process: connect to the front end, build the engine, step until all agree to stop.

The contract with whoever starts it (launch):

- `run_rank(config, group, front_end)` blocks. `front_end` is the address of the front end's ROUTER
  socket (tcp://host:port). Process groups exist already; this function does not destroy them.
- It says Hello, Loading..., Ready, then steps. It returns when all ranks agreed to stop (Stop
  messages of the front end; Ctrl-C is the front end's business: ranks should ignore SIGINT).
- ConfigError: a setting or file is wrong, on all ranks alike where they agreed on it. EngineFailed:
  a step failed in a way that peers may not survive; the process should exit at once, so that
  peers' collectives end. Both are told to the front end (Fatal) before they are raised.

Knows: the wire, when to wait, what to report when. Knows nothing of what a step does.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from types import TracebackType

import zmq

from ep.group import EPGroup
from ep.peer_loss import is_lost_peer
from moeserve import wire, wire_experts, wire_trace
from moeserve.config import ServeConfig
from moeserve.engine import Engine
from moeserve.errors import InvalidRequest, MoeserveError, NotReady
from moeserve.request import FinishReason, TokenOutput
from moeserve.wire_rebalance import Rebalance

IDLE_WAIT = 0.02  # seconds between locksteps when no rank has work; a message ends the wait
MOVING_WAIT = 0.002  # the same while experts move, which goes on with each lockstep
ALONE_WAIT = 0.5  # the same for a single rank, which nobody waits for
STATS_EVERY = 1.0  # seconds at most
LOAD_EVERY = 5.0  # seconds between reports of expert load (they are longer)
PROGRESS_EVERY = 0.2
LAST_WORDS = 2000  # milliseconds to deliver what was said before the end

Builder = Callable[[ServeConfig, EPGroup, Callable[[str, int, int], None]], Engine]


def run_rank(
    config: ServeConfig, group: EPGroup, front_end: str, builder: Builder | None = None
) -> None:
    """See the module. builder: stands in for `build_engine` in tests."""
    if builder is None:
        from moeserve.build import build_engine

        builder = build_engine
    with RankSocket(front_end, group.rank) as line:
        try:
            line.send(wire.Hello(group.rank, group.size, os.getpid(), socket.gethostname()))
            line.loading("rendezvous", 0, 0)
            engine = builder(config, group, line.loading)
            scheduler = engine.scheduler
            if (placement := engine.take_placement()) is not None:
                line.send(placement)
            line.send(
                wire.Ready(
                    rank=group.rank,
                    block_size=scheduler.cache.block_size,
                    num_blocks=scheduler.cache.pool.num_blocks,
                    max_model_len=scheduler.limits.max_model_len,
                    max_num_sequences=scheduler.limits.max_num_sequences,
                    info=engine.info,
                )
            )
            RankLoop(engine, line, config.engine.lockstep_timeout).run()
            line.send(wire.Stopped(group.rank))
            engine.close()
        except BaseException as error:
            line.send(wire.Fatal(group.rank, _reason(error), is_lost_peer(error)))
            raise


class RankSocket:
    """The DEALER socket of one rank. Used by one thread; sending never blocks."""

    def __init__(self, front_end: str, rank: int) -> None:
        self.rank = rank
        self._last_progress = ("", 0.0)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.IDENTITY, wire.rank_identity(rank))
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.LINGER, LAST_WORDS)
        self._socket.connect(front_end)

    def send(self, message: wire.ToFrontEnd) -> None:
        self._socket.send(wire.encode(message))

    def receive(self, wait: float) -> list[wire.ToRank]:
        """All messages that are here; if none is, those that come within `wait` seconds."""
        messages: list[wire.ToRank] = []
        if wait > 0 and not self._socket.poll(int(wait * 1000)):
            return messages
        while True:
            try:
                payload = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            messages.append(wire.decode_to_rank(payload))

    def loading(self, stage: str, done: int, total: int) -> None:
        """Report progress, not too often within a stage."""
        last_stage, last_time = self._last_progress
        now = time.monotonic()
        if stage == last_stage and done < total and now - last_time < PROGRESS_EVERY:
            return
        self._last_progress = (stage, now)
        self.send(wire.Loading(self.rank, stage, done, total))

    def __enter__(self) -> RankSocket:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._socket.close()
        self._context.term()  # waits LAST_WORDS at most for what is unsent


class RankLoop:
    """receive -> engine.step -> send, until the engine says that all ranks stopped."""

    def __init__(self, engine: Engine, line: RankSocket, lockstep_timeout: float = 60.0) -> None:
        """lockstep_timeout: what the front end calls a stall; it must hear from us more often."""
        self._engine, self._line = engine, line
        self._rank = engine.group.rank
        self._refused: list[TokenOutput] = []
        self._stats_every = min(STATS_EVERY, lockstep_timeout / 4)
        self._next_stats = 0.0
        self._next_load = 0.0
        self._was_idle = True

    def run(self) -> None:
        engine = self._engine
        pause = min(ALONE_WAIT if engine.group.size == 1 else IDLE_WAIT, self._stats_every)
        while not engine.stopped:
            wait = pause if engine.idle and not engine.has_work else 0.0
            if engine.is_moving:
                wait = min(wait, MOVING_WAIT)
            for message in self._line.receive(wait):
                self._handle(message)
            try:
                outputs = engine.step()
            except Exception as error:  # EngineFailed, or what a broken connection raises
                # A lost peer's name is the better reason; the front end knows it in a moment.
                if not is_lost_peer(error):
                    self._fail_requests(engine.failure or _reason(error))
                raise
            self._report(outputs)

    def _handle(self, message: wire.ToRank) -> None:
        engine = self._engine
        match message:
            case wire.Submit(request):
                try:
                    engine.add_request(request)
                except (InvalidRequest, NotReady) as error:
                    self._refused.append(
                        TokenOutput(
                            request_id=request.request_id,
                            token_ids=(),
                            finish_reason=FinishReason.ERROR,
                            error=str(error),
                        )
                    )
            case wire.Abort(request_ids, end):
                engine.abort(request_ids, end)
            case wire.Stop(drain):
                engine.request_stop(drain)
            case wire.ResetPrefixCache():
                engine.reset_prefix_cache()
            case wire_experts.StartRecording():
                engine.start_recording(message.recording, message.interval_steps, message.max_steps)
            case wire_experts.StopRecording(recording):
                engine.stop_recording(recording)
            case wire_experts.AskLoad(ask):
                self._line.send(engine.load_report(ask))
            case Rebalance():
                engine.ask_rebalance(message)
            case wire_trace.StartTrace(trace, steps):
                engine.tracer.start(trace, steps)
            case wire_trace.StopTrace(trace):
                engine.tracer.stop(trace)
            case wire.Wake():
                pass  # it has ended the wait

    def _report(self, outputs: list[TokenOutput]) -> None:
        if self._refused:
            outputs = [*self._refused, *outputs]
            self._refused = []
        if outputs:
            self._line.send(wire.Outputs(self._rank, tuple(outputs)))
        events = self._engine.take_cache_events()
        if events is not None:
            self._line.send(events)
        for report in self._engine.take_load_reports():
            self._line.send(report)
        for spans in self._engine.tracer.take_reports():
            self._line.send(spans)
        if (placement := self._engine.take_placement()) is not None:
            self._line.send(placement)  # before the report that says why
        for answer in self._engine.take_rebalance_reports():
            self._line.send(answer)
        now = time.monotonic()
        fell_idle = self._engine.idle and not self._was_idle
        self._was_idle = self._engine.idle
        if now >= self._next_stats or fell_idle:
            with_load = now >= self._next_load or fell_idle
            self._line.send(self._engine.stats(with_load))
            self._next_stats = now + self._stats_every
            if with_load:
                self._next_load = now + LOAD_EVERY

    def _fail_requests(self, reason: str) -> None:
        """Nobody is left waiting: all requests of this rank end with an error."""
        self._engine.scheduler.fail_all(reason)
        outputs = [*self._refused, *self._engine.scheduler.take_outbox()]
        if outputs:
            self._line.send(wire.Outputs(self._rank, tuple(outputs)))


def _reason(error: BaseException) -> str:
    if isinstance(error, MoeserveError):
        return str(error)
    return f"{type(error).__name__}: {error}"
