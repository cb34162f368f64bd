"""Other processes of the job, as the operating system knows them: who is there, who has gone."""

from __future__ import annotations

import contextlib

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


def is_alive(process: psutil.Process) -> bool:
    """False for a zombie too."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
