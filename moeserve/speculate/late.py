"""Late verdicts: a step's drafts are judged where its logits are, and what follows is drafted
there too, before the host knows a token. It waits once, for all of it.

Of chains alone, and under the rule that a draft is accepted where the sampler's token is the same
(`verify`), which a device can tell by comparing. What the host then works out from the same tokens
(`Verdict`) is the same.

Knows tokens on a device. Knows nothing of who drafts, or of how rows are chosen from.

Shape letters: O rows that tokens are chosen at, S sequences they are of, K most drafts of one.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from models.crossing import sent_all
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
    row of O, and its drafts."""

    tokens: Tensor
    accepted: Tensor
    firsts: list[int]
    drafts: list[int]


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


def judge(tokens: Tensor, failed: Tensor, trees: Seq[DraftTree]) -> Late:
    """tokens, failed [O]: of the rows of trees[0], then those of trees[1], ... Nothing is waited
    for."""
    firsts: list[int] = []
    rows = 0
    for tree in trees:
        assert tree.is_chain, "a tree that branches is judged on the host"
        firsts.append(rows)
        rows += tree.num_rows
    assert rows == tokens.shape[0], "tokens of other rows than the trees have"
    drafts = [tree.num_nodes for tree in trees]
    most = max(drafts, default=0)
    if not most:
        return Late(tokens, tokens.new_zeros(len(trees)), firsts, drafts)
    drafted = [[*tree.tokens, *(-1,) * (most - tree.num_nodes)] for tree in trees]
    at = [[min(first + k, rows - 1) for k in range(most)] for first in firsts]
    wanted, places = sent_all([torch.tensor(drafted), torch.tensor(at)], tokens.device)
    found = torch.where(failed, -2, tokens)[places]
    same = (found == wanted).to(torch.int64)
    return Late(tokens, same.cumprod(dim=1).sum(dim=1), firsts, drafts)
