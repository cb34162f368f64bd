"""A child process that notices the end of its parent, by its standard input.

The parent starts it with `stdin=LIFELINE` and writes nothing; when the parent is gone, however that
came about, the kernel closes the pipe and the child reads the end of file. (The kernel's
parent-death signal is no substitute: it comes when the *thread* that started the child ends.)

Knows one pipe. Knows nothing of what the processes do.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from threading import Thread

LIFELINE = subprocess.PIPE  # the write end closes with the Popen, or with the parent


def when_parent_ends(call: Callable[[], None]) -> None:
    """In the child: call this once, on a thread of its own, when the parent is gone."""

    def wait() -> None:
        os.read(0, 1)  # nobody writes: it returns when the other end is closed
        call()

    Thread(target=wait, name="parent-watch", daemon=True).start()
