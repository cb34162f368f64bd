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


class Bias:
    """logit_bias as arrays."""

    __slots__ = ("ids", "values")

    def __init__(self, bias: Mapping[int, float]) -> None:
        self.ids: NDArray[np.int64] = np.fromiter(bias.keys(), np.int64, len(bias))
        self.values: NDArray[np.float32] = np.fromiter(bias.values(), np.float32, len(bias))
