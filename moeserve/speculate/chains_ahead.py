"""Chains of heads that are chosen on a device, brought to the host by one copy behind the last.

What a head's chain needs of the host is known before the first draft: who may have how many, what
is drawn with. A row whose token is none is drafted on in vain and cut afterwards; so what is left
is what choosing on the host gives. With late verdicts (`late`) even the row that drafting goes on
from is known on the device alone.

Knows: rows of drafts, what draws are made of. Knows nothing of what makes the logits.

Shape letters: S sequences that draft, the one with the most drafts first, so that those of each
depth are the first k; V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from moeserve.row_draws import draws_of
from moeserve.sequence import SamplingNeeds
from moeserve.speculate.drafter import DraftAsk
from moeserve.speculate.late import Late, LateEnds
from moeserve.speculate.rounds_ahead import Pick
from moeserve.speculate.tree import DraftTree, chain


class ChainsAhead:
    """`choose` depth by depth; then `tensors`, once they are on the host, are what `trees` tells.

    order [S]: numbers of asks; counts: by depth, the rows k that draft there, 0 behind the last.
    ends: where drafting goes on from, in this order."""

    def __init__(
        self,
        asks: Seq[DraftAsk],
        able: Seq[int],
        depth: int,
        device: torch.device,
        pick: Pick,
        late: Late | None = None,
    ) -> None:
        """able: numbers of the asks that may draft."""
        self.order = sorted(able, key=lambda i: -asks[i].most)
        self.counts = [sum(asks[i].most > d for i in able) for d in range(depth)]
        members = [asks[i] for i in self.order]
        self.ends = LateEnds(members, late, device)
        self._out = int(late is not None)  # tokens that the host does not know of
        sequences = [ask.sequence for ask in members]
        is_random = any(s.needs & SamplingNeeds.RANDOM for s in sequences)
        self._draws = draws_of(sequences, device) if is_random else None
        self._pick, self._num_asks = pick, len(asks)
        self._tokens: list[Tensor] = []
        self._failed: list[Tensor] = []

    def choose(self, logits: Tensor) -> Tensor:
        """logits [k, V] of the next depth -> tokens [k] int64. The host waits for nothing."""
        depth, k, draws = len(self._tokens), len(logits), self._draws
        assert k == self.counts[depth]
        if draws is not None:
            out = draws.positions[:k] + self.ends.accepted[:k] + (self._out + depth)
            draws = draws.first(k, out)
        tokens, failed = self._pick(logits, draws)
        self._tokens.append(tokens)
        self._failed.append(failed)
        return tokens

    @property
    def tensors(self) -> list[Tensor]:
        return [*self._tokens, *self._failed]

    def trees(self, host: Seq[Tensor]) -> list[DraftTree]:
        """host: the tensors, brought over -> of each ask what it drafted."""
        rows = [x.tolist() for x in host]
        num = len(rows) // 2
        found: list[list[int]] = [[] for _ in range(self._num_asks)]
        going = set(range(len(self.order)))
        for tokens, failed in zip(rows[:num], rows[num:], strict=True):
            going &= {row for row, has_none in enumerate(failed) if not has_none}
            for row in going:
                found[self.order[row]].append(tokens[row])
        return [chain(tokens) for tokens in found]
