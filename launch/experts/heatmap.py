"""`moeserve experts heatmap`: layer x expert and layer x rank, in the terminal and as a picture.

Shape letters: L layers, E experts, G ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from launch.experts.screen import console, emit, legend
from launch.experts.source import Source
from launch.experts.top_screen import head
from launch.experts.view import FloatArray, View
from launch.heat import grid
from launch.output import unwritable
from moeserve.errors import ConfigError

BY = ("both", "expert", "rank")


@dataclass(frozen=True)
class Heatmap:
    """The command's flags. output: where a PNG goes; by: which of the two; ordered: experts of each
    layer from the hottest to the coldest instead of by number."""

    source: Source
    output: Path | None = None
    by: str = "both"
    ordered: bool = False
    as_json: bool = False

    def run(self) -> None:
        self._check()
        view = self.source.read()
        report = heat_report(view, self.by, self.ordered)
        if self.output is not None:
            from launch.experts.picture import draw

            draw(report, self.output)
            report["file"] = str(self.output)
        if self.as_json:
            emit(report)
            return
        screen = console()
        screen.print(heat_screen(report, screen.width))
        if self.output is not None:
            screen.print(f"{self.output}: {self.output.stat().st_size} bytes")

    def _check(self) -> None:
        problems = []
        if self.by not in BY:
            problems.append(f"--by {self.by!r}: valid are {', '.join(BY)}")
        if self.ordered and self.by == "rank":
            problems.append("--ordered: orders experts; leave it out of --by rank")
        if self.output is not None:
            if self.output.suffix != ".png":
                problems.append(f"--output {str(self.output)!r}: must end in .png")
            problems += unwritable("--output", self.output)
        if problems:
            raise ConfigError(problems)


def heat_report(view: View, by: str = "both", ordered: bool = False) -> dict[str, Any]:
    """As JSON: experts [L][E] and ranks [L][G], loads over the mean of the layer (of the routed
    experts; of all ranks); None for what was not asked for or is not known."""
    experts: FloatArray | None = None
    if by != "rank":
        experts = view.times_mean
        if ordered:
            routed = -np.sort(-experts[:, : view.num_routed], axis=1)
            experts = np.concatenate([routed, experts[:, view.num_routed :]], axis=1)
    ranks: FloatArray | None = None
    if by == "rank" or (by == "both" and view.placement is not None):
        view.placed  # noqa: B018  an error where it is not known
        ranks = view.rank_times_mean
    return {
        "command": "heatmap",
        **view.summary(),
        "tokens": view.about.get("tokens"),
        "ordered": ordered,
        "num_routed_experts": view.num_routed,
        "layers": [view.row_name(row) for row in range(len(view.layers))],
        "experts": None if experts is None else experts.tolist(),
        "ranks": None if ranks is None else ranks.tolist(),
    }


def heat_screen(report: dict[str, Any], columns: int) -> Any:
    from rich.console import Group
    from rich.text import Text

    parts: list[Any] = [head(report)]
    for key, what in (("experts", "expert"), ("ranks", "rank")):
        values = report[key]
        if values is None:
            continue
        counted = report["num_routed_experts"] if key == "experts" else None
        rows, each = grid(report["layers"], np.array(values), columns, counted)
        title = Text(f"\nLoad by layer and {what}", style="bold")
        order = ", hottest first" if report["ordered"] and key == "experts" else ""
        bins = f"a cell: {each} {what}s, the busiest of them" if each > 1 else f"a cell: one {what}"
        title.append(f"  {bins}{order}; at the right the busiest of the layer", style="dim")
        parts += [title, rows]
    parts.append(legend())
    return Group(*parts)
