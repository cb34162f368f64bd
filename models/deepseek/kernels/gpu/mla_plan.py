"""How a step's attention over the cache is cut into units of work, made once for all layers.

A unit is a span of absolute positions of one row. Spans are the same for every row and every step,
so that a row's bits do not depend on who else is there (law 5): that is DETERMINISTIC. Where bits
need not be equal (fast mode), `ByLoad` cuts by the load at hand instead. All of it runs on the
device without asking it anything, so that it can stand in a captured graph.

What the host knows only makes room: for units that there may be, in as few launches as hold their
parts. It knows each row's length (a step that it made), or the sum of all of them at most (a
captured step, which is replayed for no more), or the longest.

Knows nothing of heads' contents or of kernels.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from models.deepseek.kernels.gpu.errors import ShapeRefused
from models.interface import ForwardBatch

TILE = 64  # borders lie at multiples of it
SHORTEST = 4 * TILE  # of what is cut by load: parts of so many positions are half of their traffic
WORKSPACE = 512 << 20  # bytes of parts that a launch may leave for the merge
CAPTURED_WORKSPACE = 1 << 30  # the same in captured steps, which all share it


@dataclass(frozen=True)
class Partitions:
    """near_size positions each up to near_end, far_size each from there on; all are multiples of
    64, near_end one of near_size. Sizes are a trade: small ones let few rows fill a GPU, large ones
    leave less to merge."""

    near_size: int
    near_end: int
    far_size: int

    def __post_init__(self) -> None:
        sizes = (self.near_size, self.far_size)
        if min(sizes) < TILE or any(n % TILE for n in sizes) or self.near_end % self.near_size:
            raise ShapeRefused(
                f"{self}: sizes must be multiples of {TILE}, near_end one of near_size"
            )

    def count(self, length: int) -> int:
        """Partitions that hold the positions 0 .. length - 1; 1 where there are none."""
        near, far = min(length, self.near_end), max(length - self.near_end, 0)
        return max(1, -(-near // self.near_size) + -(-far // self.far_size))

    def counts(self, lengths: Tensor) -> Tensor:
        """The same for a tensor."""
        near = lengths.clamp(max=self.near_end) + (self.near_size - 1)
        far = (lengths - self.near_end).clamp(min=0) + (self.far_size - 1)
        return (near // self.near_size + far // self.far_size).clamp(min=1)

    def parts(self, contexts: Sequence[int], rows_each: int = 1) -> list[int]:
        """Of each row of sequences with so many positions."""
        return [self.count(n) for n in contexts]

    def begin(self, part: Tensor, parts: Tensor, lengths: Tensor) -> Tensor:
        """Where each part of a row begins, numbered from 0; the last one's end is beyond `lengths`
        or at it."""
        near = part * self.near_size
        far = self.near_end + (part - self.near_end // self.near_size) * self.far_size
        return torch.where(near < self.near_end, near, far)


# Up to 1024 positions nothing is merged; 4096 are 4 parts, whose traffic is 0.45 of the
# cache's own with 128 heads; 131072 are 72, enough for one row to fill 132 processors.
DETERMINISTIC = Partitions(1024, 16384, 2048)


@dataclass(frozen=True)
class ByLoad:
    """About `units` pieces in a step beside one a row, of as many as fill a GPU: a row has as many
    as its share of all positions, which only the device need know. Each is as long as a row's
    others but for a tile, and no shorter than SHORTEST. A row up to an eighth longer than two units
    are to be stays whole: where units fill a GPU twice, a program has as much to do anyway. No step
    has more pieces than `units` and its rows. Another load is cut elsewhere, so results may differ
    in their last bits."""

    units: int

    def counts(self, lengths: Tensor) -> Tensor:
        total = lengths.clamp(min=0).sum()
        size = ((total + (self.units - 1)) // self.units).clamp(min=SHORTEST)
        return torch.where(4 * lengths < 9 * size, 1, lengths // size)

    def parts(self, contexts: Sequence[int], rows_each: int = 1) -> list[int]:
        """Of each row of sequences with so many positions."""
        size = max(SHORTEST, -(-sum(contexts) * rows_each // self.units))
        return [1 if 4 * n < 9 * size else n // size for n in contexts]

    def begin(self, part: Tensor, parts: Tensor, lengths: Tensor) -> Tensor:
        """As for Partitions."""
        tiles = (lengths + (TILE - 1)) // TILE
        return part * tiles // parts * TILE


Cuts = Partitions | ByLoad


@dataclass(frozen=True)
class DecodePlan:
    """positions [T] int64 (-1: padding), sequences [T] int32, work_start [T + 1] int32 (units
    before each row), unit_rows [max_units] int32, spans [max_units, 2] int32 (positions from, to),
    ancestors [T, W] int32 or None. longest: no row has more positions. launches: rows first ..
    last - 1 of each launch, so that its parts fit the workspace; pieces: the plans of those rows
    alone, empty where one launch does all."""

    positions: Tensor
    sequences: Tensor
    work_start: Tensor
    unit_rows: Tensor
    spans: Tensor
    ancestors: Tensor | None
    partitions: Cuts
    max_parts: int
    longest: int
    launches: tuple[tuple[int, int], ...]
    pieces: tuple[DecodePlan, ...] = ()

    @property
    def num_rows(self) -> int:
        return self.positions.shape[0]

    @property
    def max_units(self) -> int:
        return self.unit_rows.shape[0]

    def rows(self, first: int, last: int, units: int | None = None) -> DecodePlan:
        """The plan of these rows alone. units: no fewer than they have, where that is known."""
        if (first, last) == (0, self.num_rows):
            return self
        paths = self.ancestors
        return _cut(
            self.positions[first:last], self.sequences[first:last],
            None if paths is None else paths[first:last], self.partitions, self.max_parts,
            self.longest, (last - first) * self.max_parts if units is None else units,
            ((0, last - first),),
        )  # fmt: skip

    def workspace_bytes(self, heads: int, rank: int = 512) -> int:
        """The most that the parts of a launch take."""
        most = max((piece.max_units for piece in self.pieces), default=self.max_units)
        return part_bytes(most if self.max_parts > 1 else 1, heads, rank)


def part_bytes(parts: int, heads: int, rank: int) -> int:
    """fp32 sums and their logarithms."""
    return parts * heads * (rank + 1) * 4


def plan_decode(
    batch: ForwardBatch, heads: int, rank: int = 512, *, partitions: Cuts = DETERMINISTIC,
    workspace: int | None = None,
) -> DecodePlan:  # fmt: skip
    """For the rows of a step. Rows behind query_start's last entry, and rows at position -1, are
    padding. Room is made by what the batch says of lengths: `host`, else `total_context` and
    `max_context_len`. Where `workspace` bytes do not hold the parts of all rows, several launches
    share it, or one row exceeds it. None: WORKSPACE, or CAPTURED_WORKSPACE in captured steps
    (`padding`), of whose lengths no more is known than their sum."""
    rows = batch.num_tokens
    device = batch.positions.device
    room = _Room.of(batch, partitions)
    if workspace is None:
        captured = batch.host is None and batch.padding is not None
        workspace = CAPTURED_WORKSPACE if captured else WORKSPACE
    index = torch.arange(rows, device=device)
    owner = torch.searchsorted(batch.query_start[1:].long().contiguous(), index, right=True)
    padding = (owner >= batch.num_sequences) | (batch.positions < 0)
    positions = torch.where(padding, -1, batch.positions)
    sequences = torch.where(padding, 0, owner).to(torch.int32)
    ancestors = batch.ancestors
    if ancestors is not None:
        ancestors = torch.where(padding[:, None], -1, ancestors).to(torch.int32).contiguous()
        ancestors = ancestors if ancestors.shape[1] else None
    launches = room.launches(rows, workspace // part_bytes(1, heads, rank))
    plan = _cut(
        positions, sequences, ancestors, partitions, room.max_parts, room.longest,
        room.units(0, rows), launches,
    )  # fmt: skip
    if len(launches) > 1:
        pieces = tuple(plan.rows(*launch, room.units(*launch)) for launch in launches)
        plan = replace(plan, pieces=pieces)
    return plan


def known_lengths(batch: ForwardBatch) -> Tensor | None:
    """[T] int64, on the host: positions + 1 of each row, 0 for padding. None where the host does
    not know them."""
    if batch.host is None:
        return None
    lengths = batch.host.positions + 1
    if batch.host.num_sequences:
        lengths[int(batch.host.query_start[-1]) :] = 0
    return lengths


@dataclass(frozen=True)
class _Room:
    """What the host knows of how many units rows have. ends: units up to and with each row, where
    lengths are known; most: of all rows together, beside one of each."""

    max_parts: int
    longest: int
    ends: tuple[int, ...] | None = None
    most: int | None = None

    @staticmethod
    def of(batch: ForwardBatch, partitions: Cuts) -> _Room:
        lengths = known_lengths(batch)
        longest = batch.max_context_len
        if lengths is not None:
            longest = int(lengths.max()) if len(lengths) else 0
        if isinstance(partitions, ByLoad):
            # Rows of one launch among several share their own load: each has its own units.
            whole = lengths is not None and bool((partitions.counts(lengths) == 1).all())
            most_parts = 1 if whole else max(1, min(partitions.units, longest // SHORTEST))
            return _Room(most_parts, longest, None, partitions.units)
        if lengths is not None:
            counts = partitions.counts(lengths)
            most_parts = int(counts.max()) if len(counts) else 1
            return _Room(most_parts, longest, tuple(counts.cumsum(0).tolist()))
        total = batch.total_context
        shortest = min(partitions.near_size, partitions.far_size)
        most = None if total is None else total // shortest
        return _Room(partitions.count(longest), longest, None, most)

    def units(self, first: int, last: int) -> int:
        """No fewer than these rows have."""
        if self.ends is not None:
            return (self.ends[last - 1] if last else 0) - (self.ends[first - 1] if first else 0)
        bound = (last - first) * self.max_parts
        return bound if self.most is None else min(bound, last - first + self.most)

    def launches(self, rows: int, parts: int) -> tuple[tuple[int, int], ...]:
        """As many rows a launch as `parts` hold for sure, one at least."""
        if self.max_parts <= 1 or self.units(0, rows) <= parts:
            return ((0, rows),) if rows else ()
        found, first = [], 0
        while first < rows:
            last = self._last(first, rows, parts)
            found.append((first, last))
            first = last
        return tuple(found)

    def _last(self, first: int, rows: int, parts: int) -> int:
        lasts = range(first + 1, rows + 1)
        fitting = bisect_right(lasts, parts, key=lambda last: self.units(first, last))
        return first + max(1, fitting)


def _cut(
    positions: Tensor, sequences: Tensor, ancestors: Tensor | None, partitions: Cuts,
    max_parts: int, longest: int, bound: int, launches: tuple[tuple[int, int], ...],
) -> DecodePlan:  # fmt: skip
    """bound: no fewer than there are units."""
    rows = positions.shape[0]
    start = torch.zeros(rows + 1, dtype=torch.int64, device=positions.device)
    lengths = positions + 1
    counts = partitions.counts(lengths)
    torch.cumsum(counts, 0, out=start[1:])
    units = torch.arange(bound, device=positions.device)
    owner = torch.searchsorted(start[1:].contiguous(), units, right=True)
    owner = owner.clamp(max=max(0, rows - 1))  # units that there are not
    part, parts, lengths = units - start[owner], counts[owner], lengths[owner]
    ends = [partitions.begin(at, parts, lengths) for at in (part, part + 1)]
    spans = torch.stack([torch.minimum(end, lengths) for end in ends], dim=1)
    return DecodePlan(
        positions.to(torch.int64), sequences, start.to(torch.int32), owner.to(torch.int32),
        spans.to(torch.int32), ancestors, partitions, max_parts, longest, launches,
    )  # fmt: skip


# -- twin -----------------------------------------------------------------------------------------


def row_slots_twin(batch: ForwardBatch, row: int, block_size: int) -> Tensor:
    """[p + 1] int64: the flat slots of what a row attends to, padding: none."""
    starts = batch.query_start.tolist()
    position = int(batch.positions[row])
    sequence = next((s for s in range(batch.num_sequences) if row < starts[s + 1]), None)
    if sequence is None or position < 0:
        return torch.zeros(0, dtype=torch.int64)
    at = torch.arange(position + 1)
    path = at[:0] if batch.ancestors is None else batch.ancestors[row].long()
    path = path[path >= 0]
    before = at[: len(at) - len(path)]
    blocks = batch.block_tables[sequence].long()
    return torch.cat((blocks[before // block_size] * block_size + before % block_size, path))
