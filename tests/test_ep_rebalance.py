"""The state machine of a rebalance: every rank alike, whatever is said; and the policy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ep.placement import EMPTY, ExpertPlacement
from ep.rebalance import (
    CAUSE_TEXT,
    Ballot,
    Cause,
    Do,
    Order,
    Position,
    RebalancePolicy,
    Result,
    Say,
    Stage,
    advance,
    begin,
    keep_idle_layers,
    look,
    utilisation,
    weigh,
)
from ep.transfer import Trouble

QUIET = Ballot()
ASK, PLAN = Ballot(Say.ASK), Ballot(Say.PLAN)
NO_PLAN = Ballot(Say.NO_PLAN, cause=Cause.BALANCED)


def go(at: Position, ballots: list[Ballot], ran: bool = True, batches: int = 2, every: int = 10):  # type: ignore[no-untyped-def]
    return advance(at, ballots, ran=ran, num_batches=batches, interval_steps=every)


def checked(value: int) -> Ballot:
    return Ballot(Say.CHECKED, value)


def ready(batch: int) -> Ballot:
    return Ballot(Say.READY, batch)


def failed(cause: Cause) -> Ballot:
    return Ballot(Say.FAILED, cause=cause)


def test_the_whole_way() -> None:
    at, orders = go(begin(10), [ASK, QUIET, QUIET])
    assert (at.stage, at.plan) == (Stage.PLANNING, 1) and orders == (Order(Do.GATHER),)
    assert go(at, [QUIET] * 3) == (at, ())
    at, orders = go(at, [PLAN, QUIET, QUIET])
    assert at.stage is Stage.CHECKING and orders == (Order(Do.RECEIVE),)
    assert go(at, [checked(7), QUIET, checked(7)]) == (at, ())
    at, orders = go(at, [checked(7)] * 3)
    assert at.stage is Stage.MOVING and orders == (Order(Do.FETCH, 0),)
    assert go(at, [ready(0), ready(0), QUIET]) == (at, ())
    at, orders = go(at, [ready(0)] * 3)
    assert at.batch == 1 and orders == (Order(Do.SWITCH, 0), Order(Do.FETCH, 1))
    assert go(at, [ready(0), ready(1), ready(1)]) == (at, ()), "not ready for this batch"
    at, orders = go(at, [ready(1)] * 3)
    assert at == Position(plan=1, steps_left=10)
    assert orders == (Order(Do.SWITCH, 1), Order(Do.END, 1, Result.DONE))


def test_every_so_many_steps_with_work() -> None:
    at = begin(3)
    for ran in (True, False, False, True):
        at, orders = go(at, [QUIET] * 2, ran, every=3)
        assert orders == ()
    assert go(at, [QUIET] * 2, False, every=3) == (at, ())
    at, orders = go(at, [QUIET] * 2, True, every=3)
    assert orders == (Order(Do.GATHER),)
    at, orders = go(at, [NO_PLAN, QUIET], every=3)
    assert orders == (Order(Do.END, 0, Result.NOTHING, Cause.BALANCED),) and at.steps_left == 3


def test_never_when_no_interval_is_set() -> None:
    at = begin(0)
    for _ in range(50):
        at, orders = go(at, [QUIET], every=0)
        assert orders == ()
    assert go(at, [ASK], ran=False, every=0)[1] == (Order(Do.GATHER),)


@pytest.mark.parametrize("stage", [Stage.PLANNING, Stage.CHECKING, Stage.MOVING])
def test_a_failure_of_any_rank_ends_it_for_all(stage: Stage) -> None:
    at = Position(stage=stage, plan=4, batch=1 if stage is Stage.MOVING else 0)
    for others in (QUIET, ready(at.batch), checked(1)):
        after, orders = go(at, [others, failed(Cause.SILENT), others])
        assert after.stage is Stage.IDLE and after.plan == 4 and after.failures == 1
        assert orders == (Order(Do.END, at.batch, Result.ABANDONED, Cause.SILENT, 1),)


def test_a_digest_that_differs_ends_it() -> None:
    at = Position(stage=Stage.CHECKING, plan=1)
    after, orders = go(at, [checked(5), checked(5), checked(6)])
    assert after.stage is Stage.IDLE
    assert orders == (Order(Do.END, 0, Result.ABANDONED, Cause.DIFFERS, 2),)


def test_failures_are_tried_again_later_and_later_up_to_a_bound() -> None:
    at, waits = begin(10), []
    for _ in range(8):
        at, _orders = go(at, [ASK])
        at, _orders = go(at, [failed(Cause.PLANNER)])
        waits.append(at.steps_left)
    assert waits == [20, 40, 80, 160, 320, 320, 320, 320]
    at, _orders = go(at, [ASK])
    at, _orders = go(at, [NO_PLAN])
    assert (at.steps_left, at.failures) == (10, 0)


SAYINGS = st.builds(
    Ballot, st.sampled_from(list(Say)), st.integers(0, 2), st.sampled_from(list(Cause))
)


@given(st.lists(st.tuples(st.lists(SAYINGS, min_size=3, max_size=3), st.booleans()), max_size=40))
@settings(max_examples=200, deadline=None)
def test_whatever_is_said_a_batch_switches_once_and_in_order(
    steps: list[tuple[list[Ballot], bool]],
) -> None:
    at, fetched, plan = begin(2), -1, 0
    for ballots, ran in steps:
        before = at
        at, orders = go(at, ballots, ran, every=2)
        for order in orders:
            if order.do is Do.GATHER:
                assert before.stage is Stage.IDLE and at.plan == plan + 1
                plan, fetched = at.plan, -1
            elif order.do is Do.FETCH:
                assert order.batch == fetched + 1 < 2
                fetched = order.batch
            elif order.do is Do.SWITCH:
                assert order.batch == fetched == before.batch
                assert all(b == Ballot(Say.READY, fetched, b.cause) for b in ballots)
            elif order.do is Do.END:
                assert at.stage is Stage.IDLE and order == orders[-1]
        assert at.number != before.number or at == before or at.stage is Stage.IDLE


# -- policy -------------------------------------------------------------------------------------


def test_utilisation() -> None:
    placement = ExpertPlacement(np.array([[0, 1, 2, 3]] * 3), 4, 2)
    loads = np.array([[30, 0, 10, 0], [5, 5, 5, 5], [0, 0, 0, 0]])
    assert utilisation(loads, placement) == pytest.approx((20 / 30 + 1) / 2)
    assert utilisation(np.zeros((3, 4)), placement) == 1.0


def test_when_a_plan_is_made_and_when_it_is_worth_it() -> None:
    policy = RebalancePolicy(threshold=0.9, min_gain=0.05, min_picks=10)
    old = ExpertPlacement(np.array([[0, 1, 2, 3]] * 2), 4, 2)
    new = ExpertPlacement(np.array([[0, 2, 1, 3]] * 2), 4, 2)
    skewed = np.array([[30, 30, 10, 10], [0, 0, 0, 0]])
    even = np.array([[20, 20, 20, 20], [0, 0, 0, 0]])
    assert look(skewed, old, policy) is Cause.NONE
    assert look(skewed // 10, old, policy) is Cause.TOO_FEW_TOKENS
    assert look(skewed * 0, old, policy) is Cause.TOO_FEW_TOKENS
    assert look(even, old, policy) is Cause.BALANCED
    assert weigh(skewed, old, new, policy) is Cause.NONE
    assert weigh(skewed, new, old, policy) is Cause.NO_GAIN
    assert weigh(skewed, old, old, policy) is Cause.SAME


def test_layers_without_load_stay() -> None:
    old = ExpertPlacement(np.array([[0, 1, 2, EMPTY]] * 2), 3, 2)
    new = ExpertPlacement(np.array([[2, 1, 0, 0]] * 2), 3, 2)
    kept = keep_idle_layers(np.array([[1, 0, 0], [0, 0, 0]]), old, new)
    assert kept.physical_to_logical.tolist() == [[2, 1, 0, 0], [0, 1, 2, EMPTY]]


def test_every_cause_has_words_and_troubles_are_causes() -> None:
    assert set(CAUSE_TEXT) == set(Cause)
    for trouble in Trouble:
        assert Cause(trouble.value).name == trouble.name
