"""Which job is meant: by its URL, id, Slurm's number or folder, or as the only one there is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.cluster.jobs import JOB_FILE, SLURM, JobRecord, Registry
from launch.cluster.slurm_commands import JobState, SlurmError, state_of
from launch.cluster.urls import public_url
from launch.cluster.watch import NodeFiles, Progress
from moeserve.errors import ConfigError

_URL = re.compile(r"(?:https?://)?(?:[\w.-]+|\[[\da-fA-F:]+\]):\d+/?|https?://\S+")


@dataclass(frozen=True)
class Target:
    """record None: a server of which only the URL is known. state None: no job of Slurm's."""

    record: JobRecord | None
    progress: Progress
    url: str
    state: JobState | None = None
    trouble: str = ""  # why Slurm could not be asked


def all_jobs() -> list[Target]:
    """Those that run, oldest first. Slurm's jobs that have ended are forgotten."""
    registry, found = Registry.of_user(), []
    for record in registry.all():
        target = target_of(record)
        if target.state is not None and target.state.over:
            registry.remove(record)
        else:
            found.append(target)
    return found


def find(named: str | None, jobs: Sequence[Target]) -> Target:
    """The job of that name; without a name the only one. ConfigError: there is none, or several."""
    known = ", ".join(t.record.id for t in jobs if t.record is not None) or "none"
    if named is None:
        if len(jobs) == 1:
            return jobs[0]
        raise ConfigError([f"JOB: which one? jobs known here: {known}; or give a URL or a folder"])
    by_id = [t for t in jobs if t.record is not None and t.record.id == named]
    if by_id:
        return by_id[0]
    if (Path(named) / JOB_FILE).is_file():
        return target_of(_read(Path(named)))
    if _URL.fullmatch(named):
        url = (named if "://" in named else f"http://{named}").rstrip("/")
        by_url = [t for t in jobs if _same(t, url)]
        return by_url[0] if by_url else Target(None, Progress(), url)
    if named.isdecimal():
        return _of_slurm(named)
    valid = f"a URL, the folder of a job, Slurm's number, or one of those known here: {known}"
    raise ConfigError([f"JOB {named!r}: must be {valid}"])


def target_of(record: JobRecord) -> Target:
    progress = Progress()
    for said in NodeFiles(Path(record.folder)).new():
        progress.feed(said)
    state, trouble = None, ""
    if record.kind == SLURM:
        try:
            state = state_of(record.id)
        except SlurmError as error:
            trouble = str(error)
    url = public_url(progress) if progress.url or progress.last_url else ""
    return Target(record, progress, url, state, trouble)


def _of_slurm(job: str) -> Target:
    """A job that somebody else has submitted, or from another machine."""
    state = state_of(job)
    if state.state == "GONE":
        raise ConfigError([f"JOB {job}: Slurm knows no such job, or has forgotten it"])
    return Target(JobRecord(job, SLURM, "", 0, 0, (), "", 0, 0.0, 0.0), Progress(), "", state)


def _read(folder: Path) -> JobRecord:
    try:
        return JobRecord.parse((folder / JOB_FILE).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError([f"{folder / JOB_FILE}: cannot be read: {error}"]) from None


def _same(target: Target, url: str) -> bool:
    if not target.url:
        return False
    local = re.sub(r"//(localhost|0\.0\.0\.0)(?=:)", "//127.0.0.1", url)
    return url == target.url or local == target.url
