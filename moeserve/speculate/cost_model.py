"""What a step costs: seconds of the target over n tokens, and of a round of drafting.

step(n) = fixed + slope * n, a line through medians: steps of about as many tokens lie together, the
last ones of each, so that first calls, page faults and neighbours' work move nothing. Where all
steps had about the same n there is no slope to be seen: the prior's share of slope to fixed is
kept, and it gives way as soon as a few steps of another size were run.

draft(d) = draft + d * round: the same through the rounds of a step, d of them; none cost nothing.

All of it is divided by the load of its time: how much longer steps take now than steps of the same
size did before. What was measured under another load stays comparable, and only that decides. While
all steps are of one size they tell the load alone: their own line would drift from the others'.

Knows: seconds and counts, in whole nanoseconds where ranks must agree. Pure: no clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import exp, isfinite, log
from statistics import median

SLOPE = 0.02  # prior: one more token costs so much of a step of none
TRUST = 0.5  # the prior weighs as so many steps that differ by the mean of their sizes
ROUND = 0.1  # prior: a round over a step of one token, before any was run
ROUNDS = 1.0  # prior: a round over what drafting costs besides; too low is soon found out
LAST = 15  # steps of a size that are kept
FEW = 3  # of a size: fewer tell little of the load, and their median less of the size
FADE, LEAST_WEIGHT = 0.99, 0.02  # of a size, with each step of another one
QUICK, MOST = 0.15, 0.5  # how fast the load follows; what one step may say of it (logarithms)
ENOUGH = 5  # steps before anything is said


@dataclass
class _Size:
    """Steps of about the same x: the last ones, and their medians."""

    points: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=LAST))
    at: int = 0  # number of the last of them
    x: float = 0.0
    y: float = 0.0

    def add(self, x: float, y: float, number: int) -> None:
        self.points.append((x, y))
        self.at = number
        self.x = sum(p[0] for p in self.points) / len(self.points)
        self.y = median(p[1] for p in self.points)


class MedianLine:
    """y = a + b * x through the medians of what lies together, with a prior: b = ratio * a."""

    __slots__ = ("_found", "_ratio", "_sizes", "num_points")

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio
        self._sizes: dict[int, _Size] = {}
        self._found: tuple[float, float] | None = (0.0, 0.0)
        self.num_points = 0

    def add(self, x: float, y: float) -> None:
        if y <= 0 or not isfinite(y):
            return
        self.num_points += 1
        self._sizes.setdefault(_key(x), _Size()).add(x, y, self.num_points)
        self._found = None

    def is_full(self, x: float) -> bool:
        size = self._sizes.get(_key(x))
        return size is not None and len(size.points) == LAST

    def usual(self, x: float) -> float | None:
        """What steps of this size took: nothing is assumed; None where there are too few."""
        size = self._sizes.get(_key(x))
        return size.y if size is not None and len(size.points) >= FEW else None

    @property
    def line(self) -> tuple[float, float]:
        """(a, b), neither below 0. Zeros before the first point."""
        if self._found is None:
            self._found = self._fit()
        return self._found

    def _fit(self) -> tuple[float, float]:
        n = sx = sy = 0.0
        weights = []
        for size in self._sizes.values():
            fresh = max(FADE ** (self.num_points - size.at), LEAST_WEIGHT)
            weight = fresh * len(size.points) ** 2 / LAST
            weights.append(weight)
            n, sx, sy = n + weight, sx + weight * size.x, sy + weight * size.y
        mean_x, mean_y = sx / n, sy / n
        spread = common = 0.0
        for size, weight in zip(self._sizes.values(), weights, strict=True):
            spread += weight * (size.x - mean_x) ** 2
            common += weight * (size.x - mean_x) * (size.y - mean_y)
        # The prior is a slope as well, that of a line through the mean with b = ratio * a.
        prior = self._ratio * mean_y / (1 + self._ratio * mean_x)
        trust = TRUST * (max(mean_x, 1.0) / 2) ** 2
        slope = max((common + trust * prior) / (spread + trust), 0.0)
        slope = min(slope, mean_y / mean_x) if mean_x > 0 else slope
        return mean_y - slope * mean_x, slope

    def __call__(self, x: float) -> float:
        a, b = self.line
        return a + b * x


def _key(x: float) -> int:
    """Of sizes that lie together: whole numbers up to 8, then a fifth apart."""
    return round(x) if x < 8 else 8 + int(log(x / 8) / log(1.2))


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
    def is_likely(self) -> bool:
        """A step of one token is mostly what any step costs: weights are read once for all tokens.
        Where one token seems to be most of it, the sizes were measured under unlike loads."""
        return self.a_token <= self.fixed

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
        self._slope, self._round_share = slope, round_share
        self.renew()

    def renew(self) -> None:
        """Forget everything: what was measured is not to be trusted."""
        self._step = MedianLine(self._slope)
        self._drafting = MedianLine(ROUNDS)
        self._load = 0.0  # logarithm of what a step takes over what one of its size did
        self._last, self._alike = -1, 0  # size of the last step, and steps of that in a row
        self._told: Costs | None = None

    def add(self, num_tokens: int, seconds: float, rounds: int = 0, drafting: float = 0.0) -> None:
        """A step of decodes: num_tokens, the most of any rank, in `seconds` without drafting, which
        took `drafting` in so many rounds. Steps with prefills tell nothing about decodes."""
        if seconds > 0 and isfinite(seconds):
            usual = self._step.usual(num_tokens)
            if usual is not None:
                off = log(seconds / usual) - self._load
                self._load += QUICK * min(max(off, -MOST), MOST)
            size = _key(num_tokens)
            self._last, self._alike = size, self._alike + 1 if size == self._last else 0
            if self._alike <= LAST or not self._step.is_full(num_tokens):
                self._step.add(num_tokens, seconds * exp(-self._load))
        if rounds > 0:
            self._drafting.add(rounds, drafting * exp(-self._load))
        self._told = None

    @property
    def is_known(self) -> bool:
        return self._step.num_points >= ENOUGH

    def costs(self) -> Costs:
        """Under the load of now. Zeros until there is enough to go by."""
        if not self.is_known:
            return Costs(0, 0, 0)
        if self._told is None:
            fixed, slope = self._step.line
            a_draft, a_round = 0.0, self._round_share * (fixed + slope)
            if self._drafting.num_points:
                a_draft, a_round = self._drafting.line
            unit = 1e9 * exp(self._load)
            self._told = Costs(*(int(round(x * unit)) for x in (fixed, slope, a_round, a_draft)))
        return self._told
