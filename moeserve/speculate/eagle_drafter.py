"""EagleDrafter: chains or bounded trees from an EAGLE head, with keys and values by request.

Chains follow what the sampler would choose (`drafter.choose_drafts`). Trees (max_nodes above
max_depth) are grown level by level: each of the `width` likeliest nodes of a level gets its `width`
likeliest tokens; of all that were seen the max_nodes likeliest paths are drafted.

All sequences of a step go through the head together, but for the levels of trees.

What it holds of a sequence are rows of accepted tokens alone: those of drafts are dropped at once.
Rows before a prefix-cache hit or a pause are not there; the head then attends to what it has.

Knows: the head, the target's embedding and head, handed in. Not collective.

Shape letters: m rows, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moeserve.continuation import Continuation
from moeserve.draw import Doubles
from moeserve.sequence import Sequence
from moeserve.speculate.drafter import DraftAsk, choose_drafts
from moeserve.speculate.eagle import EagleHead, Past, eagle_forward_many
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


@dataclass
class _Rows:
    """Of one run of the head: of several sequences, one behind another."""

    tokens: list[int] = field(default_factory=list)  # the one after each row
    hidden: list[Tensor] = field(default_factory=list)  # [m, D] of each sequence
    positions: list[int] = field(default_factory=list)
    pasts: list[Seq[Past]] = field(default_factory=list)
    masks: list[Tensor] = field(default_factory=list)  # [m, P + m] of each sequence

    def add(
        self,
        tokens: Seq[int],
        hidden: Tensor,
        positions: Seq[int],
        past: Seq[Past],
        mask: Tensor,
    ) -> None:
        self.tokens += tokens
        self.hidden.append(hidden)
        self.positions += positions
        self.pasts.append(past)
        self.masks.append(mask)


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
            depth = min(depth, self.max_depth)
            features = self._keep_up(asks)
            if self.max_nodes <= self.max_depth:
                return self._chains(asks, features, depth)
            return [
                DraftTree()
                if feature is None or depth <= 0 or ask.most <= 0
                else best_nodes(self._grow(ask, feature, depth), min(ask.most, self.max_nodes))
                for ask, feature in zip(asks, features, strict=True)
            ]

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

    def _keep_up(self, asks: Seq[DraftAsk]) -> list[Tensor | None]:
        """Put the new rows behind what is known -> the last one's feature [1, D] of each."""
        rows = _Rows()
        places: list[int] = []
        for i, ask in enumerate(asks):
            if ask.hidden is None or not len(ask.hidden):
                continue
            sequence, first, m = ask.sequence, ask.first, len(ask.hidden)
            known = self._known.get(sequence.request_id)
            if known is None or not known.start <= first <= known.end:
                known = self._known[sequence.request_id] = _Known(first, self._head.no_past())
            known.rewind(first)
            past, own = first - known.start, torch.arange(m)
            mask = torch.arange(past + m) <= past + own[:, None]
            tokens = sequence.tokens[first + 1 : first + m + 1]
            rows.add(tokens, ask.hidden, range(first, first + m), known.past, mask)
            places.append(i)
        found: list[Tensor | None] = [None] * len(asks)
        if places:
            features, pasts = self._forward(rows)
            for i, feature, past_of in zip(places, features, pasts, strict=True):
                self._known[asks[i].sequence.request_id].past = past_of
                found[i] = feature[-1:]
        return found

    def _forward(self, rows: _Rows) -> tuple[list[Tensor], list[list[Past]]]:
        """-> each sequence's features [m, D], and its keys and values with these rows."""
        device = self._embed.device
        embedded = self._embed[torch.tensor(rows.tokens, device=device)]
        positions = torch.tensor(rows.positions, device=device)
        masks = [mask.to(device) for mask in rows.masks]
        hidden = torch.cat(rows.hidden)
        features, pasts = eagle_forward_many(
            self._head, embedded, hidden, positions, rows.pasts, masks
        )
        return list(torch.split(features, [len(mask) for mask in masks])), pasts

    def _chains(
        self, asks: Seq[DraftAsk], features: Seq[Tensor | None], depth: int
    ) -> list[DraftTree]:
        """A round a draft, with a row of each sequence that goes on."""
        tokens: list[list[int]] = [[] for _ in asks]
        probs: list[list[Doubles]] = [[] for _ in asks]
        going = [i for i, ask in enumerate(asks) if features[i] is not None and ask.most > 0]
        known = [self._known.get(ask.sequence.request_id) for ask in asks]
        pasts = {i: k.past for i in going if (k := known[i]) is not None}
        last = {i: feature for i in going if (feature := features[i]) is not None}
        for d in range(depth):
            going = [i for i in going if len(tokens[i]) == d and d < asks[i].most]
            if not going:
                break
            after = [Continuation(asks[i].sequence, tuple(tokens[i])) for i in going]
            logits = self._logits_of(torch.cat([last[i] for i in going]))
            found, dists = choose_drafts(logits, after, self._rule)
            for i, token, q in zip(going, found, dists, strict=True):
                if token is not None:
                    tokens[i].append(token)
                    if q is not None:
                        probs[i].append(q)
            going = [i for i in going if len(tokens[i]) == d + 1 < min(depth, asks[i].most)]
            rows = _Rows()
            for i in going:
                before = known[i]
                assert before is not None
                mask = torch.ones(1, before.end + d + 1 - before.start, dtype=torch.bool)
                rows.add(tokens[i][-1:], last[i], [before.end + d], pasts[i], mask)
            if going:
                made, grown = self._forward(rows)
                last.update(zip(going, made, strict=True))
                pasts.update(zip(going, grown, strict=True))
        return [chain(t, p or None) for t, p in zip(tokens, probs, strict=True)]

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
            positions = [known.end + d] * len(chosen)
            tokens = [found[number].token for number in frontier]
            rows = _Rows()
            rows.add(tokens, hidden, positions, past, mask)
            (feature,), (past,) = self._forward(rows)
        return found
