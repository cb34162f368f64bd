"""Random choice of a token from probabilities: top-k, top-p, min-p, and the random numbers.

One rule, for each row [V] of probabilities (the softmax of what was edited, fp32):

1. Tokens stand in order of descending probability, ties by ascending id. Kept is a prefix of that
   order. top-k: the first k. min-p: those of at least min_p times the first one's probability.
   top-p: those before which stands less mass than top_p times the mass of the first k (1 where
   top-k is off). The first token is always kept.
2. Tokens race. A runner's waiting time is exponential, a function of (seed, output position, its
   number, `Race`) alone, and is divided by its probability: it wins with its share of the mass of
   all that run. Where neither top-k nor min-p is set, first the blocks of BLOCK ids run, then the
   tokens of the one that wins. If top-p keeps the winner, it is the choice. If not, and where top-k
   or min-p is set: the tokens run that are kept by these and stand before the loser, each alone;
   whoever of them is not kept by top-p leaves with all that stand behind it, until one is.

So a token's chance is its share of the kept mass: a draw from a larger set that falls into the kept
one is a draw from it. Nothing is sorted, and most tokens cost no random number.

Waiting times know nothing of probabilities: rows that are much alike choose the same token for the
same seed and position. A race of tokens gives two rows the same winner with a chance of at least
(1 - d) / (1 + d), d the mass in which they differ; with blocks it is little less. That is why a
draft drawn by this rule mostly is the token that the target draws (`speculate.verify`).

Law 5: each row is worked on alone, in a fixed order, by numpy, whose sums know no threads.

Knows numbers only. `sampler.sample_slowly` has the same rule in plain steps.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeserve.request import SamplingParams

BLOCK = 128

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Bits = NDArray[np.uint32]


class Race(enum.IntEnum):
    """Which of the races of a draw: each has numbers of its own."""

    ALONE = 0
    BLOCKS = 1
    WITHIN = 2  # a block


class Stream(enum.IntEnum):
    """What a random number is for: rounds of different streams never meet. TARGET to RESIDUAL are
    those of rejection sampling (`speculate`)."""

    TARGET = 0  # a draw by inverse CDF
    DRAFT = 1  # which token a drafter takes
    ACCEPT = 2  # whether it is accepted; round: the how many-eth candidate
    RESIDUAL = 3  # what takes the place of a rejected one
    RACE = 4  # the keys of `draw`; round: the race

    def round(self, number: int = 0) -> int:
        """For `uniforms`."""
        return (self.value << 28) | number


def uniforms(seeds: Seq[int], positions: Seq[int], round_: int = 0) -> Doubles:
    """[n] numbers in [0, 1 - 2**-40], each a function of its own (seed, output position, round)
    only."""
    return (_state(seeds, positions, round_) >> np.uint64(24)).astype(np.float64) * 2.0**-40


def _state(seeds: Seq[int], positions: Seq[int], round_: int) -> NDArray[np.uint64]:
    """[n] 64 bits: two rounds of a mixer, the counter added between them."""
    with np.errstate(over="ignore"):
        state = _mix(np.array(seeds, np.uint64) + np.uint64(0x9E3779B97F4A7C15))
        counter = np.array(positions, np.uint64) + (np.uint64(round_) << np.uint64(32))
        return _mix(state ^ (counter * np.uint64(0xD1342543DE82EF95)))


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def arrivals(
    seeds: Seq[int], positions: Seq[int], race: Race, numbers: NDArray[np.integer[Any]]
) -> Bits:
    """[n, m] 32 random bits for each runner, numbers [m] or [n, m]: two rounds of a mixer, keyed by
    seed and position before the first and between them."""
    state = _state(seeds, positions, Stream.RACE.round(race))[:, None]
    with np.errstate(over="ignore"):
        x = numbers.astype(np.uint32) * np.uint32(0x9E3779B1) + state.astype(np.uint32)
        x ^= x >> np.uint32(16)
        x *= np.uint32(0x85EBCA6B)
        x ^= (state >> np.uint64(32)).astype(np.uint32)
        x ^= x >> np.uint32(13)
        x *= np.uint32(0xC2B2AE35)
    x ^= x >> np.uint32(16)
    return x


def waiting_times(bits: Bits) -> Doubles:
    """Exponential of mean 1, from a uniform number in (0, 1)."""
    times: Doubles = -np.log1p(-(bits + 0.5) * 2.0**-32)
    return times


def draw(
    probs: Floats, cuts: Seq[SamplingParams], seeds: Seq[int], positions: Seq[int]
) -> list[int]:
    """The tokens chosen from rows [n, V]; each is a function of its own row's arguments."""
    vocab = probs.shape[1]
    tokens = [-1] * len(probs)
    whole = [j for j, c in enumerate(cuts) if not 0 < c.top_k < vocab and c.min_p <= 0]
    if whole:
        rows = probs if len(whole) == len(probs) else probs[whole]
        found = _race_of_blocks(rows, [seeds[j] for j in whole], [positions[j] for j in whole])
        for j, token in zip(whole, found.tolist(), strict=True):
            tokens[j] = token
    for j, cut in enumerate(cuts):
        if tokens[j] < 0 or cut.top_p < 1:
            tokens[j] = _draw_one(probs[j], tokens[j], cut, seeds[j], positions[j])
    return tokens


