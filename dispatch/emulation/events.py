"""Events and the tuning record of normal mode, as far as a CPU can have them.

Knows: work that is done when somebody waits. Knows nothing of transports. Results of an
asynchronous call are filled in when its event is waited for, not before: who reads early, reads
poison.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dispatch.emulation.errors import host_assert, python_assert

_MAX_TOP_K = 128  # what the size hints assume
_MAX_SCALES = 128
_META_BYTES = 8


Hook = Callable[[], None]


class EventHandle:
    """A point in a stream; here: work still to do before it is reached."""

    def __init__(self, work: Callable[[], None] | None = None) -> None:
        self._work = work

    def current_stream_wait(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work()


class EventOverlap:
    """An event, and what must stay alive until it is waited for."""

    def __init__(
        self, event: EventHandle | None = None, extra_tensors: tuple[Any, ...] | None = None
    ) -> None:
        self.event = event
        self.extra_tensors = extra_tensors
        self._after_wait: Callable[[], None] | None = None
        self._release = False

    def current_stream_wait(self, release_handle: bool = False) -> None:
        python_assert(self.event is not None, "the call was not asynchronous: it has no event")
        assert self.event is not None
        self.event.current_stream_wait()
        hook, self._after_wait = self._after_wait, None
        if hook is not None:
            hook()
        if release_handle:
            self.event = None

    def register_hook_after_wait(self, hook_after_wait: Callable[[], None]) -> None:
        python_assert(self._after_wait is None, "a hook is registered already")
        self._after_wait = hook_after_wait

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        self._release = release_handle
        return self

    def __enter__(self) -> Any:
        return self

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        if self.event is not None:
            self.current_stream_wait(release_handle=self._release)
        self._release = False


class Config:
    """Multiprocessors and chunk sizes of normal mode."""

    nvl_peers: int = 8  # ranks a node

    def __init__(
        self,
        num_sms: int = 20,
        num_max_nvl_chunked_send_tokens: int = 6,
        num_max_nvl_chunked_recv_tokens: int = 256,
        num_max_rdma_chunked_send_tokens: int = 6,
        num_max_rdma_chunked_recv_tokens: int = 256,
    ) -> None:
        host_assert(num_sms >= 0, f"num_sms >= 0, not {num_sms}")
        for name, send, receive in (
            ("nvl", num_max_nvl_chunked_send_tokens, num_max_nvl_chunked_recv_tokens),
            ("rdma", num_max_rdma_chunked_send_tokens, num_max_rdma_chunked_recv_tokens),
        ):
            host_assert(0 < send < receive, f"{name}: 0 < send < receive, not {send}, {receive}")
        self.num_sms = num_sms
        self.num_max_nvl_chunked_send_tokens = num_max_nvl_chunked_send_tokens
        self.num_max_nvl_chunked_recv_tokens = num_max_nvl_chunked_recv_tokens
        self.num_max_rdma_chunked_send_tokens = num_max_rdma_chunked_send_tokens
        self.num_max_rdma_chunked_recv_tokens = num_max_rdma_chunked_recv_tokens

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes for NVLink queues: for each channel and peer, chunks of rows with their picks,
        weights and scales."""
        nodes = self._nodes(num_ranks)
        queues = self.num_sms // 2 * min(num_ranks, self.nvl_peers)
        row = hidden_bytes + _META_BYTES + _MAX_TOP_K * 12 + _MAX_SCALES * 4
        size = queues * ((2 * nodes + 3) * 4 + self.num_max_nvl_chunked_recv_tokens * row)
        return -(-size // 128) * 128

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes for queues between nodes; none are needed on one node."""
        nodes = self._nodes(num_ranks)
        if nodes == 1:
            return 0
        row = hidden_bytes + _META_BYTES + _MAX_TOP_K * 12 + _MAX_SCALES * 4 + 16
        queues = self.num_sms // 2 * nodes
        size = queues * (
            (self.nvl_peers * 2 + 2) * 8 + 2 * self.num_max_rdma_chunked_recv_tokens * row
        )
        return -(-size // 128) * 128

    def _nodes(self, num_ranks: int) -> int:
        host_assert(
            num_ranks < self.nvl_peers or num_ranks % self.nvl_peers == 0,
            f"num_ranks below {self.nvl_peers} or a multiple of it, not {num_ranks}",
        )
        return max(num_ranks // self.nvl_peers, 1)


def begin_after(previous: EventOverlap | None, asynchronous: bool, on_comm_stream: bool) -> None:
    if on_comm_stream:
        host_assert(
            previous is not None and asynchronous,
            "allocate_on_comm_stream needs previous_event and async_finish",
        )
    if previous is not None and previous.event is not None:
        previous.event.current_stream_wait()


def check_async(asynchronous: bool, hook: bool) -> None:
    host_assert(not (asynchronous and hook), "async_finish and return_recv_hook exclude each other")


def finish(asynchronous: bool, receive: Hook) -> EventOverlap:
    if asynchronous:
        return EventOverlap(EventHandle(receive))
    receive()
    return EventOverlap(None)


def lazily(receive: Hook, asynchronous: bool, hook: bool) -> tuple[EventOverlap, Hook | None]:
    """The event, and the hook where one was asked for. A hook is called once."""
    if not hook:
        return finish(asynchronous, receive), None
    pending = [receive]

    def once() -> None:
        host_assert(pending, "a hook is called once")
        pending.pop()()

    return EventOverlap(None), once
