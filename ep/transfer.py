"""Bundles of experts from rank to rank, in the background of serving (pyzmq, two threads a rank).

Pull: the destination asks a source for pieces of a bundle and writes them into its staging buffer.
With the first piece comes a digest of the whole bundle, which the destination compares with that of
what lies in its buffer. A source (`ep.bundle_source`) serves one batch of one plan, answers "not
yet" to those who are ahead of it and refuses those who are behind. Nothing here blocks the caller:
`fetch` returns a `Staging`, which the caller looks at when it likes.

Knows: bytes of (layer, local slot), addresses, deadlines, a rate. Knows nothing of what the bytes
mean, of placements or of when they are put to use.
"""

from __future__ import annotations

import enum
import hmac
import queue
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, count, zip_longest
from typing import Any

import numpy as np
import torch
import zmq
from torch import Tensor

from ep.bundle_source import (
    ANSWER,
    DIGEST_BYTES,
    NO_BATCH,
    PIECE_BYTES,
    REQUEST,
    BundleSource,
    Opened,
    ReadBundle,
    Said,
    Socket,
    digest_of,
    sign,
)

PIECES_IN_FLIGHT = 4  # of one destination
ASK_AGAIN_SECONDS = 0.01  # after "not yet"
_TICK = 50  # milliseconds between looks at deadlines and at `cancel`


class Trouble(enum.IntEnum):
    """Why a batch could not be fetched: small numbers, which ranks can put in their votes."""

    NONE = 0
    DEADLINE = 1  # the batch took too long
    SILENT = 2  # a source did not answer for too long
    CHECKSUM = 3  # what arrived is not what was sent
    STALE = 4  # a source serves another plan by now
    SIZE = 5  # a source's bundle has another size
    BROKEN = 6  # an error of the program


class TransferError(RuntimeError):
    """A batch could not be fetched: `trouble` says of which kind, the text says the rest."""

    def __init__(self, trouble: Trouble, text: str) -> None:
        self.trouble = trouble
        super().__init__(text)


@dataclass(frozen=True)
class TransferLimits:
    """batch_seconds: from `fetch` to the last verified byte. silence_seconds: of one source while
    it is asked. max_rate: bytes a second that come in, None for as fast as it goes."""

    batch_seconds: float = 60.0
    silence_seconds: float = 10.0
    max_rate: float | None = None


@dataclass(frozen=True)
class Wanted:
    """One bundle: name is the caller's; slot is local to the rank `source`."""

    name: Any
    layer: int
    source: int
    slot: int
    num_bytes: int


class Staging:
    """One batch on its way. `ready` and `trouble` change once, on the fetching thread."""

    def __init__(self, plan: int, batch: int, wanted: tuple[Wanted, ...], buffer: Tensor) -> None:
        self.plan, self.batch, self.wanted = plan, batch, wanted
        self.trouble = Trouble.NONE
        self.reason = ""
        self.bytes_fetched = 0
        self._buffer = buffer
        self._ready = threading.Event()
        self._cancelled = threading.Event()
        self._bundles: dict[Any, Tensor] = {}
        start = 0
        for item in wanted:
            self._bundles[item.name] = buffer[start : start + item.num_bytes]
            start += item.num_bytes

    @property
    def ready(self) -> bool:
        """Every bundle lies here and has been verified."""
        return self._ready.is_set()

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def cancel(self) -> None:
        self._cancelled.set()

    def bundle(self, name: Any) -> Tensor:
        """uint8, in the staging buffer. Only once `ready`."""
        assert self.ready, "a bundle that is still on its way"
        return self._bundles[name]

    # -- the fetching thread's side --------------------------------------------------------

    def place(self, item: Wanted) -> Tensor:
        return self._bundles[item.name]

    def done(self) -> None:
        self._ready.set()

    def failed(self, trouble: Trouble, reason: str) -> None:
        self.reason, self.trouble = reason, trouble


