"""Lockstep: the one small collective a step by which all ranks agree what comes next.

Each rank puts in a `Vote`; all get the same `StepAgreement`, since it is a function of all votes
alone. So every rank runs a step when any has work, and all leave at the same step (law 1). Votes
also carry what must be equal everywhere (step number, settings, placement generation, membership
epoch, position in a rebalance); where it is not, every rank raises the same LockstepDiverged at the
same step.

Knows: votes and a CPU process group. Knows nothing of sequences or models.
"""

from __future__ import annotations

import enum
import json
import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ep.group import EPGroup, gather_objects
from ep.rebalance import Ballot, Cause, Say
from moeserve.errors import ConfigError, EngineFailed


class Phase(enum.IntFlag):
    """What a step holds on a rank; over ranks it is the union."""

    IDLE = 0
    PREFILL = 1
    DECODE = 2
    MIXED = 3


class LockstepDiverged(EngineFailed):
    """Ranks disagree in what must be equal: `field` and the value of each rank."""

    def __init__(self, field: str, values: list[int]) -> None:
        self.field, self.values = field, values
        said = ", ".join(f"rank {r}: {v}" for r, v in enumerate(values))
        super().__init__(f"lockstep: ranks differ in {field} ({said})")


class PeerFailed(EngineFailed):
    """A rank said in its vote that it can not go on; all ranks end at the same step."""

    def __init__(self, ranks: list[int]) -> None:
        self.ranks = ranks
        super().__init__(f"rank {ranks[0]} failed and said so in lockstep (see its own message)")


@dataclass(frozen=True)
class Vote:
    """One rank's part. wants_stop counts once no rank has work left. recording: the number of the
    load recording that it is ready to record, 0 for none; trace: likewise. settings: hash of all
    that shapes the collectives (`settings_hash`). rebalance: `ep.rebalance.Position.number`;
    ballot: about it. drafting: what speculation agrees on (`Speculator.offer`), of the width that
    lockstep was made for. context: positions that its rows attend to, one row after the other."""

    has_work: bool
    num_tokens: int = 0
    num_sequences: int = 0
    phase: Phase = Phase.IDLE
    wants_stop: bool = False
    failed: bool = False
    placement_generation: int = 0
    membership_epoch: int = 0
    settings: int = 0
    recording: int = 0
    rebalance: int = 0
    ballot: Ballot = Ballot()
    trace: int = 0
    drafting: Seq[int] = ()
    context: int = 0


def _nothing() -> NDArray[np.int64]:
    return np.zeros((0, 0), np.int64)


@dataclass(frozen=True)
class StepAgreement:
    """The same on every rank. num_tokens [R]: of each rank, so that one can see who is idle.
    recording: what every rank voted for alike, else 0: the step is recorded on all ranks or none.
    trace: likewise.
    ballots [R]: what ranks say about a rebalance; () where none says anything.
    drafting [R, columns]: what each rank said. context: the most of any rank.
    """

    step: int
    run: bool  # a forward pass follows, on every rank
    stop: bool  # no step follows: leave the loop
    phase: Phase
    num_tokens: tuple[int, ...]
    recording: int = 0
    ballots: tuple[Ballot, ...] = ()
    trace: int = 0
    context: int = 0
    drafting: NDArray[np.int64] = field(default_factory=_nothing, compare=False)

    @property
    def max_tokens(self) -> int:
        return max(self.num_tokens)


_FIELDS = (
    "step",
    "settings",
    "placement_generation",
    "membership_epoch",
    "rebalance",
    "has_work",
    "num_tokens",
    "num_sequences",
    "context",
    "phase",
    "wants_stop",
    "failed",
    "recording",
    "trace",
    "say",
    "say_value",
    "say_cause",
)
_EQUAL = _FIELDS[:5]  # these first: what must not differ
_COLUMN = {name: i for i, name in enumerate(_FIELDS)}


