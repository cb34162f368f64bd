"""Asynchronous scheduling: the host plans step n + 1 while the device computes step n.

A step's tokens are not waited for. Its sequences go on with a stand-in for the token that nobody
knows yet; the next step's rows get it on the device (`known_on_device`), and once that step is
under way the host reads the tokens, tells them and sees who has ended. The row of a sequence that
had ended is computed in vain (`num_wasted_rows`). Tokens are those of steps one after the other.

Steps that need tokens on the host (penalties, log-probabilities of a prompt) are waited for at
once; there is no speculation beside it, which drafts from a step's tokens.

Knows scheduler and engine, whose parts it overrides. The rule of order, for step k: plan and launch
k; read k - 1 (`resolve`); count what k computes (`advance`). So what `advance` shares in the prefix
cache is always of known tokens.

Shape letters: T rows, O rows that tokens are chosen at.
"""

from __future__ import annotations

import time
from bisect import insort
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from models.crossing import packed, unpacked
from models.interface import ForwardOutput
from moeserve import sampler
from moeserve.batch import StepBatch
from moeserve.device.api import DeviceApi
from moeserve.engine import Engine
from moeserve.errors import one_line
from moeserve.lockstep import Phase, StepAgreement
from moeserve.plan import StepPlan, StepResult
from moeserve.request import FinishReason, TokenOutput
from moeserve.sampler import Sampled
from moeserve.scheduler import Scheduler
from moeserve.sequence import SamplingNeeds, Sequence

if TYPE_CHECKING:
    from moeserve.sampler_device import Choice
    from moeserve.speculate.speculator import Speculator

ON_HOST = SamplingNeeds.EDITED  # want earlier tokens


def stand_in(place: int) -> int:
    """For the token that the step under way chooses at its row `place` of O."""
    return -(place + 1)


def known_on_device(token_ids: Tensor, chosen: Tensor) -> Tensor:
    """token_ids [T] with stand-ins, chosen [O] int64: of the step before -> [T], all on the
    device, nothing asked."""
    places = (-token_ids - 1).clamp(min=0)
    return torch.where(token_ids < 0, chosen[places], token_ids)


class Chosen(Protocol):
    """tokens [O] int64 on the device. wait: when they are on the host too."""

    tokens: Tensor

    def wait(self) -> Sampled: ...


@dataclass
class AtOnce:
    """On CPUs, where nothing goes on by itself: chosen already, told later."""

    tokens: Tensor
    sampled: Sampled

    def wait(self) -> Sampled:
        return self.sampled


class OnTheWay:
    """What rows chose, copied to pinned memory behind the step's kernels."""

    def __init__(self, api: DeviceApi, choice: Choice) -> None:
        self.tokens = choice.tokens
        self._choice = choice
        there = packed(choice.tensors)
        self._host = api.pinned(there.nbytes)
        self._host.copy_(there, non_blocking=True)
        self._event = api.event()
        self._event.record()

    def wait(self) -> Sampled:
        self._event.wait()
        return self._choice.sampled(unpacked(self._host, self._choice.tensors))


def choose_later(logits: Tensor, members: list[Sequence], api: DeviceApi | None) -> Chosen:
    """logits [O, V] of rows none of which is ON_HOST."""
    if logits.device.type != "cuda" or api is None:
        sampled = sampler.sample(logits, members)
        return AtOnce(torch.tensor(sampled.token_ids, dtype=torch.int64), sampled)
    from moeserve.sampler_device import choose  # has kernels

    return OnTheWay(api, choose(logits, members))


# -- the scheduler's part -----------------------------------------------------------------------


class AheadScheduler(Scheduler):
    """`commit` in two: `advance` when a step is under way, `resolve` when its tokens are known."""

    _hiding = False
    num_wasted_rows = 0

    @property
    def has_work(self) -> bool:
        return not self._hiding and bool(self.running or self.waiting)

    def schedule(self) -> StepPlan:
        """As ever, without those whose last token is under way: they get no further one."""
        full = [s for s in self.running if _is_full(s)]
        if not full:
            self._hiding = any(s.tokens[-1] < 0 for s in self.running)
            try:
                return super().schedule()
            finally:
                self._hiding = False
        limits = self.limits
        self.running = [s for s in self.running if not _is_full(s)]
        self.limits = replace(limits, max_num_sequences=limits.max_num_sequences - len(full))
        self._hiding = True  # an empty plan is one that waits for tokens
        try:
            return super().schedule()
        finally:
            self._hiding, self.limits = False, limits
            for sequence in full:
                insort(self.running, sequence, key=lambda s: s.arrival_index)

    def advance(self, plan: StepPlan) -> None:
        """The step is under way: count what it computes, share full blocks, and let those that get
        a token go on with a stand-in."""
        if not plan.sequences:
            return
        assert plan is self._in_flight, "advance of another plan than the last scheduled"
        self._in_flight = None
        size = self.cache.block_size
        for i, (sequence, start) in enumerate(zip(plan.sequences, plan.starts, strict=True)):
            if sequence.finish_reason is not None:
                self.num_wasted_rows += plan.counts[i]
                continue
            end = sequence.num_computed_tokens = start + plan.counts[i]
            if start < sequence.num_prompt_tokens:
                computed = min(end, sequence.num_prompt_tokens) - start
                self.counters.computed_prompt_tokens += computed
            assert sequence.lease is not None
            if end // size > sequence.lease.num_committed:
                self.cache.commit(sequence.lease, sequence.tokens, end)
        for j, i in enumerate(plan.sampled):
            if plan.sequences[i].finish_reason is None:
                plan.sequences[i].tokens.append(stand_in(j))

    def resolve(self, plan: StepPlan, result: StepResult) -> list[TokenOutput]:
        """What became of a step that was advanced: tokens for stand-ins, ends for what has ended.
        Before the next step's `advance`."""
        outputs: list[TokenOutput] = []
        for sequence in plan.sequences:
            if sequence.finish_reason is None and sequence.prompt_logprobs is not None:
                new = result.prompt_logprobs.get(sequence.request_id)
                sequence.prompt_logprobs.extend(new or ())
        for j, (i, token) in enumerate(zip(plan.sampled, result.token_ids, strict=True)):
            sequence = plan.sequences[i]
            if sequence.finish_reason is not None:
                continue
            last = sequence.tokens.pop()
            assert last == stand_in(j), "a token is resolved that was not under way"
            if sequence.aborted:
                continue
            outputs += self._advance_one(sequence, j, token, result)
        for sequence in plan.sequences:
            if sequence.aborted and sequence.finish_reason is None:
                self._drop(sequence, sequence.aborted)
        return outputs

    def fail_plan(self, plan: StepPlan, reason: str) -> None:
        going = [s for s in plan.sequences if s.finish_reason is None]
        if self._in_flight is plan:
            self._in_flight = None
        for sequence in going:
            if sequence.aborted:
                self._drop(sequence, sequence.aborted)
            else:
                self._drop(sequence, FinishReason.ERROR, reason)