class Transfer:
    """One rank's end of all transfers: it serves what others ask and fetches what it is told to.

    host: the address to bind, of the interface on which the ranks meet; `address` tells the port
    that was found, `connect` names those of all ranks. read gives the bytes of this rank's slots;
    it is called on other threads while the model runs. secret: the same on all ranks.
    """

    def __init__(self, rank: int, host: str, secret: bytes, read: ReadBundle) -> None:
        self.rank, self._secret, self._read = rank, secret, read
        self._context: zmq.Context[Socket] = zmq.Context()
        self._closed = threading.Event()
        self._source = BundleSource(self._context, host, secret, read, self._closed)
        self._jobs: queue.SimpleQueue[tuple[Staging, TransferLimits] | None] = queue.SimpleQueue()
        self._peers: list[str] = []
        self._threads = [
            threading.Thread(target=self._source.run, name="experts-serve", daemon=True),
            threading.Thread(target=self._fetch_all, name="experts-fetch", daemon=True),
        ]
        self._threads[0].start()

    @property
    def address(self) -> str:
        return self._source.address

    @property
    def num_refused(self) -> int:
        """Requests that were not signed by this job: strangers, or damaged on their way."""
        return self._source.num_refused

    def connect(self, addresses: Iterable[str]) -> None:
        """Where all ranks are, in order of rank; once, before the first `fetch`."""
        self._peers = list(addresses)
        self._threads[1].start()

    def serve(self, plan: int, batch: int, layers: Iterable[int]) -> None:
        """From now on answer for these layers to those who say (plan, batch), and nobody else."""
        self._source.opened = Opened(plan, batch, frozenset(layers))

    def stop_serving(self, plan: int) -> None:
        """Refuse whoever still asks for this plan or an earlier one."""
        self._source.opened = Opened(plan, NO_BATCH, frozenset())

    def fetch(
        self,
        plan: int,
        batch: int,
        wanted: Iterable[Wanted],
        buffer: Tensor,
        limits: TransferLimits,
    ) -> Staging:
        """Begin to fetch a batch into buffer (uint8, large enough). One batch after the other."""
        staging = Staging(plan, batch, tuple(wanted), buffer)
        self._jobs.put((staging, limits))
        return staging

    def close(self) -> None:
        self._closed.set()
        self._jobs.put(None)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(5)
        self._context.destroy(linger=0)

    # -- the fetching thread ---------------------------------------------------------------

    def _fetch_all(self) -> None:
        sockets: dict[int, Socket] = {}
        nonces = count(1)
        while (job := self._jobs.get()) is not None and not self._closed.is_set():
            staging, limits = job
            try:
                _Fetch(self, staging, limits, sockets, nonces).run()
                if not staging.cancelled:
                    staging.done()
            except TransferError as error:
                staging.failed(error.trouble, str(error))
            except Exception as error:
                staging.failed(Trouble.BROKEN, f"{type(error).__name__}: {error}")
            del job, staging  # the buffer is the caller's
        for socket in sockets.values():
            socket.close(linger=0)

    def _socket(self, source: int, sockets: dict[int, Socket]) -> Socket:
        if source not in sockets:
            socket = self._context.socket(zmq.DEALER)
            socket.set(zmq.LINGER, 0)
            socket.set(zmq.IMMEDIATE, 0)
            socket.connect(self._peers[source])
            sockets[source] = socket
        return sockets[source]


@dataclass(eq=False)
class _Piece:
    item: Wanted
    offset: int
    length: int
    not_before: float = 0.0
    asked: float = 0.0


@dataclass
class _Arrival:
    """A bundle whose pieces come in: what is missing, and the digest it must have."""

    missing: int
    digest: bytes = b""


