"""A Slurm of shell scripts, and what ranks would write: for tests of `moeserve launch slurm`."""

from __future__ import annotations

import json
import shlex
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.cluster import slurm_watch
from launch.cluster.slurm import SlurmLaunch
from launch.cluster.stages import Record

ROOT = Path(__file__).parents[1]
TINY = str(ROOT / "checkpoints" / "tiny")

# Each program keeps its calls in a file; the state of the one job is the text of another.
FAKES = {
    "sinfo": "echo 'main*|2|gpu:8'; echo 'gold|4|gpu:h100:4(S:0-1)'",
    "sbatch": "echo PENDING'|Resources|' > $HERE/state; echo '77;east'",
    "squeue": "cat $HERE/state",
    "scancel": 'case "$*" in *TERM*) echo "COMPLETED||n[0-1]" > $HERE/state;; '
    '*) echo "CANCELLED||n[0-1]" > $HERE/state;; esac',
}


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, body in FAKES.items():
            path = folder / name
            path.write_text(
                f"#!/bin/sh\nHERE={shlex.quote(str(folder))}\n"
                f'echo {name} "$*" >> $HERE/calls\n{body}\n'
            )
            path.chmod(0o755)

    def set_state(self, text: str) -> None:
        draft = self.folder / "draft"
        draft.write_text(text + "\n")
        draft.rename(self.folder / "state")

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []


def open_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Its programs are what is found, and nothing of it waits long."""
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    for name in ("SLURM_EVERY", "SLURM_EVERY_READY", "FILES_EVERY", "MORE_REASONS"):
        monkeypatch.setattr(slurm_watch, name, 0.01)
    return Cluster(programs)


def launch(tmp_path: Path, *words: str, **more: object) -> SlurmLaunch:
    asked = {
        "nodes": 2,
        "gpus_per_node": 0,
        "ranks_per_node": 2,
        "cpus_per_rank": None,
        "partition": None,
        "account": None,
        "time": None,
        "name": "moeserve",
        "extra": (),
        "output": tmp_path / "job",
        "python": None,
        "submit": True,
        "wait": None,
        "detach": False,
        "words": words or ("serve", TINY),
    }
    return SlurmLaunch(**{**asked, **more})


class Ranks:
    """What ranks would write, in steps: each waits until the watcher has asked again."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._cluster, self._folder = cluster, folder

    def say(self, rank: int, stage: str, **more: object) -> None:
        host = f"n{rank // 2}"
        record = {"rank": rank, "host": host, "stage": stage, "when": time.time(), **more}
        assert Record.parse(json.dumps(record))
        with (self._folder / f"node-{host}.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")

    def run(self) -> None:
        self._cluster.set_state("RUNNING||n[0-1]")
        for rank in range(4):
            self.say(rank, "starting")

    def serve(self) -> None:
        self.run()
        for rank in range(4):
            self.say(rank, "weights", done=10**6, total=10**6)
            self.say(rank, "ready")
        self.say(0, "serving", text="http://0.0.0.0:8000")

    def log(self, name: str, text: str) -> None:
        (self._folder / name).write_text(text)


def watched(cluster: Cluster, asked: SlurmLaunch, acts: Callable[[Ranks], None]) -> int:
    """Run it; once submitted, acts happen on a thread."""
    assert asked.output is not None
    ranks, failed = Ranks(cluster, asked.output), []

    def act() -> None:
        try:
            deadline = time.monotonic() + 20
            while sum(call.startswith("squeue") for call in cluster.calls) < 2:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            acts(ranks)
        except BaseException as error:
            failed.append(error)
            cluster.set_state("FAILED||")
            raise

    thread = threading.Thread(target=act)
    thread.start()
    code = asked.run()
    thread.join()
    assert not failed
    return code


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)
