"""LastWords: which rank was the first to go and why, known to all ranks, said once.

When a rank goes, all others lose it a moment later. The first cause travels over the job's store:
the rank that failed leaves it there, else who knows it (`dispatch.step_guard` of a process that
ended without a word; the front end of a connection). Then one rank of each terminal says it, with
the number of those that ended because of it, instead of each its own.

Knows the store and the terminal. Judges nothing: who is first is whoever was given first.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from torch.distributed import Store

from dispatch.step_guard import StepBroken
from launch.env import RankEnv
from moeserve.terminal import counted, say

PATIENCE = 3.0  # seconds for the cause to be known; whoever knows it has a moment's start
_STORE_SECONDS = 2.0  # a store on a machine that is off the network answers nothing
_POLL = 0.05
_CAUSE = "cause"
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Cause:
    """The rank to name. said: it has said so itself, on its own node's terminal."""

    rank: int
    node: str
    reason: str
    said: bool = False

    @property
    def who(self) -> str:
        return f"rank {self.rank} on {self.node}" if self.node else f"rank {self.rank}"


class LastWords:
    """names: of the job's nodes, once they are known (`launch.rendezvous`)."""

    def __init__(self, store: Store, env: RankEnv) -> None:
        self._store, self._env = store, env
        self.names: Sequence[str] = ()

    def node_of(self, rank: int) -> str:
        """The name of its node; "" in a job of one node."""
        env, node = self._env, rank // self._env.local_size
        if env.num_nodes == 1:
            return ""
        if self.names:
            return self.names[node]
        return env.here if node == env.node else f"node {node}"

    def give(self, rank: int, reason: str, said: bool = False) -> Cause | None:
        """Leave a cause, unless there is one -> the one that counts; None: no store."""
        mine = Cause(rank, self.node_of(rank), reason, said)
        return self._try(
            lambda: _read(self._store.compare_set(_CAUSE, "", json.dumps(asdict(mine))))
        )

    def known(self) -> Cause | None:
        """Without waiting."""
        return self._try(
            lambda: _read(self._store.get(_CAUSE)) if self._store.check([_CAUSE]) else None
        )

    def wait(self, patience: float = PATIENCE) -> Cause | None:
        deadline = time.monotonic() + patience
        while True:
            cause = self.known()
            if cause is not None or time.monotonic() > deadline:
                return cause
            time.sleep(_POLL)

    def mourn(self, error: BaseException) -> Cause | None:
        """On a rank that lost another: find the first cause; say it if no one on this terminal
        has."""
        broken = _broken(error)
        if broken is not None and broken.rank is not None:
            self.give(broken.rank, broken.cause or "its process ended without a word")
        cause = self.wait()
        if not self.first_to("mourn"):
            return cause
        if cause is None:
            say(f"a rank was lost; which one was first could not be found out{self._store_lost()}")
        elif not (cause.said and (self._env.one_terminal or self.is_here(cause))):
            say(f"{cause.who} died: {cause.reason}; {self.others()}")
        return cause

    def others(self) -> str:
        return f"{others(self._env.size)} ended because of it"

    def is_here(self, cause: Cause) -> bool:
        return cause.rank // self._env.local_size == self._env.node

    def first_to(self, what: str) -> bool:
        """True for one rank of this terminal. Where the store is gone, for the first of the node:
        that is seen by each, and only the nodes cannot agree."""
        key = what if self._env.one_terminal else f"{what}/{self._env.node}"
        number = self._try(lambda: int(self._store.add(f"said/{key}", 1)))
        if number is None:
            return self._env.local_rank == 0 and not self._env.one_terminal
        return number == 1

    def left(self) -> None:
        """This rank has read what it wanted; the one that hosts the store need not wait for it."""
        self._try(lambda: self._store.add("left", 1))

    def wait_until_left(self, seconds: float) -> None:
        """On the rank that hosts the store: let the others read it. One at least is gone."""
        deadline = time.monotonic() + seconds
        while (self._try(lambda: self._store.add("left", 0)) or 0) < self._env.size - 2:
            if time.monotonic() > deadline:
                return
            time.sleep(_POLL)

    def _store_lost(self) -> str:
        if self._try(lambda: bool(self._store.check([_CAUSE])) or True):
            return ""
        at = f"{self._env.master_addr}:{self._env.master_port}"
        return f": the job's store at {at} cannot be reached any more, nor perhaps its node"

    def _try(self, ask: Callable[[], Answer]) -> Answer | None:
        """None where the store is gone or silent."""
        answers: list[Answer] = []

        def run() -> None:
            try:
                answers.append(ask())
            except RuntimeError:
                return

        thread = threading.Thread(target=run, name="last-words", daemon=True)
        thread.start()
        thread.join(_STORE_SECONDS)
        return answers[0] if answers else None


def others(size: int) -> str:
    return counted(size - 1, "other rank")


def _read(text: Any) -> Cause:
    return Cause(**json.loads(text))


def _broken(error: BaseException | None) -> StepBroken | None:
    while error is not None:
        if isinstance(error, StepBroken):
            return error
        error = error.__cause__
    return None
