"""`bench speculate --plot`: speed-up over the depth of drafts, a panel for each batch size; where
one depth only was measured, over the batch size.

Knows matplotlib and results; nothing of how they were made.
"""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import Any

from launch.bench.palette import COLOURS, FAINT, GRID, INK, PAPER
from launch.bench.speculate_figures import quartiles
from launch.bench.speculate_show import Result, short

_MARKS = ("o", "s", "^", "D", "v", "P", "X")
_ASIDE = 0.07  # of a depth or a doubling of the batch: drafters stand side by side
_AUTO = 0.9  # of a depth to the right of the deepest: where adaptive drafts stand


def draw(result: Result, path: Path) -> None:
    """Write the picture (one row or more)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = result.rows
    depths = {row["depth"] for row in rows}
    over = "depth" if len(depths) > 1 or len({row["batch"] for row in rows}) == 1 else "batch"
    other = "batch" if over == "depth" else "depth"
    panels = list(dict.fromkeys(row[other] for row in rows))
    drafters = list(dict.fromkeys(row["drafter"] for row in rows))
    across = min(len(panels), 3)
    down = -(-len(panels) // across)
    figure = Figure(figsize=(4.2 * across + 0.8, 3.3 * down + 1.9), dpi=150, facecolor=PAPER)
    FigureCanvasAgg(figure)
    grid = figure.subplots(down, across, squeeze=False, sharey=True).flatten().tolist()
    handles: dict[str, Any] = {}
    for panel in grid[len(panels) :]:
        panel.set_visible(False)
    for panel, value in zip(grid, panels, strict=False):
        mine = [row for row in rows if row[other] == value]
        _panel(panel, mine, over, drafters, handles)
        title = f"batch {value}" if other == "batch" else f"k = {value}"
        panel.set_title(title, loc="left", fontsize=9.5, color=INK)
    # A pair that a busy machine broke may be ten times off: the scale is for what counts.
    grid[0].set_ylim(0, 1.2 * max(max(row["speedup"], row["predicted"]) for row in rows))
    for panel in grid[::across]:
        panel.set_ylabel("times the speed without drafts", fontsize=8.5, color=INK)
    _frame(figure, result, handles, len(drafters))
    figure.savefig(path)


def _panel(
    panel: Any, rows: list[dict[str, Any]], over: str, drafters: list[str], handles: dict[str, Any]
) -> None:
    numbers = sorted({row[over] for row in rows if row[over] != "auto"})
    auto = (numbers[-1] if numbers else 0) + _AUTO
    aside = _ASIDE
    if over == "batch":
        panel.set_xscale("log", base=2)
        aside *= max(1.0, math.log2(numbers[-1] / numbers[0]) / 3)
    panel.axhline(1.0, color=FAINT, linewidth=1, zorder=1)
    for i, drafter in enumerate(drafters):
        colour, mark = COLOURS[i % len(COLOURS)], _MARKS[i % len(_MARKS)]
        mine = sorted((r for r in rows if r["drafter"] == drafter), key=lambda r: str(r[over]))
        for line in (
            [r for r in mine if r[over] != "auto"],
            [r for r in mine if r[over] == "auto"],
        ):
            if not line:
                continue
            line.sort(key=lambda r: auto if r[over] == "auto" else r[over])
            at = [auto if r[over] == "auto" else r[over] for r in line]
            side = (i - (len(drafters) - 1) / 2) * aside
            x = [n * 2**side if over == "batch" else n + side for n in at]
            middle = [quartiles(r["ratios"]) for r in line]
            low = [r["speedup"] - q[0] for r, q in zip(line, middle, strict=True)]
            high = [q[1] - r["speedup"] for r, q in zip(line, middle, strict=True)]
            low, high = ([max(y, 0.0) for y in part] for part in (low, high))
            bars = panel.errorbar(
                x, [r["speedup"] for r in line], yerr=[low, high], color=colour, marker=mark,
                markersize=5, linewidth=1.6, elinewidth=0.8, zorder=3,
            )  # fmt: skip
            (dashed,) = panel.plot(
                x, [r["predicted"] for r in line], color=colour, marker=mark, markersize=5,
                markerfacecolor=PAPER, linewidth=1.2, linestyle=(0, (4, 2)), zorder=2,
            )  # fmt: skip
            handles.setdefault(f"{short(drafter)}, measured", bars)
            handles.setdefault(f"{short(drafter)}, predicted", dashed)
    ticks = [*numbers, *([auto] if any(r[over] == "auto" for r in rows) else [])]
    panel.set_xticks(ticks, [str(n) for n in numbers] + ["auto"] * (len(ticks) - len(numbers)))
    panel.minorticks_off()
    if over == "depth":
        panel.set_xlim(min(ticks) - 0.5, max(ticks) + 0.5)
    else:  # room at both sides, also of one or two sizes
        panel.set_xlim(min(ticks) / 2**0.5, max(ticks) * 2**0.5)
    panel.set_xlabel(
        "drafts a run, k" if over == "depth" else "sequences at once", fontsize=8.5, color=INK
    )
    panel.grid(True, axis="y", color=GRID, linewidth=0.8)
    panel.set_axisbelow(True)
    panel.tick_params(labelsize=8, colors=INK, length=2)
    for name, side in panel.spines.items():
        side.set_visible(name in ("left", "bottom"))
        side.set_color(FAINT)


def _frame(figure: Any, result: Result, handles: dict[str, Any], drafters: int) -> None:
    width, height = figure.get_size_inches()
    asked = result.asked
    about = (
        f"{result.checkpoint}, ep {result.ep}, temperature {asked.temperature:g}, decode of "
        f"{asked.prompt_length}+{asked.output_length} tokens, median of {asked.repeat} pairs "
        "(bars: the middle half of them)"
    )
    wide = int(width * 15.2)
    head, foot = textwrap.wrap(about, wide), textwrap.wrap(result.made_on(), wide)
    columns = max(1, min(drafters, int(width / 2.6)))
    legend_rows = 2 * -(-drafters // columns)
    below = 0.55 + 0.2 * legend_rows + 0.15 * len(foot) + 0.1
    figure.subplots_adjust(
        left=0.65 / width, right=1 - 0.15 / width, top=1 - (0.75 + 0.17 * len(head)) / height,
        bottom=below / height, wspace=0.08, hspace=0.45,
    )  # fmt: skip
    x = 0.2 / width
    figure.text(
        x, 1 - 0.33 / height, "Speculation: speed-up of decode", fontsize=13, weight="bold",
        color=INK,
    )  # fmt: skip
    for i, line in enumerate(head):
        figure.text(x, 1 - (0.55 + 0.17 * i) / height, line, fontsize=8.5, color=INK)
    for i, line in enumerate(reversed(foot)):
        figure.text(x, (0.08 + 0.15 * i) / height, line, fontsize=7.5, color=FAINT)
    figure.legend(
        handles.values(), handles.keys(), loc="lower center", ncols=columns, frameon=False,
        fontsize=8, labelcolor=INK, handlelength=3.0, labelspacing=0.3,
        bbox_to_anchor=(0.5, (0.1 + 0.15 * len(foot)) / height),
    )  # fmt: skip
