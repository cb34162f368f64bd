"""DraftModelDrafter: a smaller checkpoint with the same tokens drafts for a larger one.

It has pages of its own, without a prefix tree, and follows each sequence: what it has computed of
accepted tokens stays, what it computed of its own drafts stays as far as they were accepted. Round
0 computes all tokens that it lacks (at most `max_rows` a step over all sequences; who is not done
drafts nothing yet), each further round one row a sequence.

Collective where the model is spread over ranks: then every round is a forward on every rank. Its
dispatcher's step bound is `max_rows`, the same everywhere.

Knows: a CausalLM and its cache. Knows nothing of the target but its tokens.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from models.interface import CausalLM, ForwardBatch
from moeserve.cache import BlockCache, Lease
from moeserve.errors import one_line
from moeserve.sequence import Sequence
from moeserve.speculate.draft_rounds import Chains, RoundRows
from moeserve.speculate.drafter import DraftAsk
from moeserve.speculate.late import Late, LateDrafts
from moeserve.speculate.rounds_ahead import Pick, Picker, RoundsAhead
from moeserve.speculate.tree import DraftTree, chain
from moeserve.speculate.verify import Rule
from moeserve.tokenizer import Tokenizer


def tokenizer_problems(draft: Tokenizer, target: Tokenizer) -> list[str]:
    """Why tokens of the two do not mean the same; at most a few lines."""
    ours, theirs = draft.fast.get_vocab(), target.fast.get_vocab()
    if ours == theirs:
        return []
    different = sorted(
        (token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token)),
        key=lambda token: (theirs.get(token, ours.get(token, 0)), token),
    )
    some = ", ".join(
        f"{token!r} is {ours.get(token)} there and {theirs.get(token)} here"
        for token in different[:3]
    )
    return [f"speculate: the draft model has other tokens ({len(different)} differ: {some})"]


@dataclass
class _Known:
    """tokens: of the rows in the pages, the sequence's own and behind them drafts."""

    lease: Lease
    tokens: list[int] = field(default_factory=list)
    certain: int = 0  # of them known to be the sequence's


