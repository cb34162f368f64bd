"""Rounds of drafting on a device, all asked for before any of their tokens is known on the host.

Where each round's rows lie is known beforehand; a row's token is the one that the round before
chose for it, which stays on the device. So one copy goes over before the first round and one comes
back behind the last. Drafts behind a token that ends the output, or behind a row without a token,
are computed in vain and cut afterwards: what is left is what rounds on the host give.

With late verdicts (`late`) not even the step's own tokens are known: the rows of all its drafts
are run, those of rejected ones in vain (they write where the next step writes again), and positions
behind them are worked out where the verdict is.

What wants earlier drafts on the host (`Picker`) goes round by round as ever.

Knows: rows of rounds, what draws are made of. Knows nothing of which model runs the rows.

Shape letters: S sequences that draft, in order of how many drafts they may have, the most first; so
those of each round are the first k. R rounds with rows, W blocks of a table, V vocabulary, D
hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from models.crossing import EDGE, brought, sent_all
from models.interface import ForwardBatch
from moeserve.errors import one_line
from moeserve.row_draws import RowDraws, draw_parts
from moeserve.sequence import SamplingNeeds, Sequence
from moeserve.speculate.draft_rounds import RoundRows, tensors_of, there
from moeserve.speculate.drafter import DraftAsk
from moeserve.speculate.late import Late
from moeserve.speculate.verify import Rule
from moeserve.terminal import say

# logits [k, V], what its rows draw with (None: all are greedy) -> tokens [k] int64, whether a row
# has none [k] bool: all on the logits' device, nothing waited for
Pick = Callable[[Tensor, RowDraws | None], tuple[Tensor, Tensor]]


def pick_on_device(logits: Tensor, draws: RowDraws | None) -> tuple[Tensor, Tensor]:
    from moeserve.sampler_device import draw_tokens  # has kernels

    chosen = draw_tokens(logits, draws)
    return chosen.tokens, chosen.failed


class Picker:
    """Says whether a step's drafts are chosen where the layer runs, and once each why they are not.

    pick: how; None: the host chooses, round by round."""

    def __init__(self, rule: Rule, device: torch.device, pick: Pick | None = None) -> None:
        """pick None: on a GPU its kernels choose, elsewhere the host does."""
        self.pick = pick_on_device if pick is None and device.type == "cuda" else pick
        self._rule = rule
        self._said: set[str] = set()

    def takes(self, asks: Seq[DraftAsk]) -> Pick | None:
        """For the drafts of these; None: the host chooses."""
        if self.pick is None:
            return None
        why = _wants_host(asks, self._rule)
        if why is not None and why not in self._said:
            self._said.add(why)
            say(
                f"speculate: drafts are chosen on the host, which waits for each round, in steps "
                f"with a request that has {why}"
            )
        return self.pick if why is None else None

    def takes_late(self, sequences: Seq[Sequence], of_trees: bool = False) -> bool:
        """Whether a drafter's `ask_late` may be called in a step that samples these. of_trees: it
        drafts trees, with no draws and no edits, so that nothing wants the host."""
        if of_trees or self.pick is None:
            return self.pick is not None
        return self.takes([DraftAsk(s, 1) for s in sequences]) is not None


def _wants_host(asks: Seq[DraftAsk], rule: Rule) -> str | None:
    """Why a round's tokens must be chosen on the host; None: they need not."""
    for ask in asks:
        needs = ask.sequence.needs if ask.most > 0 else 0
        if needs & SamplingNeeds.EDITED:
            return "penalties, biases, min_tokens or a limit on thinking"
        if rule is Rule.REJECTION and needs & SamplingNeeds.RANDOM:
            return "a temperature, and rule rejection"
    return None


