"""Archives of named arrays (`.npz`) that are written whole and read with suspicion.

Knows: zip, numpy's array format, files. Knows nothing of what the arrays mean.
"""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

# What a damaged file says must not become memory: more than any archive of ours has.
_MAX_BYTES = 1 << 36


class ArchiveError(ValueError):
    """Bytes that are no archive of arrays; names the damaged member."""


def write_whole(path: Path, content: bytes) -> None:
    """Write a file under another name, then rename it: readers see the old one or all of this."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def write_arrays(arrays: dict[str, NDArray[Any]], compress: bool = True) -> bytes:
    """An archive of these arrays. compress: takes its time, where there are many counts."""
    buffer = io.BytesIO()
    write = np.savez_compressed if compress else np.savez
    write(buffer, allow_pickle=False, **arrays)
    return buffer.getvalue()


def read_arrays(content: bytes) -> dict[str, NDArray[Any]]:
    """All arrays of an archive, each checked against its sum. ArchiveError names what is wrong."""
    members: dict[str, NDArray[Any]] = {}
    try:
        archive = zipfile.ZipFile(io.BytesIO(content))
    except Exception as error:
        raise ArchiveError(f"no archive ({first_line(error)})") from error
    with archive:
        if sum(x.file_size for x in archive.infolist()) > _MAX_BYTES:
            raise ArchiveError(f"an archive larger than {_MAX_BYTES} bytes unpacked")
        for entry in archive.infolist():
            name = entry.filename.removesuffix(".npy")
            try:
                with archive.open(entry) as file:
                    data = file.read()  # checks the CRC
                stream = io.BytesIO(data)
                array = npy.read_array(stream, allow_pickle=False)
            except Exception as error:  # a damaged member raises what its bytes look like
                raise ArchiveError(f"{name}: damaged ({first_line(error)})") from error
            members[name] = array
    return members


def smallest(array: NDArray[Any]) -> NDArray[Any]:
    """The same numbers in the smallest integer type; floats as they are."""
    if array.dtype.kind not in "iu" or not array.size:
        return array
    low, high = int(array.min()), int(array.max())
    names = ("<i2", "<i4", "<i8") if low < 0 else ("<u1", "<u2", "<u4", "<i8")
    for name in names:
        kind = np.iinfo(name)
        if kind.min <= low and high <= kind.max:
            return array.astype(name)
    raise AssertionError("int64 holds every count")


def first_line(error: Exception) -> str:
    """What an error says, in one line."""
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__
