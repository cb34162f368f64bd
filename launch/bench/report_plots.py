"""The pictures of a report of `bench serve`: distributions, throughput over time, steps of ranks.

Matplotlib figures, as SVG for the page. Knows matplotlib and the report's shape.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from launch.bench.figures import percentile
from launch.bench.palette import COLOURS, FAINT, GRID, INK, PAPER
from launch.bench.serve_show import number, parts_of

_PART_COLOURS = {
    "attention": "#2563eb",
    "gate": "#0891b2",
    "dispatch": "#dc7018",
    "experts": "#059669",
    "combine": "#ca8a04",
    "other": "#9ca3af",
    "sampling": "#9333ea",
    "host": "#db2777",
    "lockstep": "#64748b",
}


def plots(report: dict[str, Any]) -> list[tuple[str, Any]]:
    """(title, figure) of all that the report has data for."""
    made: list[tuple[str, Any]] = []
    good = [x for x in report["samples"] if x["fault"] is None]
    for key, name in (("ttft_ms", "Time to the first token"), ("tpot_ms", "Time a token after it")):
        values = [x[key] for x in good if x[key] is not None]
        if values:
            made.append((name, distribution(values)))
    if report["calls"]["sent"]:
        made.append(("Over time", over_time(report["over_time"])))
    if report["steps"] and any(x["parts_ms"] for x in report["steps"]):
        made.append(("A step of each rank, by part", steps(report["steps"])))
    return made


def distribution(values: Sequence[float]) -> Any:
    """How many calls were within so many ms, with the percentiles marked."""
    figure, axes = _new(4.6, 2.6)
    ordered = sorted(values)
    share = [100 * (i + 1) / len(ordered) for i in range(len(ordered))]
    wide = ordered[-1] > 20 * max(ordered[0], 1e-9)
    axes.step(ordered, share, where="post", color=COLOURS[0], linewidth=1.8)
    axes.fill_between(ordered, share, step="post", color=COLOURS[0], alpha=0.12, linewidth=0)
    if wide:
        from matplotlib.ticker import LogLocator, NullFormatter

        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(10, (1, 2, 5)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_xlim(left=0)
    for percent, colour in ((50, COLOURS[2]), (90, COLOURS[1]), (99, COLOURS[4])):
        value = percentile(ordered, percent)
        axes.axvline(value, color=colour, linewidth=1, linestyle="--", alpha=0.8)
        label = f"p{percent}  {number(value)} ms"
        axes.plot([], [], color=colour, linestyle="--", linewidth=1, label=label)
    axes.legend(loc="upper left", frameon=False, fontsize=8, labelcolor=INK)
    axes.set_ylim(0, 103)
    axes.set_ylabel("% of calls", fontsize=8, color=INK)
    axes.set_xlabel("ms at most", fontsize=8, color=INK)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    return figure


def over_time(series: dict[str, list[float]]) -> Any:
    """Output tokens a second, and calls in flight."""
    figure, axes = _new(9.4, 2.6)
    width = series["seconds"][0] * 2
    edges = [x - width / 2 for x in series["seconds"]] + [series["seconds"][-1] + width / 2]
    rate = series["output_tokens_per_second"]
    axes.stairs(rate, edges, fill=True, color=COLOURS[0], alpha=0.25)
    axes.stairs(rate, edges, color=COLOURS[0], linewidth=1.2)
    axes.set_ylabel("output tokens/s", fontsize=8, color=COLOURS[0])
    axes.set_xlabel("seconds", fontsize=8, color=INK)
    axes.set_xlim(0, edges[-1])
    axes.set_ylim(bottom=0)
    other = axes.twinx()
    other.plot(series["seconds"], series["in_flight"], color=COLOURS[1], linewidth=1.4)
    other.set_ylabel("calls in flight", fontsize=8, color=COLOURS[1])
    other.set_ylim(bottom=0)
    other.tick_params(labelsize=8, colors=INK, length=2)
    for side in other.spines.values():
        side.set_visible(False)
    return figure


def steps(rows: list[dict[str, Any]]) -> Any:
    """A bar a rank, from left to right what a step does. The most and least busy of many ranks."""
    chosen = rows
    if len(rows) > 16:
        ordered = sorted(rows, key=lambda x: -float(x["step_ms"]))
        chosen = sorted(ordered[:8] + ordered[-8:], key=lambda x: int(x["rank"]))
    figure, axes = _new(9.4, 0.9 + 0.32 * len(chosen))
    left = [0.0] * len(chosen)
    names = [f"rank {x['rank']}" for x in chosen]
    for part in parts_of(rows):
        widths = [float(x["parts_ms"].get(part, 0.0)) for x in chosen]
        colour = _PART_COLOURS.get(part, FAINT)
        axes.barh(names, widths, left=left, color=colour, height=0.66, label=part, linewidth=0)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    words = "ms; all parts make the step; lockstep: waiting for the other ranks"
    axes.set_xlabel(words, fontsize=8, color=INK)
    axes.grid(False, axis="y")
    axes.legend(
        loc="upper left", bbox_to_anchor=(1.0, 1.04), frameon=False, fontsize=8, labelcolor=INK
    )  # fmt: skip
    return figure


def _new(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=110, facecolor=PAPER, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8, colors=INK, length=2)
    for name, side in axes.spines.items():
        side.set_visible(name in ("left", "bottom"))
        side.set_color(FAINT)
    return figure, axes


def as_svg(figure: Any) -> str:
    """To be put into a page: without the XML head, letters as outlines, so that it looks alike
    everywhere."""
    import matplotlib

    held = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": "moeserve"}):
        figure.savefig(held, format="svg", metadata={"Date": None})
    text = held.getvalue()
    return text[text.index("<svg") :]
