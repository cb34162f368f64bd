"""How far a benchmark has come: a bar on a terminal, a line for each new place elsewhere; stderr.

Knows rich; nothing of what is measured.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from moeserve.terminal import say

LINE_SECONDS = 5.0  # between two lines where no terminal is


class StepProgress:
    """Call it with a place in words, steps done, steps in all. shown: on one rank only."""

    def __init__(self, shown: bool) -> None:
        self._bars: Any = None
        self._task: Any = None
        self._lines = shown and not sys.stderr.isatty()
        self._where, self._told = "", 0.0
        if shown and not self._lines:
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
            )

            self._bars = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("steps"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._bars.start()

    def __call__(self, where: str, done: int, total: int) -> None:
        if self._bars is not None:
            if self._task is None:
                self._task = self._bars.add_task(where, total=total)
            self._bars.update(self._task, description=where, completed=done, total=total)
        elif self._lines and where != self._where:
            now = time.monotonic()
            self._where = where
            if now - self._told > LINE_SECONDS:
                self._told = now
                say(f"{where}: step {done} of {total}")

    def close(self) -> None:
        if self._bars is not None:
            self._bars.stop()
