"""The shards of a checkpoint: which tensor lies in which file at which bytes.

Knows: the safetensors container (u64 header length, JSON header, payload), the index file, memory
maps, how many payload bytes were read. Opening reads headers only and lists every fault it meets
in `problems` instead of raising. Knows nothing of what the tensors mean.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

INDEX_NAME = "model.safetensors.index.json"
_MAX_HEADER = 100 * 1024 * 1024  # the container's own limit
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies. begin, end: absolute bytes in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass
class SafetensorsIndex:
    """All tensors of a checkpoint folder by name; `read` maps their bytes.

    problems: faults of files and headers, each naming its file. unlisted: *.safetensors files that
    the index does not name and that are therefore not read. bytes_read: payload bytes handed out so
    far (`read` may be called from many threads).
    """

    directory: Path
    tensors: dict[str, StoredTensor]
    files: tuple[str, ...]
    problems: tuple[str, ...]
    unlisted: tuple[str, ...] = ()
    lost: frozenset[str] = frozenset()  # tensors whose file is not there: told once, by file
    bytes_read: int = 0
    _maps: dict[str, mmap.mmap] = field(default_factory=dict, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @classmethod
    def open(cls, directory: str | Path) -> SafetensorsIndex:
        """Read the index (if any) and every shard's header."""
        folder = Path(directory)
        problems: list[str] = []
        weight_map = _weight_map(folder, problems)
        present = sorted(p.name for p in folder.glob("*.safetensors"))
        if weight_map is None:
            files = present
            if not files and not problems:
                problems.append(f"{folder}: no *.safetensors file and no {INDEX_NAME}")
            if len(files) > 1:
                problems.append(f"{len(files)} shards ({files[0]}, ...) without {INDEX_NAME}")
        else:
            files = sorted(set(weight_map.values()))
            if not files and not problems:
                problems.append(f"{INDEX_NAME}: its weight_map is empty")
        tensors: dict[str, StoredTensor] = {}
        for name in files:
            for stored in _read_header(folder, name, problems):
                if stored.name in tensors:
                    other = tensors[stored.name].file
                    problems.append(f"tensor {stored.name} is stored twice: in {other} and {name}")
                tensors[stored.name] = stored
        for name, file in (weight_map or {}).items():
            if name not in tensors:
                if (folder / file).is_file():
                    problems.append(f"tensor {name}: the index says {file}, but it is not in there")
            elif tensors[name].file != file:
                problems.append(
                    f"tensor {name}: the index says {file}, but it is in {tensors[name].file}"
                )
        if weight_map is not None:
            for name in tensors:
                if name not in weight_map:
                    problems.append(f"tensor {name} in {tensors[name].file} is not in {INDEX_NAME}")
        unlisted = tuple(name for name in present if name not in files)
        lost = frozenset(n for n, f in (weight_map or {}).items() if not (folder / f).is_file())
        return cls(folder, tensors, tuple(files), tuple(problems), unlisted, lost)

    def read(self, name: str) -> Tensor:
        """The tensor over the mapped file: no copy is made. Keep no reference after `close`."""
        with self._lock:
            self.bytes_read += self.tensors[name].nbytes
        return self._view(name)

    def read_part(self, name: str, rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
        """Rows and columns [begin, end) of a matrix, of which alone the bytes are counted."""
        part = self._view(name)[slice(*rows), slice(*columns)]
        with self._lock:
            self.bytes_read += part.nbytes
        return part

    def peek(self, names: Iterable[str]) -> Iterator[Tensor]:
        """Copies, one by one as they lie in the files, none counted: for a look at what other ranks
        host. Only their bytes are read; through a map the system would read far ahead of each."""
        wanted = sorted((self.tensors[name] for name in names), key=lambda t: (t.file, t.begin))
        for file, stored in groupby(wanted, key=lambda t: t.file):
            with (self.directory / file).open("rb", buffering=0) as handle:
                for one in stored:
                    raw = bytearray(os.pread(handle.fileno(), one.nbytes, one.begin))
                    empty = torch.empty(0, dtype=DTYPES[one.dtype])
                    flat = torch.frombuffer(raw, dtype=empty.dtype) if raw else empty
                    yield flat.view(one.shape)

    def _view(self, name: str) -> Tensor:
        stored = self.tensors[name]
        dtype = DTYPES[stored.dtype]
        with self._lock:
            view = self._map(stored.file)
        if stored.nbytes == 0:
            return torch.empty(stored.shape, dtype=dtype)
        count = stored.nbytes // dtype.itemsize
        if stored.begin % dtype.itemsize:  # legal in the container, but not addressable
            raw = bytearray(view[stored.begin : stored.end])
            return torch.frombuffer(raw, dtype=dtype, count=count).view(stored.shape)
        flat = torch.frombuffer(view, dtype=dtype, count=count, offset=stored.begin)
        return flat.view(stored.shape)

    def release(self, name: str) -> None:
        """Tell the system that these mapped bytes are not needed again (keeps memory use down)."""
        stored = self.tensors[name]
        view = self._maps.get(stored.file)
        page = mmap.PAGESIZE
        begin = -(-stored.begin // page) * page
        length = stored.end // page * page - begin
        if view is not None and length > 0 and hasattr(mmap, "MADV_DONTNEED"):
            view.madvise(mmap.MADV_DONTNEED, begin, length)

    def close(self) -> None:
        """Drop the maps; those that a tensor still points into live on until it goes."""
        self._maps.clear()

    def _map(self, file: str) -> mmap.mmap:
        if file not in self._maps:
            with (self.directory / file).open("rb") as handle:
                # A private copy-on-write map: torch wants writable memory; nothing is written.
                self._maps[file] = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._maps[file]


def _weight_map(folder: Path, problems: list[str]) -> dict[str, str] | None:
    path = folder / INDEX_NAME
    if not path.exists() and not path.is_symlink():
        return None
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        pairs = {str(k): str(v) for k, v in weight_map.items()}
    except OSError as error:
        problems.append(f"{INDEX_NAME}: cannot be read ({error.strerror})")
        return {}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problems.append(f"{INDEX_NAME}: not a readable index ({error!r})")
        return {}
    for file in sorted(set(pairs.values())):
        if Path(file).name != file:
            problems.append(f"{INDEX_NAME}: {file!r} is not a file name in this folder")
        elif not (folder / file).is_file():
            count = sum(v == file for v in pairs.values())
            problems.append(f"{INDEX_NAME} points {count} tensor(s) to {file}, which is missing")
    return {k: v for k, v in pairs.items() if Path(v).name == v}


def _read_header(folder: Path, file: str, problems: list[str]) -> list[StoredTensor]:
    try:
        with (folder / file).open("rb") as handle:
            size = os.fstat(handle.fileno()).st_size
            raw = _raw_header(handle, size, file, problems)
    except OSError as error:
        if not any(file in problem for problem in problems):  # the index told of it already
            problems.append(f"{file}: cannot be read ({error.strerror})")
        return []
    if raw is None:
        return []
    base = 8 + len(raw)
    try:
        header = json.loads(raw)
        if not isinstance(header, dict):
            raise ValueError(f"a {type(header).__name__}, not an object")
        header.pop("__metadata__", None)
        parsed = [_entry(name, value, file, base) for name, value in header.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problems.append(f"{file}: corrupt header ({error!r})")
        return []
    if not parsed:
        problems.append(f"{file}: holds no tensor")
    _check_extents(parsed, file, base, size, problems)
    return parsed


def _raw_header(handle: BinaryIO, size: int, file: str, problems: list[str]) -> bytes | None:
    head = handle.read(8)
    if len(head) < 8:
        problems.append(f"{file}: truncated ({size} bytes; not even a header length)")
        return None
    (length,) = struct.unpack("<Q", head)
    if length > _MAX_HEADER:
        problems.append(f"{file}: corrupt header (length {length})")
        return None
    if 8 + length > size:
        problems.append(f"{file}: truncated inside its header ({size} of {8 + length} bytes)")
        return None
    return handle.read(length)


def _check_extents(
    parsed: list[StoredTensor], file: str, base: int, size: int, problems: list[str]
) -> None:
    """Tensors fill the file one after the other: no byte is shared, left out or missing."""
    position = base
    for tensor in sorted(parsed, key=lambda t: (t.begin, t.end)):
        if tensor.begin != position:
            problems.append(
                f"tensor {tensor.name} in {file}: begins at byte {tensor.begin - base} of the "
                f"payload; what comes before it ends at {position - base}"
            )
            break
        position = tensor.end
    end = max((t.end for t in parsed), default=base)
    if end > size:
        cut = [t.name for t in parsed if t.end > size]
        problems.append(
            f"{file}: truncated ({size} of {end} bytes); {len(cut)} tensor(s) cut, first {cut[0]}"
        )
    elif end < size:
        problems.append(f"{file}: {size - end} bytes after the last tensor")
    for tensor in parsed:
        bits = _bits(tensor.dtype)
        if bits is not None and math.prod(tensor.shape) * bits != tensor.nbytes * 8:
            problems.append(
                f"tensor {tensor.name} in {file}: {tensor.nbytes} bytes do not hold "
                f"{tensor.dtype} {list(tensor.shape)}"
            )


def _entry(name: str, value: Any, file: str, base: int) -> StoredTensor:
    begin, end = value["data_offsets"]
    shape = tuple(value["shape"])
    if not all(type(n) is int and n >= 0 for n in (begin, end, *shape)) or begin > end:
        raise ValueError(f"{name}: data_offsets {value['data_offsets']}, shape {list(shape)}")
    return StoredTensor(name, str(value["dtype"]), shape, file, base + begin, base + end)


def _bits(dtype: str) -> int | None:
    return DTYPES[dtype].itemsize * 8 if dtype in DTYPES else None
