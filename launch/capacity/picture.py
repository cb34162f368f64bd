"""Pictures of `moeserve plan`: a deployment, what a search found, what was measured and predicted.

Knows how they look. Computes nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launch.capacity.asked import Asked
from launch.capacity.canvas import (
    BAD,
    COLOURS,
    FAINT,
    GOOD,
    INK,
    LINE,
    PAPER,
    head,
    new_figure,
    plain,
    save,
)
from launch.capacity.parts import dollars, memory_parts, step_parts
from launch.capacity.remedies import errors
from launch.capacity.report import Plan, Report
from launch.capacity.screen import front_names, front_rows
from launch.capacity.search import Candidate, Found, Ratio
from launch.capacity.validate import Point, Validation

_ROW = 4.55  # inches of a phase


def draw_plan(plan: Plan, path: Path) -> None:
    """For each phase: memory and step as bars, numbers below them."""
    d, work = plan.reports[0].deployment, plan.reports[0].work
    height = 0.95 + _ROW * len(plan.reports)
    figure = new_figure(12.5, height)
    title = f"{d.model} on {d.gpus} × {d.gpu.title}"
    cached = f" ({work.cached_share:.0%} cached)" if work.cached_share else ""
    told = (
        f"{d.nodes} nodes   ·   {d.shape.total / 1e9:.4g} B parameters in "
        f"{d.shape.weights_in.upper()}   ·   prompt of "
        f"{work.input_tokens:,}{cached}, answer of {work.output_tokens:,} tokens"
    )
    head(figure, title, [told + (f"   ·   preset {plan.preset}" if plan.preset else "")])
    for i, r in enumerate(plan.reports):
        _phase(figure, r, height, 0.95 + i * _ROW)
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
    load = f"{d.sequences} sequences" if d.phase == "decode" else f"{d.tokens:,} tokens a step"
    told = (
        f"{load} a GPU   ·   {d.slots} slots, {d.slots_per_gpu} a GPU, {d.redundant} redundant, "
        f"shared expert {d.shared}   ·   {d.dispatch}"
    )
    figure.text(0.05, y, d.phase, fontsize=12, weight="bold", color=INK)
    figure.text(0.12, y, told, fontsize=9.5, color=FAINT)
    held = [(name, size / 1e9) for name, size in memory_parts(r)]
    total = r.memory.total / 1e9
    _bar(box(0.05, 0.42, 0.9, 0.34), held, total, "GB", f"memory of a GPU: {total:.0f} GB")
    step = [(name, 1e3 * seconds) for name, seconds in step_parts(p.step)]
    whole = 1e3 * p.step.seconds
    hidden = 1e3 * (p.step.comm - p.step.exposed)
    hid = f", {hidden:,.1f} ms of all-to-alls hidden behind work" if hidden > 0.05 else ""
    _bar(box(0.05, 1.72, 0.9, 0.34), step, whole, "ms", f"a step: {whole:,.1f} ms{hid}")
    _cards(figure, r, 1 - (top + 2.92) / height, 1 / height)


def _bar(axis: Any, parts: list[tuple[str, float]], whole: float, unit: str, title: str) -> None:
    """Parts of a whole on one line, and what they are in two lines below."""
    axis.set_xlim(0, max(whole, sum(x for _, x in parts if x > 0)))
    axis.set_ylim(0, 1)
    axis.set_title(title, loc="left", fontsize=10, color=INK, pad=4)
    axis.set_yticks([])
    axis.set_xticks([])
    for side in axis.spines.values():
        side.set_visible(False)
    at = 0.0
    handles = []
    for i, (name, size) in enumerate(parts):
        if size <= 0:
            continue
        colour = LINE if name == "KV cache" else COLOURS[i % len(COLOURS)]
        drawn = axis.barh(0.5, size, left=at, height=1, color=colour, edgecolor=PAPER, linewidth=1)
        handles.append((drawn, f"{name} {_short(size)}"))
        if size > 0.055 * axis.get_xlim()[1]:
            dark = colour in COLOURS[::2]
            axis.text(
                at + size / 2,
                0.48,
                f"{_short(size)} {unit}",
                ha="center",
                va="center",
                fontsize=8.5,
                color=PAPER if dark else INK,
            )
        at += size
    if at > whole * 1.0001:
        axis.axvline(whole, color=BAD, linewidth=2)
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
        speed.append((f"MTP, {d.drafts} drafts", f"{p.mtp_gain:.2f} × without"))
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
        ("sent a token a layer in nodes", f"{t.within / 1e3:,.1f} kB"),
        ("across nodes", f"{t.across / 1e3:,.1f} kB"),
    ]
    rest += [(f"a million {kind} tokens", dollars(x)) for kind, x in p.cost.items()]
    rest.append(("at a GPU-hour of", f"${r.price:g}"))
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


def draw_search(found: list[Found], shares: Ratio | None, asked: Asked, path: Path) -> None:
    """What each allowed layout gives against what users wait, a panel a phase."""
    d, work = asked.bases[0], asked.work
    figure = new_figure(6.6 * len(found) + 0.4, 6.2)
    axes = figure.subplots(1, len(found), squeeze=False)[0]
    figure.subplots_adjust(left=0.085 if len(found) > 1 else 0.13, right=0.975, top=0.8, bottom=0.1)
    figure.subplots_adjust(wspace=0.22)
    for axis, f in zip(axes, found, strict=True):
        limit = asked.limits.tpot if f.phase == "decode" else asked.limits.ttft
        _front(axis, f, limit)
    title = f"{d.model} on {d.gpu.title}: what a GPU gives against what users wait"
    lines = [
        f"up to {asked.most_gpus} GPUs a pool   ·   prompt of {work.input_tokens:,}, answer of "
        f"{work.output_tokens:,} tokens"
    ]
    if shares is not None:
        lines.append(
            f"{shares.prefill} prefill : {shares.decode} decode instances keep up with each other: "
            f"{shares.gpus} GPUs, {shares.requests_per_s:.1f} requests/s"
        )
    head(figure, title, lines)
    save(figure, path, title, [_front_table(f) for f in found])


def _front(axis: Any, f: Found, limit: float | None) -> None:
    name = "TPOT" if f.phase == "decode" else "TTFT"
    plain(axis)
    axis.set_xscale("log")
    said = f"{f.phase}: {len(f.allowed):,} layouts that break no rule"
    axis.set_title(said, loc="left", pad=8, fontsize=10.5, color=INK)
    axis.set_xlabel(f"{name}, ms", fontsize=9.5, color=INK)
    what = "output" if f.phase == "decode" else "prompt"
    axis.set_ylabel(f"{what} tokens/s a GPU", fontsize=9.5, color=INK)
    if not f.allowed:
        axis.text(0.5, 0.5, "none fits", transform=axis.transAxes, ha="center", color=BAD)
        return
    sizes = sorted({x.deployment.gpus for x in f.allowed})
    shown = axis.scatter(
        [1e3 * x.latency for x in f.allowed],
        [x.prediction.per_gpu for x in f.allowed],
        c=[sizes.index(x.deployment.gpus) / max(len(sizes) - 1, 1) for x in f.allowed],
        cmap="viridis_r",
        s=9,
        alpha=0.35,
        linewidths=0,
        rasterized=True,
    )
    shown.set_gid(f"{f.phase}-allowed")
    axis.plot(
        [1e3 * x.latency for x in f.pareto],
        [x.prediction.per_gpu for x in f.pareto],
        "-o",
        color=INK,
        linewidth=1.4,
        markersize=4.5,
        label="no other beats these",
    )
    axis.set_ylim(0, 1.24 * max(x.prediction.per_gpu for x in f.pareto))
    low, high = axis.get_xlim()
    if limit is not None:
        low, high = min(low, 900 * limit), max(high, 1100 * limit)
        axis.axvline(1e3 * limit, color=BAD, linewidth=1.3, linestyle="--")
        axis.axvspan(1e3 * limit, high, color=BAD, alpha=0.05, linewidth=0)
        y = 0.015 * axis.get_ylim()[1]
        axis.text(1e3 * limit, y, f" limit {1e3 * limit:g} ms", color=BAD, fontsize=8.5)
    axis.set_xlim(low, high)
    if f.best is not None:
        _mark(axis, f.best)
    ticks = [t * 10**e for e in range(7) for t in (1, 2, 5) if low <= t * 10**e <= high]
    axis.xaxis.set_ticks(ticks, labels=[f"{t:,}" for t in ticks])
    axis.xaxis.set_ticks([], minor=True)
    small, large = f"{sizes[0]} GPUs", f"{sizes[-1]} GPUs"
    axis.text(
        0.99,
        1.015,
        f"light: {small}, dark: {large}",
        transform=axis.transAxes,
        ha="right",
        fontsize=8,
        color=FAINT,
    )


def _mark(axis: Any, x: Candidate) -> None:
    d = x.deployment
    load = f"{d.sequences} sequences" if d.phase == "decode" else f"{d.tokens:,} tokens a step"
    said = [
        f"best: {x.prediction.per_gpu:,.0f} tokens/s a GPU at {1e3 * x.latency:,.1f} ms",
        f"{d.gpus} GPUs, {d.slots_per_gpu} slots each, shared {d.shared}",
        f"{load}, {d.drafts} drafts" if d.phase == "decode" else load,
        f"balance {d.balance:.3f}, overlap {'on' if d.overlap else 'off'}, {d.dispatch}",
    ]
    at = (1e3 * x.latency, x.prediction.per_gpu)
    axis.plot(*at, "o", color=GOOD, markersize=11, markeredgecolor=PAPER, markeredgewidth=1.5)
    axis.text(
        0.985,
        0.975,
        "\n".join(said),
        transform=axis.transAxes,
        ha="right",
        va="top",
        fontsize=8.6,
        color=INK,
        linespacing=1.4,
        bbox={"boxstyle": "round,pad=0.5", "facecolor": PAPER, "edgecolor": GOOD},
    )


def _front_table(f: Found) -> tuple[str, list[list[str]]]:
    return f"{f.phase}: layouts that no other beats", [front_names(f), *front_rows(f)]


def draw_validation(v: Validation, path: Path) -> None:
    """Measured against predicted, throughputs and all-to-alls apart; a band of a tenth."""
    figure = new_figure(12.5, 6.4)
    axes = figure.subplots(1, 2)
    figure.subplots_adjust(left=0.07, right=0.975, top=0.82, bottom=0.1, wspace=0.2)
    for axis, unit, name in (
        (axes[0], "tok/s/node", "tokens/s a node"),
        (axes[1], "us", "one dispatch or combine, µs"),
    ):
        _against(axis, v, unit, name)
    title = "Published measurements and what moeserve plan predicts"
    throughput = v.median_error(unit="tok/s/node")
    lines = [
        f"median error {v.median_error():.1%}; of throughputs {throughput:.1%}; "
        f"of points held out {v.median_error(fitted=False):.1%} ({v.held_out_share:.0%} of all)",
        "band: 10 %   ·   filled: constants were fitted on it   ·   open: held out",
    ]
    head(figure, title, lines)
    rows = [
        [p.id, p.what, p.unit, f"{p.measured:,.0f}", f"{p.predicted:,.0f}", f"{p.error:+.1%}"]
        + ["fitted" if p.fitted else "held out"]
        for p in v.points
        if p.predicted is not None and p.error is not None
    ]
    names = ["#", "what", "unit", "measured", "predicted", "error", ""]
    save(figure, path, title, [("points", [names, *rows])])


def _name_points(axis: Any, named: list[Point], points: list[Point]) -> None:
    """Ids beside points, each on the side where most room is left."""

    def place(p: Point) -> Any:
        return axis.transData.transform((p.measured, p.predicted or 0.0))

    taken = [place(p) for p in points]
    for p in named:
        here = place(p)
        around = [(dx, dy) for dx in (-26, 0, 26) for dy in (-19, 0, 19) if dx or dy]

        def room(offset: tuple[int, int], here: Any = here) -> float:
            at = here + offset
            near: float = min(abs(at - other).max() for other in taken)
            return near

        dx, dy = max(around, key=room)
        taken.append(here + (dx, dy))
        x, y = axis.transData.inverted().transform(here + (dx, dy))
        axis.text(x, y, p.id, ha="center", va="center", fontsize=8, color=FAINT)


def _against(axis: Any, v: Validation, unit: str, name: str) -> None:
    points = [p for p in v.points if p.unit == unit and p.predicted is not None]
    plain(axis)
    axis.set_xscale("log")
    axis.set_yscale("log")
    values = [x for p in points for x in (p.measured, p.predicted or 0.0)]
    low, high = min(values) / 1.25, max(values) * 1.25
    axis.set_xlim(low, high)
    axis.set_ylim(low, high)
    axis.plot([low, high], [low, high], color=FAINT, linewidth=1)
    edges = ([x * 0.9 for x in (low, high)], [x * 1.1 for x in (low, high)])
    axis.fill_between([low, high], *edges, color="#5b9bd5", alpha=0.18, linewidth=0)
    kinds = {"prefill": "s", "decode": "o", "dispatch": "o", "combine": "s"}
    seen = set()
    for p in points:
        kind = next((k for k in kinds if k in p.what), "decode")
        kind = "decode" if kind == "decode" and unit != "us" else kind
        colour = COLOURS[0] if kinds[kind] == "o" else COLOURS[4]
        axis.plot(
            p.measured,
            p.predicted,
            kinds[kind],
            markersize=7,
            markerfacecolor=colour if p.fitted else PAPER,
            markeredgecolor=colour,
            markeredgewidth=1.5,
            label=kind if kind not in seen else None,
        )
        seen.add(kind)
    _name_points(axis, [p for p in points if unit != "us" or abs(p.error or 0.0) > 0.1], points)
    axis.legend(frameon=False, fontsize=9, loc="upper left")
    axis.set_xlabel(f"measured: {name}", fontsize=9.5, color=INK)
    axis.set_ylabel("predicted", fontsize=9.5, color=INK)
    steps = (1, 1.5, 2, 3, 4, 5, 7) if high < 30 * low else (1, 2, 5)
    ticks = [t * 10**e for e in range(1, 6) for t in steps]
    kept = [t for t in ticks if low <= t <= high]
    for one in (axis.xaxis, axis.yaxis):
        one.set_ticks(kept, labels=[f"{t:,.0f}" for t in kept])
        one.set_ticks([], minor=True)
