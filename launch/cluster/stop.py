"""`moeserve stop`: have a job drain and end, or end at once, whoever has started it.

The ranks' own rule does the work: the first signal drains, a second one hurries (launch.signals).
Slurm's jobs get theirs through scancel, others by their launcher, on the machine where it runs.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable

import psutil

from launch.cluster import slurm_commands as slurm
from launch.cluster.jobs import SLURM, JobRecord, Registry
from launch.cluster.targets import Target, all_jobs, find
from launch.signals import SAME_WISH_SECONDS
from moeserve.errors import ConfigError, MoeserveError
from moeserve.terminal import say

LOOK_SECONDS = 0.2
END_SECONDS = 30.0  # beyond the time for running requests
NOW_SECONDS = 45.0  # what Slurm may take to end a job that is cancelled: its KillWait and more


class NotStopped(MoeserveError):
    """The job goes on, for all that was tried."""


def stop(named: str | None, now: bool) -> int:
    """Returns when the job has ended. ConfigError: no such job; NotStopped: it lives on."""
    target = find(named, all_jobs())
    record = target.record
    if record is None:
        raise ConfigError(
            [
                f"JOB {target.url}: not one that was started from this machine by this user; "
                "stop it where it was started: moeserve status there names it"
            ]
        )
    if record.kind == SLURM:
        _stop_slurm(target, record, now)
        Registry.of_user().remove(record)
    else:
        _stop_launcher(record, now)
    say(f"{record.id}: stopped")
    return 0


def _stop_slurm(target: Target, record: JobRecord, now: bool) -> None:
    state = slurm.state_of(record.id)
    if state.over:
        raise ConfigError([f"JOB {record.id}: has ended already ({state.state.lower()})"])
    if not now and state.running:
        say(f"{record.id}: running requests may end (up to {record.drain_seconds:g} s)")
        slurm.cancel(record.id, drain=True)
        if _wait(lambda: slurm.state_of(record.id).over, record.drain_seconds + END_SECONDS):
            return
        say(f"{record.id}: still there; it is cancelled")
    slurm.cancel(record.id)
    if not _wait(lambda: slurm.state_of(record.id).over, NOW_SECONDS):
        raise NotStopped(
            f"{record.id}: was cancelled and is still there; see squeue -j {record.id}"
        )


def _stop_launcher(record: JobRecord, now: bool) -> None:
    if not record.here:
        raise ConfigError([f"JOB {record.id}: was started on {record.host}; stop it there"])
    launcher = record.launcher
    if launcher is None:
        raise ConfigError([f"JOB {record.id}: has ended already"])
    _signal(launcher)
    if now:
        # Within a second they count as one wish.
        _wait(lambda: not _lives(launcher), SAME_WISH_SECONDS * 1.2)
        _signal(launcher)
    else:
        say(f"{record.id}: running requests may end (up to {record.drain_seconds:g} s)")
    patience = END_SECONDS + (0 if now else record.drain_seconds)
    if not _wait(lambda: not _lives(launcher), patience):
        more = "" if now else "; --now ends it at once"
        raise NotStopped(f"{record.id}: process {launcher.pid} is still there{more}")


def _signal(process: psutil.Process) -> None:
    try:
        process.send_signal(signal.SIGTERM)
    except psutil.NoSuchProcess:
        pass
    except psutil.AccessDenied:
        raise NotStopped(f"process {process.pid} is another user's") from None


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _wait(done: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if done():
            return True
        time.sleep(LOOK_SECONDS)
    return done()
