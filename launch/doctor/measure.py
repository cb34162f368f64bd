"""Links, clocks and an all-to-all, measured by all ranks together. Every function is collective.

Knows torch.distributed and an EPGroup. What figures mean: `launch.doctor.links`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ep.group import EPGroup, gather_objects
from launch.doctor.links import Link, clock_offset, partner_of, schedule

PINGS = 20  # round trips, of which the quickest counts: what else runs makes the others longer
CLOCK_PINGS = 8
REPEATS = 3
CPU_BYTES, GPU_BYTES = 4 << 20, 64 << 20
ROW = 32  # int64 values of a row of the all-to-all
Tell = Callable[[str, int, int], None]


@dataclass(frozen=True)
class AllToAll:
    """rows: that this job's ranks sent to each other in one. wrong: ranks that received what nobody
    had sent them. seconds: of the slowest rank, the median of some."""

    rows: int
    bytes: int
    seconds: float
    wrong: tuple[int, ...]


def measure_links(
    group: EPGroup, device: torch.device, tell: Tell = lambda what, done, total: None
) -> list[Link]:
    """All that `schedule` plans, the same list on every rank, in order of pairs."""
    rounds = schedule(group.size, group.ranks_per_node)
    size = GPU_BYTES if device.type == "cuda" else CPU_BYTES
    small = torch.zeros(1, device=device)
    large = torch.zeros(size // 4, device=device)
    mine: list[tuple[int, int, float, float, float]] = []
    for number, pairs in enumerate(rounds):
        tell("links", number, len(rounds))
        partner = partner_of(group.rank, pairs)
        if partner is not None:
            found = _measure(group, partner, small, large)
            if group.rank < partner:
                mine.append((group.rank, partner, *found))
        dist.barrier(group=group.cpu_group)  # a slow pair does not fall into the next round
    everyone = gather_objects(group, mine)
    return [Link(*x) for x in sorted(pair for one in everyone for pair in one)]


def _measure(
    group: EPGroup, partner: int, small: torch.Tensor, large: torch.Tensor
) -> tuple[float, float, float]:
    """(latency, bytes a second to the partner of the higher number, bytes a second back)."""
    first = group.rank < partner

    def send(x: torch.Tensor) -> None:
        dist.send(x, partner, group=group.device_group)

    def receive(x: torch.Tensor) -> None:
        dist.recv(x, partner, group=group.device_group)

    trips = []
    for _ in range(PINGS + 2):
        start = _now(small)
        if first:
            send(small)
            receive(small)
        else:
            receive(small)
            send(small)
        trips.append(_now(small) - start)
    trip = min(trips[2:])
    rates = []
    for forward in (True, False):
        times = []
        for _ in range(REPEATS + 1):
            start = _now(large)
            if first == forward:
                send(large)
                receive(small)  # that it has come
            else:
                receive(large)
                send(small)
            times.append(_now(large) - start)
        best = min(times[1:])
        rates.append(large.nbytes / max(best - trip / 2, best / 2, 1e-9))
    return trip / 2, rates[0], rates[1]


def measure_clocks(
    group: EPGroup, clock: Callable[[], float] = time.time
) -> list[tuple[float, float]]:
    """For each node (seconds that its clock is ahead of rank 0's, +- seconds), on every rank."""
    step = group.ranks_per_node
    told = torch.zeros(1, dtype=torch.float64)
    found: list[tuple[float, float]] = [(0.0, 0.0)]
    for other in range(step, group.size, step):
        samples = []
        for _ in range(CLOCK_PINGS):
            if group.rank == 0:
                asked = clock()
                dist.send(told, other, group=group.cpu_group)
                dist.recv(told, other, group=group.cpu_group)
                samples.append((asked, float(told[0]), clock()))
            elif group.rank == other:
                dist.recv(told, 0, group=group.cpu_group)
                told[0] = clock()
                dist.send(told, 0, group=group.cpu_group)
        if group.rank == 0:
            found.append(clock_offset(samples))
    answer: list[tuple[float, float]] = gather_objects(group, found)[0]
    return answer


def rows_between(source: int, target: int) -> int:
    """Of the all-to-all: uneven, some none."""
    return (source * 7 + target * 3) % 5 * 40


def measure_all_to_all(group: EPGroup, device: torch.device) -> AllToAll:
    """Uneven, checked row by row."""
    ranks = range(group.size)
    sent = [rows_between(group.rank, target) for target in ranks]
    come = [rows_between(source, group.rank) for source in ranks]
    x = torch.cat([_rows(group.rank, t, n, device) for t, n in zip(ranks, sent, strict=True)])
    times = []
    out = x.new_empty(sum(come), ROW)
    for _ in range(REPEATS + 1):
        out.fill_(-1)
        dist.barrier(group=group.cpu_group)
        start = _now(out)
        dist.all_to_all_single(out, x, come, sent, group=group.device_group)
        times.append(_now(out) - start)
    wanted = torch.cat([_rows(s, group.rank, n, device) for s, n in zip(ranks, come, strict=True)])
    right = bool((out == wanted).all())
    seconds = sorted(times[1:])[REPEATS // 2]
    everyone: list[Any] = gather_objects(group, (right, sum(sent), seconds))
    rows = sum(count for _, count, _ in everyone)
    return AllToAll(
        rows=rows,
        bytes=rows * ROW * 8,
        seconds=max(took for _, _, took in everyone),
        wrong=tuple(rank for rank, (fine, _, _) in enumerate(everyone) if not fine),
    )


def _rows(source: int, target: int, count: int, device: torch.device) -> torch.Tensor:
    """[count, ROW], each row telling whose it is and which."""
    rows = torch.arange(count, dtype=torch.int64, device=device).unsqueeze(1).expand(-1, ROW)
    return rows + 1000 * (source * 4099 + target)


def _now(x: torch.Tensor) -> float:
    if x.device.type == "cuda":
        torch.cuda.synchronize(x.device)
    return time.perf_counter()
