"""ThreadBoard: process groups among threads of one process, for layouts of hundreds of ranks.

A rank's `ThreadGroup` is handed to `torch.distributed` like any other group: dispatchers and
lockstep run on it as they are. What a rank gives is copied when it is given; it goes on, and meets
the others where it waits, so two batches may be in flight. The board also checks what a real
network would not: that all ranks make the same collectives in the same order, with sizes that fit.

Knows: all_to_all_single, all_gather, all_gather_single, reduce_scatter_single (sums), and messages
from rank to rank by tag, on which emulated libraries run. Knows nothing of what is sent. For CPU
tensors; `torch.set_num_threads(1)` first, else each thread keeps a team.

Shape letters: R ranks.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dispatch.allgather import AllGatherDispatcher
from dispatch.base import DispatchConfig, DispatchError, Probe
from dispatch.collective import CollectiveDispatcher
from dispatch.words import counted, nearest
from ep.group import EPGroup


class ThreadGroupBroken(DispatchError):
    """A rank ended, or ranks differ in their collectives: every rank gets it, naming the cause."""


@dataclass(eq=False)
class _Collective:
    """One collective of all ranks; lives until the last one has taken its part."""

    kind: str
    missing: int
    untaken: int
    given: list[Any]
    complete: threading.Event = field(default_factory=threading.Event)
    rows: Tensor | None = None  # of all_to_all: what all ranks gave, one after the other
    starts: NDArray[np.int64] | None = None  # [R, R + 1], of all_to_all: where shares begin in rows

    def join(self) -> None:
        """Once for all receivers: a slice of each sender for each of them would be R * R slices."""
        parts = [part for part, _ in self.given]
        before = np.cumsum([0, *(part.shape[0] for part in parts[:-1])])
        self.rows = torch.cat(parts)
        self.starts = np.stack([starts for _, starts in self.given]) + before[:, None]


class _Work:
    """What torch.distributed calls Work: `wait` brings the result, or raises."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait

    def wait(self, timeout: timedelta | None = None) -> bool:
        """timeout is the board's: its patience."""
        self._wait()
        return True


class ThreadBoard:
    """patience: seconds that a rank waits for the others in one collective."""

    def __init__(self, size: int, patience: float = 60.0) -> None:
        self.size = size
        self._patience = patience
        self._lock = threading.Lock()
        self._open: dict[int, _Collective] = {}
        self._next = [0] * size
        self._broken: str | None = None
        self._mail: dict[tuple[int, int, int], queue.SimpleQueue[Tensor | None]] = {}

    def group(self, rank: int, ranks_per_node: int | None = None) -> EPGroup:
        """For the thread that is this rank; tokens and votes go over one sequence."""
        pg: Any = ThreadGroup(self, rank)
        return EPGroup(rank, self.size, ranks_per_node or self.size, pg, pg)

    @property
    def num_collectives(self) -> int:
        """Made so far, by the rank that made the most."""
        return max(self._next)

    def abort(self, rank: int, error: BaseException) -> None:
        """A rank ends: all that wait, or will, get ThreadGroupBroken. The first cause stays."""
        with self._lock:
            self._break(f"rank {rank} ended: {type(error).__name__}: {error}")

    def run(self, body: Callable[[int], None], stack_bytes: int | None = None) -> None:
        """body(rank) on a thread for each rank; the first error of a rank ends all and is raised.
        stack_bytes: of each thread."""
        errors: list[BaseException] = []

        def rank_main(rank: int) -> None:
            try:
                body(rank)
            except BaseException as error:
                errors.append(error)  # before the others can fail because of it
                self.abort(rank, error)

        before = threading.stack_size(stack_bytes or 0)
        try:
            threads = [
                threading.Thread(target=rank_main, args=(rank,), daemon=True)
                for rank in range(self.size)
            ]
            for thread in threads:
                thread.start()
        finally:
            threading.stack_size(before)
        try:
            for thread in threads:
                thread.join()
        except BaseException:  # Ctrl-C: no thread is left behind in a collective
            with self._lock:
                self._break("interrupted")
            for thread in threads:
                thread.join()
            raise
        if errors:
            raise errors[0]

    # -- for the groups --------------------------------------------------------------------

    def give(self, rank: int, kind: str, given: Any) -> tuple[int, _Collective]:
        """Put a rank's part on the board -> number of the collective, and itself."""
        with self._lock:
            self._stop_if_broken()
            number = self._next[rank]
            self._next[rank] += 1
            one = self._open.get(number)
            if one is None:
                one = _Collective(kind, self.size, self.size, [None] * self.size)
                self._open[number] = one
            if one.kind != kind:
                self._break(f"collective {number}: rank {rank} makes {kind}, others {one.kind}")
                self._stop_if_broken()
            one.given[rank] = given
            one.missing -= 1
            if one.missing == 0:
                if kind == "all_to_all_single":
                    one.join()
                one.complete.set()
            return number, one

    def take(self, number: int, one: _Collective) -> None:
        """Wait until all ranks gave their parts."""
        if not one.complete.wait(self._patience):
            with self._lock:
                absent = [rank for rank, part in enumerate(one.given) if part is None]
                self._break(
                    f"collective {number} ({one.kind}): no word of ranks {absent[:8]} for "
                    f"{self._patience:g} s"
                )
        if one.missing:
            self._stop_if_broken()

    def taken(self, number: int, one: _Collective) -> None:
        with self._lock:
            one.untaken -= 1
            if one.untaken == 0:
                del self._open[number]

    def mismatch(self, number: int, what: str) -> None:
        with self._lock:
            self._break(f"collective {number}: {what}")
            self._stop_if_broken()

    def mailbox(self, source: int, to: int, tag: int) -> queue.SimpleQueue[Tensor | None]:
        """Messages of this tag; None where the board is broken."""
        with self._lock:
            self._stop_if_broken()
            return self._mail.setdefault((source, to, tag), queue.SimpleQueue())

    def collect(self, source: int, to: int, tag: int) -> Tensor:
        """The next message of this tag, once it is there."""
        try:
            message = self.mailbox(source, to, tag).get(timeout=self._patience)
        except queue.Empty:
            message = None
        with self._lock:
            if message is None:
                self._break(f"rank {to}: no message {tag} of rank {source}")
                self._stop_if_broken()
            elif self._mail[source, to, tag].empty():
                del self._mail[source, to, tag]
        assert message is not None
        return message

    def _break(self, reason: str) -> None:
        if self._broken is None:
            self._broken = reason
        for box in self._mail.values():
            box.put(None)
        for one in self._open.values():
            one.complete.set()

    def _stop_if_broken(self) -> None:
        if self._broken is not None:
            raise ThreadGroupBroken(f"thread group: {self._broken}")


