"""Lockstep with a thread for each rank: what all agree on, and how all refuse together."""

from __future__ import annotations

from typing import Any

import pytest
from thread_ranks import World, thread_world  # noqa: F401

from ep.group import EPGroup
from ep.rebalance import Ballot, Cause, Say
from moeserve.errors import ConfigError
from moeserve.lockstep import (
    Lockstep,
    LockstepDiverged,
    PeerFailed,
    Phase,
    StepAgreement,
    Vote,
    agree_min,
    agree_on,
    agree_on_problems,
    settings_hash,
)

WORK = Vote(has_work=True, num_tokens=7, num_sequences=2, phase=Phase.DECODE)
IDLE = Vote(has_work=False)


def test_all_run_when_any_has_work(world: World) -> None:
    votes = [IDLE, WORK, IDLE, Vote(has_work=True, num_tokens=3, phase=Phase.PREFILL)]
    out = world(4, lambda g: Lockstep(g).agree(votes[g.rank]))
    assert out == [StepAgreement(1, True, False, Phase.MIXED, (0, 7, 0, 3))] * 4
    assert out[0].max_tokens == 7
    votes = [IDLE, Vote(True, context=900), IDLE, Vote(True, context=40)]
    assert {x.context for x in world(4, lambda g: Lockstep(g).agree(votes[g.rank]))} == {900}
    assert Lockstep(EPGroup.single()).agree(votes[1]).context == 900
    assert world(4, lambda g: Lockstep(g).agree(IDLE))[2].run is False


def test_all_stop_at_the_step_where_the_last_one_votes_for_it(world: World) -> None:
    """Stop reaches the ranks at different moments, and one has work left when it does."""

    def body(group: EPGroup) -> tuple[int, int]:
        lockstep, ran = Lockstep(group), 0
        work_left = 6 if group.rank == 1 else 0
        for step in range(1, 100):
            asked = step >= 2 + 3 * group.rank
            vote = Vote(has_work=work_left > 0, wants_stop=asked and work_left == 0)
            agreed = lockstep.agree(vote)
            ran += agreed.run
            work_left -= work_left > 0
            if agreed.stop:
                return step, ran
        raise AssertionError("no end")

    assert world(3, body) == [(8, 6)] * 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("placement_generation", 4),
        ("membership_epoch", 4),
        ("settings", 4),
        ("rebalance", 4),
    ],
)
def test_a_difference_is_the_same_error_everywhere(world: World, field: str, value: int) -> None:
    def body(group: EPGroup) -> Any:
        lockstep = Lockstep(group)
        lockstep.agree(WORK)
        odd = {field: value} if group.rank == 2 else {}
        return lockstep.agree(Vote(has_work=True, **odd))

    for error in world.outcomes(3, body):
        assert isinstance(error, LockstepDiverged)
        assert (error.field, error.values) == (field, [0, 0, 4])
        assert "rank 2: 4" in str(error)


def test_a_rank_that_missed_a_step_is_found(world: World) -> None:
    def body(group: EPGroup) -> Any:
        lockstep = Lockstep(group)
        lockstep._step += group.rank
        return lockstep.agree(IDLE)

    errors = world.outcomes(2, body)
    assert [e.field for e in errors] == ["step", "step"] and errors[0].values == [1, 2]


def test_a_failure_is_said_and_ends_all_at_one_step(world: World) -> None:
    def body(group: EPGroup) -> Any:
        lockstep = Lockstep(group)
        lockstep.agree(WORK)
        return lockstep.agree(Vote(has_work=group.rank == 0, failed=group.rank == 1))

    for error in world.outcomes(3, body):
        assert isinstance(error, PeerFailed) and error.ranks == [1]


def test_alone_there_is_no_collective() -> None:
    lockstep = Lockstep(EPGroup.single())
    assert lockstep.agree(WORK) == StepAgreement(1, True, False, Phase.DECODE, (7,))
    assert lockstep.agree(Vote(has_work=False, wants_stop=True)).stop
    assert not lockstep.agree(Vote(has_work=True, wants_stop=True)).stop
    with pytest.raises(PeerFailed):
        lockstep.agree(Vote(has_work=False, failed=True))
    assert 0 <= lockstep.age < 5


def test_settings_must_be_the_same_and_the_odd_rank_is_named(world: World) -> None:
    def body(group: EPGroup) -> None:
        agree_on(group, {"a": 1, "path": "x", "b": 5 if group.rank == 2 else 4})

    for error in world.outcomes(3, body):
        assert isinstance(error, ConfigError)
        assert error.problems == ["b=5 on rank 2, but 4 on rank 0: all ranks need the same"]
    assert world(2, lambda g: agree_on(g, {"a": 1})) == [None, None]


def test_problems_of_one_rank_are_told_by_all(world: World) -> None:
    def body(group: EPGroup) -> None:
        agree_on_problems(group, ["everywhere"] + (["disk"] if group.rank == 1 else []))

    for error in world.outcomes(2, body):
        assert isinstance(error, ConfigError) and error.problems == ["everywhere", "rank 1: disk"]
    assert world(2, lambda g: agree_on_problems(g, [])) == [None, None]
    assert world(3, lambda g: agree_min(g, 5 - g.rank)) == [3, 3, 3]


def test_settings_hash_is_stable() -> None:
    assert settings_hash({"a": 1, "b": "x"}) == settings_hash({"b": "x", "a": 1})
    assert settings_hash({"a": 1}) != settings_hash({"a": 2})
    assert 0 <= settings_hash({}) < 2**63


def test_ballots_reach_everyone_in_order_of_rank(world: World) -> None:
    said = [
        Ballot(Say.CHECKED, (1 << 63) - 1),
        Ballot(),
        Ballot(Say.FAILED, cause=Cause.CHECKSUM),
    ]

    def body(group: EPGroup) -> tuple[StepAgreement, StepAgreement]:
        lockstep = Lockstep(group)
        quiet = lockstep.agree(Vote(has_work=True, rebalance=3 << 32))
        vote = Vote(has_work=True, rebalance=3 << 32, ballot=said[group.rank])
        return quiet, lockstep.agree(vote)

    for quiet, loud in world(3, body):
        assert quiet.ballots == () and loud.ballots == tuple(said)
