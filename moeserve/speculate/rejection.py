"""Speculative sampling by rejection (Leviathan et al. 2022, Chen et al. 2023), as plain arithmetic.

A token d was drawn from q; the target would draw from p. Accept d with probability
min(1, p(d) / q(d)); else draw from the residual max(0, p - q), normalised. The result is
distributed as p, whatever q is: sum over the ways to token x is min(p, q)(x) + max(0, p - q)(x).

Several candidates drawn from q without replacement (siblings of a tree): after a rejection p
becomes the residual, q loses the token that was rejected and is normalised again, and the next
candidate is judged by these. By induction over the candidates the result is distributed as p.

All functions work on many rows at once, so that a test of the rule is a test of what serves.

Knows numbers only. Shape letters: A rows, V vocabulary.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moeserve.draw import Doubles

Ids = NDArray[np.int64]


def accepts(p: Doubles, q: Doubles, tokens: Ids, u: Doubles) -> NDArray[np.bool_]:
    """[A]: tokens [A] drawn from q [A, V], judged by u [A] in [0, 1). Never one of no p."""
    rows = np.arange(len(tokens))
    accepted: NDArray[np.bool_] = u * q[rows, tokens] < p[rows, tokens]
    return accepted


def residual(p: Doubles, q: Doubles) -> Doubles:
    """[A, V] what a rejected token leaves of p. Where rounding has left nothing, p: there p and q
    are the same but for rounding, and a rejection was as good as impossible."""
    rest = np.maximum(p - q, 0.0)
    mass = rest.sum(axis=-1, keepdims=True)
    left: Doubles = np.where(mass > 0, rest / np.where(mass > 0, mass, 1.0), p)
    return left


def without(q: Doubles, tokens: Ids) -> Doubles:
    """[A, V] q of the next candidate: tokens [A] are drawn already. Zeros where nothing is left."""
    rest = q.copy()
    rest[np.arange(len(tokens)), tokens] = 0.0
    mass = rest.sum(axis=-1, keepdims=True)
    return np.divide(rest, mass, out=np.zeros_like(rest), where=mass > 0)


def pick(p: Doubles, u: Doubles) -> Ids:
    """[A] by inverse CDF in order of id: u [A] in [0, 1); never a token of no mass."""
    mass = p.cumsum(axis=-1)
    target = (u * mass[:, -1])[:, None]
    found = (mass <= target).sum(axis=-1)
    last = p.shape[1] - 1 - np.argmax(p[:, ::-1] > 0, axis=-1)
    at: Ids = np.minimum(found, last)
    return at


def acceptance_rate(p: Doubles, q: Doubles) -> Doubles:
    """[A] chance that a token drawn from q is accepted: the mass that p and q share."""
    shared: Doubles = np.minimum(p, q).sum(axis=-1)
    return shared