class ThreadGroup:
    """One rank's end of a board. Methods are those by which torch.distributed reaches a group."""

    def __init__(self, board: ThreadBoard, rank: int) -> None:
        self._board = board
        self._rank = rank

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._board.size

    def send(self, tensors: list[Tensor], to: int, tag: int) -> _Work:
        self._board.mailbox(self._rank, to, tag).put(tensors[0].clone())
        return _Work(lambda: None)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> _Work:
        return _Work(lambda: _fill(tensors[0], self._board.collect(source, self._rank, tag)))

    def all_to_all_single(
        self, out: Tensor, x: Tensor, out_splits: Any, splits: Any, opts: Any = None
    ) -> _Work:
        size = self._board.size
        if not len(splits):
            splits = [x.shape[0] // size] * size
        expected = np.asarray(out_splits if len(out_splits) else [out.shape[0] // size] * size)
        starts = np.concatenate(([0], np.cumsum(splits)))
        number, one = self._board.give(self._rank, "all_to_all_single", (x.clone(), starts))

        def wait() -> None:
            self._board.take(number, one)
            assert one.starts is not None and one.rows is not None
            begin = one.starts[:, self._rank]
            counts = one.starts[:, self._rank + 1] - begin
            if (counts != expected).any():
                peer = int(np.flatnonzero(counts != expected)[0])
                self._board.mismatch(
                    number,
                    f"rank {peer} sends {counts[peer]} rows to rank {self._rank}, which expects "
                    f"{expected[peer]}",
                )
            # A row's number, plus how far its share begins beyond the rows before it.
            shift = np.repeat(begin - (np.cumsum(counts) - counts), counts)
            at = torch.from_numpy(shift + np.arange(len(shift)))
            out.copy_(one.rows.index_select(0, at))
            self._board.taken(number, one)

        return _Work(wait)

    def allgather(self, outs: Any, xs: Any, opts: Any = None) -> _Work:
        return self._gather("all_gather", xs[0], lambda given: _each(outs[0], given))

    def all_gather_single(self, out: Tensor, x: Tensor, opts: Any = None) -> _Work:
        return self._gather("all_gather_single", x, lambda given: out.copy_(torch.cat(given)))

    def reduce_scatter_single(self, out: Tensor, x: Tensor, opts: Any = None) -> _Work:
        rows = out.shape[0]
        mine = slice(self._rank * rows, (self._rank + 1) * rows)

        def add_up(given: list[Tensor]) -> None:
            out.zero_()
            for part in given:
                out.add_(part[mine])

        return self._gather("reduce_scatter_single", x, add_up)

    # Names before torch 2.13.
    alltoall_base = all_to_all_single
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single

    def _gather(self, kind: str, x: Tensor, finish: Callable[[list[Tensor]], Any]) -> _Work:
        number, one = self._board.give(self._rank, kind, x.clone())

        def wait() -> None:
            self._board.take(number, one)
            shapes = {tuple(part.shape) for part in one.given}
            if len(shapes) > 1:
                self._board.mismatch(number, f"{kind}: ranks give {sorted(shapes)}")
            finish(one.given)
            self._board.taken(number, one)

        return _Work(wait)


def _fill(out: Tensor, message: Tensor) -> None:
    out.copy_(message)


def _each(outs: list[Tensor], given: list[Tensor]) -> None:
    for out, part in zip(outs, given, strict=True):
        out.copy_(part)


class ThreadedCollective(CollectiveDispatcher):
    """`torch` over a thread group: the same but for its probe, which asks torch for the group's
    backend, and torch knows this group not by name."""

    @staticmethod
    def probe(group: EPGroup, config: DispatchConfig) -> Probe:
        return _divides(group, config)


class ThreadedAllGather(AllGatherDispatcher):
    """`allgather` over a thread group; see ThreadedCollective."""

    @staticmethod
    def probe(group: EPGroup, config: DispatchConfig) -> Probe:
        return _divides(group, config)


def _divides(group: EPGroup, config: DispatchConfig) -> Probe:
    if config.num_physical_experts % group.size:
        slots, ranks = config.num_physical_experts, counted(group.size, "rank")
        return Probe(
            False,
            f"num_physical_experts={slots} does not divide by {ranks}: "
            f"{nearest(slots, group.size)}",
        )
    return Probe(True, f"over threads, {counted(group.size, 'rank')}")
