"""StepTracer: on one rank, which spans of time a step spent on what, while a trace is asked for.

Off by default, and then it costs a look at a flag. A trace begins at the step at which all ranks
voted for it (`Vote.trace`) and ends by itself on all ranks after the same steps. What it keeps is
bounded by MAX_TRACE_STEPS and MAX_SPANS; complete steps are handed on as they come.

Times are those of the host: on a device whose kernels run behind the host's back, a span says when
they were asked for.

Knows: names and times. Knows nothing of models, lockstep or sockets.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from models.interface import StepObserver
from moeserve.wire_trace import (
    HOST,
    MAX_TRACE_STEPS,
    NAMES,
    PARTS,
    SECOND,
    SPAN,
    STEP,
    FromRank,
    TraceEnded,
    TraceSteps,
)

MAX_SPANS = 1 << 20  # of a trace, a rank: 20 MB
CHUNK_STEPS, CHUNK_SPANS = 8, 1 << 14  # sent together
MAX_SHAPES = 8  # sequences of parts that are remembered
_NUMBERS = {name: number for number, name in enumerate(NAMES)}
END = "other"  # what a model tells last of a forward or a draft: a sum, without a place in time

Span = tuple[int, int, int, int, int]  # name, thread, layer, start and length in ns


class StepTracer:
    """A step: `agreed`, then spans and parts, then `end_step`. All calls from one thread."""

    def __init__(self, rank: int = 0) -> None:
        self._rank = rank
        self._wanted: tuple[int, int] | None = None  # number, steps
        self._active: tuple[int, int] | None = None
        self._in_step = False
        self._host: list[Span] = []  # of the step
        self._names: list[str] = []  # of its parts, with when they ended and how long they took
        self._ends: list[float] = []
        self._seconds: list[float] = []
        self._shapes: dict[tuple[str, ...], _Shape] = {}  # by names: of steps that were alike
        self._spans: list[NDArray[np.void]] = []  # of complete steps
        self._steps: list[tuple[int, int, int, int]] = []
        self._num_steps = self._num_spans = 0
        self._outbox: list[FromRank] = []
        self._where: tuple[str, str] | None = None

    # -- asked for ---------------------------------------------------------------------------

    @property
    def wanted(self) -> int:
        """The trace that this rank is ready for, for its vote; 0: none."""
        return 0 if self._wanted is None else self._wanted[0]

    def start(self, trace: int, steps: int) -> None:
        """Vote for it from now on; it begins at the step at which all ranks do."""
        assert trace > 0 and 1 <= steps <= MAX_TRACE_STEPS
        self._wanted = (trace, steps)

    def stop(self, trace: int) -> None:
        """Vote against it; one that never began ends at once. Unknown ones are ignored."""
        if self._wanted is None or self._wanted[0] != trace:
            return
        self._wanted = None
        if self._active is None:
            self._outbox.append(TraceEnded(self._rank, trace, 0))

    def take_reports(self) -> list[FromRank]:
        """Messages since the last call."""
        if not self._outbox:
            return []
        reports, self._outbox = self._outbox, []
        return reports

    # -- a step ------------------------------------------------------------------------------

    @property
    def on(self) -> bool:
        """This step is traced."""
        return self._in_step

    def agreed(self, trace: int, runs: bool) -> None:
        """What all ranks agreed on for this step; call it every step. runs: a forward follows."""
        if trace == 0 and self._active is None:
            return
        if self._active is not None and trace != self._active[0]:
            if self._wanted == self._active:
                self._wanted = None  # somebody else was told to stop first
            self._end()
        if trace and self._active is None:
            assert self._wanted is not None and self._wanted[0] == trace
            self._active = self._wanted
            self._num_steps = self._num_spans = 0
        self._in_step = runs and self._active is not None
        self._host, self._names, self._ends, self._seconds = [], [], [], []

    def span(self, name: str, start: float, end: float) -> None:
        """Of the host, in seconds of time.perf_counter."""
        if self._in_step:
            self._host.append((_NUMBERS[name], HOST, -1, _ns(start), _ns(end - start)))

    def part(self, name: str, seconds: float) -> None:
        """Of the model: it ends now."""
        if self._in_step:
            self._ends.append(time.perf_counter())
            self._seconds.append(seconds)
            self._names.append(name)

    def observe(self, observer: StepObserver | None) -> StepObserver | None:
        """The observer, which hears all as before, with this one listening to its parts."""
        return TracedObserver(self, observer) if self._in_step else observer

    def end_step(self, step: int, tokens: int, phase: int, start: float) -> None:
        """It ends now. step: its number in lockstep; start: of all of it on this rank."""
        if not self._in_step:
            return
        assert self._active is not None
        self._in_step = False
        whole = time.perf_counter() - start
        self._host.append((_NUMBERS["step"], HOST, -1, _ns(start), _ns(whole)))
        parts = self._parts()
        count = len(self._host) + len(parts)
        self._spans += [np.array(self._host, SPAN), parts]
        self._steps.append((step, tokens, phase, count))
        self._num_steps += 1
        self._num_spans += count
        if self._num_steps >= self._active[1] or self._num_spans >= MAX_SPANS:
            self._wanted = None
            self._end()
        elif len(self._steps) >= CHUNK_STEPS or count >= CHUNK_SPANS:
            self._send()

    def _parts(self) -> NDArray[np.void]:
        """Of the step, as spans. Steps are mostly alike: their names are placed once."""
        names = tuple(self._names)
        shape = self._shapes.get(names)
        if shape is None:
            if len(self._shapes) >= MAX_SHAPES:
                self._shapes.clear()
            shape = self._shapes[names] = _Shape.of(names)
        spans = shape.spans.copy()
        seconds = np.array(self._seconds)[shape.kept]
        spans["start"] = np.rint((np.array(self._ends)[shape.kept] - seconds) * 1e9)
        spans["ns"] = np.rint(seconds * 1e9)
        return spans

    def _end(self) -> None:
        assert self._active is not None
        (trace, steps), count = self._active, self._num_steps
        self._in_step = False
        self._send()
        self._active = None
        full = self._num_spans >= MAX_SPANS and count < steps
        self._outbox.append(TraceEnded(self._rank, trace, count, full))

    def _send(self) -> None:
        assert self._active is not None
        spans, steps = self._spans, self._steps
        self._spans, self._steps = [], []
        if not steps:
            return
        if self._where is None:
            self._where = (socket.gethostname(), clock_name())
        self._outbox.append(
            TraceSteps(
                self._rank,
                self._active[0],
                *self._where,
                np.array(steps, STEP).tobytes(),
                np.concatenate(spans).tobytes(),
            )
        )


@dataclass(frozen=True)
class _Shape:
    """The parts of a step without their times. kept: those that are spans."""

    spans: NDArray[np.void]
    kept: NDArray[np.bool_]

    @classmethod
    def of(cls, names: tuple[str, ...]) -> _Shape:
        rows = [
            (_NUMBERS.get(name, _NUMBERS["part"]), SECOND if half else PARTS, layer, 0, 0)
            for name, (half, layer) in zip(names, place_parts(names), strict=True)
            if name != END
        ]
        return cls(np.array(rows, SPAN), np.array([name != END for name in names], bool))


class TracedObserver:
    """Hands on all that it is told, and tells the tracer of parts."""

    def __init__(self, tracer: StepTracer, observer: StepObserver | None) -> None:
        self._tracer, self._observer = tracer, observer
        self.wants_rows = observer is not None and getattr(observer, "wants_rows", True)

    def expert_picks(self, layer: int, ids: Tensor) -> None:
        if self._observer is not None:
            self._observer.expert_picks(layer, ids)

    def rows_sent(self, layer: int, rows: list[int]) -> None:
        if self._observer is not None:
            self._observer.rows_sent(layer, rows)

    def part(self, name: str, seconds: float) -> None:
        self._tracer.part(name, seconds)
        if self._observer is not None:
            self._observer.part(name, seconds)


def place_parts(names: Sequence[str]) -> list[tuple[int, int]]:
    """The parts of a step in the order in which they ended -> (half, layer) of each. Pure.

    A layer begins with its attention. A half is left where its rows have just left for other ranks
    (dispatch behind gate, combine behind experts), as `models.deepseek.overlap` goes in turn; that
    there are two halves shows in what follows the first gate and dispatch: attention again. What
    follows END are the layers of a draft, numbered behind the model's.
    """
    places: list[tuple[int, int]] = []
    begin = layers = 0
    for end in [*(i for i, name in enumerate(names) if name == END), len(names)]:
        made = _place(list(names[begin:end]))
        places += [(half, layers + layer) for half, layer in made]
        layers += 1 + max((layer for _, layer in made), default=-1)
        if end < len(names):
            places.append((0, -1))
        begin = end + 1
    return places


def _place(names: list[str]) -> list[tuple[int, int]]:
    """Of one forward or draft."""
    first = next((i for i in range(1, len(names)) if names[i - 1 : i + 1] == _LEAVE[0]), None)
    halves = first is not None and names[first + 1 : first + 2] == ["attention"]
    layers, last, half = [-1, -1], [["", ""], ["", ""]], 0
    places: list[tuple[int, int]] = []
    for name in names:
        if halves and last[half] == ["combine", "combine"] and name == "combine":
            half = 1 - half  # this one has ended; the other still fetches its results
        if name == "attention":
            layers[half] += 1
        places.append((half, layers[half]))
        before = last[half][1]
        last[half] = [before, name]
        if halves and [before, name] in _LEAVE:
            half = 1 - half
    return places


_LEAVE = (["gate", "dispatch"], ["experts", "combine"])


def clock_name() -> str:
    """The same for all processes that read one monotonic clock: those of one boot of a machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
