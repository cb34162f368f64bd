"""Speculator: one rank's speculation in the engine's step.

    offer (in the vote) -> agreed -> forward -> judged (before commit) -> draft (after it) -> timed

Drafts are made at a step's end, from what it computed, and lie with their sequences until the next
step verifies them. Law 1: the depth, and with it the number of collective rounds, is agreed;
`draft` is called on every rank in every step with a forward, whatever became of its requests.

Knows: the drafter, how deep to draft, what came of it. Knows nothing of how votes travel.

Shape letters: T rows of the step, D hidden, K largest depth, R ranks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate
from math import ceil

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.crossing import sent
from moeserve.device.stopwatch import HostStopwatch, Stopwatch
from moeserve.errors import one_line
from moeserve.plan import StepPlan, StepResult
from moeserve.runner import ModelRunner
from moeserve.scheduler import Scheduler
from moeserve.sequence import Sequence
from moeserve.speculate.acceptance import Acceptance
from moeserve.speculate.adaptive import AdaptiveDepth, FixedDepth, Offer
from moeserve.speculate.cost_model import CostModel, Costs
from moeserve.speculate.drafter import DraftAsk, Drafter
from moeserve.speculate.late import Late, LateDrafter, LateDrafts
from moeserve.speculate.mtp import MtpDrafter, most_within
from moeserve.speculate.run_limits import draft_room
from moeserve.speculate.told import speculation_stats
from moeserve.speculate.tree import DraftTree
from moeserve.speculate.verify import Rule
from moeserve.terminal import say
from moeserve.wire_speculation import SpeculationStats

NEED = 3  # columns of a vote that every step has
ENDS = 0.1  # weight of a look in the mean of what ends of sequences take
MIXED = 32  # steps with prompts in a row: others are not to be expected
RECENT = 64  # steps that drafted, over which users are told means


@dataclass(frozen=True)
class Agreed:
    """Of the step, by all ranks: the most rows of any; whether none computes prompt tokens."""

    max_tokens: int = 0
    decode_only: bool = False


class Speculator:
    """policy: how deep. rank 0 measures costs for all."""

    def __init__(
        self,
        drafter: Drafter,
        policy: AdaptiveDepth | FixedDepth,
        runner: ModelRunner,
        scheduler: Scheduler,
        rank: int = 0,
        rule: Rule = Rule.SAME,
    ) -> None:
        self.drafter, self.policy, self.rule = drafter, policy, rule
        self.acceptance = Acceptance(policy.max_depth)
        self.costs = CostModel()
        self._runner, self._scheduler, self._rank = runner, scheduler, rank
        self._step = Agreed()
        self.max_next = 0  # sequences of any rank that may draft in this step
        self._num_prefill_rows = self._num_held = 0  # of round 0
        self.depth = 0
        self.num_rounds = self.num_failures = 0
        self.seconds = self.last_seconds = 0.0
        self.failure: str | None = None
        self.temperatures = 0.0
        self.depths = [0] * (policy.max_depth + 1)  # steps in which somebody could draft
        self.recent: deque[tuple[int, int]] = deque(maxlen=RECENT)  # depth, sequences of a rank
        # Rows of a tree for each of its levels; 1 of a chain.
        self._fan = max(drafter.max_nodes / drafter.max_depth, 1.0)
        self._ends = np.ones(policy.max_depth + 1)  # tokens of sequences over those of endless ones
        self._mixed = 0  # steps with prompts in a row
        self._verified = 0  # depth of the drafts that the step verifies
        self.stopwatch: Stopwatch = HostStopwatch()  # of drafting that nobody waits for
        self._is_timed = True  # what the last step's drafting took is known
        self._late: tuple[list[DraftAsk], LateDrafts] | None = None  # under way
        scheduler.on_gone = self.gone

    # -- agreement -----------------------------------------------------------------------------

    @property
    def num_columns(self) -> int:
        """Of a vote."""
        return NEED if isinstance(self.policy, FixedDepth) else NEED + 2 * self.policy.max_depth + 6

    def offer(self, plan: StepPlan) -> Seq[int]:
        """This rank's columns: the sequences that may draft at the step's end, how far the one with
        the most room may, rows held; then, where depth adapts, its offer and rank 0's costs."""
        members = [plan.sequences[i] for i in plan.sampled]
        num, policy = len(members), self.policy
        # The step adds a token at least, and the target one to the drafts.
        room = [max(s.max_output_tokens - s.num_output_tokens - 2, 0) for s in members]
        need = num, max(room, default=0), self._count_held(plan)
        if isinstance(policy, FixedDepth):
            return need
        if not policy.looks:
            return (*need, *(0,) * (2 * policy.max_depth + 6))
        told = (self.costs.costs() if self._rank == 0 else Costs(0, 0, 0)).numbers
        if not num:
            return (*need, *(0,) * (2 * policy.max_depth + 2), *told)
        offer = self._offer([s.request_id for s in members], np.array(room))
        rows: Seq[int] = offer.rows
        if self._fan > 1:
            rows = [num + ceil((x - num) * self._fan) for x in rows]
        return (*need, *rows, *offer.expected, *told)

    def _offer(self, request_ids: Seq[str], room: NDArray[np.int64]) -> Offer:
        """That an end leaves no room changes no depth, so the offer is of sequences that go on; but
        where ends are many, as answers are short, less comes of depth: a running mean tells."""
        policy, num = self.policy, len(request_ids)
        assert isinstance(policy, AdaptiveDepth)
        reach, most = self.acceptance.reaches(request_ids), self._most_levels(num)
        offer = policy.offer(reach, np.full(num, policy.max_depth), most)
        if room.any():  # else nothing is drafted, which costs nothing
            ends = np.array(policy.offer(reach, room, most).expected) / np.array(offer.expected)
            self._ends += ENDS * (ends - self._ends)
        expected = np.rint(np.array(offer.expected) * self._ends).astype(np.int64)
        return Offer(tuple(expected.tolist()), offer.rows)

    def agreed(self, columns: NDArray[np.int64], max_tokens: int, decode_only: bool) -> None:
        """columns [R, num_columns]: of all ranks."""
        self._step, self._verified = Agreed(max_tokens, decode_only), self.depth
        policy = self.policy
        self.max_next, room, self._num_held = columns[:, :NEED].max(axis=0).tolist()
        if not self.max_next:
            self.depth = min(policy.depth, 1)  # nobody drafts: one round, to keep up with prompts
        elif isinstance(policy, FixedDepth):
            self.depth = policy.depth
        elif policy.looks:
            end = NEED + policy.max_depth + 1
            tokens = columns[:, end:-4].sum(axis=0)
            costs = Costs(*columns[0, -4:].tolist())
            self.depth = policy.agree_on(tokens, columns[:, NEED:end].max(axis=0), costs)
            if policy.renews:
                self.costs.renew()
        else:
            self.depth = policy.pass_by()
        if self.max_next:
            # What nobody has room for is not run, but that prompts are kept up with.
            self.depth = min(self.depth, room if decode_only else max(room, 1))
            self.depths[self.depth] += 1
            if self.depth:
                self.recent.append((self.depth, self.max_next))
        self._scheduler.ahead = max(self.depth - 1, 0) if self.drafter.runs_ahead else 0

    # -- the step ------------------------------------------------------------------------------

    def judged(self, plan: StepPlan, result: StepResult) -> None:
        """Before the commit, after which some of these sequences are gone."""
        for j, verdict in result.verdicts.items():
            i = plan.sampled[j]
            sequence, tree = plan.sequences[i], plan.trees[i]
            self.acceptance.add(sequence.request_id, tree.depth, verdict.num_accepted)
            self.temperatures += sequence.temperature

    def draft(self, plan: StepPlan, hidden: Tensor, result: StepResult | None) -> None:
        """After the commit. hidden [T, D]: of the step's rows. result None: there was none, and the
        plan's sequences are gone. What it raises, peers may wait for."""
        self.last_seconds = 0.0
        # On a device nobody waits for rounds of no rows: a clock here tells what it takes to ask.
        on_host = isinstance(self.stopwatch, HostStopwatch)
        self._is_timed = on_host or not self.depth or bool(plan.sampled)
        if not self.depth:
            if isinstance(self.drafter, MtpDrafter) and result is not None:
                self._pass_over(self.drafter, plan, hidden, result)
            return
        start = time.perf_counter()
        verdicts = {} if result is None else result.verdicts
        asks, self._num_prefill_rows = self._asks(plan, hidden, result)
        for j, verdict in verdicts.items():
            i = plan.sampled[j]
            if plan.sequences[i].lease is not None:
                rejected = plan.trees[i].num_nodes - verdict.num_accepted
                self.drafter.settle(plan.sequences[i], verdict.num_accepted, rejected)
        trees = self.drafter.propose(asks, self.depth, self._step.max_tokens)
        self._take(asks, trees, self._fan != 1, time.perf_counter() - start)

    def drafts_late(self, plan: StepPlan) -> bool:
        """Whether this step's drafts are judged, and those behind them made, before the host knows
        its tokens: `ask_late` and `take_late` in place of `draft`. Of this rank alone: the rounds
        are the same."""
        drafter = self.drafter
        if not (self.depth and plan.sampled and isinstance(drafter, LateDrafter)):
            return False
        return drafter.drafts_late([plan.sequences[i] for i in plan.sampled])

    def ask_late(self, plan: StepPlan, hidden: Tensor, late: Late) -> list[Tensor]:
        """Before the host knows what was chosen. hidden [T, D], late: of the step -> what is to be
        brought over for `take_late`. What it raises, peers may wait for."""
        drafter = self.drafter
        assert isinstance(drafter, LateDrafter)
        self.last_seconds, self._late, self._is_timed = 0.0, None, True
        self.stopwatch.start()
        asks, self._num_prefill_rows = self._late_asks(plan, hidden, late)
        drafts = drafter.ask_late(asks, self.depth, late)
        self.stopwatch.stop()
        self._late = asks, drafts
        return drafts.tensors

    def take_late(self, plan: StepPlan, result: StepResult | None, host: Seq[Tensor]) -> None:
        """After the commit. host: what `ask_late` asked for; result None: there was none, and the
        plan's sequences are gone."""
        late, self._late = self._late, None
        if late is None or result is None:
            self.num_rounds += self.depth  # in vain
            return
        asks, drafts = late
        verdicts = (result.verdicts.get(j) for j in range(len(plan.sampled)))
        trees = drafts.told(host, [0 if v is None else v.num_accepted for v in verdicts])
        self._take(asks, trees, True, self.stopwatch.seconds())

    def _take(
        self, asks: Seq[DraftAsk], trees: Seq[DraftTree], may_be_deep: bool, seconds: float
    ) -> None:
        """What was drafted lies with those that go on. may_be_deep: deeper than there is room."""
        for ask, tree in zip(asks, trees, strict=True):
            sequence = ask.sequence
            if not tree.num_nodes or sequence.lease is None:
                continue
            deepest = min(self._room(sequence), self.depth) if may_be_deep else tree.depth
            if tree.depth > deepest or not sequence.stop_ids.isdisjoint(tree.tokens):
                tree = tree.cut(deepest, sequence.stop_ids)
            sequence.drafts = tree
        failure = getattr(self.drafter, "failure", None)
        if failure is not None:
            self._note(failure)
        self.num_rounds += self.depth
        self.last_seconds = seconds
        self.seconds += seconds

    def begin_round(self, number: int, num_rows: int) -> None:
        """For drafters that run collective rounds: hears of each before it."""
        first = number == 0
        self._runner.begin_round(
            self._step.max_tokens + self._num_held if first else self.max_next,
            self._step.decode_only,
            num_rows,
            num_rows - self._num_prefill_rows if first else num_rows,
        )

    def warm_up(self) -> None:
        """Rounds of no rows. Collective where the drafter is."""
        self._step, self.max_next = Agreed(), 0
        self.drafter.propose([], 2, 0)

    def timed(self, seconds: float) -> None:
        """seconds: the whole step's, drafting included. Tells costs of steps in which all ranks
        decoded; where such do not come, of any."""
        self._mixed = 0 if self._step.decode_only else self._mixed + 1
        if not self._is_timed:
            return
        if 0 < self._mixed <= MIXED or not (self.depth or self.policy.holds):
            return  # long before a trial there is nothing to compare with
        # Round 0 with what a pause has left tells little about others.
        few = self._num_held <= self._step.max_tokens
        rounds = self.depth if self.last_seconds and few else 0
        rows = self._step.max_tokens
        if self._mixed:  # some rank always has a prompt: what do drafts add to such steps?
            rows = max(self.max_next, 1) * (1 + self._verified)
        self.costs.add(rows, seconds - self.last_seconds, rounds, self.last_seconds)

    def failed(self, error: Exception) -> None:
        """Drafting failed on this rank, where no peer waits for it: its drafts are lost."""
        for sequence in self._scheduler.running:
            sequence.drafts = None
            if isinstance(self.drafter, MtpDrafter):  # what was to be written may not be
                self.drafter.skip(sequence, 0)
            self.drafter.forget([sequence.request_id])
        self._note(one_line(error))

    # -- what shows ----------------------------------------------------------------------------

    def stats(self) -> SpeculationStats:
        return speculation_stats(self, self._scheduler.counters)

    # -- parts ---------------------------------------------------------------------------------

    def _pass_over(
        self, drafter: MtpDrafter, plan: StepPlan, hidden: Tensor, result: StepResult
    ) -> None:
        """A step without drafts: what it computed is kept for the next that drafts, or is lost."""
        if self.policy.holds:
            drafter.hold(self._asks(plan, hidden, result)[0])
            return
        drafter.drop_held()
        for sequence, start in zip(plan.sequences, plan.starts, strict=True):
            drafter.skip(sequence, start)

    def _count_held(self, plan: StepPlan) -> int:
        """Rows that a pause has left, of the plan's sequences: they come into round 0, which may be
        no larger than a step."""
        if not isinstance(self.drafter, MtpDrafter):
            return 0
        held = sum(self.drafter.num_held(s.request_id) for s in plan.sequences)
        if held > self._scheduler.limits.token_budget - plan.num_tokens:
            self.drafter.drop_held()
            held = 0
        return held

    def _asks(
        self, plan: StepPlan, hidden: Tensor, result: StepResult | None
    ) -> tuple[list[DraftAsk], int]:
        """Of the plan's sequences that go on; and the rows of them that were prompts."""
        if result is None:
            return [], 0
        most = self._allot(plan) if self.depth else {}
        firsts = [0, *accumulate(plan.counts)]
        verdicts = {plan.sampled[j]: verdict for j, verdict in result.verdicts.items()}
        wants_hidden = self.drafter.wants_hidden
        asks: list[DraftAsk] = []
        num_prefill_rows, decodes = 0, set(plan.decodes)
        for i in _decodes_first(plan):
            sequence, start, first = plan.sequences[i], plan.starts[i], firsts[i]
            if sequence.lease is None:
                continue
            num = sequence.num_computed_tokens - start
            if i not in decodes:
                num_prefill_rows += num
            rows: Tensor | None = None
            if wants_hidden:
                verdict = verdicts.get(i)
                if verdict is None or plan.trees[i].is_chain:
                    rows = hidden[first : first + num]
                else:
                    accepted = torch.tensor([first + row for row in verdict.rows[:num]])
                    rows = hidden.index_select(0, sent(accepted, hidden.device))
            asks.append(DraftAsk(sequence, most.get(i, 0), start, rows))
        return asks, num_prefill_rows

    def _late_asks(self, plan: StepPlan, hidden: Tensor, late: Late) -> tuple[list[DraftAsk], int]:
        """Of all the plan's sequences, with all their rows, of trees that branch those of the path;
        and the rows that are prompts."""
        most, firsts = self._allot(plan, late=True), [0, *accumulate(plan.counts)]
        numbers = {i: j for j, i in enumerate(plan.sampled)}
        rows: dict[int, Tensor] = {}
        if self.drafter.wants_hidden:
            rows = {i: hidden[firsts[i] : firsts[i + 1]] for i in range(len(plan.sequences))}
            if late.walked is not None:
                paths = late.along(hidden, [firsts[i] for i in plan.sampled])
                for i in plan.trees:
                    first = late.firsts[numbers[i]]
                    rows[i] = paths[first : first + late.drafts[numbers[i]] + 1]
        asks = [
            DraftAsk(plan.sequences[i], most.get(i, 0), plan.starts[i], rows.get(i), numbers.get(i))
            for i in _decodes_first(plan)
        ]
        return asks, plan.num_prefill_tokens

    def _allot(self, plan: StepPlan, late: bool = False) -> dict[int, int]:
        """Drafts (of a tree, nodes) at most, of those whose next token the next step chooses.
        late: before it is known what this one does."""
        able = [i for i in plan.sampled if plan.sequences[i].lease is not None]
        if not able:
            return {}
        members = [plan.sequences[i] for i in able]
        if late:
            ends = [plan.starts[i] + plan.counts[i] + 1 for i in able]  # where all is accepted
            room = [self._room(s, end) for s, end in zip(members, ends, strict=True)]
        else:
            room = [self._room(sequence) for sequence in members]
        left = self._most_levels(len(able))
        policy = self.policy
        if isinstance(policy, FixedDepth):
            counts = policy.share(room, left)
        else:
            reach = self.acceptance.reaches([s.request_id for s in members])
            counts = policy.allot(reach, np.array(room), left).tolist()
        if self._fan > 1:
            counts = [min(ceil(x * self._fan), self.drafter.max_nodes) for x in counts]
        return dict(zip(able, counts, strict=True))

    def _most_levels(self, num: int) -> int:
        """Of all trees together, what fits into a step beside a token of each of num sequences. Of
        a tree wider than that a first part is taken (`place_drafts`)."""
        left = self._scheduler.limits.token_budget - num
        return max(int(left / self._fan), min(left, 1))

    def _room(self, sequence: Sequence, late: int | None = None) -> int:
        """late: the most tokens that it may have after the step, where the host does not know."""
        room = draft_room(sequence, self.depth, late is not None)
        if not self.drafter.runs_ahead:
            return room
        assert sequence.lease is not None
        owned = len(sequence.lease.table.ids) * self._scheduler.cache.block_size
        if late is None:
            return min(room, most_within(sequence.num_tokens, owned))
        owned = min(owned, self._scheduler.limits.max_model_len)  # no row behind it, drafts neither
        return min(room, most_within(late, owned))

    def gone(self, request_id: str) -> None:
        """The sequence has ended or lost its blocks."""
        self.acceptance.forget([request_id])
        self.drafter.forget([request_id])

    def _note(self, failure: str) -> None:
        if not self.num_failures:
            say(f"speculate: rank {self._rank} could not draft: {failure}; its drafts are left out")
        self.num_failures += 1
        self.failure = failure


def _decodes_first(plan: StepPlan) -> list[int]:
    """So that load is told by phase (`StepRecorder.begin_round`)."""
    decodes = set(plan.decodes)
    return [*plan.decodes, *(i for i in range(len(plan.sequences)) if i not in decodes)]
