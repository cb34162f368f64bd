"""Slurm's programs, asked: sbatch, squeue, scancel, sinfo. Text in, plain data out.

Knows their options and output; nothing of moeserve.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from moeserve.errors import MoeserveError

PATIENCE = 60.0  # seconds for one of them: a controller may be busy
# Of states that end a job; those that are not here (PENDING, RUNNING, COMPLETING, ...) go on.
OVER = (
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "REVOKED",
    "TIMEOUT",
)
GONE = "GONE"  # the controller has forgotten the job
_GPU = re.compile(r"gpu:(?:[^:,()]+:)?(\d+)")


class SlurmError(MoeserveError):
    """One of Slurm's programs failed; the message is its own."""


@dataclass(frozen=True)
class JobState:
    """state: Slurm's word, or GONE. reason: why it waits or ended. nodes: as Slurm lists them."""

    state: str
    reason: str = ""
    nodes: str = ""

    @property
    def over(self) -> bool:
        return self.state == GONE or self.state in OVER

    @property
    def running(self) -> bool:
        return self.state == "RUNNING"


@dataclass(frozen=True)
class Partition:
    name: str
    nodes: int
    gpus_per_node: int  # of its best node


def available(program: str) -> bool:
    return shutil.which(program) is not None


def partitions() -> dict[str, Partition]:
    """By name; the default one under "" too."""
    found: dict[str, Partition] = {}
    for line in _run("sinfo", "-h", "-o", "%P|%D|%G").splitlines():
        title, count, gres = (line.split("|") + ["", ""])[:3]
        name = title.rstrip("*")
        gpus = sum(map(int, _GPU.findall(gres)))
        old = found.get(name, Partition(name, 0, 0))
        part = Partition(
            name, old.nodes + (int(count) if count.isdecimal() else 0), max(old.gpus_per_node, gpus)
        )
        found[name] = part
        if title.endswith("*"):
            found[""] = part
    return found


def submit(script: Path) -> str:
    """The job's number."""
    answer = _run("sbatch", "--parsable", str(script)).strip().splitlines()
    return answer[-1].split(";")[0] if answer else ""


def state_of(job: str) -> JobState:
    """SlurmError when the controller cannot be asked."""
    done = _start("squeue", "-h", "-t", "all", "-j", job, "-o", "%T|%r|%N")
    lines = done.stdout.strip().splitlines()
    if done.returncode and "Invalid job id" not in done.stderr:
        raise SlurmError(f"squeue: {_first(done.stderr)}")
    if not lines:
        return JobState(GONE)
    state, reason, nodes = (lines[0].split("|") + ["", ""])[:3]
    return JobState(state, "" if reason == "None" else reason, nodes)


def cancel(job: str, *, drain: bool = False) -> None:
    """drain: only tell the ranks to stop (SIGTERM); else end the job."""
    _run("scancel", *(("--signal=TERM",) if drain else ()), job)


def _run(*command: str) -> str:
    done = _start(*command)
    if done.returncode:
        raise SlurmError(f"{command[0]}: {_first(done.stderr) or f'exit code {done.returncode}'}")
    return done.stdout


def _start(*command: str) -> subprocess.CompletedProcess[str]:
    try:
        # A session of its own: the terminal's Ctrl-C is for us, who still need its answer.
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            start_new_session=True,
        )
    except FileNotFoundError:
        raise SlurmError(f"{command[0]}: not found; is this a machine of the cluster?") from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{command[0]}: no answer within {PATIENCE:g} s") from None


def _first(text: str) -> str:
    """Slurm's first line, without its own name."""
    line = (text.strip().splitlines() or [""])[0]
    return re.sub(r"^(sbatch|squeue|scancel|sinfo|slurm_\w+)( error|: error)?: *", "", line)
