"""Speculation as series of /metrics: who drafts, acceptance by position, and what it is worth.

Knows what ranks tell (`wire_speculation`); keeps nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from moeserve.speculation_report import sum_over_ranks
from moeserve.wire_speculation import SpeculationStats


def speculation_series(told: Sequence[tuple[str, SpeculationStats]]) -> Iterator[Metric]:
    """told: by rank. Nothing where nobody speculates."""
    stats = sum_over_ranks([x for _, x in told])
    if stats is None:
        return
    for name, text in (
        ("drafted_tokens", "Tokens drafted and verified"),
        ("accepted_tokens", "Drafted tokens that were put out"),
    ):
        counter = CounterMetricFamily(f"moeserve_{name}", text, labels=["rank"])
        for rank, x in told:
            counter.add_metric([rank], getattr(x, name))
        yield counter
    for name, text, counts in (
        ("drafted", "Runs that had a draft at this position", stats.drafted),
        ("accepted", "Runs whose draft at this position was accepted", stats.accepted),
    ):
        series = CounterMetricFamily(
            f"moeserve_speculation_{name}", text, labels=["drafter", "position"]
        )
        for position, count in enumerate(counts, 1):
            series.add_metric([stats.drafter, str(position)], count)
        yield series
    steps = CounterMetricFamily(
        "moeserve_speculation_steps",
        "Steps in which sequences could draft, by the depth of their drafts",
        labels=["drafter", "depth"],
    )
    for depth, count in enumerate(stats.depths):
        steps.add_metric([stats.drafter, str(depth)], count)
    yield steps
    yield CounterMetricFamily(
        "moeserve_speculation_failures", "Times a rank could not draft", stats.failures
    )
    gauges = {
        "mean_accepted_tokens": ("Drafts accepted a run, since start", stats.mean_accepted),
        "tokens_per_run": ("Tokens that a verification gave", 1 + stats.mean_accepted),
        "depth": ("Drafts behind each other in the last step, agreed", stats.depth),
        "recent_depth": ("The same, mean over the last steps that drafted", stats.recent_depth),
        "predicted_speedup": (
            "By Leviathan's Theorem 3.8 from the measured acceptance and costs, at the depths of "
            "the last steps that drafted",
            stats.recent_predicted,
        ),
        "round_cost_ratio": ("A round of drafting over a step of one token", stats.cost_ratio),
        "temperature": ("Mean over the runs: acceptance depends on it", stats.temperature),
    }
    for name, (text, value) in gauges.items():
        gauge = GaugeMetricFamily(f"moeserve_speculation_{name}", text, labels=["drafter", "rule"])
        gauge.add_metric([stats.drafter, stats.rule], value)
        yield gauge
