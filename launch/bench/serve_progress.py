"""How far a load has come: a bar on a terminal, a line every few seconds elsewhere; on stderr.

Knows rich; nothing of HTTP.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from launch.bench.serve_drive import Tally
from launch.bench.steps import LINE_SECONDS
from moeserve.terminal import say


class LoadProgress:
    """Call it now and then. total: calls, where known; seconds: for which calls are begun."""

    def __init__(self, tally: Tally, what: str, total: int | None, seconds: float | None) -> None:
        self._tally, self._what, self._total, self._seconds = tally, what, total, seconds
        self._start = self._told = time.monotonic()
        self._bars: Any = None
        self._task: Any = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            self._bars = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[told]}"),
                TimeElapsedColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            goal = total if total is not None else seconds
            self._task = self._bars.add_task(what, total=goal, told="")
            self._bars.start()

    def __call__(self) -> None:
        now = time.monotonic()
        tally = self._tally
        passed = now - self._start
        if self._bars is not None:
            done = tally.ended if self._total is not None else passed
            self._bars.update(self._task, completed=done, told=self._words(passed))
        elif now - self._told > LINE_SECONDS:
            self._told = now
            say(f"{self._what}: {self._words(passed)}, {passed:.0f} s")

    def _words(self, passed: float) -> str:
        tally = self._tally
        of = "" if self._total is None else f" of {self._total}"
        rate = tally.tokens / passed if passed > 0 else 0.0
        failed = f", {tally.failed} FAILED" if tally.failed else ""
        flight = tally.sent - tally.ended
        return f"{tally.ended}{of} calls, {flight} in flight, {rate:.0f} tokens/s{failed}"

    def close(self) -> None:
        if self._bars is not None:
            self._bars.stop()
