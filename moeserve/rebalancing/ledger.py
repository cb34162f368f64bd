"""What became of rebalances, for reports: counters since start, the last result, one line each.

Knows: orders that ended a rebalance, what rank 0's plan said. Knows nothing of how it went on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ep.migrate import MigrationPlan
from ep.rebalance import CAUSE_TEXT, Cause, Order, Result
from moeserve.rebalancing.plan import Answer


@dataclass
class RebalanceLedger:
    """say: where lines go. Rank 0 tells of the whole; the rank that failed, what it alone knows."""

    rank: int
    say: Callable[[str], None]
    counts: dict[Result, int] = field(default_factory=lambda: dict.fromkeys(Result, 0))
    moved_slots: int = 0
    moved_bytes: int = 0
    seconds: float = 0.0
    gather_seconds: float = 0.0
    switch_seconds: float = 0.0
    switch_seconds_most: float = 0.0
    last_result: str = ""
    last_reason: str = ""
    last_seconds: float = 0.0
    look_reason: str = ""
    utilisation: float = 0.0
    utilisation_before: float = 0.0
    utilisation_after: float = 0.0

    def switched(self, moves: MigrationPlan, batch: int, seconds: float) -> None:
        """A batch is in use: seconds is what the step waited for it."""
        for move in moves.batches[batch].moves:
            self.moved_slots += len(move.slots)
            if moves.rank_of(move.source) != moves.rank_of(move.slots[0]):
                self.moved_bytes += moves.layer_bytes[move.layer]
        self.switch_seconds += seconds
        self.switch_seconds_most = max(self.switch_seconds_most, seconds)

    def ended(
        self,
        plan: int,
        order: Order,
        seconds: float,
        generation: int,
        answer: Answer | None,
        failure: str,
        dry_run: bool = False,
    ) -> str:
        """Take down how a rebalance ended -> the reason. answer: rank 0's; failure: what this rank
        knows of its own; dry_run: it was only to be said what would be done."""
        reason = CAUSE_TEXT[order.cause]
        if order.result is Result.ABANDONED and order.cause is not Cause.DIFFERS:
            reason = f"rank {order.rank}: {reason}"
        if failure and order.result is Result.ABANDONED:
            reason = f"{reason} ({failure})"
        if answer is not None:
            self.utilisation = answer.utilisation
        asked_only = dry_run or order.cause in (Cause.DRY_RUN, Cause.REFUSED)
        if asked_only and order.result is Result.NOTHING:
            return reason  # no look of the job's: it says nothing of whether there is much to move
        self.counts[order.result] += 1
        self.seconds += seconds
        if order.result is Result.NOTHING:
            self.look_reason = reason
            return reason
        self.last_result, self.last_reason = order.result.value, reason
        self.last_seconds = seconds
        if answer is not None:
            self.utilisation_before = answer.utilisation
            self.utilisation_after = answer.explanation["utilisation_after"]
        if self.rank == 0:
            self.say(self._line(plan, order, seconds, generation, answer, reason))
        elif order.result is Result.ABANDONED and order.rank == self.rank:
            self.say(f"rebalance {plan}: {reason}")
        return reason

    def _line(
        self,
        plan: int,
        order: Order,
        seconds: float,
        generation: int,
        answer: Answer | None,
        reason: str,
    ) -> str:
        if order.result is Result.ABANDONED:
            switched = f"{order.batch} batches of layers" if order.batch else "no layer"
            return (
                f"rebalance {plan} abandoned after {seconds:.2f} s: {reason}; serving on, "
                f"{switched} switched, placement generation {generation}"
            )
        assert answer is not None
        said = answer.explanation
        return (
            f"rebalance {plan} done in {seconds:.2f} s: {said['moved_slots']} slots, "
            f"{said['moved_bytes'] / 1e6:.1f} MB between ranks, utilisation "
            f"{said['utilisation_before']:.3f} -> {said['utilisation_after']:.3f} on the window, "
            f"placement generation {generation}"
        )
