"""Late verdicts: a step's drafts are judged where its logits are, and what follows is drafted
there too, before the host knows a token. It waits once, for all of it.

Under the rule that a draft is accepted where the sampler's token is the same (`verify`), which a
device can tell by comparing. What the host then works out from the same tokens (`Verdict`) is the
same. Of trees that branch what is left is the path that was walked, as of a chain: whoever drafts
behind it sees no difference.

Knows tokens on a device. Knows nothing of who drafts, or of how rows are chosen from.

Shape letters: O rows that tokens are chosen at, S sequences they are of, K most drafts of one, N
most nodes of a tree, P rows of all paths, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from models.crossing import sent, sent_all
from moeserve.sampler import Sampled
from moeserve.sequence import Sequence
from moeserve.speculate.drafter import DraftAsk
from moeserve.speculate.tree import DraftTree


class Choosing(Protocol):
    """What rows chose. tokens [O] int64, failed [O] bool (those tokens mean nothing, but are of the
    vocabulary): where the logits are. tensors: what `sampled` tells from, once it is brought."""

    @property
    def tokens(self) -> Tensor: ...

    @property
    def failed(self) -> Tensor: ...

    @property
    def tensors(self) -> list[Tensor]: ...

    def sampled(self, host: Seq[Tensor]) -> Sampled: ...


class ChosenHere:
    """On CPUs: chosen already."""

    def __init__(self, found: Sampled) -> None:
        self.tokens = torch.tensor(found.token_ids, dtype=torch.int64)
        self.failed = torch.zeros(len(found.token_ids), dtype=torch.bool)
        self.failed[list(found.failed)] = True
        self._found = found

    @property
    def tensors(self) -> list[Tensor]:
        return []

    def sampled(self, host: Seq[Tensor]) -> Sampled:
        return self._found


@dataclass(frozen=True)
class Late:
    """On the device: tokens [O] int64, accepted [S] int64. On the host, of each sequence: its first
    row of O, and its drafts.

    walked: where a tree branches, [P] int64. Then all of this is of paths: a sequence has as many
    drafts, and a row more, as its tree is deep; behind what was accepted its last row comes again.
    Of each row it says which of its sequence's rows in the step it was, 0 is the root's."""

    tokens: Tensor
    accepted: Tensor
    firsts: list[int]
    drafts: list[int]
    walked: Tensor | None = None

    def along(self, hidden: Tensor, roots: Seq[int]) -> Tensor:
        """hidden [T, D] of the step, roots [S]: each root's row in it -> [P, D], rows of paths."""
        assert self.walked is not None, "chains are paths"
        begins = [
            root for root, num in zip(roots, self.drafts, strict=True) for _ in range(num + 1)
        ]
        return hidden.index_select(0, sent(torch.tensor(begins), hidden.device) + self.walked)


@dataclass(frozen=True)
class LateDrafts:
    """tensors: to be brought over, for `told`. told(they, accepted [S], on the host) -> of each ask
    a tree. To be called once the verdicts are known, before the next step."""

    tensors: list[Tensor]
    told: Callable[[Seq[Tensor], Seq[int]], list[DraftTree]]


@runtime_checkable
class LateDrafter(Protocol):
    """A `Drafter` that can: see MtpDrafter."""

    def drafts_late(self, sequences: Seq[Sequence]) -> bool: ...

    def ask_late(self, asks: Seq[DraftAsk], depth: int, late: Late) -> LateDrafts: ...


