"""Engine: one rank's serving loop body. `step()` is the whole story.

    plan -> batch -> lockstep -> forward -> choose -> commit (-> draft)

What fails where: before the forward or after it a failure touches this rank's requests only, or is
said in the next vote, so that all ranks end at the same step. Inside the forward peers may wait in
a collective: in a group of ranks the engine raises EngineFailed at once and the process must exit,
which breaks the peers' collectives; alone it fails the step's requests and goes on.

Knows: scheduler, lockstep, runner. Knows nothing of sockets, text or how it was put together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import psutil
from torch import Tensor

from dispatch.base import PeerError
from dispatch.step_guard import StepGuard
from ep.group import EPGroup
from ep.placement import ExpertPlacement
from ep.rebalance import Ballot
from models.crossing import brought
from models.interface import ForwardOutput
from moeserve.batch import StepBatch
from moeserve.engine_report import load_report, rank_stats
from moeserve.errors import EngineFailed, NotReady, one_line
from moeserve.lockstep import Lockstep, PeerFailed, Phase, StepAgreement, Vote
from moeserve.plan import StepPlan, StepResult
from moeserve.rebalancing.rebalancer import Rebalancer
from moeserve.recorder import StepRecorder
from moeserve.request import FinishReason, Request, TokenOutput
from moeserve.runner import ModelRunner
from moeserve.scheduler import Scheduler
from moeserve.speculate.speculator import Speculator
from moeserve.tracing import StepTracer
from moeserve.wire import CacheEvents, RankStats
from moeserve.wire_experts import FromRank, LoadReport, PlacementInUse
from moeserve.wire_rebalance import Rebalance, RebalanceReport

MAX_FAILED_STEPS = 3  # in a row, alone: then it is not the requests' fault


class Engine:
    """info: what Ready tells the front end, and what of it changes later. kernel_choices: which
    libraries serve now, in words. settings: hash of what shapes collectives. plans_ahead: a step
    while the one before it runs."""

    plans_ahead = False

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        group: EPGroup,
        recorder: StepRecorder | None = None,
        placement: ExpertPlacement | None = None,
        settings: int = 0,
        info: dict[str, object] | None = None,
        speculator: Speculator | None = None,
    ) -> None:
        self.runner, self.scheduler, self.group = runner, scheduler, group
        self.speculator = speculator
        self.lockstep = Lockstep(group, 0 if speculator is None else speculator.num_columns)
        self.guard = StepGuard(group)
        self.recorder = recorder
        self.placement = placement
        self._info = info or {}
        self.kernel_choices: Callable[[], list[str]] | None = None
        self.settings = settings
        self.rebalancer: Rebalancer | None = None  # set where experts can move (`build`)
        self.tracer = runner.tracer = StepTracer(group.rank)
        self.stopped = False  # all ranks agreed: no step follows
        self.idle = True  # no rank had work in the last step
        self.num_steps = 0
        self.step_seconds_total = 0.0
        self.step_seconds_last = 0.0
        self._stop_asked = False
        self._broken: str | None = None
        self._refusals: list[RebalanceReport] = []
        self._told: ExpertPlacement | None = None  # the placement that was last reported
        self._failed_steps = 0
        self.process = psutil.Process()

    # -- requests ------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Queue a request for the next step. InvalidRequest, or NotReady while stopping."""
        if self._stop_asked:
            raise NotReady("the engine is stopping")
        self.scheduler.add(request)

    def abort(self, request_ids: Iterable[str], reason: FinishReason = FinishReason.ABORT) -> None:
        """End these requests; unknown ids (ended already) are no error. reason: as they count."""
        for request_id in request_ids:
            self.scheduler.abort(request_id, reason)

    def request_stop(self, drain: bool = True) -> None:
        """Vote for stopping once this rank has no work; drain False: drop the work now."""
        self._stop_asked = True
        if not drain:
            for sequence in [*self.scheduler.running, *self.scheduler.waiting]:
                self.scheduler.abort(sequence.request_id)

    def reset_prefix_cache(self) -> int:
        """Drop all idle cached blocks -> how many."""
        return self.scheduler.cache.tree.clear()

    def use_speculator(self, speculator: Speculator | None) -> None:
        """Draft with this one from the next step on, or not at all: on every rank between the same
        two steps, while no rank has work (bench)."""
        assert not self.has_work, "drafters change while there is no work"
        self.speculator = speculator
        self.scheduler.ahead = 0
        self.scheduler.on_gone = None if speculator is None else speculator.gone
        self.lockstep = self.lockstep.of_width(speculator.num_columns if speculator else 0)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    # -- the step ------------------------------------------------------------------------------

    def step(self) -> list[TokenOutput]:
        """One step of all ranks. Outputs are this rank's. EngineFailed, or StepBroken where a peer
        is the reason: no step can follow."""
        with self.guard:
            return self._step()

    def _step(self) -> list[TokenOutput]:
        start = time.perf_counter()
        plan, batch = self._prepare()
        prepared = time.perf_counter()
        try:
            agreed = self.lockstep.agree(self._vote(plan, batch.forward.total_context))
        except PeerFailed as error:
            raise (error if self._broken is None else EngineFailed(self._broken)) from None
        locked = time.perf_counter()
        self.stopped, self.idle = agreed.stop, not agreed.run
        if agreed.run:
            self._part("host", prepared - start)
            self._part("lockstep", locked - prepared)
        self.tracer.agreed(0 if agreed.stop else agreed.trace, agreed.run)
        self.tracer.span("schedule", start, prepared)
        self.tracer.span("lockstep", prepared, locked)
        if self.rebalancer is not None and not agreed.stop:
            self.rebalancer.advance(agreed)
            self.placement = self.rebalancer.placement
            if self.rebalancer.moving:
                self.tracer.span("rebalance", locked, time.perf_counter())
        if self.recorder is not None:
            self.recorder.agreed(0 if agreed.stop else agreed.recording)
        outputs = self._run(plan, batch, agreed) if agreed.run else []
        if agreed.run and self.speculator is not None:
            self.speculator.timed(time.perf_counter() - start)
        if self.tracer.on:
            self.tracer.end_step(agreed.step, plan.num_tokens, agreed.phase, start)
        return [*self.scheduler.take_outbox(), *outputs]

    def _run(self, plan: StepPlan, batch: StepBatch, agreed: StepAgreement) -> list[TokenOutput]:
        start = time.perf_counter()
        decode_only = agreed.phase is Phase.DECODE
        if self.recorder is not None:
            self.recorder.begin_step(plan, self.placement)
        if self.speculator is not None:
            self.speculator.agreed(agreed.drafting, agreed.max_tokens, decode_only)
        try:
            out = self.runner.forward(batch, agreed.max_tokens, decode_only, agreed.context)
        except Exception as error:  # whatever the model or the network raises
            if self.recorder is not None:
                self.recorder.drop_step()
            return self._forward_failed(plan, self.guard.explain(error, agreed.step))
        self.tracer.span("forward", start, time.perf_counter())
        speculator, answered = self.speculator, self._peers_answered()
        if answered and speculator is not None and speculator.drafts_late(plan):
            outputs = self._choose_late(speculator, plan, batch, out, agreed)
        else:
            result = self._choose(plan, batch, out) if answered else None
            outputs = None if result is None else self._commit(plan, result)
            if speculator is not None:
                self._draft(speculator, plan, out, result, agreed)
        seconds = time.perf_counter() - start
        if self.recorder is not None:  # whatever became of its tokens, the experts had them
            self.recorder.end_step(agreed.step, seconds)
        if outputs is None:
            return []
        self._failed_steps = 0
        self.num_steps += 1
        self.step_seconds_last = seconds
        self.step_seconds_total += seconds
        return outputs

    def _choose(self, plan: StepPlan, batch: StepBatch, out: ForwardOutput) -> StepResult | None:
        """What the step gives; None where its requests failed. Not collective."""
        start = time.perf_counter()
        try:
            result = self.runner.choose(plan, batch, out.logits)
        except Exception as error:  # only these requests are lost
            self.scheduler.fail_plan(plan, f"sampling failed: {one_line(error)}")
            return None
        chosen = time.perf_counter()
        self._part("sampling", chosen - start)
        self.tracer.span("sampling", start, chosen)
        return result

    def _commit(self, plan: StepPlan, result: StepResult) -> list[TokenOutput]:
        start = time.perf_counter()
        if self.speculator is not None:
            self.speculator.judged(plan, result)
        try:
            return self.scheduler.commit(plan, result)
        except Exception as error:  # said in the next vote
            self._broken = f"commit failed: {one_line(error)}"
            return []
        finally:
            committed = time.perf_counter()
            self._part("host", committed - start)
            self.tracer.span("commit", start, committed)

    def _draft(
        self,
        speculator: Speculator,
        plan: StepPlan,
        out: ForwardOutput,
        result: StepResult | None,
        agreed: StepAgreement,
    ) -> None:
        """Drafts for the next step. Where peers take part every rank does, whatever became of its
        requests; what fails inside it is a failed forward. Elsewhere it costs the drafts only."""
        start = time.perf_counter()
        if self._broken is not None:
            result = None
        try:
            speculator.draft(plan, out.hidden, result)
        except Exception as error:  # whatever a drafter or the network raises
            self._drafting_failed(speculator, plan, error, agreed)
        if speculator.depth:
            drafted = time.perf_counter()
            self._part("drafting", drafted - start)
            self.tracer.span("drafting", start, drafted)

    def _drafting_failed(
        self, speculator: Speculator, plan: StepPlan, error: Exception, agreed: StepAgreement
    ) -> None:
        if self.group.size > 1 and speculator.drafter.collective:
            if self.recorder is not None:
                self.recorder.drop_step()
            self._forward_failed(plan, self.guard.explain(error, agreed.step))
        speculator.failed(error)

    def _choose_late(
        self,
        speculator: Speculator,
        plan: StepPlan,
        batch: StepBatch,
        out: ForwardOutput,
        agreed: StepAgreement,
    ) -> list[TokenOutput] | None:
        """`_choose`, `_commit` and `_draft` where the device goes on by itself: it is waited for
        once, when drafts were asked for too."""
        start = time.perf_counter()
        try:
            asked = self.runner.ask(plan, batch, out.logits)
        except Exception as error:  # only these requests are lost
            self.scheduler.fail_plan(plan, f"sampling failed: {one_line(error)}")
            self._draft(speculator, plan, out, None, agreed)
            return None
        begun = time.perf_counter()
        drafts: list[Tensor] = []
        try:
            drafts = speculator.ask_late(plan, out.hidden, asked.late)
        except Exception as error:  # whatever a drafter or the network raises
            self._drafting_failed(speculator, plan, error, agreed)
        drafted = time.perf_counter()
        self.tracer.span("drafting", begun, drafted)
        result: StepResult | None = None
        host: list[Tensor] = []
        try:
            host = _brought(speculator, plan, asked.tensors, drafts)
            result = asked.told(host[: len(asked.tensors)])
        except Exception as error:
            self.scheduler.fail_plan(plan, f"sampling failed: {one_line(error)}")
        chosen = time.perf_counter()
        self.tracer.span("sampling", drafted, chosen)
        outputs = None if result is None else self._commit(plan, result)
        try:  # the rounds are over: what fails costs the drafts only
            known = None if self._broken is not None else result
            speculator.take_late(plan, known, host[len(asked.tensors) :])
        except Exception as error:
            speculator.failed(error)
        # The wait is for the rounds too.
        self._part("sampling", max(chosen - start - speculator.last_seconds, 0.0))
        self._part("drafting", speculator.last_seconds)
        return outputs

    def _part(self, name: str, seconds: float) -> None:
        """Beside what the model tells: host (plan, batch, commit), lockstep (waiting for the other
        ranks' votes), sampling."""
        if self.recorder is not None:
            self.recorder.part(name, seconds)

    def _peers_answered(self) -> bool:
        """False where the dispatcher left ranks out: the step's tokens would lack their experts.
        Others may not have seen it: it is said in the next vote."""
        try:
            self.runner.check_peers()
        except PeerError as error:
            self._broken = str(error)
            self.scheduler.fail_all(self._broken)
            return False
        return True

    def _prepare(self) -> tuple[StepPlan, StepBatch]:
        """Before the vote, so that a broken invariant can still be said in it."""
        if self._broken is None:
            try:
                plan = self.scheduler.schedule()
                return plan, self.runner.build(plan)
            except Exception as error:
                self._broken = f"scheduling failed: {one_line(error)}"
        return StepPlan(), self.runner.build(StepPlan())

    def _forward_failed(self, plan: StepPlan, error: Exception) -> list[TokenOutput]:
        reason = f"the forward pass failed: {one_line(error)}"
        self._failed_steps += 1
        if self.group.size > 1 or self._failed_steps >= MAX_FAILED_STEPS:
            self.scheduler.fail_all(reason)
            raise EngineFailed(reason) from error
        self.scheduler.fail_plan(plan, reason)
        return []

    def _vote(self, plan: StepPlan, context: int | None = None) -> Vote:
        return Vote(
            has_work=plan.num_tokens > 0,
            num_tokens=plan.num_tokens,
            num_sequences=len(plan.sequences),
            context=context or 0,
            phase=(Phase.DECODE if plan.num_decodes else Phase.IDLE)
            | (Phase.PREFILL if plan.num_prefill_tokens else Phase.IDLE),
            wants_stop=self._stop_asked,
            failed=self._broken is not None,
            placement_generation=0 if self.placement is None else self.placement.generation,
            settings=self.settings,
            recording=0 if self.recorder is None else self.recorder.wanted,
            rebalance=0 if self.rebalancer is None else self.rebalancer.number,
            ballot=Ballot() if self.rebalancer is None else self.rebalancer.ballot(),
            trace=self.tracer.wanted,
            drafting=() if self.speculator is None else self.speculator.offer(plan),
        )

    # -- rebalancing ---------------------------------------------------------------------------

    @property
    def is_moving(self) -> bool:
        """A rebalance is under way: it goes on with each step, also with those without work."""
        return self.rebalancer is not None and self.rebalancer.moving

    def ask_rebalance(self, wish: Rebalance) -> None:
        """Begin one at the next step (on rank 0); a report tells how it ended."""
        if self.rebalancer is not None:
            self.rebalancer.ask(wish)
            return
        alone = "one rank has nobody to move experts to"
        reason = (
            alone if self.group.size == 1 else "experts of this job cannot move (see its notes)"
        )
        self._refusals.append(RebalanceReport(self.group.rank, wish.ask, "refused", reason))

    def take_rebalance_reports(self) -> list[RebalanceReport]:
        """Answers to wishes since the last call."""
        if self.rebalancer is not None:
            return self.rebalancer.take_reports()
        reports, self._refusals = self._refusals, []
        return reports

    # -- expert load ---------------------------------------------------------------------------

    def start_recording(self, recording: int, interval_steps: int, max_steps: int = 0) -> None:
        """Record expert load from the step at which all ranks are ready to. See `StepRecorder`."""
        if self.recorder is not None:
            self.recorder.start_recording(recording, interval_steps, max_steps)

    def stop_recording(self, recording: int) -> None:
        if self.recorder is not None:
            self.recorder.stop_recording(recording)

    def take_load_reports(self) -> list[FromRank]:
        """What a recording has to say since the last call."""
        return [] if self.recorder is None else self.recorder.take_reports()

    def take_placement(self) -> PlacementInUse | None:
        """On rank 0: the placement in use, if it is another than at the last call."""
        placement = self.placement
        if self.group.rank != 0 or placement is None or placement is self._told:
            return None
        self._told = placement
        return PlacementInUse.of(self.group.rank, placement)

    def load_report(self, ask: int = 0) -> LoadReport:
        """Expert load of this rank's tokens up to now; of no layers where none is counted."""
        return load_report(self, ask)

    # -- what shows ----------------------------------------------------------------------------

    @property
    def failure(self) -> str | None:
        """Why this rank voted `failed`, if it did."""
        return self._broken

    def take_cache_events(self) -> CacheEvents | None:
        """Blocks that entered or left the prefix cache since the last call."""
        added, removed = self.scheduler.cache.tree.take_changes()
        if not added and not removed:
            return None
        return CacheEvents(rank=self.group.rank, added=added, removed=removed)

    @property
    def info(self) -> dict[str, object]:
        """As it is now; may be added to."""
        self._info["ahead"] = self.plans_ahead
        if self.kernel_choices is not None:
            self._info["kernel_choices"] = self.kernel_choices()
        graphs = self.runner.graphs
        self._info["graphs"] = None if graphs is None else graphs.report()
        return self._info

    def stats(self, with_load: bool = True) -> RankStats:
        return rank_stats(self, with_load)

    def close(self) -> None:
        """Give the dispatcher's buffers back; end what moves experts."""
        if self.rebalancer is not None:
            self.rebalancer.close()
        close = getattr(self.runner.model, "close", None)
        if close is not None:
            close()


def _brought(
    speculator: Speculator, plan: StepPlan, tokens: list[Tensor], drafts: list[Tensor]
) -> list[Tensor]:
    """On the host; the tokens' alone where both fail together, which costs the drafts."""
    try:
        return brought([*tokens, *drafts])
    except Exception as error:
        if not drafts:
            raise
        speculator.take_late(plan, None, [])
        speculator.failed(error)
        return brought(tokens)
