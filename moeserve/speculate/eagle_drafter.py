"""EagleDrafter: chains or bounded trees from an EAGLE head, with keys and values by request.

Chains follow what the sampler would choose (`drafter.choose_drafts`). Trees (max_nodes above
max_depth) are grown level by level: each of the `width` likeliest nodes of a level gets its `width`
likeliest tokens; of all that were seen the max_nodes likeliest paths are drafted.

What it holds of a sequence are rows of accepted tokens alone: those of drafts are dropped at once.
Rows before a prefix-cache hit or a pause are not there; the head then attends to what it has.

Knows: the head, the target's embedding and head, handed in. Not collective.

Shape letters: m rows, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.continuation import Continuation
from moeserve.draw import Doubles
from moeserve.sequence import Sequence
from moeserve.speculate.drafter import DraftAsk, choose_drafts
from moeserve.speculate.eagle import EagleHead, Past, eagle_forward
from moeserve.speculate.one_thread import one_thread
from moeserve.speculate.tree import Candidate, DraftTree, best_nodes, chain
from moeserve.speculate.verify import Rule


@dataclass
class _Known:
    """Rows of the positions start .. end - 1."""

    start: int
    past: list[Past]

    @property
    def end(self) -> int:
        return self.start + len(self.past[0][0])

    def rewind(self, end: int) -> None:
        keep = max(end - self.start, 0)
        self.past = [(k[:keep], v[:keep]) for k, v in self.past]


class EagleDrafter:
    """embed [V, D]: the target's, for heads without one of their own; logits_of: the target's head,
    features [m, D] -> logits [m, V] fp32."""

    name = "eagle"
    collective = False
    wants_hidden = True
    runs_ahead = False

    def __init__(
        self,
        head: EagleHead,
        embed: Tensor,
        logits_of: Callable[[Tensor], Tensor],
        max_depth: int = 5,
        max_nodes: int | None = None,
        width: int = 4,
        rule: Rule = Rule.SAME,
    ) -> None:
        self._head, self._rule, self._width = head, rule, width
        self._embed = embed if head.embed is None else head.embed
        self._logits_of = logits_of
        self.max_depth, self.max_nodes = max_depth, max_nodes or max_depth
        self._known: dict[str, _Known] = {}

    @torch.inference_mode()
    def propose(
        self, asks: Seq[DraftAsk], depth: int, max_tokens: int | None = None
    ) -> list[DraftTree]:
        """See Drafter."""
        with one_thread():
            return [self._one(ask, min(depth, self.max_depth)) for ask in asks]

    def settle(self, sequence: Sequence, num_accepted: int, num_rejected: int) -> None:
        known = self._known.get(sequence.request_id)
        if known is not None:
            known.rewind(sequence.num_tokens - 1)

    def forget(self, request_ids: Collection[str]) -> None:
        for request_id in request_ids:
            self._known.pop(request_id, None)

    def memory_bytes(self) -> int:
        kept = [x for known in self._known.values() for pair in known.past for x in pair]
        return self._head.nbytes + sum(x.nbytes for x in kept)

    # -- parts ---------------------------------------------------------------------------------

    def _one(self, ask: DraftAsk, depth: int) -> DraftTree:
        feature = self._keep_up(ask)
        if feature is None or depth <= 0 or ask.most <= 0:
            return DraftTree()
        if self.max_nodes <= self.max_depth:
            return self._chain(ask, feature, min(depth, ask.most))
        return best_nodes(self._grow(ask, feature, depth), min(ask.most, self.max_nodes))

    def _keep_up(self, ask: DraftAsk) -> Tensor | None:
        """Put the new rows behind what is known -> the last one's feature [1, D]."""
        if ask.hidden is None or not len(ask.hidden):
            return None
        sequence, first = ask.sequence, ask.first
        known = self._known.get(sequence.request_id)
        if known is None or not known.start <= first <= known.end:
            known = self._known[sequence.request_id] = _Known(first, self._head.no_past())
        known.rewind(first)
        m = len(ask.hidden)
        past, rows = first - known.start, torch.arange(m)
        mask = torch.arange(past + m) <= past + rows[:, None]
        tokens = sequence.tokens[first + 1 : first + m + 1]
        features, known.past = self._forward(tokens, ask.hidden, first + rows, known.past, mask)
        return features[-1:]

    def _forward(
        self, tokens: Seq[int], hidden: Tensor, positions: Tensor, past: Seq[Past], mask: Tensor
    ) -> tuple[Tensor, list[Past]]:
        device = self._embed.device
        embedded = self._embed[torch.tensor(list(tokens), device=device)]
        return eagle_forward(
            self._head, embedded, hidden, positions.to(device), past, mask.to(device)
        )

    def _chain(self, ask: DraftAsk, feature: Tensor, depth: int) -> DraftTree:
        known = self._known[ask.sequence.request_id]
        past, end = known.past, known.end
        tokens: list[int] = []
        probs: list[Doubles] = []
        for d in range(depth):
            after = Continuation(ask.sequence, tuple(tokens))
            found, dists = choose_drafts(self._logits_of(feature), [after], self._rule)
            if found[0] is None:
                break
            tokens.append(found[0])
            if dists[0] is not None:
                probs.append(dists[0])
            if d + 1 < depth:
                mask = torch.ones(1, end + d + 1 - known.start, dtype=torch.bool)
                at = torch.tensor([end + d])
                feature, past = self._forward(tokens[-1:], feature, at, past, mask)
        return chain(tokens, probs or None)

    def _grow(self, ask: DraftAsk, feature: Tensor, depth: int) -> list[Candidate]:
        known = self._known[ask.sequence.request_id]
        past, base = known.past, known.end - known.start
        found: list[Candidate] = []
        reach: list[float] = []
        column: dict[int, int] = {}  # of a candidate that went through the head
        frontier: list[int] = [-1]
        for d in range(depth):
            best = torch.softmax(self._logits_of(feature), dim=-1).topk(self._width, dim=-1)
            level: list[tuple[float, int, int]] = []
            for row, parent in enumerate(frontier):
                above = reach[parent] if parent >= 0 else 1.0
                pairs = zip(best.indices[row].tolist(), best.values[row].tolist(), strict=True)
                for token, chance in pairs:
                    found.append(Candidate(token, parent, chance))
                    reach.append(above * chance)
                    level.append((-reach[-1], len(found) - 1, row))
            if d + 1 == depth:
                break
            chosen = sorted(level)[: self._width]
            frontier = [number for _, number, _ in chosen]
            mask = torch.zeros(len(chosen), len(past[0][0]) + len(chosen), dtype=torch.bool)
            mask[:, :base] = True
            for row, number in enumerate(frontier):
                column[number] = len(past[0][0]) + row
                at = number
                while at >= 0:
                    mask[row, column[at]] = True
                    at = found[at].parent
            hidden = feature[[row for _, _, row in chosen]]
            positions = torch.full((len(chosen),), known.end + d)
            tokens = [found[number].token for number in frontier]
            feature, past = self._forward(tokens, hidden, positions, past, mask)
        return found