def _draw_one(p: Floats, winner: int, cut: SamplingParams, seed: int, position: int) -> int:
    """winner: of the race of blocks, -1 where there was none."""
    base = 1.0
    if winner >= 0:
        before = _before(p, winner)
        ids = np.flatnonzero(before)
        p = p[ids]
        if not len(ids) or float(np.add.reduce(p, dtype=np.float64)) < cut.top_p * base:
            return winner
    elif 0 < cut.top_k < len(p):
        ids = _first(p, cut.top_k)
        p = p[ids]
        base = float(np.add.reduce(p, dtype=np.float64))
    else:
        ids = np.arange(len(p))
    if cut.min_p > 0:
        likely = np.flatnonzero(p >= np.float32(cut.min_p) * p.max())
        ids, p = ids[likely], p[likely]
    times = waiting_times(arrivals([seed], [position], Race.ALONE, ids)[0])
    while True:
        at = int(_over(times, p).argmin())
        if cut.top_p >= 1:
            return int(ids[at])
        left = np.flatnonzero(_before(p, at))
        if not len(left) or float(np.add.reduce(p[left], dtype=np.float64)) < cut.top_p * base:
            return int(ids[at])
        ids, p, times = ids[left], p[left], times[left]


def _race_of_blocks(p: Floats, seeds: Seq[int], positions: Seq[int]) -> NDArray[np.int64]:
    """[n, V] -> [n]: the winning block's winning token."""
    num, vocab = p.shape
    blocks = -(-vocab // BLOCK)
    if vocab < blocks * BLOCK:
        p = np.concatenate([p, np.zeros((num, blocks * BLOCK - vocab), np.float32)], axis=1)
    parts = p.reshape(num, blocks, BLOCK)
    sums = np.add.reduce(parts, axis=-1)
    times = waiting_times(arrivals(seeds, positions, Race.BLOCKS, np.arange(blocks)))
    won = _over(times, sums).argmin(axis=1)
    inside = parts[np.arange(num), won]
    ids = won[:, None] * BLOCK + np.arange(BLOCK)
    times = waiting_times(arrivals(seeds, positions, Race.WITHIN, ids))
    at: NDArray[np.int64] = won * BLOCK + _over(times, inside).argmin(axis=1)
    return at


def _over(times: Doubles, p: Floats) -> Doubles:
    """times / p; who has no mass never arrives."""
    return np.divide(times, p, out=np.full(times.shape, np.inf), where=p > 0)


def _first(p: Floats, k: int) -> NDArray[np.int64]:
    """Ascending ids of the first k in order: of a tie at the edge, the lowest ids."""
    edge = np.partition(p, len(p) - k)[len(p) - k]
    ids = np.flatnonzero(p >= edge)
    if len(ids) > k:
        level = p[ids] == edge
        spare = len(ids) - k
        ids = np.delete(ids, np.flatnonzero(level)[-spare:])
    return ids


def kept(probs: Floats, cut: SamplingParams) -> Doubles:
    """The distribution [V] that `draw` draws from: step 1 of the rule, everything sorted."""
    order = np.argsort(-probs, kind="stable")  # ties by ascending id
    if 0 < cut.top_k < len(order):
        order = order[: cut.top_k]
    p = probs[order].astype(np.float64)
    mass = p.cumsum()
    keep = (mass - p < cut.top_p * (mass[-1] if 0 < cut.top_k < len(probs) else 1.0)) | (
        cut.top_p >= 1
    )
    keep &= probs[order] >= np.float32(cut.min_p) * probs[order[0]]
    keep[0] = True
    out = np.zeros(len(probs))
    out[order[keep]] = p[keep] / p[keep].sum()
    return out


def _before(p: Floats, at: int) -> NDArray[np.bool_]:
    """Which tokens stand before this one."""
    before = np.empty(len(p), np.bool_)
    np.greater_equal(p[:at], p[at], out=before[:at])
    np.greater(p[at:], p[at], out=before[at:])
    return before
