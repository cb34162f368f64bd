"""From what ranks say of expert load to sums over ranks: a recording's intervals, load reports.

Plain state fed with wire messages. Knows nothing of sockets, event loops or HTTP.

Shape letters: S intervals, L layers, E logical experts, R ranks.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ep.load import PHASES
from ep.placement import ExpertPlacement
from ep.recording import ExpertRecording, RecordingInfo
from moeserve.errors import EngineFailed
from moeserve.wire_experts import (
    FromRank,
    LoadInterval,
    LoadReport,
    PlacementTable,
    RecordingEnded,
)

IntArray = NDArray[np.int64]

# Held by a recording in progress: 565 intervals of 58 layers and 256 experts. Beyond, neighbours
# are added up: intervals get longer, nothing is lost.
RECORDING_BYTES = 64 << 20


@dataclass
class _Interval:
    """Summed over the ranks heard so far."""

    first_step: int
    last_step: int
    num_steps: int
    generation: int
    seconds: float  # the longest of all ranks
    tokens: IntArray  # [2]
    counts: NDArray[np.int32]  # [2, L, E]
    traffic: IntArray  # [R, R]
    num_ranks: int = 0

    def join(self, later: _Interval) -> None:
        self.last_step = later.last_step
        self.num_steps += later.num_steps
        self.seconds += later.seconds
        self.tokens = self.tokens + later.tokens
        self.counts = self.counts + later.counts
        self.traffic = self.traffic + later.traffic


class RecordingCollector:
    """One recording: `heard` all messages of its number, then `result` when `ended`. num_experts:
    of a layer, for a recording in which there is nothing to count."""

    def __init__(
        self,
        recording: int,
        info: RecordingInfo,
        num_experts: int = 1,
        *,
        max_bytes: int = RECORDING_BYTES,
    ) -> None:
        self.recording, self.info, self._experts = recording, info, num_experts
        self.num_ranks = info.num_ranks
        self._max_bytes = max_bytes
        self._complete: list[_Interval] = []
        self._partial: dict[int, _Interval] = {}
        self._next = 0  # index of the next interval to be completed
        self._joined = 1  # intervals of the ranks in one of ours
        self._placements: dict[int, ExpertPlacement] = {}
        self._ended: dict[int, int] = {}  # intervals that each rank sent
        self.num_steps = 0
        self.num_tokens = 0

    def heard(self, message: FromRank) -> None:
        """EngineFailed if ranks differ in what lockstep makes equal: nothing could be summed."""
        match message:
            case LoadInterval():
                self._add(message)
            case PlacementTable():
                table = np.frombuffer(message.table, "<i8").reshape(message.shape)
                self._placements[message.generation] = ExpertPlacement(
                    table, message.num_logical_experts, message.num_ranks, message.generation
                )
            case RecordingEnded():
                self._ended[message.rank] = message.num_intervals

    @property
    def ended(self) -> bool:
        return len(self._ended) == self.num_ranks and not self._partial

    @property
    def num_intervals(self) -> int:
        return len(self._complete)

    @property
    def nbytes(self) -> int:
        every = [*self._complete, *self._partial.values()]
        return sum(x.counts.nbytes + x.traffic.nbytes for x in every)

    def result(self) -> ExpertRecording:
        """What all ranks have completed. Before the end, what there is so far."""
        size = len(self._complete)
        layers = len(self.info.layers)
        generations = sorted({x.generation for x in self._complete} & self._placements.keys())
        known = {g: i for i, g in enumerate(generations)}
        experts = self._complete[0].counts.shape[2] if size else self._num_experts()
        shape = (len(PHASES), layers, experts)
        ranks = self.num_ranks
        return ExpertRecording.of(
            _stack([x.counts for x in self._complete], shape),
            replace(self.info, interval_steps=self.info.interval_steps * self._joined),
            steps=_stack([(x.first_step, x.last_step) for x in self._complete], (2,)),
            num_steps=_stack([x.num_steps for x in self._complete], ()),
            seconds=np.array([x.seconds for x in self._complete], np.float64),
            tokens=_stack([x.tokens for x in self._complete], (2,)),
            traffic=_stack([x.traffic for x in self._complete], (ranks, ranks)),
            placements=[self._placements[g] for g in generations],
            placement_index=_stack([known.get(x.generation, 0) for x in self._complete], ()),
        )

    def _num_experts(self) -> int:
        every = [*self._placements.values()]
        return every[0].num_logical_experts if every else self._experts

    def _add(self, message: LoadInterval) -> None:
        if message.rank in self._ended or message.index < self._next:
            raise EngineFailed(
                f"recording {self.recording}: rank {message.rank} sent interval {message.index} "
                "twice"
            )
        counts = message.counts.unpack().astype(np.int32)
        known = self._partial.get(message.index)
        if known is None:
            known = self._partial[message.index] = _Interval(
                message.first_step,
                message.last_step,
                message.num_steps,
                message.generation,
                0.0,
                np.zeros(2, np.int64),
                np.zeros_like(counts),
                np.zeros((self.num_ranks, self.num_ranks), np.int64),
            )
        mine = (known.first_step, known.last_step, known.num_steps, known.generation)
        theirs = (message.first_step, message.last_step, message.num_steps, message.generation)
        if mine != theirs or counts.shape != known.counts.shape:
            raise EngineFailed(
                f"recording {self.recording}: interval {message.index} of rank {message.rank} is "
                f"{theirs} (steps, generation), of others {mine}"
            )
        known.seconds = max(known.seconds, message.seconds)
        known.tokens += message.tokens
        known.counts += counts
        rows = message.rows.unpack()
        if rows.size:
            known.traffic[message.rank] += rows
        known.num_ranks += 1
        while (first := self._partial.get(self._next)) and first.num_ranks == self.num_ranks:
            del self._partial[self._next]
            self._next += 1
            self.num_steps += first.num_steps
            self.num_tokens += int(first.tokens.sum())
            self._append(first)

    def _append(self, interval: _Interval) -> None:
        """Keep an interval; where earlier ones have been joined, so are the new ones."""
        last = self._complete[-1] if self._complete else None
        most = self.info.interval_steps * self._joined
        if (
            self._joined > 1
            and last is not None
            and last.generation == interval.generation
            and last.num_steps + interval.num_steps <= most
        ):
            last.join(interval)
        else:
            self._complete.append(interval)
        while self.nbytes > self._max_bytes and len(self._complete) > 1:
            before = len(self._complete)
            self._joined *= 2
            self._complete = _joined(self._complete)
            if len(self._complete) == before:
                break  # every interval has a placement of its own: each must stay


def _joined(intervals: list[_Interval]) -> list[_Interval]:
    """Pairs of neighbours under the same placement as one."""
    out: list[_Interval] = []
    open_pair = False
    for interval in intervals:
        if open_pair and out[-1].generation == interval.generation:
            out[-1].join(interval)
            open_pair = False
        else:
            out.append(interval)
            open_pair = True
    return out


def _stack(values: list[Any], shape: tuple[int, ...]) -> IntArray:
    if not values:
        return np.zeros((0, *shape), np.int64)
    stacked: IntArray = np.stack([np.asarray(v, np.int64) for v in values])
    return stacked


def recording_info(
    info: dict[str, Any], num_ranks: int, interval_steps: int, started: float
) -> RecordingInfo:
    """From a rank's `Ready.info`. started: seconds since 1970."""
    placement = info.get("placement")
    num_layers = placement["num_layers"] if isinstance(placement, dict) else 1
    first = int(info.get("first_moe_layer", 0))
    return RecordingInfo(
        num_ranks=num_ranks,
        interval_steps=interval_steps,
        layers=tuple(range(first, first + num_layers)),
        num_mtp_layers=int(info.get("mtp_layers", 0)),
        picks_per_token=int(info.get("picks_per_token", 0)),
        ranks_per_node=int(info.get("ranks_per_node", 1)),
        model_type=str(info.get("model_type", "")),
        checkpoint=str(info.get("checkpoint", "")),
        fingerprint=str(info.get("fingerprint", "")),
        dtype=str(info.get("dtype", "")),
        moeserve_version=_version(),
        started_at=datetime.fromtimestamp(started, UTC).isoformat(timespec="seconds"),
    )


