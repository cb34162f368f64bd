"""RankEnv: what torchrun, srun or our launcher tells a process about its place in the job.

The environment is read here, once. RANK and WORLD_SIZE come first: where torchrun runs inside of
srun, its processes have SLURM_* of the task that torchrun is (`launch.slurm_env`), which then says
nothing of ranks. Knows variable names and their grammar; opens nothing.
"""

from __future__ import annotations

import enum
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.slurm_env import SlurmTask
from moeserve.errors import ConfigError

FRONT_END = "MOESERVE_FRONTEND"  # address of a front end that exists already
THREADS = "MOESERVE_THREADS"  # threads a rank, chosen by the launcher
ERRORS = "MOESERVE_ERRORS"  # the file in which ranks tell our launcher why they failed
SUPERVISOR = "MOESERVE_SUPERVISOR"  # pid of our launcher: it prints the failures, ranks do not
RESTARTS = "MOESERVE_RESTARTS"  # JSON, by our launcher: how often and why it has started again
# "1": the output of all nodes comes to one terminal, so that the job says a thing once, not each
# node (srun does so by itself).
ONE_TERMINAL = "MOESERVE_ONE_TERMINAL"


class Launcher(enum.Enum):
    """Who started this process as a rank, in words."""

    OURS = "moeserve"
    TORCHRUN = "torchrun"
    SLURM = "srun"
    ALONE = "nobody"


