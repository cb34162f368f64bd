"""Does a server keep up with a rate? From when calls were due and when their answers ended.

A server that keeps up answers the late calls of a point as fast as the early ones; one that does
not answers each later than the one before, by 1 / what it delivers - 1 / what is asked. So the
slope of what answers take over the time at which they were due tells what is delivered, also of a
burst that ends before limits are passed. Pure; knows nothing of limits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from launch.bench.serve_call import CUT, Call

KEEPS_UP = 0.95  # share of the offered rate that has to be delivered
LONG = 3.0  # a point that tells lasts so many times what a call takes: else nothing is steady
_SETTLING = 3  # the first third of a point is left out: an empty server is quicker
_SURE = 2.0  # standard errors of the slope
_FEW = 4  # calls that make no slope


@dataclass(frozen=True)
class Pace:
    """offered, delivered: conversations a second; None where too few ended. seconds: in which calls
    were due. keeps_up: None where the point was too short to tell."""

    offered: float | None
    delivered: float | None
    seconds: float
    keeps_up: bool | None

    def capped(self, rate: float) -> Pace:
        """Drawn arrivals may come a little faster than the rate asked for; what is delivered of
        that rate is no more than it."""
        return (
            self if self.delivered is None else replace(self, delivered=min(self.delivered, rate))
        )

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def pace_of(calls: Sequence[Call]) -> Pace:
    """Of the calls of one rate; what was cut short here does not count, what failed is not
    delivered."""
    due: dict[int, float] = {}
    ends: dict[int, float] = {}
    failed: set[int] = set()
    for call in calls:
        number = call.conversation
        due.setdefault(number, call.sent if call.due is None else call.due)
        ends[number] = max(call.ended, ends.get(number, 0.0))
        if not call.good:
            failed.add(number)
        if call.fault == CUT:
            ends[number] = math.inf
    begun = sorted((at, x) for x, at in due.items() if ends[x] < math.inf)
    seconds = begun[-1][0] - begun[0][0] if begun else 0.0
    later = begun[len(begun) // _SETTLING :]
    good = [(at, ends[x] - at) for at, x in later if x not in failed]
    if seconds <= 0 or len(good) < _FEW:
        nothing = bool(later) and not good
        return Pace(None, 0.0 if nothing else None, seconds, False if nothing else None)
    slope, error = _slope(good)
    offered = (len(begun) - 1) / seconds
    answered = len(good) / len(later)
    share = answered / (1.0 + max(0.0, slope))
    if len(calls) > len(due):
        share = min(share, _of_turns(calls, len(calls) / len(due), later))
    took = sorted(x for _, x in good)[len(good) // 2]
    if share < KEEPS_UP:
        sure = answered < KEEPS_UP or slope > _SURE * error
        keeps_up = False if sure else None
    else:
        keeps_up = True if seconds >= LONG * took else None
    # Never more than was seen to end of what came in the same time; by chance more or fewer calls
    # come in it than on average.
    over = [at + x for at, x in good]
    ended = (len(good) - 1) / max(max(over) - min(over), 1e-9)
    came = (len(later) - 1) / max(later[-1][0] - later[0][0], 1e-9)
    return Pace(offered, offered * min(share, ended / came), seconds, keeps_up)


def _of_turns(calls: Sequence[Call], turns: float, later: Sequence[tuple[float, int]]) -> float:
    """Of conversations that came, the share whose answers came in the same time. A conversation
    that waits between its turns hides how slow a server is: when no new ones come, only last turns
    are left, and those end the faster. One answer more, for what the edges cut."""
    first, last = later[0][0], later[-1][0]
    answers = sum(x.good and first < x.ended <= last for x in calls)
    return (answers + 1) / turns / max(len(later) - 1, 1)


def _slope(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Of the straight line through them, and its standard error."""
    count = len(points)
    x_mean = sum(x for x, _ in points) / count
    y_mean = sum(y for _, y in points) / count
    wide = sum((x - x_mean) ** 2 for x, _ in points)
    if not wide:
        return 0.0, math.inf
    slope = sum((x - x_mean) * (y - y_mean) for x, y in points) / wide
    off = sum((y - y_mean - slope * (x - x_mean)) ** 2 for x, y in points)
    return slope, math.sqrt(off / (count - 2) / wide)
