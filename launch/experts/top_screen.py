"""The picture of a `top_report`: tables of layers, experts, ranks and links; and `head`, the first
line of every command's screen, with its parts. Knows rich and reports; nothing of sources.
"""

from __future__ import annotations

from typing import Any

from launch.experts.screen import beside, heat, meter, table
from launch.experts.units import show_count

WIDE = 132  # columns from which tables stand side by side


def top_screen(report: dict[str, Any], columns: int, live: bool = False) -> Any:
    from rich.console import Group
    from rich.text import Text

    parts: list[Any] = [head(report)]
    if live:
        parts[0].append("   Ctrl-C leaves", style="dim")
    if not report["picks"]:
        parts.append(Text("no expert had any load yet", style="dim"))
        return Group(*parts)
    layers, hottest = _layer_table(report), _hottest_table(report)
    ranks = _rank_table(report) if report["ranks"] else None
    links = _link_table(report) if report["links"] else None
    if columns >= WIDE and ranks is not None:
        parts.append(beside(layers, hottest))
        parts.append(beside(ranks, links) if links is not None else ranks)
    else:
        parts += [x for x in (layers, hottest, ranks, links) if x is not None]
    return Group(*parts)


def head(report: dict[str, Any]) -> Any:
    """The first line: what is looked at."""
    from rich.text import Text

    text = Text()
    text.append(report["source"], style="bold")
    said = []
    if report["kind"] == "job":
        steps = report.get("steps")
        said.append(f"last {steps} steps" if report["since"] == "window" else "since start")
    elif report.get("steps"):
        said.append(f"{report['steps']} step{'s' * (report['steps'] > 1)}")
    said += tokens_told(report)
    if "shared_expert" in report:
        said.append("shared expert added")
    said += ranks_told(report)
    text.append("  " + ", ".join(said), style="dim")
    return text


def tokens_told(report: dict[str, Any]) -> list[str]:
    """What was counted: tokens by phase, and whether one phase only is looked at."""
    said = []
    tokens = report.get("tokens")
    if tokens:
        said.append(
            " + ".join(f"{show_count(n)} {phase}" for phase, n in tokens.items()) + " tokens"
        )
    if report["phase"] != "all":
        said.append(f"{report['phase']} only")
    return said


def ranks_told(report: dict[str, Any]) -> list[str]:
    """Over how many ranks, by which placement."""
    said = []
    if report["num_ranks"]:
        said.append(f"{report['num_ranks']} ranks")
    if report["generation"] is not None:
        said.append(f"placement {report['generation']}")
    elif report["placement_assumed"]:
        said.append("placement as given")
    return said


def _most(report: dict[str, Any]) -> int:
    return max(len(report["hottest"]), 1)


def _layer_table(report: dict[str, Any]) -> Any:
    most, every = _most(report), report["layers"]
    if report["balance"] is None:
        worst = sorted(every, key=lambda x: -x["hottest_times_mean"])[:most]
        rows = [
            [_layer(x), show_count(x["picks"]), x["hottest_expert"], heat(x["hottest_times_mean"])]
            for x in worst
        ]
        return table("Layers, the most skewed first", ("layer", "picks", "hottest", "x mean"), rows)
    balance = report["balance"]
    worst = sorted((x for x in every if x["picks"]), key=lambda x: -x["balance"])[:most]
    full = max(2.0, balance["worst"])
    rows = [
        [
            _layer(x),
            meter(x["balance"], full, 14, mark=1.0),
            heat(x["balance"]),
            f"{x['bound']:.2f}",
            x["busiest_rank"],
            f"{x['hottest_expert']} ({x['hottest_times_mean']:.1f}x)",
        ]
        for x in worst
    ]
    busy = sum(1 for x in every if x["picks"])
    return table(
        f"Balance: mean {balance['mean']:.3f}, worst {balance['worst']:.3f} (layer "
        f"{balance['worst_layer']})",
        ("layer", "<busiest rank / mean", "", "bound", "rank", "hottest expert"),
        rows,
        f"the worst {len(rows)} of {busy} layers with load" if len(rows) < busy else "",
    )


def _layer(x: dict[str, Any]) -> str:
    return f"{x['layer']}{' MTP' if x['mtp'] else ''}"


def _hottest_table(report: dict[str, Any]) -> Any:
    rows = []
    for x in report["hottest"]:
        row = [x["layer"], x["expert"], heat(x["times_mean"], digits=1), f"{x['share']:.1%}"]
        if "split" in x:
            ranks = [s["rank"] for s in x["split"]]
            listed = ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
            each = f" ({x['split'][0]['share']:.0%} each)" if len(ranks) > 1 else ""
            row += [len(ranks), listed + each]
        rows.append(row)
    columns = ["layer", "expert", "x mean", "share"]
    if report["hottest"] and "split" in report["hottest"][0]:
        columns += ["copies", "<on ranks"]
    return table("Hottest experts", columns, rows)


def _rank_table(report: dict[str, Any]) -> Any:
    most, links = 2 * _most(report), report["links"]
    every = sorted(report["ranks"], key=lambda x: -x["times_mean"])
    shown = every if len(every) <= most else [*every[: most // 2], *every[-(most - most // 2) :]]
    rows = []
    nodes = every[0]["node"] is not None
    full = max(2.0, every[0]["times_mean"])
    for number, x in enumerate(shown):
        if len(shown) < len(every) and number == most // 2:
            rows.append(["..."])
        row = [x["rank"], *([x["node"]] if nodes else [])]
        row.append(meter(x["times_mean"], full, 14, mark=1.0))
        row += [heat(x["times_mean"]), heat(x["worst_times_mean"]), x["worst_layer"]]
        rows.append(row)
    columns = ["rank", *(["node"] if nodes else []), "<load / mean", "", "worst", "layer"]
    if links is not None:
        columns += ["rows sent", "received"]
        for row, x in zip([r for r in rows if r[0] != "..."], shown, strict=True):
            row += [show_count(links["sent"][x["rank"]]), show_count(links["received"][x["rank"]])]
    rows = [[*row, *[""] * (len(columns) - len(row))] for row in rows]
    title = (
        "Ranks" if len(shown) == len(every) else f"Ranks, the busiest and idlest of {len(every)}"
    )
    return table(title, columns, rows)


def _link_table(report: dict[str, Any]) -> Any:
    links = report["links"]
    rows = [
        [x["from"], x["to"], show_count(x["rows"]), f"{x['share']:.1%}"] for x in links["busiest"]
    ]
    return table(
        f"Links: {links['same_rank']:.0%} stay on their rank, {links['same_node']:.0%} on their "
        f"node, {links['between_nodes']:.0%} go between nodes",
        ("from rank", "to rank", "rows", "share"),
        rows,
    )