@dataclass(frozen=True)
class RankEnv:
    """rank of size, local_rank of local_size on this machine; where the store listens."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    master_addr: str
    master_port: int
    error_file: Path | None = None  # where the launcher looks for the reason of a failure
    front_end: str | None = None
    threads: int | None = None
    supervisor: int | None = None
    launcher: Launcher = Launcher.TORCHRUN
    node_name: str = ""  # as the launcher calls this node; else its host name
    agent_store: bool = False  # the store is the launcher's; else rank 0 hosts it
    one_terminal: bool = False  # what all nodes print is seen together
    local_size_given: bool = True  # else all ranks were taken to be on one machine
    restarts: Mapping[str, Any] | None = None  # RESTARTS

    @property
    def num_nodes(self) -> int:
        return max(1, self.size // self.local_size)

    @property
    def node(self) -> int:
        return self.rank // self.local_size

    @property
    def hosts_store(self) -> bool:
        return self.rank == 0 and self.size > 1 and not self.agent_store

    @property
    def here(self) -> str:
        """The name of this node."""
        return self.node_name or socket.gethostname()

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> RankEnv | None:
        """None outside of a job (no RANK, no WORLD_SIZE, no task of several); ConfigError if the
        set is broken."""
        if "RANK" not in environ and "WORLD_SIZE" not in environ:
            task = SlurmTask.read(environ)
            return None if task is None else cls._of_task(task, environ)
        problems: list[str] = []

        def number(name: str, default: int | None = None) -> int:
            text = environ.get(name)
            if text is None and default is not None:
                return default
            if text is None:
                problems.append(f"{name} is not set, but RANK or WORLD_SIZE is: use torchrun")
            elif not text.isdecimal():
                problems.append(f"{name}={text!r}: must be a number >= 0")
            else:
                return int(text)
            return 0

        rank, size = number("RANK"), number("WORLD_SIZE")
        local_rank, local_size = number("LOCAL_RANK", rank), number("LOCAL_WORLD_SIZE", size)
        port = number("MASTER_PORT", 0 if size == 1 else None)
        addr = environ.get("MASTER_ADDR", "")
        if size > 1 and "MASTER_PORT" in environ and not 0 < port < 65536 and not problems:
            given = environ["MASTER_PORT"]
            problems.append(f"MASTER_PORT={given!r}: must be a port, 1 to 65535")
        if size > 1 and not addr:
            problems.append("MASTER_ADDR is not set: use torchrun")
        if not problems:
            if size < 1 or rank >= size:
                problems.append(f"RANK={rank}: must be below WORLD_SIZE={size}")
            if local_size < 1 or local_rank >= local_size:
                problems.append(
                    f"LOCAL_RANK={local_rank}: must be below LOCAL_WORLD_SIZE={local_size}"
                )
            elif size % local_size:
                problems.append(
                    f"LOCAL_WORLD_SIZE={local_size}: every machine must run as many ranks, "
                    f"but WORLD_SIZE={size} is no multiple of it"
                )
        if problems:
            raise ConfigError(problems)
        own = {k: int(v) for k in (THREADS, SUPERVISOR) if (v := environ.get(k, "")).isdecimal()}
        ours = SUPERVISOR in own
        seen_together = (
            ours
            or size == local_size
            or environ.get(ONE_TERMINAL) == "1"
            or environ.get("SLURM_STEP_NUM_TASKS", "1") != "1"  # srun gathers what its tasks print
        )
        return cls(
            rank=rank,
            size=size,
            local_rank=local_rank,
            local_size=local_size,
            master_addr=addr,
            master_port=port,
            error_file=error_file(environ),
            front_end=environ.get(FRONT_END) or None,
            threads=own.get(THREADS),
            supervisor=own.get(SUPERVISOR),
            launcher=Launcher.OURS if ours else Launcher.TORCHRUN,
            agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            one_terminal=seen_together,
            local_size_given="LOCAL_WORLD_SIZE" in environ,
            restarts=json.loads(environ[RESTARTS]) if ours and RESTARTS in environ else None,
        )

    @classmethod
    def _of_task(cls, task: SlurmTask, environ: Mapping[str, str]) -> RankEnv:
        """MASTER_ADDR and MASTER_PORT win where a script has set them; so does OMP_NUM_THREADS,
        which srun hands on as it was."""
        port = environ.get("MASTER_PORT") or str(task.port)
        if not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError([f"MASTER_PORT={port!r}: must be a port, 1 to 65535"])
        threads = environ.get("OMP_NUM_THREADS", "")
        cpus = min(task.threads, usable_cores()) if task.threads else None
        return cls(
            rank=task.task,
            size=task.num_tasks,
            local_rank=task.local,
            local_size=task.num_local,
            master_addr=environ.get("MASTER_ADDR") or task.head,
            master_port=int(port),
            front_end=environ.get(FRONT_END) or None,
            threads=int(threads) if threads.isdecimal() else cpus,
            launcher=Launcher.SLURM,
            node_name=task.node_name,
            one_terminal=True,
        )

    @classmethod
    def alone(cls) -> RankEnv:
        """The only rank of a job of one, in this very process: OMP_NUM_THREADS is the user's."""
        threads = os.environ.get("OMP_NUM_THREADS", "")
        return cls(
            *(0, 1, 0, 1, "", 0),
            threads=int(threads) if threads.isdecimal() else None,
            launcher=Launcher.ALONE,
            one_terminal=True,
        )


def error_file(environ: Mapping[str, str]) -> Path | None:
    """Where the launcher, ours or torchrun's, looks for the reason of a failure."""
    name = environ.get(ERRORS) or environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(name) if name else None


def usable_cores() -> int:
    """Cores this process may run on: its affinity mask, bounded by a cgroup's CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores or 1, -(-int(quota) // int(period)))
    except (OSError, ValueError):
        pass  # no cgroup v2: the mask alone says it
    return max(1, cores or 1)


def threads_per_rank(configured: int | None, env: RankEnv) -> int:
    """The setting, else what the launcher was told, else cores shared by the ranks here.

    OMP_NUM_THREADS is not asked on a rank: torchrun sets it to 1 when nobody did. Our launcher
    hands a user's own value on as MOESERVE_THREADS.
    """
    return configured or env.threads or max(1, usable_cores() // env.local_size)


def use_threads(configured: int | None, env: RankEnv) -> int:
    """Set what this process computes with, before torch and the kernels look -> the number."""
    threads = threads_per_rank(configured, env)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    import torch

    torch.set_num_threads(threads)
    return threads
