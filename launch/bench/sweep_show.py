"""A sweep's table, picture and page: what the server gives at each rate, and where the knee is."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

from launch.bench.serve_show import number

if TYPE_CHECKING:
    from rich.console import Console

HEADS = (
    "rate", "answers/s", "good/s", "kept", "keeps up", "out tok/s a node", "a GPU",
    "TTFT p50", "p99", "TPOT p50", "p99", "failed",
)  # fmt: skip


def rows(report: dict[str, Any]) -> list[list[str]]:
    made = []
    for x in report["points"]:
        ttft, tpot = x["latency_ms"]["ttft"] or {}, x["latency_ms"]["tpot"] or {}
        sent = max(1, x["calls"]["sent"] - x["calls"]["cut_short_here"])
        throughput = x["throughput"]
        made.append(
            [
                f"{x['rate']:.3g}",
                number(throughput["all"]["requests_per_second"]),
                number(x["goodput_requests_per_second"]),
                f"{x['calls']['within_limits'] / sent:.0%}",
                {True: "yes", False: "no", None: "too short"}[x["pace"]["keeps_up"]],
                number(throughput["per_node"]["output_tokens_per_second"]),
                number(throughput["per_gpu"]["output_tokens_per_second"]),
                *(number(ttft.get(p)) for p in ("p50", "p99")),
                *(number(tpot.get(p)) for p in ("p50", "p99")),
                str(x["calls"]["failed"]),
            ]
        )
    return made


def verdict(report: dict[str, Any]) -> str:
    limits = report["limits"]
    said = [f"{k[:4].upper()} {number(v)} ms" for k, v in limits.items() if v is not None]
    asked = f"limits: {', '.join(said)} ({report['limits_are']})"
    knee = report["knee"]
    above = [x for x in report["points"] if knee is None or x["rate"] > knee]
    notes = []
    if knee is None:
        first = "knee: none was found: no rate tried is known to be served"
    else:
        delivered = number(report["knee_delivered"])
        first = f"knee: {delivered} answers/s delivered, at {knee:.3g} calls/s asked for"
        if not above:
            notes.append("none above it was tried")
        if any(x["rate"] == knee and x["generator"]["was_limit"] for x in report["points"]):
            notes.append("the load generator was the limit there: of the server it says little")
    for words, some in (
        ("too short to tell", [x for x in above if x["pace"]["keeps_up"] is None]),
        ("the load generator was the limit", [x for x in above if x["generator"]["was_limit"]]),
    ):
        if some:
            rates = ", ".join(f"{x['rate']:.3g}" for x in some)
            notes.append(f"at {rates} calls/s {words}")
    return "; ".join([first, *notes, asked])


def show(report: dict[str, Any], console: Console) -> None:
    from rich.table import Table

    settings = report["settings"]
    title = (
        f"{report['model']}: {settings['input_tokens']} tokens in, {settings['output_tokens']} out"
    )
    table = Table(title=title, title_justify="left")
    for name in HEADS:
        table.add_column(name, justify="right")
    for row in rows(report):
        table.add_row(*row)
    console.print(table)
    console.print(verdict(report), highlight=False, markup=False)
    for line in report["caveats"]:
        console.print(f"- {line}", highlight=False, markup=False, style="dim")


def draw(report: dict[str, Any]) -> Any:
    """A matplotlib figure: goodput against rate, latencies against rate."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from launch.bench.palette import COLOURS, FAINT, GRID, INK, PAPER

    figure = Figure(figsize=(9.4, 3.6), dpi=150, facecolor=PAPER, layout="constrained")
    FigureCanvasAgg(figure)
    served, waited = figure.subplots(1, 2)
    points = report["points"]
    rates = [x["rate"] for x in points]
    most = max(rates, default=1.0)
    served.plot([0, most], [0, most], color=FAINT, linestyle="--", linewidth=1, label="asked for")
    answers = [x["throughput"]["all"]["requests_per_second"] for x in points]
    served.plot(rates, answers, color=COLOURS[0], marker="o", markersize=4, label="answers/s")
    good = [x["goodput_requests_per_second"] for x in points]
    served.plot(rates, good, color=COLOURS[2], marker="o", markersize=4, label="within the limits")
    served.set_ylabel("a second", fontsize=9, color=INK)
    for place, key in enumerate(("ttft", "tpot")):
        for percent, line in (("p50", "-"), ("p99", ":")):
            values = [(x["latency_ms"][key] or {}).get(percent) for x in points]
            kept = [(r, v) for r, v in zip(rates, values, strict=True) if v]
            if kept:
                waited.plot(
                    *zip(*kept, strict=True), color=COLOURS[place], linestyle=line, marker="o",
                    markersize=3.5, label=f"{key.upper()} {percent}",
                )  # fmt: skip
        limit = report["limits"][f"{key}_ms"]
        if limit is not None:
            waited.axhline(limit, color=COLOURS[place], linestyle="--", linewidth=0.9, alpha=0.6)
    waited.set_yscale("log")
    waited.set_ylabel("ms (limits dashed)", fontsize=9, color=INK)
    waited.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    for axes in (served, waited):
        if report["knee"] is not None:
            axes.axvline(report["knee"], color=INK, linewidth=0.9, alpha=0.5)
        axes.set_xlabel("calls a second asked for; the line is the knee", fontsize=9, color=INK)
        axes.grid(True, color=GRID, linewidth=0.8)
        axes.tick_params(labelsize=8, colors=INK, length=2)
        axes.legend(frameon=False, fontsize=8, labelcolor=INK)
        axes.set_xlim(left=0)
        for name, side in axes.spines.items():
            side.set_visible(name in ("left", "bottom"))
            side.set_color(FAINT)
    served.set_ylim(bottom=0)
    return figure


def page(report: dict[str, Any]) -> str:
    """One page, self-contained."""
    from launch.bench.report_html import whole_page
    from launch.bench.report_plots import as_svg

    head = "".join(f"<th>{html.escape(x)}</th>" for x in HEADS)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
        for row in rows(report)
    )
    cards = [
        ("Goodput and latency by rate", as_svg(draw(report))),
        ("Each rate; latencies in ms", f"<table><tr>{head}</tr>{body}</table>"),
    ]
    return whole_page(report, verdict(report), cards)