class RoundsAhead:
    """The rounds of a step: `ask`, and `told` when its `tensors` were brought over, or `found`.
    failure: why this rank drafted nothing, None where it did."""

    def __init__(
        self,
        rows: RoundRows,
        asks: Seq[DraftAsk],
        depth: int,
        size: int,
        device: torch.device,
        pick: Pick,
        late: Late | None = None,
    ) -> None:
        """rows: of round 0. size: of a block. late: where `rows` have what is late."""
        self.failure: str | None = None
        self._pick, self._given = pick, asks
        most = {i: min(asks[i].most, depth) for i in rows.asks}
        wanted = [place for place, wants in enumerate(rows.wanted) if wants]
        wanted.sort(key=lambda place: -most[rows.asks[place]])
        self._asks = [rows.asks[place] for place in wanted]
        self._most = [most[i] for i in self._asks]
        self._counts = [sum(m > number for m in self._most) for number in range(depth)]
        self._unknown = torch.full((len(wanted),), -1)  # what the host knows of later tokens
        self._tokens: list[Tensor] = []
        self._failed: list[Tensor] = []
        ends = [rows.firsts[place] + len(rows.tokens[place]) for place in wanted]
        blocks = [rows.blocks[place] for place in wanted]
        open_ends = [0 if late is None else late.drafts[rows.late[place]] for place in wanted]
        first = rows.batch(size, torch.device("cpu"))
        last = first.query_start[1:].long()[wanted] - 1 - torch.tensor(open_ends, dtype=torch.int64)
        first = replace(first, logits_rows=last)
        # Lengths that are bounds: of sequences whose drafts were all accepted.
        behind = _behind(ends, blocks, self._most, size)
        sequences = [asks[i].sequence for i in self._asks]
        out = torch.tensor([s.num_output_tokens for s in sequences], dtype=torch.int64)
        outs = _wide(out + torch.arange(len(behind.positions) + 1)[:, None])
        is_random = any(s.needs & SamplingNeeds.RANDOM for s in sequences)
        draws = draw_parts(sequences) if is_random else []
        places = [] if late is None else _late_places(rows, wanted, first, late)
        parts = [tensors_of(first), behind.tensors, [outs], draws, places]
        sent = iter(sent_all([x for part in parts for x in part], device))
        of_first, of_behind, (self._outs,), draws, places = (
            [next(sent) for _ in part] for part in parts
        )
        self._first = first if device.type == "cpu" else there(first, of_first)
        self._behind, self._there = behind, _Behind(*of_behind)
        self._late = late is not None
        if late is not None:
            self._settle_late(late, places, size)
        self._draws = RowDraws.of(draws, self._outs[0]) if is_random else None

    def ask(self, forward: Callable[[int, ForwardBatch], Tensor | None]) -> None:
        """Run them all; nothing is waited for. forward: a round's number and rows -> logits, or
        None: no more rounds. Where tokens could not be chosen on this rank, the rounds behind go on
        without rows."""
        for number in range(len(self._counts)):
            logits = forward(number, self._batch(number))
            if logits is None:
                break
            try:
                self._choose(number, logits)
            except Exception as error:  # peers are in the next round: so must this rank be
                self.failure = one_line(error)
                self._counts = [0] * len(self._counts)

    def found(self) -> list[list[int]]:
        """`told`, waited for."""
        host: list[Tensor] = []
        if self.failure is None:
            try:
                host = brought(self.tensors)
            except Exception as error:  # no peer waits for it
                self.failure = one_line(error)
        return self.told(host)

    @property
    def tensors(self) -> list[Tensor]:
        """What `told` tells from. None where there is a failure."""
        return [*self._tokens, *self._failed] if self.failure is None else []

    def told(self, host: Seq[Tensor]) -> list[list[int]]:
        """host: the tensors, brought over. Of each ask: what it drafted; nothing where there is a
        failure."""
        found: list[list[int]] = [[] for _ in self._given]
        if self.failure is not None:
            return found
        rows = [x.tolist() for x in host]
        rounds = len(self._tokens)
        going = list(range(len(self._asks)))
        for tokens, failed in zip(rows[:rounds], rows[rounds:], strict=True):
            for row in [row for row in going if row < len(tokens)]:
                ask = self._asks[row]
                if not failed[row]:
                    found[ask].append(tokens[row])
                if failed[row] or tokens[row] in self._given[ask].sequence.stop_ids:
                    going.remove(row)
        return found

    def carried(self, number: int, hidden: Tensor) -> Tensor:
        """hidden [T, D] of round `number` -> [k, D] of the next one's rows."""
        k = self._counts[number + 1] if number + 1 < len(self._counts) else 0
        if number == 0:
            return hidden.index_select(0, self._first.logits_rows[:k])
        return hidden[:k]

    # -- parts ---------------------------------------------------------------------------------

    def _batch(self, number: int) -> ForwardBatch:
        """Of round `number`: no rows make one of T = S = 0."""
        if number == 0:
            return self._first
        k = self._counts[number]
        at = number - 1 if k else 0
        host = self._behind.batch(at, k, self._unknown[:k])
        tokens = self._tokens[-1][:k] if k else self._first.token_ids[:0]
        made = self._there.batch(at, k, tokens)
        positions = self._behind.positions[at, :k].tolist() if k else []
        return replace(
            made,
            max_query_len=min(k, 1),
            max_context_len=max(positions, default=-1) + 1,
            total_context=sum(positions) + k,
            host=None if self._late or made.positions.device.type == "cpu" else host,
        )

    def _choose(self, number: int, logits: Tensor) -> None:
        """logits [k, V] of round `number`, whose tokens are chosen."""
        k = self._counts[number]
        if not k:
            return
        draws = self._draws
        if draws is not None:
            draws = draws.first(k, self._outs[number, :k])
        tokens, failed = self._pick(logits, draws)
        self._tokens.append(tokens)
        self._failed.append(failed)

    def _settle_late(self, late: Late, places: Seq[Tensor], size: int) -> None:
        """places: `_late_places`, where the verdicts are."""
        into, out_of, of, drafts = places
        accepted = late.accepted.index_select(0, of)
        first = self._first
        self._first = replace(
            first,
            token_ids=first.token_ids.index_copy(0, into, late.tokens.index_select(0, out_of)),
            logits_rows=first.logits_rows + accepted,
        )
        self._there = self._there.back(drafts - accepted, size)
        self._outs = self._outs + _padded(accepted + 1, self._outs.shape[1])


