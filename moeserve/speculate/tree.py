"""DraftTree: the drafted tokens after a sequence, as a bounded tree; a chain is the simplest one.

Rows: row 0 is the last known token of the sequence, row i + 1 is node i. So n nodes are n + 1 rows
of a forward pass, and the logits of a row say what comes after its path.

Knows: token ids, parents, the distributions that drafts were drawn from. Knows nothing of logits,
caches or how nodes came about.

Shape letters: n nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from moeserve.draw import Doubles


@dataclass(frozen=True)
class DraftTree:
    """tokens[i] of node i, parents[i] < i its parent's number, -1 for the root's children. Siblings
    stand in the order in which they were drawn and differ in their tokens.

    probs: by row, the distribution [V] that the children of this row were drawn from, without
    replacement (`rejection`). A row that is missing has children that no chance chose (n-gram,
    best k, or drawn with the target's own random numbers).
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    probs: dict[int, Doubles] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.parents)
        assert all(-1 <= parent < i for i, parent in enumerate(self.parents)), self.parents
        for row, children in enumerate(self.children):
            drawn = [self.tokens[i] for i in children]
            assert len(set(drawn)) == len(drawn), f"children of row {row} are {drawn}"

    @property
    def num_nodes(self) -> int:
        return len(self.tokens)

    @property
    def num_rows(self) -> int:
        return len(self.tokens) + 1

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(-1, len(self.parents) - 1))

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """[n + 1], by row: its nodes in order."""
        found: list[list[int]] = [[] for _ in range(len(self.tokens) + 1)]
        for i, parent in enumerate(self.parents):
            found[parent + 1].append(i)
        return tuple(tuple(x) for x in found)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """[n + 1], by row: tokens after the sequence; 0 at the root."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent + 1] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        return max(self.depths)

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """[n + 1], by row: the tokens after the sequence up to and with the row's own."""
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(self.tokens, self.parents, strict=True):
            paths.append((*paths[parent + 1], token))
        return tuple(paths)

    def ancestor_mask(self) -> NDArray[np.bool_]:
        """[n + 1, n + 1]: row i attends to row j: itself and what stands above it. All rows attend
        to what is cached before the root."""
        mask = np.eye(self.num_rows, dtype=np.bool_)
        for i, parent in enumerate(self.parents):
            mask[i + 1] |= mask[parent + 1]
        return mask

    def positions(self, root: int) -> NDArray[np.int64]:
        """[n + 1] position of each row in the sequence; root: that of the last known token."""
        return np.array(self.depths, np.int64) + root

    def child(self, row: int, token: int) -> int | None:
        """The node under this row with this token."""
        return next((i for i in self.children[row] if self.tokens[i] == token), None)

    def cut(self, depth: int, stop_ids: frozenset[int] = frozenset()) -> DraftTree:
        """Without what lies deeper, and without what would follow a token that ends the output."""
        return self.keep(
            i
            for i in range(self.num_nodes)
            if self.depths[i + 1] <= depth and not stop_ids & set(self.paths[i + 1][:-1])
        )

    def keep(self, nodes: Iterable[int]) -> DraftTree:
        """The tree of these nodes alone; a node whose parent goes, goes too. Of siblings drawn by
        chance the last ones may go, by a rule that does not look at their tokens: a draw that
        nobody has looked at is as good as none. Any other choice would bend the distribution."""
        wanted = set(nodes)
        number: dict[int, int] = {-1: -1}
        for i, parent in enumerate(self.parents):
            if i in wanted and parent in number:
                number[i] = len(number) - 1
        old = [i for i in number if i >= 0]
        kept_rows = {i + 1: number[i] + 1 for i in number}
        return DraftTree(
            tuple(self.tokens[i] for i in old),
            tuple(number[self.parents[i]] for i in old),
            {kept_rows[row]: q for row, q in self.probs.items() if row in kept_rows},
        )


def chain(tokens: Seq[int], probs: Seq[Doubles] | None = None) -> DraftTree:
    """probs[i]: what tokens[i] was drawn from; None: by no chance of its own."""
    by_row = {} if probs is None else dict(enumerate(probs))
    return DraftTree(tuple(tokens), tuple(range(-1, len(tokens) - 1)), by_row)


@dataclass(frozen=True)
class Candidate:
    """A token that may follow the candidate numbered `parent` (-1: the sequence) with this
    probability, as the drafter sees it."""

    token: int
    parent: int
    probability: float


def best_nodes(candidates: Seq[Candidate], most: int) -> DraftTree:
    """Of a larger tree the at most `most` nodes that are most likely to be accepted: those with the
    largest product of probabilities along their path. A node's product is at most its parent's, so
    the best are a tree; ties go to the earlier. Deterministic: no chance chose them."""
    reach: list[float] = []
    for i, candidate in enumerate(candidates):
        assert candidate.parent < i
        above = reach[candidate.parent] if candidate.parent >= 0 else 1.0
        reach.append(above * min(max(candidate.probability, 0.0), 1.0))
    order = sorted(range(len(candidates)), key=lambda i: (-reach[i], i))[: max(most, 0)]
    number = {-1: -1}
    for i in sorted(order):  # parents first
        number[i] = len(number) - 1
    rest = [candidates[i] for i in number if i >= 0]
    return DraftTree(tuple(c.token for c in rest), tuple(number[c.parent] for c in rest))


def product_tree(tops: Seq[Seq[tuple[int, float]]], most: int) -> DraftTree:
    """For heads that draft each depth by itself (Medusa): tops[d] are the best tokens at depth
    d + 1 with their probabilities, whatever stands above. The `most` best nodes of their product;
    only candidates that could be among them are made."""
    found: list[Candidate] = []
    frontier = [(-1, 1.0)]
    for top in tops:
        level: list[tuple[int, float]] = []
        for parent, reach in frontier:
            for token, probability in top:
                found.append(Candidate(token, parent, probability))
                level.append((len(found) - 1, reach * probability))
        level.sort(key=lambda x: (-x[1], x[0]))
        frontier = sorted(level[:most])  # deeper nodes stand under the best `most` of their level
    return best_nodes(found, most)
