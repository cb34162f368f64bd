"""The median time of a call: between two events of a device, or by the host's clock.

On a device a call is captured into a graph where it can be, so that what the host takes to launch
does not count; the L2 cache is overwritten before each run where the data of a real step would not
lie in it. Knows nothing of kernels.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

FLUSH_BYTES = 256 << 20  # several times the L2 cache of any device of today
MOST_RUNS, LEAST_RUNS = 50, 5
BATCH = 10  # runs between two looks at the clock


@dataclass(frozen=True)
class Timing:
    """seconds: the median of `runs`. captured: without the host's launches. note: why not."""

    seconds: float
    runs: int
    captured: bool = False
    note: str = ""


class Clock(Protocol):
    def time(self, call: Callable[[], object], cold: bool, budget: float) -> Timing:
        """cold: with nothing of it in L2. budget: seconds of measuring, about."""
        ...

    def rest(self) -> None:
        """Behind a case: what it held is given back."""
        ...

    def room(self) -> int | None:
        """Bytes that are free; None: nobody knows (a case that wants too many raises)."""
        ...


class HostClock:
    """For CPUs: a walk of what is measured elsewhere."""

    def time(self, call: Callable[[], object], cold: bool, budget: float) -> Timing:
        call()
        times: list[float] = []
        began = time.perf_counter()
        while not times or (len(times) < LEAST_RUNS and time.perf_counter() - began < budget):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return Timing(statistics.median(times), len(times))

    def rest(self) -> None:
        gc.collect()

    def room(self) -> int | None:
        return None


class CudaClock:
    """api: torch.cuda, or what stands in for it in tests."""

    def __init__(self, device: torch.device, api: Any = torch.cuda, flush: int = FLUSH_BYTES):
        self._api = api
        self._flush = torch.empty(flush, dtype=torch.uint8, device=device)

    def time(self, call: Callable[[], object], cold: bool, budget: float) -> Timing:
        for _ in range(2):  # the first compiles
            call()
        self._api.synchronize()
        run, captured, note = self._captured(call)
        run()
        self._api.synchronize()
        pairs: list[tuple[Any, Any]] = []
        began = time.perf_counter()
        while len(pairs) < MOST_RUNS:
            for _ in range(BATCH if len(pairs) >= LEAST_RUNS else LEAST_RUNS):
                if cold:
                    self._flush.zero_()
                start, end = (self._api.Event(enable_timing=True) for _ in range(2))
                start.record()
                run()
                end.record()
                pairs.append((start, end))
            self._api.synchronize()
            if time.perf_counter() - began > budget:
                break
        times = [start.elapsed_time(end) / 1e3 for start, end in pairs]
        return Timing(statistics.median(times), len(times), captured, note)

    def rest(self) -> None:
        gc.collect()  # tensors are held by closures that know each other
        self._api.empty_cache()  # memory of graphs is theirs alone until then

    def room(self) -> int | None:
        free: int = self._api.mem_get_info()[0]
        return free

    def _captured(self, call: Callable[[], object]) -> tuple[Callable[[], object], bool, str]:
        """What to run, whether it is a graph, and why it is none."""
        graph = self._api.CUDAGraph()
        try:
            with self._api.graph(graph):
                call()
        except Exception as error:  # whatever waits for the device, or plans on the host
            self._api.synchronize()
            return call, False, f"not captured: {(str(error).splitlines() or [''])[0][:80]}"
        return graph.replay, True, ""


def make_clock(device: torch.device) -> Clock:
    return CudaClock(device) if device.type == "cuda" else HostClock()
