"""Scheduler: which tokens of which sequences a step computes, and what its results mean.

One rule covers prefill, chunks of it, decode and recomputing: num_computed_tokens catches up with
num_tokens. A step is `schedule() -> StepPlan`, the work elsewhere, `commit(plan, result)`; all on
plain data, no tensors, no clock.

Order: decodes, then started prefills, then new sequences, each first come first served (but one
that waits for a step to compute the blocks it shares with another holds up nobody). A sequence
is admitted with a token of the budget that all running ones left over, so there are never more of
them than the budget has tokens: no decode and not the oldest prefill is left without one. Where
blocks run out, the last arrived sequence is preempted (its blocks go back, it is computed again
later, mostly from the prefix cache); a sequence never preempts an older one, it waits a step
instead. So the oldest always advances, and since each sequence fits in the pool alone (checked at
submit) all of them finish.

Drafts (`speculate`) get what others leave (`scheduling_drafts`).

Knows nothing of ranks, models or sampling.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq

from msgspec.structs import replace

from moeserve.admission import check_request
from moeserve.cache import BlockCache, Node
from moeserve.errors import InvalidRequest
from moeserve.plan import StepPlan, StepResult
from moeserve.request import FinishReason, Request, TokenLogprob, TokenOutput
from moeserve.scheduling import ScheduleCounters as ScheduleCounters
from moeserve.scheduling import ScheduleLimits as ScheduleLimits
from moeserve.scheduling import completes, make_plan
from moeserve.scheduling_drafts import Taken, grow_ahead, place_drafts, reach, set_apart, take_back
from moeserve.sequence import Sequence
from moeserve.speculate.run_limits import cut_run
from moeserve.speculate.tree import DraftTree
from moeserve.speculate.verify import Verdict

LOOK_AHEAD = 16  # waiting sequences that a step looks at before it looks no further


class Scheduler:
    def __init__(self, cache: BlockCache, limits: ScheduleLimits) -> None:
        assert cache.pool.num_blocks >= cache.blocks_for(limits.max_model_len), (
            f"{cache.pool.num_blocks} blocks cannot hold max_model_len={limits.max_model_len}"
        )
        assert limits.max_num_sequences >= 1 and limits.token_budget >= 1
        self.cache = cache
        self.limits = limits
        self.counters = ScheduleCounters()
        self.running: list[Sequence] = []  # by arrival
        self.waiting: deque[Sequence] = deque()  # by arrival
        self._by_id: dict[str, Sequence] = {}
        self._arrivals = 0
        self._in_flight: StepPlan | None = None
        self._outbox: list[TokenOutput] = []  # finishes that no step's commit reports
        # Of speculation: positions behind a sequence's drafts that are written beside the plan, and
        # who hears that a sequence has ended or lost its blocks.
        self.ahead = 0
        self.on_gone: Callable[[str], None] | None = None

    # -- requests ------------------------------------------------------------------------------

    def add(self, request: Request) -> Sequence:
        """Queue a request. InvalidRequest: it could never be served, whatever else runs."""
        if request.request_id in self._by_id:
            raise InvalidRequest("request_id", request.request_id, "must not be in use already")
        limits = self.limits
        check_request(request, max_model_len=limits.max_model_len, vocab_size=limits.vocab_size)
        sequence = Sequence(
            request, self._arrivals, limits.max_model_len, limits.eos_ids, engine_seed=limits.seed
        )
        self._arrivals += 1
        self._by_id[request.request_id] = sequence
        self.waiting.append(sequence)
        return sequence

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> bool:
        """End a request now, or at the commit if a step is computing it. False: not known.
        reason: what it counts as; STOP where its text is whole (a stop string was found)."""
        sequence = self._by_id.get(request_id)
        if sequence is None or sequence.aborted:
            return False
        sequence.aborted = reason
        if self._in_flight is None or sequence not in self._in_flight.sequences:
            self._drop(sequence, reason)
        return True

    def fail_all(self, reason: str) -> None:
        """End everything with finish_reason 'error' (a step failed; its plan is void)."""
        self._in_flight = None
        for sequence in list(self._by_id.values()):
            self._drop(sequence, *_end(sequence, reason))

    def fail_plan(self, plan: StepPlan, reason: str) -> None:
        """End the sequences of a plan whose results are lost; the others go on."""
        assert plan is self._in_flight or not plan.sequences
        self._in_flight = None
        for sequence in plan.sequences:
            self._drop(sequence, *_end(sequence, reason))

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def num_wasted_slots(self) -> int:
        """Unfilled positions of running sequences' blocks: less than a block each, but for those
        that drafts were given."""
        size = self.cache.block_size
        return sum(
            len(s.lease.table.ids) * size - s.num_computed_tokens for s in self.running if s.lease
        )

    def take_outbox(self) -> list[TokenOutput]:
        """Outputs made outside of commit (aborts, failures)."""
        outputs, self._outbox = self._outbox, []
        return outputs

    # -- the step ------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Decide a step and take the blocks it writes. Empty exactly when there is no work."""
        assert self._in_flight is None, "schedule() before the last plan was committed"
        taken: Taken = {}  # in the order decided
        budget = self.limits.token_budget
        chunk = self.limits.chunk_size or budget
        preempted: list[Sequence] = []
        running = self.running

        i = 0
        while i < len(running):  # decodes; preempting takes from the list's end
            sequence = running[i]
            i += 1
            is_decode = len(sequence.tokens) - sequence.num_computed_tokens == 1
            if is_decode and self._room_for_one(sequence, taken, preempted):
                taken[sequence] = 1
                budget -= 1
        drafted = [s for s in taken if s.drafts is not None and s.drafts.num_nodes]
        for_drafts = set_apart(drafted, budget, running, bool(self.waiting)) if drafted else 0
        budget -= for_drafts
        i = 0
        while i < len(running) and budget > 0:  # prefills that have begun
            sequence = running[i]
            i += 1
            remaining = sequence.num_remaining_tokens
            if remaining > 1 and self._room_for_one(sequence, taken, preempted):
                if preempted:  # perhaps decodes that had their token already
                    budget = self.limits.token_budget - sum(taken.values()) - for_drafts
                count = min(remaining, chunk, budget, reach(self.cache, sequence))
                self._take(sequence, count, taken)
                budget -= count
        i = 0
        while i < min(len(self.waiting), LOOK_AHEAD) and budget > 0 and not preempted:
            if len(running) >= self.limits.max_num_sequences:
                break
            sequence = self.waiting[i]
            matched = self._match(sequence)
            if self._is_being_computed(sequence, len(matched), taken):
                i += 1  # others need not wait for what only this one waits for
                continue
            if not self._admit(sequence, matched) and not (
                take_back(self.cache, running, taken) and self._admit(sequence, matched)
            ):
                break
            del self.waiting[i]
            insort(running, sequence, key=_arrival)
            count = min(sequence.num_remaining_tokens, chunk, budget)
            self._take(sequence, count, taken)
            budget -= count

        assert len(running) <= self.limits.token_budget
        self._requeue(preempted)
        trees = place_drafts(self.cache, drafted, for_drafts + budget, taken) if drafted else {}
        if self.ahead:
            grow_ahead(self.cache, taken, self.ahead, self.limits.max_model_len)
        plan = make_plan(taken, trees, preempted)
        self._in_flight = plan if plan.sequences else None  # an empty one need not be committed
        assert plan.num_tokens <= self.limits.token_budget
        assert plan.num_tokens > 0 or not self.has_work, "work, but nothing scheduled"
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> list[TokenOutput]:
        """Count what was computed, share full blocks, append tokens, end what has ended."""
        if not plan.sequences:
            return []
        assert plan is self._in_flight, "commit of another plan than the last scheduled"
        self._in_flight = None
        counters, size = self.counters, self.cache.block_size
        for i, (sequence, start) in enumerate(zip(plan.sequences, plan.starts, strict=True)):
            count = plan.counts[i]
            if i in plan.trees:  # what became of them is a verdict's word
                count -= plan.trees[i].num_nodes
            sequence.drafts = None
            end = sequence.num_computed_tokens = start + count
            if start < sequence.num_prompt_tokens:
                counters.computed_prompt_tokens += min(end, sequence.num_prompt_tokens) - start
            assert sequence.lease is not None
            if end // size > sequence.lease.num_committed:
                self.cache.commit(sequence.lease, sequence.tokens, end)
            if sequence.prompt_logprobs is not None:
                new = result.prompt_logprobs.get(sequence.request_id)
                if new:
                    sequence.prompt_logprobs.extend(new)

        outputs: list[TokenOutput] = []
        for j, (i, token) in enumerate(zip(plan.sampled, result.token_ids, strict=True)):
            sequence = plan.sequences[i]
            if sequence.aborted:
                continue
            if i in plan.trees:
                outputs += self._advance_run(sequence, plan.trees[i], result.verdicts[j])
                continue
            outputs += self._advance_one(sequence, j, token, result)
        for sequence in plan.sequences:
            if sequence.aborted:
                self._drop(sequence, sequence.aborted)
        return outputs

    # -- parts ---------------------------------------------------------------------------------

    def _room_for_one(self, sequence: Sequence, taken: Taken, preempted: list[Sequence]) -> bool:
        """Take a block for the next position if it needs one, preempting later arrivals."""
        lease = sequence.lease
        assert lease is not None
        position = sequence.num_computed_tokens
        if position < len(lease.table.ids) * self.cache.block_size:
            return True
        if not self.cache.num_available:
            take_back(self.cache, self.running, taken)
        while not self.cache.num_available:
            victim = self.running[-1]
            if victim is sequence:
                return False  # it keeps what it has and waits: older ones may still preempt it
            self._preempt(victim, taken)
            preempted.append(victim)
        self.cache.grow(lease, position + 1)
        return True

    def _take(self, sequence: Sequence, count: int, taken: Taken) -> None:
        assert count > 0 and sequence.lease is not None
        self.cache.grow(sequence.lease, sequence.num_computed_tokens + count)
        taken[sequence] = count

    def _match(self, sequence: Sequence) -> list[Node]:
        """Cached blocks that a waiting sequence may begin on."""
        if sequence.wants_prompt_logprobs:
            return []
        return self.cache.match(sequence.tokens, sequence.request.cache_salt)

    def _admit(self, sequence: Sequence, matched: list[Node]) -> bool:
        """Give a waiting sequence its lease, if the blocks of all it knows so far are at hand:
        one admitted on less would be the first to be preempted."""
        opened = self.cache.open(sequence.request.cache_salt, len(sequence.tokens), matched)
        if opened is None:
            return False
        sequence.lease, cached = opened
        sequence.num_computed_tokens = cached
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = cached
            self.counters.prompt_tokens += sequence.num_prompt_tokens
            self.counters.cached_tokens += cached
        return True

    def _is_being_computed(self, sequence: Sequence, num_blocks: int, taken: Taken) -> bool:
        """Whether another sequence completes the block after these `num_blocks` in this step: then
        the next step finds it in the tree."""
        end = (num_blocks + 1) * self.cache.block_size
        if not self.cache.prefix_cache or end >= len(sequence.tokens):
            return False
        if sequence.wants_prompt_logprobs:  # takes no hit
            return False
        return completes(taken, sequence, end)

    def _preempt(self, victim: Sequence, taken: Taken) -> None:
        assert victim is self.running[-1] and victim.lease is not None
        self.running.pop()
        taken.pop(victim, None)
        self.cache.close(victim.lease)
        victim.preempted()
        self.counters.preemptions += 1
        if self.on_gone is not None:
            self.on_gone(victim.request_id)

    def _requeue(self, preempted: list[Sequence]) -> None:
        if preempted:
            self.waiting = deque(sorted([*preempted, *self.waiting], key=_arrival))

    def _advance(
        self,
        sequence: Sequence,
        tokens: Seq[int],
        logprobs: Seq[TokenLogprob],
        num_accepted: int = 0,
        num_drafted: int = 0,
    ) -> TokenOutput:
        """Append chosen tokens as far as they are wanted, and see whether the last one ends it."""
        first = sequence.num_output_tokens == 0
        run = cut_run(sequence, tokens)
        token_ids = tuple(tokens[: run.num_tokens])
        for token in token_ids:
            sequence.append(token)
        accepted = min(num_accepted, run.num_tokens)
        self.counters.output_tokens += run.num_tokens
        if num_drafted:
            self._after_drafts(sequence, accepted, num_drafted)
        if run.reason is not None:
            self._retire(sequence, run.reason)
        return TokenOutput(
            request_id=sequence.request_id,
            token_ids=token_ids,
            logprobs=tuple(logprobs[: run.num_tokens]),
            prompt_logprobs=tuple(sequence.prompt_logprobs)
            if first and sequence.prompt_logprobs is not None
            else None,
            finish_reason=run.reason,
            stop_token_id=run.stop_id,
            num_cached_tokens=sequence.num_cached_tokens,
            num_preemptions=sequence.num_preemptions,
            num_accepted=accepted,
            num_rejected=num_drafted - accepted,
        )

    def _advance_one(
        self, sequence: Sequence, j: int, token: int, result: StepResult
    ) -> list[TokenOutput]:
        """The same of the one token that was sampled in place j, or its failure."""
        if j in result.failed:
            self._drop(sequence, FinishReason.ERROR, result.failed[j])
            return []
        logprob = result.logprobs.get(j)
        return [self._advance(sequence, (token,), () if logprob is None else (logprob,))]

    def _advance_run(
        self, sequence: Sequence, tree: DraftTree, verdict: Verdict
    ) -> list[TokenOutput]:
        """The same of what was accepted of drafts. One that failed behind some tokens ends with
        them: without drafts they would have gone out before."""
        if verdict.failed is None or verdict.tokens:
            output = self._advance(
                sequence, verdict.tokens, verdict.logprobs, verdict.num_accepted, tree.num_nodes
            )
            if verdict.failed is None or output.finish_reason is not None:
                return [output]
            self._retire(sequence, FinishReason.ERROR)
            return [replace(output, finish_reason=FinishReason.ERROR, error=verdict.failed)]
        self.counters.drafted_tokens += tree.num_nodes
        self._drop(sequence, FinishReason.ERROR, verdict.failed)
        return []

    def _after_drafts(self, sequence: Sequence, num_accepted: int, num_drafted: int) -> None:
        """The latents of accepted drafts lie in the cache. Those of rejected ones stand behind them
        and are overwritten before they are read; only accepted tokens make the key of a block."""
        self.counters.drafted_tokens += num_drafted
        self.counters.accepted_tokens += num_accepted
        end = sequence.num_computed_tokens = len(sequence.tokens) - 1
        assert sequence.lease is not None
        if end // self.cache.block_size > sequence.lease.num_committed:
            self.cache.commit(sequence.lease, sequence.tokens, end)

    def _retire(self, sequence: Sequence, reason: FinishReason) -> None:
        """Take a sequence out, wherever it is; its committed blocks stay cached."""
        sequence.finish_reason = reason
        del self._by_id[sequence.request_id]
        if sequence.lease is not None:
            self.running.remove(sequence)
            self.cache.close(sequence.lease)
            sequence.lease = None
        else:
            self.waiting.remove(sequence)
        if self.on_gone is not None:
            self.on_gone(sequence.request_id)
        if reason is FinishReason.ABORT:
            self.counters.aborted += 1
        else:
            self.counters.finished += 1

    def _drop(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        self._retire(sequence, reason)
        self._outbox.append(
            TokenOutput(
                request_id=sequence.request_id,
                token_ids=(),
                finish_reason=reason,
                num_cached_tokens=sequence.num_cached_tokens,
                num_preemptions=sequence.num_preemptions,
                error=error,
            )
        )


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival_index


def _end(sequence: Sequence, error: str) -> tuple[FinishReason, str | None]:
    return (sequence.aborted, None) if sequence.aborted else (FinishReason.ERROR, error)
