"""Which sizes of decode steps are captured, and which of them a step takes. Pure.

All ranks must run the same size in the same step: `rung` is a function of what lockstep agreed and
of a ladder that is the same everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

DOUBLING_TO = 16  # behind it a step of half a power more: at most a third of the rows is padding

# Positions that the rows of a captured step attend to at most, all rows together: what attention
# makes room for, whatever the longest context is. Prefixes that sequences share count for each, so
# the cache's size is no bound; but the host knows the sum of each step, and ranks agree on the
# largest. 256 rows of 128 heads so leave parts of 834 MiB, in one launch. A step with more gains
# nothing from being captured: at 2 x 128 x 1088 flops a position its attention takes an H200 a
# millisecond a layer, and the host launches a layer (30 kernels, 20 us each) in less.
MOST_CONTEXT = 3 << 20


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


def rung(
    max_tokens: int | None, decode_only: bool, rungs: Sequence[int], context: int = 0,
    most_context: int = MOST_CONTEXT,
) -> int | None:  # fmt: skip
    """The rows of the captured step that takes a step in which no rank has more than max_tokens
    rows, and none rows that attend to more than `context` positions together; None: it goes as it
    is (prompt tokens, nothing agreed, more rows than any has, more positions than most_context)."""
    if max_tokens is None or not decode_only or context > most_context:
        return None
    return next((size for size in rungs if size >= max_tokens), None)


def padded_share(rungs: Sequence[int]) -> float:
    """The largest share of rows that are padding, over all sizes from the second rung on."""
    return max((1 - (low + 1) / high for low, high in pairwise(rungs)), default=0.0)