def _is_full(sequence: Sequence) -> bool:
    """Its last token is under way."""
    return sequence.tokens[-1] < 0 and sequence.num_output_tokens >= sequence.max_output_tokens


# -- the engine's part --------------------------------------------------------------------------


@dataclass
class _Late:
    """A step under way: advanced, its tokens not read."""

    plan: StepPlan
    chosen: Chosen


class AheadEngine(Engine):
    """The engine with an `AheadScheduler`. A step gives the outputs of the one before it."""

    plans_ahead = True
    api: DeviceApi | None = None  # on CPUs nothing is on its way

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        assert isinstance(self.scheduler, AheadScheduler) and self.speculator is None
        self._ahead: AheadScheduler = self.scheduler
        self._late: _Late | None = None
        self._early: list[TokenOutput] = []

    def use_speculator(self, speculator: Speculator | None) -> None:
        assert speculator is None, "who plans ahead knows no tokens to draft from"

    @property
    def has_work(self) -> bool:
        return self._late is not None or self.scheduler.has_work

    def _step(self) -> list[TokenOutput]:
        outputs = super()._step()
        early, self._early = self._early, []
        return [*early, *outputs]

    def _prepare(self) -> tuple[StepPlan, StepBatch]:
        plan, batch = super()._prepare()
        if plan.num_tokens or self._late is None:
            return plan, batch
        # Nothing can go on before the tokens are known: this is the one time they are waited for.
        self._settle()
        return super()._prepare()

    def _run(self, plan: StepPlan, batch: StepBatch, agreed: StepAgreement) -> list[TokenOutput]:
        start = time.perf_counter()
        decode_only = agreed.phase is Phase.DECODE
        if self.recorder is not None:
            self.recorder.begin_step(plan, self.placement)
        late = self._late
        if late is not None and late.plan.sampled:
            ids = known_on_device(batch.forward.token_ids, late.chosen.tokens)
            batch = replace(batch, forward=replace(batch.forward, token_ids=ids))
        try:
            out = self.runner.forward(batch, agreed.max_tokens, decode_only, agreed.context)
        except Exception as error:  # whatever the model or the network raises
            if self.recorder is not None:
                self.recorder.drop_step()
            self._settle()
            return self._forward_failed(plan, self.guard.explain(error, agreed.step))
        self.tracer.span("forward", start, time.perf_counter())
        outputs = self._after(plan, batch, out)
        seconds = time.perf_counter() - start
        if self.recorder is not None:
            self.recorder.end_step(agreed.step, seconds)
        self._failed_steps = 0
        self.num_steps += 1
        self.step_seconds_last = seconds
        self.step_seconds_total += seconds
        return outputs

    def _after(self, plan: StepPlan, batch: StepBatch, out: ForwardOutput) -> list[TokenOutput]:
        """Have the step's tokens chosen, read those of the step before."""
        if not self._peers_answered():
            self._settle()
            return []
        members = [plan.sequences[i] for i in plan.sampled]
        on_host = any(s.needs & ON_HOST for s in members) or bool(batch.prompt_rows)
        chosen: Chosen | None = None
        try:
            if not on_host:
                with torch.inference_mode():
                    chosen = choose_later(out.logits[: batch.num_chosen], members, self.api)
        except Exception as error:  # only these requests are lost
            self._settle()
            self._ahead.fail_plan(plan, f"sampling failed: {one_line(error)}")
            return []
        self._settle()
        try:
            if chosen is None:
                result = self._choose(plan, batch, out)
                if result is None:
                    return []
                self._ahead.advance(plan)
                return self._ahead.resolve(plan, result)
            self._ahead.advance(plan)
            self._late = _Late(plan, chosen) if plan.sequences else None
        except Exception as error:  # said in the next vote
            self._broken = f"commit failed: {one_line(error)}"
        return []

    def _settle(self) -> None:
        """Read the tokens of the step under way, tell them, end what has ended. What is told goes
        out before all else of this step: a request may end in it."""
        late, self._late = self._late, None
        if late is None:
            return
        start = time.perf_counter()
        try:
            sampled = late.chosen.wait()
            self._part("sampling", time.perf_counter() - start)
            result = StepResult(sampled.token_ids, sampled.logprobs, {}, sampled.failed)
            self._early += self._ahead.resolve(late.plan, result)
        except Exception as error:  # said in the next vote
            self._broken = f"reading a step's tokens failed: {one_line(error)}"
