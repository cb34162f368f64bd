"""How far a job is and who failed first, from what its ranks wrote (`launch.cluster.stages`).

`Progress` is fed records and says the state of nodes; `NodeFiles` reads the records from a folder.
Knows nothing of Slurm, ssh or screens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from launch.cluster.stages import (
    ENDED,
    FAILED,
    SERVING,
    STAGES,
    STARTING,
    VERDICT,
    WEIGHTS,
    Record,
)
from launch.failure import LOST_PEER

_WHOSE = re.compile(r"^rank (\d+)(?=: )", re.MULTILINE)
# srun's word: "srun: error: node1: tasks 2-3: Killed"; "...: task 1: Exited with exit code 2"
_SRUN = re.compile(r"^srun: error: (?P<host>[^:\s]+): tasks? (?P<tasks>[\d,-]+): (?P<how>.+)$")
_EXITED = re.compile(r"Exited with exit code (\d+)")


@dataclass
class RankView:
    """The last that is known of one rank. began: when its present stage did."""

    rank: int
    host: str
    stage: str = STARTING
    done: int = 0
    total: int = 0
    began: float = 0.0
    seen: float = 0.0
    read_seconds: float = 0.0  # what its weights took, or take so far
    failure: Record | None = None
    ended: Record | None = None
    restarts: int = 0


@dataclass(frozen=True)
class NodeView:
    """A node is as far as the slowest of its ranks. done, total: bytes of weights of all of them;
    rate: bytes a second, while they are read and once they were."""

    host: str
    ranks: tuple[int, ...]
    stage: str
    done: int
    total: int
    rate: float


@dataclass(frozen=True)
class Cause:
    """Why a job failed: one rank's reason (rank -1: nobody's in particular)."""

    rank: int
    host: str
    reason: str
    code: int = 1


@dataclass
class Progress:
    """What the records said so far. A rank that starts again (a restart) begins anew; of the
    attempt before, the address and the first cause are kept.

    strict: of ranks that have not said that they start nothing is heard: last words of an earlier
    attempt, whose end was told."""

    strict: bool = False
    ranks: dict[int, RankView] = field(default_factory=dict)
    url: str = ""
    front_host: str = ""
    named_first: int | None = None
    started: float = 0.0
    seen: float = 0.0  # when the last record was written
    restarts: int = 0  # of the job
    last_url: str = ""
    last_cause: Cause | None = None

    def feed(self, record: Record) -> None:
        if self.strict and record.rank not in self.ranks and record.stage != STARTING:
            return
        if record.stage == VERDICT:
            self.named_first = record.rank
            return
        view = self.ranks.get(record.rank)
        if view is None or record.stage == STARTING:
            again = 0 if view is None else view.restarts + 1
            if again > self.restarts:  # the first rank of a new attempt
                self.restarts, self.last_url = again, self.url or self.last_url
                self.last_cause = self.first_cause({})
            view = RankView(record.rank, record.host, began=record.when, restarts=again)
            self.ranks[record.rank] = view
            if record.rank == 0:
                self.url, self.named_first = "", None
        self.started = min(self.started or record.when, record.when)
        view.seen = record.when
        self.seen = max(self.seen, record.when)
        if record.stage == FAILED:
            view.failure = record
        elif record.stage == ENDED:
            view.ended = record
        elif record.stage == SERVING:
            self.url, self.front_host = record.text, record.host
        elif record.stage in STAGES:
            if record.stage != view.stage:
                view.stage, view.began = record.stage, record.when
            if record.total:
                view.done, view.total = record.done, record.total
            if record.stage == WEIGHTS:
                view.read_seconds = record.when - view.began

    def nodes(self) -> list[NodeView]:
        """By their first rank."""
        by_host: dict[str, list[RankView]] = {}
        for rank in sorted(self.ranks):
            view = self.ranks[rank]
            by_host.setdefault(view.host, []).append(view)
        return [_node(host, views) for host, views in by_host.items()]

    @property
    def failing(self) -> bool:
        return self.named_first is not None or any(v.failure for v in self.ranks.values())

    @property
    def ending(self) -> bool:
        return any(v.ended for v in self.ranks.values())

    @property
    def primary(self) -> list[Record]:
        """Failures of ranks that did not merely lose a peer, earliest first."""
        found = [v.failure for v in self.ranks.values() if v.failure is not None]
        return sorted((f for f in found if f.code != LOST_PEER), key=lambda f: (f.when, f.rank))

    def first_cause(self, deaths: dict[int, str]) -> Cause | None:
        """The failure to tell. deaths: how ranks ended by the word of who had started them.

        A rank that the front end named or that was killed stands before what others made of its
        end; then the earliest reason that a rank gave. Clocks of nodes differ: among several
        reasons the order is a guess, but each of them is one.
        """
        killed = [r for r, how in deaths.items() if not _EXITED.search(how)]
        suspects = [self.named_first] if self.named_first is not None else killed[:1]
        for rank in suspects:
            view = self.ranks.get(rank)
            told = view.failure if view is not None else None
            if told is not None and told.code != LOST_PEER:
                return self._cause(told)
            if rank in deaths or rank == self.named_first:
                how = deaths.get(rank, "it left without a word")
                return Cause(rank, self.host_of(rank), f"died: {_in_words(how)}", 3)
        if self.primary:
            return self._cause(self.primary[0])
        silent = [r for r in deaths if r not in self.ranks or self.ranks[r].failure is None]
        for rank in silent:
            exited = _EXITED.search(deaths[rank])
            code = int(exited[1]) if exited else 1
            return Cause(rank, self.host_of(rank), _in_words(deaths[rank]), code)
        return None

    def host_of(self, rank: int) -> str:
        view = self.ranks.get(rank)
        return view.host if view is not None else ""

    def _cause(self, record: Record) -> Cause:
        # What all ranks agreed on names the rank in each line; a reader wants the machine too.
        alike = sum(failure.text == record.text for failure in self.primary)
        agreed = alike > 1 or bool(_WHOSE.search(record.text))
        text = _WHOSE.sub(lambda m: f"rank {m[1]} on {self.host_of(int(m[1])) or '?'}", record.text)
        return Cause(-1 if agreed else record.rank, record.host, text, record.code)


def _node(host: str, views: list[RankView]) -> NodeView:
    slowest = min(views, key=lambda v: STAGES.index(v.stage))
    done, total = sum(v.done for v in views), sum(v.total for v in views)
    seconds = max((v.read_seconds for v in views), default=0.0)
    rate = done / seconds if seconds > 0 else 0.0
    return NodeView(host, tuple(v.rank for v in views), slowest.stage, done, total, rate)


def _in_words(how: str) -> str:
    how = how.strip()
    if how == "Killed":
        return "killed by SIGKILL (out of memory?)"
    return how[:1].lower() + how[1:] if how[1:2].islower() else how


def deaths_in(log: str) -> dict[int, str]:
    """What srun said of each task that did not end with 0, in its order."""
    found: dict[int, str] = {}
    for line in log.splitlines():
        match = _SRUN.match(line.strip())
        if match is None:
            continue
        for piece in match["tasks"].split(","):
            low, _, high = piece.partition("-")
            for task in range(int(low), int(high or low) + 1):
                found.setdefault(task, match["how"])
    return found


class NodeFiles:
    """All that ranks have written into a folder; each line is read once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}

    def new(self) -> list[Record]:
        """Whole lines since the last call; a folder that is not there yet holds none."""
        records: list[Record] = []
        for path in sorted(self._folder.glob("node-*.jsonl")):
            records += self._lines(path)
        return sorted(records, key=lambda r: r.when)

    def _lines(self, path: Path) -> Iterable[Record]:
        try:
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                text = file.read()
        except OSError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self._read[path] = self._read.get(path, 0) + len(whole)
        found = (Record.parse(line) for line in whole.decode(errors="replace").splitlines())
        return [record for record in found if record is not None]
