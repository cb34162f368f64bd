"""`bench dispatch --plot`: the time of a layer's two all-to-alls over what was swept, a column of
panels for each wire format, the plain exchange as the line to reach; bars where there is one value.

Knows matplotlib and results (`dispatch_show`); nothing of how they were made.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.bench.dispatch_refused import name_of
from launch.bench.dispatch_show import Result
from launch.bench.dispatch_tables import number
from moeserve.terminal import counted

if TYPE_CHECKING:
    Row = dict[str, Any]

INK, PAPER, FAINT, GRID = "#1b1f24", "#ffffff", "#6b7280", "#e5e7eb"
COLOURS = ("#2563eb", "#dc7018", "#059669", "#9333ea", "#db2777", "#0891b2", "#ca8a04")
_WARNING = "#b91c1c"
_MARKS = ("o", "s", "^", "D", "v", "P", "X")
_LINES = {"pairs": "-", "summed": (0, (4, 1.6))}  # pairs: filled marks, summed: hollow ones
_PLAIN = {"pairs": (0, (1, 1)), "summed": (0, (5, 1, 1, 1))}
_APART = 0.011  # of the axis, between two series at the same x, so that no mark hides another
_WIRES_TOLD = {"model": "rows as they are (model dtype)", "fp8": "FP8 rows, fp32 scales"} | {
    "fp8_ue8m0": "FP8 rows, UE8M0 scales"
}
_AXES = {"tokens": "tokens a rank", "ranks": "ranks", "hidden": "hidden size"}


def draw(result: Result, path: Path) -> None:
    """Write the picture of what was measured (one row or more)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    axis = _axis(result)
    figure = Figure(dpi=150, facecolor=PAPER)
    FigureCanvasAgg(figure)
    if len({row[axis] for row in result.rows}) > 1:
        _Lines(result, axis).draw(figure)
    else:
        _bars(figure, result)
    figure.savefig(path)


def _axis(result: Result) -> str:
    """What grew: the sweep, or whatever has several values, tokens first."""
    grown = [a for a in _AXES if len({row[a] for row in result.rows}) > 1]
    swept = result.asked.sweep
    return swept if swept in grown else grown[0] if grown else "tokens"


# -- lines ----------------------------------------------------------------------------------------


class _Lines:
    """A column of panels for each wire, a row for each size beside what grew; axes shared."""

    def __init__(self, result: Result, axis: str) -> None:
        self._result, self._axis, rows = result, axis, result.rows
        self._wires = list(dict.fromkeys(row["wire"] for row in rows))
        self._others = [name for name in _AXES if name != axis]
        self._sizes = sorted({self._size(row) for row in rows})
        self._ways = list(dict.fromkeys((name_of(row), row["form"]) for row in rows))
        self._backends = list(dict.fromkeys(name for name, _ in self._ways))
        self._values = sorted({row[axis] for row in rows})
        self._handles: dict[str, Any] = {}

    def _size(self, row: Row) -> tuple[int, ...]:
        return tuple(row[name] for name in self._others)

    def draw(self, figure: Any) -> None:
        across, down = len(self._wires), len(self._sizes)
        grid = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True)
        for panels, size in zip(grid, self._sizes, strict=True):
            for panel, wire in zip(panels, self._wires, strict=True):
                rows = [r for r in self._result.rows if (self._size(r), r["wire"]) == (size, wire)]
                self._panel(panel, rows)
                panel.set_title(self._title(size, wire), loc="left", fontsize=9, color=INK)
            panels[0].set_ylabel("dispatch + combine, ms (p50)", fontsize=8.5, color=INK)
        for panel in grid[-1]:
            panel.set_xlabel(_AXES[self._axis], fontsize=8.5, color=INK)
        times = [_ms(row) for row in self._result.rows] + [
            row["plain_ms"]["median"] for row in self._result.rows if row["plain_ms"]
        ]
        _ticks(grid[0][0].yaxis, *_log_range(times))
        _ticks_at(grid[0][0].xaxis, self._values)
        _frame(figure, self._result, self._handles, 4.9 * across + 0.9, 2.9 * down, down)

    def _title(self, size: tuple[int, ...], wire: str) -> str:
        several = [
            f"hidden {value}"
            if name == "hidden"
            else counted(value, name[:-1]) + " a rank" * (name == "tokens")
            for i, (name, value) in enumerate(zip(self._others, size, strict=True))
            if len({other[i] for other in self._sizes}) > 1
        ]
        return f"{wire}: {_WIRES_TOLD[wire]}" + "".join(f", {x}" for x in several)

    def _panel(self, panel: Any, rows: Sequence[Row]) -> None:
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        for form in dict.fromkeys(row["form"] for row in rows):
            plain = {r[self._axis]: r["plain_ms"] for r in rows if r["form"] == form}
            points = sorted((x, ms["median"]) for x, ms in plain.items() if ms)
            if points:
                (line,) = panel.plot(
                    *zip(*points, strict=True), color=INK, linestyle=_PLAIN[form], linewidth=1.3,
                    marker="_", markersize=8, zorder=1,
                )  # fmt: skip
                self._handles.setdefault(f"plain exchange of the ideal bytes, {form}", line)
        for i, way in enumerate(self._ways):
            backend, form = way
            points = sorted((r[self._axis], _ms(r)) for r in rows if (name_of(r), r["form"]) == way)
            if not points:
                continue
            number_of = self._backends.index(backend)
            colour = COLOURS[number_of % len(COLOURS)]
            wide = 4 * self._values[-1] / self._values[0]
            apart = wide ** ((i - (len(self._ways) - 1) / 2) * _APART)
            (line,) = panel.plot(
                [x * apart for x, _ in points], [ms for _, ms in points], color=colour,
                marker=_MARKS[number_of % len(_MARKS)], markersize=5, linestyle=_LINES[form],
                markerfacecolor=colour if form == "pairs" else PAPER, linewidth=1.4, zorder=2,
            )  # fmt: skip
            self._handles.setdefault(f"{backend}, {form}", line)
        _dress(panel)


