"""All kernels at all shapes within a budget of seconds: rows of a table, and who won where.

Shapes that matter most come first; what time did not suffice for is named, not dropped silently. A
case that raises is a row that says so. Knows cases, a clock and limits; nothing of how it is shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch

from dispatch.words import raised
from models.deepseek.kernels.gpu.bench.attention import attention_cases
from models.deepseek.kernels.gpu.bench.case import Case, Prepared
from models.deepseek.kernels.gpu.bench.clock import Clock
from models.deepseek.kernels.gpu.bench.gemms import gemm_cases
from models.deepseek.kernels.gpu.bench.limits import Limits
from models.deepseek.kernels.gpu.bench.rows import row_cases
from models.deepseek.kernels.gpu.bench.sizes import Sizes

OURS = "triton"
AGREES = 2.0**-5  # of the largest value: bf16 results of two right kernels differ by less
SECONDS_EACH = 0.15  # of measuring, for each implementation of a case
Progress = Callable[[str, int, int], None]  # (case, done, of how many)


@dataclass(frozen=True)
class Row:
    """A case measured. Times in seconds; limit: the least that bytes and FLOPs allow; rivals: their
    times; differences: of their results to ours; absent: why others have no time. error: what a
    case raised (then there are no times)."""

    kernel: str
    shape: str
    key: dict[str, int]
    bound: str
    limit: float
    bytes: int
    flops: int
    ours: float = 0.0
    runs: int = 0
    captured: bool = False
    note: str = ""
    rivals: dict[str, float] = field(default_factory=dict)
    differences: dict[str, float] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    error: str = ""

    @property
    def name(self) -> str:
        return f"{self.kernel} {self.shape}"

    @property
    def of_limit(self) -> float:
        """1: as fast as the device allows."""
        return self.limit / self.ours if self.ours else 0.0

    @property
    def wrong(self) -> tuple[str, ...]:
        """Others whose result is not ours."""
        return tuple(n for n, off in self.differences.items() if not off <= AGREES)

    @property
    def winner(self) -> str:
        """The fastest of ours and of those that gave the same result."""
        times = {n: t for n, t in self.rivals.items() if n in self.differences}
        times = {n: t for n, t in times.items() if n not in self.wrong} | {OURS: self.ours}
        return min(times, key=lambda n: times[n])

    def as_json(self) -> dict[str, object]:
        return vars(self) | {
            "of_limit": self.of_limit,
            "winner": "" if self.error else self.winner,
            "wrong": list(self.wrong),
        }


@dataclass(frozen=True)
class Measured:
    """left: names of cases that time did not suffice for (while it lasts: that are still to come).
    too_large: by name of case, why the device does not hold it."""

    rows: list[Row]
    left: list[str]
    seconds: float
    too_large: Mapping[str, str] = field(default_factory=dict)

    @property
    def failed(self) -> list[Row]:
        return [row for row in self.rows if row.error]


def all_cases(s: Sizes, device: torch.device, only: str = "") -> list[Case]:
    """One of each kernel at the front, then those that come first; only: whose name contains it."""
    cases = [
        case
        for made in (attention_cases, gemm_cases, row_cases)
        for case in made(s, device)
        if only in case.name
    ]
    cases.sort(key=lambda case: not case.first)
    front: dict[str, Case] = {}
    for case in cases:
        front.setdefault(case.kernel, case)
    return [*front.values(), *(case for case in cases if front[case.kernel] is not case)]


def measure_all(
    cases: Iterable[Case],
    clock: Clock,
    limits: Limits,
    budget: float,
    progress: Progress = lambda name, done, total: None,
    each: float = SECONDS_EACH,
    least: int = 0,
    keep: Callable[[Measured], None] = lambda so_far: None,
) -> Measured:
    """budget: seconds in all, compiling included; a case that has begun is finished. least: so many
    cases are measured whatever the time. keep: told behind each case what there is so far."""
    waiting = list(cases)
    began = time.monotonic()
    rows: list[Row] = []
    too_large: dict[str, str] = {}

    def so_far(done: int) -> Measured:
        left = [case.name for case in waiting[done:]]
        return Measured(list(rows), left, time.monotonic() - began, dict(too_large))

    for number, case in enumerate(waiting):
        if number >= least and time.monotonic() - began > budget:
            return so_far(number)
        progress(case.name, number, len(waiting))
        free = clock.room() if case.memory else None
        if free is not None and free < case.memory:
            too_large[case.name] = f"takes {_gib(case.memory)}, {_gib(free)} are free"
        else:
            rows.append(measure(case, clock, limits, each))
            clock.rest()
        keep(so_far(number + 1))
    progress("done", len(waiting), len(waiting))
    return so_far(len(waiting))


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


@torch.inference_mode()
def measure(case: Case, clock: Clock, limits: Limits, each: float = SECONDS_EACH) -> Row:
    """One case; what it raises is in the row."""
    cost = case.cost
    row = Row(
        case.kernel, case.shape, dict(case.key), limits.bound(cost, case.unit),
        limits.seconds(cost, case.unit), cost.bytes, cost.flops,
    )  # fmt: skip
    try:
        prepared = case.make()
        cold = row.bound == "memory"
        timing = clock.time(prepared.ours, cold, each)
    except Exception as error:  # whatever a kernel raises: the others go on
        return _with(row, error=_first_line(error))
    rivals: dict[str, float] = {}
    differences: dict[str, float] = {}
    absent = dict(prepared.absent)
    for name, call in prepared.rivals.items():
        try:
            rivals[name] = clock.time(call, cold, each).seconds
            if prepared.compare is not None and not name.endswith("bf16"):
                differences[name] = _compare(prepared, name)
        except Exception as error:  # another's fault is no fault of ours
            absent[name] = _first_line(error)
            rivals.pop(name, None)
    return _with(
        row, ours=timing.seconds, runs=timing.runs, captured=timing.captured, note=timing.note,
        rivals=rivals, differences=differences, absent=absent,
    )  # fmt: skip


def _compare(prepared: Prepared, name: str) -> float:
    assert prepared.compare is not None
    return prepared.compare(prepared.ours(), prepared.rivals[name]())


def _with(row: Row, **changed: object) -> Row:
    return Row(**(vars(row) | changed))


def _first_line(error: Exception) -> str:
    return raised(error)[:160]
