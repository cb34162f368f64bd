"""A heat table for the terminal: counts as coloured cells. Knows numbers and rich; nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

CELLS = " ▁▂▃▄▅▆▇█"
# From cold to hot (xterm colours): told apart without colour by the height of the cell.
COLOURS = (236, 18, 19, 26, 37, 71, 178, 208, 196)
HOT = 3.0  # times the mean: the last step


def level(count: int, mean: float) -> int:
    """0 (none) to len(CELLS) - 1 (HOT times the mean, or more)."""
    if count <= 0 or mean <= 0:
        return 0
    steps = len(CELLS) - 1
    return max(1, min(steps, round(count / mean / HOT * steps)))


def heat_rows(rows: list[tuple[str, list[int]]], num_ranks: int, columns: int = 100) -> Any:
    """A line a row: a cell for each expert, a bar between ranks, the fullest against the mean.

    num_ranks: how many parts the columns are cut into, as the trivial placement without copies
    does: they differ by one column at most, the larger ones first. columns: the terminal's; cells
    are two wide where that fits, and what does not fit at all is cut.
    """
    from rich.text import Text

    text = Text(no_wrap=True, overflow="crop")
    width = max((len(name) for name, _ in rows), default=0)
    for name, counts in rows:
        mean = sum(counts) / max(len(counts), 1)
        text.append(f"  {name:<{width}} ")
        least, larger = divmod(len(counts), num_ranks)
        starts = {rank * least + min(rank, larger) for rank in range(num_ranks)}
        around = len(f"  {'':<{width}} | 10.0x") + num_ranks
        wide = 2 if around + 2 * len(counts) <= columns else 1
        for i, count in enumerate(counts):
            if i in starts:
                text.append("|", style="dim")
            step = level(count, mean)
            text.append(CELLS[step] * wide, style=f"color({COLOURS[step]}) on color(234)")
        peak = max(counts, default=0) / mean if mean else 0.0
        text.append("|", style="dim")
        text.append(f" {peak:.1f}x\n")
    text.rstrip()
    return text


def grid(
    names: list[str], values: NDArray[np.float64], columns: int, counted: int | None = None
) -> tuple[Any, int]:
    """values [L, N], each over the mean of its row -> (a line a row, how many values a cell is).
    counted: the first so many values have a part in the number at the right.

    A cell is the largest of its values: what is hot is not averaged away. Few values get cells two
    wide; what does not fit columns is put together.
    """
    from rich.text import Text

    width = max(map(len, names))
    room = max(columns - width - len("   12.3x"), 1)
    count = values.shape[1]
    each = -(-count // room)
    cells = -(-count // each)
    wide = max(1, min(4, room // cells))
    padded = np.full((len(values), cells * each), -np.inf)
    padded[:, :count] = values
    largest = padded.reshape(len(values), cells, each).max(axis=2)
    text = Text(no_wrap=True, overflow="crop")
    peaks = values[:, :counted].max(axis=1)
    for name, row, peak in zip(names, largest, peaks, strict=True):
        text.append(f"{name:>{width}} ", style="dim")
        for value in row:
            step = level(round(1000 * float(value)), 1000.0)
            text.append(CELLS[step] * wide, style=f"color({COLOURS[step]}) on color(234)")
        text.append(f" {peak:.1f}x\n")
    text.rstrip()
    return text, each
