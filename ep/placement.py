"""ExpertPlacement: which physical slot holds which logical expert, layer by layer.

Knows: layers, slots, ranks, a generation number; reading and writing of placements. Validated when
made, never changed after. Knows nothing of: loads, how a placement is chosen, weights, tokens.

Shape letters: L layers that have experts (MTP layers last), E logical experts, P physical slots of
all ranks, R largest number of replicas of an expert in any layer. Rank g owns the slots
g * P / ranks ... (g + 1) * P / ranks - 1.
"""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

IntArray = NDArray[np.int64]

_FORMAT = "moeserve-expert-placement"
_VERSION = 1


class PlacementError(ValueError):
    """A placement that cannot be: names the field, the value and what would be valid."""


def valid_redundant_experts(
    num_experts: int, num_ranks: int, wanted: int
) -> tuple[int | None, int]:
    """The nearest numbers of redundant experts that divide evenly: at most `wanted` (None when
    there is no such number), and above it."""
    smallest = -num_experts % num_ranks
    below = wanted - (wanted - smallest) % num_ranks
    return (below if below >= 0 else None), (below + num_ranks)


def check_divisible(num_experts: int, num_ranks: int, num_redundant: int) -> None:
    """PlacementError unless num_experts + num_redundant slots divide by num_ranks."""
    if num_experts < 1:
        raise PlacementError(f"num_experts={num_experts}: must be at least 1")
    if num_ranks < 1:
        raise PlacementError(f"num_ranks={num_ranks}: must be at least 1")
    if num_redundant < 0:
        raise PlacementError(f"num_redundant={num_redundant}: must be at least 0")
    total = num_experts + num_redundant
    if total % num_ranks == 0:
        return
    below, above = valid_redundant_experts(num_experts, num_ranks, num_redundant)
    valid = f"{above}" if below is None else f"{below} or {above}"
    raise PlacementError(
        f"num_redundant={num_redundant}: {num_experts} experts + {num_redundant} redundant = "
        f"{total} slots do not divide by {num_ranks} ranks; nearest valid numbers of redundant "
        "experts: "
        f"{valid}" + ("" if below is not None else " (none below)")
    )


@dataclass(frozen=True)
class PlacementDiff:
    """The slots whose expert changes, in order of layer, then slot. Four arrays [M] int64."""

    layers: IntArray
    slots: IntArray
    before: IntArray
    after: IntArray

    def __len__(self) -> int:
        return len(self.layers)


@dataclass(frozen=True, eq=False)
class ExpertPlacement:
    """Make it with `trivial`, `from_physical_to_logical` or `load`.

    physical_to_logical [L, P] int64: expert of each slot. num_logical_experts: E; each expert has a
    slot in every layer. generation counts the placements of a run, so that ranks can agree on one.
    Arrays are read-only.
    """

    physical_to_logical: IntArray
    num_logical_experts: int
    num_ranks: int
    generation: int = 0

    def __post_init__(self) -> None:
        table = _as_table(self.physical_to_logical)
        experts, ranks = self.num_logical_experts, self.num_ranks
        if self.generation < 0:
            raise PlacementError(f"generation={self.generation}: must be at least 0")
        slots = table.shape[1]
        if slots < experts:
            raise PlacementError(
                f"physical_to_logical: {slots} slots cannot hold {experts} experts; at least "
                f"{experts} are needed"
            )
        check_divisible(experts, ranks, slots - experts)
        wrong = np.argwhere((table < 0) | (table >= experts))
        if len(wrong):
            layer, slot = wrong[0]
            raise PlacementError(
                f"physical_to_logical[{layer}, {slot}]={table[layer, slot]}: not an expert; valid "
                f"are 0..{experts - 1} ({len(wrong)} such slots)"
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
        """Slot p holds expert p % E in every layer: experts in order, then copies in order.

        Copies of an expert lie E slots apart, so they are on different ranks unless a rank owns
        more than E slots (and then some rank must hold two copies of something).
        """
        if num_layers < 1:
            raise PlacementError(f"num_layers={num_layers}: must be at least 1")
        check_divisible(num_experts, num_ranks, num_redundant)
        row = np.arange(num_experts + num_redundant, dtype=np.int64) % num_experts
        return cls(np.tile(row, (num_layers, 1)), num_experts, num_ranks, generation)

    @classmethod
    def from_physical_to_logical(
        cls,
        physical_to_logical: ArrayLike,
        num_ranks: int,
        num_experts: int | None = None,
        generation: int = 0,
    ) -> ExpertPlacement:
        """A given table [L, P]. num_experts None: the largest id + 1."""
        table = _as_table(physical_to_logical)
        experts = int(table.max()) + 1 if num_experts is None else num_experts
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
        return len(self.physical_to_logical[0])

    @property
    def num_redundant_experts(self) -> int:
        return self.num_physical_experts - self.num_logical_experts

    @property
    def num_local_experts(self) -> int:
        """Slots of one rank."""
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
        layers, slots = table.shape
        out = np.full((layers, self.num_logical_experts, int(counts.max())), -1, dtype=np.int64)
        # A stable sort by expert keeps the slots of one expert ascending.
        order = np.argsort(table, axis=1, kind="stable")
        experts = np.take_along_axis(table, order, axis=1)
        first = np.cumsum(counts, axis=1) - counts
        replica = np.arange(slots) - np.take_along_axis(first, experts, axis=1)
        out[np.arange(layers)[:, None], experts, replica] = order
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
        """The logical expert of each of the rank's slots, in slot order."""
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
            f"redundant={self.num_redundant_experts}, ranks={self.num_ranks}, "
            f"generation={self.generation})"
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
        """Read what `save` wrote. PlacementError for anything else, OSError if unreadable."""
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
            return cls(_as_table(table), **numbers)
        except PlacementError as error:
            raise PlacementError(f"{path}: {error}") from error


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
    """[L, E] how often each expert occurs in each row of table [L, P]."""
    layers = table.shape[0]
    flat = (table + np.arange(layers)[:, None] * experts).ravel()
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
            with np.load(io.BytesIO(content), allow_pickle=False) as archive:
                head, table = json.loads(str(archive["meta"])), archive["physical_to_logical"]
    except Exception as error:  # a damaged archive raises what its bytes happen to look like
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise PlacementError(f"{path}: not a placement file ({reason})") from error
    if not isinstance(head, dict):
        raise PlacementError(f"{path}: not a placement file (no JSON object at its head)")
    return head, table
