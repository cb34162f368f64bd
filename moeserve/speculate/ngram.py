"""Prompt lookup: what followed the last tokens the last time they stood in this sequence.

No model. The longest suffix of the sequence (longest to shortest n tokens) that occurred before in
prompt or output is looked up, and the tokens behind its last occurrence are proposed. Good where
output repeats input: code edits, summaries, tool calls.

An index by request maps each n-gram to the place behind its last occurrence. It grows with the
sequence; a step indexes at most `index_per_step` tokens over all requests, so a long prompt costs
no single step much, and lookups are `longest` dictionary reads. What is proposed depends on that
pace, what is put out does not.

Knows: token ids. Knows nothing of models. Not collective.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from collections.abc import Sequence as Seq

from moeserve.sequence import Sequence
from moeserve.speculate.drafter import DraftAsk
from moeserve.speculate.tree import DraftTree, chain

INDEX_PER_STEP = 2048  # tokens: some milliseconds of a core


class NgramIndex:
    """Of one sequence. places[n]: n-gram -> position of the token behind its last occurrence; the
    n-grams that end before position `num_indexed` are in it."""

    __slots__ = ("longest", "num_indexed", "places", "shortest")

    def __init__(self, longest: int, shortest: int) -> None:
        self.longest, self.shortest = longest, shortest
        self.places: dict[int, dict[tuple[int, ...], int]] = {
            n: {} for n in range(shortest, longest + 1)
        }
        self.num_indexed = 0

    def grow(self, tokens: Seq[int], most: int) -> int:
        """Index up to `most` more tokens that have a successor -> how many."""
        start = self.num_indexed
        end = min(len(tokens) - 1, start + most)
        for n, places in self.places.items():
            for last in range(max(start, n - 1), end):
                places[tuple(tokens[last - n + 1 : last + 1])] = last + 1
        self.num_indexed = max(start, end)
        return self.num_indexed - start

    def find(self, tokens: Seq[int]) -> int | None:
        """Where the continuation of the longest known suffix begins."""
        for n in range(min(self.longest, len(tokens)), self.shortest - 1, -1):
            place = self.places[n].get(tuple(tokens[len(tokens) - n :]))
            if place is not None:
                return place
        return None


class NgramDrafter:
    """longest, shortest: n-grams that are looked up. Ids from vocab_size on are not proposed."""

    name = "ngram"
    collective = False
    wants_hidden = False
    runs_ahead = False

    def __init__(
        self,
        vocab_size: int,
        max_depth: int = 8,
        longest: int = 4,
        shortest: int = 2,
        index_per_step: int = INDEX_PER_STEP,
    ) -> None:
        assert 1 <= shortest <= longest and max_depth >= 1 and index_per_step >= 1
        self.max_depth = self.max_nodes = max_depth
        self._vocab = vocab_size
        self._shape = (longest, shortest)
        self._per_step = index_per_step
        self._indices: dict[str, NgramIndex] = {}

    def propose(
        self, asks: Seq[DraftAsk], depth: int, max_tokens: int | None = None
    ) -> list[DraftTree]:
        """See Drafter: chains, drawn by no chance."""
        left = self._per_step
        trees: list[DraftTree] = []
        for ask in asks:
            tokens = ask.sequence.tokens
            index = self._indices.get(ask.sequence.request_id)
            if index is None:
                index = self._indices[ask.sequence.request_id] = NgramIndex(*self._shape)
            left -= index.grow(tokens, left)
            most = min(ask.most, depth, self.max_depth)
            place = index.find(tokens) if most > 0 else None
            found = [] if place is None else follow(tokens, place, most)
            bad = next((i for i, t in enumerate(found) if t >= self._vocab), len(found))
            trees.append(chain(found[:bad]))
        return trees

    def settle(self, sequence: Sequence, num_accepted: int, num_rejected: int) -> None:
        """Nothing to undo: only tokens of the sequence itself are indexed."""

    def forget(self, request_ids: Collection[str]) -> None:
        for request_id in request_ids:
            self._indices.pop(request_id, None)

    def memory_bytes(self) -> int:
        """Of the tables, keys not counted: an estimate."""
        return sum(
            sys.getsizeof(places)
            for index in self._indices.values()
            for places in index.places.values()
        )


def follow(tokens: Seq[int], place: int, k: int) -> list[int]:
    """k tokens from `place` on; behind the end it goes on as it began (a period goes on)."""
    found: list[int] = []
    for at in range(place, place + k):
        found.append(tokens[at] if at < len(tokens) else found[at - len(tokens)])
    return found


def propose_slowly(tokens: Seq[int], k: int, longest: int, shortest: int) -> list[int]:
    """The twin: search backwards, the longest n first."""
    for n in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        suffix = list(tokens[-n:])
        for start in range(len(tokens) - n - 1, -1, -1):
            if list(tokens[start : start + n]) == suffix:
                return follow(tokens, start + n, k)
    return []
