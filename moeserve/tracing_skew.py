"""Who waits for whom: the spread of arrivals at collectives, and what made the last rank late.

A collective is the lockstep of a step, the dispatch of a layer (where its rows leave) and its
combine. A rank arrives when it enters; the spread is the time from the first arrival to the last.
What the last rank is late by is looked for in what it did since the collective before, against the
median of all ranks. Pure.

Shape letters: C collectives (all steps and layers), R ranks, N names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moeserve.tracing_clocks import Offset
from moeserve.tracing_job import JobTrace, RankTrace
from moeserve.wire_trace import NAMES

KINDS = ("lockstep", "dispatch", "combine")
WORK = ("schedule", "rebalance", "attention", "gate", "experts", "sampling", "commit")
REST = "between"  # time in no span: norms, outputs, messages
_NUMBER = {name: number for number, name in enumerate(NAMES)}
_WAITS = [_NUMBER[name] for name in KINDS]

Int = NDArray[np.int64]


@dataclass(frozen=True)
class Spread:
    """Of one kind of collective. Seconds; last: the rank that came last most often, and in what
    share of them."""

    kind: str
    count: int
    mean: float
    p99: float
    last: int
    last_share: float


@dataclass(frozen=True)
class Blame:
    """A rank that came last, and the part that it took longer for than the median of all ranks.
    seconds: a step, mean over all steps; share of all that was found."""

    rank: int
    part: str
    seconds: float
    share: float


@dataclass(frozen=True)
class RankTime:
    """Of a step, mean, in seconds: all of it, and what it spent within collectives, mostly waiting.
    last_share: of all collectives, where it came last."""

    rank: int
    step: float
    within: float
    last_share: float


@dataclass(frozen=True)
class Skew:
    spreads: tuple[Spread, ...]
    blames: tuple[Blame, ...]
    ranks: tuple[RankTime, ...]


def skew_of(trace: JobTrace, offsets: Sequence[Offset], most_blames: int = 5) -> Skew | None:
    """None for one rank, no step, or ranks whose spans are not of the same collectives."""
    if len(trace.ranks) < 2 or not trace.num_steps:
        return None
    arrived, kinds = [], None
    for rank, offset in zip(trace.ranks, offsets, strict=True):
        spans = _in_order(rank)
        which = _collectives(spans)
        mine = spans["name"][which]
        if kinds is None:
            kinds = mine
        elif len(kinds) != len(mine) or (kinds != mine).any():
            return None
        arrived.append(spans["start"][which] - offset.ns)
    assert kinds is not None
    times: Int = np.stack(arrived, axis=1)  # [C, R]
    last = times.argmax(axis=1)
    spread = times.max(axis=1) - times.min(axis=1)
    return Skew(
        tuple(
            _spread(kind, spread[mask], last[mask], len(trace.ranks))
            for kind in KINDS
            if (mask := kinds == _NUMBER[kind]).any()
        ),
        _blames(trace, last, most_blames),
        tuple(_rank_time(rank, last) for rank in trace.ranks),
    )


def _in_order(rank: RankTrace) -> NDArray[np.void]:
    """Spans by time; the step that contains them first."""
    spans = rank.spans
    return spans[np.lexsort((-spans["ns"], spans["start"]))]


def _collectives(spans: NDArray[np.void]) -> NDArray[np.intp]:
    """Where ranks enter one: indices of spans in order. Of a layer's two dispatches and combines
    the first of each: what precedes it in its thread is the gate, or the experts."""
    found = []
    for thread in np.unique(spans["thread"]):
        index = np.flatnonzero(spans["thread"] == thread)
        names = spans["name"][index]
        before = np.concatenate(([0], names[:-1]))
        enters = names == _NUMBER["lockstep"]
        enters |= (names == _NUMBER["dispatch"]) & (before == _NUMBER["gate"])
        enters |= (names == _NUMBER["combine"]) & (before == _NUMBER["experts"])
        found.append(index[enters])
    return np.sort(np.concatenate(found))


def _spread(kind: str, spread: Int, last: NDArray[np.intp], num_ranks: int) -> Spread:
    counts = np.bincount(last, minlength=num_ranks)
    return Spread(
        kind,
        len(spread),
        float(spread.mean()) / 1e9,
        float(np.percentile(spread, 99)) / 1e9,
        int(counts.argmax()),
        float(counts.max() / len(spread)),
    )


def _work_before(rank: RankTrace) -> NDArray[np.float64]:
    """[C, N + 1]: ns of each of WORK, and of no span, since the collective before."""
    spans = _in_order(rank)
    which = _collectives(spans)
    count = len(which)
    column = np.full(len(NAMES), -1)
    for place, name in enumerate(WORK):
        column[_NUMBER[name]] = place
    work = np.zeros((count, len(WORK) + 1))
    ends_before = np.searchsorted(which, np.arange(len(spans)))  # the next collective of each span
    kept = (column[spans["name"]] >= 0) & (ends_before < count)
    np.add.at(work, (ends_before[kept], column[spans["name"][kept]]), spans["ns"][kept])
    start, leave = spans["start"][which], spans["start"][which] + spans["ns"][which]
    between = np.zeros(count)
    between[1:] = np.maximum(start[1:] - leave[:-1], 0)
    waits = np.isin(spans["name"], _WAITS)
    waits[which] = False
    waited = np.zeros(count)
    kept = waits & (ends_before < count)
    np.add.at(waited, ends_before[kept], spans["ns"][kept])
    work[:, -1] = np.maximum(between - waited - work[:, :-1].sum(axis=1), 0)
    return work


def _blames(trace: JobTrace, last: NDArray[np.intp], most: int) -> tuple[Blame, ...]:
    work = np.stack([_work_before(rank) for rank in trace.ranks])  # [R, C, N + 1]
    excess = work[last, np.arange(len(last))] - np.median(work, axis=0)  # [C, N + 1]
    excess = np.maximum(excess, 0)
    sums = np.zeros((len(trace.ranks), excess.shape[1]))
    np.add.at(sums, last, excess)
    total = sums.sum()
    names = (*WORK, REST)
    order = np.argsort(-sums, axis=None)[:most]
    found = []
    for flat in order.tolist():
        rank, part = divmod(flat, excess.shape[1])
        if sums[rank, part] > 0:
            seconds = float(sums[rank, part]) / 1e9 / trace.num_steps
            found.append(Blame(rank, names[part], seconds, float(sums[rank, part] / total)))
    return tuple(found)


def _rank_time(rank: RankTrace, last: NDArray[np.intp]) -> RankTime:
    spans, steps = rank.spans, len(rank.steps)
    whole = spans["ns"][spans["name"] == _NUMBER["step"]].sum()
    within = spans["ns"][np.isin(spans["name"], _WAITS)].sum()
    return RankTime(
        rank.rank,
        float(whole) / 1e9 / steps,
        float(within) / 1e9 / steps,
        float((last == rank.rank).mean()),
    )
