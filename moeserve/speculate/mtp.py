"""MtpDrafter: a DeepSeek checkpoint's own drafter, the multi-token-prediction layer.

For a position i with hidden state h_i (after the final norm) and the known token t_{i+1} the layer
predicts t_{i+2}. Round 0 runs the rows of the step whose tokens are certain, all at once, and so
writes the layer's latents into the same paged cache as the target's (a cache layer of its own, slot
of position i); further rounds run one row a sequence, fed with the hidden state after the head's
norm and the token just drafted. Those rows write behind the sequence's end; the next step's rows
overwrite them, so nothing needs to be undone.

Collective: the layer is an MoE layer. A step of depth d is d rounds on every rank, of no rows where
a rank has none. What fails on one rank alone ends its drafts, not its rounds (`failure`). On a GPU
the host waits for all rounds together (`rounds_ahead`).

A pause (steps of depth 0) leaves positions without latents. Hidden states of the last HELD of them
may have been kept (`hold`): they are caught up with in round 0. Which blocks lack some is known, of
all sequences and of the prefix cache (`_missing`): what another request left there is never read. A
sequence goes on behind the last such block as one that begins there, which changes no relative
position; of a block that it is in the middle of, what was not written is zeroed. The last latent of
a block from the prefix cache was made with another sequence's next token, which may change a draft
and never an output.

Several MTP layers: the first one is fed back, as with one. Needs blocks up to the position
len(tokens) - 3 + most of each ask (`most_within`).

Shape letters: D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from models.crossing import sent
from models.interface import ForwardBatch, ForwardOutput, PagedKVCache
from moeserve.errors import one_line
from moeserve.sequence import Sequence
from moeserve.speculate.draft_rounds import Chains, RoundRows
from moeserve.speculate.drafter import DraftAsk
from moeserve.speculate.late import Late, LateDrafts
from moeserve.speculate.rounds_ahead import Pick, Picker, RoundsAhead
from moeserve.speculate.tree import DraftTree, chain
from moeserve.speculate.verify import Rule


def most_within(num_tokens: int, num_positions: int) -> int:
    """Drafts that a sequence of so many known tokens and positions with blocks may be asked for:
    the row of the last draft but one is the last to be written."""
    return max(num_positions - num_tokens + 2, 0)


@dataclass
class _Known:
    """base: where the sequence begins for the layer, on a block's edge; end: of its rows; whole:
    number of the first of its blocks that, with those behind it, hold all latents."""

    base: int
    end: int
    whole: int


HELD = 32  # rows of a sequence, in a pause


class Rounds(Protocol):
    """Who runs the layer: a CausalLM, or the engine's runner."""

    def draft(
        self, batch: ForwardBatch, hidden: Tensor, next_token_ids: Tensor, cache: PagedKVCache
    ) -> ForwardOutput: ...


def _unheard(number: int, num_rows: int) -> None:
    pass


