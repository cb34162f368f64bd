"""The folder that torchrun's agent makes for its ranks and leaves behind: taken away when empty.

    torchelastic_X/<run>/attempt_0/<rank>/error.json

A reason that was written stays, for torchrun's table names the file; so does a folder that the user
chose (--log-dir). Knows that layout and processes; nothing of what the files say.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import psutil

from launch.processes import is_alive

PREFIX = "torchelastic_"


class TorchrunFolder:
    """error_file: as torchrun names it to a rank; None and other people's folders: nothing to do.

    Made in a child of a rank: the agent is the rank's parent, as long as it lives."""

    def __init__(self, error_file: Path | None) -> None:
        self._attempt: Path | None = None
        self._agent: psutil.Process | None = None
        if error_file is None or len(error_file.parents) < 4:
            return
        if error_file.parents[3].name.startswith(PREFIX):
            self._attempt = error_file.parents[1]
            with contextlib.suppress(psutil.Error):
                rank = psutil.Process().parent()
                self._agent = rank.parent() if rank is not None else None

    def remove_empty(self) -> None:
        """Take away what holds no file; a rank that still has a reason to write makes its own
        again."""
        if self._attempt is None:
            return
        with contextlib.suppress(OSError):
            for rank in self._attempt.iterdir():
                with contextlib.suppress(OSError):
                    rank.rmdir()
        for folder in (self._attempt, *self._attempt.parents[:2]):
            with contextlib.suppress(OSError):
                folder.rmdir()

    def remove_if_orphaned(self) -> None:
        """Take all of it away if the agent was killed: nobody will read it."""
        if self._attempt is not None and self._agent is not None and not is_alive(self._agent):
            shutil.rmtree(self._attempt.parents[1], ignore_errors=True)
