"""SharedBuffer: the one `Buffer` of DeepEP that a rank may have, for normal and low-latency mode.

Two of them in one process crash, and low-latency kernels count by what lies in the buffer: after
normal mode it must be cleaned. So the dispatchers of both phases hold a lease of one buffer, and
who takes its turn after another says so:

    shared = SharedBuffer.open(group, normal=for_prefill, low_latency=for_decode)
    prefill = NormalDispatcher.open(group, for_prefill, buffer=shared)
    decode = LowLatencyDispatcher.open(group, for_decode, buffer=shared)
    ...                                # layers of either, in any order, the same on every rank
    prefill.close(), decode.close()    # the last one destroys it

Whoever has a class and a configuration for each phase, of whatever backends, asks `shared_hooks`
and `shared_plan`. A dispatcher without `buffer=` opens one for itself, and then must be the only
one. Knows: who uses the buffer, which layers are in flight. Knows nothing of how rows travel.
"""

from __future__ import annotations

import enum
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from dispatch import deepep
from dispatch.base import BufferPlan, DispatchConfig, DispatchError
from dispatch.deepep_plan import BufferNeed, ll_need, normal_need
from dispatch.handles import HandleState, TokenHandle
from ep.group import EPGroup

_LEAST_QUEUE_PAIRS = 24  # the library's own; normal mode between nodes needs one a channel


class Mode(enum.Enum):
    NORMAL = "normal"
    LOW_LATENCY = "low latency"


class _Alone:
    """A communicator of one rank, for a process that has no process group."""

    def Get_rank(self) -> int:
        return 0

    def Get_size(self) -> int:
        return 1

    def allgather(self, value: Any) -> list[Any]:
        return [value]


@dataclass(eq=False)
class Lease:
    """A dispatcher's part of the buffer. flights: its layers, which the dispatcher adds.
    layout: (M, hidden, experts) by which low-latency kernels lay out the buffer."""

    shared: SharedBuffer
    mode: Mode
    layout: tuple[int, int, int]
    flights: weakref.WeakSet[TokenHandle] = field(default_factory=weakref.WeakSet)
    closed: bool = False

    @property
    def buffer(self) -> Any:
        """The library's."""
        return self.shared.buffer

    @property
    def in_flight(self) -> list[TokenHandle]:
        return [f for f in self.flights if f.state is not HandleState.SPENT]

    def take_turn(self) -> None:
        """Before a dispatch. Collective where another lease was the last to use the buffer and this
        one is low latency: all ranks clean it together."""
        self.shared.turn_of(self)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.shared.give_back()


