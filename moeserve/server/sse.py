"""Writing answers: server-sent events over raw ASGI, JSON by msgspec, and the client's leaving.

Each write carries all events of a step. A client that leaves is noticed by a task that waits for
http.disconnect beside the answer. Knows nothing of what the events say.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"

Result = TypeVar("Result")
_encode = msgspec.json.Encoder().encode


def event(payload: object) -> bytes:
    return b"data: " + _encode(payload) + b"\n\n"


class JsonBytes(Response):
    """A JSON answer encoded by msgspec."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return _encode(content)


class EventStream(Response):
    """Sends what `events` yields; calls `left` at once when the client goes, and at the end.

    `left` must make `events` end soon and be harmless after it ended. cut: the last event of a
    stream that has to end while its client is still reading; None as long as it has not to.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        left: Callable[[], None],
        headers: dict[str, str] | None = None,
        cut: Callable[[], bytes | None] = lambda: None,
    ) -> None:
        super().__init__(
            status_code=200,
            headers={"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})},
        )
        if "content-length" in self.headers:
            del self.headers["content-length"]
        self._events, self._left, self._cut = events, left, cut

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = asyncio.create_task(_disconnected(receive, self._left))
        try:
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            async for chunk in self._events:
                told = self._cut() is not None  # then the events say it themselves
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                if not told and (last := self._cut()) is not None:
                    await send({"type": "http.response.body", "body": last, "more_body": True})
                    break
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            watch.cancel()
            self._left()


async def unless_client_leaves(
    request: HttpRequest, work: Coroutine[Any, Any, Result]
) -> Result | None:
    """The result, or None when the client left first; the work is then cancelled."""
    task = asyncio.ensure_future(work)
    gone = False

    def left() -> None:
        nonlocal gone
        gone = True
        task.cancel()

    watch = asyncio.create_task(_disconnected(request.receive, left))
    try:
        return await task
    except asyncio.CancelledError:
        if gone:
            return None
        raise
    finally:
        watch.cancel()
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def _disconnected(receive: Receive, left: Callable[[], None]) -> None:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            left()
            return


async def read_body(request: HttpRequest, limit: int) -> bytes | None:
    """The request's body; None when it is larger than the limit (no more than that is kept)."""
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limit:
        return None
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            return None
        parts.append(part)
    return b"".join(parts)
