"""StepRecorder: expert load of real tokens, where rows go, and seconds by part of a step.

Always on: totals since start and a LoadWindow, by phase. On request a recording: counts per
interval of steps, handed on as wire messages as intervals close. Recordings begin and end at steps
that all ranks agree on (`Vote.recording`), so that their sums are exact and complete.

Cheap by being late: a step only keeps the picks (tensors that the gate made anyway); once some
steps have gathered, or somebody looks, all of them are counted by one bincount (`Uncounted`; on a
GPU a step later). What is kept is bounded by MAX_STEPS steps and about MAX_ROWS rows.

Knows: plans, ids of picks. Knows nothing of models, lockstep or sockets.

Shape letters: T tokens, K top-k, L layers, E logical experts, R ranks, S steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ep.load import DECODE, PHASES, PREFILL, LoadWindow
from ep.placement import ExpertPlacement
from models.interface import StepObserver
from moeserve.device.api import DeviceApi
from moeserve.plan import StepPlan
from moeserve.uncounted import Base, Uncounted
from moeserve.wire_experts import Counts, FromRank, LoadInterval, PlacementTable, RecordingEnded

MAX_STEPS = 16  # kept uncounted
MAX_ROWS = 1 << 16  # rows of picks (a row a token and layer) kept uncounted


@dataclass
class _Wanted:
    recording: int
    interval_steps: int
    max_steps: int  # 0: until told


class _Interval:
    """The interval in progress of a recording."""

    def __init__(self, shape: tuple[int, ...], generation: int) -> None:
        self.first_step = self.last_step = -1
        self.num_steps = 0
        self.seconds = 0.0
        self.tokens = [0, 0]
        self.counts = np.zeros(shape, np.int64)
        self.rows: NDArray[np.int64] | None = None
        self.generation = generation


class StepRecorder:
    """enabled False (warm-up): nothing is kept. counting False (to measure what counting costs), or
    window None: only `seconds` are.

    A step: `begin_step`, what the model shows (StepObserver), `end_step` or `drop_step`.
    """

    def __init__(self, window: LoadWindow | None = None, rank: int = 0) -> None:
        self.enabled = self.counting = True
        self.wants_rows = True  # whether rows that are sent are told (StepObserver)
        self._rank = rank
        self.seconds: dict[str, float] = {}
        self.tokens = [0, 0]  # computed since start, by phase
        self._window = window
        layers, experts = (window.num_layers, window.num_experts) if window else (0, 0)
        self._layers, self._experts = layers, experts
        self._size = len(PHASES) * layers * experts  # counts of a step
        self._totals = np.zeros((len(PHASES), layers, experts), np.int64)
        self._rows_total: NDArray[np.int64] = np.zeros(0, np.int64)
        # What has not been counted: picks and where each belongs (step, phase, layer), rows sent.
        self._steps: list[int] = []  # numbers of the complete steps
        self._picks: list[Tensor] = []
        self._bases: list[Base] = []
        self._lengths: list[int] = []  # rows of each that are no padding
        self._rows: list[list[int]] = []
        self._num_rows = 0
        self.api: DeviceApi | None = (
            None  # of the device that picks are on, where it is none of CPUs
        )
        self._late: Uncounted | None = None  # gathered, to be counted at the next step's end
        # The step in progress.
        self._begun: tuple[int, int] | None = None  # picks and rows before it
        self._num_tokens = self._num_decodes = 0  # rows of the plan
        self._length = 0  # rows that are no padding, of the plan or of a round of drafting
        self._base = 0  # where its counts begin
        self._phases: NDArray[np.int64] | None = None  # of each row, in a mixed step
        # The recording.
        self._wanted: _Wanted | None = None
        self._active: _Wanted | None = None
        self._interval: _Interval | None = None
        self._num_intervals = 0
        self._steps_recorded = 0
        self._told: int | None = None  # generation of the placement that was sent last
        self._outbox: list[FromRank] = []

    # -- a step --------------------------------------------------------------------------------

    def begin_step(self, plan: StepPlan, placement: ExpertPlacement | None = None) -> None:
        """plan: whose rows the picks will be, before it is committed. Rows behind them are padding
        and do not count."""
        if self._window is None or not self.enabled or not self.counting:
            return
        assert self._begun is None, "a step has begun and not ended"
        if self._active is not None:
            self._open_interval(self._active, placement)
        self._begun = (len(self._picks), len(self._rows))
        self._num_tokens, self._num_decodes = plan.num_tokens, plan.num_decode_tokens
        self._begin(self._num_tokens, self._num_decodes)
        if 0 < self._num_decodes < self._num_tokens:
            self._phases = _phases_of_rows(plan)

    def _begin(self, num_rows: int, num_decodes: int) -> None:
        """Picks of so many rows follow."""
        self._base = len(self._steps) * self._size
        self._length, self._phases = num_rows, None
        if num_decodes == num_rows:
            self._base += DECODE * self._layers * self._experts

    def begin_round(self, num_rows: int, num_decodes: int) -> None:
        """A round of drafting, after the forward: its picks are of other rows than the plan's,
        those of decodes first. They count as load, not as computed tokens."""
        if self._begun is None:
            return
        self._begin(num_rows, num_decodes)
        if 0 < num_decodes < num_rows:
            self._phases = np.where(np.arange(num_rows) < num_decodes, DECODE, PREFILL)

    def expert_picks(self, layer: int, ids: Tensor) -> None:
        if self._begun is None:
            return  # disabled
        base: Base = self._base + layer * self._experts
        if self._phases is not None:
            base = base + self._phases * (self._layers * self._experts)
        self._picks.append(ids)
        self._bases.append(base)
        self._lengths.append(self._length)

    def rows_sent(self, layer: int, rows: list[int]) -> None:
        if self._begun is not None:
            self._rows.append(rows)

    def part(self, name: str, seconds: float) -> None:
        if self.enabled:
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    @property
    def round_observer(self) -> StepObserver:
        """For a round of drafting: its parts are no parts of the target's forward; all its seconds
        are told as one part."""
        return _RoundObserver(self)

    def end_step(self, step: int, seconds: float = 0.0) -> None:
        """step: its number in lockstep; seconds: what it took."""
        if self._begun is None:
            return
        self._num_rows += sum(self._lengths[self._begun[0] :])
        self._begun = None
        self._steps.append(step)
        decodes = self._num_decodes
        prefills = self._num_tokens - decodes
        self.tokens[PREFILL] += prefills
        self.tokens[DECODE] += decodes
        interval = self._interval
        if interval is not None:
            if not interval.num_steps:
                interval.first_step = step
            interval.last_step = step
            interval.num_steps += 1
            interval.seconds += seconds
            interval.tokens[PREFILL] += prefills
            interval.tokens[DECODE] += decodes
            self._after_recorded_step()
        self._add_late()
        if len(self._steps) >= MAX_STEPS or self._num_rows >= MAX_ROWS:
            self._late = self._gather(self.api)
            if self.api is None:
                self._add_late()

    def drop_step(self) -> None:
        """The step failed: what it showed is forgotten."""
        if self._begun is None:
            return
        picks, rows = self._begun
        del self._picks[picks:], self._bases[picks:], self._lengths[picks:], self._rows[rows:]
        self._begun = None

    # -- what shows ----------------------------------------------------------------------------

    @property
    def window(self) -> LoadWindow | None:
        """Of the last steps, for balance; complete up to the last ended step."""
        self._count()
        return self._window

    @property
    def totals(self) -> NDArray[np.int64]:
        """[2, L, E] since start: the array itself, not to be written to."""
        self._count()
        return self._totals

    @property
    def rows_total(self) -> NDArray[np.int64]:
        """[R] rows sent to each rank since start, all layers; [0] before the first."""
        self._count()
        return self._rows_total

    # -- recording -----------------------------------------------------------------------------

    @property
    def wanted(self) -> int:
        """The recording that this rank is ready to record, for its vote; 0: none."""
        return 0 if self._wanted is None else self._wanted.recording

    def start_recording(self, recording: int, interval_steps: int, max_steps: int = 0) -> None:
        """Vote for it from now on; it begins at the step at which all ranks do."""
        assert recording > 0 and interval_steps > 0 and max_steps >= 0
        self._wanted = _Wanted(recording, interval_steps, max_steps)

    def stop_recording(self, recording: int) -> None:
        """Vote against it; one that never began ends at once. Unknown ones are ignored."""
        if self._wanted is None or self._wanted.recording != recording:
            return
        self._wanted = None
        if self._active is None:
            self._outbox.append(RecordingEnded(self._rank, recording, 0))

    def agreed(self, recording: int) -> None:
        """What all ranks agreed on for the step to come; call it every step."""
        if recording == (0 if self._active is None else self._active.recording):
            return
        if self._active is not None:
            self._close_interval()
            ended = RecordingEnded(self._rank, self._active.recording, self._num_intervals)
            self._outbox.append(ended)
            self._active = None
        if recording:
            self._count()  # what came before does not belong to it
            assert self._wanted is not None and self._wanted.recording == recording
            self._active = self._wanted
            self._num_intervals = self._steps_recorded = 0
            self._told = None

    def take_reports(self) -> list[FromRank]:
        """Messages of the recording since the last call."""
        if not self._outbox:
            return []
        reports, self._outbox = self._outbox, []
        return reports

    def _open_interval(self, active: _Wanted, placement: ExpertPlacement | None) -> None:
        """The interval that the next step belongs to; one has the same placement throughout."""
        generation = 0 if placement is None else placement.generation
        if self._interval is not None and self._interval.generation != generation:
            self._close_interval()
        if self._interval is None:
            assert not self._steps, "steps before the interval are counted before it opens"
            self._interval = _Interval(self._totals.shape, generation)
        if placement is not None and self._told != generation and self._rank == 0:
            self._told = generation
            self._outbox.append(_table(active.recording, placement))

    def _after_recorded_step(self) -> None:
        """All ranks come here after the same steps, so all close and end alike."""
        assert self._active is not None and self._interval is not None
        self._steps_recorded += 1
        if self._interval.num_steps >= self._active.interval_steps:
            self._close_interval()
        if self._steps_recorded == self._active.max_steps and self._wanted is self._active:
            self._wanted = None  # the next vote ends it

    def _close_interval(self) -> None:
        self._count()
        interval, self._interval = self._interval, None
        if interval is None or not interval.num_steps:
            return
        assert self._active is not None
        rows = np.zeros(0, np.int64) if interval.rows is None else interval.rows
        self._outbox.append(
            LoadInterval(
                rank=self._rank,
                recording=self._active.recording,
                index=self._num_intervals,
                first_step=interval.first_step,
                last_step=interval.last_step,
                num_steps=interval.num_steps,
                seconds=interval.seconds,
                tokens=(interval.tokens[PREFILL], interval.tokens[DECODE]),
                generation=interval.generation,
                counts=Counts.pack(interval.counts),
                rows=Counts.pack(rows),
            )
        )
        self._num_intervals += 1

    # -- counting ------------------------------------------------------------------------------

    def _count(self) -> None:
        """Count what the complete steps have shown. Not amid a step."""
        if self._begun is not None:
            return
        self._add_late()
        if self._steps:
            self._late = self._gather(None)
            self._add_late()

    def _gather(self, api: DeviceApi | None) -> Uncounted:
        late = Uncounted.of(self._steps, self._rows, self._picks, self._bases, self._lengths, api)
        self._steps, self._rows, self._picks, self._bases, self._lengths = [], [], [], [], []
        self._num_rows = 0
        return late

    def _add_late(self) -> None:
        late, self._late = self._late, None
        if late is None:
            return
        assert self._window is not None
        counts = late.counts(len(late.steps) * self._size).reshape(-1, *self._totals.shape)
        for number, count in zip(late.steps, counts, strict=True):
            self._window.add(count, number)
        summed = counts.sum(axis=0) if len(late.steps) > 1 else counts[0]
        self._totals += summed
        rows = np.array(late.rows, np.int64).sum(axis=0) if late.rows else None
        if rows is not None:
            self._rows_total = rows if not self._rows_total.size else self._rows_total + rows
        if self._interval is not None:
            self._interval.counts += summed
            if rows is not None:
                old = self._interval.rows
                self._interval.rows = rows if old is None else old + rows


def _phases_of_rows(plan: StepPlan) -> NDArray[np.int64]:
    """[T]: a mixed step splits exactly, by sequence."""
    phases = np.full(len(plan.sequences), PREFILL, np.int64)
    phases[plan.decodes] = DECODE
    return np.repeat(phases, plan.counts)


class _RoundObserver:
    def __init__(self, recorder: StepRecorder) -> None:
        self.expert_picks, self.rows_sent = recorder.expert_picks, recorder.rows_sent

    def part(self, name: str, seconds: float) -> None:
        pass


def _table(recording: int, placement: ExpertPlacement) -> PlacementTable:
    table = placement.physical_to_logical
    return PlacementTable(
        rank=0,
        recording=recording,
        generation=placement.generation,
        num_logical_experts=placement.num_logical_experts,
        num_ranks=placement.num_ranks,
        shape=(len(table), len(table[0])),
        table=table.astype("<i8").tobytes(),
    )
