"""The ROUTER socket that all ranks connect to, in one asyncio loop; notices a broken line.

ZMQ does not say which peer has gone, so a disconnect (the kernel closes the sockets of a process
that dies; heartbeats close those of a host that is silent) makes us send every rank a Wake, which
harms nobody and fails for the one that is no longer there. Knows identities and bytes; knows
nothing of requests.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

import zmq

from moeserve import wire

log = logging.getLogger("moeserve.rank_link")

_MESSAGES_AT_ONCE = 256  # then other tasks of the loop get a turn
_PROBE_AGAIN = (0.02, 0.1, 0.5)  # seconds: the socket may learn of a loss after its monitor
_MOST_STRANGERS = 16  # peers that are no ranks, named in the log


class RankLink:
    """received(rank, payload) is called for each message, unreachable(rank) whenever a send finds
    nobody: also for a rank that has not connected yet."""

    def __init__(
        self,
        num_ranks: int,
        timeout: float,
        received: Callable[[int, bytes], None],
        unreachable: Callable[[int], None],
    ) -> None:
        """timeout: seconds of silence of a rank's host until its connection is closed."""
        self._received, self._unreachable = received, unreachable
        self._ranks = {wire.rank_identity(rank): rank for rank in range(num_ranks)}
        self._identities = list(self._ranks)
        self._strangers: set[bytes] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._read_scheduled = False
        self._closed = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)  # else a send to nobody would be silent
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.LINGER, 500)
        self._socket.set(zmq.HEARTBEAT_IVL, max(100, int(timeout * 250)))
        self._socket.set(zmq.HEARTBEAT_TIMEOUT, int(timeout * 1000))
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)

    def bind(self, host: str) -> str:
        """A free port on an address or name of this machine; the address that ranks connect to."""
        address = socket.gethostbyname(host)
        port = self._socket.bind_to_random_port(f"tcp://{address}")
        return f"tcp://{address}:{port}"

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        loop.add_reader(self._socket.fileno(), self._read)
        loop.add_reader(self._monitor.fileno(), self._read_monitor)
        self._on_timer()

    def send(self, rank: int, message: wire.ToRank) -> None:
        """Never blocks. Calls unreachable(rank) when the rank is not connected."""
        if self._closed:
            return
        try:
            self._socket.send_multipart(
                [self._identities[rank], wire.encode(message)], flags=zmq.NOBLOCK
            )
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._unreachable(rank)
        self._read_soon()  # the descriptor is edge-triggered: sending may have eaten the edge

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_reader(self._monitor.fileno())
        if self._timer is not None:
            self._timer.cancel()
        self._socket.disable_monitor()
        self._socket.close()
        self._context.destroy(linger=500)

    def _read_soon(self) -> None:
        if not self._read_scheduled and self._loop is not None and not self._closed:
            self._read_scheduled = True
            self._loop.call_soon(self._read)

    def _read(self) -> None:
        self._read_scheduled = False
        if self._closed:
            return
        for _ in range(_MESSAGES_AT_ONCE):
            try:
                frames = self._socket.recv_multipart(flags=zmq.NOBLOCK)
            except zmq.Again:
                return
            self.take(frames[0], frames[-1])
            if self._closed:
                return
        self._read_soon()

    def take(self, identity: bytes, payload: bytes) -> None:
        """A message has come; from a peer that is no rank of this job it is ignored."""
        rank = self._ranks.get(identity)
        if rank is not None:
            self._received(rank, payload)
        elif identity not in self._strangers and len(self._strangers) < _MOST_STRANGERS:
            self._strangers.add(identity)
            log.warning("ignored a peer that is no rank of this job: %r", identity[:64])

    def _read_monitor(self) -> None:
        if self._closed:
            return
        seen = False
        while True:
            try:
                self._monitor.recv_multipart(flags=zmq.NOBLOCK)
                seen = True
            except zmq.Again:
                break
        if seen and self._loop is not None:
            self._probe()
            for delay in _PROBE_AGAIN:
                self._loop.call_later(delay, self._probe)

    def _probe(self) -> None:
        self._read()  # last words first
        for rank in range(len(self._identities)):
            self.send(rank, wire.Wake())

    def _on_timer(self) -> None:
        """Once a second, should an edge of the descriptors ever be missed."""
        if self._closed or self._loop is None:
            return
        self._timer = self._loop.call_later(1.0, self._on_timer)
        self._read()
        self._read_monitor()
