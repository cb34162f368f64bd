"""Medusa heads (Cai et al. 2024): each guesses one token further on, all from one hidden state.

Head i: a few residual blocks x + silu(W x + b) over the target's last hidden state, then a
projection to the vocabulary; it predicts the token i + 2 places after the state's own, where the
target's head predicts the next. No KV, one round, not collective. Published names, with or without
"medusa_head." in front: `{i}.{l}.linear.weight`, `{i}.{l}.linear.bias`, `{i}.{L}.weight`; without
the last where config.json says `original_lm_head`: all heads share the target's projection then.

Knows: heads, hidden states. Knows nothing of the target's layers.

Shape letters: H heads, L blocks a head, A rows, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moeserve.continuation import Continuation
from moeserve.draw import Doubles
from moeserve.sequence import Sequence
from moeserve.speculate.drafter import DraftAsk, choose_drafts
from moeserve.speculate.head_file import HeadFile
from moeserve.speculate.one_thread import one_thread
from moeserve.speculate.tree import DraftTree, chain, product_tree
from moeserve.speculate.verify import Rule

PREFIXES = ("medusa_head.",)
Logits = Callable[[Tensor], Tensor]  # [m, D] -> [m, V] fp32


@dataclass(frozen=True)
class MedusaHead:
    """blocks: L of (weight [D, D], bias [D]); out [V, D], None: the target's."""

    blocks: tuple[tuple[Tensor, Tensor], ...]
    out: Tensor | None

    @property
    def tensors(self) -> list[Tensor]:
        found = [x for pair in self.blocks for x in pair]
        return found if self.out is None else [*found, self.out]


def load_medusa(file: HeadFile, hidden_size: int, vocab_size: int) -> tuple[MedusaHead, ...]:
    """ConfigError if names or shapes are not those of heads for such a target."""
    file.refuse_if_other("medusa")
    num = file.count("medusa_num_heads")
    layers = file.count("medusa_num_layers", 1)
    shared = file.config.get("original_lm_head") is True
    heads = []
    for i in range(num):
        blocks = tuple(
            (
                file.take(f"{i}.{n}.linear.weight", hidden_size, hidden_size),
                file.take(f"{i}.{n}.linear.bias", hidden_size),
            )
            for n in range(layers)
        )
        out = None if shared else file.take(f"{i}.{layers}.weight", vocab_size, hidden_size)
        heads.append(MedusaHead(blocks, out))
    file.done()
    return tuple(heads)


def read_medusa(folder: str | Path, hidden_size: int, vocab_size: int) -> tuple[MedusaHead, ...]:
    return load_medusa(HeadFile.read(folder, PREFIXES), hidden_size, vocab_size)


def medusa_logits(
    heads: Seq[MedusaHead], hidden: Tensor, logits_of: Logits | None = None
) -> Tensor:
    """hidden [A, D] -> [H, A, V] fp32. logits_of: the target's, for heads that share it."""
    out = []
    for head in heads:
        x = hidden.to(head.tensors[0].dtype) if head.tensors else hidden
        for weight, bias in head.blocks:
            x = x + torch.nn.functional.silu(torch.nn.functional.linear(x, weight, bias))
        if head.out is not None:
            out.append(torch.nn.functional.linear(x, head.out).float())
        else:
            assert logits_of is not None, "heads without a projection want the target's"
            out.append(logits_of(x))
    return torch.stack(out)


def medusa_logits_slowly(heads: Seq[MedusaHead], hidden: Tensor) -> Tensor:
    """The twin: one row and one output at a time, in fp32; of heads with projections."""
    outs = [head.out for head in heads if head.out is not None]
    out = torch.zeros(len(heads), hidden.shape[0], outs[0].shape[0])
    for i, head in enumerate(heads):
        for a in range(hidden.shape[0]):
            x = hidden[a].float()
            for weight, bias in head.blocks:
                y = torch.stack([(row.float() * x).sum() for row in weight]) + bias.float()
                x = x + y / (1 + torch.exp(-y))
            out[i, a] = torch.stack([(row.float() * x).sum() for row in outs[i]])
    return out


class MedusaDrafter:
    """max_nodes above the number of heads: trees of the best products, `width` tokens a depth.
    logits_of: see `medusa_logits`."""

    name = "medusa"
    collective = False
    wants_hidden = True
    runs_ahead = False

    def __init__(
        self,
        heads: Seq[MedusaHead],
        max_nodes: int | None = None,
        rule: Rule = Rule.SAME,
        width: int = 8,
        logits_of: Logits | None = None,
    ) -> None:
        self._heads, self._rule, self._width = tuple(heads), rule, width
        self._logits_of = logits_of
        self.max_depth = len(self._heads)
        self.max_nodes = max_nodes or self.max_depth

    @torch.inference_mode()
    def propose(
        self, asks: Seq[DraftAsk], depth: int, max_tokens: int | None = None
    ) -> list[DraftTree]:
        """See Drafter. The last row of each ask's hidden states is all that counts."""
        trees = [DraftTree()] * len(asks)
        depth = min(depth, self.max_depth)
        able = [
            i for i, a in enumerate(asks) if a.most > 0 and a.hidden is not None and len(a.hidden)
        ]
        if not able or depth <= 0:
            return trees
        rows = torch.stack([hidden[-1] for i in able if (hidden := asks[i].hidden) is not None])
        with one_thread():
            logits = medusa_logits(self._heads[:depth], rows, self._logits_of)
        if self.max_nodes > self.max_depth:
            best = torch.softmax(logits, dim=-1).topk(min(self._width, logits.shape[-1]), dim=-1)
            values, ids = best.values.tolist(), best.indices.tolist()
            for row, i in enumerate(able):
                tops = [list(zip(ids[d][row], values[d][row], strict=True)) for d in range(depth)]
                trees[i] = product_tree(tops, min(asks[i].most, self.max_nodes))
            return trees
        tokens: list[list[int]] = [[] for _ in able]
        probs: list[list[Doubles]] = [[] for _ in able]
        for d in range(depth):
            going = [r for r, i in enumerate(able) if len(tokens[r]) == d and d < asks[i].most]
            if not going:
                break
            after = [Continuation(asks[able[r]].sequence, tuple(tokens[r])) for r in going]
            found, dists = choose_drafts(logits[d][going], after, self._rule)
            for r, token, q in zip(going, found, dists, strict=True):
                if token is not None:
                    tokens[r].append(token)
                    if q is not None:
                        probs[r].append(q)
        for r, i in enumerate(able):
            trees[i] = chain(tokens[r], probs[r] or None)
        return trees

    def settle(self, sequence: Sequence, num_accepted: int, num_rejected: int) -> None:
        """Nothing is remembered."""

    def forget(self, request_ids: Collection[str]) -> None:
        """Nothing is remembered."""

    def memory_bytes(self) -> int:
        return sum(x.nbytes for head in self._heads for x in head.tensors)
