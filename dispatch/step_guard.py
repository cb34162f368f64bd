"""A step that breaks on one rank ends on all of them, and each can say why.

A rank that raises in the middle of a step leaves a verdict (who, in which step, why) in the store
by which the ranks met, and must then end its process: that closes its connections, so that the
peers' collectives fail at once. They look the verdict up and raise StepBroken with it, instead of
"Connection closed by peer". A rank that was killed left none: the first survivor on its machine to
miss its process gives it. Nothing of this costs a good step anything.

Over NCCL, and with DeepEP on GPUs, a collective does not fail when a peer ends; there the launcher
ends the job, and the verdict serves those that could still raise.

Knows: the store of a group, processes of this machine. Knows nothing of what a step does.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from torch.distributed import distributed_c10d as c10d

from dispatch.base import PeerError
from ep.group import EPGroup
from ep.peer_loss import is_lost_peer

PATIENCE = 3.0  # seconds that a survivor looks for the verdict
_GRACE = 0.3  # what the last words of a process that has ended may be on their way
_POLL = 0.02
_VERDICT = "step/verdict"
_UNREADABLE = "the last words of peers cannot be read: their store cannot be reached"


class StepBroken(PeerError):
    """Another rank is the reason. rank: which, None where that could not be found out. cause: what
    it raised; None where its process ended without a word. step: in which, if it has a number."""

    def __init__(self, rank: int | None, cause: str | None, step: int | None = None) -> None:
        self.rank, self.cause, self.step = rank, cause, step
        at = "the step" if step is None else f"step {step}"
        if rank is None:
            text = f"a peer is gone: {cause}"
        elif cause is None:
            text = f"rank {rank} is gone: its process ended without a word"
        else:
            text = f"rank {rank} broke off {at}: {cause}"
        super().__init__(text)


class StepGuard:
    """`with guard:` around a step. Whatever is raised in it on this rank is told to the peers; what
    a lost peer made this rank raise becomes StepBroken. Once: the process is to end after that.

    store: None takes the one that the group's ranks met by; a group that has none (threads, one
    rank) is guarded by nothing. No collective; making one writes one key to the store.
    """

    def __init__(self, group: EPGroup, store: Any = None) -> None:
        self._group = group
        self._store = _store_of(group) if store is None else store
        self._told = False
        if self._store is not None:
            self._space = _process_space()
            mine = json.dumps([os.getpid(), _started(os.getpid()), self._space])
            self._store.set(_process_key(group.rank), mine)

    def __enter__(self) -> StepGuard:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception):
            told = self.explain(error)
            if told is not error:
                raise told from error
        elif error is not None:
            self._tell(error, None)

    def explain(self, error: Exception, step: int | None = None) -> Exception:
        """The error itself, once peers can read of it; or, where one of them is its reason, what
        they said. step: its number, if it has one."""
        if self._store is None or self._told:
            return error
        if not is_lost_peer(error):
            self._tell(error, step)
            return error
        self._told = True
        found = _within(PATIENCE + 1, self._find_out)
        if found is None:
            told = StepBroken(None, f"{_UNREADABLE}{self._whose_store()}")
        elif not found:
            told = StepBroken(None, "which one could not be found out")
        else:
            told = StepBroken(found["rank"], found["cause"], found["step"])
        told.__cause__ = error
        return told

    # -- parts -----------------------------------------------------------------------------

    def _tell(self, error: BaseException, step: int | None) -> None:
        if self._store is None or self._told:
            return
        self._told = True
        text = str(error).strip().splitlines()
        cause = f"{type(error).__name__}: {text[0] if text else 'no message'}"
        _within(PATIENCE, lambda: self._give(self._group.rank, cause, step))

    def _give(self, rank: int, cause: str | None, step: int | None) -> dict[str, Any]:
        """The verdict, which is the first one that was given."""
        mine = json.dumps({"rank": rank, "cause": cause, "step": step})
        given: dict[str, Any] = json.loads(self._store.compare_set(_VERDICT, "", mine))
        return given

    def _find_out(self) -> dict[str, Any]:
        """The verdict, or {}. Raises what a store that cannot be reached raises."""
        rank, began, ended = self._group.rank, time.monotonic(), 0.0
        self._store.set(_lost_key(rank), "")
        while True:
            if self._store.check([_VERDICT]):
                given: dict[str, Any] = json.loads(self._store.get(_VERDICT))
                return given
            now = time.monotonic()
            gone = self._gone()
            if gone is None:
                ended = 0.0
            elif not ended:
                ended = now
            elif now - ended > _GRACE:
                return self._give(gone, None, None)
            if now - began > PATIENCE:
                return {}
            time.sleep(_POLL)

    def _gone(self) -> int | None:
        """The first rank on this machine whose process has ended and which had not lost a peer."""
        first = self._group.node * self._group.ranks_per_node
        for rank in range(first, first + self._group.ranks_per_node):
            if rank == self._group.rank or not self._store.check([_process_key(rank)]):
                continue
            pid, started, space = json.loads(self._store.get(_process_key(rank)))
            ended = space == self._space and _started(pid) != started
            if ended and not self._store.check([_lost_key(rank)]):
                return rank
        return None

    def _whose_store(self) -> str:
        """An agent of torchrun hosts the store, if it says so; else rank 0 does."""
        hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return "" if hosted or self._group.rank == 0 else " (rank 0 hosts it)"


def _store_of(group: EPGroup) -> Any:
    """The store that belongs to the CPU group; None where there is none."""
    if group.size == 1 or group.cpu_group is None:
        return None
    _, store = c10d._world.pg_map.get(group.cpu_group, (None, None))
    return store


def _process_key(rank: int) -> str:
    return f"step/process/{rank}"


def _lost_key(rank: int) -> str:
    return f"step/lost/{rank}"


def _process_space() -> str:
    """What processes must share for their numbers to mean the same ("": a system without)."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _started(pid: int) -> str:
    """When a process of this number was started, "ended" if none runs. On a system that does not
    tell the time, a process that runs has begun "once"."""
    try:
        # After the name, which stands in parentheses: state, ..., the 20th is the time of start.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "ended" if fields[0] in "ZX" else fields[19]
    except OSError:
        if Path("/proc/self/stat").exists():
            return "ended"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "ended"
    except OSError:
        pass  # it runs, and is not ours
    return "once"


def _within(seconds: float, ask: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
    """What `ask` gives, None where it raises or takes too long: a store on a machine that is off
    the network answers nothing, not even with an error."""
    results: list[dict[str, Any]] = []

    def run() -> None:
        try:
            results.append(ask())
        except RuntimeError:  # DistNetworkError and its like
            return

    thread = threading.Thread(target=run, name="last-words", daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None
