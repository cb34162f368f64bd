"""How the clocks of ranks differ, from the steps that they take together. Pure.

Nobody leaves a collective before everybody has entered it. So, with o the offset of a clock, each
step bounds it from both sides:

    latest enter_r - exit_0  <=  o_r - o_0  <=  exit_r - enter_0, over all steps

Between the bounds lies where they leave: all leave a small collective within the time that a
message takes, so the median of exit_r - exit_0 is taken, kept within the bounds. The bounds say
how wrong it can be. Ranks of one machine read one clock: nothing is to be estimated there.

Shape letters: S steps, R ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moeserve.tracing_job import JobTrace, RankTrace
from moeserve.wire_trace import NAMES

LOCKSTEP = NAMES.index("lockstep")


@dataclass(frozen=True)
class Offset:
    """ns to be taken from a rank's clock to have rank 0's; error: at most so many ns more or less,
    0 where both read one clock."""

    ns: int = 0
    error: int = 0


def offsets(trace: JobTrace) -> list[Offset]:
    """One for each rank."""
    first = trace.ranks[0]
    enter, leave = _lockstep(first)
    single: list[Offset | None] = []
    for rank in trace.ranks:
        if rank.clock == first.clock:
            single.append(Offset())
        else:
            single.append(_offset(enter, leave, *_lockstep(rank)))
    return _of_machines([rank.clock for rank in trace.ranks], single)


def _offset(
    enter: NDArray[np.int64],
    leave: NDArray[np.int64],
    enter_r: NDArray[np.int64],
    leave_r: NDArray[np.int64],
) -> Offset | None:
    """None where there was no collective. All [S]."""
    if not len(enter) or len(enter) != len(enter_r):
        return None
    low, high = int((enter_r - leave).max()), int((leave_r - enter).min())
    middle = int(np.median(leave_r - leave))
    # A clock that drifts by more than a collective takes has no place between: the middle of both.
    middle = (low + high) // 2 if low > high else min(max(middle, low), high)
    return Offset(middle, max(abs(high - middle), abs(middle - low)))


def _of_machines(clocks: Sequence[str], single: Sequence[Offset | None]) -> list[Offset]:
    """The ranks of one clock have one offset: that of the rank which knows it best."""
    best: dict[str, Offset] = {}
    for clock, offset in zip(clocks, single, strict=True):
        if offset is not None and (clock not in best or offset.error < best[clock].error):
            best[clock] = offset
    return [best.get(clock, Offset()) for clock in clocks]


def _lockstep(rank: RankTrace) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """[S] when it entered and left the lockstep of each step, by its own clock."""
    spans = rank.spans[rank.spans["name"] == LOCKSTEP]
    return spans["start"], spans["start"] + spans["ns"]
