"""Adaptive depth: the best of all, found in time, the same on every rank; acceptance and costs."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve.speculate import adaptive
from moeserve.speculate.acceptance import (
    Acceptance,
    expected_tokens,
    mean_rate,
    predicted_speedup,
)
from moeserve.speculate.adaptive import (
    MARGIN,
    AdaptiveDepth,
    FixedDepth,
    Offer,
    allot,
    make_offer,
)
from moeserve.speculate.cost_model import CostModel, Costs, MedianLine

MS = 1_000_000  # nanoseconds


def reaches(rates: list[list[float]]) -> np.ndarray:
    return np.cumprod(np.array(rates, float).reshape(len(rates), -1), axis=1)


def rooms(num: int, k: int = 8) -> np.ndarray:
    return np.full(num, k, np.int64)


# -- formulas -------------------------------------------------------------------------------------


def test_expected_tokens_and_the_theorem() -> None:
    rng = random.Random(0)
    for rate, k in ((0.8, 3), (0.3, 5), (0.0, 4), (1.0, 2)):
        coins = [[rng.random() < rate for _ in range(k)] for _ in range(20_000)]
        runs = [1 + [*run, False].index(False) for run in coins]
        assert expected_tokens(rate, k) == pytest.approx(np.mean(runs), abs=0.03)
    assert predicted_speedup(0.8, 5, 0.05) == pytest.approx((1 - 0.8**6) / (0.2 * 1.25))
    assert predicted_speedup(0.5, 0, 0.3) == 1.0
    assert expected_tokens(1 - 1e-12, 4) == pytest.approx(5)
    for k in (1, 3, 8):
        assert mean_rate(reaches([[0.7] * k])[0], k) == pytest.approx(0.7)


# -- acceptance -----------------------------------------------------------------------------------


def test_acceptance_by_position_finds_the_rates_it_was_fed() -> None:
    rng = random.Random(3)
    rates = [0.9, 0.6, 0.3]
    known = Acceptance(3)
    assert known.rates().tolist() == [0.7] * 3
    for i in range(4000):
        right = next((d for d in range(3) if rng.random() > rates[d]), 3)
        known.add(f"r{i % 7}", 3, right)
    assert known.rates() == pytest.approx(np.array(rates), abs=0.07)
    reach = np.cumprod(rates)
    assert known.by_position == pytest.approx(reach, abs=0.03)
    assert known.mean_accepted == pytest.approx(reach.sum(), abs=0.05)
    assert known.reach("r1").tolist() == np.cumprod(known.rates("r1")).tolist()
    assert known.reaches(["r1", "new"]).tolist() == [
        known.reach("r1").tolist(),
        known.reach().tolist(),
    ]


def test_a_sequence_leaves_the_average_and_positions_not_tried_follow_their_neighbour() -> None:
    known = Acceptance(4)
    for _ in range(300):
        known.add("good", 2, 2)
        known.add("bad", 2, 0)
    assert known.rates("good")[0] > 0.9 and known.rates("bad")[0] < 0.1
    assert 0.4 < known.rates()[0] < 0.6
    assert known.rates("new") == pytest.approx(known.rates())
    assert known.rates("good")[3] == pytest.approx(known.rates()[1], abs=0.05)
    known.forget(["good", "nobody"])
    assert known.rates("good") == pytest.approx(known.rates())
    for _ in range(200):
        known.add("bad", 1, 1)  # its text has changed
    assert known.rates("bad")[0] > 0.9
    known.add("bad", 0, 0)
    assert known.num_runs == 800


# -- costs ----------------------------------------------------------------------------------------


def test_the_line_is_found_through_noise_and_outliers() -> None:
    rng = random.Random(1)
    fit = MedianLine(0.02)
    for i in range(400):
        x = rng.choice([1, 2, 3, 4, 5])
        y = (0.02 + 0.003 * x) * rng.uniform(0.95, 1.05)
        fit.add(x, y * 20 if i % 23 == 7 else y)
    a, b = fit.line
    assert a == pytest.approx(0.02, rel=0.15) and b == pytest.approx(0.003, rel=0.25)
    for _ in range(300):  # the machine has become slower
        x = rng.choice([1, 2, 3, 4, 5])
        fit.add(x, 0.05 + 0.001 * x)
    assert fit(3) == pytest.approx(0.053, rel=0.05)
    fit.add(1, float("nan"))
    fit.add(1, -1.0)
    assert fit(3) == pytest.approx(0.053, rel=0.05)


def test_without_spread_the_prior_says_what_a_token_costs() -> None:
    model = CostModel(slope=0.05, round_share=0.2)
    assert model.costs() == Costs(0, 0, 0) and not model.is_known
    for _ in range(50):
        model.add(8, 0.014)
    costs = model.costs()
    assert model.is_known
    assert costs.step(8, 0) == pytest.approx(14 * MS, rel=1e-3)
    assert costs.a_token == pytest.approx(0.05 * costs.fixed, rel=1e-3)
    assert costs.a_round == pytest.approx(0.2 * costs.step(1, 0), rel=1e-3)
    for _ in range(50):
        model.add(8, 0.014, rounds=4, drafting=0.004)
    told = model.costs()
    assert told.step(0, 4) - told.step(0, 0) == pytest.approx(4 * MS, rel=1e-3)
    for i in range(50):
        model.add(8, 0.014, rounds=1 + i % 5, drafting=0.002 + 0.0005 * (1 + i % 5))
    told = model.costs()
    assert told.a_draft == pytest.approx(2 * MS, rel=0.25)
    assert told.a_round == pytest.approx(0.5 * MS, rel=0.25)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 500), st.floats(1e-6, 1e3)), min_size=1, max_size=40))
def test_costs_are_never_negative(points: list[tuple[int, float]]) -> None:
    model = CostModel()
    for tokens, seconds in points:
        model.add(tokens, seconds, 1, seconds / 3)
        costs = model.costs()
        assert min(costs.fixed, costs.a_token, costs.a_round) >= 0


# -- choosing -------------------------------------------------------------------------------------

chances = st.lists(st.lists(st.floats(0.0, 1.0), min_size=3, max_size=3), min_size=1, max_size=3)


@settings(max_examples=60, deadline=None)
@given(chances, st.integers(0, 9), st.integers(0, 3), st.integers(0, 3))
def test_allotted_drafts_are_the_likeliest_that_fit(
    rates: list[list[float]], most: int, depth: int, room: int
) -> None:
    reach = reaches(rates)
    counts = allot(reach, rooms(len(rates), room), depth, 0.3, most)
    best = max(
        sum(reach[i, :c].sum() - 0.3 * c for i, c in enumerate(some))
        for some in itertools.product(range(min(depth, room) + 1), repeat=len(rates))
        if sum(some) <= most
    )
    assert counts.sum() <= most and (counts <= min(depth, room)).all()
    got = sum(reach[i, :c].sum() - 0.3 * c for i, c in enumerate(counts))
    assert got == pytest.approx(best, abs=1e-9)


def settle(
    policy: AdaptiveDepth, reach: np.ndarray, costs: Costs, steps: int = 80, most: int = 1000
) -> int:
    room = rooms(len(reach), reach.shape[1])
    for _ in range(steps):
        policy.agree([policy.offer(reach, room, most)], costs)
    return policy.depth


@settings(max_examples=60, deadline=None)
@given(chances, st.integers(0, 40), st.integers(0, 40))
def test_the_rate_it_settles_at_is_within_the_margin_of_the_best(
    rates: list[list[float]], a_token: int, a_round: int
) -> None:
    """Against all ways to draft. Costs in hundredths of the fixed part."""
    reach, costs = reaches(rates), Costs(100 * MS, a_token * MS, a_round * MS)
    policy = AdaptiveDepth(3)
    settle(policy, reach, costs)
    if policy._trial:
        return
    counts = policy.allot(reach, rooms(len(rates)), 1000)

    def rate(some: tuple[int, ...]) -> float:
        tokens = len(some) + sum(reach[i, :c].sum() for i, c in enumerate(some))
        return tokens / costs.step(len(some) + sum(some), max(some))

    best = max(rate(some) for some in itertools.product(range(4), repeat=len(rates)))
    # The round is paid for at the agreed depth, used or not.
    mine = (len(rates) + sum(reach[i, :c].sum() for i, c in enumerate(counts))) / costs.step(
        len(rates) + int(counts.sum()), policy.depth
    )
    assert mine >= best / MARGIN**2 - 1e-15
    assert mine >= rate((0,) * len(rates)) / MARGIN


def test_depth_follows_acceptance_and_load() -> None:
    cheap = Costs(20 * MS, MS // 5, MS)
    assert settle(AdaptiveDepth(8), reaches([[0.95] * 8]), cheap) >= 5
    assert settle(AdaptiveDepth(8), reaches([[0.5] * 8]), cheap) in (2, 3)
    assert settle(AdaptiveDepth(8), reaches([[0.02] * 8]), cheap) == 0
    # 32 sequences where each row costs its full price: off by itself.
    assert settle(AdaptiveDepth(8), reaches([[0.6] * 8] * 32), Costs(5 * MS, MS, 4 * MS)) == 0
    # Of unequal sequences only the good ones draft.
    policy = AdaptiveDepth(4)
    reach = reaches([[0.95] * 4] * 3 + [[0.1] * 4] * 3)
    settle(policy, reach, Costs(20 * MS, 2 * MS, MS))
    assert policy.depth > 0
    counts = policy.allot(reach, rooms(6), 100)
    assert (counts[:3] > 0).all() and (counts[3:] == 0).all()
    assert policy.predicted > 1.3
    assert policy.allot(reach, rooms(6), 2).sum() == 2


def test_ranks_agree_whatever_they_have() -> None:
    """Each rank holds its own state and sees all offers; one has no sequences."""
    rng = np.random.default_rng(5)
    policies = [AdaptiveDepth(5) for _ in range(4)]
    depths = set()
    for step in range(600):
        offers = []
        for rank, policy in enumerate(policies):
            num = 0 if rank == 3 else int(rng.integers(0, 5))
            reach = reaches(rng.uniform(0.3, 1.0, (num, 5)).tolist()) if num else np.zeros((0, 5))
            offers.append(policy.offer(reach, rooms(num), 20))
        assert offers[3] == Offer.none(5)
        noise = 1 + step // 100
        costs = Costs(noise * 10 * MS, 300_000 * noise**2, MS)
        agreed = {(p.agree(offers, costs), p.threshold, p.predicted) for p in policies}
        assert len(agreed) == 1
        depths.add(policies[0].depth)
    assert len(depths) > 1


def test_it_does_not_swing_between_depths_that_are_equally_good() -> None:
    rng = np.random.default_rng(2)
    policy = AdaptiveDepth(6)
    changes, last = 0, 0
    for step in range(400):
        reach = reaches(np.clip(rng.normal(0.75, 0.02, (2, 6)), 0, 1).tolist())
        costs = Costs(int(rng.normal(20, 0.4) * MS), MS, MS)
        depth = policy.agree([policy.offer(reach, rooms(2), 50)], costs)
        changes += depth != last and step > adaptive.FIRST + adaptive.TRIAL
        last = depth
    assert changes <= 3 and last > 0


def test_what_does_not_pay_is_tried_again_now_and_then() -> None:
    policy = AdaptiveDepth(4)
    bad, good = reaches([[0.05] * 4]), reaches([[0.95] * 4])
    costs = Costs(20 * MS, 2 * MS, 3 * MS)
    tried = 0
    for _ in range(adaptive.PROBE * 4):
        policy.agree([policy.offer(bad, rooms(1), 9)], costs)
        if policy.depth:
            tried += 1
            assert policy.depth == 1 and policy.allot(bad, rooms(1), 9).tolist() == [1]
    assert 2 <= tried <= 4 * adaptive.TRIAL // 2  # later and later
    for _ in range(adaptive.PROBE + 20):
        policy.agree([policy.offer(good, rooms(1), 9)], costs)
    assert policy.depth >= 3
    before = policy.depth
    assert policy.agree([Offer.none(4)] * 2, costs) == before  # nobody decodes


def test_costs_that_cannot_be_are_measured_once_more() -> None:
    """First calls, or a neighbour that worked whenever drafts were made: a row seems to cost a
    step."""
    policy, good = AdaptiveDepth(4), reaches([[0.9] * 4])
    unlikely, right = Costs(MS, 4 * MS, MS), Costs(5 * MS, MS // 10, MS)
    renewed, depths = 0, []
    for _ in range(adaptive.FIRST + 2 * adaptive.TRIAL + 2):
        policy.agree([policy.offer(good, rooms(1), 9)], right if renewed > 1 else unlikely)
        renewed += policy.renews
        depths.append(policy.depth)
    assert renewed == 2 and policy.depth >= 3
    assert depths.count(1) in range(adaptive.SURE, adaptive.TRIAL + 1) and depths[-1] >= 3
    steady = AdaptiveDepth(4)  # what it sees again and again it believes
    for _ in range(adaptive.FIRST + 4 * adaptive.TRIAL):
        steady.agree([steady.offer(good, rooms(1), 9)], unlikely)
    assert steady.depth == 0


def test_trials_draft_and_do_not_by_turns_and_the_state_is_kept_between() -> None:
    policy, costs = AdaptiveDepth(4), Costs(20 * MS, MS, MS)
    reach, depths, held = reaches([[0.8] * 4]), [], []
    for _ in range(adaptive.FIRST - 1 + adaptive.TRIAL):
        held.append(policy.holds)
        if policy.looks:
            policy.agree([policy.offer(reach, rooms(1), 9)], costs)
        else:
            policy.pass_by()
        depths.append(policy.depth)
    assert depths == [0] * (adaptive.FIRST - 1) + [1, 0] * (adaptive.TRIAL // 2)
    assert all(held), "hidden states of steps that draft nothing are wanted by the next that does"


def test_a_mean_over_looks_decides_not_a_single_one() -> None:
    policy, costs = AdaptiveDepth(6), Costs(20 * MS, MS, 3 * MS)
    good, short = reaches([[0.85] * 6]), reaches([[0.3] + [0.0] * 5])
    settle(policy, good, costs, 60)
    before = policy.depth
    assert before > 1
    settle(policy, short, costs, 1)  # one look: a text that ended, a stall
    settle(policy, good, costs, 20)
    assert policy.depth == before and not policy._trial
    settle(policy, short, costs, 20)
    assert policy.depth < before

    model = CostModel()
    for _ in range(9):
        model.add(1, 0.005, 1, 0.001)
    assert model.is_known
    model.renew()
    assert not model.is_known and not model.costs().is_known


def test_trials_that_fail_come_later_and_later_until_the_load_halves() -> None:
    policy, costs = AdaptiveDepth(4), Costs(20 * MS, 2 * MS, 3 * MS)
    bad, step = reaches([[0.05] * 4] * 4), 0
    trials: list[int] = []
    while len(trials) < 4:
        before = policy._trial
        policy.agree([policy.offer(bad, rooms(4), 9)], costs)
        if policy._trial and not before:
            trials.append(step)
        step += 1
    waits = np.diff(trials)
    assert (
        waits[1] > 1.9 * waits[0] and waits[2] > 1.9 * waits[1] and waits[0] > adaptive.PROBE // 2
    )
    steps = 0  # now two of the four are left
    while not policy.depth or steps < 4:
        policy.agree([policy.offer(bad[:2], rooms(2), 9)], costs)
        steps += 1
    assert steps < adaptive.PROBE + 4


def test_before_anything_was_measured_one_token_is_drafted() -> None:
    policy, costs = AdaptiveDepth(4), CostModel()
    for step in range(adaptive.FIRST + adaptive.TRIAL + 4):
        reach = reaches([[0.9] * 4])
        depth = policy.agree([policy.offer(reach, rooms(1), 9)], costs.costs())
        assert depth <= 1 or step > adaptive.FIRST + 4
        costs.add(1 + step % 2, 0.02 + 0.0001 * (step % 2), depth, 0.001 * depth)
    assert policy.depth > 1


def test_a_fixed_depth_is_shared_out_from_the_deepest() -> None:
    policy = FixedDepth(3)
    assert policy.depth == policy.max_depth == 3
    assert policy.share([2, 8, 0], 9) == [2, 3, 0]
    assert policy.share([3, 8, 3], 5) == [2, 2, 1]
    assert policy.share([3, 3], 0) == policy.share([3, 3], -2) == [0, 0]
    assert policy.share([], 4) == []


@pytest.mark.parametrize("seed", range(5))
def test_offers_are_the_slow_twins(seed: int) -> None:
    random = np.random.default_rng(seed)
    num = int(random.integers(0, 6))
    reach = np.cumprod(random.uniform(0.2, 1, (num, 4)), axis=1)
    room = random.integers(-1, 6, num)
    for most in (0, 3, 40):
        wanted = adaptive._make_offer_slowly(reach, room, 0.2, most)
        assert make_offer(reach, room, 0.2, most) == wanted
    assert make_offer(np.zeros((0, 3)), rooms(0), 0.0, 5) == Offer.none(3)


def test_at_depth_0_it_looks_only_now_and_then() -> None:
    policy, costs, looked = AdaptiveDepth(4), Costs(20 * MS, 19 * MS, 30 * MS), 0
    for _ in range(adaptive.PROBE):
        if policy.looks:
            looked += 1
            policy.agree([policy.offer(reaches([[0.1] * 4]), rooms(1), 9)], costs)
        else:
            assert policy.pass_by() == policy.depth
    assert looked >= adaptive.PROBE // adaptive.LOOK
    assert looked <= adaptive.PROBE // adaptive.LOOK + 2 * adaptive.TRIAL


# -- the whole loop -------------------------------------------------------------------------------


class Constant:
    """The same depth, whatever comes."""

    def __init__(self, depth: int) -> None:
        self.depth = depth

    def offer(self, *args: object) -> Offer:
        return Offer.none(0)

    def agree(self, *args: object) -> int:
        return self.depth

    def allot(self, reach: np.ndarray, room: np.ndarray, most: int) -> np.ndarray:
        return np.minimum(room, self.depth)


def drive(
    batch: int,
    rates: list[float],
    costs: tuple[float, float, float],
    policy: AdaptiveDepth | Constant,
    steps: int,
) -> float:
    """Tokens a second of a simulated engine with these true chances and costs (seconds: fixed, a
    token, a round), measured times shaken by a tenth and, now and then, tripled."""
    rng = random.Random(batch)
    known, model = Acceptance(len(rates)), CostModel()
    ids = [f"r{i}" for i in range(batch)]
    room = rooms(batch, len(rates))
    counts = np.zeros(batch, np.int64)
    depth, tokens, time = 0, 0, 0.0
    for _ in range(steps):
        for i, count in zip(ids, counts.tolist(), strict=True):
            right = next((d for d in range(count) if rng.random() > rates[d]), count)
            known.add(i, count, right)
            tokens += right + 1
        rows = batch + int(counts.sum())
        reach = known.reaches(ids)
        offer = policy.offer(reach, room, 1000)
        depth = policy.agree([offer], model.costs())
        counts = policy.allot(reach, room, 1000)
        noise = rng.uniform(0.9, 1.1) * (3 if rng.random() < 0.02 else 1)
        step, drafting = (costs[0] + costs[1] * rows), costs[2] * depth
        model.add(rows, step * noise, depth, drafting * noise)
        time += step + drafting
    return tokens / time


@pytest.mark.parametrize(
    ("batch", "rates", "costs"),
    [
        (1, [0.88, 0.7, 0.75, 0.8, 0.7], (10e-3, 0.4e-3, 1e-3)),  # drafts pay, several of them
        (1, [0.5, 0.3, 0.2, 0.2, 0.2], (10e-3, 0.4e-3, 2e-3)),  # one or two
        (8, [0.85, 0.7, 0.7, 0.7, 0.7], (10e-3, 1e-3, 1.5e-3)),
        (32, [0.7, 0.6, 0.6, 0.6, 0.6], (10e-3, 1.2e-3, 6e-3)),  # rows cost nearly their full price
        (1, [0.05, 0.05, 0.05, 0.05, 0.05], (10e-3, 0.4e-3, 2e-3)),  # a drafter that knows nothing
    ],
)
def test_it_finds_the_best_depth_by_itself(
    batch: int, rates: list[float], costs: tuple[float, float, float]
) -> None:
    steps = 700 if batch < 32 else 300
    fixed = [drive(batch, rates, costs, Constant(d), steps) for d in range(len(rates) + 1)]
    found = drive(batch, rates, costs, AdaptiveDepth(len(rates)), steps)
    assert found > 0.95 * max(fixed)
    assert found > 0.97 * fixed[0]
