"""What users are told of speculation, summed over ranks.

Acceptance says little without the temperature it was measured at: they stand together. Plain data;
knows nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from moeserve.wire_speculation import SpeculationStats


def sum_over_ranks(told: Sequence[SpeculationStats]) -> SpeculationStats | None:
    """One for all ranks; None where none speculates. What is agreed, and costs, are rank 0's, which
    stands first; the temperature is the mean over all runs."""
    if not told:
        return None
    runs = sum(x.runs for x in told)
    first = told[0]
    failures = [x.failure for x in told if x.failure is not None]
    return SpeculationStats(
        drafter=first.drafter,
        rule=first.rule,
        depth=first.depth,
        adaptive=first.adaptive,
        drafted_tokens=sum(x.drafted_tokens for x in told),
        accepted_tokens=sum(x.accepted_tokens for x in told),
        runs=runs,
        drafted=_columns(x.drafted for x in told),
        accepted=_columns(x.accepted for x in told),
        temperature=sum(x.temperature * x.runs for x in told) / runs if runs else 0.0,
        predicted=first.predicted,
        cost_ratio=first.cost_ratio,
        rounds=first.rounds,
        seconds=first.seconds,
        failures=sum(x.failures for x in told),
        failure=failures[0] if failures else None,
        memory_bytes=sum(x.memory_bytes for x in told),
        depths=first.depths,
        recent_steps=first.recent_steps,
        recent_depth=first.recent_depth,
        recent_predicted=first.recent_predicted,
    )


def _columns(rows: Iterable[Sequence[int]]) -> tuple[int, ...]:
    return tuple(sum(column) for column in zip(*rows, strict=True))


def shares(drafted: Sequence[int], accepted: Sequence[int]) -> list[float | None]:
    """By position, of the drafts there the share that was accepted. None where none was ever tried:
    nothing was drafted there, or all before it were refused each time, which says nothing of it."""
    found: list[float | None] = []
    reached = True
    for d, a in zip(drafted, accepted, strict=True):
        found.append(round(a / d, 4) if d and reached else None)
        reached = a > 0
    return found


def report(
    planned: dict[str, Any] | None, told: Sequence[SpeculationStats]
) -> dict[str, Any] | None:
    """planned: what a rank said when it was ready (`SpeculatePlan.report`); None: off.
    current_depth is the last step's, so 0 between requests; predicted_speedup and recent_depth are
    means over the last recent_steps steps that drafted."""
    if planned is None:
        return None
    stats = sum_over_ranks(told)
    if stats is None:
        return planned
    return planned | {
        "current_depth": stats.depth,
        "recent_depth": round(stats.recent_depth, 2),
        "recent_steps": stats.recent_steps,
        "steps_by_depth": list(stats.depths),
        "drafted_tokens": stats.drafted_tokens,
        "accepted_tokens": stats.accepted_tokens,
        "acceptance": shares(stats.drafted, stats.accepted),
        "mean_accepted": round(stats.mean_accepted, 4),
        "temperature": round(stats.temperature, 4),
        "predicted_speedup": round(stats.recent_predicted, 4),
        "failures": stats.failures,
        "failure": stats.failure,
    }
