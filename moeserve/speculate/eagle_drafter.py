"""EagleDrafter: chains or bounded trees from an EAGLE head, with keys and values by request.

Chains follow what the sampler would choose (`drafter.choose_drafts`). Trees (max_nodes above
max_depth) are grown level by level: each of the `width` likeliest nodes of a level gets its `width`
likeliest tokens; of all that were seen the max_nodes likeliest paths are drafted.

All sequences of a step go through the head together, but for the levels of trees on CPUs. On a GPU
tokens are chosen there, trees grown there (`trees_ahead`), pasts padded (`eagle_padded`): the host
waits for all of it together.

What it holds of a sequence are rows of accepted tokens alone: those of drafts are dropped at once.
Rows before a prefix-cache hit or a pause are not there; the head then attends to what it has.

Knows: the head, the target's embedding and head, handed in. Not collective.

Shape letters: m rows, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from models.crossing import brought, sent_all
from moeserve.continuation import Continuation
from moeserve.draw import Doubles
from moeserve.sequence import Sequence
from moeserve.speculate.chains_ahead import ChainsAhead
from moeserve.speculate.drafter import DraftAsk, choose_drafts
from moeserve.speculate.eagle import EagleHead, Past, eagle_forward_many
from moeserve.speculate.eagle_padded import PaddedLevels, PaddedPasts
from moeserve.speculate.eagle_rows import Kept, Known, Rows
from moeserve.speculate.late import Late, LateDrafts, LateEnds
from moeserve.speculate.likeliest import likeliest
from moeserve.speculate.one_thread import one_thread
from moeserve.speculate.rounds_ahead import Pick, Picker
from moeserve.speculate.tree import Candidate, DraftTree, best_nodes, chain
from moeserve.speculate.trees_ahead import TreesAhead, told_trees
from moeserve.speculate.verify import Rule


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
        pick: Pick | None = None,
    ) -> None:
        """pick: see `Picker`; where there is one, trees too are grown where the embedding is."""
        self._device = device = embed.device
        self._head, self._rule, self._width = head.to(device), rule, width
        self._embed = embed if self._head.embed is None else self._head.embed
        self._picker = Picker(rule, device, pick)
        self._logits_of = logits_of
        self.max_depth, self.max_nodes = max_depth, max_nodes or max_depth
        self._known: dict[str, Known] = {}

    @torch.inference_mode()
    def propose(
        self, asks: Seq[DraftAsk], depth: int, max_tokens: int | None = None
    ) -> list[DraftTree]:
        """See Drafter."""
        with one_thread():
            depth = min(depth, self.max_depth)
            kept = self._keep_up(asks, depth)
            able = kept.able(asks)
            if not able or depth <= 0:
                return [DraftTree()] * len(asks)
            if self.max_nodes > self.max_depth:
                if self._picker.pick is not None:
                    grown = self._trees_ahead(asks, able, kept, depth)
                    return grown.told(brought(grown.tensors), ())
                return self._trees(asks, able, kept, depth)
            pick = self._picker.takes(asks)
            if pick is not None:
                chains = self._chains_ahead(asks, able, kept, depth, pick)
                return chains.trees(brought(chains.tensors))
            return self._chains(asks, able, kept, depth)

    def drafts_late(self, sequences: Seq[Sequence]) -> bool:
        """See `Picker.takes_late`."""
        return self._picker.takes_late(sequences, self.max_nodes > self.max_depth)

    @torch.inference_mode()
    def ask_late(self, asks: Seq[DraftAsk], depth: int, late: Late) -> LateDrafts:
        """`propose`, of asks whose tokens only the device knows: the rows of all drafts of the step
        go through the head, of trees those of the path that was walked; rejected ones are dropped
        once the host knows."""
        depth, pick = min(depth, self.max_depth), self._picker.pick
        assert pick is not None and depth > 0
        drafts = LateDrafts([], lambda *_: [DraftTree()] * len(asks))
        with one_thread():
            kept = self._keep_up(asks, depth, late)
            able = kept.able(asks)
            if able and self.max_nodes > self.max_depth:
                drafts = self._trees_ahead(asks, able, kept, depth, late)
            elif able:
                chains = self._chains_ahead(asks, able, kept, depth, pick, late)
                drafts = LateDrafts(chains.tensors, lambda host, _: chains.trees(host))

        def told(host: Seq[Tensor], accepted: Seq[int]) -> list[DraftTree]:
            for ask in asks:
                known = self._known.get(ask.sequence.request_id)
                if known is not None and ask.late is not None:
                    known.rewind(known.end - late.drafts[ask.late] + accepted[ask.late])
            return drafts.told(host, accepted)

        return LateDrafts(drafts.tensors, told)

    def settle(self, sequence: Sequence, num_accepted: int, num_rejected: int) -> None:
        known = self._known.get(sequence.request_id)
        if known is not None:
            known.rewind(sequence.num_tokens - 1)

    def forget(self, request_ids: Collection[str]) -> None:
        for request_id in request_ids:
            self._known.pop(request_id, None)

    def memory_bytes(self) -> int:
        kept = [x for known in self._known.values() for pair in known.past for x in pair]
        memory = [x.untyped_storage() for x in kept]  # padding included; several may share one
        return self._head.nbytes + sum({x.data_ptr(): x.nbytes() for x in memory}.values())

    # -- parts ---------------------------------------------------------------------------------

    def _keep_up(self, asks: Seq[DraftAsk], depth: int, late: Late | None = None) -> Kept:
        """Put the new rows behind what is known. depth: of what is drafted behind them."""
        rows, kept = Rows(), Kept([None] * len(asks))
        on_device, nothing = self._picker.pick is not None, self._head.no_past()
        places: list[int] = []
        for i, ask in enumerate(asks):
            if ask.hidden is None or not len(ask.hidden):
                continue
            sequence, first, m = ask.sequence, ask.first, len(ask.hidden)
            known = self._known.get(sequence.request_id)
            if known is None or not known.start <= first <= known.end:
                known = self._known[sequence.request_id] = Known(first, list(nothing))
            known.rewind(first)
            mask: Tensor | None = None
            if not on_device:
                past, own = first - known.start, torch.arange(m)
                mask = torch.arange(past + m) <= past + own[:, None]
            tokens = sequence.tokens[first + 1 : first + m + 1]
            if ask.late is not None:
                assert late is not None
                num, chosen = late.drafts[ask.late] + 1, late.firsts[ask.late]
                end = len(rows.tokens) + m
                rows.late_into += range(end - num, end)
                rows.late_from += range(chosen, chosen + num)
                tokens += [0] * num
            assert len(tokens) == m, "the token after a row is not known"
            rows.add(tokens, ask.hidden, range(first, first + m), known.past, mask)
            known.past = list(nothing)  # what fails now leaves nothing that is half known
            places.append(i)
        if not places:
            return kept
        counts = [len(hidden) for hidden in rows.hidden]
        if on_device:
            room = max(depth - 1, 0) * (self._width if self.max_nodes > self.max_depth else 1)
            kept.padded = PaddedPasts(self._head, rows.pasts, counts, room, self._device)
            features = list(torch.split(kept.padded.first(*self._there(rows, late)), counts))
            pasts = kept.padded.grown()
        else:
            features, pasts = self._forward(rows)
        for number, (i, feature, past_of) in enumerate(zip(places, features, pasts, strict=True)):
            self._known[asks[i].sequence.request_id].past = past_of
            place = asks[i].late
            drafts = late.drafts[place] if late is not None and place is not None else 0
            kept.features[i], kept.numbers[i] = feature[-1 - drafts :], number
        return kept

    def _there(self, rows: Rows, late: Late | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """-> of the rows, on the device: the next tokens' embeddings, hidden states, positions."""
        known = (rows.tokens, rows.positions, rows.late_into, rows.late_from)
        host = [torch.tensor(x, dtype=torch.int64) for x in known]
        tokens, positions, into, out_of = sent_all(host, self._device)
        if late is not None:
            tokens = tokens.index_copy(0, into, late.tokens.index_select(0, out_of))
        return self._embed[tokens], torch.cat(rows.hidden), positions

    def _forward(self, rows: Rows) -> tuple[list[Tensor], list[list[Past]]]:
        """-> each sequence's features [m, D], and its keys and values with these rows."""
        features, grown = eagle_forward_many(self._head, *self._there(rows), rows.pasts, rows.masks)
        return list(torch.split(features, [len(mask) for mask in rows.masks])), grown

    # -- chosen on the device ------------------------------------------------------------------

    def _chains_ahead(
        self,
        asks: Seq[DraftAsk],
        able: Seq[int],
        kept: Kept,
        depth: int,
        pick: Pick,
        late: Late | None = None,
    ) -> ChainsAhead:
        """A round a draft, of as many rows as may draft there."""
        chains = ChainsAhead(asks, able, depth, self._device, pick, late)
        levels, positions = self._begin(asks, chains.order, kept, chains.ends)
        last = chains.ends.last_rows(kept.of(chains.order))
        seen = torch.ones(1, 1, depth, dtype=torch.bool, device=self._device)
        counts = [k for k in chains.counts if k]
        for d, k in enumerate(counts):
            tokens = chains.choose(self._logits_of(last[:k]))
            if d + 1 == len(counts):
                break
            k = counts[d + 1]
            above = seen[:, :, : d + 1].expand(k, -1, -1)
            last = levels.run(self._embed[tokens[:k]], last[:k], positions[:k] + d, above)
        return chains

    def _trees_ahead(
        self,
        asks: Seq[DraftAsk],
        able: Seq[int],
        kept: Kept,
        depth: int,
        late: Late | None = None,
    ) -> LateDrafts:
        """A level of all trees at once."""
        ends = LateEnds([asks[i] for i in able], late, self._device)
        levels, begins = self._begin(asks, able, kept, ends)
        rows = ends.last_rows(kept.of(able))
        trees = TreesAhead(len(able), self._width, self._device)
        trees.add(self._logits_of(rows))
        for d in range(depth - 1):
            level = trees.frontier()
            positions = (begins + d).repeat_interleave(level.ancestors.shape[1])
            hidden = rows.index_select(0, level.parents)
            rows = levels.run(self._embed[level.tokens], hidden, positions, level.ancestors)
            trees.add(self._logits_of(rows))
        most = [min(asks[i].most, self.max_nodes) for i in able]

        def told(host: Seq[Tensor], _: Seq[int]) -> list[DraftTree]:
            found = [DraftTree()] * len(asks)
            for i, tree in zip(able, told_trees(host, most), strict=True):
                found[i] = tree
            return found

        return LateDrafts(trees.tensors(max(most)), told)

    def _begin(
        self, asks: Seq[DraftAsk], order: Seq[int], kept: Kept, ends: LateEnds
    ) -> tuple[PaddedLevels, Tensor]:
        """Of these asks: runs of drafts, the position of the first one's row [S]."""
        assert kept.padded is not None
        known = [self._known[asks[i].sequence.request_id] for i in order]
        host = [torch.tensor([k.start for k in known]), torch.tensor([k.end for k in known])]
        starts, positions = sent_all(host, self._device)
        positions = positions - ends.rejected
        return kept.padded.levels([kept.numbers[i] for i in order], positions - starts), positions

    # -- chosen on the host --------------------------------------------------------------------

    def _chains(
        self, asks: Seq[DraftAsk], able: Seq[int], kept: Kept, depth: int
    ) -> list[DraftTree]:
        """A round a draft, with a row of each sequence that goes on."""
        tokens: list[list[int]] = [[] for _ in asks]
        probs: list[list[Doubles]] = [[] for _ in asks]
        going = list(able)
        known = {i: self._known[asks[i].sequence.request_id] for i in going}
        pasts = {i: known[i].past for i in going}
        last = dict(zip(going, kept.of(going), strict=True))
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
            rows = Rows()
            for i in going:
                end, length = known[i].end, known[i].end - known[i].start
                mask = torch.ones(1, length + d + 1, dtype=torch.bool, device=self._device)
                rows.add(tokens[i][-1:], last[i], [end + d], pasts[i], mask)
            if going:
                made, grown = self._forward(rows)
                last.update(zip(going, made, strict=True))
                pasts.update(zip(going, grown, strict=True))
        return [chain(t, p or None) for t, p in zip(tokens, probs, strict=True)]

    def _trees(
        self, asks: Seq[DraftAsk], able: Seq[int], kept: Kept, depth: int
    ) -> list[DraftTree]:
        """One sequence after another."""
        found = [DraftTree()] * len(asks)
        for i, feature in zip(able, kept.of(able), strict=True):
            most = min(asks[i].most, self.max_nodes)
            found[i] = best_nodes(self._grow(asks[i], feature, depth), most)
        return found

    def _grow(self, ask: DraftAsk, feature: Tensor, depth: int) -> list[Candidate]:
        known = self._known[ask.sequence.request_id]
        past, base = known.past, known.end - known.start
        found: list[Candidate] = []
        reach: list[float] = []
        column: dict[int, int] = {}  # of a candidate that went through the head
        frontier: list[int] = [-1]
        for d in range(depth):
            chances, ids = likeliest(torch.softmax(self._logits_of(feature), dim=-1), self._width)
            level: list[tuple[float, int, int]] = []
            for row, parent in enumerate(frontier):
                above = reach[parent] if parent >= 0 else 1.0
                pairs = zip(ids[row].tolist(), chances[row].tolist(), strict=True)
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
            rows = Rows()
            rows.add(tokens, hidden, positions, past, mask)
            (feature,), (past,) = self._forward(rows)
        return found
