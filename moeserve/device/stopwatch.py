"""How long something takes where it runs: on a device, from event to event, so that nobody waits in
between.

Knows clocks. Knows nothing of what is timed.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class Stopwatch(Protocol):
    """One span at a time."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def seconds(self) -> float:
        """Of the last span; to be asked when what it holds is known to be done."""
        ...


class HostStopwatch:
    """Where things are done when they were called."""

    def __init__(self) -> None:
        self._start = self._end = 0.0

    def start(self) -> None:
        self._start = time.perf_counter()

    def stop(self) -> None:
        self._end = time.perf_counter()

    def seconds(self) -> float:
        return max(self._end - self._start, 0.0)


class CudaStopwatch:
    """Two events of the current stream, used again each time. `seconds` waits for nothing where a
    later copy of that stream has been waited for."""

    def __init__(self) -> None:
        self._events: Any = None

    def start(self) -> None:
        if self._events is None:  # made late: events belong to the device that is current then
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        self._events[0].record()

    def stop(self) -> None:
        self._events[1].record()

    def seconds(self) -> float:
        self._events[1].synchronize()  # is done already
        return float(self._events[0].elapsed_time(self._events[1])) / 1e3


def stopwatch_of(device: torch.device) -> Stopwatch:
    return HostStopwatch() if device.type == "cpu" else CudaStopwatch()
