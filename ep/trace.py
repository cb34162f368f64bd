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

Whatever a file says is suspect: anything it can cause is a TraceError.

Shape letters: S steps, L layers, E logical experts, P physical slots.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ep.archive import first_line
from ep.load import PHASES
from ep.planning.plan_loads import PlanError, as_loads
from ep.planning.replicate import FloatArray, IntArray
from ep.recording import ExpertRecording, RecordingError
from ep.trace_csv import read_csv

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
# What a damaged or a strange file says must not become memory: more than any model has.
MAX_LAYERS = 1 << 12
MAX_EXPERTS = 1 << 16
MAX_CELLS = 1 << 22  # of one step
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")  # torch colours its messages


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
        return _read(path, content, name, drop_dense)
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from error
    except (PlanError, TypeError) as error:
        reason = first_line(error)
        raise TraceError(f"{path}: {reason}; accepted are {_ACCEPTED}") from error
    except Exception as error:  # a damaged file raises what its bytes happen to look like
        reason = _COLOUR.sub("", first_line(error))
        raise TraceError(f"{path}: not readable as {path.suffix} ({reason})") from error


def _read(path: Path, content: bytes, name: str | None, drop_dense: bool) -> Trace:
    """Raises anything; messages do not name the file."""
    held = _decode(path, content)
    if _is_recording(held):
        return _from_recording(content, name)
    array, source = _find(held, name)
    loads = as_loads(_plain(array))
    first = 0
    if drop_dense:
        busy = loads.any(axis=(0, 2))
        first = int(busy.argmax()) if busy.any() else 0
    return Trace(loads[:, first:], np.arange(first, loads.shape[1]), source)


def _is_recording(held: Any) -> bool:
    return isinstance(held, dict) and getattr(held.get("counts"), "ndim", 0) == 4


def _from_recording(content: bytes, name: str | None) -> Trace:
    if name is not None and name not in PHASES:
        raise TraceError(f"name={name!r}: of a recording valid are {', '.join(PHASES)}")
    try:
        recording = ExpertRecording.from_bytes(content)
        loads = as_loads(recording.history(name))
    except (RecordingError, PlanError) as error:
        raise TraceError(str(error)) from error
    return Trace(loads, np.array(recording.info.layers), "recording")


def names_of(path: str | Path) -> list[str]:
    """Arrays of an `.npz` that `read_trace` would take by name; empty for other endings."""
    path = Path(path)
    if path.suffix != ".npz":
        return []
    content = path.read_bytes()
    try:
        held = _decode(path, content)
    except Exception as error:
        raise TraceError(f"{path}: not readable as .npz ({first_line(error)})") from error
    return _arrays(held)


def _decode(path: Path, content: bytes) -> Any:
    if path.suffix == ".npz":
        with np.load(io.BytesIO(content), allow_pickle=False) as archive:
            return {key: archive[key] for key in archive.files}
    if path.suffix == ".npy":
        return np.load(io.BytesIO(content), allow_pickle=False)
    if path.suffix == ".csv":
        layers, rows = read_csv(content)
        if layers is None:
            return rows
        return _by_layer(zip(layers, rows, strict=True), "column layer")
    if path.suffix == ".json":
        return json.loads(content, object_pairs_hook=_once_each)
    import torch  # only where a torch file is read

    # weights_only: tensors and plain containers, no code of the file runs.
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise TraceError(f"key {twice[:40]!r}: occurs twice in one object")
    return made


def _find(held: Any, name: str | None) -> tuple[Any, str]:
    if isinstance(held, Mapping):
        return _find_in(held, name)
    if name is not None:
        raise TraceError(f"name={name!r}: the file holds one array without a name")
    if isinstance(held, list) and held and isinstance(held[0], Mapping):
        return _find_in_records(held)
    return held, "plain array"


