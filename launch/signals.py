"""StopSignals: the first SIGINT, SIGTERM or SIGHUP drains, a later one stops at once. Also parent
death.

A rank spends its time inside collectives, where Python's own handlers do not run; a thread that
reads the wake-up pipe does. Knows signals and processes; nothing of what is being stopped.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

# A terminal's Ctrl-C and the launcher's signal can both reach a process: they are one wish.
SAME_WISH_SECONDS = 1.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class StopSignals:
    """While entered, `drain()` is called at the first signal and `now()` at a later one.

    Both run on a thread of their own. They may be replaced at any time (a process that loads has
    nothing to drain). Only the main thread may enter.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self, drain: Callable[[], None], now: Callable[[], None]) -> None:
        self.drain, self.now = drain, now
        self.asked = threading.Event()
        self._first = 0.0

    def __enter__(self) -> StopSignals:
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._old_fd = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        hung_up_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # nohup
        wanted = [s for s in self.SIGNALS if s != signal.SIGHUP or not hung_up_ignored]
        self._old = {s: signal.signal(s, lambda *_: None) for s in wanted}
        threading.Thread(target=self._watch, name="stop-signals", daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_fd)
        self._write.close()  # the thread reads an empty answer and ends

    def _watch(self) -> None:
        while True:
            numbers = self._read.recv(16)
            if not numbers:
                self._read.close()
                return
            if not any(n in self.SIGNALS for n in numbers):
                continue  # another handler's signal passed through the same pipe
            if not self.asked.is_set():
                self._first = time.monotonic()
                self.asked.set()
                self.drain()
            elif time.monotonic() - self._first > SAME_WISH_SECONDS:
                self.now()


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel to kill this process when the one that started it is gone (Linux only).

    parent: the expected parent; if it is gone already, this process ends here.
    """
    if sys.platform != "linux":
        return
    expected = os.getppid() if parent is None else parent
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != expected:
        os._exit(1)


def adopt_orphans() -> None:
    """Processes whose parent dies become children of this one, not of init (Linux)."""
    if sys.platform == "linux":
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
