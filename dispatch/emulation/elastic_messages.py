"""Messages of one operation, and the parts that rows are packed of.

Knows: bytes. Knows nothing of what they mean.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dispatch.emulation.exchange import Exchange, Message, timed_out


class Operation:
    """Messages of all ranks; taken in when asked for, or before the next operation begins."""

    def __init__(self, exchange: Exchange, header: int, what: str) -> None:
        self._exchange, self._header, self._what = exchange, header, what
        self.number = exchange.begin()
        self._messages: dict[int, Message] | None = None

    def messages(self) -> dict[int, Message]:
        if self._messages is None:
            sources = list(range(self._exchange.size))
            found = self._exchange.receive(self.number, sources, self._header)
            complete = {}
            for source, message in found.items():
                if message is None:
                    raise timed_out(source, self._what)
                complete[source] = message
            self._messages = complete
        return self._messages


def split(rows: Tensor, kinds: list[tuple[torch.dtype, int]]) -> list[Tensor]:
    """uint8 [n, bytes] -> the parts of each row."""
    parts, start = [], 0
    for dtype, number in kinds:
        end = start + dtype.itemsize * number
        parts.append(rows[:, start:end].contiguous().view(dtype))
        start = end
    return parts


def last_pick(valid: Tensor) -> Tensor:
    """valid [n, K] -> [n] the last k that is: who stands for a row of several picks."""
    return valid.shape[1] - 1 - valid.flip(1).to(torch.int8).argmax(1)
