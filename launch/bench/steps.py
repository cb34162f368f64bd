"""How far a benchmark has come: a bar on a terminal, a line every few seconds elsewhere; stderr.

Knows rich; nothing of what is measured.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from moeserve.terminal import say

LINE_SECONDS = 5.0  # between two lines where no terminal is


class StepProgress:
    """Call it with what is done where, steps done, steps in all. shown: on one rank only. stages:
    every new place is worth a line where no terminal is; else what is over in a few seconds says
    nothing there."""

    def __init__(self, shown: bool, stages: bool = False, unit: str = " steps") -> None:
        self._bars: Any = None
        self._task: Any = None
        self._lines = shown and not sys.stderr.isatty()
        self._stages, self._where, self._unit = stages, "", unit
        self._began = self._told = time.monotonic()
        if shown and not self._lines:
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeElapsedColumn,
            )

            self._bars = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=16),
                MofNCompleteColumn(),
                TextColumn(unit.strip()),
                TimeElapsedColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._bars.start()

    def __call__(self, where: str, done: int, total: int) -> None:
        if self._bars is not None:
            if self._task is None:
                self._task = self._bars.add_task(where, total=total)
            self._bars.update(self._task, description=where, completed=done, total=total)
        elif self._lines:
            now = time.monotonic()
            new = self._stages and where != self._where
            self._where = where
            if new and not done:
                self._told = now
                say(where)
            elif now - self._told > LINE_SECONDS:
                self._told = now
                say(f"{where}: {done} of {total}{self._unit}, {now - self._began:.0f} s")

    def close(self) -> None:
        if self._bars is not None:
            self._bars.stop()
