"""What a person sees while a job starts: a bar on a terminal, a line now and then elsewhere.

Knows rich and stderr. Knows nothing of weights: it is told stages and bytes.
"""

from __future__ import annotations

import sys
import time
from typing import Protocol

from moeserve.terminal import say

LINE_SECONDS = 5.0  # between two lines of a stage where no terminal is
COUNTED = ("graphs",)  # stages that count pieces, not bytes


class Progress(Protocol):
    def update(self, stage: str, done: int, total: int) -> None:
        """stage: rendezvous | weights | cache | warmup | graphs; bytes (of graphs: captured steps)
        so far and in all (0: unknown)."""
        ...

    def close(self) -> None: ...


def open_progress(shown: bool) -> Progress:
    """A bar, lines, or nothing (all ranks but the first)."""
    if not shown:
        return NoProgress()
    return BarProgress() if sys.stderr.isatty() else LineProgress()


class NoProgress:
    def update(self, stage: str, done: int, total: int) -> None:
        pass

    def close(self) -> None:
        pass


class LineProgress:
    """A line when a stage begins to count, every few seconds, and when it is complete."""

    def __init__(self) -> None:
        self._stage = ""
        self._began = self._told = 0.0
        self._complete = False

    def update(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if stage != self._stage:
            self._stage, self._began, self._told, self._complete = stage, now, now, False
        if not total or self._complete:
            return
        self._complete = done >= total
        if self._complete or now - self._told > LINE_SECONDS:
            self._told = now
            if stage in COUNTED:
                say(f"{stage}: {done} of {total}")
                return
            rate = done / max(now - self._began, 1e-3) / 1e6
            say(f"{stage}: {done / 1e6:.1f} of {total / 1e6:.1f} MB ({rate:.0f} MB/s)")

    def close(self) -> None:
        pass


class BarProgress:
    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Task,
            TaskID,
            TextColumn,
            TransferSpeedColumn,
        )
        from rich.progress import Progress as Bars
        from rich.text import Text

        class Amount(DownloadColumn):
            def render(self, task: Task) -> Text:
                if task.description in COUNTED:
                    return Text(f"{task.completed:.0f}/{task.total or 0:.0f}")
                return super().render(task)

        class Speed(TransferSpeedColumn):
            def render(self, task: Task) -> Text:
                return Text() if task.description in COUNTED else super().render(task)

        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            Amount(),
            Speed(),  # MB/s
            console=Console(stderr=True),
        )
        self._bars.start()
        self._tasks: dict[str, TaskID] = {}

    def update(self, stage: str, done: int, total: int) -> None:
        if not total:
            return  # over in a moment, and with nothing to count
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(stage, total=total)
        self._bars.update(self._tasks[stage], completed=done, total=total)

    def close(self) -> None:
        self._bars.stop()
