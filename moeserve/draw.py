"""Random choice of a token from probabilities: top-k, top-p, min-p, and the random numbers.

One rule, for each row [V] of probabilities (the softmax of what was edited, fp32):

1. Tokens stand in order of descending probability, ties by ascending id. Kept is a prefix of that
   order. top-k: the first k. min-p: those of at least min_p times the first one's probability.
   top-p: those before which stands less mass than top_p times the mass of the first k (1 where
   top-k is off). The first token is always kept.
2. Left are, at first, the tokens that top-k and min-p keep. In round 0, 1, ... a number u in [0, 1)
   comes from (seed, output position, round), and the token among those left, by ascending id, at
   which their cumulative mass passes u times its sum. If top-p keeps it, it is the choice; if not,
   left are those that stand before it (all that is kept is among them).

So nothing is sorted and a row is read two or three times, however flat it is. A token's chance is
its share of the kept mass: a draw from a larger set that falls into the kept one is a draw from it.

Law 5: each row is worked on alone, in a fixed order, by numpy, whose sums know no threads. A sum
over blocks of BLOCK tokens (fp32) finds the block, a cumulative sum (fp64) the token in it.

Knows numbers only. `sampler.sample_slowly` has the same rule in plain steps.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from moeserve.request import SamplingParams

BLOCK = 128
SPARSE = 8  # fewer than one in so many left: those are gathered

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]


class Stream(enum.IntEnum):
    """What a random number is for: rounds of different streams never meet. The target's own draws
    are stream 0; the others are those of rejection sampling (`speculate`)."""

    TARGET = 0
    DRAFT = 1  # which token a drafter takes
    ACCEPT = 2  # whether it is accepted; round: the how many-eth candidate
    RESIDUAL = 3  # what takes the place of a rejected one

    def round(self, number: int = 0) -> int:
        """For `uniforms`."""
        return (self.value << 28) | number


def uniforms(seeds: Seq[int], positions: Seq[int], round_: int = 0) -> NDArray[np.float64]:
    """[n] numbers in [0, 1 - 2**-40], each a function of its own (seed, output position, round)
    only: two rounds of a 64-bit mixer, the counter added between them."""
    with np.errstate(over="ignore"):
        state = _mix(np.array(seeds, np.uint64) + np.uint64(0x9E3779B97F4A7C15))
        counter = np.array(positions, np.uint64) + (np.uint64(round_) << np.uint64(32))
        state = _mix(state ^ (counter * np.uint64(0xD1342543DE82EF95)))
    return (state >> np.uint64(24)).astype(np.float64) * 2.0**-40


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def draw(probs: Floats, u: float, cut: SamplingParams, seed: int, position: int) -> int:
    """The token chosen from one row [V]. u: `uniforms` of (seed, position), round 0."""
    p = probs
    ids: NDArray[np.int64] | None = None  # of p; None: all
    base = 1.0
    if 0 < cut.top_k < len(p):
        ids = _first(p, cut.top_k)
        p = p[ids]
        base = float(np.add.reduce(p, dtype=np.float64))
    if cut.min_p > 0:
        likely = np.flatnonzero(p >= np.float32(cut.min_p) * p.max())
        ids = likely if ids is None else ids[likely]
        p = p[likely]
    round_ = 0
    while True:
        at = _pick(p, u)
        if cut.top_p >= 1:
            break
        before = _before(p, at)
        higher = p * before
        count = int(np.count_nonzero(before))
        if count == 0 or float(np.add.reduce(higher)) < cut.top_p * base:
            break
        p = higher  # what is no longer left has no mass
        if count * SPARSE < len(p):
            left = np.flatnonzero(before)
            ids = left if ids is None else ids[left]
            p = p[left]
        round_ += 1
        u = float(uniforms([seed], [position], round_)[0])
    return at if ids is None else int(ids[at])


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


def _pick(p: Floats, u: float) -> int:
    """The index at which the cumulative mass passes u times its sum; never one of no mass."""
    whole = len(p) // BLOCK * BLOCK
    sums = np.add.reduce(p[:whole].reshape(-1, BLOCK), axis=-1)
    if whole < len(p):
        last = np.zeros(BLOCK, np.float32)
        last[: len(p) - whole] = p[whole:]
        sums = np.append(sums, np.add.reduce(last))
    mass = sums.cumsum(dtype=np.float64)
    target = u * mass[-1]
    block = _passed(mass, target)
    start = block * BLOCK
    inside = p[start : start + BLOCK].cumsum(dtype=np.float64)
    return start + _passed(inside, target - (mass[block - 1] if block else 0.0))


def _passed(mass: NDArray[np.float64], target: float) -> int:
    """First index at which the cumulative mass passes target, else the last one with a mass."""
    index = int(mass.searchsorted(target, side="right"))
    return index if index < len(mass) else int(mass.searchsorted(mass[-1]))
