"""What a device's memory is planned for, said before it is taken, and held afterwards.

Each kind of use is planned in bytes, then measured as what is free before and after it was taken,
so that what libraries take beside torch counts too. `exceeded` says who took more than planned.

Knows bytes. Asks no device: who opens a ledger says how free bytes are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

GIB = 1 << 30
# What allocators round up to, and what a context or a library takes by the way.
SLACK_SHARE = 0.02
SLACK_BYTES = 256 << 20


class MemoryLedger:
    """free: bytes that are free on the device now. total: all it has."""

    def __init__(self, free: Callable[[], int], total: int) -> None:
        self._free, self.total = free, total
        self.at_start = free()
        self.planned: dict[str, int] = {}
        self.taken: dict[str, int] = {}

    def plan(self, parts: Mapping[str, int]) -> None:
        """Bytes by kind; a kind that is planned again counts as told last."""
        self.planned.update(parts)

    @contextmanager
    def taking(self, kind: str) -> Iterator[None]:
        """What is taken within is of this kind."""
        before = self._free()
        yield
        self.taken[kind] = self.taken.get(kind, 0) + max(before - self._free(), 0)

    def describe(self) -> str:
        """The plan in lines, before it is carried out."""
        width = max(map(len, self.planned), default=0)
        lines = [
            f"memory plan: {sum(self.planned.values()) / GIB:.2f} GiB of {self.at_start / GIB:.2f} "
            f"free ({self.total / GIB:.2f} in all)"
        ]
        for kind, size in self.planned.items():
            if size:
                lines.append(f"  {_words(kind):<{width}}  {size / GIB:9.3f} GiB")
        return "\n".join(lines)

    def shortage(self) -> str | None:
        """Why the plan cannot be carried out; None: it can."""
        need = sum(self.planned.values())
        if need <= self.at_start:
            return None
        largest = max(self.planned, key=lambda kind: self.planned[kind])
        return (
            f"memory: the plan needs {need} bytes ({need / GIB:.2f} GiB) and {self.at_start} are "
            f"free; most is for {_words(largest)} ({self.planned[largest] / GIB:.2f} GiB)"
        )

    def exceeded(self) -> list[str]:
        """A line for each kind that took more than planned."""
        lines = []
        for kind, taken in self.taken.items():
            planned = self.planned.get(kind, 0)
            if taken > planned * (1 + SLACK_SHARE) + SLACK_BYTES:
                lines.append(
                    f"memory: {_words(kind)} took {taken} bytes ({taken / GIB:.2f} GiB), "
                    f"{planned} ({planned / GIB:.2f} GiB) were planned for it"
                )
        return lines

    def report(self) -> dict[str, dict[str, int]]:
        """For `/health`."""
        return {"planned": dict(self.planned), "taken": dict(self.taken)}


def _words(kind: str) -> str:
    return kind.replace("_", " ")
