"""Which sizes of decode steps are captured, and which of them a step takes. Pure.

All ranks must run the same size in the same step: `rung` is a function of what lockstep agreed and
of a ladder that is the same everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

DOUBLING_TO = 16  # behind it a step of half a power more: at most a third of the rows is padding


def ladder(most: int) -> tuple[int, ...]:
    """Rows of the captured steps, ascending: 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, ... and `most`,
    the most rows that a decode step can have (drafts counted)."""
    if most < 1:
        return ()
    rungs = []
    size = 1
    while size < most:
        rungs.append(size)
        if size >= DOUBLING_TO and size + size // 2 < most:
            rungs.append(size + size // 2)
        size *= 2
    return (*rungs, most)


def rung(max_tokens: int | None, decode_only: bool, rungs: Sequence[int]) -> int | None:
    """The rows of the captured step that takes a step in which no rank has more than max_tokens
    rows; None: it goes as it is (prompt tokens, nothing agreed, or more rows than any has)."""
    if max_tokens is None or not decode_only:
        return None
    return next((size for size in rungs if size >= max_tokens), None)


def padded_share(rungs: Sequence[int]) -> float:
    """The largest share of rows that are padding, over all sizes from the second rung on."""
    return max((1 - (low + 1) / high for low, high in pairwise(rungs)), default=0.0)
