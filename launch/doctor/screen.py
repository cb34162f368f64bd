"""The doctor's words on a terminal: checks as a table, links as a heat map. Knows rich."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from launch.doctor.check import Check, State, counts
from launch.doctor.links import SlowLink

_STYLE = {
    State.OK: "green",
    State.MISSING: "dim",
    State.WARNING: "yellow",
    State.FAILS: "bold red",
}
MOST_COLUMNS = 16
_CELLS = "▁▂▃▄▅▆▇█"  # of the median: an eighth to two


def show_checks(checks: Sequence[Check], title: str) -> None:
    """The table, and below it what to do."""
    from rich.table import Table
    from rich.text import Text

    from launch.bench.screen import wide_console

    nodes = any(check.node for check in checks)
    table = Table(title=title, title_justify="left", show_lines=False)
    columns = ["", "check", "state", "found", "reason"]
    for column in [*columns[:1], *(["node"] if nodes else []), *columns[1:]]:
        table.add_column(column, overflow="fold")
    section = ""
    for check in checks:
        name = check.section if check.section != section else ""
        if name and section:
            table.add_section()
        section = check.section
        style = _STYLE[check.state]
        cells = [Text(name, "bold"), *([Text(check.node)] if nodes else []), Text(check.name)]
        cells += [Text(check.state.value, style), Text(check.found), Text(check.reason, "dim")]
        table.add_row(*cells)
    console = wide_console()
    console.print(table)
    for state in (State.FAILS, State.WARNING, State.MISSING):
        for check in checks:
            if check.state is state and check.remedy:
                where = f" ({check.node})" if check.node not in ("", "all") else ""
                line = f"{state.value}: {check.name}{where}: {check.remedy}"
                console.print(Text(line, _STYLE[state]))
    found = counts(checks)
    print(", ".join(f"{count} {state}" for state, count in found.items()))


def show_matrix(
    cells: Sequence[Sequence[float | None]], names: Sequence[str], title: str, unit: float
) -> None:
    """A row for each that sends. unit: a figure of 1 is so much. Coloured by the median; of more
    than MOST_COLUMNS a block stands for each, higher for more."""
    from rich.table import Table
    from rich.text import Text

    from launch.bench.screen import wide_console

    known = [x for row in cells for x in row if x is not None]
    if not known:
        return
    usual = median(known)
    console = wide_console()
    if len(names) > MOST_COLUMNS:
        text = Text(f"{title}; median {usual / unit:.1f}\n", no_wrap=True, overflow="crop")
        width = max(map(len, names))
        for name, row in zip(names, cells, strict=True):
            text.append(f"{name:>{width}} ", style="dim")
            for x in row:
                text.append(" " if x is None else _block(x / usual), style=_heat(x, usual))
            text.append("\n")
        console.print(text)
        return
    table = Table(title=f"{title}; median {usual / unit:.1f}", title_justify="left")
    table.add_column("from \\ to", justify="right", style="dim")
    for name in names:
        table.add_column(name, justify="right")
    for name, row in zip(names, cells, strict=True):
        figures = [Text("" if x is None else f"{x / unit:.1f}", style=_heat(x, usual)) for x in row]
        table.add_row(name, *figures)
    console.print(table)


def _block(ratio: float) -> str:
    return _CELLS[max(0, min(len(_CELLS) - 1, round(ratio * 4) - 1))]


def _heat(value: float | None, usual: float) -> str:
    """By how far from the median: which way is good the title says."""
    if value is None or usual <= 0:
        return ""
    ratio = value / usual
    steps = ((0.25, 21), (0.5, 33), (0.8, 37), (1.25, 71), (2.0, 178), (4.0, 208))
    colour = next((colour for most, colour in steps if ratio < most), 196)
    return f"color({colour})"


def slow_text(link: SlowLink, names: Sequence[str]) -> str:
    """One line."""
    a, b = names[link.a], names[link.b]
    if link.what == "latency":
        return (
            f"{a} - {b}: latency {link.value * 1e6:.0f} us, the median {link.scope} is "
            f"{link.median * 1e6:.0f} us"
        )
    return (
        f"{a} -> {b}: {link.value / 1e6:.0f} MB/s, the median {link.scope} is "
        f"{link.median / 1e6:.0f} MB/s"
    )


def as_json(checks: Sequence[Check], **more: Any) -> dict[str, Any]:
    """counts: of states; fails: whether anything does."""
    found = counts(checks)
    return {
        "ok": not found[State.FAILS.value],
        "counts": found,
        "checks": [check.as_json() for check in checks],
        **more,
    }
