"""Times of a layer's two all-to-alls, step by step, beside a plain exchange of the least bytes.

In each step every way (backend, wire, form) does one layer, then each kind of plain exchange is
done once: pairs that were measured side by side, so that what slows the machine slows both. A
barrier before each part makes ranks start together; the slowest rank's time is the part's.

Knows: dispatchers, clocks of CPU and GPU. Knows nothing of what is shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dispatch.base import Dispatcher
from ep.group import EPGroup, gather_objects
from launch.bench.dispatch_check import for_wire, stand_in
from launch.bench.dispatch_work import LeastBytes, Work


@dataclass
class Times:
    """Seconds of each step on this rank, parts apart."""

    there: list[float] = field(default_factory=list)
    back: list[float] = field(default_factory=list)

    def slowest(self, group: EPGroup) -> Times:
        """Of the slowest rank in each step. Collective."""
        everyone: list[Times] = gather_objects(group, self)
        return Times(
            [max(step) for step in zip(*(t.there for t in everyone), strict=True)],
            [max(step) for step in zip(*(t.back for t in everyone), strict=True)],
        )

    @property
    def both(self) -> list[float]:
        return [a + b for a, b in zip(self.there, self.back, strict=True)]


@dataclass(frozen=True)
class Sent:
    """Bytes that left this rank in one layer, as the backend counts them."""

    there: int
    back: int


class LayerRunner:
    """One dispatcher on one layer, again and again."""

    def __init__(self, d: Dispatcher, group: EPGroup, work: Work, device: torch.device) -> None:
        self.d, self.times = d, Times()
        self._group, self._device = group, device
        self._placement, self._rank = work.placement, work.rank
        self._slots = work.slots[work.rank].to(device)
        self._weights = work.weights.to(device)
        # Rounding for the wire is the model's part, not the backend's: done once, not timed.
        self._rows = for_wire(d, work.x.to(device))
        self._y: Tensor | None = None

    def step(self, counted: bool) -> Sent:
        """One layer. Collective."""
        d, before = self.d, self.d.stats.bytes_sent
        with_there = _Watch(self._group, self._device)
        handle = d.dispatch_start(self._rows, self._slots, self._weights)
        received = d.dispatch_finish(handle)
        there = with_there.seconds()
        between = d.stats.bytes_sent
        if self._y is None:  # the same rows arrive in every step
            self._y = stand_in(received, self._placement, self._rank, d)
        with_back = _Watch(self._group, self._device)
        d.combine_start(handle, self._y)
        d.combine_finish(handle)
        back = with_back.seconds()
        if counted:
            self.times.there.append(there)
            self.times.back.append(back)
        return Sent(between - before, d.stats.bytes_sent - between)


class PlainExchange:
    """all_to_all_single of the least bytes, there and back: the network without a dispatcher."""

    def __init__(self, group: EPGroup, least: LeastBytes, device: torch.device) -> None:
        self.times = Times()
        self._group, self._device = group, device
        self._there = _buffers(least.there, group.rank, device)
        self._back = _buffers(least.back, group.rank, device)

    def step(self, counted: bool) -> None:
        there, back = self._exchange(*self._there), self._exchange(*self._back)
        if counted:
            self.times.there.append(there)
            self.times.back.append(back)

    def _exchange(
        self, arriving: Tensor, leaving: Tensor, takes: list[int], gives: list[int]
    ) -> float:
        watch = _Watch(self._group, self._device)
        dist.all_to_all_single(arriving, leaving, takes, gives, group=self._group.device_group)
        return watch.seconds()


def time_steps(
    runners: dict[Any, LayerRunner],
    plain: dict[Any, PlainExchange],
    steps: int,
    warmup: int,
    tell: Callable[[int], None],
) -> dict[Any, Sent]:
    """All of them in turn, step by step -> bytes that each sent in its last layer. Collective.
    tell: called with the number of steps done."""
    sent = {}
    for step in range(warmup + steps):
        counted = step >= warmup
        for key, runner in runners.items():
            sent[key] = runner.step(counted)
        for exchange in plain.values():
            exchange.step(counted)
        tell(step + 1)
    return sent


class _Watch:
    """From its making, when all ranks are there, to `seconds`: by the device's clock on a GPU."""

    def __init__(self, group: EPGroup, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        if self._cuda:
            torch.cuda.synchronize(device)
        if group.cpu_group is not None:
            dist.barrier(group=group.cpu_group)
        if self._cuda:
            self._events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
            self._events[0].record()
        self._began = time.perf_counter()

    def seconds(self) -> float:
        if not self._cuda:
            return time.perf_counter() - self._began
        first, last = self._events
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3


def _buffers(
    matrix: list[list[int]], rank: int, device: torch.device
) -> tuple[Tensor, Tensor, list[int], list[int]]:
    gives, takes = matrix[rank], [row[rank] for row in matrix]
    leaving = torch.zeros(sum(gives), dtype=torch.uint8, device=device)
    return torch.empty(sum(takes), dtype=torch.uint8, device=device), leaving, takes, gives
