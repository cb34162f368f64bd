"""A picture of a deployment: memory and step as bars, numbers below them.

Knows how it looks; colours: `looks`. What a search found: `picture_search`; published points:
`picture_points`. Computes nothing.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from launch.capacity.canvas import (
    BAD,
    FAINT,
    GOOD,
    INK,
    PAPER,
    head,
    new_figure,
    save,
)
from launch.capacity.looks import look
from launch.capacity.parts import (
    dollars,
    load_told,
    memory_parts,
    mode_of,
    model_short,
    step_parts,
)
from launch.capacity.remedies import errors
from launch.capacity.report import Plan, Report
from launch.capacity.verdict import NOT_PREDICTED
from moeserve.terminal import counted

_ROW = 4.55  # inches of a phase


def draw_plan(plan: Plan, path: Path) -> None:
    """For each phase: memory and step as bars, numbers below them."""
    d, work = plan.reports[0].deployment, plan.reports[0].work
    said = plan.verdict
    lines = textwrap.wrap(said.text, 125)
    top = 0.98 + 0.17 * len(lines)
    height = top + _ROW * len(plan.reports)
    figure = new_figure(12.5, height)
    name = d.model if len(d.model) <= 60 else f"…{d.model[-59:]}"
    title = f"{name} on {d.gpus} × {d.gpu.title}"
    cached = f" ({work.cached_share:.0%} cached)" if work.cached_share else ""
    assumed = "" if d.shape.config.quantization else " (assumed)"
    told = (
        f"{counted(d.nodes, 'node')}   ·   {d.shape.total / 1e9:.4g} B parameters in "
        f"{d.shape.weights_in.upper()}{assumed}   ·   prompt of "
        f"{work.input_tokens:,}{cached}, answer of {work.output_tokens:,} tokens"
    )
    head(figure, title, [told + (f"   ·   preset {plan.preset}" if plan.preset else "")])
    colour = BAD if plan.errors else GOOD
    for i, line in enumerate(lines):
        y = 1 - (0.88 + 0.17 * i) / height
        figure.text(0.05, y, line, fontsize=10, weight="bold", color=colour)
    for i, r in enumerate(plan.reports):
        _phase(figure, r, height, top + i * _ROW)
    save(figure, path, title, [_violations(plan)])


def _violations(plan: Plan) -> tuple[str, list[list[str]]]:
    rows = [[r.deployment.phase, v.rule, v.text] for r in plan.reports for v in r.violations]
    return "rules that are violated", [["phase", "rule", "text"], *(rows or [["", "none", ""]])]


def _phase(figure: Any, r: Report, height: float, top: float) -> None:
    """top: inches from the upper edge."""
    d, p = r.deployment, r.prediction

    def box(left: float, down: float, width: float, tall: float) -> Any:
        return figure.add_axes((left, 1 - (top + down + tall) / height, width, tall / height))

    y = 1 - (top + 0.12) / height
    told = (
        f"{load_told(d)} a GPU   ·   {d.slots} slots, {d.slots_per_gpu} a GPU, "
        f"{d.redundant} redundant, shared expert {d.shared}   ·   {d.dispatch}"
    )
    figure.text(0.05, y, d.phase, fontsize=12, weight="bold", color=INK)
    figure.text(0.12, y, told, fontsize=9.5, color=FAINT)
    held = [(name, size / 1e9) for name, size in memory_parts(r)]
    total = r.memory.total / 1e9
    missing = r.memory.missing / 1e9
    title = f"memory of a GPU: {total:.0f} GB" + (f", {missing:.1f} GB missing" if missing else "")
    if d.redundant:
        title += f"   (experts, copies: means over GPUs, {counted(d.slots_per_gpu, 'slot')} each)"
    _bar(box(0.05, 0.42, 0.9, 0.34), held, total, "GB", title, BAD if missing else INK)
    if r.predicted is None:
        y = 1 - (top + 1.85) / height
        figure.text(0.05, y, f"a step: {NOT_PREDICTED}", fontsize=10, color=BAD)
        _cards(figure, r, 1 - (top + 2.92) / height, 1 / height)
        return
    step = [(name, 1e3 * seconds) for name, seconds in step_parts(p.step)]
    whole = 1e3 * p.step.seconds
    hidden = 1e3 * (p.step.comm - p.step.exposed)
    hid = f", {hidden:,.1f} ms of all-to-alls hidden behind work" if hidden > 0.05 else ""
    by = f"; {told}" if (told := model_short(p.by, mode_of(d), (d.phase,))) else ""
    _bar(box(0.05, 1.72, 0.9, 0.34), step, whole, "ms", f"a step: {whole:,.1f} ms{hid}{by}")
    _cards(figure, r, 1 - (top + 2.92) / height, 1 / height)


def _bar(
    axis: Any,
    parts: list[tuple[str, float]],
    whole: float,
    unit: str,
    title: str,
    title_colour: str = INK,
) -> None:
    """Parts of a whole on one line, and what they are in lines below. What is beyond the whole lies
    behind a line."""
    axis.set_xlim(0, max(whole, sum(x for _, x in parts if x > 0)))
    axis.set_ylim(0, 1)
    axis.set_title(title, loc="left", fontsize=10, color=title_colour, pad=4)
    axis.set_yticks([])
    axis.set_xticks([])
    for side in axis.spines.values():
        side.set_visible(False)
    at = 0.0
    handles = []
    for name, size in parts:
        if size <= 0:
            continue
        shown = look(name)
        drawn = axis.barh(
            0.5,
            size,
            left=at,
            height=1,
            color=shown.fill,
            edgecolor=FAINT if shown.hatch else PAPER,
            linewidth=0.8,
            hatch=shown.hatch or None,
        )
        handles.append((drawn, f"{name} {_short(size)} {unit}"))
        if size > 0.055 * axis.get_xlim()[1] and not shown.hatch:
            axis.text(
                at + size / 2,
                0.48,
                f"{_short(size)} {unit}",
                ha="center",
                va="center",
                fontsize=8.5,
                color=shown.ink,
            )
        at += size
    if at > whole * 1.0001:
        axis.axvline(whole, color=BAD, linewidth=2.5)
        said = f"{whole:.0f} {unit}"
        axis.text(whole, 1.06, said, ha="center", va="bottom", fontsize=8.5, color=BAD)
    axis.legend(
        [h for h, _ in handles],
        [name for _, name in handles],
        loc="upper left",
        bbox_to_anchor=(0, -0.08),
        ncols=5,
        fontsize=8.2,
        frameon=False,
        borderpad=0,
        handlelength=1,
        handleheight=0.9,
        columnspacing=1.6,
        labelcolor=INK,
    )


def _short(size: float) -> str:
    return f"{size:,.0f}" if size >= 100 else f"{size:.1f}" if size >= 1 else f"{size:.2f}"


def _cards(figure: Any, r: Report, y: float, inch: float) -> None:
    """Three columns of text."""
    d, p = r.deployment, r.prediction
    what = "output" if d.phase == "decode" else "prompt"
    speed = [
        (f"{what} tokens/s a node", f"{p.per_node:,.0f}"),
        (f"{what} tokens/s a GPU", f"{p.per_gpu:,.0f}"),
        ("of all GPUs", f"{p.tokens_per_s:,.0f}"),
    ]
    if p.tpot is not None:
        speed.append(("TPOT", f"{1e3 * p.tpot:.1f} ms ({1 / p.tpot:.1f} tok/s a user)"))
    if p.ttft is not None:
        speed.append(("TTFT, busy pool", f"{1e3 * p.ttft:,.0f} ms"))
    if d.drafts and d.phase == "decode":
        speed.append((f"MTP, {counted(d.drafts, 'draft')}", f"{p.mtp_gain:.2f} × without"))
    costs = [(f"a million {kind} tokens", dollars(x)) for kind, x in p.cost.items()]
    if r.predicted is None:
        speed, costs = [("nothing", "it does not fit")], []
    plain_kv, small = r.kv_bytes
    kept = [("tokens each", "static · paged · paged FP8")]
    chosen = r.concurrency if len(r.concurrency) < 6 else r.concurrency[:2] + r.concurrency[-3:]
    kept += [(f"{c.length:,}", f"{c.reserved} · {c.paged:,} · {c.paged_fp8:,}") for c in chosen]
    kept.append(("bytes a token", f"{plain_kv:,}, FP8 {small:,}"))
    if r.mtp_kv_bytes[0]:
        kept.append(("and of MTP", "{:,}, FP8 {:,}".format(*r.mtp_kv_bytes)))
    t, spread = p.traffic, r.balance
    rest = [
        ("balance, mean · worst layer", f"{spread.mean:.3f} · {spread.worst:.3f}"),
        ("in order, without copies", f"{spread.unplanned:.2f}"),
        ("a token's GPUs · nodes", f"{spread.reach.ranks:.2f} · {spread.reach.nodes:.2f}"),
        ("sent a token a layer in nodes", f"{t.within / 1e3:,.1f} kB"),
        ("across nodes", f"{t.across / 1e3:,.1f} kB"),
    ]
    rest += [*costs, ("at a GPU-hour of", f"${r.price:g}")] if costs else []
    columns = (
        ("predicted", speed, 0.05, 0.315),
        ("sequences in the cache of a GPU", kept, 0.365, 0.625),
        ("balance, traffic, cost", rest, 0.68, 0.95),
    )
    for title, rows, left, right in columns:
        figure.text(left, y, title, fontsize=10, weight="bold", color=INK)
        for i, (name, value) in enumerate(rows):
            line = y - (0.23 + 0.19 * i) * inch
            figure.text(left, line, name, fontsize=9, color=FAINT)
            figure.text(right, line, value, fontsize=9, color=INK, ha="right")
    wrong = errors(r.violations)
    said = "no rule is violated" if not wrong else f"violated: {', '.join(v.rule for v in wrong)}"
    figure.text(0.95, y + 2.82 * inch, said, fontsize=9, ha="right", color=BAD if wrong else GOOD)
