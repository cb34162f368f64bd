"""How deep to draft: what makes the most tokens a second, agreed by all ranks.

Each rank offers, for every depth from 0 to K, the tokens that it expects of the next step and the
rows that it would run. All ranks see all offers and rank 0's costs, and take the depth at which
all ranks' tokens over the step's time is largest: a pure function of agreed whole numbers (law 1).

Within a depth a sequence drafts as far as a draft is worth its row: as long as the chance that it
is accepted is above `threshold`, the tokens that the time of one row would make elsewhere. With the
rate of the last agreement as the worth of time this is Dinkelbach's method for a largest ratio, one
iteration a step: drafts worth less than the rate go, the rate grows, until nothing changes.

Estimates shake, so what decides is a running mean of each depth's rate over that of none, and a
depth is left only for one that is better by MARGIN, and not before HOLD steps. Whether drafts pay
at all is tried: TRIAL steps that draft and do not by turns, so that whatever else the machine does
lies on both sides; costs are measured anew. The first trial begins with step FIRST, the next one
after PROBE / 2 at depth 0; one without hope ends early, one that is nearly worth it goes on. Where
drafts were given up soon, more is asked of the next attempt and trials come later and later, until
the load has halved or doubled; where they had paid for long, the next trial comes soon. Where they
pay a little only, such turns every PROBE steps measure what none would cost. Looking is not free:
it is done every few steps.

What a sequence's end leaves no room for is no reason to change the depth: offers are of sequences
that go on, and whoever runs the step cuts its rounds (`Speculator.agreed`).

Knows: chances and whole nanoseconds. Knows nothing of tokens, clocks or how ranks talk.

Shape letters: S sequences, K largest depth, R ranks.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moeserve.draw import Doubles
from moeserve.speculate.cost_model import Costs

MILLIONTHS = 1_000_000  # expected tokens travel in these
MARGIN = 1.03
WORTH = 1.06  # of the speed without drafts: a trial that gets there has paid
LEAST = 1.01  # as estimates shake: who is that near to no drafts may stay
HOLD = 8
PROBE, TRIAL = 256, 16
FIRST = 8  # the step with which the first trial begins: first calls tell little
CHECK = 12  # steps of a trial that asks whether drafts still pay
CHECK_FIRST = 64  # steps to the first of these
HOPELESS, SURE = 0.8, 8  # of the speed without drafts, after so many steps: a trial ends
NEARLY, MOST_TRIALS = 0.93, 3  # of the same: a trial that gets there goes on, so often in all
DOUBTFUL = 1.5
QUICK = 0.4  # weight of what is seen now in the running mean
LOOK, LOOK_ON = 32, 4  # steps from look to look at depth 0, and above
HOLD_BEFORE = 8  # steps before a trial: rows of so many fit beside a step of the usual budget
SOON, DOUBT, MOST_LOSSES = 64, 0.02, 5

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Offer:
    """expected[d]: millionths of tokens that this rank makes in a step with drafts of depth d;
    rows[d]: that it runs then. Both zero on a rank that decodes nothing."""

    expected: tuple[int, ...]
    rows: tuple[int, ...]

    @classmethod
    def none(cls, max_depth: int) -> Offer:
        return cls((0,) * (max_depth + 1), (0,) * (max_depth + 1))


def allot(reach: Doubles, room: Counts, depth: int, threshold: float, most: int) -> Counts:
    """[S] drafts a sequence. reach [S, K]: chance that a draft is accepted with all before it; room
    [S]: what limits and blocks allow. At most `most` in all, the likeliest first. A row of reach
    never grows, so whatever is taken of a sequence is a first part."""
    num, width = reach.shape
    depth = min(depth, width)
    at = np.arange(depth)
    wanted = (reach[:, :depth] > threshold) & (at < room[:, None])
    if int(wanted.sum()) > max(most, 0):
        chances = np.where(wanted, reach[:, :depth], -1.0).T.reshape(-1)  # [depth * S]
        order = np.argsort(-chances, kind="stable")[: max(most, 0)]
        taken = np.zeros(depth * num, np.bool_)
        taken[order] = True
        wanted &= taken.reshape(depth, num).T
    counts: Counts = wanted.sum(axis=1)
    return counts


def make_offer(reach: Doubles, room: Counts, threshold: float, most: int) -> Offer:
    """What a rank with these sequences can do at each depth. most: drafts that fit a step."""
    num, width = reach.shape
    wanted = (reach > threshold) & (np.arange(width) < room[:, None])
    if int(wanted.sum()) <= most:  # nobody is cut: the depths differ by a column each
        added = wanted.sum(axis=0).cumsum()
        gains = (reach * wanted).sum(axis=0).cumsum()
        whole = np.rint((num + gains) * MILLIONTHS).astype(np.int64).tolist()
        return Offer((num * MILLIONTHS, *whole), (num, *(num + added).tolist()))
    return _make_offer_slowly(reach, room, threshold, most)


def _make_offer_slowly(reach: Doubles, room: Counts, threshold: float, most: int) -> Offer:
    """Also where sequences compete for the last places; the twin of the quick way."""
    num, width = reach.shape
    sums = np.concatenate([np.zeros((num, 1)), reach.cumsum(axis=1)], axis=1)  # [S, K + 1]
    expected, rows = [], []
    for depth in range(width + 1):
        counts = allot(reach, room, depth, threshold, most)
        tokens = num + float(sums[np.arange(num), counts].sum())
        expected.append(int(round(tokens * MILLIONTHS)))
        rows.append(num + int(counts.sum()))
    return Offer(tuple(expected), tuple(rows))


class AdaptiveDepth:
    """State of the agreement, the same on every rank: it changes by `agree` and `pass_by` alone."""

    def __init__(self, max_depth: int) -> None:
        assert max_depth >= 1
        self.max_depth = max_depth
        self.depth = 0
        self.threshold = 0.0
        self.predicted = 1.0  # tokens a second at this depth over those at 0
        self.renews = False  # costs are to be measured anew from this step on
        self._gains = [1.0] * (max_depth + 1)  # running means of rates over that of none
        self._since = 0  # steps since the depth changed
        self._on = 0  # steps since drafting began; 0 where it is off
        self._off = PROBE // 2 - FIRST  # steps since it was off, or last tried
        self._trial = 0  # steps left of a trial
        self._tried = 0  # its depth
        self._trials = 0  # of this attempt
        self._checks = False  # the trial asks whether drafts still pay
        self._has_paid = False  # until it was given up: for SOON steps at least
        self._losses = 0  # times in a row that drafts were given up soon
        self._lost_at = 0  # rows of the step without drafts then

    def offer(self, reach: Doubles, room: Counts, most: int) -> Offer:
        """reach [S, K], room [S] of this rank's decodes; most: drafts that fit into its step."""
        return make_offer(reach[:, : self.max_depth], room, self._least, most)

    def allot(self, reach: Doubles, room: Counts, most: int) -> Counts:
        """[S] drafts a sequence at the agreed depth; call it with what was offered."""
        return allot(reach[:, : self.max_depth], room, self.depth, self._least, most)

    def agree(self, offers: Seq[Offer], costs: Costs) -> int:
        """offers [R], and rank 0's costs -> the depth of the drafts that come next."""
        if not any(offer.rows[0] for offer in offers):
            return self.depth  # nobody decodes: nothing is learned, nothing changes
        tokens = np.array([offer.expected for offer in offers]).sum(axis=0)
        rows = np.array([offer.rows for offer in offers]).max(axis=0)
        return self.agree_on(tokens, rows, costs)

    def agree_on(self, tokens: Counts, rows: Counts, costs: Costs) -> int:
        """The same of all ranks' offers together, where somebody decodes: tokens [K + 1] the sum
        of what they expect, rows [K + 1] the most of any."""
        rates = [
            expected / MILLIONTHS / max(costs.step(most, depth), 1)
            for depth, (expected, most) in enumerate(
                zip(tokens.tolist(), rows.tolist(), strict=True)
            )
        ]
        num_rows = int(rows[0])
        if 2 * num_rows <= self._lost_at or num_rows >= 2 * self._lost_at:
            self._losses = self._lost_at = 0  # another load than the one where they did not pay
        self._count()
        if self._trial:
            self._go_on_trying(rates, num_rows, costs)
        elif costs.is_known:
            weight = QUICK if self.depth else 1.0
            self._gains = [
                old + weight * (new - old)
                for old, new in zip(self._gains, _gains(rates), strict=True)
            ]
            if self._since >= HOLD:
                self._choose()
        if not self._trial:
            if not self.depth and self._off >= self._wait:
                self._trials = 0
                self._try(1, renews=True)
            elif self.depth and self._off >= PROBE and self.predicted < DOUBTFUL:
                self._check()
        self.predicted = rates[self.depth] / rates[0] if rates[0] > 0 else 1.0
        self.threshold = costs.a_token * rates[self.depth]
        return self.depth

    @property
    def looks(self) -> bool:
        """Whether the ranks offer anything this time: where it may change something."""
        if self._trial:
            return self._trial <= TRIAL - SURE
        if self.depth:
            return self._since % LOOK_ON == 0 or self._off >= PROBE
        return self._off % LOOK == 0 or self._off + 1 >= self._wait

    @property
    def holds(self) -> bool:
        """Whether a rank keeps what drafters want in a step that drafts nothing."""
        return self._trial > 0 or self.depth > 0 or self._off + HOLD_BEFORE >= self._wait

    def pass_by(self) -> int:
        """A step in which somebody decodes and nobody looks."""
        self._count()
        if self._trial:
            self._take_turn()
        return self.depth

    # -- parts ---------------------------------------------------------------------------------

    @property
    def _least(self) -> float:
        """Chance that a draft must have: in a trial all are tried."""
        return 0.0 if self._trial else self.threshold

    @property
    def _wait(self) -> int:
        """Steps at depth 0 before a trial."""
        return PROBE // 4 if self._has_paid else PROBE // 2 << max(self._losses - 1, 0)

    def _count(self) -> None:
        self.renews = False
        self._off += 1
        self._since += 1
        if self._on:
            self._on += 1

    def _try(self, depth: int, renews: bool = False) -> None:
        """renews: costs of before are of no use, as who knows what ran beside them."""
        self.renews, self._checks = renews, False
        self._trial, self._tried, self._off = TRIAL, depth, 0
        self._trials += 1
        self._on = max(self._on, 1)
        self._move(depth)

    def _check(self) -> None:
        self._checks, self._trial, self._tried, self._off = True, CHECK, self.depth, 0

    def _take_turn(self) -> None:
        self._trial -= 1
        self._move(0 if self.depth else self._tried)

    def _go_on_trying(self, rates: Seq[float], num_rows: int, costs: Costs) -> None:
        self._take_turn()
        gains = _gains(rates)
        best = max(range(1, len(gains)), key=lambda d: (gains[d], -d))
        gain = gains[best]
        if costs.is_known and self._trial <= TRIAL - SURE and gain < HOPELESS:
            self._trial = 0
        if self._trial:
            return
        if not costs.is_known:
            self._try(1)  # there were prompts all the time
            return
        self._gains = gains
        if gain * LEAST >= 1 if self._checks else gain > WORTH:
            self._off = 0 if self._checks or self._losses else PROBE - CHECK_FIRST
            self._move(best)
        elif self._checks or self._trials >= MOST_TRIALS:
            self._give_up(num_rows)
        elif not costs.is_likely:
            self._try(1, renews=True)  # a neighbour's work, or first calls
        elif gain > NEARLY:
            self._try(best)
        else:
            self._give_up(num_rows)

    def _choose(self) -> None:
        """Back to less is as good as forward to more: both must be worth it. But a depth that loses
        against none is left, by way of a trial."""
        gains, here = self._gains, self._gains[self.depth]
        best = max(range(len(gains)), key=lambda d: (gains[d], -d))
        margin = MARGIN if self.depth else MARGIN + DOUBT * self._losses
        loses = here * LEAST < gains[0]
        if best == self.depth or not (loses or gains[best] > here * margin):
            return
        if not best:
            self._check()  # what none costs was measured long ago
        elif self.depth:
            self._move(best)
        else:
            self._off, self._trials = self._wait, 0  # what is only estimated is tried first

    def _give_up(self, num_rows: int) -> None:
        self._has_paid = self._on >= SOON
        self._losses = 1 if self._has_paid else min(self._losses + 1, MOST_LOSSES)
        self._lost_at, self._on, self._off = num_rows, 0, 0
        self._move(0)

    def _move(self, depth: int) -> None:
        if depth != self.depth:
            self.depth, self._since = depth, 0


def _gains(rates: Seq[float]) -> list[float]:
    """Divisions alone: whatever ranks run on, they agree to the last bit."""
    return [rate / rates[0] if rates[0] > 0 else 1.0 for rate in rates]


class FixedDepth:
    """`--speculate mtp:3`: the same depth whenever anybody decodes; sequences draft what they have
    room for. Nothing of it is agreed."""

    def __init__(self, depth: int) -> None:
        assert depth >= 1
        self.max_depth = self.depth = depth

    holds = True  # where ends leave no room for a draft: the next step goes on

    def share(self, room: Seq[int], most: int) -> list[int]:
        """Drafts of each sequence. room: what limits and blocks allow; most: in all. Who has least
        is given first."""
        counts = [min(x, self.depth) for x in room]
        while sum(counts) > max(most, 0):
            deepest = max(counts)
            counts[len(counts) - 1 - counts[::-1].index(deepest)] -= 1
        return counts