def _find_in(held: Mapping[Any, Any], name: str | None) -> tuple[Any, str]:
    if name is not None:
        if name not in held or name in MAPS:
            wrong = "says where experts are, no loads" if name in held else "not in the file"
            known = ", ".join(_arrays(held)) or "none"
            raise TraceError(f"name={name!r}: {wrong}; valid are {known}")
        return _named(held, name)
    for key in LOGICAL:
        if key in held:
            return _numeric(held[key], key), key
    if isinstance(held.get("records"), list) and held["records"]:
        # A record does not say which map was in force: the last one has to do.
        maps = {key: held[key] for key in MAPS if key in held}
        return _find_in_records(held["records"], maps)
    for key in PHYSICAL:
        if key in held:
            array, said = _named(held, key)
            return array, said.removeprefix("array ")
    if len(held) and all(_is_number(key) for key in held):
        return _numeric(held, "layers"), "counts by layer and expert"
    arrays = _arrays(held)
    if len(arrays) == 1:
        return _named(held, arrays[0])
    if arrays:
        raise TraceError(f"holds several arrays: choose one by name of {', '.join(arrays)}")
    raise TraceError(
        f"holds {sorted(str(key)[:40] for key in held)[:12]}, none of them loads; accepted are "
        f"{_ACCEPTED}"
    )


def _named(held: Mapping[Any, Any], name: str) -> tuple[Any, str]:
    """One array of several. Where the file has a map of slots, so are counts on slots read."""
    if name in LOGICAL:
        return _numeric(held[name], name), f"array {name}"
    table = next((_plain(held[x]) for x in MAPS if held.get(x) is not None), None)
    if table is None:
        note = " (no map of slots: each taken as an expert)" if name in PHYSICAL else ""
        return _numeric(held[name], name), f"array {name}{note}"
    counts = _numbers(held[name], name)
    slots = _numbers(table, "its map")
    # A name nobody knows is of slots if it has as many as the map, and the map has copies.
    experts = int(slots.max()) + 1 if slots.size else 0
    unlike = counts.shape[-2:] != slots.shape[-2:] or experts == slots.shape[-1]
    if name not in PHYSICAL and unlike:
        return counts, f"array {name}"
    return _to_logical(name, counts, slots), f"array {name}"


def _find_in_records(records: list[Any], more: Mapping[str, Any] | None = None) -> tuple[Any, str]:
    """One mapping a step (or a rank): their counts, step by step."""
    if not all(isinstance(record, Mapping) for record in records):
        raise TraceError(f"records are not all mappings; accepted are {_ACCEPTED}")
    found = [_find_in({**(more or {}), **record}, None) for record in records]
    arrays = [_numbers(array, f"records[{i}]") for i, (array, _) in enumerate(found)]
    shapes = sorted({array.shape for array in arrays})
    if len(shapes) > 1:
        raise TraceError(f"records of unequal shapes {shapes[:4]}")
    return np.stack(arrays), found[0][1]


def _numeric(value: Any, name: str) -> Any:
    """{layer: {expert: count}} or {layer: [counts]} -> [L, E]; arrays as they are."""
    if not isinstance(value, Mapping):
        return value
    return _by_layer(((_index(key, name, MAX_LAYERS), row) for key, row in value.items()), name)


def _by_layer(rows: Iterable[tuple[int, Any]], name: str) -> FloatArray:
    """Rows by number of layer, in any order -> [L, E]; what is left out is 0."""
    layers: dict[int, dict[int, float]] = {}
    for number, row in rows:
        if number in layers:
            raise TraceError(f"{name}: layer {number} occurs twice")
        _below(number, name, MAX_LAYERS)
        where = f"{name}, layer {number}"
        layers[number] = {}
        if not isinstance(row, Mapping):
            row = _numbers(row, where)
            if row.ndim != 1:
                raise TraceError(f"{where}: must be counts of its experts")
            if len(row) > MAX_EXPERTS:
                raise TraceError(f"{where}: {len(row)} experts; at most {MAX_EXPERTS} are read")
            layers[number] = dict(enumerate(row.tolist()))
            continue
        for key, count in row.items():
            expert = _index(key, where, MAX_EXPERTS)
            if expert in layers[number]:
                raise TraceError(f"{where}: expert {expert} occurs twice")
            one = _numbers(count, f"{where}, expert {expert}")
            if one.ndim:
                raise TraceError(f"{where}, expert {expert}: must be one number")
            layers[number][expert] = float(one)
    shape = (
        max(layers, default=-1) + 1,
        max((max(row, default=-1) for row in layers.values()), default=-1) + 1,
    )
    if shape[0] * shape[1] > MAX_CELLS:
        raise TraceError(f"{name}: {shape[0]} layers of {shape[1]} experts; far too many")
    out = np.zeros(shape)
    for number, counts in layers.items():
        out[number, list(counts)] = list(counts.values())
    return out