def experts_of(info: dict[str, Any]) -> int:
    """Logical experts of a layer, from a rank's `Ready.info`; 1 where it does not say."""
    placement = info.get("placement")
    return int(placement.get("num_logical_experts", 1)) if isinstance(placement, dict) else 1


def _version() -> str:
    try:
        return importlib.metadata.version("moeserve")
    except importlib.metadata.PackageNotFoundError:
        return "0+source"


@dataclass(frozen=True)
class JobLoad:
    """Expert load of all ranks. totals, window [2, L, E] by phase; traffic [R, R] rows sent since
    start, from rank to rank. Ranks answer at their own steps: while they work, the window's first
    and last step are the earliest and the latest of any."""

    tokens: IntArray  # [2] computed since start
    totals: IntArray
    window: IntArray
    window_steps: int
    window_first: int
    window_last: int
    traffic: IntArray
    generation: int

    @classmethod
    def of(cls, reports: Iterable[LoadReport], num_ranks: int) -> JobLoad:
        every = list(reports)
        assert every
        traffic = np.zeros((num_ranks, num_ranks), np.int64)
        for report in every:
            rows = report.rows.unpack()
            if rows.size:
                traffic[report.rank] = rows
        return cls(
            tokens=np.sum([r.tokens for r in every], axis=0),
            totals=np.sum([r.totals.unpack() for r in every], axis=0),
            window=np.sum([r.window.unpack() for r in every], axis=0),
            window_steps=max(r.window_steps for r in every),
            window_first=min(r.window_first for r in every),
            window_last=max(r.window_last for r in every),
            traffic=traffic,
            generation=max(r.generation for r in every),
        )
