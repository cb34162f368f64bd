"""The routes under /experts: load of each expert, and recordings of it; the others by `rebalance`.

Knows the desk that asks ranks (`moeserve.load_desk`) and how its answers look as JSON. Guarded by
the admin key (`keys`).

Shape letters: L layers that have experts, E logical experts, R ranks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import numpy as np
from fastapi import FastAPI
from numpy.typing import NDArray
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ep.load import PHASES
from ep.recording import ExpertRecording
from moeserve.collector import JobLoad
from moeserve.errors import InvalidRequest
from moeserve.load_desk import INTERVAL_STEPS, MAX_INTERVAL_STEPS, RecordingConflict
from moeserve.server.fields import AnyBody
from moeserve.server.rebalance import add_rebalance
from moeserve.server.service import Service
from moeserve.server.sse import JsonBytes

CUT_SHORT = "x-recording-cut-short"  # header: why a recording ended before it was told to

ReadBody = Callable[[Service, HttpRequest, type[Any]], Awaitable[Any]]


class StartBody(AnyBody):
    """POST /experts/recording/start; may be empty."""

    interval_steps: Annotated[
        int, Field(ge=1, le=MAX_INTERVAL_STEPS, description="steps an interval, at least 1")
    ] = INTERVAL_STEPS
    max_steps: Annotated[
        int, Field(ge=0, lt=2**62, description="end after so many steps; 0: when stopped")
    ] = 0


def add_experts(app: FastAPI, service: Service, read_body: ReadBody, schema: Any) -> None:
    """read_body(service, request, kind) -> a checked body; schema(kind): its part of OpenAPI."""
    desk = service.client.experts

    async def optional(request: HttpRequest, kind: type[Any]) -> Any:
        """A body that may be left out."""
        return await read_body(service, request, kind) if await _has_body(request) else kind()

    @app.get("/experts/load", summary="Load of experts, by layer and phase")
    async def load(layer: str | None = None) -> Response:
        """Tokens that chose each expert, since start and of the last steps, by phase.

        layer: only this one, by the model's number."""
        service.client.check_ready()
        rows = _rows(service, layer)
        return JsonBytes(load_report(service, await desk.load(), rows))

    @app.get("/experts/recording", summary="State of the recording")
    async def recording() -> Response:
        """Whether a recording runs, and how long it is."""
        return JsonBytes(desk.state())

    @app.post(
        "/experts/recording/start",
        summary="Start recording expert load",
        openapi_extra=schema(StartBody),
    )
    async def start(request: HttpRequest) -> Response:
        """Begin to record, at the next step that all ranks agree on."""
        service.client.check_ready()
        body = await optional(request, StartBody)
        desk.start(body.interval_steps, body.max_steps)
        return JsonBytes(desk.state())

    def stopping() -> bool:
        return service.client.draining and not service.client.num_in_flight

    async def stop(format: str = "npz", wait: str = "false") -> Response:
        """End the recording, or take again the one that has ended: the file as bytes, or with
        format=json what it holds in a few words.

        wait=true: not before it ends by itself, is stopped by somebody, or the server stops. Of a
        job that has failed: the intervals that were whole by then; the header
        x-recording-cut-short says why."""
        if format not in ("npz", "json"):
            raise InvalidRequest("format", format, "must be npz or json")
        if wait not in ("true", "false"):
            raise InvalidRequest("wait", wait, "must be true or false")
        number, hurried = desk.number, False
        if wait == "true":
            await desk.ended(stopping)
            hurried = desk.status == "recording"
            if desk.number != number:
                raise RecordingConflict("another recording was started since this one ended")
        recording = await desk.stop()
        if format == "json":
            return JsonBytes(desk.state() | describe(recording))
        reason = desk.cut_short or ("the server is shutting down" if hurried else None)
        # A job that has failed is gone in a second: there is no time to pack.
        content = await asyncio.to_thread(recording.to_bytes, desk.cut_short is None)
        name = f"experts-{recording.info.started_at.replace(':', '')}.npz"
        headers = {"content-disposition": f'attachment; filename="{name}"'}
        if reason is not None:
            headers[CUT_SHORT] = " ".join(reason.encode("ascii", "replace").decode().split())
        return Response(content, media_type="application/octet-stream", headers=headers)

    app.post("/experts/recording/stop", summary="Stop recording, and get it")(stop)
    app.get("/experts/recording/stop", include_in_schema=False)(stop)
    add_rebalance(app, service, optional, _rows, _layers, schema)


async def _has_body(request: HttpRequest) -> bool:
    length = request.headers.get("content-length")
    return length != "0" if length is not None else "transfer-encoding" in request.headers


def _layers(service: Service) -> tuple[int, ...]:
    """The model's number of each row. Only when all ranks are ready."""
    ready = service.client.fleet.ranks[0].ready
    assert ready is not None
    placement = ready.info.get("placement")
    num = int(placement["num_layers"]) if isinstance(placement, dict) else 0
    first = int(str(ready.info.get("first_moe_layer", 0)))
    return tuple(range(first, first + num))


def _rows(service: Service, layer: str | None) -> slice:
    if layer is None:
        return slice(None)
    layers = _layers(service)
    if not layer.isascii() or not layer.isdecimal() or len(layer) > 9 or int(layer) not in layers:
        valid = "must be absent: no layer has experts"
        if layers:
            valid = f"must be a layer that has experts: {layers[0]} to {layers[-1]}"
        raise InvalidRequest("layer", layer, valid)
    row = layers.index(int(layer))
    return slice(row, row + 1)


def load_report(service: Service, load: JobLoad, rows: slice = slice(None)) -> dict[str, Any]:
    """As JSON: counts by phase are [L][E], traffic is [R][R] (from, to)."""
    ready = service.client.fleet.ranks[0].ready
    info = ready.info if ready is not None else {}
    return {
        "layers": list(_layers(service)[rows]),
        "num_mtp_layers": info.get("mtp_layers", 0),
        "num_logical_experts": load.totals.shape[2],
        "picks_per_token": info.get("picks_per_token", 0),
        "placement_generation": load.generation,
        "tokens": dict(zip(PHASES, load.tokens.tolist(), strict=True)),
        "totals": _by_phase(load.totals[:, rows]),
        "window": {
            "steps": load.window_steps,
            "first_step": load.window_first,
            "last_step": load.window_last,
            "totals": _by_phase(load.window[:, rows]),
        },
        "traffic": load.traffic.tolist(),
    }


def describe(recording: ExpertRecording) -> dict[str, Any]:
    """A recording in a few words."""
    tokens = recording.tokens.sum(axis=0)
    missing = int(np.abs(recording.missing_picks).sum())
    return {
        "num_intervals": recording.num_intervals,
        "num_steps": int(recording.num_steps.sum()),
        "seconds": round(float(recording.seconds.sum()), 3),
        "tokens": dict(zip(PHASES, tokens.tolist(), strict=True)),
        "picks": int(recording.counts.sum()),
        "missing_picks": missing if recording.info.picks_per_token else None,
        "placements": len(recording.placements),
    }


def _by_phase(counts: NDArray[np.int64]) -> dict[str, Any]:
    return dict(zip(PHASES, counts.tolist(), strict=True))
