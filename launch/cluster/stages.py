"""What ranks say of themselves to whoever watches the job: lines of JSON, one file a node.

    MOESERVE_STAGES=FOLDER/node-%h.jsonl      %h: the host name

All ranks of a node append to its file (one write a line, so that lines stay whole); a watcher on
any machine that sees the folder reads all of them. Nodes share no file: appends of two machines to
one file of a network file system get lost. Knows files and stages; nothing of who reads.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from moeserve.terminal import say

VARIABLE = "MOESERVE_STAGES"
# In this order. SERVING is said by rank 0 alone: all ranks are ready, and the text is the URL.
STARTING, RENDEZVOUS, WEIGHTS, CACHE, WARMUP, READY, SERVING = (
    "starting",
    "rendezvous",
    "weights",
    "cache",
    "warmup",
    "ready",
    "serving",
)
STAGES = (STARTING, RENDEZVOUS, WEIGHTS, CACHE, WARMUP, READY, SERVING)
FAILED, ENDED, VERDICT = "failed", "ended", "verdict"  # VERDICT: `rank` was named as the first
EVERY = 0.5  # seconds between two lines of one stage, at least


@dataclass(frozen=True)
class Record:
    """One line. done, total: bytes (0: unknown). text: the URL of SERVING, the reason of FAILED.
    when: seconds since 1970 by the clock of that host."""

    rank: int
    host: str
    stage: str
    when: float
    done: int = 0
    total: int = 0
    text: str = ""
    code: int = 0

    @classmethod
    def parse(cls, line: str) -> Record | None:
        """None for what is no whole line of ours."""
        try:
            values = json.loads(line)
            return cls(**values)
        except (ValueError, TypeError):
            return None


def pattern(folder: Path) -> str:
    """The variable's value for a folder that all nodes share."""
    return str(folder / "node-%h.jsonl")


def write_failure(folder: Path, rank: int, host: str, reason: str, code: int) -> None:
    """A watcher's word on why a job failed, for those who ask later: a rank that was killed has
    left none. Not written where the folder cannot be."""
    record = Record(rank, host, FAILED, time.time(), text=reason, code=code)
    with contextlib.suppress(OSError), (folder / "node-watcher.jsonl").open("a") as file:
        file.write(_line(record))


def _line(record: Record) -> str:
    return json.dumps({k: v for k, v in asdict(record).items() if v or k == "rank"}) + "\n"


class StageFile:
    """A rank's hand on the file of its node. Without the variable nothing is written."""

    def __init__(self, environ: Mapping[str, str], rank: int) -> None:
        name = environ.get(VARIABLE, "")
        self._host, self._rank = socket.gethostname(), rank
        self._path = Path(name.replace("%h", self._host)) if name else None
        self._last, self._told = "", 0.0
        self._wrote = False

    def tell(
        self, stage: str, done: int = 0, total: int = 0, text: str = "", code: int = 0
    ) -> None:
        """Append a line; within a stage not more often than every half second, but for its end."""
        now = time.time()
        again = stage == self._last and not text
        if self._path is None or (again and done < total and now - self._told < EVERY):
            return
        if again and done == total == 0:
            return
        self._last, self._told = stage, now
        self._append(Record(self._rank, self._host, stage, now, done, total, text, code))

    def name_first(self, rank: int) -> None:
        """The front end's word on which rank died first."""
        self._append(Record(rank, self._host, VERDICT, time.time()))

    def _append(self, record: Record) -> None:
        if self._path is None:
            return
        line = _line(record)
        try:
            file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                os.write(file, line.encode())
                self._wrote = True
            finally:
                os.close(file)
        except OSError as error:  # serving is worth more than being watched
            # Where lines could be written before, rank 0 has taken the folder away: the job ends.
            if not (self._wrote and isinstance(error, FileNotFoundError)):
                name = f"{VARIABLE}={self._path}"
                say(f"{name}: {error.strerror}; nobody will see how this rank starts")
            self._path = None
