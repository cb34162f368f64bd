"""A job on this machine: N rank processes under torch's elastic agent, watched until they end.

The same agent that `torchrun` runs, called as a library: failures come back as data, so that one
line names the rank that died first. Signals are ours, not the agent's: the first one is handed to
the ranks, which drain and end with 0; a later one hurries them, and kills who takes too long. No
file is made: reasons come through one without a name. Knows processes; nothing of serving.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Sequence

import psutil

from launch.env import ERRORS, FRONT_END, RESTARTS, SUPERVISOR, THREADS, usable_cores
from launch.failure import Failure, first_cause, read
from launch.front_end import python_command, python_environment
from launch.signals import StopSignals, adopt_orphans
from moeserve.errors import ConfigError
from moeserve.nameless import NamelessFile
from moeserve.terminal import counted, say

HURRY_SECONDS = 2.5  # what ranks may take to end after a second signal
POLL_SECONDS = 0.1  # how soon the agent sees that a rank died
ORPHAN_SECONDS = 3.5  # what a front end without its rank 0 may take to end its streams
RANK_BYTES = 200_000_000  # private memory of a rank of the smallest model
STEADY_SECONDS, MOST_WAIT_SECONDS = 300.0, 30.0  # of `_Restarts`
RANKS_PER_CORE = 16  # more is a slip: that many would start for minutes and serve nobody


def run_job(
    num_ranks: int,
    arguments: Sequence[str],
    front_end: str | None = None,
    *,
    endless: bool = True,
    restarts: int = 0,
) -> Failure | None:
    """Run `python -m moeserve ARGUMENTS` as every rank; block until all ended.

    None when all ended with 0, else the first cause. endless: being told to stop is a good end. The
    survivors of a death are told to stop and are killed if they do not. If this process is killed,
    the kernel kills the ranks. restarts: how often all of it may start again (`_Restarts`).
    """
    _check_room(num_ranks)
    policy = _Restarts(restarts)
    adopt_orphans()
    ranks = _Ranks(num_ranks, arguments, front_end)
    with StopSignals(drain=ranks.drain, now=ranks.hurry) as stop:
        while True:
            began = time.monotonic()
            failure = ranks.run(stop, policy)
            if failure is None or stop.asked.is_set():
                break
            wait = policy.wait_after(failure, time.monotonic() - began)
            if wait is None:
                break
            if stop.asked.wait(wait):  # nothing runs any more
                failure = None
                break
    stopped = stop.asked.is_set() and failure is None and not endless
    return Failure(-1, 128 + signal.SIGINT, "stopped before it was done") if stopped else failure


class _Restarts:
    """Whether and when all ranks start again after one died: up to `most` times, after 1, 2, 4 ...
    seconds (at most MOST_WAIT; from 1 again after a job that ran for STEADY). What settings or
    files are to blame for would end the same way again."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.reasons: list[str] = []
        self._quick = 0  # failures in a row, without a steady run between them

    def wait_after(self, failure: Failure, ran: float) -> float | None:
        """Seconds, said on the terminal with the reason; None: no more."""
        if self.most == 0 or failure.exit_code == ConfigError.exit_code:
            return None
        if len(self.reasons) >= self.most:
            say(f"not started again: --max-restarts {self.most} are used up")
            return None
        self._quick = 0 if ran > STEADY_SECONDS else self._quick
        wait = min(2.0**self._quick, MOST_WAIT_SECONDS)
        self._quick += 1
        died = failure.exit_code < 0 and failure.rank >= 0
        who = f"rank {failure.rank}{' died' if died else ''}: " if failure.rank >= 0 else ""
        self.reasons.append(f"{who}{failure.reason.partition(chr(10))[0]}")
        print(failure.details, end="", file=sys.stderr)
        say(self.reasons[-1])
        say(f"restart {len(self.reasons)} of {self.most} in {wait:g} s")
        return wait

    @property
    def environment(self) -> dict[str, str]:
        state = {"count": len(self.reasons), "max": self.most, "reasons": self.reasons[-8:]}
        return {RESTARTS: json.dumps(state)} if self.most else {}


