"""Reading recorded expert loads: ours, SGLang's, vLLM's, and a plain array.

Knows: file forms, and how each names its counts. Everything comes out as per-step counts of logical
experts. Knows nothing of: what the loads are for.

Accepted:
- our recordings (`ep.recording`), of one phase where its name is given;
- any `.npz` with one array [L, E] or [S, L, E], or with one named as in `LOGICAL`; or with several,
  one of which is asked for by name;
- SGLang's expert distribution dumps, `.pt` or `.json`: `logical_count` [S, L, E] or [L, E], or
  `records` a pass (`global_physical_count`, with `last_physical_to_logical_map`); `.json` may hold
  {layer: {expert: count}};
- vLLM's balancer state, `.pt` or `.json`: `expert_load_window` [S, L, P], `expert_load_pass` on
  physical slots with `physical_to_logical_map`, or `logical_expert_load`;
- `.npy`, `.csv` (one row a layer), `.json`, `.pt` that hold nothing but [L, E] or [S, L, E].

Shape letters: S steps, L layers, E logical experts, P physical slots.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ep.load import PHASES
from ep.planning.plan_loads import PlanError, as_loads
from ep.planning.replicate import FloatArray, IntArray
from ep.recording import ExpertRecording, RecordingError

ENDINGS = (".npz", ".npy", ".json", ".csv", ".pt")
# Names under which the known forms keep counts of logical experts, the first that is there.
LOGICAL = ("loads", "logical_count", "logical_expert_load", "counts", "totals")
PHYSICAL = (
    "global_physical_count",
    "physical_count",
    "expert_load_window",
    "expert_load_pass",
    "expert_load",
)
MAPS = ("physical_to_logical_map", "physical_to_logical", "last_physical_to_logical_map")
_ACCEPTED = (
    "an array [layers, experts] or [steps, layers, experts], alone or as one of "
    f"{', '.join(LOGICAL)}; or {', '.join(PHYSICAL)} on physical slots, with {MAPS[0]}"
)


class TraceError(ValueError):
    """A file that holds no expert loads: names it, what is wrong, and what is accepted."""


@dataclass(frozen=True, eq=False)
class Trace:
    """loads [S, L, E] float64 >= 0. layers [L]: numbers of the layers in the file (those without
    any load at its beginning, dense ones, are dropped). source: the form it came in."""

    loads: FloatArray
    layers: IntArray
    source: str

    @property
    def totals(self) -> FloatArray:
        """[L, E]."""
        total: FloatArray = np.add.reduce(self.loads, axis=0)
        return total


def read_trace(path: str | Path, name: str | None = None, drop_dense: bool = True) -> Trace:
    """Loads of a file. name: which array of several, or which phase of a recording. drop_dense:
    leave out layers before the first with load. TraceError for anything else, OSError if
    unreadable."""
    path = Path(path)
    if path.suffix not in ENDINGS:
        raise TraceError(f"{path}: ending {path.suffix!r}; accepted are {', '.join(ENDINGS)}")
    content = path.read_bytes()
    try:
        held = _decode(path, content)
    except TraceError:
        raise
    except Exception as error:  # a damaged file raises what its bytes happen to look like
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TraceError(f"{path}: not readable as {path.suffix} ({reason})") from error
    if _is_recording(held):
        return _from_recording(path, content, name)
    array, source = _find(path, held, name)
    try:
        loads = as_loads(array)
    except (PlanError, TypeError) as error:
        raise TraceError(f"{path}: {error}; accepted are {_ACCEPTED}") from error
    first = 0
    if drop_dense:
        busy = loads.any(axis=(0, 2))
        first = int(busy.argmax()) if busy.any() else 0
    return Trace(loads[:, first:], np.arange(first, loads.shape[1]), source)


def _is_recording(held: Any) -> bool:
    return isinstance(held, dict) and getattr(held.get("counts"), "ndim", 0) == 4


def _from_recording(path: Path, content: bytes, name: str | None) -> Trace:
    if name is not None and name not in PHASES:
        raise TraceError(f"{path}: name={name!r}: of a recording valid are {', '.join(PHASES)}")
    try:
        recording = ExpertRecording.from_bytes(content)
        loads = as_loads(recording.history(name))
    except (RecordingError, PlanError) as error:
        raise TraceError(f"{path}: {error}") from error
    return Trace(loads, np.array(recording.info.layers), "recording")


def names_of(path: str | Path) -> list[str]:
    """Arrays of an `.npz` that `read_trace` would take by name; empty for other endings."""
    path = Path(path)
    if path.suffix != ".npz":
        return []
    try:
        held = _decode(path, path.read_bytes())
    except (ValueError, KeyError, EOFError, OSError) as error:
        raise TraceError(f"{path}: not readable as .npz ({error})") from error
    return sorted(key for key, value in held.items() if _is_loads(value))


def _decode(path: Path, content: bytes) -> Any:
    if path.suffix == ".npz":
        with np.load(io.BytesIO(content), allow_pickle=False) as archive:
            return {key: archive[key] for key in archive.files}
    if path.suffix == ".npy":
        return np.load(io.BytesIO(content), allow_pickle=False)
    if path.suffix == ".csv":
        text = content.decode()
        skip = 0 if _all_numbers(text.split("\n", 1)[0].split(",")) else 1  # a head line
        return np.loadtxt(io.StringIO(text), delimiter=",", skiprows=skip, ndmin=2)
    if path.suffix == ".json":
        return json.loads(content)
    import torch  # only where a torch file is read

    # weights_only: tensors and plain containers, no code of the file runs.
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def _all_numbers(words: list[str]) -> bool:
    try:
        return bool([float(word) for word in words])
    except ValueError:
        return False


def _find(path: Path, held: Any, name: str | None) -> tuple[Any, str]:
    if isinstance(held, Mapping):
        return _find_in(path, held, name)
    if name is not None:
        raise TraceError(f"{path}: name={name!r}: the file holds one array without a name")
    if isinstance(held, list) and held and isinstance(held[0], Mapping):
        return _find_in_records(path, held)
    return held, "plain array"


def _find_in(path: Path, held: Mapping[str, Any], name: str | None) -> tuple[Any, str]:
    if name is not None:
        if name not in held:
            known = ", ".join(key for key, value in held.items() if _is_loads(value))
            raise TraceError(f"{path}: name={name!r}: not in the file; valid are {known}")
        return held[name], f"array {name}"
    for key in LOGICAL:
        if key in held:
            return _numeric(held[key]), key
    if isinstance(held.get("records"), list) and held["records"]:
        # A record does not say which map was in force: the last one has to do.
        maps = {key: held[key] for key in MAPS if key in held}
        return _find_in_records(path, held["records"], maps)
    for key in PHYSICAL:
        if key in held:
            return _to_logical(path, held, key), key
    if len(held) and all(str(key).isdigit() for key in held):
        return _numeric(held), "counts by layer and expert"
    arrays = [key for key, value in held.items() if _is_loads(value)]
    if len(arrays) == 1:
        return held[arrays[0]], f"array {arrays[0]}"
    if arrays:
        raise TraceError(
            f"{path}: holds several arrays: choose one by name of {', '.join(sorted(arrays))}"
        )
    raise TraceError(
        f"{path}: holds {sorted(map(str, held))[:12]}, none of them loads; accepted are {_ACCEPTED}"
    )


def _find_in_records(
    path: Path, records: list[Any], more: Mapping[str, Any] | None = None
) -> tuple[Any, str]:
    """One mapping a step (or a rank): their counts, step by step."""
    if not all(isinstance(record, Mapping) for record in records):
        raise TraceError(f"{path}: records are not all mappings; accepted are {_ACCEPTED}")
    found = [_find_in(path, {**(more or {}), **record}, None) for record in records]
    arrays = [np.asarray(_plain(array), dtype=np.float64) for array, _ in found]
    shapes = sorted({array.shape for array in arrays})
    if len(shapes) > 1:
        raise TraceError(f"{path}: records of unequal shapes {shapes[:4]}")
    return np.stack(arrays), found[0][1]


def _numeric(value: Any) -> Any:
    """{layer: {expert: count}} or {layer: [counts]} -> nested lists; arrays as they are."""
    if not isinstance(value, Mapping):
        return value
    layers = {int(key): row for key, row in value.items()}
    rows = []
    experts = 0
    for number in range(max(layers) + 1):
        row = layers.get(number, {})
        if not isinstance(row, Mapping):
            row = dict(enumerate(row))
        row = {int(key): count for key, count in row.items()}
        experts = max(experts, max(row, default=-1) + 1)
        rows.append(row)
    return [[row.get(expert, 0) for expert in range(experts)] for row in rows]


def _to_logical(path: Path, held: Mapping[str, Any], key: str) -> Any:
    """Counts on physical slots [.., L, P] -> on logical experts [.., L, E]."""
    counts = np.asarray(_plain(held[key]), dtype=np.float64)
    table = next((held[name] for name in MAPS if name in held), None)
    if table is None:
        return counts  # no redundancy noted: slots are experts
    slots = np.asarray(_plain(table))
    slots = slots[-1] if slots.ndim == 3 else slots
    if counts.ndim < 2 or slots.dtype.kind not in "iu" or slots.shape != counts.shape[-2:]:
        raise TraceError(
            f"{path}: {key} {list(counts.shape)} and its map {list(slots.shape)} do not go "
            "together; the map must be integers [layers, slots]"
        )
    out = np.zeros((*counts.shape[:-1], int(slots.max()) + 1))
    for layer, row in enumerate(slots):
        at = np.flatnonzero(row >= 0)
        for slot in at:
            out[..., layer, row[slot]] += counts[..., layer, slot]
    return out


def _plain(value: Any) -> Any:
    return value.cpu().numpy() if hasattr(value, "cpu") else value


def _is_loads(value: Any) -> bool:
    shape = getattr(value, "shape", None)
    kind = getattr(getattr(value, "dtype", None), "kind", "f")
    return shape is not None and len(shape) in (2, 3) and kind in "iuf"
