"""Rebalancer: one rank's part in moving experts while the engine serves.

Once a step the engine asks for a `ballot`, which travels in its vote, and calls `advance` with what
all ranks agreed; `ep.rebalance` says from that, on all ranks alike, what is to be done now. Work
runs on threads (planning on rank 0, working out moves, fetching, making routing tables); on the
engine's thread there are two small collectives a rebalance (sum the load windows; hand on the
plan) and one copy a batch from staging buffers into slots.

Knows: the group, the model's slots, the transfer, deadlines, what is reported. Knows nothing of
requests, of how a plan is chosen (`plan`) or of sockets.

Shape letters: S windows, L layers, E logical experts, P physical slots, G ranks.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from dispatch.route import RoutingTable
from ep.group import EPGroup
from ep.migrate import MigrationPlan, StagingTooSmall
from ep.placement import ExpertPlacement
from ep.rebalance import (
    Ballot,
    Cause,
    Do,
    Order,
    Result,
    Say,
    Stage,
    advance,
    begin,
)
from ep.transfer import Staging, Transfer, TransferLimits, Trouble, Wanted, staging_buffer
from moeserve.errors import one_line
from moeserve.lockstep import StepAgreement
from moeserve.rebalancing.ledger import RebalanceLedger
from moeserve.rebalancing.plan import Answer, PlanMaker, Question
from moeserve.wire_rebalance import Rebalance, RebalanceReport, RebalanceStats

IntArray = NDArray[np.int64]


class Movable(Protocol):
    """What a model offers so that its experts can move (`models.deepseek.model.DeepSeekModel`)."""

    def expert_weights(self) -> list[Any]: ...

    def routing_tables(
        self, placement: ExpertPlacement, rows: Iterable[int]
    ) -> dict[int, RoutingTable]: ...

    def adopt_placement(
        self, placement: ExpertPlacement, tables: Mapping[int, RoutingTable] | None = None
    ) -> None: ...


@dataclass(frozen=True)
class RebalanceOptions:
    """interval_steps: 0 leaves it to operators. windows: how many of the last ones are planned for.
    deadline: seconds of each stage, and of each batch,
    after which all give up. silence: seconds that a source may take to answer. rate: bytes a second
    into a rank."""

    interval_steps: int = 0
    windows: int = 1
    deadline: float = 60.0
    silence: float = 10.0
    rate: float | None = None


class _Job:
    """A function on a thread of its own: its result or what it raised, once `ended`."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.result: Any = None
        self.error: Exception | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run, name="rebalance", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._work()
        except Exception as error:
            self.error = error

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()


