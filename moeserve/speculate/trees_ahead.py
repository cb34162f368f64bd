"""Trees that are grown level by level on a device, brought to the host by one copy behind the last.

A level's size is known beforehand: each of the `width` likeliest nodes of the level above has
`width` children. Which nodes those are stays on the device, as do the chances along each path; it
picks of all that were seen the likeliest. Chances are multiplied in fp64, in the same order as
`tree.best_nodes` does, and ties go to the earlier node: so it is the tree that the host would make.

Knows: tokens, parents, chances. Knows nothing of what makes the logits.

Shape letters: S trees, w children of a node, f nodes of a level that get children (1: the root),
n of those of all levels so far, N nodes of a tree.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.speculate.likeliest import likeliest
from moeserve.speculate.tree import DraftTree


@dataclass(frozen=True)
class Frontier:
    """The nodes of the last level that get children. tokens, parents [S * f] int64: a parent is a
    row of the level's own logits. ancestors [S, f, n] bool: of all nodes that got children so far,
    in order, those on each one's path, itself included."""

    tokens: Tensor
    parents: Tensor
    ancestors: Tensor


class TreesAhead:
    """`add` a level, go on from its `frontier`, and so on; then `tensors`, once they are on the
    host, are what `told_trees` tells. The host waits for nothing."""

    def __init__(self, num: int, width: int, device: torch.device) -> None:
        self._num, self._width, self._device = num, width, device
        self._tokens: list[Tensor] = []  # of each level [S, f * w]
        self._parents: list[Tensor] = []  # numbers of nodes, -1: the root
        self._reach: list[Tensor] = []  # fp64: the product along the path
        # Of the nodes that get children now, at first of the root.
        self._above = torch.ones(num, 1, dtype=torch.float64, device=device)
        self._numbers = torch.full((num, 1), -1, dtype=torch.int64, device=device)
        self._ancestors = torch.zeros(num, 1, 0, dtype=torch.bool, device=device)

    def add(self, logits: Tensor) -> None:
        """logits [S * f, V]: a tree's rows behind each other's, in the frontier's order."""
        chances, ids = likeliest(torch.softmax(logits, dim=-1), self._width)
        num, w = self._num, ids.shape[1]
        self._tokens.append(ids.view(num, -1))
        self._parents.append(self._numbers.repeat_interleave(w, dim=1))
        reach = self._above[:, :, None] * chances.double().view(num, -1, w)
        self._reach.append(reach.view(num, -1))

    def frontier(self) -> Frontier:
        """Of the level that was added last: its `width` likeliest."""
        num, rows = self._above.shape
        w = self._tokens[-1].shape[1] // rows
        before = sum(level.shape[1] for level in self._tokens[:-1])
        reach, order = self._reach[-1].sort(dim=1, descending=True, stable=True)
        chosen = order[:, : self._width]
        self._above, self._numbers = reach[:, : self._width], chosen + before
        above = chosen // w
        trees = torch.arange(num, device=self._device)[:, None]
        inherited = self._ancestors[trees, above]
        own = torch.eye(chosen.shape[1], dtype=torch.bool, device=self._device)
        self._ancestors = torch.cat([inherited, own.expand(num, -1, -1)], dim=-1)
        tokens = self._tokens[-1].gather(1, chosen)
        return Frontier(tokens.reshape(-1), (above + trees * rows).reshape(-1), self._ancestors)

    def tensors(self, most: int) -> list[Tensor]:
        """Of the most nodes of a tree. [3, S, N] int64: number, token, parent's number of each, the
        likeliest first."""
        reach = torch.cat(self._reach, dim=1)
        best = reach.sort(dim=1, descending=True, stable=True).indices[:, :most]
        tokens, parents = torch.cat(self._tokens, dim=1), torch.cat(self._parents, dim=1)
        return [torch.stack((best, tokens.gather(1, best), parents.gather(1, best)))]


def told_trees(host: Seq[Tensor], most: Seq[int]) -> list[DraftTree]:
    """host: `TreesAhead.tensors`, brought over. most [S]: nodes of each -> its likeliest ones."""
    (table,) = host
    return [
        _tree(*(row[:num] for row in rows))
        for num, *rows in zip(most, *table.tolist(), strict=True)
    ]


def _tree(numbers: list[int], tokens: list[int], parents: list[int]) -> DraftTree:
    """A node's chance is at most its parent's and of equal ones the earlier is taken, so that
    parents are there, and stand first once they are in order."""
    order = sorted(range(len(numbers)), key=numbers.__getitem__)
    place = {-1: -1} | {numbers[j]: new for new, j in enumerate(order)}
    return DraftTree(tuple(tokens[j] for j in order), tuple(place[parents[j]] for j in order))
