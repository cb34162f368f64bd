"""EngineClient: the front end's side of the wire, in one asyncio loop.

Takes Requests, sends each to the rank the router picks, hands TokenOutputs back in order, aborts,
drains, stops; when a rank is gone it says within a second which one, and ends every stream with
finish_reason "error". Knows token ids; knows nothing of text, HTTP or sockets (`rank_link` has
those). The offline LLM uses it too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

import msgspec

from moeserve import wire
from moeserve.cache.block_hash import block_hashes
from moeserve.errors import InvalidRequest, JobDied, LauncherDied, NotReady, QueueFull, RankDied
from moeserve.fleet import Fleet, LossKind
from moeserve.load_desk import LoadDesk
from moeserve.rank_link import RankLink
from moeserve.rebalancing.desk import RebalanceDesk
from moeserve.request import FinishReason, Request, TokenOutput
from moeserve.router import REQUEST_COST, PrefixIndex, RankLoad, choose_rank
from moeserve.streams import Flight, OutputStream
from moeserve.tracing_desk import TraceDesk
from moeserve.wire_experts import LoadInterval, LoadReport, PlacementTable, RecordingEnded
from moeserve.wire_rebalance import RebalanceReport, RebalanceStats
from moeserve.wire_trace import TraceEnded, TraceSteps

log = logging.getLogger("moeserve.client")

# Seconds between the first sign of a death and the verdict: the cause may come second. While it is
# not clear which rank that was, up to the longer time.
_GRACE, _LONGEST_GRACE = 0.3, 0.9
_LOOK_AGAIN = 0.05


class EngineClient:
    """See the module. Construct, `bind`, then `start` inside the running loop.

    on_ready fires once when all ranks are Ready; on_rank_died once, with whom to blame (a rank, or
    the launcher), after all streams have been ended; on_first_token and on_finished feed the
    metrics. launcher_gone: whether whoever started the ranks, which end with it, is gone.
    """

    def __init__(
        self,
        num_ranks: int,
        *,
        max_queue: int = 512,
        rank_timeout: float = 20.0,
        lockstep_timeout: float = 60.0,
        prefix_cache: bool = True,
        on_ready: Callable[[], None] = lambda: None,
        on_rank_died: Callable[[JobDied], None] = lambda error: None,
        launcher_gone: Callable[[], bool] = lambda: False,
        on_first_token: Callable[[Flight], None] = lambda flight: None,
        on_finished: Callable[[Flight], None] = lambda flight: None,
    ) -> None:
        self.fleet = Fleet(num_ranks)
        self.max_queue = max_queue
        self.lockstep_timeout = lockstep_timeout
        self.draining = False
        self.failed: JobDied | None = None
        self.num_rejected = 0
        self.on_ready, self.on_rank_died = on_ready, on_rank_died
        self._launcher_gone = launcher_gone
        self.on_first_token, self.on_finished = on_first_token, on_finished
        self._prefix_cache = prefix_cache and num_ranks > 1
        self._index = PrefixIndex(num_ranks)
        self._loads = [0] * num_ranks
        self._flights: dict[str, Flight] = {}
        self._finish_times: deque[float] = deque(maxlen=64)
        self._changed = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._verdict: asyncio.TimerHandle | None = None
        self._verdict_due = 0.0  # in the loop's time: then, clear or not
        self._announced_ready = False
        self._stopping = False
        self._link = RankLink(num_ranks, rank_timeout, self._received, self._unreachable)
        self.experts = LoadDesk(num_ranks, self._send, self._info)
        self.rebalancing = RebalanceDesk(self._send, self._rebalance_stats)
        self.traces = TraceDesk(num_ranks, self._send)

    # ---- life ------------------------------------------------------------------------------

    def bind(self, host: str = "127.0.0.1") -> str:
        """Open the port that ranks connect to, on an address or name of this machine."""
        return self._link.bind(host)

    def start(self) -> None:
        """Begin to read; needs the running loop."""
        self._loop = asyncio.get_running_loop()
        self._link.start(self._loop)

    async def wait_ready(self) -> None:
        """Return when every rank is Ready; JobDied if one is lost before."""
        while not self.fleet.all_ready:
            if self.failed is not None:
                raise self.failed
            await self._wait_change()

    async def drain(self, seconds: float) -> bool:
        """Take no more requests; wait for the running ones. False: some had to be cut off."""
        self.draining = True
        deadline = time.monotonic() + seconds
        while self._flights and self.failed is None:
            left = deadline - time.monotonic()
            if left <= 0:
                self.cut("the server stopped before this request had ended")
                return False
            await self._wait_change(left)
        return True

    def cut(self, reason: str) -> None:
        """End every running request with an error and tell the ranks to drop it."""
        ids = list(self._flights)
        for request_id in ids:
            self._end_with_error(request_id, reason, abort=True)

    async def stop(self, seconds: float = 10.0) -> bool:
        """Send Stop to every rank and wait for all Stopped. False: some did not answer in time."""
        self.draining = self._stopping = True
        for rank in range(self.fleet.num_ranks):
            self._send(rank, wire.Stop(drain=False))
        deadline = time.monotonic() + seconds
        while not self.fleet.all_stopped:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            await self._wait_change(left)
        return True

    def close(self) -> None:
        if self._verdict is not None:
            self._verdict.cancel()
        self._link.close()

    # ---- requests --------------------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        return len(self._flights)

    @property
    def failing(self) -> str | None:
        """Why the job is at its end: the verdict, or, while that is being found, what is known."""
        if self.failed is not None:
            return str(self.failed)
        if self.fleet.losses and not self._stopping:
            return "a rank's connection was lost; finding out which rank died"
        return None

    def check_ready(self) -> None:
        """NotReady with the reason, unless requests can be taken now."""
        if (reason := self.failing) is not None:
            raise NotReady(reason)
        if self.draining:
            raise NotReady("the server is shutting down")
        if not self.fleet.all_ready:
            waiting = [x for x in self.fleet.ranks if x.ready is None]
            stages = sorted({x.stage for x in waiting})
            raise NotReady(
                f"the model is loading: {len(waiting)} of {self.fleet.num_ranks} ranks are not "
                f"ready ({', '.join(stages)})"
            )

    def open(self, requests: Sequence[Request]) -> OutputStream:
        """Send requests that belong together: all are taken, or none.

        Raises NotReady, QueueFull (max_queue counts waiting and running ones), InvalidRequest when
        they are more than the queue could ever hold.
        """
        self.check_ready()
        if len(requests) > self.max_queue:
            raise InvalidRequest(
                "n", len(requests), f"must be at most max_queue={self.max_queue} in all of a call"
            )
        if len(self._flights) + len(requests) > self.max_queue:
            raise self.queue_full(len(requests))
        stream = OutputStream(requests, self.abort)
        for request in requests:
            self._submit(request, stream)
        return stream

    async def submit(self, request: Request) -> AsyncIterator[TokenOutput]:
        """Outputs of one request; leaving the loop early aborts it."""
        stream = self.open([request])
        try:
            while outputs := await stream.get():
                for output in outputs:
                    yield output
        finally:
            stream.abort()

    def abort(self, request_ids: Iterable[str], reason: FinishReason = FinishReason.ABORT) -> None:
        """Drop requests; their ranks free the blocks at the next step. Unknown ids are ignored.
        reason: how they count."""
        by_rank: dict[int, list[str]] = {}
        for request_id in request_ids:
            flight = self._flights.get(request_id)
            if flight is not None:
                flight.finish_reason = reason
                by_rank.setdefault(flight.rank, []).append(request_id)
                self._retire(flight)
        for rank, ids in by_rank.items():
            self._send(rank, wire.Abort(tuple(ids), reason))

    def reset_prefix_cache(self) -> None:
        for rank in range(self.fleet.num_ranks):
            self._send(rank, wire.ResetPrefixCache())

    def _rebalance_stats(self) -> RebalanceStats | None:
        stats = self.fleet.ranks[0].stats
        return None if stats is None else stats.rebalance

    def _info(self) -> dict[str, object]:
        """What rank 0 said when it was ready."""
        ready = self.fleet.ranks[0].ready
        return {} if ready is None else ready.info

    def loads(self) -> list[int]:
        """Tokens of the requests in flight, per rank."""
        return list(self._loads)

    def _submit(self, request: Request, stream: OutputStream) -> None:
        num_ranks = self.fleet.num_ranks
        block_size = self.fleet.block_size()
        hashes: Sequence[int] = ()
        if self._prefix_cache:
            hashes = block_hashes(request.prompt_token_ids, block_size, request.cache_salt)
        choice = choose_rank(
            [
                RankLoad(r, self._loads[r], block_size * self._index.prefix_blocks(r, hashes))
                for r in range(num_ranks)
            ]
        )
        rank = choice.rank
        flight = Flight(request, rank, stream, hashes, len(request.prompt_token_ids) + REQUEST_COST)
        self._flights[request.request_id] = flight
        self._index.expect(rank, hashes)
        idle = [r for r in range(num_ranks) if r != rank and self._loads[r] == 0]
        self._loads[rank] += flight.load
        self._send(rank, wire.Submit(request))
        for other in idle:  # they must enter the lockstep too, or this one waits for their tick
            self._send(other, wire.Wake())

    def _retire(self, flight: Flight) -> None:
        if self._flights.pop(flight.request.request_id, None) is None:
            return
        self._loads[flight.rank] -= flight.load
        self._index.unexpect(flight.rank, flight.hashes)
        self._finish_times.append(time.monotonic())
        self.on_finished(flight)
        self._changed.set()

    def _end_with_error(self, request_id: str, reason: str, *, abort: bool) -> None:
        flight = self._flights[request_id]
        flight.finish_reason = FinishReason.ERROR
        self._retire(flight)
        if abort:
            self._send(flight.rank, wire.Abort((request_id,), FinishReason.ERROR))
        flight.stream.put(
            TokenOutput(
                request_id=request_id,
                token_ids=(),
                finish_reason=FinishReason.ERROR,
                error=reason,
                num_cached_tokens=flight.num_cached_tokens,
            )
        )

    def queue_full(self, wanted: int) -> QueueFull:
        """The refusal of so many requests, with the time after which they may fit; counts them."""
        self.num_rejected += wanted
        return QueueFull(len(self._flights), self.max_queue, self._retry_after(wanted))

    def _retry_after(self, wanted: int) -> float:
        """Seconds until enough places are free, from the pace of the last finished requests."""
        times = self._finish_times
        if len(times) < 2:
            return 1.0
        pace = (len(times) - 1) / max(1e-3, time.monotonic() - times[0])
        return min(60.0, max(1.0, wanted / pace))

    # ---- the wire --------------------------------------------------------------------------

    def _send(self, rank: int, message: wire.ToRank) -> None:
        state = self.fleet.ranks[rank]
        if not state.lost and state.stage != "stopped":
            self._link.send(rank, message)

    def _received(self, rank: int, payload: bytes) -> None:
        try:
            message = wire.decode_to_front_end(payload)
        except msgspec.MsgspecError as error:
            reason = f"sent a message that cannot be read: {error}"
            self._lost(rank, reason, LossKind.FAULT)
            return
        self.fleet.heard(rank, message, time.monotonic())
        match message:
            case wire.Outputs():
                for output in message.outputs:
                    self._output(output)
            case LoadInterval() | PlacementTable() | RecordingEnded() | LoadReport():
                self.experts.heard(message)
            case RebalanceReport():
                self.rebalancing.heard(message)
            case TraceSteps() | TraceEnded():
                self.traces.heard(message)
            case wire.CacheEvents():
                self._index.changed(rank, message.added, message.removed, message.cleared)
            case wire.Hello() if message.size != self.fleet.num_ranks:
                reason = f"belongs to a job of {message.size} ranks, not {self.fleet.num_ranks}"
                self._lost(rank, reason, LossKind.FAULT)
            case wire.Ready():
                self._changed.set()
                if self.fleet.all_ready and not self._announced_ready:
                    self._announced_ready = True
                    self.on_ready()
            case wire.Fatal():
                log.debug("rank %d: %s", rank, message.reason)  # its launcher says it aloud
                self._changed.set()  # `stop` waits for it no longer
                self._schedule_verdict()
            case wire.Stopped():
                self._changed.set()

    def _output(self, output: TokenOutput) -> None:
        flight = self._flights.get(output.request_id)
        if flight is None:
            return  # aborted, or ended by a rank's death, meanwhile
        now = time.time()
        if output.token_ids:
            flight.num_output_tokens += len(output.token_ids)
            flight.load += len(output.token_ids)
            self._loads[flight.rank] += len(output.token_ids)
            flight.last_token_at = now
            flight.num_cached_tokens = output.num_cached_tokens
            if flight.first_token_at is None:
                flight.first_token_at = now
                self.on_first_token(flight)
        if output.finish_reason is not None:
            flight.finish_reason = output.finish_reason
            flight.num_cached_tokens = output.num_cached_tokens
            self._retire(flight)
        flight.stream.put(output)

    # ---- death -----------------------------------------------------------------------------

    def _unreachable(self, rank: int) -> None:
        state = self.fleet.ranks[rank]
        # Never connected yet is no loss: such a rank is known to be absent.
        if state.stage not in ("absent", "stopped") and state.lost is None:
            reason = "its connection was lost (process ended or host unreachable)"
            self._lost(rank, reason, LossKind.SILENT)

    def _lost(self, rank: int, reason: str, kind: LossKind) -> None:
        self.fleet.lost(rank, reason, kind)
        self._changed.set()
        self._schedule_verdict()

    def _schedule_verdict(self) -> None:
        if self._stopping:
            return  # whoever was told to stop may go
        if self._verdict is None and self._loop is not None and self.failed is None:
            self._verdict_due = self._loop.time() + _LONGEST_GRACE
            self._verdict = self._loop.call_later(_GRACE, self._pronounce)

    def _pronounce(self) -> None:
        assert self._loop is not None
        if self._stopping:
            return  # told to stop since
        if self._launcher_gone():
            self.failed = LauncherDied()
        elif self.fleet.is_clear or self._loop.time() >= self._verdict_due:
            self.failed = RankDied(*self.fleet.first_cause())
        else:
            self._verdict = self._loop.call_later(_LOOK_AGAIN, self._pronounce)
            return
        for request_id in list(self._flights):
            self._end_with_error(request_id, str(self.failed), abort=False)
        self.experts.lost(str(self.failed))
        self.rebalancing.lost(str(self.failed))
        self.traces.lost(str(self.failed))
        self._changed.set()
        self.on_rank_died(self.failed)

    async def _wait_change(self, seconds: float | None = None) -> None:
        self._changed.clear()
        try:
            await asyncio.wait_for(self._changed.wait(), seconds)
        except TimeoutError:
            return