def _is_number(key: Any) -> bool:
    text = str(key)
    return text.isascii() and text.isdecimal() and len(text) < 20


def _index(key: Any, name: str, most: int) -> int:
    """A key that is a number of a layer or expert."""
    if not _is_number(key):
        raise TraceError(f"{name}: key {str(key)[:40]!r}; must be a number, 0..{most - 1}")
    return _below(int(key), name, most)


def _below(number: int, name: str, most: int) -> int:
    if not 0 <= number < most:
        raise TraceError(f"{name}: number {number}; valid are 0..{most - 1}")
    return number


def _to_logical(name: str, counts: NDArray[Any], slots: NDArray[Any]) -> FloatArray:
    """Counts on physical slots [.., L, P] -> on logical experts [.., L, E]. slots: the map [L, P],
    or one of each step [S, L, P]."""
    if slots.ndim == 3 and len(slots) == 1:
        slots = slots[0]
    fits = counts.ndim in (2, 3) and slots.dtype.kind in "iu"
    if not fits or slots.shape not in (counts.shape, counts.shape[-2:]):
        raise TraceError(
            f"{name} {list(counts.shape)} and its map {slots.dtype} {list(slots.shape)} do not go "
            "together; the map must be integers [layers, slots], or such of each step"
        )
    width = slots.shape[-1]
    wrong = slots[(slots < -1) | (slots >= width)]
    if wrong.size:  # each expert has a slot: there cannot be more of them
        raise TraceError(
            f"{name}: its map names expert {wrong.flat[0]}; valid are 0..{width - 1}, of {width} "
            "slots, and -1 (empty)"
        )
    table = np.broadcast_to(slots, counts.shape).reshape(-1, width)
    flat = counts.reshape(-1, width)
    out = np.zeros((len(flat), int(slots.max(initial=-1)) + 1))
    row, slot = np.nonzero(table >= 0)
    np.add.at(out, (row, table[row, slot]), flat[row, slot])
    return out.reshape(*counts.shape[:-1], -1)


def _numbers(value: Any, name: str) -> NDArray[Any]:
    """An array of numbers of any kind of value that may hold some."""
    try:
        array = np.asarray(_plain(value))
    except ValueError as error:
        raise TraceError(f"{name}: rows of unequal length") from error
    if array.dtype.kind not in "iufb":
        raise TraceError(f"{name}: {array.dtype}; must be numbers")
    return array


def _plain(value: Any) -> Any:
    """Tensors, or lists of them, as arrays; of any layout and type."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        if value.is_quantized:
            value = value.dequantize()
        value = value.to_dense()
        return value.double().numpy() if value.is_floating_point() else value.numpy()
    if isinstance(value, list | tuple) and any(hasattr(x, "detach") for x in value):
        return [_plain(x) for x in value]
    return value


def _arrays(held: Mapping[Any, Any]) -> list[str]:
    """Names of those that may be loads."""
    return sorted(str(key) for key, x in held.items() if key not in MAPS and _is_loads(x))


def _is_loads(value: Any) -> bool:
    shape = getattr(value, "shape", None)
    kind = getattr(getattr(value, "dtype", None), "kind", "f")
    return shape is not None and len(shape) in (2, 3) and kind in "iuf"
