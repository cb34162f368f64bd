"""What a person sees on stderr while a search runs: a line that counts on a terminal, a line now
and then elsewhere. Knows time and stderr; nothing of pools."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from moeserve.terminal import PREFIX, say

LINE_SECONDS = 2.0  # between two lines where no terminal is


def told(what: str) -> Callable[[int, int], None]:
    """To be called with pools that are done, and all of them."""
    if sys.stderr.isatty():
        return _Counting(what).update
    return _Lines(what).update


class _Counting:
    def __init__(self, what: str) -> None:
        self._what = what
        self._complete = False

    def update(self, done: int, total: int) -> None:
        if self._complete:
            return
        self._complete = done >= total
        end = "\n" if done >= total else ""
        print(f"\r{PREFIX}{self._what}: {done} of {total} pools", end=end, file=sys.stderr)
        sys.stderr.flush()


class _Lines:
    def __init__(self, what: str) -> None:
        self._what = what
        self._told = time.monotonic() - LINE_SECONDS
        self._complete = False

    def update(self, done: int, total: int) -> None:
        now = time.monotonic()
        if self._complete or (done < total and now - self._told < LINE_SECONDS):
            return
        self._told, self._complete = now, done >= total
        say(f"{self._what}: {done} of {total} pools")