@dataclass(frozen=True)
class _Behind:
    """Of the rounds from 1 on, a row a sequence: positions, slots [R - 1, >= S] int64, contexts
    [R - 1, >= S] int32, tables [S, W] int32, starts [S + 1] int32, numbers [S] int64. What a round
    says of sequences that have no row in it means nothing."""

    positions: Tensor
    slots: Tensor
    contexts: Tensor
    tables: Tensor
    starts: Tensor
    numbers: Tensor

    @property
    def tensors(self) -> list[Tensor]:
        return [
            self.positions, self.slots, self.contexts, self.tables, self.starts, self.numbers
        ]  # fmt: skip

    def back(self, rejected: Tensor, size: int) -> _Behind:
        """Of sequences of which so many drafts [S] were not accepted, where all were thought to be.
        size: of a block."""
        num, width = self.tables.shape
        positions = self.positions - _padded(rejected, self.positions.shape[1])
        at = positions[:, :num]
        blocks = (at // size).clamp(0, max(width - 1, 0))
        slots = self.tables.long()[self.numbers, blocks] * size + at % size
        return replace(
            self, positions=positions, slots=_wide(slots), contexts=_wide((at + 1).to(torch.int32))
        )

    def batch(self, at: int, k: int, tokens: Tensor) -> ForwardBatch:
        """Of round at + 1, with k rows; its lengths are for whoever asks to fill in."""
        return ForwardBatch(
            token_ids=tokens,
            positions=self.positions[at, :k] if k else self.numbers[:0],
            slot_mapping=self.slots[at, :k] if k else self.numbers[:0],
            query_start=self.starts[: k + 1],
            context_len=self.contexts[at, :k] if k else self.starts[:0],
            block_tables=self.tables[:k],
            logits_rows=self.numbers[:k],
            max_query_len=0,
            max_context_len=0,
        )


def _behind(begins: Seq[int], blocks: Seq[list[int]], most: Seq[int], size: int) -> _Behind:
    """begins: each sequence's position in round 1; most: its drafts."""
    num, rounds = len(begins), max(max(most, default=0) - 1, 0)
    positions = np.arange(rounds)[:, None] + np.array(begins, np.int64)[None, :]
    width = max((-(-(b + m - 1) // size) for b, m in zip(begins, most, strict=True)), default=0)
    tables = np.full((num, width), -1, np.int32)
    for row, ids in zip(tables, blocks, strict=True):
        given = ids[:width]
        row[: len(given)] = given
    slots = np.zeros((rounds, num), np.int64)
    if rounds and num:
        places = np.minimum(positions // size, width - 1)
        slots[:] = tables[np.arange(num)[None, :], places]
        slots = slots * size + positions % size
    return _Behind(
        _wide(torch.from_numpy(positions)), _wide(torch.from_numpy(slots)),
        _wide(torch.from_numpy((positions + 1).astype(np.int32))), torch.from_numpy(tables),
        torch.arange(num + 1, dtype=torch.int32), torch.arange(num),
    )  # fmt: skip


def _late_places(
    rows: RoundRows, wanted: Seq[int], first: ForwardBatch, late: Late
) -> list[Tensor]:
    """int64: the rows of round 0 whose tokens were chosen by the step, and which of its O they are;
    the wanted sequences' numbers there, and their drafts."""
    starts = first.query_start.tolist()
    into: list[int] = []
    out_of: list[int] = []
    for place, number in rows.late.items():
        num = late.drafts[number] + 1
        into += range(starts[place + 1] - num, starts[place + 1])
        out_of += range(late.firsts[number], late.firsts[number] + num)
    of = [rows.late[place] for place in wanted]
    found = into, out_of, of, [late.drafts[number] for number in of]
    return [torch.tensor(x, dtype=torch.int64) for x in found]


def _wide(rows: Tensor) -> Tensor:
    """[R, S] -> with columns behind them that mean nothing, so that each row begins at an EDGE."""
    width = rows.shape[1]
    return _padded(rows, width + -width % (EDGE // rows.element_size()))


def _padded(rows: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(rows, (0, width - rows.shape[-1]))
