"""Processes as the operating system knows them: who else of the job is there, who has gone; and the
end of this one."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import NoReturn

import psutil


def siblings() -> list[psutil.Process]:
    """The ranks that the parent of this one has started as well, itself included. Those started by
    hand, each from a shell of its own, have none."""
    me = psutil.Process()
    parent = me.parent()
    mine, found = me.cmdline(), []
    for child in parent.children() if parent is not None else []:
        with contextlib.suppress(psutil.Error):
            if child.cmdline() == mine:
                found.append(child)
    return found


def launcher_of_front_end() -> psutil.Process | None:
    """In a front end: whoever started rank 0, its parent. All ranks end with their launcher
    (`launch.signals.die_with_parent`), so that it must be asked before a rank is blamed."""
    with contextlib.suppress(psutil.Error):
        rank = psutil.Process().parent()
        return rank.parent() if rank is not None else None
    return None


def is_alive(process: psutil.Process) -> bool:
    """False for a zombie too."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def leave(code: int) -> NoReturn:
    """End this process as it stands, all that was printed delivered.

    For one that has nothing left to do: to take an interpreter with torch in it apart costs half a
    second of a core, which on a busy machine is seconds between the last word and the end.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the reader has left, or it is closed
            stream.flush()
    os._exit(code)
