"""Which jobs this user has started: one small file each in a state folder, removed at its end.

    $XDG_STATE_HOME/moeserve/jobs/ID.json     else ~/.local/state/moeserve/jobs
    $XDG_STATE_HOME/moeserve/jobs/ID/         stages of a job that has no folder of its own

A launcher that was killed leaves its file behind: whoever reads next sees that no such process
lives (its number and the moment of its start) and removes it. Knows files and processes; nothing of
what a job does.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from launch.cluster import stages
from moeserve.terminal import say

LOCAL, HOSTS, SLURM = "local", "hosts", "slurm"
FOLDERS = Path("moeserve-jobs")  # where folders of jobs are made when none is named
JOB_FILE = "job.json"  # the same record in a folder of the job's own
# Secrets among the flags, and the variables from which `moeserve serve` takes them as well.
KEYS = {"--api-key": "MOESERVE_API_KEY", "--admin-key": "MOESERVE_ADMIN_KEY"}
_SAME_START = 1.0  # seconds by which two readings of one process's start may differ


@dataclass(frozen=True)
class JobRecord:
    """id: Slurm's number, or KIND-PID. pid: of the launcher on `host`; 0 for Slurm's jobs.
    folder: where ranks write their stages. started, pid_started: seconds since 1970."""

    id: str
    kind: str
    folder: str
    nodes: int
    num_ranks: int
    command: tuple[str, ...]
    host: str
    pid: int
    pid_started: float
    started: float
    drain_seconds: float = 30.0
    restarts: int = 0  # how often all ranks may start again after one died

    @classmethod
    def parse(cls, text: str) -> JobRecord:
        """ValueError for anything else."""
        try:
            values = json.loads(text)
            return cls(**{**values, "command": tuple(values["command"])})
        except (TypeError, KeyError) as error:
            raise ValueError(f"no record of a job: {error}") from None

    def text(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    @property
    def here(self) -> bool:
        return self.host == socket.gethostname()

    @property
    def launcher(self) -> psutil.Process | None:
        """The process that started it, if that lives on this host."""
        if not self.pid or not self.here:
            return None
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self.pid)
            if abs(process.create_time() - self.pid_started) < _SAME_START:
                return process if process.status() != psutil.STATUS_ZOMBIE else None
        return None

    @property
    def stale(self) -> bool:
        """True when it is known to have ended. Slurm's are Slurm's to know, other hosts' theirs."""
        return bool(self.pid) and self.here and self.launcher is None


def record_of_this_process(
    kind: str,
    folder: Path | None,
    nodes: int,
    num_ranks: int,
    command: Sequence[str],
    drain_seconds: float = 30.0,
    restarts: int = 0,
) -> JobRecord:
    """folder None: one in the state folder, named by the id."""
    me, job = psutil.Process(), f"{kind}-{os.getpid()}"
    return JobRecord(
        id=job,
        kind=kind,
        folder=str(folder or jobs_folder(os.environ) / job),
        nodes=nodes,
        num_ranks=num_ranks,
        command=tuple(without_keys(command)),
        host=socket.gethostname(),
        pid=me.pid,
        pid_started=me.create_time(),
        started=time.time(),
        drain_seconds=drain_seconds,
        restarts=restarts,
    )


def without_keys(words: Sequence[str]) -> list[str]:
    """The words as others may read them."""
    shown, hide = [], False
    for word in words:
        head, equals, _ = word.partition("=")
        secret = head in KEYS
        shown.append("..." if hide else f"{head}=..." if secret and equals else word)
        hide = secret and not equals
    return shown


def keys_apart(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The words without keys, and the variables that say the same: what a command line of ranks
    holds, everybody on their machines can read."""
    left, keys, name = [], {}, ""
    for word in words:
        head, equals, value = word.partition("=")
        if name:
            keys[name], name = word, ""
        elif head in KEYS and equals:
            keys[KEYS[head]] = value
        elif head in KEYS:
            name = KEYS[head]
        else:
            left.append(word)
    return left, keys


def jobs_folder(environ: Mapping[str, str]) -> Path:
    state = environ.get("XDG_STATE_HOME") or Path(environ.get("HOME") or "~").expanduser() / (
        ".local/state"
    )
    return Path(state) / "moeserve" / "jobs"


class Registry:
    """All records of this user that this machine can see."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def of_user(cls) -> Registry:
        return cls(jobs_folder(os.environ))

    def add(self, record: JobRecord) -> bool:
        """False, and said once, where it cannot be written: the job runs all the same."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if Path(record.folder).parent == self.folder:
                Path(record.folder).mkdir(exist_ok=True)
            draft = self.folder / f".{record.id}.{os.getpid()}"
            draft.write_text(record.text())
            draft.rename(self.folder / f"{record.id}.json")
            return True
        except OSError as error:
            say(f"{self.folder}: {error.strerror}; `moeserve status` will not know this job")
            return False

    def remove(self, record: JobRecord) -> None:
        with contextlib.suppress(OSError):
            (self.folder / f"{record.id}.json").unlink()
        if Path(record.folder).parent == self.folder:
            shutil.rmtree(record.folder, ignore_errors=True)

    def find(self, job: str) -> JobRecord | None:
        return next((r for r in self.all() if r.id == job), None)

    def all(self) -> list[JobRecord]:
        """Oldest first; those that have ended are removed."""
        found = []
        for path in sorted(self.folder.glob("*.json")):
            try:
                record = JobRecord.parse(path.read_text())
            except (OSError, ValueError):
                continue  # it has just been removed, or is none of ours
            if record.stale:
                self.remove(record)
            else:
                found.append(record)
        return sorted(found, key=lambda r: r.started)


def enter(record: JobRecord) -> bool:
    """Have the job known, and its ranks (this process and its children) write stages for it, if
    nobody else has asked for them."""
    known = Registry.of_user().add(record)
    if known:
        os.environ.setdefault(stages.VARIABLE, stages.pattern(Path(record.folder)))
    return known


@contextlib.contextmanager
def registered(record: JobRecord) -> Iterator[None]:
    """The same while entered."""
    known = enter(record)
    try:
        yield
    finally:
        if known:
            Registry.of_user().remove(record)
