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

Knows nothing of ranks, models or sampling.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass

from moeserve.admission import check_request
from moeserve.cache import BlockCache, Node
from moeserve.errors import InvalidRequest
from moeserve.plan import StepPlan, StepResult
from moeserve.request import FinishReason, Request, TokenLogprob, TokenOutput
from moeserve.sequence import Sequence

LOOK_AHEAD = 16  # waiting sequences that a step looks at before it looks no further


@dataclass(frozen=True)
class ScheduleLimits:
    """max_model_len positions of a sequence, prompt and output; the pool must hold one such."""

    max_num_sequences: int
    token_budget: int
    chunk_size: int | None
    max_model_len: int
    vocab_size: int | None = None  # None: token ids are not checked
    eos_ids: frozenset[int] = frozenset()
    seed: int = 0


@dataclass
class ScheduleCounters:
    """Totals since start. prompt_tokens: of sequences begun, cached_tokens: those of them found in
    the prefix cache at the beginning."""

    prompt_tokens: int = 0
    computed_prompt_tokens: int = 0  # prompt positions computed, those of recomputing included
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    finished: int = 0
    aborted: int = 0


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
        """Unfilled positions of running sequences' blocks: less than a block each."""
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
        draft: dict[Sequence, int] = {}  # tokens a sequence computes, in the order decided
        budget = self.limits.token_budget
        chunk = self.limits.chunk_size or budget
        preempted: list[Sequence] = []
        running = self.running

        i = 0
        while i < len(running):  # decodes; preempting takes from the list's end
            sequence = running[i]
            i += 1
            is_decode = len(sequence.tokens) - sequence.num_computed_tokens == 1
            if is_decode and self._room_for_one(sequence, draft, preempted):
                draft[sequence] = 1
                budget -= 1
        i = 0
        while i < len(running) and budget > 0:  # prefills that have begun
            sequence = running[i]
            i += 1
            remaining = sequence.num_remaining_tokens
            if remaining > 1 and self._room_for_one(sequence, draft, preempted):
                if preempted:  # perhaps decodes that had their token already
                    budget = self.limits.token_budget - sum(draft.values())
                count = min(remaining, chunk, budget, self._reach(sequence))
                self._take(sequence, count, draft)
                budget -= count
        i = 0
        while i < min(len(self.waiting), LOOK_AHEAD) and budget > 0 and not preempted:
            if len(running) >= self.limits.max_num_sequences:
                break
            sequence = self.waiting[i]
            matched = self._match(sequence)
            if self._is_being_computed(sequence, len(matched), draft):
                i += 1  # others need not wait for what only this one waits for
                continue
            if not self._admit(sequence, matched):
                break
            del self.waiting[i]
            insort(running, sequence, key=_arrival)
            count = min(sequence.num_remaining_tokens, chunk, budget)
            self._take(sequence, count, draft)
            budget -= count

        assert len(running) <= self.limits.token_budget
        self._requeue(preempted)
        plan = _plan(draft, preempted)
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
        for sequence, start, count in zip(plan.sequences, plan.starts, plan.counts, strict=True):
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
            if j in result.failed:
                self._drop(sequence, FinishReason.ERROR, result.failed[j])
                continue
            outputs.append(self._advance(sequence, token, result.logprobs.get(j)))
        for sequence in plan.sequences:
            if sequence.aborted:
                self._drop(sequence, sequence.aborted)
        return outputs

    # -- parts ---------------------------------------------------------------------------------

    def _room_for_one(
        self, sequence: Sequence, draft: dict[Sequence, int], preempted: list[Sequence]
    ) -> bool:
        """Take a block for the next position if it needs one, preempting later arrivals."""
        lease = sequence.lease
        assert lease is not None
        position = sequence.num_computed_tokens
        if position < len(lease.table.ids) * self.cache.block_size:
            return True
        while not self.cache.num_available:
            victim = self.running[-1]
            if victim is sequence:
                return False  # it keeps what it has and waits: older ones may still preempt it
            self._preempt(victim, draft)
            preempted.append(victim)
        self.cache.grow(lease, position + 1)
        return True

    def _reach(self, sequence: Sequence) -> int:
        """Positions that own blocks and those at hand have place for."""
        assert sequence.lease is not None
        blocks = len(sequence.lease.table.ids) + self.cache.num_available
        return blocks * self.cache.block_size - sequence.num_computed_tokens

    def _take(self, sequence: Sequence, count: int, draft: dict[Sequence, int]) -> None:
        assert count > 0 and sequence.lease is not None
        self.cache.grow(sequence.lease, sequence.num_computed_tokens + count)
        draft[sequence] = count

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

    def _is_being_computed(
        self, sequence: Sequence, num_blocks: int, draft: dict[Sequence, int]
    ) -> bool:
        """Whether another sequence completes the block after these `num_blocks` in this step: then
        the next step finds it in the tree."""
        end = (num_blocks + 1) * self.cache.block_size
        if not self.cache.prefix_cache or end >= len(sequence.tokens):
            return False
        if sequence.wants_prompt_logprobs:  # takes no hit
            return False
        wanted = sequence.tokens[:end]
        return any(
            other.num_computed_tokens < end <= other.num_computed_tokens + count
            and other.tokens[:end] == wanted
            and other.request.cache_salt == sequence.request.cache_salt
            for other, count in draft.items()
        )

    def _preempt(self, victim: Sequence, draft: dict[Sequence, int]) -> None:
        assert victim is self.running[-1] and victim.lease is not None
        self.running.pop()
        draft.pop(victim, None)
        self.cache.close(victim.lease)
        victim.preempted()
        self.counters.preemptions += 1

    def _requeue(self, preempted: list[Sequence]) -> None:
        if preempted:
            self.waiting = deque(sorted([*preempted, *self.waiting], key=_arrival))

    def _advance(self, sequence: Sequence, token: int, logprob: TokenLogprob | None) -> TokenOutput:
        """Append a chosen token and see whether it is the last."""
        first = sequence.num_output_tokens == 0
        reason: FinishReason | None = None
        stop_id: int | None = None
        token_ids: tuple[int, ...] = ()
        if sequence.max_output_tokens > 0:
            sequence.append(token)
            token_ids = (token,)
            self.counters.output_tokens += 1
            if token in sequence.stop_ids:
                reason, stop_id = FinishReason.STOP, token
        if reason is None and sequence.num_output_tokens >= sequence.max_output_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._retire(sequence, reason)
        return TokenOutput(
            request_id=sequence.request_id,
            token_ids=token_ids,
            logprobs=() if logprob is None or not token_ids else (logprob,),
            prompt_logprobs=tuple(sequence.prompt_logprobs)
            if first and sequence.prompt_logprobs is not None
            else None,
            finish_reason=reason,
            stop_token_id=stop_id,
            num_cached_tokens=sequence.num_cached_tokens,
            num_preemptions=sequence.num_preemptions,
        )

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


def _plan(draft: dict[Sequence, int], preempted: list[Sequence]) -> StepPlan:
    plan = StepPlan(
        sequences=list(draft),
        counts=list(draft.values()),
        preempted=[s.request_id for s in preempted],
    )
    for i, (sequence, count) in enumerate(draft.items()):
        start = sequence.num_computed_tokens
        assert sequence.lease is not None
        plan.starts.append(start)
        plan.rows.append(sequence.lease.table.row)
        plan.num_tokens += count
        if start + count == len(sequence.tokens):
            plan.sampled.append(i)
            if count == 1 and start >= sequence.num_prompt_tokens:
                plan.decodes.append(i)
    return plan
