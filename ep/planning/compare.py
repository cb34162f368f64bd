"""Policies side by side on the same loads: balance, bound, time, and what moves when loads drift.

Knows: layouts, policies, how to make a drifted load of two. Knows nothing of: files (`ep.trace`),
terminals.

Shape letters: L layers, E experts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ep.planner import Plan, PlanOptions, plan
from ep.planning.plan_loads import PlanError
from ep.planning.policy import POLICIES
from ep.planning.replicate import FloatArray, in_order_sum
from ep.planning.shapes import check_choice
from ep.presets import Layout

# The layouts of the benchmark table: those of the presets, and what lies between.
LAYOUTS: tuple[Layout, ...] = (
    Layout("EP32 grouped", 32, 9, "replicated", "node"),
    Layout("EP32 free", 32, 9, "replicated", "free"),
    Layout("EP72", 72, 4, "replicated", "free"),
    Layout("EP144, 288 slots", 144, 2, "replicated", "free"),
    Layout("EP144, 432 slots", 144, 3, "replicated", "free"),
    Layout("EP320", 320, 1, "replicated", "free"),
    Layout("EP320, shared hosted", 320, 1, "hosted", "free"),
)


@dataclass(frozen=True)
class Comparison:
    """One policy on one load under one layout. Balance is busiest GPU / mean GPU, over the layers.

    seconds: CPU time of one plan from nothing. The drifted_* figures are of a placement made for
    the loads and serving the drifted ones, before and after the same policy plans again; moved is
    the share of all slots that this moves. None without drifted loads.
    """

    trace: str
    layout: str
    policy: str
    mean: float
    worst: float
    bound: float
    seconds: float
    duplicates: int
    drifted_before: float | None = None
    drifted_after: float | None = None
    moved: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare(
    traces: Mapping[str, FloatArray],
    layouts: Sequence[Layout] = LAYOUTS,
    policies: Sequence[str] = POLICIES,
    *,
    drifted: Mapping[str, FloatArray] | None = None,
    top_k: int = 8,
    options: PlanOptions | None = None,
    repeat: int = 1,
) -> list[Comparison]:
    """Every policy on every trace [L, E] under every layout, in that order of loops reversed.

    drifted: by name of trace, what its loads have become. top_k: routed experts of a token, from
    which the load of a hosted shared expert follows. repeat: plans timed, the quickest counts.
    PlanError for a layout that does not fit a trace.
    """
    for policy in policies:
        check_choice("policy", policy, POLICIES)
    base = PlanOptions() if options is None else options
    out = []
    for layout in layouts:
        for name, loads in traces.items():
            now = with_shared(loads, layout, top_k)
            later = None if drifted is None or name not in drifted else drifted[name]
            for policy in policies:
                chosen = options_for(layout, policy, base)
                best = float("inf")
                for _ in range(max(repeat, 1)):
                    start = time.process_time()  # other jobs of the machine do not count
                    made = _plan(now, layout, chosen)
                    best = min(best, time.process_time() - start)
                row = _row(name, layout, policy, made, best)
                if later is not None:
                    row = _with_drift(row, made, with_shared(later, layout, top_k), layout, chosen)
                out.append(row)
    return out


def options_for(layout: Layout, policy: str, base: PlanOptions) -> PlanOptions:
    """base with what the layout and the policy settle; a policy is not given what it cannot do."""
    own = layout.options()
    chosen = replace(base, group_policy=own.group_policy, num_ungrouped=own.num_ungrouped)
    if policy == "ours":
        return chosen
    return replace(chosen, policy=policy, extra_slots_per_gpu=0, max_moved_slots=None)


def with_shared(loads: FloatArray, layout: Layout, top_k: int) -> FloatArray:
    """loads [L, E] -> [L, E + 1] where the layout hosts the shared expert: every token picks it, so
    its load is the layer's picks / top_k."""
    loads = np.asarray(loads, dtype=np.float64)
    if layout.shared != "hosted":
        return loads
    tokens = in_order_sum(loads)[:, None] / top_k
    return np.concatenate([loads, tokens], axis=1)


def drift(loads: FloatArray, toward: FloatArray, distance: float) -> FloatArray:
    """Shares of loads [L, E] moved toward those of another load, so that the total variation
    between before and after is `distance` on average over layers (at most all the way)."""
    a, b = (np.asarray(x, dtype=np.float64) for x in (loads, toward))
    if a.shape != b.shape:
        raise PlanError(f"drift: loads {a.shape} and {b.shape} must have one shape")
    a, b = (x / np.maximum(in_order_sum(x), 1e-300)[:, None] for x in (a, b))
    apart = float(np.abs(a - b).sum(axis=1).mean()) / 2
    part = 1.0 if apart <= distance else distance / apart
    moved: FloatArray = (1 - part) * a + part * b
    return moved


def format_table(rows: Sequence[Comparison]) -> str:
    """Markdown, one line a comparison; widths fit a terminal as well."""
    head = ["layout", "trace", "policy", "mean", "worst", "bound", "ms", "twice"]
    drifting = any(row.moved is not None for row in rows)
    if drifting:
        head += ["drifted", "replanned", "moved"]
    lines = [head]
    for row in rows:
        line = [row.layout, row.trace, row.policy]
        line += [f"{row.mean:.4f}", f"{row.worst:.3f}", f"{row.bound:.4f}"]
        line += [f"{1000 * row.seconds:.0f}", str(row.duplicates)]
        if row.moved is not None:
            line += [f"{row.drifted_before:.4f}", f"{row.drifted_after:.4f}", f"{row.moved:.1%}"]
        elif drifting:
            line += ["", "", ""]
        lines.append(line)
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    text = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |"
        for line in lines
    ]
    rule = [("-" * w + "-") if i < 3 else ("-" * w + ":") for i, w in enumerate(widths)]
    text.insert(1, "|-" + "|-".join(rule) + "|")
    return "\n".join(text)


def _plan(loads: FloatArray, layout: Layout, options: PlanOptions, **more: Any) -> Plan:
    return plan(
        loads,
        num_slots=layout.num_slots,
        num_gpus=layout.num_gpus,
        num_nodes=layout.num_nodes,
        num_groups=layout.num_groups,
        options=options,
        **more,
    )


def _row(name: str, layout: Layout, policy: str, made: Plan, seconds: float) -> Comparison:
    why = made.explanation
    return Comparison(
        trace=name,
        layout=layout.name,
        policy=policy,
        mean=float(why.after.mean()),
        worst=float(why.after.max()),
        bound=float(why.bound.mean()),
        seconds=seconds,
        duplicates=int(why.duplicates.sum()),
    )


def _with_drift(
    row: Comparison, made: Plan, later: FloatArray, layout: Layout, options: PlanOptions
) -> Comparison:
    again = _plan(later, layout, options, previous=made.placement).explanation
    assert again.before is not None and again.moved is not None
    slots = made.placement.num_layers * made.placement.num_physical_experts
    return replace(
        row,
        drifted_before=float(again.before.mean()),
        drifted_after=float(again.after.mean()),
        moved=float(again.moved.sum()) / slots,
    )
