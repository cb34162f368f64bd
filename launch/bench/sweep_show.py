"""A sweep's table, picture and page: what the server gives at each rate, and where the knee is."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

from launch.bench.serve_show import number

if TYPE_CHECKING:
    from rich.console import Console


def heads(report: dict[str, Any]) -> list[str]:
    return [
        "rate", "steady", "answers/s", "good/s", "kept", "keeps up", "out tok/s a node",
        f"a {report['gpus_are'].removesuffix('s')}", "TTFT p50", "p99", "TPOT p50", "p99", "failed",
    ]  # fmt: skip


def rows(report: dict[str, Any]) -> list[list[str]]:
    made, turns = [], report["settings"]["turns"]
    for x in report["points"]:
        steady = x["pace"]["delivered"]
        ttft, tpot = x["latency_ms"]["ttft"] or {}, x["latency_ms"]["tpot"] or {}
        sent = max(1, x["calls"]["sent"] - x["calls"]["cut_short_here"])
        throughput = x["throughput"]
        made.append(
            [
                f"{x['rate']:.3g}",
                number(None if steady is None else steady * turns),
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


def asked_in(report: dict[str, Any]) -> str:
    """The unit of rates."""
    return "conversations/s" if report["settings"]["turns"] > 1 else "calls/s"


def verdict(report: dict[str, Any]) -> list[str]:
    """A line each: the knee, what was delivered there, what to know of it, the limits."""
    knee = report["knee"]
    above = [x for x in report["points"] if knee is None or x["rate"] > knee]
    if knee is None:
        said = ["knee: none was found: no rate tried is known to be served"]
    else:
        said = [f"knee: {knee:.3g} {asked_in(report)} asked for, the highest rate that was served"]
        said += [
            f"  steady: {number(report['knee_delivered'])} answers/s there while calls kept coming "
            f"({number(report['knee_came'])} calls/s came)",
            f"  answers/s: {number(report['knee_whole_run'])} there from the first call to the "
            "last answer, the server's filling and emptying included",
        ]
        if not above:
            said.append("  no rate above it was tried")
        if any(x["rate"] == knee and x["generator"]["was_limit"] for x in report["points"]):
            said.append("  the load generator was the limit there: of the server it says little")
    for words, some in (
        ("too short to tell", [x for x in above if x["pace"]["keeps_up"] is None]),
        ("the load generator was the limit", [x for x in above if x["generator"]["was_limit"]]),
    ):
        if some:
            rates = ", ".join(f"{x['rate']:.3g}" for x in some)
            said.append(f"  at {rates} {asked_in(report)} {words}")
    limits = [
        f"{k[:4].upper()} {number(v)} ms" for k, v in report["limits"].items() if v is not None
    ]
    return [*said, f"limits: {', '.join(limits)} ({report['limits_are']})"]


def show(report: dict[str, Any], console: Console) -> None:
    from rich.table import Table

    settings = report["settings"]
    title = (
        f"{report['model']}: {settings['input_tokens']} tokens in, {settings['output_tokens']} out"
    )
    table = Table(title=title, title_justify="left")
    for name in heads(report):
        table.add_column(name, justify="right")
    for row in rows(report):
        table.add_row(*row)
    console.print(table)
    for line in verdict(report):
        console.print(line, highlight=False, markup=False)
    for line in report["caveats"]:
        console.print(f"- {line}", highlight=False, markup=False, style="dim")


def subject(report: dict[str, Any]) -> str:
    """What was measured, on what, from where: two lines over the picture."""
    settings, client, kind = report["settings"], report["client"], report["gpus_are"]
    nodes, server = report["nodes"], report["server"]
    what = (
        f"{report['model']}: {settings['input_tokens']} tokens in, {settings['output_tokens']} out"
    )
    on = f"{report['gpus']} {kind if report['gpus'] > 1 else kind.removesuffix('s')}"
    on = f"{on} on {nodes} node{'s' if nodes > 1 else ''}"
    if not server["ours"]:
        on = f"a peer's server, counted as {on}"
    return f"{what}\n{on}; measured from {client['cores']} cores of {client['cpu']}"


def draw(report: dict[str, Any]) -> Any:
    """A matplotlib figure: goodput against rate, latencies against rate. Legends stand over the
    axes, where no line can pass."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    from launch.bench.palette import COLOURS, FAINT, GRID, INK, PAPER

    figure = Figure(figsize=(9.4, 4.4), dpi=150, facecolor=PAPER, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(subject(report), fontsize=9.5, color=INK, x=0.01, ha="left")
    served, waited = figure.subplots(1, 2)
    _answers(served, report)
    _latencies(waited, report)
    waited.set_yscale("log")
    waited.yaxis.set_major_locator(LogLocator(10, (1, 2, 5)))
    waited.yaxis.set_minor_formatter(NullFormatter())
    waited.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    for axes in (served, waited):
        if report["knee"] is not None:
            axes.axvline(
                report["knee"], color=COLOURS[4], linewidth=1, linestyle="-.",
                label=f"knee: {report['knee']:.3g} asked" if axes is served else None,
            )  # fmt: skip
        axes.set_xlabel(f"{asked_in(report)} asked for", fontsize=9, color=INK)
        axes.grid(True, color=GRID, linewidth=0.8)
        axes.tick_params(which="both", labelsize=8, colors=INK, length=2)
        axes.legend(
            loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=3, frameon=False, fontsize=8,
            labelcolor=INK, columnspacing=1.2, handlelength=1.8,
        )  # fmt: skip
        axes.set_xlim(left=0)
        for name, side in axes.spines.items():
            side.set_visible(name in ("left", "bottom"))
            side.set_color(FAINT)
    served.set_ylim(bottom=0)
    return figure


def _answers(axes: Any, report: dict[str, Any]) -> None:
    """Where all of them keep the limits, the thin line lies on the broad one: both are seen."""
    from launch.bench.palette import COLOURS, FAINT, INK

    points, turns = report["points"], report["settings"]["turns"]
    rates = [x["rate"] for x in points]
    most = max(rates, default=1.0)
    asked = {"color": FAINT, "linestyle": "--", "linewidth": 1}
    axes.plot([0, most], [0, most * turns], **asked, label="asked for")
    told = [
        (x["rate"], x["pace"]["delivered"]) for x in points if x["pace"]["delivered"] is not None
    ]
    if told:
        axes.plot(
            [rate for rate, _ in told], [turns * steady for _, steady in told], color=COLOURS[3],
            linestyle="none", marker="D", markersize=6, markerfacecolor="none", label="steady",
        )  # fmt: skip
    answers = [x["throughput"]["all"]["requests_per_second"] for x in points]
    axes.plot(
        rates, answers, color=COLOURS[0], linewidth=5, alpha=0.35, marker="o", markersize=8,
        label="answers/s",
    )  # fmt: skip
    good = [x["goodput_requests_per_second"] for x in points]
    axes.plot(
        rates, good, color=COLOURS[2], linewidth=1.4, marker="o", markersize=3.5,
        label="within limits",
    )  # fmt: skip
    axes.set_ylabel("answers a second", fontsize=9, color=INK)


def _latencies(axes: Any, report: dict[str, Any]) -> None:
    from launch.bench.palette import COLOURS, INK

    points = report["points"]
    for percent, line in (("p50", "-"), ("p99", ":")):
        for place, key in enumerate(("ttft", "tpot")):
            values = [(x["rate"], (x["latency_ms"][key] or {}).get(percent)) for x in points]
            kept = [(rate, value) for rate, value in values if value]
            if kept:
                axes.plot(
                    *zip(*kept, strict=True), color=COLOURS[place], linestyle=line, marker="o",
                    markersize=3.5, label=f"{key.upper()} {percent}",
                )  # fmt: skip
    for place, key in enumerate(("ttft", "tpot")):
        limit = report["limits"][f"{key}_ms"]
        if limit is not None:
            axes.axhline(
                limit, color=COLOURS[place], linestyle="--", linewidth=0.9, alpha=0.7,
                label=f"{key.upper()} limit {number(limit)}",
            )  # fmt: skip
    axes.set_ylabel("ms", fontsize=9, color=INK)


def page(report: dict[str, Any]) -> str:
    """One page, self-contained."""
    from launch.bench.report_html import whole_page
    from launch.bench.report_plots import as_svg

    head = "".join(f"<th>{html.escape(x)}</th>" for x in heads(report))
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
        for row in rows(report)
    )
    lines = "".join(f"<li>{html.escape(line.strip())}</li>" for line in verdict(report))
    cards = [
        ("The knee", f"<ul>{lines}</ul>"),
        ("Goodput and latency by rate", as_svg(draw(report))),
        ("Each rate; latencies in ms", f"<table><tr>{head}</tr>{body}</table>"),
    ]
    return whole_page(report, _headline(report), cards)


def _headline(report: dict[str, Any]) -> str:
    knee = report["knee"]
    if knee is None:
        return "no knee was found"
    return f"knee at {knee:.3g} {asked_in(report)} asked for"
