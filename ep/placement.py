"""ExpertPlacement: which physical slot holds which logical expert, layer by layer.

Knows: layers, slots, ranks, a generation number; reading and writing of placements. Validated when
made, never changed after. Knows nothing of: loads, how a placement is chosen, weights, tokens.

Shape letters: L layers that have experts (MTP layers last), E logical experts, P physical slots of
all ranks, R largest number of replicas of an expert in any layer. Rank g owns the slots
g * P / ranks ... (g + 1) * P / ranks - 1: every rank has the same number of them. Where experts and
copies do not divide by the ranks, some slots are empty (EMPTY in the table): they host nothing and
no token goes there.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ep.archive import first_line, read_arrays

IntArray = NDArray[np.int64]

EMPTY = -1
# More than any job has: what a damaged file says must not become memory for as many slots.
_MAX_RANKS = 1 << 16
_FORMAT = "moeserve-expert-placement"
_VERSION = 1


class PlacementError(ValueError):
    """A placement that cannot be: names the field, the value and what would be valid."""


@dataclass(frozen=True)
class PlacementDiff:
    """The slots whose expert changes, in order of layer, then slot. Four arrays [M] int64; before
    and after are EMPTY (-1) where a slot is filled or emptied."""

    layers: IntArray
    slots: IntArray
    before: IntArray
    after: IntArray

    def __len__(self) -> int:
        return len(self.layers)


@dataclass(frozen=True, eq=False)
class ExpertPlacement:
    """Make it with `trivial`, `from_physical_to_logical` or `load`.

    physical_to_logical [L, P] int64: expert of each slot, or EMPTY (-1); P divides by num_ranks.
    num_logical_experts: E; each expert has a slot in every layer. generation counts the placements
    of a run, so that ranks can agree on one. Arrays are read-only.
    """

    physical_to_logical: IntArray
    num_logical_experts: int
    num_ranks: int
    generation: int = 0

    def __post_init__(self) -> None:
        table = _as_table(self.physical_to_logical)
        experts, ranks = self.num_logical_experts, self.num_ranks
        _at_least("generation", self.generation, 0)
        _at_least("num_experts", experts, 1)
        _check_ranks(ranks)
        slots = table.shape[1]
        if slots < experts:
            raise PlacementError(
                f"physical_to_logical: {slots} slots cannot hold {experts} experts; at least "
                f"{experts} are needed"
            )
        if slots % ranks:
            raise PlacementError(
                f"physical_to_logical: {slots} slots do not divide by {ranks} ranks; "
                f"{slots + -slots % ranks} would: mark those that shall be empty with {EMPTY}"
            )
        wrong = np.argwhere((table < EMPTY) | (table >= experts))
        if len(wrong):
            layer, slot = wrong[0]
            raise PlacementError(
                f"physical_to_logical[{layer}, {slot}]={table[layer, slot]}: not an expert; valid "
                f"are 0..{experts - 1} and {EMPTY} (empty) ({len(wrong)} such slots)"
            )
        counts = _count(table, experts)
        missing = np.argwhere(counts == 0)
        if len(missing):
            layer = missing[0][0]
            ids = missing[missing[:, 0] == layer][:, 1].tolist()
            raise PlacementError(
                f"physical_to_logical[{layer}]: experts without a slot: {ids[:8]}"
                f"{' ...' if len(ids) > 8 else ''}; each of {experts} experts needs at least one"
            )
        table.flags.writeable = False
        counts.flags.writeable = False
        object.__setattr__(self, "physical_to_logical", table)
        object.__setattr__(self, "_counts", counts)

    # -- making one ------------------------------------------------------------------------

    @classmethod
    def trivial(
        cls,
        num_layers: int,
        num_experts: int,
        num_ranks: int,
        num_redundant: int = 0,
        generation: int = 0,
    ) -> ExpertPlacement:
        """Experts in order, then copies in order, in every layer; any number of copies.

        A rank has ceil((E + num_redundant) / num_ranks) slots; what is left over are empty slots,
        one each at the ends of the last ranks. Copies of an expert lie E hosted slots apart, so
        they are on different ranks unless a rank hosts more than E (and then some rank must hold
        two copies of something). A rank beyond E + num_redundant hosts nothing.
        """
        _at_least("num_layers", num_layers, 1)
        _at_least("num_experts", num_experts, 1)
        _check_ranks(num_ranks)
        _at_least("num_redundant", num_redundant, 0)
        row = np.arange(num_experts + num_redundant, dtype=np.int64) % num_experts
        table = _spread(np.tile(row, (num_layers, 1)), num_ranks)
        return cls(table, num_experts, num_ranks, generation)

    @classmethod
    def from_physical_to_logical(
        cls,
        physical_to_logical: ArrayLike,
        num_ranks: int,
        num_experts: int | None = None,
        generation: int = 0,
    ) -> ExpertPlacement:
        """A given table [L, P], -1 for empty slots. num_experts None: the largest id + 1.

        A table whose columns do not divide by num_ranks gets empty slots as `trivial` does: one
        each at the ends of the last ranks, which shifts the slots behind them.
        """
        table = _as_table(physical_to_logical)
        experts = int(table.max()) + 1 if num_experts is None else num_experts
        _check_ranks(num_ranks)
        table = _spread(table, num_ranks)
        return cls(table, experts, num_ranks, generation)

    def with_generation(self, generation: int) -> ExpertPlacement:
        return ExpertPlacement(
            self.physical_to_logical, self.num_logical_experts, self.num_ranks, generation
        )

    # -- looking at it ---------------------------------------------------------------------

    @property
    def num_layers(self) -> int:
        return len(self.physical_to_logical)

    @property
    def num_physical_experts(self) -> int:
        """P: slots of all ranks in a layer, empty ones included."""
        return len(self.physical_to_logical[0])

    @property
    def num_empty_slots(self) -> int:
        """Slots of all ranks that host nothing, in the layer that has the fewest of them."""
        return self.num_physical_experts - int(self.replica_count.sum(axis=1).max())

    @property
    def num_redundant_experts(self) -> int:
        """Slots that host an expert, less E, in the layer that has the most of them."""
        return self.num_physical_experts - self.num_empty_slots - self.num_logical_experts

    @property
    def num_local_experts(self) -> int:
        """Slots of one rank, the same for each; empty ones included."""
        return self.num_physical_experts // self.num_ranks

    @property
    def replica_count(self) -> IntArray:
        """[L, E] int64: slots that hold the expert, at least 1."""
        counts: IntArray = self.__dict__["_counts"]
        return counts

    @cached_property
    def logical_to_physical(self) -> IntArray:
        """[L, E, R] int64: slots of each expert, ascending, padded with -1."""
        table, counts = self.physical_to_logical, self.replica_count
        shape = (self.num_layers, self.num_logical_experts, int(counts.max()))
        out = np.full(shape, -1, dtype=np.int64)
        # A stable sort by expert keeps the slots of one expert ascending; empty ones come first.
        order = np.argsort(table, axis=1, kind="stable")
        empty = table.shape[1] - counts.sum(axis=1, keepdims=True)
        first = empty + np.cumsum(counts, axis=1) - counts
        experts = np.take_along_axis(table, order, axis=1)
        layer, place = np.nonzero(experts != EMPTY)
        expert = experts[layer, place]
        out[layer, expert, place - first[layer, expert]] = order[layer, place]
        out.flags.writeable = False
        return out

    def slots_of(self, rank: int) -> range:
        """The physical slots that a rank owns, the same in every layer."""
        if not 0 <= rank < self.num_ranks:
            raise PlacementError(f"rank={rank}: valid are 0..{self.num_ranks - 1}")
        local = self.num_local_experts
        return range(rank * local, (rank + 1) * local)

    def rank_of(self, slot: int) -> int:
        if not 0 <= slot < self.num_physical_experts:
            raise PlacementError(f"slot={slot}: valid are 0..{self.num_physical_experts - 1}")
        return slot // self.num_local_experts

    def experts_of(self, rank: int, layer: int) -> list[int]:
        """The logical expert of each of the rank's slots, in slot order; EMPTY (-1) for none."""
        if not 0 <= layer < self.num_layers:
            raise PlacementError(f"layer={layer}: valid are 0..{self.num_layers - 1}")
        slots = self.slots_of(rank)
        experts: list[int] = self.physical_to_logical[layer, slots.start : slots.stop].tolist()
        return experts

    def diff(self, other: ExpertPlacement) -> PlacementDiff:
        """What changes from self to other; both must have the same layers, slots and experts."""
        mine, theirs = self.physical_to_logical, other.physical_to_logical
        if mine.shape != theirs.shape or self.num_logical_experts != other.num_logical_experts:
            raise PlacementError(
                f"diff: placements of {mine.shape} and {theirs.shape} [layers, slots] with "
                f"{self.num_logical_experts} and {other.num_logical_experts} experts do not compare"
            )
        layers, slots = np.nonzero(mine != theirs)
        return PlacementDiff(layers, slots, mine[layers, slots], theirs[layers, slots])

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of everything that equality compares: what ranks exchange to agree."""
        head = f"{self.physical_to_logical.shape} {self.num_logical_experts} {self.num_ranks}"
        digest = hashlib.sha256(f"{head} {self.generation}".encode())
        digest.update(self.physical_to_logical.astype("<i8").tobytes())
        return digest.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ExpertPlacement) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        return (
            f"ExpertPlacement(layers={self.num_layers}, experts={self.num_logical_experts}, "
            f"redundant={self.num_redundant_experts}, empty={self.num_empty_slots}, "
            f"ranks={self.num_ranks}, generation={self.generation})"
        )

    # -- files -----------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write JSON (`.json`) or a numpy archive (`.npz`)."""
        path = Path(path)
        head = {
            "format": _FORMAT,
            "version": _VERSION,
            "generation": self.generation,
            "num_ranks": self.num_ranks,
            "num_logical_experts": self.num_logical_experts,
        }
        if path.suffix == ".json":
            table = self.physical_to_logical.tolist()
            path.write_text(json.dumps({**head, "physical_to_logical": table}) + "\n")
        elif path.suffix == ".npz":
            meta = np.array(json.dumps(head))
            np.savez_compressed(path, meta=meta, physical_to_logical=self.physical_to_logical)
        else:
            raise PlacementError(f"path={str(path)!r}: valid endings are .json and .npz")

    @classmethod
    def load(cls, path: str | Path) -> ExpertPlacement:
        """Read what `save` wrote, or others in its form (see `from_physical_to_logical`).
        PlacementError for anything else, OSError if unreadable."""
        path = Path(path)
        head, table = _read(path)
        if head.get("format") != _FORMAT or head.get("version") != _VERSION:
            raise PlacementError(
                f"{path}: format={head.get('format')!r} version={head.get('version')!r}; valid is "
                f"{_FORMAT!r} version {_VERSION}"
            )
        numbers = {}
        for name in ("num_logical_experts", "num_ranks", "generation"):
            value = head.get(name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise PlacementError(f"{path}: {name}={value!r}: must be an integer")
            numbers[name] = value
        try:
            return cls.from_physical_to_logical(
                table,
                numbers["num_ranks"],
                numbers["num_logical_experts"],
                numbers["generation"],
            )
        except PlacementError as error:
            raise PlacementError(f"{path}: {error}") from error


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise PlacementError(f"{name}={value}: must be at least {least}")


def _check_ranks(num_ranks: int) -> None:
    if not 1 <= num_ranks <= _MAX_RANKS:
        raise PlacementError(f"num_ranks={num_ranks}: valid are 1..{_MAX_RANKS}")


def _spread(table: IntArray, ranks: int) -> IntArray:
    """table [L, H] -> [L, P], P = ranks * ceil(H / ranks): its columns in order over the ranks,
    one EMPTY at the end of each of the last P - H ranks (so that ranks differ by one at most)."""
    layers, columns = table.shape
    local = -(-columns // ranks)
    missing = ranks * local - columns
    place = np.arange(ranks * local).reshape(ranks, local)
    hosting = np.ones((ranks, local), dtype=bool)
    hosting[ranks - missing :, -1] = False
    out = np.full((layers, ranks * local), EMPTY, dtype=np.int64)
    out[:, place[hosting]] = table
    return out


def _as_table(value: ArrayLike) -> IntArray:
    """An own int64 copy [L, P] of value."""
    try:
        array = np.array(value)
    except ValueError as error:
        raise PlacementError(f"physical_to_logical: rows of unequal length ({error})") from error
    if array.ndim != 2 or not array.size or array.dtype.kind not in "iu":
        raise PlacementError(
            f"physical_to_logical: {array.dtype} {list(array.shape)}; must be integers "
            "[layers, slots], neither of them 0"
        )
    return np.ascontiguousarray(array, dtype=np.int64)


def _count(table: IntArray, experts: int) -> IntArray:
    """[L, E] how often each expert occurs in each row of table [L, P]; EMPTY is not counted."""
    layers = table.shape[0]
    flat = (table + np.arange(layers)[:, None] * experts)[table != EMPTY]
    return np.bincount(flat, minlength=layers * experts).reshape(layers, experts).astype(np.int64)


def _read(path: Path) -> tuple[dict[str, Any], Any]:
    """(head, table). OSError if the file cannot be read, PlacementError if it is no placement."""
    if path.suffix not in (".json", ".npz"):
        raise PlacementError(f"path={str(path)!r}: valid endings are .json and .npz")
    content = path.read_bytes()
    try:
        if path.suffix == ".json":
            head = json.loads(content)
            table = head.get("physical_to_logical", []) if isinstance(head, dict) else []
        else:
            members = read_arrays(content)
            head, table = json.loads(str(members["meta"])), members["physical_to_logical"]
    except Exception as error:  # damaged JSON raises what its bytes happen to look like
        raise PlacementError(f"{path}: not a placement file ({first_line(error)})") from error
    if not isinstance(head, dict):
        raise PlacementError(f"{path}: not a placement file (no JSON object at its head)")
    return head, table
