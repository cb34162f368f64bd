"""How a prefill's keys are expanded chunk by chunk, so that a bounded workspace is enough.

Keys and values of all heads are 64 times a latent in bytes, so they never exist for a whole
context: a round expands at most `workspace` positions, whole chunks of CHUNK absolute positions of
one sequence each, and each sequence's chunks go in ascending order, at most one a round. Chunks
begin at multiples of CHUNK, whatever part of them is new: a row's bits do not depend on how its
prompt was cut or on who else is there (law 5).

Decided on the host from lengths it knows anyway; one tensor goes to the device, nothing comes back.
Knows nothing of heads or kernels but the sizes of their tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.deepseek.kernels.gpu.errors import ShapeRefused

CHUNK = 4096
WORKSPACE = 8192
QUERY_TILE = 128  # rows of a program
GATHER_TILE = 32  # positions of a program


@dataclass(frozen=True)
class PrefillRound:
    """positions: expanded in this round. gather, attend: first and last of the plan's tiles."""

    positions: int
    gather: tuple[int, int]
    attend: tuple[int, int]


@dataclass(frozen=True)
class PrefillPlan:
    """gather [G, 6] int32: sequence, position, positions, buffer row, prefix, first row of the
    batch (position p >= prefix is row first + p - prefix). attend [A, 6] int32: row, rows, position
    of that row, buffer row of the chunk, its position, its positions."""

    rounds: tuple[PrefillRound, ...]
    gather: Tensor
    attend: Tensor
    num_rows: int
    chunk: int
    workspace: int  # positions: no round has more

    @property
    def carries(self) -> bool:
        """Whether some row needs more than one chunk, so that sums are carried between rounds."""
        return len(self.rounds) > 1

    def workspace_bytes(self, heads: int, rank: int, rope: int, nope: int, value: int) -> int:
        """The most that is held at a time beside q and out: latents and rope keys gathered, keys
        and values expanded (all bf16), and fp32 sums of all rows where they are carried."""
        most = max((r.positions for r in self.rounds), default=0)
        held = most * 2 * (rank + rope + heads * (nope + value))
        return held + (self.num_rows * heads * 4 * value if self.carries else 0)


def plan_prefill(
    context: Sequence[int], new: Sequence[int], device: torch.device | str = "cpu", *,
    chunk: int = CHUNK, workspace: int = WORKSPACE,
) -> PrefillPlan:  # fmt: skip
    """context: positions of each sequence once this step is written; new: how many of them are
    rows of this step, lying together in the batch, sequence after sequence (0: none). ShapeRefused
    when lengths do not fit, or a chunk does not fit the workspace."""
    if len(context) != len(new) or any(not 0 <= n <= c for c, n in zip(context, new, strict=False)):
        raise ShapeRefused(
            f"context={list(context)}, new={list(new)}: as many, 0 <= new <= context"
        )
    if chunk < 1 or chunk % QUERY_TILE or workspace < chunk:
        raise ShapeRefused(
            f"chunk={chunk}, workspace={workspace}: chunk must be a multiple of {QUERY_TILE}, "
            "workspace no less"
        )
    first_rows = [sum(new[:s]) for s in range(len(new))]
    alive = [s for s in range(len(new)) if new[s]]
    gather: list[tuple[int, ...]] = []
    attend: list[tuple[int, ...]] = []
    rounds = []
    longest = max((context[s] for s in alive), default=0)
    for start in range(0, longest, chunk):
        waiting = [s for s in alive if context[s] > start]
        while waiting:
            began, used = (len(gather), len(attend)), 0
            while waiting:
                size = min(chunk, context[waiting[0]] - start)
                if used + size > workspace:
                    break
                s = waiting.pop(0)
                prefix = context[s] - new[s]
                gather += _gather_tiles(s, start, size, used, prefix, first_rows[s])
                attend += _attend_tiles(start, size, used, prefix, first_rows[s], new[s])
                used += size
            rounds.append(PrefillRound(used, (began[0], len(gather)), (began[1], len(attend))))
    both = torch.tensor(gather + attend, dtype=torch.int32).reshape(-1, 6)
    if torch.device(device).type == "cuda":
        both = both.pin_memory().to(device, non_blocking=True)
    return PrefillPlan(
        tuple(rounds), both[: len(gather)], both[len(gather) :], sum(new), chunk, workspace
    )


def _gather_tiles(
    sequence: int, start: int, size: int, buffer: int, prefix: int, first_row: int
) -> list[tuple[int, ...]]:
    return [
        (sequence, start + at, min(GATHER_TILE, size - at), buffer + at, prefix, first_row)
        for at in range(0, size, GATHER_TILE)
    ]


def _attend_tiles(
    start: int, size: int, buffer: int, prefix: int, first_row: int, new: int
) -> list[tuple[int, ...]]:
    """Rows before `start` see nothing of the chunk and have no tile."""
    skipped = max(0, start - prefix)
    return [
        (first_row + at, min(QUERY_TILE, new - at), prefix + at, buffer, start, size)
        for at in range(skipped, new, QUERY_TILE)
    ]