# -- bars -----------------------------------------------------------------------------------------


def _bars(figure: Any, result: Result) -> None:
    """Of one size: a bar for each backend, wire and form, model beside FP8 of the same backend."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    rows = sorted(
        result.rows, key=lambda r: list(dict.fromkeys(map(name_of, result.rows))).index(name_of(r))
    )
    backends = list(dict.fromkeys(name_of(row) for row in rows))
    panel = figure.subplots()
    for i, row in enumerate(rows):
        colour = COLOURS[backends.index(name_of(row)) % len(COLOURS)]
        panel.barh(
            i, _ms(row), 0.72, color=colour, alpha=1.0 if row["wire"] == "model" else 0.55, zorder=2
        )
        plain = row["plain_ms"]
        if plain:
            panel.plot([plain["median"]] * 2, [i - 0.42, i + 0.42], color=INK, lw=2, zorder=3)
        beside = f"   {number(row['times_plain'])} x plain" if plain else ""
        end = max(_ms(row), plain["median"] if plain else 0)
        panel.annotate(
            f"{number(_ms(row))} ms{beside}", (end, i), (6, 0), textcoords="offset points",
            va="center", fontsize=8, color=INK,
        )  # fmt: skip
    panel.set_yticks(
        range(len(rows)), [f"{name_of(r)}   {r['wire']}, {r['form']}" for r in rows], fontsize=8
    )
    panel.invert_yaxis()
    _dress(panel)
    panel.grid(False, axis="y")
    panel.set_xlim(
        0, 1.35 * max(max(_ms(r), (r["plain_ms"] or {"median": 0})["median"]) for r in rows)
    )
    panel.set_xlabel("dispatch + combine, ms (p50)", fontsize=8.5, color=INK)
    handles: dict[str, Any] = {
        "model: rows as they are": Patch(color=FAINT),
        "fp8: rows in FP8 (paler)": Patch(color=FAINT, alpha=0.55),
        "plain exchange of the ideal bytes": Line2D([], [], color=INK, lw=2),
    }
    if not any(row["wire"] != "model" for row in rows):
        del handles["fp8: rows in FP8 (paler)"]
    if not any(row["plain_ms"] for row in rows):
        del handles["plain exchange of the ideal bytes"]
    _frame(figure, result, handles, 9.0, 0.9 + 0.27 * len(rows), 1, left=3.1)


# -- both -----------------------------------------------------------------------------------------


def _frame(
    figure: Any, result: Result, handles: dict[str, Any], width: float, panels: float, down: int,
    left: float = 0.85,
) -> None:  # fmt: skip
    """Title, what was measured, the warning, legend, machine; all in inches."""
    columns = max(1, min(len(handles), int(width / 2.9)))
    legend = 0.2 * -(-len(handles) // columns) + 0.1
    wide = int(width * 15.2)
    lines = len({row[_axis(result)] for row in result.rows}) > 1
    apart = "; series at the same x are drawn a little apart" if lines else ""
    foot = textwrap.wrap(
        f"{result.made_on()}; {result.transport}; picks drawn {result.loads}{apart}", wide
    )
    told = textwrap.wrap(_about(result), wide)
    emulated = any(row["emulated"] for row in result.rows)
    head = 0.62 + 0.17 * len(told) + 0.24 * emulated + 0.25
    below = 0.5 + legend + 0.16 * len(foot) + 0.12
    height = head + panels + 0.35 * (down - 1) + below
    figure.set_size_inches(width, height)
    figure.subplots_adjust(
        left=left / width, right=1 - 0.2 / width, top=1 - head / height, bottom=below / height,
        wspace=0.06, hspace=0.28 if down > 1 else 0.2,
    )  # fmt: skip
    x = 0.25 / width
    figure.text(
        x,
        1 - 0.36 / height,
        "The two all-to-alls of a layer",
        fontsize=14,
        weight="bold",
        color=INK,
    )
    y = 0.62
    for line in told:
        figure.text(x, 1 - y / height, line, fontsize=8.5, color=INK)
        y += 0.17
    if emulated:
        figure.text(
            x, 1 - (y + 0.05) / height, "(emulated) is Python over gloo: these TIMES say "
            "nothing of the library; only its bytes and limits are true.",
            fontsize=8.5, weight="bold", color=_WARNING,
        )  # fmt: skip
    for i, line in enumerate(reversed(foot)):
        figure.text(x, (0.1 + 0.16 * i) / height, line, fontsize=7.5, color=FAINT)
    figure.legend(
        handles.values(), handles.keys(), loc="lower center", ncols=columns, frameon=False,
        fontsize=8, labelcolor=INK, handlelength=3.2, labelspacing=0.3,
        bbox_to_anchor=(0.5, (0.12 + 0.16 * len(foot)) / height),
    )  # fmt: skip


def _about(result: Result) -> str:
    """What is alike in all of it."""
    asked, rows = result.asked, result.rows

    def values(name: str) -> str:
        return ", ".join(str(x) for x in sorted({row[name] for row in rows}))

    parts = []
    if len({row["ranks"] for row in rows}) == 1:
        parts.append(counted(rows[0]["ranks"], "rank"))
    if len({row["tokens"] for row in rows}) == 1:
        parts.append(f"{counted(rows[0]['tokens'], 'token')} a rank")
    copies = f" + {asked.redundant}" if asked.redundant else ""
    forms = " or ".join(dict.fromkeys(row["form"] for row in rows))
    parts += [
        f"hidden {values('hidden')}",
        f"{asked.experts}{copies} experts",
        f"top-{asked.top_k}",
        f"p50 of {counted(asked.steps, 'step')}",
        f"results home as {forms}",
    ]
    return ", ".join(parts)


def _dress(panel: Any) -> None:
    panel.grid(True, which="major", color=GRID, linewidth=0.8)
    panel.set_axisbelow(True)
    panel.tick_params(labelsize=8, colors=INK, length=2, which="both")
    for name, side in panel.spines.items():
        side.set_visible(name in ("left", "bottom"))
        side.set_color(FAINT)


def _ms(row: Row) -> float:
    return float(row["both_ms"]["median"])


def _log_range(values: Sequence[float]) -> tuple[float, float]:
    """With room, and never so narrow that there would be no tick."""
    least, most = min(values) / 1.3, max(values) * 1.3
    wider = max(1.0, (4.0 * least / most) ** 0.5)
    return least / wider, most * wider


def _ticks(axis: Any, least: float, most: float) -> None:
    """1, 2, 5, 10, ... with numbers; only 1, 10, ... where those would be too many."""
    from matplotlib.ticker import FixedLocator, NullLocator

    axis.axes.set_ylim(least, most)
    found = [f * 10.0**e for e in range(-6, 8) for f in (1, 2, 5) if least <= f * 10.0**e <= most]
    if len(found) > 11:
        found = [x for x in found if f"{x:e}"[0] == "1"]
    axis.set_major_locator(FixedLocator(found))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: f"{value:g}")


def _ticks_at(axis: Any, values: Sequence[int]) -> None:
    """At what was measured, each with its number, as far as there is room."""
    from matplotlib.ticker import FixedLocator, NullLocator

    axis.axes.set_xlim(values[0] / 2**0.4, values[-1] * 2**0.4)
    shown = [values[0]]
    room = (values[-1] / values[0]) ** (1 / 12)
    shown += [b for b in values[1:] if b >= shown[-1] * room and not shown.append(b)]  # type: ignore[func-returns-value]
    axis.set_major_locator(FixedLocator(sorted(set(shown))))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: f"{value:g}")
