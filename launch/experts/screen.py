"""What the `moeserve experts` commands print with: one JSON object, or tables that fit the screen.

Knows rich, widths and colours. Knows nothing of experts.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.heat import CELLS, COLOURS, level

PIPE_COLUMNS = 100  # where no terminal says how wide it is
FOCUS = "bold"
DIM = "dim"


def emit(report: dict[str, Any]) -> None:
    """The report as one JSON object on stdout. Numbers are rounded to six digits."""
    json.dump(_plain(report), sys.stdout, allow_nan=False)
    sys.stdout.write("\n")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if hasattr(value, "tolist"):  # of numpy
        return _plain(value.tolist())
    if isinstance(value, float):
        return round(value, 6)
    return str(value) if isinstance(value, Path) else value


def console(stderr: bool = False) -> Any:
    """As wide as the terminal, or as COLUMNS says; a pipe gets PIPE_COLUMNS."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None
    if not stream.isatty() and "COLUMNS" not in os.environ:
        width = PIPE_COLUMNS
    return Console(stderr=stderr, highlight=False, width=width)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], note: str = "") -> Any:
    """columns: names; one that begins with "<" is text (to the left), others are numbers."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    made = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1),
        header_style=DIM,
    )
    for name in columns:
        left = name.startswith("<")
        made.add_column(
            name.removeprefix("<"),
            justify="left" if left else "right",
            no_wrap=not left,
            overflow="fold",
        )
    for row in rows:
        made.add_row(*[cell if hasattr(cell, "append") else str(cell) for cell in row])
    parts: list[Any] = [
        Text(title, style=FOCUS),
        made,
    ]  # not the table's own, which wraps to its width
    return Group(*parts, Text(note + "\n", style=DIM)) if note else Group(*parts)


def heat(value: float, text: str | None = None, digits: int = 2) -> Any:
    """A number in the colour of how far above the mean (1.0) it is."""
    from rich.text import Text

    step = level(round(1000 * max(value - 0.9, 0.0)), 1000.0)
    style = f"color({COLOURS[step]})" if step > 4 else ""
    return Text(f"{value:.{digits}f}" if text is None else text, style=style)


def meter(value: float, full: float, width: int = 16, mark: float | None = None) -> Any:
    """A bar of value out of full, in eighths; mark: where to put a line (the mean)."""
    from rich.text import Text

    eighths = round(8 * width * min(max(value / full, 0.0), 1.0)) if full > 0 else 0
    whole, part = divmod(eighths, 8)
    bar = "█" * whole + ("▏▎▍▌▋▊▉"[part - 1] if part else "")
    bar = bar.ljust(width)
    step = level(round(1000 * value), 1000.0)
    text = Text(bar, style=f"color({COLOURS[max(step, 2)]})", no_wrap=True)
    if mark is not None and full > 0:
        at = min(int(width * mark / full), width - 1)
        if bar[at] == " ":
            text = text[:at] + Text("╎", style=DIM) + text[at + 1 :]
    return text


def legend() -> Any:
    """The colours of heat cells, cold to hot."""
    from rich.text import Text

    text = Text("0 ", style=DIM)
    for step, colour in enumerate(COLOURS):
        text.append(CELLS[step], style=f"color({colour}) on color(234)")
    text.append(" 3 times the mean or more", style=DIM)
    return text


def beside(left: Any, right: Any) -> Any:
    from rich.table import Table

    grid = Table.grid(padding=(0, 4))
    grid.add_row(left, right)
    return grid
