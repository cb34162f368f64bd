"""Adaptive depth over long runs of simulated engines: near the best fixed depth, free where off.

Costs and chances are like those measured on the bundled checkpoint, one step without drafts is 1.
Time is counted as it is without noise; what the cost model is told is shaken.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from moeserve.speculate.acceptance import Acceptance
from moeserve.speculate.adaptive import AdaptiveDepth
from moeserve.speculate.cost_model import CostModel

LIFE = 60  # steps of a sequence: the next one is known as little as a new one
FIRST_RUN = 20.0  # times as long as another, of drafting


Noise = Callable[[random.Random, int], float]


@dataclass(frozen=True)
class World:
    """chances: of each position, given those before. verify: cost of a step at so many drafts a
    sequence; round_cost: d rounds cost drafting + round_cost * d."""

    batch: int
    chances: tuple[float, ...]
    verify: dict[float, float]
    drafting: float
    round_cost: float

    def step(self, num_rows: int) -> float:
        at, cost = list(self.verify), list(self.verify.values())
        more = num_rows / self.batch - 1
        slope = (cost[-1] - cost[-2]) / (at[-1] - at[-2])
        return float(np.interp(more, at, cost)) + max(more - at[-1], 0) * slope

    def rounds(self, depth: int) -> float:
        return self.drafting + self.round_cost * depth if depth else 0.0

    def speeds(self) -> list[float]:
        """Of each fixed depth, 0 the first."""
        tokens = 1 + np.concatenate([[0], np.cumprod(self.chances).cumsum()])
        return [
            self.batch * float(t) / (self.step(self.batch * (1 + d)) + self.rounds(d))
            for d, t in enumerate(tokens)
        ]


# Of one rank of two, or of one.
PAY = {
    "mtp, EP 2, batch 1": World(1, (0.83, 0.84, 0.86, 0.83), {0: 1, 1: 1.05, 4: 1.15}, 0.02, 0.28),
    "mtp, EP 2, batch 32": World(
        16, (0.84, 0.84, 0.8, 0.8), {0: 1, 1: 1.13, 2: 1.23, 4: 1.45}, 0.05, 0.25
    ),
    "ngram, EP 2, batch 32": World(
        16, (0.6, 0.8, 0.8, 0.8), {0: 1, 1: 1.13, 2: 1.22, 4: 1.45}, 0.0, 0.005
    ),
}
# At batch 1 a trial is a few coins: more than once in a while it is unlucky, until the next one.
PAY_BY_LUCK = {
    "medusa, EP 2, batch 1": World(1, (0.43, 0.37, 0.5, 0.8), {0: 1, 1: 1.02, 4: 1.04}, 0.1, 0.005),
    "eagle, EP 2, batch 1": World(
        1, (0.63, 0.73, 0.85, 0.77), {0: 1, 1: 1.05, 4: 1.18}, 0.02, 0.08
    ),
    "mtp, EP 1, batch 1": World(1, (0.83, 0.84, 0.86, 0.83), {0: 1, 1: 1.35, 4: 1.83}, 0.05, 0.33),
}
DO_NOT_PAY = {
    "eagle, EP 1, batch 1": World(1, (0.63, 0.73, 0.85, 0.77), {0: 1, 1: 1.4, 4: 1.97}, 0.05, 0.62),
    "mtp, EP 1, batch 32": World(32, (0.85, 0.84, 0.8, 0.8), {0: 1, 1: 1.6, 2: 1.96}, 0.1, 0.7),
    "medusa, EP 1, batch 32": World(32, (0.37, 0.38, 0.5), {0: 1, 1: 1.55, 2: 1.93}, 0.2, 0.1),
    "eagle, EP 2, batch 32": World(16, (0.67, 0.76, 0.8), {0: 1, 1: 1.5, 2: 1.88}, 0.07, 0.5),
    "knows nothing": World(1, (0.05, 0.05, 0.05), {0: 1, 1: 1.1, 4: 1.3}, 0.1, 0.2),
    "nearly pays": World(8, (0.47, 0.4, 0.4), {0: 1, 1: 1.2, 2: 1.4}, 0.1, 0.2),
}


def quiet(rng: random.Random, step: int) -> float:
    return math.exp(rng.gauss(0, 0.02))


def stalls(rng: random.Random, step: int) -> float:
    """One in 16 steps takes up to 12 times as long."""
    return math.exp(rng.gauss(0, 0.12)) * (rng.uniform(2, 12) if rng.random() < 0.06 else 1)


def other_jobs(rng: random.Random, step: int) -> float:
    """The machine is shared, with more and with fewer by turns."""
    load = (1, 2.2, 1.4, 3, 0.8)[step // 130 % 5]
    return load * math.exp(rng.gauss(0, 0.12)) * (rng.uniform(2, 6) if rng.random() < 0.03 else 1)


def cold(rng: random.Random, step: int) -> float:
    """First calls of everything, then what a shared machine does."""
    return (1 + 4 * math.exp(-step / 6)) * math.exp(rng.gauss(0, 0.2))


def rough(rng: random.Random, step: int) -> float:
    """Steps are quick or slow, as processes wake each other in time or not."""
    return rng.choice((0.8, 1.25)) * math.exp(rng.gauss(0, 0.15))


NOISES: list[Noise] = [quiet, stalls, other_jobs, cold, rough]


def speed(
    world: World,
    noise: Noise,
    steps: int,
    seed: int = 0,
    output: int = 0,
    fixed: int | None = None,
) -> float:
    """Tokens over time, trials included. output: tokens of a sequence; texts differ then, and the
    first batch does not count. 0: sequences live for LIFE steps, all alike. fixed: this depth."""
    rng, num, width = random.Random(seed), world.batch, len(world.chances)
    policy, known, costs = AdaptiveDepth(width), Acceptance(width), CostModel()
    endless, counts = np.full(num, width), np.zeros(num, np.int64)
    tokens, time, was_run, number = 0, 0.0, False, 0
    left: list[int] = []
    ids: list[str] = []
    luck: list[float] = []
    for step in range(steps):
        if max(left, default=0) <= 0 if output else step % LIFE == 0:
            number += 1
            known.forget(ids)
            ids = [f"{step}.{i}" for i in range(num)]
            left = [output or 100 * LIFE] * num
            luck = [math.exp(rng.gauss(0, 0.5)) if output else 1.0 for _ in ids]
            counts[:] = 0
            if output and number == 2:
                tokens, time = 0, 0.0
        alive = [i for i, rest in enumerate(left) if rest > 0]
        for i in alive:
            count = int(counts[i])
            right = next(
                (d for d in range(count) if rng.random() > world.chances[d] ** luck[i]), count
            )
            known.add(ids[i], count, right)
            tokens += min(right + 1, left[i])
            left[i] -= right + 1
        rows = len(alive) + int(counts[alive].sum())
        going = [i for i in alive if left[i] > 0]
        reach = known.reaches([ids[i] for i in going])
        depth = 0
        if going:
            if fixed is not None:
                policy.depth = depth = fixed
            elif policy.looks:
                offer = policy.offer(reach, endless[going], 1000)
                depth = policy.agree([offer], costs.costs())
                if policy.renews:
                    costs.renew()
            else:
                depth = policy.pass_by()
            room = np.array([max(left[i] - 1, 0) for i in going])
            depth = min(depth, int(room.max()))
            counts[:] = 0
            if depth:
                counts[going] = policy.allot(reach, np.minimum(room, depth), 1000)
        verifying, drafting = world.step(max(rows, 1)), world.rounds(depth)
        time += verifying + drafting
        if depth or policy.holds:  # as the speculator does
            first = FIRST_RUN if depth and not was_run else 1.0
            was_run |= depth > 0
            told = 0.01 * noise(rng, step), 0.01 * noise(rng, step) * first
            costs.add(rows, verifying * told[0], depth, drafting * told[1])
    return tokens / time


def speeds_of(world: World, noise: Noise, steps: int, **how: int) -> list[float]:
    return [speed(world, noise, steps, seed, **how) for seed in range(4)]


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("case", PAY)
def test_where_drafts_pay_it_is_near_the_best_depth(case: str, noise: Noise) -> None:
    world = PAY[case]
    fixed = world.speeds()
    found = speeds_of(world, noise, 800)
    assert max(fixed) > 1.3 * fixed[0]
    assert sum(found) / len(found) > 0.9 * max(fixed)
    assert min(found) > 0.8 * max(fixed)


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("case", PAY_BY_LUCK)
def test_with_few_coins_it_gets_there_on_average(case: str, noise: Noise) -> None:
    world = PAY_BY_LUCK[case]
    fixed = world.speeds()
    found = speeds_of(world, noise, 800)
    assert sum(found) / len(found) > 0.88 * max(fixed)
    assert min(found) > 0.97 * fixed[0]


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("case", DO_NOT_PAY)
def test_where_drafts_do_not_pay_they_cost_nearly_nothing(case: str, noise: Noise) -> None:
    world = DO_NOT_PAY[case]
    fixed = world.speeds()
    assert max(fixed[1:]) < fixed[0]
    found = speeds_of(world, noise, 1200)
    assert sum(found) / len(found) > 0.96 * fixed[0]
    assert min(found) > 0.9 * fixed[0]


@pytest.mark.parametrize("noise", NOISES)
def test_short_answers_of_unlike_texts_are_as_quick_as_at_a_good_depth(noise: Noise) -> None:
    """64 tokens each, one after another: ends, beginnings and texts that are hard to guess."""
    world = PAY["mtp, EP 2, batch 1"]
    ratios = []
    for seed in range(5):
        fixed = [speed(world, noise, 800, seed, 64, depth) for depth in range(5)]
        ratios.append(speed(world, noise, 800, seed, 64) / max(fixed))
    assert sum(ratios) / len(ratios) > 0.9 and min(ratios) > 0.8
