"""What a rank tells of its speculation: counts so far, and what they are worth.

Knows a speculator by reading it. Changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import TYPE_CHECKING

from moeserve.speculate.acceptance import mean_rate, predicted_speedup
from moeserve.speculate.adaptive import AdaptiveDepth
from moeserve.wire_speculation import SpeculationStats

if TYPE_CHECKING:
    from moeserve.scheduling import ScheduleCounters
    from moeserve.speculate.speculator import Speculator


def speculation_stats(of: Speculator, counters: ScheduleCounters) -> SpeculationStats:
    """counters: of the scheduler."""
    acceptance, recent = of.acceptance, of.recent
    runs, num = acceptance.num_runs, max(of.max_next, 1)
    return SpeculationStats(
        drafter=of.drafter.name,
        rule=of.rule.value,
        depth=of.depth,
        adaptive=isinstance(of.policy, AdaptiveDepth),
        drafted_tokens=counters.drafted_tokens,
        accepted_tokens=counters.accepted_tokens,
        runs=runs,
        drafted=tuple(acceptance.drafted.tolist()),
        accepted=tuple(acceptance.accepted.tolist()),
        temperature=of.temperatures / runs if runs else 0.0,
        predicted=_predicted(of, [(of.depth, num)]),
        cost_ratio=of.costs.costs().ratio(of.depth, num),
        rounds=of.num_rounds,
        seconds=of.seconds,
        failures=of.num_failures,
        failure=of.failure,
        memory_bytes=of.drafter.memory_bytes(),
        depths=tuple(of.depths),
        recent_steps=len(recent),
        recent_depth=sum(depth for depth, _ in recent) / len(recent) if recent else 0.0,
        recent_predicted=_predicted(of, recent),
    )


def _predicted(of: Speculator, steps: Collection[tuple[int, int]]) -> float:
    """Mean over steps (depth, sequences) of what the theorem says with the acceptance and costs of
    now. 1 where nothing is known."""
    if not (steps and of.acceptance.num_runs and of.costs.is_known):
        return 1.0
    reach, costs, total = of.acceptance.reach(), of.costs.costs(), 0.0
    rates = {depth: mean_rate(reach, depth) for depth in {depth for depth, _ in steps}}
    for (depth, num), count in Counter(steps).items():
        total += count * predicted_speedup(rates[depth], depth, costs.ratio(depth, num))
    return total / len(steps)
