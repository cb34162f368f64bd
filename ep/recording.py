"""ExpertRecording: expert load of a job over time, by phase, and its file (`.npz`).

Knows: intervals of steps, counts per logical expert, traffic between ranks, the placements that
were in force; reading and writing. Validated when made, never changed after. Knows nothing of: how
a job is recorded (`moeserve.recorder`, `moeserve.collector`), planning, other tools' formats.

Shape letters: S intervals, L layers that have experts (MTP layers last), E logical experts,
P physical slots, G ranks, N placements.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ep.archive import ArchiveError, first_line, read_arrays, smallest, write_arrays, write_whole
from ep.load import PHASES, phase_index
from ep.placement import ExpertPlacement, PlacementError

IntArray = NDArray[np.int64]

FORMAT = "moeserve-expert-recording"
VERSION = 1


class RecordingError(ValueError):
    """A recording that cannot be: names the field, the value and what would be valid."""


@dataclass(frozen=True)
class RecordingInfo:
    """What was recorded. layers [L]: the model's number of each row; the last num_mtp_layers rows
    are MTP layers. picks_per_token: experts that each token chooses in a layer (hosted shared ones
    included). interval_steps: steps with tokens an interval has at most. Texts may be empty where
    nobody knows (a recording made from another tool's dump)."""

    num_ranks: int
    interval_steps: int
    layers: tuple[int, ...]
    num_mtp_layers: int = 0
    picks_per_token: int = 0  # 0: not known
    ranks_per_node: int = 1
    model_type: str = ""
    checkpoint: str = ""
    fingerprint: str = ""  # of the checkpoint
    dtype: str = ""
    moeserve_version: str = ""
    started_at: str = ""  # ISO 8601, UTC


@dataclass(frozen=True, eq=False)
class ExpertRecording:
    """counts [S, 2, L, E] tokens that chose each expert, by phase (`ep.load.PHASES`), of all ranks;
    int64. steps [S, 2] first and last lockstep step of each interval, ascending; num_steps [S] how
    many of these had tokens; seconds [S] spent in them; tokens [S, 2] computed, by phase; traffic
    [S, G, G] rows sent, from rank to rank, itself included, all layers; placement_index [S] into
    `placements`. Arrays are read-only. All but counts and info have a default: nothing known.
    """

    counts: IntArray
    info: RecordingInfo
    steps: IntArray
    num_steps: IntArray
    seconds: NDArray[np.float64]
    tokens: IntArray
    traffic: IntArray
    placement_index: IntArray
    placements: tuple[ExpertPlacement, ...] = ()

    @classmethod
    def of(
        cls,
        counts: Any,
        info: RecordingInfo,
        *,
        steps: Any = None,
        num_steps: Any = None,
        seconds: Any = None,
        tokens: Any = None,
        traffic: Any = None,
        placements: Sequence[ExpertPlacement] = (),
        placement_index: Any = None,
    ) -> ExpertRecording:
        """From what is known: counts [S, 2, L, E]; steps default to one an interval."""
        counts = np.asarray(counts)
        size = len(counts) if counts.ndim else 0
        number = np.arange(size)
        ranks = info.num_ranks

        def given(value: Any, default: Any) -> Any:
            return default if value is None else np.asarray(value)

        return cls(
            counts=counts,
            info=info,
            steps=given(steps, np.stack([number, number], axis=1)),
            num_steps=given(num_steps, np.ones(size, np.int64)),
            seconds=given(seconds, np.zeros(size)),
            tokens=given(tokens, np.zeros((size, 2), np.int64)),
            traffic=given(traffic, np.zeros((size, ranks, ranks), np.int64)),
            placement_index=given(placement_index, np.zeros(size, np.int64)),
            placements=tuple(placements),
        )

    def __post_init__(self) -> None:
        info = self.info
        _check_info(info)
        counts = _array("counts", self.counts, (None, len(PHASES), len(info.layers), None))
        size, experts, ranks = len(counts), counts.shape[3], info.num_ranks
        if not experts:
            raise RecordingError("counts: 0 experts; at least 1 is needed")
        wanted: dict[str, tuple[int | None, ...]] = {
            "steps": (size, 2),
            "num_steps": (size,),
            "tokens": (size, len(PHASES)),
            "traffic": (size, ranks, ranks),
            "placement_index": (size,),
        }
        arrays = {name: _array(name, getattr(self, name), shape) for name, shape in wanted.items()}
        seconds = np.array(self.seconds)
        if seconds.dtype.kind not in "iuf":
            raise RecordingError(f"seconds: {seconds.dtype}; must be numbers")
        seconds = seconds.astype(np.float64)
        if seconds.shape != (size,) or not np.isfinite(seconds).all() or (seconds < 0).any():
            raise RecordingError(f"seconds: must be {size} finite numbers, none negative")
        steps = arrays["steps"]
        if (steps[:, 1] < steps[:, 0]).any():
            i = int(np.argmax(steps[:, 1] < steps[:, 0]))
            raise RecordingError(f"steps[{i}]={steps[i].tolist()}: the last is before the first")
        for i, placement in enumerate(self.placements):
            mine = (len(info.layers), experts, ranks)
            theirs = (placement.num_layers, placement.num_logical_experts, placement.num_ranks)
            if mine != theirs:
                raise RecordingError(
                    f"placements[{i}]: {theirs} layers, experts, ranks; the counts are of {mine}"
                )
        index = arrays["placement_index"]
        top = max(len(self.placements), 1)
        if size and index.max() >= top:
            raise RecordingError(f"placement_index: {index.max()}; valid are 0..{top - 1}")
        for name, array in {**arrays, "counts": counts, "seconds": seconds}.items():
            array.flags.writeable = False
            object.__setattr__(self, name, array)

    # -- looking at it ---------------------------------------------------------------------

    @property
    def num_intervals(self) -> int:
        return len(self.counts)

    @property
    def num_layers(self) -> int:
        return self.counts.shape[2]

    @property
    def num_experts(self) -> int:
        return self.counts.shape[3]

    @property
    def generations(self) -> list[int]:
        """[S] generation of the placement of each interval; empty where none is known."""
        if not self.placements:
            return []
        return [self.placements[i].generation for i in self.placement_index]

    def totals(self, phase: str | None = None) -> IntArray:
        """[L, E], of one phase or both."""
        totals: IntArray = self.history(phase).sum(axis=0)
        return totals

    def history(self, phase: str | None = None) -> IntArray:
        """[S, L, E], of one phase or both: what the planner takes."""
        if phase is None:
            both: IntArray = self.counts.sum(axis=1)
            return both
        return self.counts[:, phase_index(phase)]

    def placement_of(self, interval: int) -> ExpertPlacement | None:
        """In force in an interval (negative: from the end); None where not known."""
        if not self.placements:
            return None
        return self.placements[self.placement_index[interval]]

    @cached_property
    def missing_picks(self) -> IntArray:
        """[S, L]: tokens x picks_per_token less the counts of each layer; 0 everywhere in a layer
        that ran for every token. MTP layers run for other tokens: not checked, 0."""
        expected = self.tokens.sum(axis=1)[:, None] * self.info.picks_per_token
        missing = expected - self.counts.sum(axis=(1, 3))
        if self.info.num_mtp_layers:
            missing[:, -self.info.num_mtp_layers :] = 0
        return missing

    # -- parts and wholes ------------------------------------------------------------------

    def slice(self, start: int | None = None, stop: int | None = None) -> ExpertRecording:
        """The intervals start..stop, as of a list; placements that do not occur are left out."""
        part = slice(start, stop)
        index = self.placement_index[part]
        used = np.unique(index) if self.placements else np.zeros(0, np.int64)
        arrays = {name: getattr(self, name)[part] for name in _ARRAYS}
        arrays["placement_index"] = np.searchsorted(used, index) if len(used) else index
        placements = tuple(self.placements[i] for i in used)
        return ExpertRecording(info=self.info, placements=placements, **arrays)

    @classmethod
    def merge(cls, recordings: Sequence[ExpertRecording]) -> ExpertRecording:
        """One after the other. RecordingError where layers, experts or ranks differ, or where only
        some know their placements. What else differs in `info` is the first one's."""
        if not recordings:
            raise RecordingError("merge: at least one recording is needed")
        first = recordings[0]
        placements: list[ExpertPlacement] = []
        index: list[IntArray] = []
        for i, other in enumerate(recordings):
            for name, mine, theirs in (
                ("layers", first.info.layers, other.info.layers),
                ("experts", first.num_experts, other.num_experts),
                ("num_ranks", first.info.num_ranks, other.info.num_ranks),
                ("picks_per_token", first.info.picks_per_token, other.info.picks_per_token),
                ("fingerprint", first.info.fingerprint, other.info.fingerprint),
                ("placements known", bool(first.placements), bool(other.placements)),
            ):
                if mine != theirs:
                    raise RecordingError(
                        f"merge: recording {i} has {name}={theirs!r}, recording 0 {mine!r}"
                    )
            place = []
            for placement in other.placements:
                if placement not in placements:
                    placements.append(placement)
                place.append(placements.index(placement))
            index.append(
                np.array(place, np.int64)[other.placement_index] if place else other.placement_index
            )
        arrays = {name: np.concatenate([getattr(r, name) for r in recordings]) for name in _ARRAYS}
        arrays["placement_index"] = np.concatenate(index)
        longest = max(r.info.interval_steps for r in recordings)
        info = replace(first.info, interval_steps=longest)
        return cls(info=info, placements=tuple(placements), **arrays)

    # -- files -----------------------------------------------------------------------------

    def to_bytes(self, compress: bool = True) -> bytes:
        """The file's content. compress False: larger, and made at once."""
        head = {"format": FORMAT, "version": VERSION, **asdict(self.info)}
        head["num_logical_experts"] = self.num_experts
        head["generations"] = [p.generation for p in self.placements]
        arrays = {name: smallest(getattr(self, name)) for name in _ARRAYS}
        for i, placement in enumerate(self.placements):
            arrays[f"placement_{i}"] = smallest(placement.physical_to_logical)
        return write_arrays({"info": np.array(json.dumps(head)), **arrays}, compress)

    def save(self, path: str | Path) -> None:
        """Write `path` whole or not at all: under another name first, then renamed."""
        path = Path(path)
        if path.suffix != ".npz":
            raise RecordingError(f"path={str(path)!r}: the valid ending is .npz")
        write_whole(path, self.to_bytes())

    @classmethod
    def load(cls, path: str | Path) -> ExpertRecording:
        """Read what `save` wrote. RecordingError names what is damaged; OSError if unreadable."""
        content = Path(path).read_bytes()
        try:
            return cls.from_bytes(content)
        except RecordingError as error:
            raise RecordingError(f"{path}: {error}") from error

    @classmethod
    def from_bytes(cls, content: bytes) -> ExpertRecording:
        """RecordingError names the damaged field."""
        try:
            members = read_arrays(content)
        except ArchiveError as error:
            raise RecordingError(str(error)) from error
        head = _read_head(members)
        generations = head.pop("generations", [])
        experts = head.pop("num_logical_experts", None)
        info = _info_from(head)
        arrays = {name: _take(members, name) for name in _ARRAYS}
        if not isinstance(experts, int) or arrays["counts"].shape[3:] != (experts,):
            raise RecordingError(
                f"info.num_logical_experts={experts!r}: counts are {list(arrays['counts'].shape)}"
            )
        if not isinstance(generations, list) or not all(type(g) is int for g in generations):
            raise RecordingError(f"info.generations={generations!r}: must be a list of integers")
        placements = []
        for i, generation in enumerate(generations):
            table = _take(members, f"placement_{i}")
            try:
                made = ExpertPlacement(table, experts, info.num_ranks, generation)
            except PlacementError as error:
                raise RecordingError(f"placement_{i}: {error}") from error
            placements.append(made)
        if members:
            raise RecordingError(f"{sorted(members)[0]}: not a field of a recording")
        return cls(info=info, placements=tuple(placements), **arrays)


_ARRAYS = tuple(f.name for f in fields(ExpertRecording) if f.name not in ("info", "placements"))


def _array(name: str, value: Any, shape: tuple[int | None, ...]) -> IntArray:
    """An own int64 copy; None in shape: any number."""
    array = np.asarray(value)
    fits = array.ndim == len(shape) and all(
        want is None or want == have for want, have in zip(shape, array.shape, strict=True)
    )
    if not fits or array.dtype.kind not in "iu":
        wanted = ", ".join("any" if x is None else str(x) for x in shape)
        raise RecordingError(
            f"{name}: {array.dtype} {list(array.shape)}; must be integers [{wanted}]"
        )
    if array.size and array.min() < 0:
        raise RecordingError(f"{name}: holds {array.min()}; must not be negative")
    if array.size and array.max() > np.iinfo(np.int64).max // 2:
        raise RecordingError(f"{name}: holds {array.max()}; far too large")
    return np.array(array, dtype=np.int64)


def _check_info(info: RecordingInfo) -> None:
    for name, least in (
        ("num_ranks", 1),
        ("interval_steps", 1),
        ("num_mtp_layers", 0),
        ("picks_per_token", 0),
        ("ranks_per_node", 1),
    ):
        value = getattr(info, name)
        if type(value) is not int or value < least:
            raise RecordingError(f"info.{name}={value!r}: must be an integer, at least {least}")
    layers = info.layers
    if not layers or not all(type(x) is int and x >= 0 for x in layers):
        raise RecordingError(f"info.layers={layers!r}: must be numbers of layers, at least one")
    if info.num_mtp_layers > len(layers):
        raise RecordingError(
            f"info.num_mtp_layers={info.num_mtp_layers}: at most {len(layers)}, the layers"
        )
    for field in fields(info):
        value = getattr(info, field.name)
        if field.type == "str" and not isinstance(value, str):
            raise RecordingError(f"info.{field.name}={value!r}: must be a text")


def _take(members: dict[str, NDArray[Any]], name: str) -> NDArray[Any]:
    if name not in members:
        raise RecordingError(f"{name}: missing")
    return members.pop(name)


def _read_head(members: dict[str, NDArray[Any]]) -> dict[str, Any]:
    try:
        head = json.loads(str(_take(members, "info")))
    except RecursionError as error:
        raise RecordingError("info: damaged (nested too deeply)") from error
    except ValueError as error:
        if isinstance(error, RecordingError):
            raise RecordingError("not a recording: info is missing") from error
        raise RecordingError(f"info: damaged ({first_line(error)})") from error
    if not isinstance(head, dict):
        raise RecordingError("info: must be a JSON object")
    form, version = head.pop("format", None), head.pop("version", None)
    if form != FORMAT or version != VERSION:
        raise RecordingError(
            f"info.format={form!r}, version={version!r}: valid is {FORMAT!r} version {VERSION}"
        )
    return head


def _info_from(head: dict[str, Any]) -> RecordingInfo:
    known = {f.name for f in fields(RecordingInfo)}
    unknown = sorted(head.keys() - known)
    if unknown:
        raise RecordingError(f"info.{unknown[0]}: unknown; known are {', '.join(sorted(known))}")
    missing = sorted({"num_ranks", "interval_steps", "layers"} - head.keys())
    if missing:
        raise RecordingError(f"info.{missing[0]}: missing")
    layers = head["layers"]
    if not isinstance(layers, list):
        raise RecordingError(f"info.layers={layers!r}: must be a list of numbers")
    info = RecordingInfo(**{**head, "layers": tuple(layers)})
    _check_info(info)
    return info
