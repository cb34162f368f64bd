"""Ctrl-C as a count: for commands that look between two short sleeps what they are wanted to do."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def count_interrupts() -> Iterator[Callable[[], int]]:
    """How often Ctrl-C (or SIGTERM, SIGHUP) has come; while entered it does nothing else."""
    count = [0]

    def hear(number: int, frame: FrameType | None) -> None:
        count[0] += 1

    wanted = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    old = {number: signal.signal(number, hear) for number in wanted}
    try:
        yield lambda: count[0]
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
