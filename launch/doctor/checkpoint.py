"""A checkpoint on this machine: is the folder whole, and how fast can it be read.

Reads bypass the page cache where the system lets them: what is cached of a file is dropped first
(posix_fadvise), which needs no rights but has no effect on pages that others map. The kernel counts
how much then came from a disk (/proc/self/io); the check says which of the two was measured.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from launch.doctor.check import Check, fails, ok, warning
from launch.doctor.machine import read as read_text

SECTION = "checkpoint"
PROBLEMS_SHOWN = 8  # of a checkpoint of hundreds of files, all alike
MOST_BYTES = 1 << 30  # read, of all files together
BLOCK = 8 << 20
SLOW = 200e6  # bytes a second: a 700 GB checkpoint would take an hour


@dataclass(frozen=True)
class ReadRate:
    """from_disk: bytes that a disk gave for it, by the kernel's count; None: it does not say."""

    bytes: int
    seconds: float
    from_disk: int | None = None

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return self.bytes / max(self.seconds, 1e-9)

    @property
    def source(self) -> str:
        """Where it came from, in words."""
        if self.from_disk is None:
            return "from disk or page cache: the system does not say"
        share = self.from_disk / max(self.bytes, 1)
        if share > 0.9:
            return "page cache bypassed"
        return "from memory: nothing came from a disk" if share < 0.1 else f"{share:.0%} from disk"


def checkpoint_checks(folder: Path) -> Iterator[Check]:
    from moeserve.folder import folder_problems

    problems = folder_problems(folder, needs_text=True)
    if problems:
        for problem in problems:
            text = problem.partition(": ")[2] or problem
            yield fails(SECTION, "folder", str(folder), text, "mend the folder, or give another")
        return
    broken = header_problems(folder)
    for problem in broken[:PROBLEMS_SHOWN]:
        yield fails(SECTION, "files", str(folder), problem, "download the file again")
    if len(broken) > PROBLEMS_SHOWN:
        more = f"{len(broken) - PROBLEMS_SHOWN} more like these"
        yield fails(SECTION, "files", str(folder), more, "download the checkpoint again")
    if broken:
        return
    files = sorted(folder.glob("*.safetensors"))
    total = sum(file.stat().st_size for file in files)
    yield ok(SECTION, "folder", f"{len(files)} files, {total / 1e9:.2f} GB, {fingerprint(folder)}")
    yield rate_check(measure_read(files), total)


def header_problems(folder: Path) -> list[str]:
    """What a serving rank would refuse before it reads any weight: headers against the files'
    sizes and the index, by the same look at them."""
    from models.deepseek.safetensors_index import SafetensorsIndex

    index = SafetensorsIndex.open(folder)
    index.close()
    return [*index.problems]


def fingerprint(folder: Path) -> str:
    """Of config and index: what must be equal on all machines. "-" where neither can be read."""
    found = blake2b(digest_size=8)
    read = 0
    for name in ("config.json", "model.safetensors.index.json"):
        try:
            found.update((folder / name).read_bytes())
            read += 1
        except OSError:
            found.update(b"-")
    for file in sorted(folder.glob("*.safetensors")):
        found.update(f"{file.name} {file.stat().st_size}".encode())
    return found.hexdigest() if read else "-"


def measure_read(files: Sequence[Path], most: int = MOST_BYTES) -> ReadRate:
    """One reader, in order, from the beginning of each file; at most so many bytes in all."""
    done = 0
    share = max(most // max(len(files), 1), BLOCK)
    buffer = bytearray(BLOCK)
    seconds, before = 0.0, disk_bytes()
    for file in files:
        with file.open("rb", buffering=0) as opened:
            drop_cache(opened.fileno())
            left = min(share, most - done)
            start = time.perf_counter()
            while left > 0:
                count = opened.readinto(memoryview(buffer)[: min(left, BLOCK)])
                if not count:
                    break
                left -= count
                done += count
            seconds += time.perf_counter() - start
    after = disk_bytes()
    return ReadRate(done, seconds, None if before is None or after is None else after - before)


def drop_cache(descriptor: int) -> None:
    """Have the system forget what it has cached of a file, where it has such a call."""
    with contextlib.suppress(AttributeError, OSError):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def disk_bytes() -> int | None:
    """That this process has had from disks so far; None where the kernel does not count them."""
    found = re.search(r"^read_bytes: (\d+)", read_text(Path("/proc/self/io")), re.M)
    return int(found[1]) if found else None


def rate_check(found: ReadRate, total: int) -> Check:
    text = f"{found.rate / 1e6:.0f} MB/s ({found.bytes / 1e6:.0f} MB read, {found.source})"
    if found.rate < SLOW and found.bytes > 64 << 20:
        return warning(
            SECTION,
            "read rate",
            text,
            f"all {total / 1e9:.1f} GB take {total / found.rate / 60:.0f} minutes to load",
            "copy the checkpoint to a local disk, or stripe it over more servers",
        )
    return ok(SECTION, "read rate", text, f"all of it in {total / max(found.rate, 1):.1f} s")
