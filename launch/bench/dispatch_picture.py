"""`bench dispatch --plot`: time of a layer against the bytes that it must move, a panel for each
number of ranks, the plain exchange as the line to reach. Knows matplotlib and rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launch.bench.dispatch_show import backend_of

INK, PAPER, FAINT, GRID = "#1b1f24", "#ffffff", "#6b7280", "#e5e7eb"
COLOURS = ("#2563eb", "#dc7018", "#059669", "#9333ea", "#db2777", "#0891b2", "#ca8a04")
_MARKS = {"model": "o", "fp8": "^", "fp8_ue8m0": "s"}
_LINES = {"pairs": "-", "summed": ":"}
_ACROSS = 3  # panels in a row
_HEAD = 1.02  # inches above the panels


def draw(rows: list[dict[str, Any]], about: str, path: Path) -> None:
    """Write the picture. rows: as measured, refused ones are left out."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in rows if row["ok"]]
    sizes = sorted({row["ranks"] for row in rows})
    across = min(_ACROSS, len(sizes))
    down = -(-len(sizes) // across)
    width = 8.4 if across == 1 else 4.6 * across + 0.6
    figure = Figure(dpi=150, facecolor=PAPER)
    FigureCanvasAgg(figure)
    panels = figure.subplots(down, across, squeeze=False, sharey=True).reshape(-1)
    backends = list(dict.fromkeys(backend_of(row) for row in rows))
    handles: dict[str, Any] = {}
    for panel, ranks in zip(panels, sizes, strict=False):
        _panel(panel, ranks, [row for row in rows if row["ranks"] == ranks], backends, handles)
    for panel in panels[len(sizes) :]:
        panel.set_visible(False)
    for panel in panels[::across]:
        panel.set_ylabel("dispatch + combine, ms (median)", fontsize=9, color=INK)
    columns = max(2, min(5, int(width // 2.6)))
    below = 0.75 + 0.22 * -(-len(handles) // columns)  # inches: axis label, legend
    height = 3.6 * down + 0.35 * (down - 1) + _HEAD + below
    figure.set_size_inches(width, height)
    left = 0.85 / width
    figure.subplots_adjust(
        left=left, right=1 - 0.25 / width, top=1 - _HEAD / height, bottom=below / height,
        wspace=0.08, hspace=0.3,
    )  # fmt: skip
    title, subtitle = 1 - 0.36 / height, 1 - 0.62 / height
    name = "Two all-to-alls of a layer"
    figure.text(left, title, name, fontsize=14, weight="bold", color=INK)
    figure.text(left, subtitle, about, fontsize=8.5, color=FAINT)
    figure.legend(
        handles.values(), handles.keys(), loc="lower center", ncols=columns, frameon=False,
        fontsize=8.5, labelcolor=INK, bbox_to_anchor=(0.5, 0.0),
    )  # fmt: skip
    figure.savefig(path)


def _panel(
    panel: Any, ranks: int, rows: list[dict[str, Any]], backends: list[str], handles: dict[str, Any]
) -> None:
    from matplotlib.ticker import LogLocator

    ways = dict.fromkeys((backend_of(row), row["wire"], row["form"]) for row in rows)
    forms = {row["form"] for row in rows}
    for backend, wire, form in ways:
        points = sorted(
            (_megabytes(row), row["both_ms"]["median"])
            for row in rows
            if (backend_of(row), row["wire"], row["form"]) == (backend, wire, form)
        )
        colour = COLOURS[backends.index(backend) % len(COLOURS)]
        (line,) = panel.plot(
            *zip(*points, strict=True), color=colour, marker=_MARKS[wire], markersize=4.5,
            linestyle=_LINES[form], linewidth=1.5, alpha=1.0 if wire == "model" else 0.75,
        )  # fmt: skip
        handles.setdefault(f"{backend}, {wire}" + f", {form}" * (len(forms) > 1), line)
    for wire, form in dict.fromkeys((wire, form) for _, wire, form in ways):
        plain = sorted(
            {
                (_megabytes(row), row["plain_ms"]["median"])
                for row in rows
                if row["plain_ms"] and (row["wire"], row["form"]) == (wire, form)
            }
        )
        if plain:
            (line,) = panel.plot(
                *zip(*plain, strict=True), color=INK, linestyle="--", linewidth=1.1,
                marker=_MARKS[wire], markersize=3, alpha=0.7,
            )  # fmt: skip
            handles.setdefault("plain exchange of the ideal bytes (dashed)", line)
    if all(_megabytes(row) > 0 for row in rows):
        panel.set_xscale("log")
        panel.xaxis.set_major_locator(LogLocator(10, (1, 2, 5)))
    panel.set_yscale("log")
    panel.set_title(f"{ranks} ranks" if ranks > 1 else "1 rank", loc="left", fontsize=10, color=INK)
    panel.set_xlabel("ideal MB a rank sends in a layer", fontsize=9, color=INK)
    panel.grid(True, which="major", color=GRID, linewidth=0.8)
    panel.set_axisbelow(True)
    panel.tick_params(labelsize=8, colors=INK, length=2, which="both")
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_minor_formatter(lambda value, _: "")
    for name, side in panel.spines.items():
        side.set_visible(name in ("left", "bottom"))
        side.set_color(FAINT)


def _megabytes(row: dict[str, Any]) -> float:
    return float(row["bytes"]["both"]["ideal"]) / row["ranks"] / 1e6
