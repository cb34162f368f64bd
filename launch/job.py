"""A job on this machine: N rank processes under torch's elastic agent, watched until they end.

The same agent that `torchrun` runs, called as a library: failures come back as data, so that one
line names the rank that died first. Signals are ours, not the agent's: the first one is handed to
the ranks, which drain and end with 0; a later one kills. Knows processes; nothing of serving.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Callable, Sequence

import psutil

from launch.env import FRONT_END, SUPERVISOR, THREADS
from launch.failure import Failure, first_cause, read
from launch.front_end import python_command, python_environment
from launch.signals import StopSignals

POLL_SECONDS = 0.1  # how soon the agent sees that a rank died


def run_job(
    num_ranks: int, arguments: Sequence[str], front_end: str | None = None
) -> Failure | None:
    """Run `python -m moeserve ARGUMENTS` as every rank; block until all ended.

    None when all ended with 0, else the first cause. The survivors of a death are told to stop and
    are killed if they do not. If this process is killed, the kernel kills the ranks.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # Its warnings tell of signals that we sent and of failures that we report.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    logs = tempfile.mkdtemp(prefix="moeserve-")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        rdzv_configs={"is_host": True},
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=POLL_SECONDS,
        logs_specs=DefaultLogsSpecs(log_dir=logs),
        signals_to_handle="SIGHUP,SIGQUIT",  # SIGINT and SIGTERM are handled below
    )
    os.environ |= _rank_environment(front_end)
    command = [*python_command("moeserve"), *arguments]
    try:
        with StopSignals(drain=_to_ranks(signal.SIGTERM), now=_to_ranks(signal.SIGKILL)) as stop:
            try:
                elastic_launch(config, entrypoint=command[0])(*command[1:])
            except ChildFailedError as error:
                failures = [
                    read(r, f.exitcode, f.error_file_data) for r, f in error.failures.items()
                ]
                cause = first_cause(failures)
                # After a stop was asked for, a rank that had to be killed is what was asked for.
                return None if stop.asked.is_set() and cause.exit_code < 0 else cause
            except SignalException as error:  # the terminal is gone; the agent stopped the ranks
                return Failure(-1, 1, f"stopped by {signal.Signals(error.sigval).name}")
    finally:
        shutil.rmtree(logs, ignore_errors=True)
    return None


def _rank_environment(front_end: str | None) -> dict[str, str]:
    # The agent hands its own environment on to the ranks.
    extra = {SUPERVISOR: str(os.getpid())}
    if "OMP_NUM_THREADS" in os.environ:
        extra[THREADS] = os.environ["OMP_NUM_THREADS"]
    if front_end is not None:
        extra[FRONT_END] = front_end
    return python_environment(**extra)


def _to_ranks(number: signal.Signals) -> Callable[[], None]:
    """Send a signal to every rank process (a child of this one) that is still there."""

    def send() -> None:
        if number == signal.SIGKILL:
            print("moeserve: stopping at once", file=sys.stderr)
        for child in psutil.Process().children():
            try:
                child.send_signal(number)
            except psutil.NoSuchProcess:
                continue

    return send