class _Fetch:
    """One batch: copies within the rank first, then pieces from all sources in turn."""

    def __init__(
        self,
        transfer: Transfer,
        staging: Staging,
        limits: TransferLimits,
        sockets: dict[int, Socket],
        nonces: Any,
    ) -> None:
        self._transfer, self._staging, self._limits = transfer, staging, limits
        self._sockets, self._nonces = sockets, nonces
        self._deadline = time.monotonic() + limits.batch_seconds
        self._next_send = 0.0  # when the rate allows the next piece
        self._asked: dict[int, _Piece] = {}  # by nonce
        self._arrivals: dict[Any, _Arrival] = {}

    def run(self) -> None:
        remote: dict[int, list[_Piece]] = {}
        for item in self._staging.wanted:
            if item.source == self._transfer.rank:
                self._copy(item)
                continue
            pieces = _pieces(item)
            self._arrivals[item.name] = _Arrival(len(pieces))
            remote.setdefault(item.source, []).extend(pieces)
        turns = chain.from_iterable(zip_longest(*remote.values()))
        waiting = deque(piece for piece in turns if piece is not None)
        poller = zmq.Poller()
        for source in remote:
            poller.register(self._transfer._socket(source, self._sockets), zmq.POLLIN)
        while waiting or self._asked:
            self._check_time()
            if self._staging.cancelled or self._transfer._closed.is_set():
                return
            pause = self._ask(waiting)
            for socket, _ in poller.poll(pause):
                self._receive(socket, waiting)

    def _copy(self, item: Wanted) -> None:
        bundle = self._transfer._read(item.layer, item.slot)
        if bundle.nbytes != item.num_bytes:
            raise TransferError(Trouble.SIZE, _other_size(item, bundle.nbytes))
        bundle.copy_to(self._staging.place(item))

    def _ask(self, waiting: deque[_Piece]) -> int:
        """Send what may be sent now -> milliseconds until there may be more to send."""
        now = time.monotonic()
        for _ in range(len(waiting)):
            if len(self._asked) >= PIECES_IN_FLIGHT:
                return _TICK
            if now < self._next_send:
                return min(_TICK, int(1000 * (self._next_send - now)) + 1)
            piece = waiting.popleft()
            if piece.not_before > now:
                waiting.append(piece)
                continue
            if self._limits.max_rate is not None:
                self._next_send = max(now, self._next_send) + piece.length / self._limits.max_rate
            nonce = next(self._nonces)
            self._asked[nonce] = piece
            piece.asked = now
            item = piece.item
            body = REQUEST.pack(
                self._staging.plan,
                self._staging.batch,
                item.layer,
                item.slot,
                piece.offset,
                piece.length,
                nonce,
            )
            signed = body + sign(self._transfer._secret, body)
            self._transfer._socket(item.source, self._sockets).send(signed)
        return int(1000 * ASK_AGAIN_SECONDS) if waiting else _TICK

    def _receive(self, socket: Socket, waiting: deque[_Piece]) -> None:
        while True:
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            head = bytes(frames[0].buffer)
            body, digest = head[: ANSWER.size], head[ANSWER.size : -DIGEST_BYTES]
            if not hmac.compare_digest(
                sign(self._transfer._secret, head[:-DIGEST_BYTES]), head[-DIGEST_BYTES:]
            ):
                raise TransferError(Trouble.CHECKSUM, "an answer is not signed by this job")
            nonce, said, size = ANSWER.unpack(body)
            piece = self._asked.pop(nonce, None)
            if piece is None:
                continue  # an answer to a batch that was given up
            if said == Said.NOT_YET:
                piece.not_before = time.monotonic() + ASK_AGAIN_SECONDS
                waiting.append(piece)
            elif said == Said.STALE:
                text = f"rank {piece.item.source} refused: it serves another plan by now"
                raise TransferError(Trouble.STALE, text)
            else:
                self._write(piece, size, digest, frames[1].buffer)

    def _write(self, piece: _Piece, size: int, digest: bytes, payload: memoryview) -> None:
        item, arrival = piece.item, self._arrivals[piece.item.name]
        if size != item.num_bytes or len(payload) != piece.length:
            raise TransferError(Trouble.SIZE, _other_size(item, size))
        place = self._staging.place(item)
        end = piece.offset + piece.length
        place[piece.offset : end].numpy()[:] = np.frombuffer(payload, np.uint8)
        self._staging.bytes_fetched += piece.length
        arrival.missing -= 1
        if piece.offset == 0:
            arrival.digest = digest
        if not arrival.missing and digest_of(self._transfer._secret, place) != arrival.digest:
            raise TransferError(
                Trouble.CHECKSUM,
                f"the bundle of layer {item.layer}, slot {item.slot} from rank {item.source} does "
                "not have the checksum it was sent with",
            )

    def _check_time(self) -> None:
        now = time.monotonic()
        if now > self._deadline:
            raise TransferError(
                Trouble.DEADLINE, f"not all bundles came within {self._limits.batch_seconds:g} s"
            )
        for piece in self._asked.values():
            if now - piece.asked > self._limits.silence_seconds:
                raise TransferError(
                    Trouble.SILENT,
                    f"rank {piece.item.source} has not answered for "
                    f"{self._limits.silence_seconds:g} s",
                )


def _pieces(item: Wanted) -> list[_Piece]:
    starts = range(0, item.num_bytes, PIECE_BYTES)
    return [_Piece(item, s, min(PIECE_BYTES, item.num_bytes - s)) for s in starts]


def _other_size(item: Wanted, size: int) -> str:
    return (
        f"the bundle of layer {item.layer}, slot {item.slot} on rank {item.source} has {size} "
        f"bytes, not {item.num_bytes}"
    )


def staging_buffer(num_bytes: int) -> Tensor:
    """uint8 for `fetch`. On the host: bundles of GPUs are copied up when they are put to use."""
    return torch.empty(num_bytes, dtype=torch.uint8)
