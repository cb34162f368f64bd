"""What a sequence's sampling remembers of its tokens: SeenTokens for penalties, Bias for logits.

Arrays that are kept from step to step and grow by one token, so that a step only concatenates
them. Knows token ids; knows nothing of logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray


class SeenTokens:
    """Distinct tokens and how often each was put out: 0 for those of the prompt alone."""

    __slots__ = ("_counts", "_ids", "_places", "num")

    def __init__(self, prompt: Seq[int], output: Seq[int]) -> None:
        """prompt: empty where only the output is penalised."""
        first = np.unique(np.asarray(prompt, np.int64))
        self.num = len(first)
        self._ids = np.empty(self.num + 64, np.int64)
        self._counts = np.zeros(self.num + 64, np.float32)
        self._ids[: self.num] = first
        self._places = dict(zip(first.tolist(), range(self.num), strict=True))
        for token in output:
            self.add(token)

    @property
    def ids(self) -> NDArray[np.int64]:
        return self._ids[: self.num]

    @property
    def counts(self) -> NDArray[np.float32]:
        return self._counts[: self.num]

    def add(self, token: int) -> None:
        """The sequence has put out this token."""
        place = self._places.get(token)
        if place is None:
            place = self._places[token] = self.num
            if self.num == len(self._ids):
                self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[place] = token
            self.num += 1
        self._counts[place] += 1

    def followed_by(self, tokens: Seq[int]) -> SeenTokens:
        """A copy that has seen these as well; not to be added to."""
        new = [t for t in dict.fromkeys(tokens) if t not in self._places]
        places = dict(zip(new, range(self.num, self.num + len(new)), strict=True))
        copy = SeenTokens.__new__(SeenTokens)
        copy.num, copy._places = self.num + len(new), places
        copy._ids = np.concatenate([self.ids, np.array(new, np.int64)])
        copy._counts = np.concatenate([self.counts, np.zeros(len(new), np.float32)])
        for token in tokens:
            known = self._places.get(token)
            copy._counts[places[token] if known is None else known] += 1
        return copy


class Bias:
    """logit_bias as arrays."""

    __slots__ = ("ids", "values")

    def __init__(self, bias: Mapping[int, float]) -> None:
        self.ids: NDArray[np.int64] = np.fromiter(bias.keys(), np.int64, len(bias))
        self.values: NDArray[np.float32] = np.fromiter(bias.values(), np.float32, len(bias))