class DraftModelDrafter:
    """num_blocks: of its own pool; a sequence that finds none is not drafted for."""

    name = "draft"
    wants_hidden = False
    runs_ahead = False

    def __init__(
        self,
        model: CausalLM,
        num_blocks: int,
        block_size: int,
        max_sequences: int,
        *,
        max_depth: int = 5,
        max_rows: int = 2048,
        collective: bool = False,
        rule: Rule = Rule.SAME,
        max_positions: int | None = None,
        pick: Pick | None = None,
    ) -> None:
        """max_positions: of a sequence; longer ones are not drafted for. pick: see `Picker`."""
        device = torch.device(getattr(model, "device", "cpu"))
        self._model, self._rule, self._max_rows = model, rule, max_rows
        self._pages = model.cache_spec.allocate(num_blocks, block_size, device)
        self._blocks = BlockCache(num_blocks, block_size, max_sequences, prefix_cache=False)
        self._device, self._max_sequences = device, max_sequences
        self.collective = collective
        self._picker = Picker(rule, device, pick)
        self._max_positions = max_positions or 1 << 62
        self.max_depth = self.max_nodes = max_depth
        self.failure: str | None = None  # of the last propose: why this rank drafted nothing
        self._known: dict[str, _Known] = {}

    @torch.inference_mode()
    def propose(
        self, asks: Seq[DraftAsk], depth: int, max_tokens: int | None = None
    ) -> list[DraftTree]:
        """See Drafter: chains."""
        depth = min(depth, self.max_depth)
        self.failure = None
        rows = self._first(asks, depth) if depth > 0 else RoundRows()
        if (pick := self._picker.takes(asks)) is not None:
            rounds = self._ahead(asks, rows, depth, pick)
            return self._told(asks, depth, rounds, rounds.found())
        chains = Chains(asks, self._rule)
        for number in range(depth):
            if not rows.asks and not self.collective:
                break
            batch = rows.batch(self._pages.block_size, self._device)
            out = self._model.forward(batch, self._pages)
            keep: list[int] = []
            try:
                keep = chains.extend(rows.going, out.logits)
            except Exception as error:  # peers are in the next round: so must this rank be
                self.failure = one_line(error)
            going, rows = [rows.going[place] for place in keep], RoundRows()
            for i in going if number + 1 < depth else ():
                known = self._known[asks[i].sequence.request_id]
                draft = chains.tokens[i][-1:]
                rows.add(i, len(known.tokens), draft, known.lease.table.ids, True)
                known.tokens += draft
        return chains.trees() if self.failure is None else [DraftTree()] * len(asks)

    def drafts_late(self, sequences: Seq[Sequence]) -> bool:
        """See `Picker.takes_late`."""
        return self._picker.takes_late(sequences)

    @torch.inference_mode()
    def ask_late(self, asks: Seq[DraftAsk], depth: int, late: Late) -> LateDrafts:
        """`propose` in as many rounds, of asks whose tokens only the device knows."""
        depth = min(depth, self.max_depth)
        self.failure = None
        rows = self._first(asks, depth, late)
        pick = self._picker.pick
        assert pick is not None and depth > 0
        rounds = self._ahead(asks, rows, depth, pick, late)
        computed = {rows.asks[place]: number for place, number in rows.late.items()}

        def told(host: Seq[Tensor], accepted: Seq[int]) -> list[DraftTree]:
            for i, number in computed.items():
                known = self._known.get(asks[i].sequence.request_id)
                if known is not None:
                    known.certain += accepted[number] + 1
                    known.tokens[:] = asks[i].sequence.tokens[: known.certain]
            return self._told(asks, depth, rounds, rounds.told(host))

        return LateDrafts(rounds.tensors, told)

    def _ahead(
        self, asks: Seq[DraftAsk], rows: RoundRows, depth: int, pick: Pick, late: Late | None = None
    ) -> RoundsAhead:
        """All rounds without waiting for one (`rounds_ahead`)."""
        size = self._pages.block_size
        rounds = RoundsAhead(rows, asks, depth, size, self._device, pick, late)

        def forward(number: int, batch: ForwardBatch) -> Tensor | None:
            if not batch.num_tokens and not self.collective:
                return None
            return self._model.forward(batch, self._pages).logits

        rounds.ask(forward)
        return rounds

    def _told(
        self, asks: Seq[DraftAsk], depth: int, rounds: RoundsAhead, found: list[list[int]]
    ) -> list[DraftTree]:
        self.failure = rounds.failure
        for ask, tokens in zip(asks, found, strict=True):
            known = self._known.get(ask.sequence.request_id)
            if tokens and known is not None:  # the last draft that may be was not computed
                known.tokens += tokens[: min(ask.most, depth) - 1]
        return [chain(tokens) for tokens in found]

    def settle(self, sequence: Sequence, num_accepted: int, num_rejected: int) -> None:
        """Seen in the tokens when it is asked next."""

    def forget(self, request_ids: Collection[str]) -> None:
        for request_id in request_ids:
            known = self._known.pop(request_id, None)
            if known is not None:
                self._blocks.close(known.lease)

    def memory_bytes(self) -> int:
        """Its pages; and the model's weights, where it tells."""
        weights: dict[str, int] = getattr(self._model, "memory_bytes", dict)()
        return sum(x.nbytes for x in self._pages.layers) + sum(weights.values())

    # -- parts ---------------------------------------------------------------------------------

    def _first(self, asks: Seq[DraftAsk], depth: int, late: Late | None = None) -> RoundRows:
        """Round 0: what is missing. Sequences that draft come before those that only keep up."""
        rows, left = RoundRows(), self._max_rows
        for i in sorted(range(len(asks)), key=lambda i: asks[i].most <= 0):
            sequence, number = asks[i].sequence, asks[i].late
            coming = 0  # tokens that the step has chosen, those behind rejected drafts among them
            if number is not None:
                assert late is not None
                coming = late.drafts[number] + 1
            known = self._open(sequence, sequence.num_tokens + coming + depth)
            if known is None:
                continue
            self._rewind(known, sequence.tokens, coming > 0)
            start = len(known.tokens)
            missing = sequence.tokens[start : start + left]
            known.tokens += missing
            known.certain = len(known.tokens)
            done = known.certain == sequence.num_tokens and len(missing) + coming <= left
            following = [*missing, *(0,) * coming] if done else missing
            left -= len(following)
            if following:
                wanted, blocks = done and asks[i].most > 0, known.lease.table.ids
                rows.add(i, start, following, blocks, wanted, number if done else None)
        return rows

    def _open(self, sequence: Sequence, num_positions: int) -> _Known | None:
        """Its lease with blocks for so many positions; None where they are not to be had."""
        known, blocks = self._known.get(sequence.request_id), self._blocks
        if num_positions > self._max_positions:
            return None
        if known is None:
            if len(self._known) >= self._max_sequences:
                return None
            opened = blocks.open("", num_positions, [])
            if opened is None:
                return None
            known = self._known[sequence.request_id] = _Known(opened[0])
        if blocks.blocks_for(num_positions) - len(known.lease.table.ids) > blocks.num_available:
            return None
        blocks.grow(known.lease, num_positions)
        return known

    def _rewind(self, known: _Known, tokens: Seq[int], more: bool) -> None:
        """Drop rows of drafts that were not accepted; the last token's row is always computed, its
        logits are what is wanted. more: there are tokens behind these."""
        last = len(tokens) if more else len(tokens) - 1
        end = min(known.certain, last)
        while end < min(len(known.tokens), last) and known.tokens[end] == tokens[end]:
            end += 1
        del known.tokens[end:]
