"""Which rank a request goes to: the longest cached prefix, unless that rank is too busy.

`choose_rank` is the decision, on plain data. `PrefixIndex` remembers which blocks each rank holds
(from CacheEvents) or is about to compute (requests in flight), so that twins that arrive together
meet on one rank. Knows block hashes and token counts; knows nothing of sockets or text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

REQUEST_COST = 32  # tokens a request counts for beyond its own, so that short ones spread by number
FREE_IMBALANCE = 256  # tokens of load by which a rank may exceed the idlest one for any prefix


@dataclass(frozen=True)
class RankLoad:
    """What the choice is made from: tokens waiting or running on a rank, and the tokens of this
    prompt that it would find cached."""

    rank: int
    load: int
    cached_tokens: int


def choose_rank(loads: Sequence[RankLoad]) -> RankLoad:
    """The rank with the longest cached prefix, then the least load, then the lowest number.

    A rank stands for election only while its load exceeds the least loaded rank's by no more than
    the prefill that its cache saves plus a quarter of the mean load (or FREE_IMBALANCE tokens):
    a popular prefix spreads to further ranks instead of burying one.
    """
    assert loads
    least = min(x.load for x in loads)
    allowance = max(FREE_IMBALANCE, sum(x.load for x in loads) // (4 * len(loads)))
    eligible = [
        x for x in loads if x.load == least or x.load - least <= x.cached_tokens + allowance
    ]
    if all(x.cached_tokens == 0 for x in eligible):
        eligible = [x for x in loads if x.load == least]
    return min(eligible, key=lambda x: (-x.cached_tokens, x.load, x.rank))


class PrefixIndex:
    """Blocks that each rank has cached, or will have once a request in flight is prefilled."""

    def __init__(self, num_ranks: int) -> None:
        self._cached: list[set[int]] = [set() for _ in range(num_ranks)]
        self._expected: list[Counter[int]] = [Counter() for _ in range(num_ranks)]

    def changed(
        self, rank: int, added: Iterable[int], removed: Iterable[int], cleared: bool
    ) -> None:
        """Apply a rank's CacheEvents: removals first, since a block may leave and come back."""
        cached = self._cached[rank]
        if cleared:
            cached.clear()
        cached.difference_update(removed)
        cached.update(added)

    def expect(self, rank: int, hashes: Sequence[int]) -> None:
        """A request with these blocks is on its way to the rank."""
        self._expected[rank].update(hashes)

    def unexpect(self, rank: int, hashes: Sequence[int]) -> None:
        """That request has ended; what it computed is known from the rank's own events."""
        expected = self._expected[rank]
        for value in hashes:
            if expected[value] <= 1:
                del expected[value]
            else:
                expected[value] -= 1

    def prefix_blocks(self, rank: int, hashes: Sequence[int]) -> int:
        """How many leading blocks of a prompt the rank holds or will hold."""
        cached, expected = self._cached[rank], self._expected[rank]
        for count, value in enumerate(hashes):
            if value not in cached and value not in expected:
                return count
        return len(hashes)

    def num_cached(self, rank: int) -> int:
        return len(self._cached[rank])
