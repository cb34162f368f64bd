"""What a step costs: seconds of the target over n tokens, and of a round of drafting.

step(n) = fixed + slope * n, fitted to the steps that were run by least squares with forgetting; a
step far off (a page fault, a neighbour's prefill, a first call) moves the line as little as one at
the edge of what is usual. Where all steps had about the same n there is no slope to be seen: the
prior's share of slope to fixed is kept, so that the model never takes drafts to be free because it
has not tried any.

draft(d) = draft + d * round: the same fit over the rounds of a step, d of them; none cost nothing.

Knows: seconds and counts, in whole nanoseconds where ranks must agree. Pure: no clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

KEEP = 0.98  # weight that a step keeps with each later one: about the last 50 steps count
USUAL = 3.0  # a step may be off by so many times the usual deviation before it is held back
SLOPE = 0.04  # prior: one more token costs so much of a step of none
TRUST = 0.1  # how far off the prior may well be, of a mean step
ROUND = 0.1  # prior: a round over a step of one token, before any was run
ROUNDS = 3.0  # prior: a round over what drafting costs besides


class LineFit:
    """y = a + b * x by weighted least squares, with forgetting and a prior that says b = ratio * a.

    The prior weighs as much as steps would that tell b to TRUST of the mean a unit of x: the more
    the steps shake, the more of them it takes to say otherwise. In plain floats: called each step.
    """

    __slots__ = ("_deviation", "_keep", "_n", "_ratio", "_sx", "_sxx", "_sxy", "_sy", "num_points")

    def __init__(self, ratio: float, keep: float = KEEP) -> None:
        self._ratio, self._keep = ratio, keep
        self._n = self._sx = self._sy = self._sxx = self._sxy = 0.0
        self._deviation = 0.0
        self.num_points = 0

    def add(self, x: float, y: float) -> None:
        if y <= 0 or not isfinite(y):
            return
        if self.num_points >= 3:
            guess = self(x)
            off = y - guess
            bound = USUAL * max(self._deviation, 0.02 * guess)
            self._deviation += 0.1 * (min(abs(off), bound) - self._deviation)
            y = guess + min(max(off, -bound), bound)
        elif self.num_points == 2:
            self._deviation = abs(y - self(x)) / 2
        keep = self._keep
        self._n = self._n * keep + 1.0
        self._sx = self._sx * keep + x
        self._sy = self._sy * keep + y
        self._sxx = self._sxx * keep + x * x
        self._sxy = self._sxy * keep + x * y
        self.num_points += 1

    @property
    def line(self) -> tuple[float, float]:
        """(a, b), neither below 0. Zeros before the first point."""
        if not self._n:
            return 0.0, 0.0
        mean_x, mean_y = self._sx / self._n, self._sy / self._n
        spread, common = self._sxx - self._sx * mean_x, self._sxy - self._sx * mean_y
        # The prior is a slope as well, that of a line through the mean with b = ratio * a.
        prior = self._ratio * mean_y / (1 + self._ratio * mean_x)
        weight = max(1.0, (self._deviation * (1 + mean_x) / (TRUST * mean_y)) ** 2)
        slope = (common + weight * prior) / (spread + weight)
        slope = min(max(slope, 0.0), mean_y / mean_x if mean_x > 0 else slope)
        return mean_y - slope * mean_x, slope

    def __call__(self, x: float) -> float:
        a, b = self.line
        return a + b * x


@dataclass(frozen=True)
class Costs:
    """Whole nanoseconds, so that they travel in a vote and mean the same on every rank. fixed and
    a_token: of a step of the target; a_round: of a round of drafting (of all ranks together);
    a_draft: of drafting at all, however deep."""

    fixed: int
    a_token: int
    a_round: int
    a_draft: int = 0

    def step(self, num_tokens: int, rounds: int) -> int:
        """num_tokens: the most of any rank."""
        drafting = self.a_draft + self.a_round * rounds if rounds else 0
        return self.fixed + self.a_token * num_tokens + drafting

    @property
    def is_known(self) -> bool:
        return self.fixed + self.a_token > 0

    @property
    def numbers(self) -> tuple[int, int, int, int]:
        """For a vote."""
        return self.fixed, self.a_token, self.a_round, self.a_draft

    def ratio(self, rounds: int = 1, num_tokens: int = 1) -> float:
        """c of Leviathan's theorem: a round, where so many are run, over a step of so many tokens
        without drafts."""
        whole, rounds = self.step(num_tokens, 0), max(rounds, 1)
        return (self.a_round + self.a_draft / rounds) / whole if whole else 0.0


class CostModel:
    def __init__(self, slope: float = SLOPE, round_share: float = ROUND) -> None:
        """round_share: prior, a round of drafting over a step of one token."""
        self._step = LineFit(slope)
        self._drafting = LineFit(ROUNDS)
        self._round_share = round_share

    def add(self, num_tokens: int, seconds: float, rounds: int = 0, drafting: float = 0.0) -> None:
        """A step of decodes: num_tokens, the most of any rank, in `seconds` without drafting, which
        took `drafting` in so many rounds. Steps with prefills tell nothing about decodes."""
        self._step.add(float(num_tokens), seconds)
        if rounds > 0:
            self._drafting.add(float(rounds), drafting)

    @property
    def is_known(self) -> bool:
        return self._step.num_points >= 5

    def costs(self) -> Costs:
        """Zeros until there is enough to go by."""
        if not self.is_known:
            return Costs(0, 0, 0)
        fixed, slope = self._step.line
        a_draft, a_round = 0.0, self._round_share * (fixed + slope)
        if self._drafting.num_points:
            a_draft, a_round = self._drafting.line
        return Costs(*(int(round(x * 1e9)) for x in (fixed, slope, a_round, a_draft)))
