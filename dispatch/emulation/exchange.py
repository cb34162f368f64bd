"""Messages between ranks: sent at once, received when asked for, each with a number of its own.

Knows: process groups, tags, timeouts. Knows nothing of tokens. Point to point, not collective: a
rank that is left out need not take part, which is what masks are about. Over one process group all
of whose ranks begin the same operations in the same order; one exchange a group at a time, as the
library bears one buffer a process.

A rank that closes in the middle of a layer says so in place of its next message, so that nobody
waits for it until the timeout. What it says would stay for the next exchange of the group, were it
not that each has tags of its own, by a number that rank 0 draws when all meet.
"""

from __future__ import annotations

import secrets
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from dispatch.emulation.errors import PeerTimeout

# Sends are waited for once so many operations have begun after theirs: by then they have arrived,
# for no rank may have more than two operations unreceived.
_SETTLED = 6
_CLOSING = 5.0  # seconds that the last sends have to be taken
_GONE = -1  # in place of a size: the sender has closed
_TURNS = 2**20  # tags of an exchange; a tag has 31 bits


@dataclass(frozen=True)
class Message:
    """header: whole numbers; body: bytes, any number of them."""

    header: list[int]
    body: Tensor  # uint8 [n]


class Exchange:
    """group: a process group of CPU tensors, or None with `comm`, which must be of one rank."""

    def __init__(self, group: Any, comm: Any, timeout: float) -> None:
        self.timeout, self._group = timeout, group
        self._sent: dict[int, list[tuple[Any, Tensor, int]]] = {}  # with whom it is for
        self._lost: set[int] = set()  # ranks that sent nothing when they should have
        if group is not None:
            self.rank, self.size = int(group.rank()), int(group.size())
        elif comm is not None:
            self.rank, self.size = int(comm.Get_rank()), int(comm.Get_size())
            if self.size > 1:
                raise NotImplementedError("the emulation takes a communicator of one rank only")
        else:
            raise ValueError("Either 'group' or 'comm' must be provided.")
        self._operations = 0
        self._own: dict[int, Message] = {}
        self._epoch = 0
        self._closed = False

    def begin(self) -> int:
        """The number of a new operation, the same on every rank."""
        self._operations += 1
        for settled in [n for n in self._sent if n + _SETTLED <= self._operations]:
            self._settle(settled, self.timeout)
        return self._operations

    def send(self, operation: int, to: int, message: Message) -> None:
        """Returns at once."""
        if to == self.rank:
            self._own[operation] = message
            return
        header = torch.tensor(message.header, dtype=torch.int64).view(torch.uint8)
        packed = torch.cat((header, message.body.reshape(-1)))
        works = self._sent.setdefault(operation, [])
        works += self._post(to, torch.tensor([packed.numel()]), self._tag(operation))
        if packed.numel():
            works += self._post(to, packed, self._tag(operation) + 1)

    def receive(
        self, operation: int, sources: list[int], header_length: int
    ) -> dict[int, Message | None]:
        """Source -> its message, or None where it did not come in time or its rank is gone."""
        sizes = {s: torch.empty(1, dtype=torch.int64) for s in sources if s != self.rank}
        arrived = self._fill(sizes, self._tag(operation))
        here = {s: int(sizes[s]) for s in arrived if int(sizes[s]) != _GONE}
        packed = {s: torch.empty(n, dtype=torch.uint8) for s, n in here.items()}
        complete = {s for s, n in here.items() if n == 0}
        complete |= self._fill(
            {s: b for s, b in packed.items() if here[s]}, self._tag(operation) + 1
        )
        end = 8 * header_length
        messages: dict[int, Message | None] = {
            s: Message(packed[s][:end].view(torch.int64).tolist(), packed[s][end:])
            if s in complete
            else None
            for s in sizes
        }
        self._lost -= messages.keys()
        self._lost |= {s for s, message in messages.items() if message is None}
        if self.rank in sources:
            messages[self.rank] = self._own.pop(operation)
        return messages

    def meet(self, operation: int, ranks: list[int]) -> dict[int, Message | None]:
        """All of `ranks` wait for each other. The first operation of an exchange is that of all
        ranks: they agree on its tags."""
        drawn = torch.tensor([1 + secrets.randbelow(2**10 - 1)]).view(torch.uint8)
        for rank in ranks:
            self.send(operation, rank, Message([], drawn))
        met = self.receive(operation, ranks, 0)
        if operation == 1 and (first := met[0]) is not None:
            self._epoch = int(first.body.view(torch.int64)[0])
        return met

    def close(self, broken: bool = False) -> None:
        """Wait a little until what was sent has been taken: unlike a write into a peer's memory, a
        message is lost with its sender. broken: others may wait for this rank's next message; they
        learn that there will be none. Nobody may ever take that, and to wait for it in vain would
        close the group's connections: what was sent is kept for `timeout`, and nothing is awaited.
        """
        if broken and not self._closed:
            tag = self._tag(self._operations + 1)
            for rank in range(self.size):
                if rank != self.rank:
                    told = self._post(rank, torch.tensor([_GONE]), tag)
                    self._sent.setdefault(self._operations + 1, []).extend(told)
        self._closed = True
        if broken:
            kept, self._sent = self._sent, {}
            keeper = threading.Timer(self.timeout, kept.clear)
            keeper.daemon = True
            keeper.start()
            return
        end = time.monotonic() + min(self.timeout, _CLOSING)
        for operation in list(self._sent):
            self._settle(operation, max(end - time.monotonic(), 0.001))

    def __del__(self) -> None:
        if self._group is not None:
            self.close()

    # -- parts -----------------------------------------------------------------------------

    def _tag(self, operation: int) -> int:
        return self._epoch * _TURNS + 2 * operation % _TURNS

    def _post(self, to: int, tensor: Tensor, tag: int) -> list[tuple[Any, Tensor, int]]:
        try:
            return [(self._group.send([tensor], to, tag), tensor, to)]
        except RuntimeError:  # as in _settle
            return []

    def _fill(self, tensors: dict[int, Tensor], tag: int) -> set[int]:
        """Receive each -> the sources whose tensor came."""
        works, arrived = {}, set()
        for source, tensor in tensors.items():
            try:
                works[source] = self._group.recv([tensor], source, tag)
            except RuntimeError:  # its connection is closed
                continue
        for source, work in works.items():
            try:
                if work.wait(timedelta(seconds=self.timeout)):
                    arrived.add(source)
            except RuntimeError:
                continue
        return arrived

    def _settle(self, operation: int, timeout: float) -> None:
        """Wait until what was sent has been taken; who is lost takes no more."""
        end = time.monotonic() + timeout
        for work, _, to in self._sent.pop(operation):
            if to in self._lost:
                continue
            try:
                work.wait(timedelta(seconds=max(end - time.monotonic(), 0.001)))
            except RuntimeError:
                continue  # a rank that is gone reads no more; whoever awaits it will say so


def timed_out(source: int, what: str) -> PeerTimeout:
    """What a receiver raises that may not mask the peer."""
    return PeerTimeout(
        f"DeepEP error: timeout ({what}): nothing came from rank {source}; "
        "without enable_shrink the kernel traps"
    )
