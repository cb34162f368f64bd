"""A picture of published points: measured against predicted, and what each number stands for.

Knows how it looks. Computes nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launch.capacity.canvas import FAINT, INK, PAPER, head, new_figure, plain, save
from launch.capacity.parts import model_told
from launch.capacity.validate import Point, Validation

_ROUND, _SQUARE = "#1f4e79", "#b5651d"


def draw_validation(v: Validation, path: Path) -> None:
    """Measured against predicted, throughputs and all-to-alls apart; a band of a tenth."""
    named = [_named(v, unit) for unit in ("tok/s/node", "us")]
    lines = [_told(p) for group in named for p in group]
    rows_told = -(-len(lines) // 2)
    charts, below = 6.4, 0.25 + 0.175 * rows_told
    height = charts + below
    figure = new_figure(12.5, height)
    axes = figure.subplots(1, 2)
    bottom = (0.1 * charts + below) / height
    top = 1 - 0.18 * charts / height
    figure.subplots_adjust(left=0.07, right=0.975, top=top, bottom=bottom, wspace=0.2)
    for i, line in enumerate(lines):
        x, y = 0.07 + 0.47 * (i // rows_told), below - 0.2 - 0.175 * (i % rows_told)
        figure.text(x, y / height, line, fontsize=8, color=INK)
    for axis, unit, name in (
        (axes[0], "tok/s/node", "tokens/s a node"),
        (axes[1], "us", "one dispatch or combine, µs"),
    ):
        _against(axis, v, unit, name)
    title = "Published measurements and what moeserve plan predicts"
    throughput = v.median_error(unit="tok/s/node")
    below_title = [
        f"median error {v.median_error():.1%}; of throughputs {throughput:.1%}; "
        f"of points held out {v.median_error(fitted=False):.1%} ({v.held_out_share:.0%} of all)"
        + (f"; {by}" if (by := model_told(v.by, "fast")) else ""),
        "band: 10 %   ·   filled: constants were fitted on it   ·   open: held out",
    ]
    head(figure, title, below_title)
    rows = [
        [p.id, p.what, p.unit, f"{p.measured:,.0f}", f"{p.predicted:,.0f}", f"{p.error:+.1%}"]
        + ["fitted" if p.fitted else "held out"]
        for p in v.points
        if p.predicted is not None and p.error is not None
    ]
    names = ["#", "what", "unit", "measured", "predicted", "error", ""]
    save(figure, path, title, [("points", [names, *rows])])


def _named(v: Validation, unit: str) -> list[Point]:
    """Points with a number beside them: of many all-to-alls only those that are off."""
    points = [p for p in v.points if p.unit == unit and p.predicted is not None]
    return [p for p in points if unit != "us" or abs(p.error or 0.0) > 0.1]


def _told(p: Point) -> str:
    return f"{p.id}: {p.what} ({p.error or 0.0:+.1%}, {'fitted' if p.fitted else 'held out'})"


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
        colour = _ROUND if kinds[kind] == "o" else _SQUARE
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
    _name_points(axis, _named(v, unit), points)
    axis.legend(frameon=False, fontsize=9, loc="upper left")
    axis.set_xlabel(f"measured: {name}", fontsize=9.5, color=INK)
    axis.set_ylabel("predicted", fontsize=9.5, color=INK)
    steps = (1, 1.5, 2, 3, 4, 5, 7) if high < 30 * low else (1, 2, 5)
    ticks = [t * 10**e for e in range(1, 6) for t in steps]
    kept = [t for t in ticks if low <= t <= high]
    for one in (axis.xaxis, axis.yaxis):
        one.set_ticks(kept, labels=[f"{t:,.0f}" for t in kept])
        one.set_ticks([], minor=True)
