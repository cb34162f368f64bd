"""What drafters with a forward pass of their own share: the rows of a round, chains that grow.

Knows: positions, blocks, the sampler. Knows nothing of which model runs the rows.

Shape letters: T rows, S sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.crossing import sent_all
from models.interface import ForwardBatch
from moeserve.continuation import Continuation
from moeserve.draw import Doubles
from moeserve.speculate.drafter import DraftAsk, choose_drafts
from moeserve.speculate.tree import DraftTree, chain
from moeserve.speculate.verify import Rule

_TENSORS = (
    "token_ids",
    "positions",
    "slot_mapping",
    "query_start",
    "context_len",
    "block_tables",
    "logits_rows",
)


@dataclass
class RoundRows:
    """Of each sequence: the number of its ask, its first position, a token for each row, its block
    ids from position 0 on, whether the logits of its last row are wanted.

    late: by place here, the sequence's number in the step's late verdicts. Its last tokens, one
    more than it has drafts there, are stand-ins (0) for what was chosen; which of its rows is the
    last one, the verdict says."""

    asks: list[int] = field(default_factory=list)
    firsts: list[int] = field(default_factory=list)
    tokens: list[Seq[int]] = field(default_factory=list)
    blocks: list[list[int]] = field(default_factory=list)
    wanted: list[bool] = field(default_factory=list)
    late: dict[int, int] = field(default_factory=dict)

    def add(
        self, ask: int, first: int, tokens: Seq[int], blocks: list[int], wanted: bool,
        late: int | None = None,
    ) -> None:  # fmt: skip
        if late is not None:
            self.late[len(self.asks)] = late
        self.asks.append(ask)
        self.firsts.append(first)
        self.tokens.append(tokens)
        self.blocks.append(blocks)
        self.wanted.append(wanted)

    @property
    def going(self) -> list[int]:
        """Asks whose logits are wanted, in the order of the logits' rows."""
        return [i for i, wanted in zip(self.asks, self.wanted, strict=True) if wanted]

    def batch(self, size: int, device: torch.device) -> ForwardBatch:
        """size: of a block. No rows make a batch of T = S = 0. Made in numpy: at batch 1 a round is
        little more than what is done on the host."""
        counts = [len(x) for x in self.tokens]
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        context: list[int] = []
        for first, count, blocks in zip(self.firsts, counts, self.blocks, strict=True):
            end = first + count
            if count == 1:
                positions.append(first)
                slots.append(blocks[first // size] * size + first % size)
            else:
                positions += range(first, end)
                slots += [blocks[p // size] * size + p % size for p in range(first, end)]
            starts.append(starts[-1] + count)
            context.append(end)
        longest = max(context, default=0)
        width = -(-longest // size)
        tables = np.full((len(counts), width), -1, np.int32)
        for row, blocks in zip(tables, self.blocks, strict=True):
            given = blocks[:width]
            row[: len(given)] = given
        last = [end - 1 for end, wanted in zip(starts[1:], self.wanted, strict=True) if wanted]

        made = ForwardBatch(
            token_ids=torch.from_numpy(np.array([t for x in self.tokens for t in x], np.int64)),
            positions=torch.from_numpy(np.array(positions, np.int64)),
            slot_mapping=torch.from_numpy(np.array(slots, np.int64)),
            query_start=torch.from_numpy(np.array(starts, np.int32)),
            context_len=torch.from_numpy(np.array(context, np.int32)),
            block_tables=torch.from_numpy(tables),
            logits_rows=torch.from_numpy(np.array(last, np.int64)),
            max_query_len=max(counts, default=0),
            max_context_len=longest,
            total_context=sum(positions) + len(positions),
        )
        return made if device.type == "cpu" else there(made, sent_all(tensors_of(made), device))


def tensors_of(batch: ForwardBatch) -> list[Tensor]:
    """Of one without trees, in the order that `there` wants."""
    return [getattr(batch, name) for name in _TENSORS]


def there(batch: ForwardBatch, tensors: Seq[Tensor]) -> ForwardBatch:
    """A batch that the host made, with its tensors as they are on a device."""
    sent: dict[str, Any] = dict(zip(_TENSORS, tensors, strict=True))
    return replace(batch, **sent, host=batch)


class Chains:
    """The drafts of a step so far, one chain an ask."""

    def __init__(self, asks: Seq[DraftAsk], rule: Rule) -> None:
        self._asks, self._rule = asks, rule
        self.tokens: list[list[int]] = [[] for _ in asks]
        self._probs: list[list[Doubles]] = [[] for _ in asks]

    def extend(self, going: Seq[int], logits: Tensor) -> list[int]:
        """logits [len(going), V], changed in place: a draft for each of these asks -> the places in
        `going` of those that draft on. Not behind a token that ends the output."""
        if not going:
            return []
        after = [Continuation(self._asks[i].sequence, tuple(self.tokens[i])) for i in going]
        found, dists = choose_drafts(logits, after, self._rule)
        keep = []
        for place, (i, token, q) in enumerate(zip(going, found, dists, strict=True)):
            if token is None:
                continue
            self.tokens[i].append(token)
            if q is not None:
                self._probs[i].append(q)
            ask = self._asks[i]
            if len(self.tokens[i]) < ask.most and token not in ask.sequence.stop_ids:
                keep.append(place)
        return keep

    def trees(self) -> list[DraftTree]:
        return [chain(t, q or None) for t, q in zip(self.tokens, self._probs, strict=True)]
