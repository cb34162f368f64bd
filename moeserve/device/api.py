"""Streams, events, pinned memory and graphs, as far as a runner needs them.

`CudaApi` is thin: each method is a few calls of torch.cuda. `ReplayedApi` does the same on any
device by running again what was captured, and writes down what it was asked: so what stands above
it is run, step by step, where there is no GPU.

Knows torch.cuda. Knows nothing of models or steps.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor

Body = Callable[[], Sequence[Tensor]]  # what is captured -> its outputs


class Graph(Protocol):
    """outputs: the tensors that each replay writes to."""

    outputs: list[Tensor]

    def replay(self) -> None: ...


class Event(Protocol):
    def record(self) -> None:
        """Behind all that this thread has asked of the device so far."""
        ...

    def wait(self) -> None:
        """The host waits for it."""
        ...


class DeviceApi(Protocol):
    device: torch.device

    def pinned(self, nbytes: int) -> Tensor:
        """uint8 on the host, from which copies go without the host waiting."""
        ...

    def event(self) -> Event: ...

    def warm_up(self, body: Body) -> None:
        """Run it as it will be captured: kernels are compiled, libraries make what they keep."""
        ...

    def capture(self, body: Body) -> Graph: ...

    def free_bytes(self) -> int: ...

    def give_back(self) -> None:
        """To the device: memory that is kept for nobody, that of graphs too when the last is
        dropped. (While one lives, what others used stays for those that are captured next.)"""
        ...


class CudaApi:
    """The one place where graphs of torch.cuda are made; all share one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool: Any = None
        self._graphs: WeakSet[_CudaGraph] = WeakSet()  # that live in it
        self._side: Any = None

    def pinned(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def event(self) -> Event:
        return _CudaEvent()

    def warm_up(self, body: Body) -> None:
        side = self._stream()
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            body()
        torch.cuda.current_stream(self.device).wait_stream(side)

    def capture(self, body: Body) -> Graph:
        if not self._graphs:  # torch takes none again whose last graph is gone
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        # Other threads (experts that move) may go on using the device: only this one is captured.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream(), capture_error_mode="thread_local"
        ):
            outputs = list(body())
        made = _CudaGraph(graph, outputs)
        self._graphs.add(made)
        return made

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.device)[0])

    def give_back(self) -> None:
        gc.collect()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()

    def _stream(self) -> Any:
        if self._side is None:
            self._side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        return self._side


@dataclass(eq=False)
class _CudaGraph:
    graph: Any
    outputs: list[Tensor]

    def replay(self) -> None:
        self.graph.replay()


class _CudaEvent:
    """Made at its first record: an event belongs to the device that is current then."""

    def __init__(self) -> None:
        self._event: Any = None

    def record(self) -> None:
        if self._event is None:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()


@dataclass
class ReplayedApi:
    """The double. calls: what was asked, in order. free: bytes that are free, for budgets; each
    capture takes `each` of them, and what its pool lacks of `row` for each row of its first output;
    all is given back when the last graph is dropped. warm: taken by a warm-up until memory is given
    back. refuse: captures that raise, by number."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    calls: list[str] = field(default_factory=list)
    free: int = 1 << 40
    each: int = 0
    row: int = 0
    warm: int = 0
    refuse: frozenset[int] = frozenset()
    num_captures: int = 0
    pool: int = 0  # bytes of all graphs
    _shared: int = 0  # of them, those that each graph may use
    _cached: int = 0  # bytes that warm-ups left
    _graphs: WeakSet[_ReplayedGraph] = field(default_factory=WeakSet)

    def pinned(self, nbytes: int) -> Tensor:
        self.calls.append("pinned")
        pinned = self.device.type == "cuda"  # where tensors are fake
        return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=pinned)

    def event(self) -> Event:
        return _ReplayedEvent(self.calls)

    def warm_up(self, body: Body) -> None:
        self.calls.append("warm up")
        body()
        self.free -= self.warm - self._cached
        self._cached = self.warm

    def capture(self, body: Body) -> Graph:
        number, self.num_captures = self.num_captures, self.num_captures + 1
        self.calls.append("capture")
        outputs = list(body())
        if number in self.refuse:
            raise RuntimeError("operation not permitted when stream is capturing")
        wanted = self.row * outputs[0].shape[0] if outputs else 0
        more = max(wanted - self._shared, 0)
        self._shared += more
        self.pool += self.each + more
        self.free -= self.each + more
        made = _ReplayedGraph(self, body, outputs)
        self._graphs.add(made)
        return made

    def free_bytes(self) -> int:
        return self.free

    def give_back(self) -> None:
        self.free += self._cached
        self._cached = 0
        if not self._graphs:
            self.free += self.pool
            self.pool = self._shared = 0


@dataclass(eq=False)
class _ReplayedGraph:
    api: ReplayedApi
    body: Body
    outputs: list[Tensor]

    def replay(self) -> None:
        self.api.calls.append("replay")
        for kept, made in zip(self.outputs, self.body(), strict=True):
            kept.copy_(made)


@dataclass
class _ReplayedEvent:
    calls: list[str]

    def record(self) -> None:
        self.calls.append("record")

    def wait(self) -> None:
        self.calls.append("wait")