class Rebalancer:
    """window(): this rank's load [L, E] int64 of the last steps. say: where rank 0's lines go, one
    for each rebalance that did more than look (and one for each rank that knows why it failed)."""

    def __init__(
        self,
        group: EPGroup,
        model: Movable,
        placement: ExpertPlacement,
        window: Callable[[], IntArray],
        transfer: Transfer,
        maker: PlanMaker,
        options: RebalanceOptions,
        say: Callable[[str], None],
    ) -> None:
        assert group.size > 1, "one rank has nobody to move experts to"
        self.group, self.placement = group, placement
        self._model, self._window, self._transfer = model, window, transfer
        self._maker, self._options = maker, options
        self._slots = model.expert_weights()
        self._at = begin(options.interval_steps)
        self._stage_since = time.monotonic()
        self._begun = 0.0
        # of the rebalance that is under way
        self._wish: Rebalance | None = None  # rank 0: an operator's
        self._asked = False  # rank 0: it has not been begun yet
        self._answer: Answer | None = None  # rank 0
        self._moves: MigrationPlan | None = None
        self._job: _Job | None = None
        self._staging: Staging | None = None
        self._buffer: Tensor | None = None
        self._failure = ""  # what this rank knows of it
        # what is reported
        self._reports: list[RebalanceReport] = []
        self._windows: deque[IntArray] = deque(maxlen=options.windows)
        self._ledger = RebalanceLedger(group.rank, say)

    # -- what the engine calls each step -------------------------------------------------------

    @property
    def number(self) -> int:
        """What ranks must have alike before each step."""
        return self._at.number

    @property
    def moving(self) -> bool:
        """A rebalance is under way: steps without work are worth having soon."""
        return self._at.stage is not Stage.IDLE

    def ballot(self) -> Ballot:
        """What this rank has to say in its next vote."""
        stage = self._at.stage
        if stage is Stage.IDLE:
            return Ballot(Say.ASK) if self._asked else Ballot()
        said = self._progress(stage)
        if said.say is Say.NOTHING and self._seconds_in_stage() > 1.25 * self._options.deadline:
            return self._fail(Cause.NO_PROGRESS, f"{stage.name.lower()} took too long")
        return said

    def advance(self, agreed: StepAgreement) -> None:
        """Do what all ranks do now. Some of it is collective: called on every rank after each
        agreement, before the forward pass."""
        ballots = agreed.ballots or (Ballot(),) * self.group.size
        before = self._at
        self._at, orders = advance(
            before,
            ballots,
            ran=agreed.run,
            num_batches=0 if self._moves is None else len(self._moves.batches),
            interval_steps=self._options.interval_steps,
        )
        if self._at.number != before.number:
            self._stage_since = time.monotonic()
        for order in orders:
            match order.do:
                case Do.GATHER:
                    self._gather()
                case Do.RECEIVE:
                    self._receive()
                case Do.FETCH:
                    self._fetch(order.batch)
                case Do.SWITCH:
                    self._switch(order.batch)
                case Do.END:
                    self._end(order)

    # -- what operators and reports need -------------------------------------------------------

    def ask(self, wish: Rebalance) -> None:
        """Rank 0: begin at the next step. Answered by a report, at once if refused."""
        if self.moving or self._asked:
            self._report(wish, "refused", "a rebalance is under way; wait until it has ended")
        elif self.group.rank != 0:
            self._report(wish, "refused", "only rank 0 takes such wishes")
        else:
            self._wish, self._asked = wish, True

    def take_reports(self) -> list[RebalanceReport]:
        reports, self._reports = self._reports, []
        return reports

    def stats(self) -> RebalanceStats:
        ledger = self._ledger
        return RebalanceStats(
            enabled=self._options.interval_steps > 0,
            state=self._at.stage.name.lower(),
            seconds_in_state=self._seconds_in_stage(),
            generation=self.placement.generation,
            batch=self._at.batch,
            num_batches=0 if self._moves is None else len(self._moves.batches),
            done=ledger.counts[Result.DONE],
            nothing=ledger.counts[Result.NOTHING],
            abandoned=ledger.counts[Result.ABANDONED],
            moved_slots=ledger.moved_slots,
            moved_bytes=ledger.moved_bytes,
            seconds=ledger.seconds,
            gather_seconds=ledger.gather_seconds,
            switch_seconds=ledger.switch_seconds,
            switch_seconds_most=ledger.switch_seconds_most,
            refused_requests=self._transfer.num_refused,
            last_result=ledger.last_result,
            last_reason=ledger.last_reason,
            last_seconds=ledger.last_seconds,
            utilisation=ledger.utilisation,
            utilisation_before=ledger.utilisation_before,
            utilisation_after=ledger.utilisation_after,
            look_reason=ledger.look_reason,
        )

    def close(self) -> None:
        if self._staging is not None:
            self._staging.cancel()
        self._transfer.close()

    # -- ballots -------------------------------------------------------------------------------

    def _progress(self, stage: Stage) -> Ballot:
        if stage is Stage.MOVING:
            return self._progress_of_batch()
        job = self._job
        if job is None or not job.ended:
            return Ballot()
        if job.error is not None:
            small = isinstance(job.error, StagingTooSmall)
            return self._fail(Cause.STAGING if small else Cause.PLANNER, one_line(job.error))
        if stage is Stage.CHECKING:
            self._moves = job.result
            return Ballot(Say.CHECKED, job.result.digest)
        self._answer = answer = job.result
        if answer.placement is None:
            return Ballot(Say.NO_PLAN, cause=answer.cause)
        return Ballot(Say.PLAN)

    def _progress_of_batch(self) -> Ballot:
        assert self._staging is not None and self._job is not None
        trouble = self._staging.trouble
        if trouble is not Trouble.NONE:
            return self._fail(Cause(trouble.value), self._staging.reason)
        if self._job.error is not None:
            return self._fail(Cause.BROKEN, one_line(self._job.error))
        if self._staging.ready and self._job.ended:
            return Ballot(Say.READY, self._at.batch)
        return Ballot()

    def _fail(self, cause: Cause, text: str) -> Ballot:
        self._failure = text
        return Ballot(Say.FAILED, cause=cause)

    def _seconds_in_stage(self) -> float:
        return time.monotonic() - self._stage_since

    # -- orders --------------------------------------------------------------------------------

    def _gather(self) -> None:
        """Collective. Sum the windows; rank 0 begins to think."""
        self._begun = start = time.monotonic()
        self._asked = False
        loads = torch.from_numpy(self._window())  # [L, E] int64, an own copy
        dist.all_reduce(loads, group=self.group.cpu_group)
        self._ledger.gather_seconds += time.monotonic() - start
        if self.group.rank != 0:
            return
        self._windows.append(loads.numpy())
        wish = self._wish or Rebalance(ask=0)
        question = Question(
            np.stack(self._windows),
            self.placement,
            dry_run=wish.dry_run,
            force=wish.force,
            options=wish.options,
            table=wish.table,
        )
        think = self._maker.answer if self._wish is None else self._maker.answer_wish
        self._job = _Job(lambda: think(question))

    def _receive(self) -> None:
        """Collective. Rank 0's table to all, who work out the moves."""
        table = torch.empty(self.placement.physical_to_logical.shape, dtype=torch.int32)  # [L, P]
        if self.group.rank == 0:
            assert self._answer is not None and self._answer.placement is not None
            table.copy_(torch.from_numpy(self._answer.placement.physical_to_logical.copy()))
        dist.broadcast(table, group=self.group.cpu_group, group_src=0)
        old = self.placement

        def work_out() -> MigrationPlan:
            new = ExpertPlacement(table.numpy(), old.num_logical_experts, old.num_ranks)
            moves = self._maker.migration(old, new)
            assert moves.batches, "a plan that moves nothing"
            _ = moves.digest, moves.staging_bytes  # cached: not for the engine's thread to compute
            return moves

        self._job = _Job(work_out)

    def _fetch(self, batch: int) -> None:
        moves, rank = self._moves, self.group.rank
        assert moves is not None
        if self._buffer is None:
            self._buffer = staging_buffer(int(moves.staging_bytes[rank]))
        layers = moves.batches[batch].layers
        self._transfer.serve(self._at.plan, batch, layers)
        local = self.placement.num_local_experts
        wanted = [
            Wanted(
                name=(move.layer, move.expert),
                layer=move.layer,
                source=moves.rank_of(move.source),
                slot=move.source % local,
                num_bytes=moves.layer_bytes[move.layer],
            )
            for move in moves.moves_to(rank, batch)
        ]
        options = self._options
        self._staging = self._transfer.fetch(
            self._at.plan,
            batch,
            wanted,
            self._buffer,
            TransferLimits(options.deadline, options.silence, options.rate),
        )

        def prepare() -> tuple[ExpertPlacement, dict[int, RoutingTable]]:
            after = moves.placement_after(batch + 1)
            return after, self._model.routing_tables(after, layers)

        self._job = _Job(prepare)

    def _switch(self, batch: int) -> None:
        """From staging into slots: every rank before the same forward pass."""
        moves, staging, job = self._moves, self._staging, self._job
        assert moves is not None and staging is not None and job is not None
        start = time.monotonic()
        local = self.placement.num_local_experts
        for move in moves.moves_to(self.group.rank, batch):
            bundle = staging.bundle((move.layer, move.expert))
            for slot in move.slots:
                self._slots[move.layer].bundle(slot % local).copy_from(bundle)
        self.placement, tables = job.result
        self._model.adopt_placement(self.placement, tables)
        self._ledger.switched(moves, batch, time.monotonic() - start)

    def _end(self, order: Order) -> None:
        reason = self._ledger.ended(
            self._at.plan,
            order,
            time.monotonic() - self._begun,
            self.placement.generation,
            self._answer,
            self._failure,
            dry_run=self._wish is not None and self._wish.dry_run,
        )
        if self._wish is not None:
            said = {} if self._answer is None else self._answer.explanation
            if order.cause is Cause.REFUSED:
                self._report(self._wish, "refused", str(said["error"]))
            else:
                self._report(self._wish, order.result.value, reason, said)
        if self._staging is not None:
            self._staging.cancel()
        self._transfer.stop_serving(self._at.plan)
        self._wish = self._answer = self._moves = None
        self._job = self._staging = self._buffer = None
        self._failure = ""

    def _report(
        self, wish: Rebalance, result: str, reason: str, said: dict[str, Any] | None = None
    ) -> None:
        self._reports.append(
            RebalanceReport(self.group.rank, wish.ask, result, reason, dict(said or {}))
        )
