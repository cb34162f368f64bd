"""Tables of expert loads as text: `.csv`, one row a layer, one column an expert.

Knows lines, cells, a head line, a column of layer numbers. Nothing is left out silently. Knows
nothing of: other forms of loads (`ep.trace`).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

# How a first column is named that numbers the layers.
_NUMBERING = ("layer", "layers", "layer_id", "layer_idx", "layer_index", "index", "")
# Columns of a table with a row an expert.
_LONG = ("expert", "expert_id", "expert_idx", "count", "counts", "load", "tokens", "step", "phase")


def read_csv(content: bytes) -> tuple[list[int] | None, NDArray[np.float64]]:
    """(numbers of the layers, where a column named `layer` gives them; loads [L, E]). A first line
    without any number is a head line. ValueError names row (from 1) and cell."""
    lines = content.decode("utf-8-sig").splitlines()
    cut = [(number, line.split("#", 1)[0]) for number, line in enumerate(lines, 1)]
    table = [(n, [cell.strip() for cell in line.split(",")]) for n, line in cut if line.strip()]
    head: list[str] = []
    if table and not any(_is_number(cell) for cell in table[0][1]):
        head = [cell.strip("\"'").lower() for cell in table.pop(0)[1]]
    if not table:
        raise ValueError("no row of numbers")
    width = len(head or table[0][1])
    rows = []
    for number, cells in table:
        if len(cells) != width:
            raise ValueError(f"row {number} has {len(cells)} cells, the first {width}")
        for column, cell in enumerate(cells, 1):
            if not _is_number(cell):
                raise ValueError(f"row {number}, cell {column}: {cell[:40]!r} is no number")
        rows.append([float(cell) for cell in cells])
    loads = np.array(rows, np.float64)
    long = [cell for cell in head if cell in _LONG]
    if long:
        raise ValueError(f"column {long[0]!r}: must be one row a layer, one column an expert")
    if not head or head[0] not in _NUMBERING:
        return None, loads
    for (number, cells), value in zip(table, loads[:, 0], strict=True):
        if not (math.isfinite(value) and value >= 0 and value == int(value)):
            raise ValueError(f"row {number}: {head[0]}={cells[0]!r} is no number of a layer")
    return [int(value) for value in loads[:, 0]], loads[:, 1:]


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