class Lockstep:
    def __init__(self, group: EPGroup, num_drafting: int = 0) -> None:
        """num_drafting: columns of `Vote.drafting`, the same on all ranks."""
        self._group = group
        self._step = 0
        width = len(_FIELDS) + num_drafting
        self._mine = torch.zeros(width, dtype=torch.int64)
        self._all = torch.zeros(group.size, width, dtype=torch.int64)
        self._parts = list(self._all.unbind(0))
        self._mine_np: NDArray[np.int64] = self._mine.numpy()
        self._all_np: NDArray[np.int64] = self._all.numpy()
        self._finished = time.monotonic()

    def of_width(self, num_drafting: int) -> Lockstep:
        """The same one, its steps numbered on, with so many columns of `Vote.drafting`."""
        other = Lockstep(self._group, num_drafting)
        other._step = self._step
        return other

    @property
    def age(self) -> float:
        """Seconds since the last agreement: the watchdog's number."""
        return time.monotonic() - self._finished

    def agree(self, vote: Vote) -> StepAgreement:
        """One collective (none in a group of one). Raises LockstepDiverged or PeerFailed, on all
        ranks alike; whatever a broken connection raises is the caller's to translate."""
        self._step += 1
        if self._group.size == 1:
            if vote.failed:
                raise PeerFailed([0])
            self._finished = time.monotonic()
            return StepAgreement(
                self._step,
                run=vote.has_work,
                stop=vote.wants_stop and not vote.has_work,
                phase=vote.phase,
                num_tokens=(vote.num_tokens,),
                recording=vote.recording,
                trace=vote.trace,
                context=vote.context,
                drafting=np.array([vote.drafting], np.int64) if vote.drafting else _nothing(),
            )
        self._mine_np[: len(_FIELDS)] = (
            self._step,
            vote.settings,
            vote.placement_generation,
            vote.membership_epoch,
            vote.rebalance,
            vote.has_work,
            vote.num_tokens,
            vote.num_sequences,
            vote.context,
            vote.phase,
            vote.wants_stop,
            vote.failed,
            vote.recording,
            vote.trace,
            vote.ballot.say,
            vote.ballot.value,
            vote.ballot.cause,
        )
        self._mine_np[len(_FIELDS) :] = vote.drafting
        dist.all_gather(self._parts, self._mine, group=self._group.cpu_group)
        self._finished = time.monotonic()
        return _judge(self._all_np)


def _judge(votes: NDArray[np.int64]) -> StepAgreement:
    """votes [R, fields] -> what all ranks do; pure, so the same everywhere."""
    failed = np.flatnonzero(votes[:, _COLUMN["failed"]])
    if len(failed):
        raise PeerFailed(failed.tolist())
    for name in _EQUAL:
        column = votes[:, _COLUMN[name]]
        if (column != column[0]).any():
            raise LockstepDiverged(name, column.tolist())
    run = bool(votes[:, _COLUMN["has_work"]].any())
    recording, trace = votes[:, _COLUMN["recording"]], votes[:, _COLUMN["trace"]]
    return StepAgreement(
        step=int(votes[0, 0]),
        run=run,
        stop=not run and bool(votes[:, _COLUMN["wants_stop"]].all()),
        phase=Phase(int(np.bitwise_or.reduce(votes[:, _COLUMN["phase"]]))),
        num_tokens=tuple(votes[:, _COLUMN["num_tokens"]].tolist()),
        recording=int(recording[0]) if (recording == recording[0]).all() else 0,
        ballots=_ballots(votes[:, _COLUMN["say"] : len(_FIELDS)]),
        trace=int(trace[0]) if (trace == trace[0]).all() else 0,
        context=int(votes[:, _COLUMN["context"]].max()),
        drafting=votes[:, len(_FIELDS) :].copy(),
    )


def _ballots(columns: NDArray[np.int64]) -> tuple[Ballot, ...]:
    """columns [R, 3]: say, value, cause. () in almost every step."""
    if not columns[:, 0].any():
        return ()
    return tuple(Ballot(Say(say), value, Cause(cause)) for say, value, cause in columns.tolist())


# -- agreements at the start --------------------------------------------------------------------


def settings_hash(settings: Mapping[str, Any]) -> int:
    """63 bits of settings that shape collectives, the same on every machine."""
    text = json.dumps(settings, sort_keys=True, default=str)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def agree_on(group: EPGroup, settings: Mapping[str, Any]) -> None:
    """ConfigError on every rank alike if a setting is not the same everywhere: names the differing
    ranks and fields."""
    plain = json.loads(json.dumps(dict(settings), default=str))
    everyone = gather_objects(group, plain)
    differing: dict[tuple[str, str, str], list[int]] = {}
    for rank, theirs in enumerate(everyone):
        for name in sorted(everyone[0].keys() | theirs.keys()):
            here, there = everyone[0].get(name), theirs.get(name)
            if here != there:
                differing.setdefault((name, repr(there), repr(here)), []).append(rank)
    if differing:
        raise ConfigError(
            [
                f"{name}={there} on {group.where(ranks)}, but {here} on {group.where([0])}: all "
                "ranks need the same"
                for (name, there, here), ranks in differing.items()
            ]
        )


def agree_on_problems(group: EPGroup, mine: list[str]) -> None:
    """ConfigError on every rank alike if any found problems: nobody loads weights in vain."""
    everyone = gather_objects(group, mine)
    lines: dict[str, list[int]] = {}  # -> the ranks that say it
    for rank, theirs in enumerate(everyone):
        for line in dict.fromkeys(theirs):
            lines.setdefault(line, []).append(rank)
    if lines:
        raise ConfigError(
            [
                line if len(ranks) == group.size else f"{group.where(ranks)}: {line}"
                for line, ranks in lines.items()
            ]
        )


def agree_min(group: EPGroup, value: int) -> int:
    """The smallest value of all ranks."""
    return min(gather_objects(group, value))
