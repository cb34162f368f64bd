"""The route /debug/trace: a window of steps of all ranks, as a file for Perfetto.

Knows the desk that asks ranks (`moeserve.tracing_desk`) and how its answers look. Guarded by the
admin key (`keys`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal

from fastapi import FastAPI
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from moeserve.server.fields import AnyBody
from moeserve.server.service import Service
from moeserve.server.sse import JsonBytes, unless_client_leaves
from moeserve.tracing_chrome import chrome_json
from moeserve.tracing_clocks import offsets
from moeserve.tracing_desk import MAX_SECONDS
from moeserve.tracing_job import JobTrace
from moeserve.wire_trace import MAX_TRACE_STEPS

CUT_SHORT = "x-trace-cut-short"  # header: why a trace is shorter than was asked for
DEFAULT_STEPS, DEFAULT_SECONDS = 32, 60.0

ReadBody = Callable[[Service, HttpRequest, type[Any]], Awaitable[Any]]


class TraceBody(AnyBody):
    """POST /debug/trace; may be empty."""

    steps: Annotated[
        int, Field(ge=1, le=MAX_TRACE_STEPS, description=f"1 to {MAX_TRACE_STEPS}")
    ] = DEFAULT_STEPS
    seconds: Annotated[
        float,
        Field(gt=0, le=MAX_SECONDS, description=f"above 0, {MAX_SECONDS:g} at most"),
    ] = DEFAULT_SECONDS
    format: Annotated[Literal["chrome", "raw"], Field(description="chrome or raw")] = "chrome"


def add_trace(app: FastAPI, service: Service, read_body: ReadBody, schema: Any) -> None:
    """read_body(service, request, kind) -> a checked body; schema(kind): its part of OpenAPI."""
    desk = service.client.traces

    def stopping() -> str | None:
        client = service.client
        return (
            "the server is shutting down" if client.draining and not client.num_in_flight else None
        )

    @app.get("/debug/trace", summary="State of the trace")
    async def state() -> Response:
        """Whether a trace is being taken, and how long it is."""
        return JsonBytes(desk.state())

    @app.post("/debug/trace", summary="Trace steps of all ranks", openapi_extra=schema(TraceBody))
    async def take(request: HttpRequest) -> Response:
        """The next steps that have tokens, of all ranks: answers when they are over. What ended it
        early, if anything did, stands in the header x-trace-cut-short. 409 while one is taken."""
        service.client.check_ready()
        has_body = request.headers.get("content-length", "0") != "0"
        chunked = "transfer-encoding" in request.headers
        body = await read_body(service, request, TraceBody) if has_body or chunked else TraceBody()
        trace = await unless_client_leaves(request, desk.take(body.steps, body.seconds, stopping))
        if trace is None:
            return Response(status_code=499)  # nobody is there to read it
        headers = {}
        if trace.cut_short is not None:
            headers[CUT_SHORT] = " ".join(
                trace.cut_short.encode("ascii", "replace").decode().split()
            )
        if body.format == "raw":
            return Response(
                trace.to_bytes(), media_type="application/octet-stream", headers=headers
            )
        content = await asyncio.to_thread(as_chrome, trace)
        return Response(content, media_type="application/json", headers=headers)

    @app.post("/debug/trace/stop", summary="End the trace")
    async def stop() -> Response:
        """End the trace that is being taken: whoever asked for it gets the steps so far."""
        desk.stop()
        return JsonBytes(desk.state())


def as_chrome(trace: JobTrace) -> str:
    """With the clocks of its ranks aligned."""
    about = {"steps": trace.num_steps, "ranks": len(trace.ranks), "cut_short": trace.cut_short}
    return chrome_json(trace, offsets(trace), about)
