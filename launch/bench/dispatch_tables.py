"""The tables of `bench dispatch`: as many columns as fit beside each other, else two tables, so
that no number is ever cut.

Knows rich and rows of measurements; nothing of how they were made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Row = dict[str, Any]


@dataclass(frozen=True)
class _Column:
    head: str
    cells: list[str]


def spread_names(steps: int) -> tuple[str, ...]:
    """Which percentiles so many steps tell apart: of fewer than 100 the p99 is but the largest."""
    return ("p50", "p90", "p99")[: 1 + (steps >= 10) + (steps >= 100)]


def tables(title: str, rows: Sequence[Row], steps: int, console: Console) -> list[Table]:
    """One table, or times and bytes apart; of times fewer where the terminal is narrow."""
    names = spread_names(steps)

    def times(parts: Sequence[str], all_of: Sequence[str]) -> list[_Column]:
        return [_spread(rows, part, names if part in all_of else names[:1]) for part in parts]

    parts = ("dispatch", "combine", "both")
    volume, plain = _volume(rows), _plain(rows)
    ms, mb = "; times in ms", "; bytes"
    choices: tuple[tuple[tuple[str, list[_Column]], ...], ...] = (
        ((ms, [*times(parts, parts), *volume, *plain]),),
        ((ms, [*times(parts, parts), *plain]), (mb, volume)),
        ((ms, [*times(parts, ("both",)), plain[0], plain[-1]]), (mb, [*volume, plain[1]])),
        ((ms, [*times(parts, ("both",)), plain[-1]]), (mb, [*volume, plain[0]])),
        ((ms, times(parts, ("both",))), (mb, [*volume[:3], plain[0], plain[-1]])),
        ((ms, times(("both",), ("both",))), (mb, volume[:3]), ("; plain exchange, ms", plain)),
    )
    made: list[Table] = []
    for choice in choices:
        made = [_table(title + what, rows, columns) for what, columns in choice]
        if all(width_of(table, console) <= console.width for table in made):
            break
    return made


def width_of(table: Table, console: Console) -> int:
    """Columns of the screen that it takes uncut."""
    return console.measure(table, options=console.options.update(width=1000)).maximum


def _volume(rows: Sequence[Row]) -> list[_Column]:
    whole = [row["bytes"]["both"] for row in rows]
    ratios = ["-" if part["ratio"] is None else f"{part['ratio']:.2f}" for part in whole]
    return [
        _Column("sent\nMB", [number(part["sent"] / 1e6) for part in whole]),
        _Column("ideal\nMB", [number(part["ideal"] / 1e6) for part in whole]),
        _Column("sent /\nideal", ratios),
        _Column("GB/s", [number(row["gb_per_s"]) for row in rows]),
    ]


def _plain(rows: Sequence[Row]) -> list[_Column]:
    def column(head: str, value: Callable[[Row], float]) -> _Column:
        return _Column(head, ["-" if r["plain_ms"] is None else number(value(r)) for r in rows])

    return [
        column("plain\np50", lambda row: float(row["plain_ms"]["median"])),
        column("plain\nGB/s", lambda row: float(row["plain_gb_per_s"])),
        column("x\nplain", lambda row: float(row["times_plain"])),
    ]


def _spread(rows: Sequence[Row], part: str, names: Sequence[str]) -> _Column:
    """p50 p90 p99 below each other's heads."""
    keys = ["median" if name == "p50" else name for name in names]
    values = [[number(row[f"{part}_ms"][key]) for key in keys] for row in rows]
    widths = [max(len(x) for x in column) for column in zip(names, *values, strict=True)]

    def line(cells: Sequence[str]) -> str:
        return " ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))

    return _Column(f"{part}\n{line(names)}", [line(cells) for cells in values])


def _table(title: str, rows: Sequence[Row], columns: Sequence[_Column]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(
        title=title,
        box=SIMPLE_HEAD,
        title_justify="left",
        collapse_padding=True,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.add_column("tokens", justify="right", no_wrap=True)
    for name in ("backend", "wire", "form"):
        table.add_column(name, no_wrap=True)
    for column in columns:
        table.add_column(column.head, justify="right", no_wrap=True)
    before = None
    for i, row in enumerate(rows):
        new = row["tokens"] != before
        if before is not None and new:
            table.add_section()
        star = "*" if row["emulated"] else ""
        names = (f"{row['backend']}{star}", row["wire"], row["form"])
        cells = (column.cells[i] for column in columns)
        table.add_row(str(row["tokens"]) if new else "", *names, *cells)
        before = row["tokens"]
    return table


def number(value: float) -> str:
    """Three digits that count, of small numbers two."""
    if value >= 1:
        return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
    return f"{value:.2f}" if value >= 0.1 or not value else f"{value:.2g}"
