"""What rank 0 decides about a rebalance, on a thread of its own: whether to plan, what, and whether
it is worth moving; with the reasons as plain data.

Knows: summed load windows, the planner, the policy. Knows nothing of ranks, ballots or sockets.

Shape letters: S windows (oldest first), L layers, E logical experts, P physical slots.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ep.load import balancedness
from ep.migrate import MigrationPlan, keep_slots, plan_migration
from ep.placement import ExpertPlacement
from ep.rebalance import Cause, RebalancePolicy, keep_idle_layers, look, utilisation, weigh

IntArray = NDArray[np.int64]
# (loads [S, L, E], placement in use, options) -> another placement, and why, as plain data
Planner = Callable[
    [IntArray, ExpertPlacement, Mapping[str, Any]], tuple[ExpertPlacement, dict[str, Any]]
]


@dataclass(frozen=True)
class Question:
    """loads [S, L, E]: summed over ranks, the last one is now; what is judged is their sum.
    force, dry_run, options, table: as the operator said (`wire_rebalance.Rebalance`)."""

    loads: IntArray
    placement: ExpertPlacement
    dry_run: bool = False
    force: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    table: bytes = b""


@dataclass(frozen=True)
class Answer:
    """placement None: nothing is to be moved, for the reason `cause`. explanation: plain data."""

    cause: Cause
    placement: ExpertPlacement | None
    utilisation: float
    explanation: dict[str, Any]


class TableError(ValueError):
    """A placement that an operator gave does not fit this job."""


@dataclass(frozen=True)
class PlanMaker:
    """layer_bytes [L]: of one bundle. rate: bytes a second into a rank, None for no limit. options:
    of the planner, as configured."""

    planner: Planner
    policy: RebalancePolicy
    layer_bytes: Sequence[int]
    max_staging_bytes: int
    ranks_per_node: int
    rate: float | None
    options: Mapping[str, Any] = field(default_factory=dict)

    def migration(self, old: ExpertPlacement, new: ExpertPlacement) -> MigrationPlan:
        """The same on every rank."""
        return plan_migration(
            old,
            new,
            self.layer_bytes,
            max_staging_bytes=self.max_staging_bytes,
            ranks_per_node=self.ranks_per_node,
        )

    def answer_wish(self, question: Question) -> Answer:
        """As `answer`, but what an operator asked for and cannot be had is no failure: REFUSED,
        with the reason as `error`."""
        try:
            return self.answer(question)
        except ValueError as error:  # of the table, the planner's options, the staging memory
            now = utilisation(question.loads.sum(axis=0), question.placement)
            return Answer(Cause.REFUSED, None, now, {"error": str(error)})

    def answer(self, question: Question) -> Answer:
        """Raises what the planner raises, TableError and StagingTooSmall."""
        old, loads = question.placement, question.loads.sum(axis=0)
        now = utilisation(loads, old)
        said: dict[str, Any] = {
            "picks": int(loads.sum()),
            "utilisation_before": now,
            "balance_before": _balance(loads, old),
        }
        given = bool(question.table)
        if not question.force and not given:
            cause = look(loads, old, self.policy)
            if cause is not Cause.NONE:
                return Answer(cause, None, now, said)
        start = time.perf_counter()
        if given:
            new = _from_table(question.table, old)
        else:
            options = {**self.options, **question.options}
            new, why = self.planner(question.loads, old, options)
            said["planner"] = why
            new = keep_idle_layers(loads, old, new)
        new = keep_slots(old, new)
        said["plan_seconds"] = time.perf_counter() - start
        said |= {
            "utilisation_after": utilisation(loads, new),
            "balance_after": _balance(loads, new),
        }
        cause = weigh(loads, old, new, self.policy)
        if (question.force or given) and cause is not Cause.SAME:
            cause = Cause.NONE
        if cause is not Cause.NONE:
            return Answer(cause, None, now, said)
        said |= self._cost(self.migration(old, new))
        if question.dry_run:
            return Answer(Cause.DRY_RUN, None, now, said)
        return Answer(Cause.NONE, new, now, said)

    def _cost(self, moves: MigrationPlan) -> dict[str, Any]:
        most = int(moves.bytes_in.max())
        return {
            "moved_slots": moves.num_moved_slots,
            "moved_bytes": int(moves.bytes_in.sum()),
            "most_bytes_into_a_rank": most,
            "most_bytes_out_of_a_rank": int(moves.bytes_out.max()),
            "staging_bytes": int(moves.staging_bytes.max()),
            "batches": len(moves.batches),
            "layers": sum(len(b.layers) for b in moves.batches),
            "seconds_at_rate": most / self.rate if self.rate else None,
        }


def _balance(loads: IntArray, placement: ExpertPlacement) -> dict[str, float]:
    """Largest over mean rank load: of the mean and of the worst layer that has load."""
    layers = balancedness(loads, placement)[loads.sum(axis=1) > 0]
    return {
        "mean": float(layers.mean()) if len(layers) else 1.0,
        "worst": float(layers.max(initial=1.0)),
    }


def _from_table(table: bytes, old: ExpertPlacement) -> ExpertPlacement:
    shape = old.physical_to_logical.shape
    if len(table) != 4 * shape[0] * shape[1]:
        raise TableError(
            f"table: {len(table)} bytes; this job has {list(shape)} slots, which are "
            f"{4 * shape[0] * shape[1]} bytes of int32"
        )
    new = np.frombuffer(table, "<i4").reshape(shape).astype(np.int64)
    return ExpertPlacement(new, old.num_logical_experts, old.num_ranks)
