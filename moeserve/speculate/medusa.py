"""Medusa heads (Cai et al. 2024): each guesses one token further on, all from one hidden state.

Head i: a few residual blocks x + silu(W x + b) over the target's last hidden state, then a
projection to the vocabulary; it predicts the token i + 2 places after the state's own, where the
target's head predicts the next. No KV, one round, not collective. Published names, with or without
"medusa_head." in front: `{i}.{l}.linear.weight`, `{i}.{l}.linear.bias`, `{i}.{L}.weight`; without
the last where config.json says `original_lm_head`: all heads share the target's projection then.

On a GPU the drafts of all heads are chosen there: the host waits for all of them together.

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

from models.crossing import brought, sent
from moeserve.continuation import Continuation
from moeserve.draw import Doubles
from moeserve.sequence import Sequence
from moeserve.speculate.chains_ahead import ChainsAhead
from moeserve.speculate.drafter import DraftAsk, choose_drafts
from moeserve.speculate.head_file import HeadFile
from moeserve.speculate.late import Late, LateDrafts, LateEnds
from moeserve.speculate.likeliest import likeliest
from moeserve.speculate.one_thread import one_thread
from moeserve.speculate.rounds_ahead import Pick, Picker
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

    def to(self, device: torch.device) -> MedusaHead:
        blocks = tuple((weight.to(device), bias.to(device)) for weight, bias in self.blocks)
        return MedusaHead(blocks, None if self.out is None else self.out.to(device))

    def logits(self, hidden: Tensor, logits_of: Logits | None = None) -> Tensor:
        """hidden [A, D] -> [A, V] fp32. logits_of: the target's, for heads that share it."""
        x = hidden if not self.tensors else hidden.to(self.tensors[0].dtype)
        for weight, bias in self.blocks:
            x = x + torch.nn.functional.silu(torch.nn.functional.linear(x, weight, bias))
        if self.out is not None:
            return torch.nn.functional.linear(x, self.out).float()
        assert logits_of is not None, "heads without a projection want the target's"
        return logits_of(x)


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
    """hidden [A, D] -> [H, A, V] fp32: `MedusaHead.logits` of each."""
    return torch.stack([head.logits(hidden, logits_of) for head in heads])


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
    logits_of: see `MedusaHead.logits`."""

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
        device: torch.device | None = None,
        pick: Pick | None = None,
    ) -> None:
        """device: where hidden states are, None: CPU. pick: see `Picker`."""
        device = torch.device("cpu") if device is None else device
        self._heads, self._rule, self._width = tuple(h.to(device) for h in heads), rule, width
        self._logits_of, self._device = logits_of, device
        self._picker = Picker(rule, device, pick)
        self.max_depth = len(self._heads)
        self.max_nodes = max_nodes or self.max_depth

    @torch.inference_mode()
    def propose(
        self, asks: Seq[DraftAsk], depth: int, max_tokens: int | None = None
    ) -> list[DraftTree]:
        """See Drafter. The last row of each ask's hidden states is all that counts."""
        depth, able = min(depth, self.max_depth), _able(asks)
        if not able or depth <= 0:
            return [DraftTree()] * len(asks)
        with one_thread():
            if self.max_nodes > self.max_depth:
                drafts = self._trees(asks, able, depth)
                return drafts.told(brought(drafts.tensors), ())
            pick = self._picker.takes(asks)
            if pick is not None:
                chains = self._chains_ahead(asks, able, depth, pick)
                return chains.trees(brought(chains.tensors))
            return self._chains(asks, able, depth)

    def drafts_late(self, sequences: Seq[Sequence]) -> bool:
        """See `Picker.takes_late`."""
        return self._picker.takes_late(sequences, self.max_nodes > self.max_depth)

    @torch.inference_mode()
    def ask_late(self, asks: Seq[DraftAsk], depth: int, late: Late) -> LateDrafts:
        """`propose`, of asks whose tokens only the device knows."""
        depth, able, pick = min(depth, self.max_depth), _able(asks), self._picker.pick
        if not able:
            return LateDrafts([], lambda *_: [DraftTree()] * len(asks))
        assert pick is not None and depth > 0
        if self.max_nodes > self.max_depth:
            return self._trees(asks, able, depth, late)
        chains = self._chains_ahead(asks, able, depth, pick, late)
        return LateDrafts(chains.tensors, lambda host, _: chains.trees(host))

    def _trees(
        self, asks: Seq[DraftAsk], able: Seq[int], depth: int, late: Late | None = None
    ) -> LateDrafts:
        """Their best tokens are chosen where they are, and brought over once."""
        ends = LateEnds([asks[i] for i in able], late, self._device)
        rows = ends.last_rows(_hidden(asks, able))
        best: list[Tensor] = []
        for head in self._heads[:depth]:
            chances = torch.softmax(head.logits(rows, self._logits_of), dim=-1)
            best += likeliest(chances, self._width)

        def told(host: Seq[Tensor], _: Seq[int]) -> list[DraftTree]:
            listed = [x.tolist() for x in host]
            values, ids = listed[::2], listed[1::2]
            trees = [DraftTree()] * len(asks)
            for row, i in enumerate(able):
                tops = [list(zip(ids[d][row], values[d][row], strict=True)) for d in range(depth)]
                trees[i] = product_tree(tops, min(asks[i].most, self.max_nodes))
            return trees

        return LateDrafts(best, told)

    def _chains_ahead(
        self,
        asks: Seq[DraftAsk],
        able: Seq[int],
        depth: int,
        pick: Pick,
        late: Late | None = None,
    ) -> ChainsAhead:
        """No head's choice is waited for."""
        chains = ChainsAhead(asks, able, depth, self._device, pick, late)
        rows = chains.ends.last_rows(_hidden(asks, chains.order))
        for head, k in zip(self._heads, chains.counts, strict=False):
            if k:
                chains.choose(head.logits(rows[:k], self._logits_of))
        return chains

    def _chains(self, asks: Seq[DraftAsk], able: Seq[int], depth: int) -> list[DraftTree]:
        """The host chooses, depth by depth."""
        logits = medusa_logits(self._heads[:depth], _last_rows(asks, able), self._logits_of)
        tokens: dict[int, list[int]] = {i: [] for i in able}
        probs: dict[int, list[Doubles]] = {i: [] for i in able}
        for d in range(depth):
            going = [r for r, i in enumerate(able) if len(tokens[i]) == d and d < asks[i].most]
            if not going:
                break
            after = [Continuation(asks[i].sequence, tuple(tokens[i])) for i in _of(able, going)]
            rows = sent(torch.tensor(going), self._device)
            found, dists = choose_drafts(logits[d].index_select(0, rows), after, self._rule)
            for i, token, q in zip(_of(able, going), found, dists, strict=True):
                if token is not None:
                    tokens[i].append(token)
                    if q is not None:
                        probs[i].append(q)
        trees = [DraftTree()] * len(asks)
        for i in able:
            trees[i] = chain(tokens[i], probs[i] or None)
        return trees

    def settle(self, sequence: Sequence, num_accepted: int, num_rejected: int) -> None:
        """Nothing is remembered."""

    def forget(self, request_ids: Collection[str]) -> None:
        """Nothing is remembered."""

    def memory_bytes(self) -> int:
        return sum(x.nbytes for head in self._heads for x in head.tensors)


def _able(asks: Seq[DraftAsk]) -> list[int]:
    return [i for i, a in enumerate(asks) if a.most > 0 and a.hidden is not None and len(a.hidden)]


def _hidden(asks: Seq[DraftAsk], of: Seq[int]) -> list[Tensor]:
    return [hidden for i in of if (hidden := asks[i].hidden) is not None]


def _last_rows(asks: Seq[DraftAsk], of: Seq[int]) -> Tensor:
    """[A, D] of these asks."""
    return torch.stack([hidden[-1] for hidden in _hidden(asks, of)])


def _of(able: Seq[int], places: Seq[int]) -> list[int]:
    return [able[place] for place in places]
