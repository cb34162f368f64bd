"""A request in flight, and the stream that its outputs come back on.

Plain state of one event loop. Knows nothing of sockets or ranks' health.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from moeserve.request import FinishReason, Request, TokenOutput


@dataclass
class Flight:
    """A request on its way: where it runs and what has come back. Times are time.time()."""

    request: Request
    rank: int
    stream: OutputStream
    hashes: Sequence[int]
    load: int
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    first_token_at: float | None = None
    last_token_at: float | None = None
    finish_reason: FinishReason | None = None


class OutputStream:
    """What comes back for one or several requests sent together, in order of arrival."""

    def __init__(
        self, requests: Sequence[Request], abort: Callable[[Iterable[str], FinishReason], None]
    ) -> None:
        self._abort = abort
        self._open = {r.request_id for r in requests}
        self._pending: deque[TokenOutput] = deque()
        self._wakeup = asyncio.Event()

    def put(self, output: TokenOutput) -> None:
        self._pending.append(output)
        if output.finish_reason is not None:
            self._open.discard(output.request_id)
        self._wakeup.set()

    async def get(self) -> list[TokenOutput]:
        """All outputs that wait now, at least one; an empty list once every request has ended."""
        while not self._pending:
            if not self._open:
                return []
            self._wakeup.clear()
            await self._wakeup.wait()
        outputs = list(self._pending)
        self._pending.clear()
        return outputs

    def abort(
        self, request_id: str | None = None, reason: FinishReason = FinishReason.ABORT
    ) -> None:
        """Stop one request, or all that still run. What was sent before can still be read. reason:
        STOP where the answer is whole (a stop string was found)."""
        ids = self._open & {request_id} if request_id is not None else set(self._open)
        self._open -= ids
        self._abort(ids, reason)
        self._wakeup.set()
