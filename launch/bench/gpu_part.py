"""What a part of `scripts/gpu_check.py` comes to, and how one ends that was interrupted.

Plain data. Only Python's own library is used here.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Part:
    """result: passed, failed, measured, measured in part, walked, not run. lines: for the table.
    held: for the JSON file. said: by tests that ended badly."""

    name: str
    result: str = "not run"
    seconds: float = 0.0
    lines: list[str] = field(default_factory=list)
    held: Any = None
    said: list[str] = field(default_factory=list)


class Interrupted(Exception):
    """With what the part has so far, and how it ends."""

    def __init__(self, part: Part, error: KeyboardInterrupt) -> None:
        super().__init__(part.name)
        part.result = "failed"
        part.lines.insert(0, "interrupted")
        self.part, self.code = part, code_of(error)


def code_of(error: KeyboardInterrupt) -> int:
    """Of a process that a signal ended, as shells have it."""
    return 128 + (int(error.args[0]) if error.args else signal.SIGINT)