class _Ranks:
    """All ranks of one job, started once or several times one after the other."""

    def __init__(self, num_ranks: int, arguments: Sequence[str], front_end: str | None) -> None:
        self._num_ranks, self._front_end = num_ranks, front_end
        self._command = [*python_command("moeserve"), *arguments]
        self._hurry, self._ended = threading.Event(), threading.Event()

    def drain(self) -> None:
        # Asked while torch is on its way in: ranks that are not there yet would never hear of it.
        while not _children() and not self._ended.wait(POLL_SECONDS):
            pass
        _to_children(signal.SIGTERM)

    def hurry(self) -> None:
        say("stopping at once")
        self._hurry.set()
        _to_children(signal.SIGTERM)  # their second one: streams get a last word
        self._ended.wait(HURRY_SECONDS)
        _to_children(signal.SIGKILL)

    def run(self, stop: StopSignals, policy: _Restarts) -> Failure | None:
        """Until all have ended: None if that was wanted, or well done."""
        errors = NamelessFile()
        self._ended.clear()
        os.environ |= _rank_environment(self._front_end, errors) | policy.environment
        try:
            return self._watch(stop, errors)
        finally:
            self._ended.set()
            _clear(0.0 if self._hurry.is_set() else ORPHAN_SECONDS)
            errors.close()

    def _watch(self, stop: StopSignals, errors: NamelessFile) -> Failure | None:
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        # Its warnings tell of signals that we sent and of failures that we report.
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=self._num_ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            rdzv_configs={"is_host": True},
            local_addr="127.0.0.1",
            max_restarts=0,  # ours (`_Restarts`) know configuration errors, and wait
            monitor_interval=POLL_SECONDS,
            logs_specs=DefaultLogsSpecs(log_dir=os.devnull),  # its word for no folder
            signals_to_handle="SIGQUIT",  # the others are ours
        )
        try:
            elastic_launch(config, entrypoint=self._command[0])(*self._command[1:])
        except ChildFailedError as error:
            codes = {rank: f.exitcode for rank, f in error.failures.items()}
            cause = first_cause(*read(codes, errors.read()))
            # What was asked for is no failure: ranks killed, or left by their peers at a stop.
            wanted = self._hurry.is_set() or (stop.asked.is_set() and cause.secondary)
            return None if wanted else cause
        except SignalException as error:  # the agent stopped the ranks
            return Failure(-1, 1, f"stopped by {signal.Signals(error.sigval).name}")
        return None


def _check_room(num_ranks: int) -> None:
    """So many ranks that their interpreters alone do not fit, or that each would get a sliver of a
    core, would take the machine with them."""
    available, cores = psutil.virtual_memory().available, usable_cores()
    problem = f"parallel.ep={num_ranks}: this command starts all ranks on this machine, whose "
    if num_ranks * RANK_BYTES > available:
        problem += (
            f"{available / 1e9:.0f} GB of free memory are too little for more than "
            f"{max(1, available // RANK_BYTES)}"
        )
    elif num_ranks > cores * RANKS_PER_CORE:
        problem += f"{counted(cores, 'core')} can run {cores * RANKS_PER_CORE} at most"
    else:
        return
    raise ConfigError(
        [f"{problem}; to use several machines, start `torchrun ... -m moeserve` on each"]
    )


def _rank_environment(front_end: str | None, errors: NamelessFile) -> dict[str, str]:
    # The agent hands its own environment on to the ranks.
    extra = {SUPERVISOR: str(os.getpid()), ERRORS: str(errors.path)}
    if "OMP_NUM_THREADS" in os.environ:
        extra[THREADS] = os.environ["OMP_NUM_THREADS"]
    if front_end is not None:
        extra[FRONT_END] = front_end
    return python_environment(**extra)


def _to_children(number: signal.Signals) -> None:
    """Send a signal to every child of this process that is still there: the ranks."""
    for child in _children():
        with contextlib.suppress(psutil.NoSuchProcess):
            child.send_signal(number)


def _children() -> list[psutil.Process]:
    return psutil.Process().children()


def _clear(seconds: float) -> None:
    """Let the front end of a rank 0 that died say its last words; then nobody may be left."""
    left = psutil.Process().children(recursive=True)
    _, alive = psutil.wait_procs(left, timeout=seconds)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=seconds)
