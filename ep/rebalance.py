"""When to rebalance, and the steps of a rebalance as a state machine that all ranks run alike.

    IDLE -> PLANNING -> CHECKING -> MOVING (batch 0, 1, ...) -> IDLE

Each step of serving every rank casts a `Ballot` along with its vote in lockstep; `advance` is a
pure function of the position and of all ballots, so ranks that start alike stay alike, and what is
collective (to sum loads, to hand on the plan, to switch a batch) happens at the same step on all.
A rank that fails says so in its ballot, and all give up at the same step; batches that have
switched stay, the others keep the placement that they have.

Knows: ballots, positions, what a load window says about a placement. Knows nothing of processes,
clocks, weights or of how a plan is made.

Shape letters: L layers, E logical experts, G ranks.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from ep.load import load_of_ranks
from ep.placement import ExpertPlacement

_MOST_DOUBLINGS = 5  # of the interval, while rebalances fail


class Stage(enum.IntEnum):
    IDLE = 0
    PLANNING = 1  # the loads are summed; rank 0 makes a plan
    CHECKING = 2  # all have the new table and work out the moves
    MOVING = 3  # a batch is fetched, in the background


class Say(enum.IntEnum):
    """What a rank says besides its vote."""

    NOTHING = 0
    ASK = 1  # rank 0, IDLE: an operator wants a rebalance
    NO_PLAN = 2  # rank 0, PLANNING: nothing is to be moved; cause says why
    PLAN = 3  # rank 0, PLANNING: receive my plan
    CHECKED = 4  # CHECKING: value is the digest of the moves as this rank sees them
    READY = 5  # MOVING: all of batch `value` lies here, verified
    FAILED = 6  # not IDLE: cause says why


class Cause(enum.IntEnum):
    """Why a rebalance ended as it did. The first ones are `ep.transfer.Trouble`."""

    NONE = 0
    DEADLINE = 1
    SILENT = 2
    CHECKSUM = 3
    STALE = 4
    SIZE = 5
    BROKEN = 6
    NO_PROGRESS = 10
    PLANNER = 11
    STAGING = 12
    DIFFERS = 13
    BALANCED = 20
    TOO_FEW_TOKENS = 21
    NO_GAIN = 22
    SAME = 23
    DRY_RUN = 24
    REFUSED = 25


CAUSE_TEXT = {
    Cause.NONE: "",
    Cause.DEADLINE: "the batch did not arrive before its deadline",
    Cause.SILENT: "a source stopped answering",
    Cause.CHECKSUM: "a bundle arrived damaged",
    Cause.STALE: "a source serves another plan",
    Cause.SIZE: "a bundle has another size at its source",
    Cause.BROKEN: "an error while moving",
    Cause.NO_PROGRESS: "no progress within the deadline",
    Cause.PLANNER: "the plan could not be made",
    Cause.STAGING: "a layer needs more staging memory than max_staging_bytes",
    Cause.DIFFERS: "ranks work out different moves from the same plan",
    Cause.BALANCED: "balanced enough",
    Cause.TOO_FEW_TOKENS: "too few tokens in the window",
    Cause.NO_GAIN: "the best plan gains too little",
    Cause.SAME: "the best plan is the placement in use",
    Cause.DRY_RUN: "a dry run",
    Cause.REFUSED: "what was asked for cannot be done",
}


class Result(enum.Enum):
    DONE = "done"  # the new placement serves
    NOTHING = "nothing"  # looked, and nothing was to be moved
    ABANDONED = "abandoned"  # given up; what had switched stays


@dataclass(frozen=True)
class Ballot:
    """say with its value (a digest, a batch) or cause. Numbers only: it travels in the vote."""

    say: Say = Say.NOTHING
    value: int = 0
    cause: Cause = Cause.NONE


@dataclass(frozen=True)
class Position:
    """Where all ranks are. plan: number of the rebalance, the last one's while IDLE. steps_left:
    steps with work until the window is looked at again. failures: abandoned ones in a row."""

    stage: Stage = Stage.IDLE
    plan: int = 0
    batch: int = 0
    steps_left: int = 0
    failures: int = 0

    @property
    def number(self) -> int:
        """What must be equal on all ranks before each step."""
        return (self.plan << 32) | (self.stage << 28) | self.batch


class Do(enum.Enum):
    GATHER = "gather"  # collective: sum the load windows; rank 0 then begins to plan
    RECEIVE = "receive"  # collective: rank 0 hands on its plan; all begin to work out the moves
    FETCH = "fetch"  # begin to fetch `batch`
    SWITCH = "switch"  # put what was fetched of `batch` to use, before the next forward pass
    END = "end"  # it is over: `result`, `cause`, and the rank that said so


@dataclass(frozen=True)
class Order:
    do: Do
    batch: int = 0
    result: Result = Result.DONE
    cause: Cause = Cause.NONE
    rank: int = 0


def begin(interval_steps: int) -> Position:
    """interval_steps 0: the window is never looked at without being asked to."""
    return Position(steps_left=interval_steps)


def advance(
    at: Position,
    ballots: Sequence[Ballot],
    *,
    ran: bool,
    num_batches: int,
    interval_steps: int,
) -> tuple[Position, tuple[Order, ...]]:
    """The next position, and what every rank must do now, in this order.

    ballots [G] in order of rank; ran: this step has work; num_batches: of the plan that is checked
    or moved (0 before; equal digests say that it is equal everywhere).
    """
    if at.stage is Stage.IDLE:
        return _idle(at, ballots, ran, interval_steps)
    for rank, ballot in enumerate(ballots):
        if ballot.say is Say.FAILED:
            return _end(at, Result.ABANDONED, ballot.cause, rank, interval_steps)
    first = ballots[0]
    if at.stage is Stage.PLANNING:
        if first.say is Say.NO_PLAN:
            return _end(at, Result.NOTHING, first.cause, 0, interval_steps)
        if first.say is Say.PLAN:
            return replace(at, stage=Stage.CHECKING), (Order(Do.RECEIVE),)
    elif at.stage is Stage.CHECKING:
        if all(b.say is Say.CHECKED for b in ballots):
            odd = [r for r, b in enumerate(ballots) if b.value != first.value]
            if odd:
                return _end(at, Result.ABANDONED, Cause.DIFFERS, odd[0], interval_steps)
            return replace(at, stage=Stage.MOVING), (Order(Do.FETCH, 0),)
    elif all(b.say is Say.READY and b.value == at.batch for b in ballots):
        switch = Order(Do.SWITCH, at.batch)
        if at.batch + 1 == num_batches:
            after, orders = _end(at, Result.DONE, Cause.NONE, 0, interval_steps)
            return after, (switch, *orders)
        after = replace(at, batch=at.batch + 1)
        return after, (switch, Order(Do.FETCH, after.batch))
    return at, ()


def _idle(
    at: Position, ballots: Sequence[Ballot], ran: bool, interval_steps: int
) -> tuple[Position, tuple[Order, ...]]:
    due = False
    if interval_steps and ran:
        at = replace(at, steps_left=at.steps_left - 1)
        due = at.steps_left <= 0
    if not due and ballots[0].say is not Say.ASK:
        return at, ()
    return replace(at, stage=Stage.PLANNING, plan=at.plan + 1, batch=0), (Order(Do.GATHER),)


def _end(
    at: Position, result: Result, cause: Cause, rank: int, interval_steps: int
) -> tuple[Position, tuple[Order, ...]]:
    failures = at.failures + 1 if result is Result.ABANDONED else 0
    wait = interval_steps << min(failures, _MOST_DOUBLINGS)
    after = Position(plan=at.plan, steps_left=wait, failures=failures)
    return after, (Order(Do.END, at.batch, result, cause, rank),)


# -- policy -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RebalancePolicy:
    """threshold: utilisation at or above which nothing is planned. min_gain: of utilisation, below
    which a plan is not worth its moves. min_picks: mean picks an expert in the window (of layers
    that have any) below which it says too little."""

    threshold: float = 0.95
    min_gain: float = 0.01
    min_picks: float = 16.0


def utilisation(loads: ArrayLike, placement: ExpertPlacement) -> float:
    """loads [L, E] -> mean over layers of mean / largest rank load: 1 is perfect. Layers without
    load (an MTP layer that does not run) do not count; without any load it is 1."""
    ranks = load_of_ranks(loads, placement)
    busy = ranks[ranks.sum(axis=1) > 0]
    return float((busy.mean(axis=1) / busy.max(axis=1)).mean()) if len(busy) else 1.0


def look(loads: ArrayLike, placement: ExpertPlacement, policy: RebalancePolicy) -> Cause:
    """Is a plan to be made? NONE: yes; else why not."""
    loads = np.asarray(loads)
    busy = loads[loads.sum(axis=1) > 0]
    if not len(busy) or busy.mean() < policy.min_picks:
        return Cause.TOO_FEW_TOKENS
    if utilisation(loads, placement) >= policy.threshold:
        return Cause.BALANCED
    return Cause.NONE


def weigh(
    loads: ArrayLike, old: ExpertPlacement, new: ExpertPlacement, policy: RebalancePolicy
) -> Cause:
    """Is a plan worth its moves? NONE: yes; else why not."""
    if not len(old.diff(new)):
        return Cause.SAME
    if utilisation(loads, new) - utilisation(loads, old) < policy.min_gain:
        return Cause.NO_GAIN
    return Cause.NONE


def keep_idle_layers(
    loads: ArrayLike, old: ExpertPlacement, new: ExpertPlacement
) -> ExpertPlacement:
    """new, but layers without load as they are in old: nothing is known to be gained there."""
    table = new.physical_to_logical.copy()
    idle = np.asarray(loads).sum(axis=1) == 0
    table[idle] = old.physical_to_logical[idle]
    return ExpertPlacement(table, new.num_logical_experts, new.num_ranks, new.generation)
