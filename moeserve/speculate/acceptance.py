"""How often drafts are accepted: by position of the run, over all sequences and of each one.

Rate i is the chance that draft i + 1 of a chain is accepted, given that those before it were. It is
an exponentially weighted mean: a trial weighs `keep` times as much with each later one. A sequence
begins as the average of all (a prior of PRIOR trials) and moves to its own; all begin at START.

For the truth told to users: totals by position, which forget nothing.

Knows: counts. Knows nothing of time (`cost_model`) or of who drafted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from moeserve.draw import Doubles

START = 0.7  # of the first draft, before anything was measured: optimistic enough to try
PRIOR = 4.0  # trials that the average of all counts for in a sequence's own
KEEP_ALL = 0.998  # weight that a trial keeps with each later one, over all sequences
KEEP_ONE = 0.95  # the same of one sequence: its text changes


class Rates:
    """Of one sequence or of all. tried, right [K]: weights of trials and of accepted ones, in plain
    floats: they change each step."""

    __slots__ = ("keep", "right", "tried")

    def __init__(self, max_depth: int, keep: float) -> None:
        self.keep = keep
        self.tried = [0.0] * max_depth
        self.right = [0.0] * max_depth

    def add(self, num_drafted: int, num_accepted: int) -> None:
        """A chain of which so many were accepted: the next one was refused, those behind it were
        not tried."""
        tried, right, keep = self.tried, self.right, self.keep
        for i in range(min(num_accepted + 1, num_drafted, len(tried))):
            tried[i] = tried[i] * keep + 1
            right[i] = right[i] * keep + (i < num_accepted)

    def estimate(self, prior: Doubles, weight: float) -> Doubles:
        """[K] rates, with `prior` [K] counting for `weight` trials."""
        rates: Doubles = (np.array(self.right) + weight * prior) / (np.array(self.tried) + weight)
        return rates


class Acceptance:
    """Of one drafter on one rank."""

    def __init__(self, max_depth: int, start: float = START) -> None:
        assert max_depth >= 1 and 0 <= start <= 1
        self.max_depth = max_depth
        self._start = start
        self._all = Rates(max_depth, KEEP_ALL)
        self._own: dict[str, Rates] = {}
        self.drafted: NDArray[np.int64] = np.zeros(max_depth, np.int64)  # totals by position
        self.accepted: NDArray[np.int64] = np.zeros(max_depth, np.int64)
        self.num_runs = 0

    def add(self, request_id: str, num_drafted: int, num_accepted: int) -> None:
        """What became of a run. Of a tree: num_drafted is the depth it reached down to."""
        assert 0 <= num_accepted <= num_drafted
        if not num_drafted:
            return
        own = self._own.get(request_id)
        if own is None:
            own = self._own[request_id] = Rates(self.max_depth, KEEP_ONE)
        own.add(num_drafted, num_accepted)
        self._all.add(num_drafted, num_accepted)
        self.num_runs += 1
        self.drafted[:num_drafted] += 1
        self.accepted[:num_accepted] += 1

    def forget(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._own.pop(request_id, None)

    def rates(self, request_id: str | None = None) -> Doubles:
        """[K] of one sequence; None: of all."""
        prior = self._average()
        own = None if request_id is None else self._own.get(request_id)
        return prior if own is None else own.estimate(prior, PRIOR)

    def reaches(self, request_ids: Sequence[str]) -> Doubles:
        """[S, K] chance of each sequence that its draft i + 1 is accepted, with all before it."""
        prior = self._average()
        found = np.empty((len(request_ids), self.max_depth))
        for row, request_id in zip(found, request_ids, strict=True):
            own = self._own.get(request_id)
            row[:] = prior if own is None else own.estimate(prior, PRIOR)
        reach: Doubles = np.cumprod(found, axis=1, dtype=np.float64)
        return reach

    def _average(self) -> Doubles:
        # What is known of a position's neighbour is the best guess where nothing was tried.
        weight, rate, prior = PRIOR / 2, self._start, []
        for right, tried in zip(self._all.right, self._all.tried, strict=True):
            rate = (right + weight * rate) / (tried + weight)
            prior.append(rate)
        return np.array(prior)

    def reach(self, request_id: str | None = None) -> Doubles:
        """[K] of one sequence; None: of all."""
        reach: Doubles = np.cumprod(self.rates(request_id), dtype=np.float64)
        return reach

    @property
    def by_position(self) -> list[float]:
        """Measured since start: of the drafts at each position, the share that was accepted. A
        position counts as drafted also where an earlier one was refused."""
        return [float(a) / float(d) for a, d in zip(self.accepted, self.drafted, strict=True) if d]

    @property
    def mean_accepted(self) -> float:
        """Drafts accepted a run; tokens a run are one more."""
        return float(self.accepted.sum()) / self.num_runs if self.num_runs else 0.0


def expected_tokens(rate: float, k: int) -> float:
    """Tokens of a run of k drafts, each accepted with chance a: (1 - a^(k+1)) / (1 - a)."""
    assert 0 <= rate <= 1 and k >= 0
    return float(k + 1) if rate == 1 else (1 - rate ** (k + 1)) / (1 - rate)


def predicted_speedup(rate: float, k: int, cost: float) -> float:
    """Leviathan et al., Theorem 3.8. cost: a draft's time over that of a step of the target; the
    theorem takes the step over k + 1 tokens to be no longer than that over one."""
    assert cost >= 0
    return expected_tokens(rate, k) / (1 + cost * k)


def mean_rate(reach: Doubles, k: int) -> float:
    """The one rate that gives the expected tokens of these positions: what to put into the formula
    where the measured rates differ by position. reach [>= k]; by bisection."""
    wanted = 1.0 + float(reach[:k].sum())
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, k) < wanted else (low, middle)
    return (low + high) / 2