class MtpDrafter:
    """layer: of the cache, where the MTP layer's latents lie (`PagedKVCache.layers` index).
    begin_round hears, before each round, its number and this rank's rows."""

    name = "mtp"
    collective = wants_hidden = runs_ahead = True

    def __init__(
        self,
        model: Rounds,
        cache: PagedKVCache,
        layer: int,
        hidden_size: int,
        max_depth: int = 8,
        rule: Rule = Rule.SAME,
        begin_round: Callable[[int, int], None] = _unheard,
        pick: Pick | None = None,
    ) -> None:
        """pick: see `Picker`."""
        self._begin_round = begin_round
        self._picker = Picker(rule, cache.layers[layer].device, pick)
        self._model, self._cache, self._rule = model, cache, rule
        self._pages = cache.layers[layer]
        self._no_rows = self._pages.new_zeros(0, hidden_size, dtype=cache.dtype)
        self.max_depth = self.max_nodes = max_depth
        self.failure: str | None = None  # of the last propose: why this rank drafted nothing
        self._known: dict[str, _Known] = {}
        self._held: dict[str, tuple[int, Tensor]] = {}  # first position, rows [m, D]
        self._missing: set[int] = set()  # blocks whose latents were not all written

    @torch.inference_mode()
    def propose(
        self, asks: Seq[DraftAsk], depth: int, max_tokens: int | None = None
    ) -> list[DraftTree]:
        """See Drafter: chains. max_tokens: whoever hears of rounds has told the dispatcher."""
        depth = min(depth, self.max_depth)
        self.failure = None
        rows, hidden = self._first(asks) if depth > 0 else (RoundRows(), self._no_rows)
        if (pick := self._picker.takes(asks)) is not None:
            rounds = self._ahead(asks, rows, hidden, depth, pick)
            found = rounds.found()
            self.failure = rounds.failure
            return [chain(tokens) for tokens in found]
        chains = Chains(asks, self._rule)
        for number in range(depth):
            batch = rows.batch(self._cache.block_size, self._pages.device)
            self._begin_round(number, batch.num_tokens)
            out = self._model.draft(batch, hidden, batch.token_ids, self._cache)
            keep: list[int] = []
            try:
                keep = chains.extend(rows.going, out.logits)
            except Exception as error:  # peers are in the next round: so must this rank be
                self.failure = one_line(error)
            if number + 1 == depth:
                break
            going = rows.going
            if len(keep) < batch.num_tokens:
                kept = sent(torch.tensor(keep, dtype=torch.int64), self._pages.device)
                hidden = out.hidden[batch.logits_rows[kept]]
            else:
                hidden = out.hidden
            going, rows = [going[place] for place in keep], RoundRows()
            for i in going:
                end = self._known[asks[i].sequence.request_id].end
                self._add(rows, i, asks[i], end + number, chains.tokens[i][-1:], True)
        return chains.trees() if self.failure is None else [DraftTree()] * len(asks)

    def drafts_late(self, sequences: Seq[Sequence]) -> bool:
        """See `Picker.takes_late`."""
        return self._picker.takes_late(sequences)

    @torch.inference_mode()
    def ask_late(self, asks: Seq[DraftAsk], depth: int, late: Late) -> LateDrafts:
        """`propose` in as many rounds, of asks whose tokens only the device knows."""
        depth = min(depth, self.max_depth)
        self.failure = None
        rows, hidden = self._first(asks, late)
        pick = self._picker.pick
        assert pick is not None and depth > 0
        rounds = self._ahead(asks, rows, hidden, depth, pick, late)

        def told(host: Seq[Tensor], accepted: Seq[int]) -> list[DraftTree]:
            for ask in asks:
                known = self._known.get(ask.sequence.request_id)
                if known is not None and ask.late is not None:
                    known.end -= late.drafts[ask.late] - accepted[ask.late]
            found = rounds.told(host)
            self.failure = rounds.failure
            return [chain(tokens) for tokens in found]

        return LateDrafts(rounds.tensors, told)

    def _ahead(
        self, asks: Seq[DraftAsk], rows: RoundRows, hidden: Tensor, depth: int, pick: Pick,
        late: Late | None = None,
    ) -> RoundsAhead:  # fmt: skip
        """All rounds without waiting for one."""
        size, device = self._cache.block_size, self._pages.device
        rounds = RoundsAhead(rows, asks, depth, size, device, pick, late)

        def forward(number: int, batch: ForwardBatch) -> Tensor:
            nonlocal hidden
            if number:
                hidden = rounds.carried(number - 1, hidden)
            self._begin_round(number, batch.num_tokens)
            out = self._model.draft(batch, hidden, batch.token_ids, self._cache)
            hidden = out.hidden
            return out.logits

        rounds.ask(forward)
        return rounds

    def settle(self, sequence: Sequence, num_accepted: int, num_rejected: int) -> None:
        """Nothing to undo: rows of drafts are behind the end."""

    def forget(self, request_ids: Collection[str]) -> None:
        for request_id in request_ids:
            self._known.pop(request_id, None)
            self._held.pop(request_id, None)

    @torch.inference_mode()
    def hold(self, asks: Seq[DraftAsk]) -> None:
        """In a step of depth 0: keep what it computed, the last HELD rows of each sequence."""
        for ask in asks:
            if ask.hidden is None or not len(ask.hidden):
                continue
            self.skip(ask.sequence, ask.first)
            first, rows = self._with_held(ask)
            kept = rows[-HELD:]
            first += len(rows) - len(kept)
            self._held[ask.sequence.request_id] = first, kept.clone()

    def skip(self, sequence: Sequence, first: int) -> None:
        """Nothing is written for what the step computed of it, from position `first` on."""
        if sequence.lease is not None:
            size, end = self._cache.block_size, sequence.num_computed_tokens
            self._missing.update(sequence.lease.table.ids[first // size : -(-end // size)])

    def drop_held(self) -> None:
        self._held.clear()

    def num_held(self, request_id: str) -> int:
        held = self._held.get(request_id)
        return 0 if held is None else len(held[1])

    def memory_bytes(self) -> int:
        """Its weights and pages are counted with the model's: what pauses keep."""
        return sum(rows.nbytes for _, rows in self._held.values())

    # -- parts ---------------------------------------------------------------------------------

    def _first(self, asks: Seq[DraftAsk], late: Late | None = None) -> tuple[RoundRows, Tensor]:
        """Round 0: what the step has computed."""
        rows, parts = RoundRows(), [self._no_rows]
        for i, ask in enumerate(asks):
            if ask.hidden is None or not len(ask.hidden):
                continue
            first, hidden = self._with_held(ask)
            self._held.pop(ask.sequence.request_id, None)
            end = first + len(hidden)
            self._follow(ask, first, end)
            parts.append(hidden.to(self._no_rows.dtype))
            following = ask.sequence.tokens[first + 1 : end + 1]
            if ask.late is not None:
                assert late is not None
                following += [0] * (late.drafts[ask.late] + 1)
            assert len(following) == len(hidden), "the token after a row is not known"
            self._add(rows, i, ask, first, following, ask.most > 0, ask.late)
        return rows, torch.cat(parts)

    def _with_held(self, ask: DraftAsk) -> tuple[int, Tensor]:
        """The ask's first position and hidden rows, behind those that were kept before them."""
        assert ask.hidden is not None
        held = self._held.get(ask.sequence.request_id)
        if held is None or held[0] + len(held[1]) != ask.first:
            return ask.first, ask.hidden
        return held[0], torch.cat([held[1], ask.hidden])

    def _follow(self, ask: DraftAsk, first: int, end: int) -> None:
        """The sequence's rows first..end - 1 are written now."""
        lease, size = ask.sequence.lease, self._cache.block_size
        assert lease is not None
        ids, name = lease.table.ids, ask.sequence.request_id
        known = self._known.get(name)
        if known is not None and first > known.end:
            self._missing.update(ids[known.end // size : -(-first // size)])
        if known is None or first > known.end or first < known.base:
            known = self._known[name] = self._begin(ids, first)
        known.end = end
        for block in ids[max(first // size, known.whole) : -(-end // size)]:
            self._missing.discard(block)

    def _begin(self, ids: Seq[int], first: int) -> _Known:
        """Of a sequence that is new here, or was not followed for a while."""
        size = self._cache.block_size
        number, inside = divmod(first, size)
        before = range(number + (inside > 0))  # blocks with positions before `first`
        last = max((i for i in before if ids[i] in self._missing), default=-1)
        if last < number:
            return _Known((last + 1) * size, first, last + 1)
        self._pages[ids[number], :inside] = 0
        return _Known(number * size, first, number + 1)

    def _add(
        self, rows: RoundRows, i: int, ask: DraftAsk, first: int, following: list[int],
        wanted: bool, late: int | None = None,
    ) -> None:  # fmt: skip
        lease = ask.sequence.lease
        assert lease is not None, "a sequence without blocks is asked for drafts"
        base = self._known[ask.sequence.request_id].base
        blocks = lease.table.ids[base // self._cache.block_size :]
        rows.add(i, first - base, following, blocks, wanted, late)
