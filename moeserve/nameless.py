"""NamelessFile: a file that processes of this machine share and that vanishes with its owner.

It stands in no folder, so that nothing stays behind when the owner is killed. Knows memory files
and /proc; where there are none it is an ordinary temporary file.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path


class NamelessFile:
    """`path` opens it, in any process of this user, for as long as the owner lives."""

    def __init__(self, text: str = "") -> None:
        if sys.platform == "linux":
            descriptor = os.memfd_create("moeserve")
            self._file = os.fdopen(descriptor, "w+", encoding="utf-8")
            self.path = Path(f"/proc/{os.getpid()}/fd/{descriptor}")
        else:
            self._file = tempfile.NamedTemporaryFile("w+", prefix="moeserve-")  # noqa: SIM115
            self.path = Path(self._file.name)
        self._file.write(text)
        self._file.flush()

    def read(self) -> str:
        """All that has been written, by whomever."""
        self._file.seek(0)
        return self._file.read()

    def close(self) -> None:
        self._file.close()
