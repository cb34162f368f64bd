"""Messages between ranks: sent at once, received when asked for, each with a number of its own.

Knows: process groups, tags, timeouts. Knows nothing of tokens. Point to point, not collective: a
rank that is left out need not take part, which is what masks are about. Over one process group all
of whose ranks begin the same operations in the same order; one exchange a group at a time.
"""

from __future__ import annotations

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


@dataclass(frozen=True)
class Message:
    """header: whole numbers; body: bytes, any number of them."""

    header: list[int]
    body: Tensor  # uint8 [n]


class Exchange:
    """group: a process group of CPU tensors, or None with `comm`, which must be of one rank."""

    def __init__(self, group: Any, comm: Any, timeout: float) -> None:
        self.timeout = timeout
        self._sent: dict[int, list[tuple[Any, Tensor]]] = {}
        if group is not None:
            self.rank, self.size = int(group.rank()), int(group.size())
        elif comm is not None:
            self.rank, self.size = int(comm.Get_rank()), int(comm.Get_size())
            if self.size > 1:
                raise NotImplementedError("the emulation takes a communicator of one rank only")
        else:
            raise ValueError("Either 'group' or 'comm' must be provided.")
        self._group = group
        self._operations = 0
        self._own: dict[int, Message] = {}

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
        header = torch.tensor([message.body.numel(), *message.header], dtype=torch.int64)
        self._post(operation, to, header, 2 * operation)
        if message.body.numel():
            self._post(operation, to, message.body.contiguous(), 2 * operation + 1)

    def receive(
        self, operation: int, sources: list[int], header_length: int
    ) -> dict[int, Message | None]:
        """Source -> its message, or None where it did not come in time or its rank is gone."""
        headers = {
            s: torch.empty(1 + header_length, dtype=torch.int64) for s in sources if s != self.rank
        }
        arrived = self._fill(headers, 2 * operation)
        bodies = {
            s: torch.empty(int(headers[s][0]), dtype=torch.uint8) for s in headers if s in arrived
        }
        arrived &= self._fill({s: b for s, b in bodies.items() if b.numel()}, 2 * operation + 1) | {
            s for s, b in bodies.items() if not b.numel()
        }
        messages: dict[int, Message | None] = {
            s: Message(headers[s][1:].tolist(), bodies[s]) if s in arrived else None
            for s in headers
        }
        if self.rank in sources:
            messages[self.rank] = self._own.pop(operation)
        return messages

    def meet(self, operation: int, ranks: list[int]) -> dict[int, Message | None]:
        """All of `ranks` wait for each other."""
        for rank in ranks:
            self.send(operation, rank, Message([], torch.empty(0, dtype=torch.uint8)))
        return self.receive(operation, ranks, 0)

    def close(self) -> None:
        """Wait a little until what was sent has been taken: unlike a write into a peer's memory, a
        message is lost with its sender."""
        end = time.monotonic() + min(self.timeout, _CLOSING)
        for operation in list(self._sent):
            self._settle(operation, max(end - time.monotonic(), 0.001))

    def __del__(self) -> None:
        self.close()

    # -- parts -----------------------------------------------------------------------------

    def _post(self, operation: int, to: int, tensor: Tensor, tag: int) -> None:
        try:
            work = self._group.send([tensor], to, tag)
        except RuntimeError:  # as in _settle
            return
        self._sent.setdefault(operation, []).append((work, tensor))

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
        for work, _ in self._sent.pop(operation):
            try:
                work.wait(timedelta(seconds=timeout))
            except RuntimeError:
                continue  # a rank that is gone reads no more; whoever awaits it will say so


def timed_out(source: int, what: str) -> PeerTimeout:
    """What a receiver raises that may not mask the peer."""
    return PeerTimeout(
        f"DeepEP error: timeout ({what}): nothing came from rank {source}; "
        "without enable_shrink the kernel traps"
    )