class SharedBuffer:
    """need: what all that will use it need. enable_shrink: ranks may be masked. Collective."""

    def __init__(
        self, group: EPGroup, need: BufferNeed, *, library: Any, enable_shrink: bool = False
    ) -> None:
        self.need, self.enable_shrink = need, enable_shrink
        low_latency = need.max_tokens > 0
        with _queue_depth(need):
            self.buffer = library.Buffer(
                group=group.cpu_group,
                num_nvl_bytes=need.nvl,
                num_rdma_bytes=need.rdma,
                low_latency_mode=low_latency,
                num_qps_per_rank=_queue_pairs(need),
                explicitly_destroy=True,
                enable_shrink=enable_shrink,
                comm=_Alone() if group.cpu_group is None else None,
            )
        # No lease is held by it: it is held by them, and a cycle would keep peers waiting for the
        # connections of a rank that has let go of everything.
        self._users = 0
        self._last: weakref.ref[Lease] | None = None
        self._destroyed = False

    @classmethod
    def open(
        cls,
        group: EPGroup,
        *,
        normal: DispatchConfig | None = None,
        low_latency: DispatchConfig | None = None,
        emulate: bool = False,
        enable_shrink: bool = False,
    ) -> SharedBuffer:
        """For dispatchers of these configurations. emulate: as the dispatchers' own. Collective;
        probe the dispatchers first."""
        library = deepep.load(emulate)
        need = BufferNeed()
        if normal is not None:
            need |= normal_need(library, group, normal)
        if low_latency is not None:
            need |= ll_need(group, low_latency)
        return cls(group, need, library=library, enable_shrink=enable_shrink)

    def lease(self, mode: Mode, need: BufferNeed, layout: tuple[int, int, int]) -> Lease:
        """DispatchError if the buffer is gone or was made for less."""
        if self._destroyed:
            raise DispatchError("buffer: it is closed; a new SharedBuffer must be opened")
        if need | self.need != self.need:
            raise DispatchError(
                f"buffer: made for {self.need}, {mode.value} needs {need}; open it with the "
                "configurations of all dispatchers that use it"
            )
        lease = Lease(self, mode, layout)
        self._users += 1
        return lease

    def turn_of(self, lease: Lease) -> None:
        if self._last is None:  # a new buffer is clean
            self._last = weakref.ref(lease)
            return
        last = self._last()
        if last is lease:
            return
        if last is not None and not last.closed and (held := last.in_flight):
            raise DispatchError(
                f"dispatch_start: {len(held)} layers of {last.mode.value} mode are in flight on "
                f"the same buffer; they must come home before {lease.mode.value} mode begins"
            )
        if lease.mode is Mode.LOW_LATENCY:
            self.buffer.clean_low_latency_buffer(*lease.layout)
        self._last = weakref.ref(lease)

    def give_back(self) -> None:
        self._users -= 1
        self.close()

    def close(self) -> None:
        """Destroy it unless a dispatcher still has a lease; by itself once the last has gone."""
        if not self._users and not self._destroyed:
            self._destroyed = True
            self.buffer.destroy()


def shared_hooks(
    group: EPGroup, parts: Sequence[tuple[Any, DispatchConfig]], enable_shrink: bool = False
) -> dict[str, Any]:
    """parts: class and configuration of the dispatcher of each phase -> hooks for the constructor
    of each: {"buffer": ...} where all are of this library, and {} elsewhere. Collective."""
    if not _all_share(parts):
        return {}
    need = _joined(group, parts)
    library = parts[0][0].library()
    return {"buffer": SharedBuffer(group, need, library=library, enable_shrink=enable_shrink)}


def shared_plan(group: EPGroup, parts: Sequence[tuple[Any, DispatchConfig]]) -> BufferPlan | None:
    """Bytes that these take together, of which one at a time is at work; None where they do not
    share a buffer and each has its own plan."""
    if not _all_share(parts):
        return None
    passing = max(kind.plan(group, config).passing for kind, config in parts)
    return BufferPlan(_joined(group, parts).size, passing)


def _all_share(parts: Sequence[tuple[Any, DispatchConfig]]) -> bool:
    if len(parts) < 2 or not all(hasattr(kind, "buffer_need") for kind, _ in parts):
        return False
    return len({kind.emulate for kind, _ in parts}) == 1


def _joined(group: EPGroup, parts: Sequence[tuple[Any, DispatchConfig]]) -> BufferNeed:
    need = BufferNeed()
    for kind, config in parts:
        need |= kind.buffer_need(group, config)
    return need


@contextmanager
def _queue_depth(need: BufferNeed) -> Iterator[None]:
    """Where the user has set no depth: one that suffices, while the library starts. It writes its
    own into the environment, which must not pass for the user's with whoever asks later."""
    given = os.environ.get(deepep.QP_DEPTH)
    depth = deepep.ll_depth_of_tokens(need.max_tokens)
    if given is None and depth > deepep.DEFAULT_QP_DEPTH:
        os.environ[deepep.QP_DEPTH] = str(depth)
    try:
        yield
    finally:
        if given is None:
            os.environ.pop(deepep.QP_DEPTH, None)


def _queue_pairs(need: BufferNeed) -> int:
    """Low-latency mode alone wants one for each local expert, to the number."""
    only_low_latency = need.max_tokens > 0 and need.nvl == 0
    return need.queue_pairs if only_low_latency else max(need.queue_pairs, _LEAST_QUEUE_PAIRS)