class LateEnds:
    """Where drafting goes on from, of such asks in this order; late None: the host knows. drafts
    [S]: of the step, judged late; accepted [S] int64: how many of them were, on the device."""

    def __init__(self, asks: Seq[DraftAsk], late: Late | None, device: torch.device) -> None:
        self.drafts = [0] * len(asks)
        self.accepted = torch.zeros(len(asks), dtype=torch.int64, device=device)
        self._is_late = late is not None
        if late is not None:
            numbers = [ask.late for ask in asks if ask.late is not None]
            assert len(numbers) == len(asks), "a sequence drafts whose token was not chosen"
            self.drafts = [late.drafts[number] for number in numbers]
            self.accepted = late.accepted.index_select(0, sent(torch.tensor(numbers), device))

    @property
    def rejected(self) -> Tensor:
        """[S] int64, on the device."""
        if not self._is_late:
            return self.accepted  # none of none
        return sent(torch.tensor(self.drafts), self.accepted.device) - self.accepted

    def last_rows(self, parts: Seq[Tensor]) -> Tensor:
        """parts: of each in order [m, D], rows of its step -> [S, D], that of its last token, of
        those that were accepted."""
        ends = [part[-1 - drafts :] for part, drafts in zip(parts, self.drafts, strict=True)]
        if not self._is_late:
            return torch.cat(ends)
        firsts = [0, *accumulate(len(part) for part in ends[:-1])]
        places = sent(torch.tensor(firsts), self.accepted.device) + self.accepted
        return torch.cat(ends).index_select(0, places)


def judge(tokens: Tensor, failed: Tensor, trees: Seq[DraftTree]) -> Late:
    """tokens, failed [O]: of the rows of trees[0], then those of trees[1], ... Nothing is waited
    for."""
    *firsts, rows = accumulate((tree.num_rows for tree in trees), initial=0)
    assert rows == tokens.shape[0], "tokens of other rows than the trees have"
    found = torch.where(failed, -2, tokens)
    if not all(tree.is_chain for tree in trees):
        return _walk(tokens, found, trees, firsts)
    drafts = [tree.num_nodes for tree in trees]
    most = max(drafts, default=0)
    if not most:
        return Late(tokens, tokens.new_zeros(len(trees)), firsts, drafts)
    drafted = [[*tree.tokens, *(-1,) * (most - tree.num_nodes)] for tree in trees]
    at = [[min(first + k, rows - 1) for k in range(most)] for first in firsts]
    wanted, places = sent_all([torch.tensor(drafted), torch.tensor(at)], tokens.device)
    same = (found[places] == wanted).to(torch.int64)
    return Late(tokens, same.cumprod(dim=1).sum(dim=1), firsts, drafts)


def _walk(tokens: Tensor, found: Tensor, trees: Seq[DraftTree], firsts: Seq[int]) -> Late:
    """`judge` of trees, level by level: to the child whose token was found where the path stands.
    found [O]: the tokens, no draft's where there is none; firsts: each tree's first row."""
    most, depths = max(tree.num_nodes for tree in trees), [tree.depth for tree in trees]
    deepest = max(depths)
    places = [(s, d) for s, depth in enumerate(depths) for d in range(depth + 1)]
    host = (
        [[*tree.tokens, *(-1,) * (most - tree.num_nodes)] for tree in trees],
        [[*(p + 1 for p in tree.parents), *(0,) * (most - tree.num_nodes)] for tree in trees],
        [[first] for first in firsts],
        [s * (deepest + 1) + d for s, d in places],
        [firsts[s] for s, _ in places],
    )
    drafted, above, roots, kept, begins = sent_all([torch.tensor(x) for x in host], tokens.device)
    fits = found[roots + above] == drafted  # [S, N]
    rows = torch.arange(1, most + 1, device=tokens.device)
    path = [torch.zeros_like(roots)]
    for _ in range(deepest):
        goes = fits & (above == path[-1])
        # A child's row is behind its parent's; where none goes on the path stays.
        path.append(torch.where(goes, rows, path[-1]).amax(dim=1, keepdim=True))
    whole = torch.cat(path, dim=1)
    walked = whole.flatten().index_select(0, kept)
    starts = list(accumulate((depth + 1 for depth in depths[:-1]), initial=0))
    accepted = (whole[:, 1:] != whole[:, :-1]).sum(dim=1)
    return Late(tokens.index_select(0, begins + walked), accepted, starts, depths, walked)
