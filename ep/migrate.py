"""From one placement to another: which rank copies which expert from where, in batches of layers.

A layer switches at once: until all of its new experts lie in spare buffers of their destinations,
the old ones serve. So the sources of a batch hold what they send for as long as the batch lasts,
and what a rank must buffer is bounded by the batch. Pure: every rank computes the same plan.

Knows: placements, bytes of a bundle by layer, nodes. Knows nothing of weights or of transports.

Shape letters: L layers, E logical experts, P physical slots of all ranks, e local slots, G ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from ep.placement import EMPTY, ExpertPlacement

IntArray = NDArray[np.int64]


class MigrationError(ValueError):
    """Two placements between which no experts can be moved: says what does not fit."""


class StagingTooSmall(MigrationError):
    """One layer alone needs more spare bytes on a rank than may be used: `needed` would do."""

    def __init__(self, needed: int, given: int, layer: int, rank: int) -> None:
        self.needed, self.given, self.layer, self.rank = needed, given, layer, rank
        super().__init__(
            f"max_staging_bytes={given}: a layer switches at once, and layer {layer} brings rank "
            f"{rank} {needed} bytes; at least {needed} are needed for this move (or move fewer "
            "slots)"
        )


@dataclass(frozen=True)
class Move:
    """One expert of one layer comes to one rank: its bundle goes once, to all `slots` there.

    source: a physical slot that holds it in the old placement; slots: physical ones of the
    destination rank, ascending.
    """

    layer: int
    expert: int
    source: int
    slots: tuple[int, ...]


@dataclass(frozen=True)
class MoveBatch:
    """Layers that switch at the same step, and all that must have arrived before. A layer may be
    here without a move: its slots only become empty."""

    layers: tuple[int, ...]
    moves: tuple[Move, ...]


@dataclass(frozen=True, eq=False)
class MigrationPlan:
    """Made by `plan_migration`. new has the generation that old has after as many switches as there
    are batches; layer_bytes [L]: of one bundle."""

    old: ExpertPlacement
    new: ExpertPlacement
    batches: tuple[MoveBatch, ...]
    layer_bytes: tuple[int, ...]

    def rank_of(self, slot: int) -> int:
        return slot // self.old.num_local_experts

    def moves_to(self, rank: int, batch: int) -> tuple[Move, ...]:
        """What this rank must fetch (or copy within itself) for a batch."""
        return tuple(m for m in self.batches[batch].moves if self.rank_of(m.slots[0]) == rank)

    def placement_after(self, batches: int) -> ExpertPlacement:
        """What serves once the first `batches` batches have switched: a valid placement, one
        generation later for each."""
        if batches == len(self.batches):
            return self.new
        table = self.old.physical_to_logical.copy()
        for batch in self.batches[:batches]:
            layers = list(batch.layers)
            table[layers] = self.new.physical_to_logical[layers]
        return ExpertPlacement(
            table, self.old.num_logical_experts, self.old.num_ranks, self.old.generation + batches
        )

    @cached_property
    def num_moved_slots(self) -> int:
        """Slots that get another expert (those that become empty are not counted)."""
        return sum(len(m.slots) for b in self.batches for m in b.moves)

    @cached_property
    def _traffic(self) -> tuple[IntArray, IntArray, IntArray]:
        """[G] bytes that come in from other ranks, that go out, and the most that is staged."""
        came, went, staged = (np.zeros(self.old.num_ranks, np.int64) for _ in range(3))
        for batch in self.batches:
            held = np.zeros_like(staged)
            for move in batch.moves:
                size = self.layer_bytes[move.layer]
                there, here = self.rank_of(move.source), self.rank_of(move.slots[0])
                held[here] += size
                if there != here:
                    came[here] += size
                    went[there] += size
            staged = np.maximum(staged, held)
        return came, went, staged

    @property
    def bytes_in(self) -> IntArray:
        """[G] bytes that each rank fetches from others."""
        return self._traffic[0]

    @property
    def bytes_out(self) -> IntArray:
        """[G] bytes that each rank sends to others."""
        return self._traffic[1]

    @property
    def staging_bytes(self) -> IntArray:
        """[G] spare bytes that each rank needs: its largest batch."""
        return self._traffic[2]

    @cached_property
    def digest(self) -> int:
        """63 bits of all that ranks must have alike before they move anything."""
        text = (
            f"{self.old.fingerprint} {self.new.fingerprint} {self.layer_bytes} "
            f"{[(b.layers, [(m.source, m.slots) for m in b.moves]) for b in self.batches]}"
        )
        return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def plan_migration(
    old: ExpertPlacement,
    new: ExpertPlacement,
    layer_bytes: Sequence[int],
    *,
    max_staging_bytes: int,
    ranks_per_node: int,
) -> MigrationPlan:
    """All moves from old to new, which must have the same shape, experts and ranks.

    layer_bytes [L]: bytes of a bundle in each layer. max_staging_bytes: spare bytes of a rank.
    Sources: the rank itself where it holds the expert already, then one of its node, then any; of
    several the one that sends least in this batch. Raises MigrationError, StagingTooSmall.
    """
    _check(old, new, layer_bytes, ranks_per_node)
    arrivals = _arrivals(old, new)
    batches = []
    sent_in_all = np.zeros(old.num_ranks, np.int64)
    for layers in _split(arrivals, layer_bytes, max_staging_bytes, old.num_ranks):
        sent = np.zeros(old.num_ranks, np.int64)
        moves = []
        for layer in layers:
            for (rank, expert), slots in arrivals[layer].items():
                source = _source(old, layer, expert, rank, ranks_per_node, sent, sent_in_all)
                there = source // old.num_local_experts
                if there != rank:
                    sent[there] += layer_bytes[layer]
                    sent_in_all[there] += layer_bytes[layer]
                moves.append(Move(layer, expert, source, tuple(slots)))
        batches.append(MoveBatch(tuple(layers), tuple(moves)))
    target = new.with_generation(old.generation + len(batches))
    return MigrationPlan(old, target, tuple(batches), tuple(int(x) for x in layer_bytes))


def keep_slots(old: ExpertPlacement, new: ExpertPlacement) -> ExpertPlacement:
    """new with each rank's slots put in such order that experts which stay on a rank keep their
    slot: the same loads on every rank, and nothing is copied within one for no gain."""
    _check(old, new, (0,) * old.num_layers, 1)
    local = old.num_local_experts
    shape = (old.num_layers, old.num_ranks, local)
    before = old.physical_to_logical.reshape(shape)
    after = new.physical_to_logical.reshape(shape).copy()
    for layer, rank in np.argwhere((before != after).any(axis=2)).tolist():
        was, left = before[layer, rank].tolist(), after[layer, rank].tolist()
        row: list[int | None] = []
        for expert in was:
            row.append(expert if expert in left else None)
            if expert in left:
                left.remove(expert)
        after[layer, rank] = [left.pop(0) if x is None else x for x in row]
    table = after.reshape(old.num_layers, -1)
    return ExpertPlacement(table, new.num_logical_experts, new.num_ranks, new.generation)


# -- parts --------------------------------------------------------------------------------------

# By (destination rank, expert): its slots there, in order of the first one.
Arrivals = dict[tuple[int, int], list[int]]


def _check(
    old: ExpertPlacement, new: ExpertPlacement, layer_bytes: Sequence[int], ranks_per_node: int
) -> None:
    for name, mine, theirs in (
        ("layers", old.num_layers, new.num_layers),
        ("slots", old.num_physical_experts, new.num_physical_experts),
        ("ranks", old.num_ranks, new.num_ranks),
        ("logical experts", old.num_logical_experts, new.num_logical_experts),
        ("bundle sizes", old.num_layers, len(layer_bytes)),
    ):
        if mine != theirs:
            raise MigrationError(f"{name}: {mine} before and {theirs} after: must be the same")
    if ranks_per_node < 1 or old.num_ranks % ranks_per_node:
        raise MigrationError(
            f"ranks_per_node={ranks_per_node}: must divide the {old.num_ranks} ranks"
        )


def _arrivals(old: ExpertPlacement, new: ExpertPlacement) -> dict[int, Arrivals]:
    """By layer that changes at all: what comes to which rank."""
    changed = old.physical_to_logical != new.physical_to_logical
    out: dict[int, Arrivals] = {int(x): {} for x in np.flatnonzero(changed.any(axis=1))}
    layers, slots = np.nonzero(changed & (new.physical_to_logical != EMPTY))
    experts = new.physical_to_logical[layers, slots]
    for layer, slot, expert in zip(layers.tolist(), slots.tolist(), experts.tolist(), strict=True):
        out[layer].setdefault((slot // old.num_local_experts, expert), []).append(slot)
    return out


def _split(
    arrivals: dict[int, Arrivals], layer_bytes: Sequence[int], most: int, num_ranks: int
) -> list[list[int]]:
    """Layers in order, as many together as every rank can stage."""
    batches: list[list[int]] = []
    held = np.zeros(num_ranks, np.int64)
    for layer, arriving in arrivals.items():
        need = np.zeros(num_ranks, np.int64)
        for rank, _ in arriving:
            need[rank] += layer_bytes[layer]
        if need.max() > most:
            rank = int(need.argmax())
            raise StagingTooSmall(_least(arrivals, layer_bytes, num_ranks), most, layer, rank)
        if not batches or (held + need).max() > most:
            batches.append([])
            held[:] = 0
        batches[-1].append(layer)
        held += need
    return batches


def _least(arrivals: dict[int, Arrivals], layer_bytes: Sequence[int], num_ranks: int) -> int:
    """Staging bytes with which every layer alone would fit."""
    least = 0
    for layer, arriving in arrivals.items():
        counts = np.bincount([rank for rank, _ in arriving] or [0], minlength=num_ranks)
        least = max(least, int(counts.max()) * layer_bytes[layer] if arriving else 0)
    return least


def _source(
    old: ExpertPlacement,
    layer: int,
    expert: int,
    rank: int,
    ranks_per_node: int,
    sent: IntArray,
    sent_in_all: IntArray,
) -> int:
    """The physical slot to copy from."""
    count = int(old.replica_count[layer, expert])
    slots = old.logical_to_physical[layer, expert, :count].tolist()
    local, ranks, node = old.num_local_experts, old.num_ranks, rank // ranks_per_node

    def cost(slot: int) -> tuple[bool, bool, int, int, int]:
        there = slot // local
        far = there // ranks_per_node != node
        # Of equal ones the next rank on the ring, so that not all ask the first.
        distance = (there - rank) % ranks
        return there != rank, far, int(sent[there]), int(sent_in_all[there]), distance

    best: int = min(slots, key=cost)
    return best
