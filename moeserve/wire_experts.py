"""Messages about expert load, part of `wire`: recordings and reports, between ranks and front end.

A recording has a number (from 1, given by the front end). Ranks begin and end it at steps they
agree on in lockstep, and send each interval as it closes; intervals have the same numbers and
steps on every rank, so that summing over ranks is exact. Arrays travel as bytes, little-endian.

Shape letters: L layers, E logical experts, P physical slots, R ranks.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from ep.archive import smallest
from ep.placement import ExpertPlacement

# ---- front end -> rank ------------------------------------------------------------------------


class StartRecording(msgspec.Struct, frozen=True, tag=True):
    """max_steps: end by itself after so many steps with tokens; 0: when told to."""

    recording: int
    interval_steps: int
    max_steps: int = 0


class StopRecording(msgspec.Struct, frozen=True, tag=True):
    recording: int


class AskLoad(msgspec.Struct, frozen=True, tag=True):
    """Answer with a LoadReport of this number."""

    ask: int


# ---- rank -> front end ------------------------------------------------------------------------


class Counts(msgspec.Struct, frozen=True):
    """An integer array in the smallest type that holds it."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def pack(cls, array: NDArray[np.int64]) -> Counts:
        small = smallest(array)
        return cls(small.dtype.str, small.shape, small.tobytes())

    def unpack(self) -> NDArray[np.int64]:
        return np.frombuffer(self.data, self.dtype).reshape(self.shape).astype(np.int64)


class LoadInterval(msgspec.Struct, frozen=True, tag=True):
    """One interval of one rank. counts [2, L, E] by phase; rows [R] sent to each rank."""

    rank: int
    recording: int
    index: int
    first_step: int
    last_step: int
    num_steps: int
    seconds: float  # spent in these steps
    tokens: tuple[int, int]  # computed by this rank, by phase
    generation: int  # of the placement, the same in all steps of an interval
    counts: Counts
    rows: Counts


class PlacementTable(msgspec.Struct, frozen=True, tag=True):
    """The placement of the intervals of this generation. table [L, P] int64, -1 for empty slots."""

    rank: int
    recording: int
    generation: int
    num_logical_experts: int
    num_ranks: int
    shape: tuple[int, int]
    table: bytes


class RecordingEnded(msgspec.Struct, frozen=True, tag=True):
    """All intervals of this rank have been sent."""

    rank: int
    recording: int
    num_intervals: int


class LoadReport(msgspec.Struct, frozen=True, tag=True):
    """A rank's load now: totals [2, L, E] since start, window [2, L, E] of the steps first..last
    (0, 0 while there is none), rows [R] sent to each rank since start, tokens since start."""

    rank: int
    ask: int
    step: int
    generation: int
    tokens: tuple[int, int]
    totals: Counts
    window: Counts
    window_steps: int
    window_first: int
    window_last: int
    rows: Counts


class PlacementInUse(msgspec.Struct, frozen=True, tag=True):
    """Of rank 0: before it is ready, and whenever experts have moved (each batch of layers). table
    [L, P] int32, -1 for empty slots."""

    rank: int
    generation: int
    num_logical_experts: int
    num_ranks: int
    shape: tuple[int, int]
    table: bytes

    @classmethod
    def of(cls, rank: int, placement: ExpertPlacement) -> PlacementInUse:
        table = placement.physical_to_logical
        return cls(
            rank,
            placement.generation,
            placement.num_logical_experts,
            placement.num_ranks,
            (table.shape[0], table.shape[1]),
            table.astype("<i4").tobytes(),
        )

    def placement(self) -> ExpertPlacement:
        table = np.frombuffer(self.table, "<i4").reshape(self.shape)
        return ExpertPlacement(table, self.num_logical_experts, self.num_ranks, self.generation)


FromFrontEnd = StartRecording | StopRecording | AskLoad
FromRank = LoadInterval | PlacementTable | RecordingEnded | LoadReport
