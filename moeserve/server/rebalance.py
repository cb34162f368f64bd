"""The routes /experts/placement and /experts/rebalance: where experts are, and to move them.

Knows the placement that rank 0 last told, the desk that asks it (`moeserve.rebalancing.desk`), how
wishes and answers look as JSON. Guarded by the admin key (`keys`).

Shape letters: L layers that have experts, E logical experts, P physical slots.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import FastAPI
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ep.placement import ExpertPlacement, PlacementError
from moeserve.errors import InvalidRequest, MoeserveError, NotReady
from moeserve.rebalancing.desk import RebalanceDesk
from moeserve.rebalancing.settings import planner_options
from moeserve.server.fields import AnyBody, Rules
from moeserve.server.service import Service
from moeserve.server.sse import JsonBytes

ReadBody = Callable[[Service, HttpRequest, type[Any]], Awaitable[Any]]
LayerNumbers = Callable[[Service], tuple[int, ...]]
RowsOf = Callable[[Service, str | None], slice]

REMEMBERED = 16  # results of wishes
LOOK_EVERY = 0.05  # seconds between looks at whether the server stops: nothing tells
REFUSAL_SECONDS = 2.0  # what rank 0 may take to refuse, where it seems to be busy with another


class RebalanceRefused(MoeserveError):
    """HTTP 409: one is under way, or experts of this job cannot move."""


class PlannerFields(AnyBody):
    """What the planner is to mind, this time."""

    group_policy: Literal["free", "node", "priced"] | None = None
    robust: Annotated[str | None, Field(pattern=r"^(mean|max|mean\+\d+(\.\d+)?\*std)$")] = None
    max_moved_slots: Annotated[int | None, Field(ge=1)] = None
    slack: Annotated[float | None, Field(ge=0)] = None
    policy: Literal["ours", "eplb", "contiguous"] | None = None


class RebalanceBody(AnyBody):
    """POST /experts/rebalance; may be empty."""

    dry_run: Annotated[bool, Field(description="true (plan and explain only) or false")] = False
    force: Annotated[
        bool, Field(description="true (whatever threshold, gain and tokens say) or false")
    ] = True
    wait: Annotated[bool, Field(description="true (answer at its end) or false (at once)")] = True
    options: Annotated[
        PlannerFields,
        Field(
            description="an object with group_policy (free, node, priced), robust (mean, max, "
            "mean+Z*std), max_moved_slots, slack, policy (ours, eplb, contiguous)"
        ),
    ] = PlannerFields()
    placement: Annotated[
        list[list[int]] | None,
        Field(description="[layers][slots], the expert of each slot, -1 for empty ones"),
    ] = None

    def rules(self) -> Rules:
        if self.placement is not None and self.options != PlannerFields():
            yield (
                ("placement", "options"),
                InvalidRequest("options", "...", "must be absent where a placement is given"),
            )
        if self.placement is not None and not self.force:
            yield (
                ("placement", "force"),
                InvalidRequest(
                    "force", False, "must be true or absent where a placement is given: it is taken"
                ),
            )


@dataclass
class Wish:
    """One POST and what came of it. result: running | done | nothing | abandoned | refused |
    unknown (the job ended first)."""

    number: int
    asked_at: float
    dry_run: bool
    result: str = "running"
    reason: str = ""
    seconds: float = 0.0
    explanation: dict[str, Any] = field(default_factory=dict)

    def report(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "asked_at": round(self.asked_at, 3),
            "dry_run": self.dry_run,
            "result": self.result,
            "reason": self.reason,
            "seconds": round(self.seconds, 3),
            "explanation": self.explanation,
        }


class Wishes:
    """The last wishes of operators; each is carried out even if whoever asked does not wait."""

    def __init__(self, desk: RebalanceDesk) -> None:
        self._desk = desk
        self._wishes: deque[Wish] = deque(maxlen=REMEMBERED)
        self._tasks: set[asyncio.Task[None]] = set()
        self._number = 0

    def begin(self, **asked: Any) -> tuple[Wish, asyncio.Task[None]]:
        """asked: of `RebalanceDesk.ask`."""
        self._number += 1
        wish = Wish(self._number, time.time(), bool(asked.get("dry_run")))
        self._wishes.append(wish)
        task = asyncio.create_task(self._carry_out(wish, asked))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return wish, task

    async def _carry_out(self, wish: Wish, asked: dict[str, Any]) -> None:
        start = time.monotonic()
        try:
            report = await self._desk.ask(**asked)
            wish.result, wish.reason = report.result, report.reason
            wish.explanation = dict(report.explanation)
        except NotReady as error:
            wish.result, wish.reason = "unknown", str(error)
        finally:
            wish.seconds = time.monotonic() - start

    @property
    def running(self) -> Wish | None:
        """The one that has not ended; rank 0 would refuse another."""
        return next((wish for wish in self._wishes if wish.result == "running"), None)

    def reports(self) -> list[dict[str, Any]]:
        """The last one first."""
        return [wish.report() for wish in reversed(self._wishes)]


def add_rebalance(
    app: FastAPI,
    service: Service,
    read_body: Callable[[HttpRequest, type[Any]], Awaitable[Any]],
    rows_of: RowsOf,
    layers_of: LayerNumbers,
    schema: Any,
) -> None:
    """read_body(request, kind) -> a checked body, an empty one where none was sent."""
    wishes = Wishes(service.client.rebalancing)

    @app.get("/experts/placement", summary="Which expert lives in which slot")
    async def placement(layer: str | None = None) -> Response:
        """Which slot holds which expert, now; replicas, ranks, bytes of an expert.

        layer: only this one, by the model's number."""
        service.client.check_ready()
        return JsonBytes(placement_report(service, layers_of(service), rows_of(service, layer)))

    @app.get("/experts/rebalance", summary="State of moving experts, and past moves")
    async def state() -> Response:
        """How far a rebalance is, and what came of the last wishes (the newest first)."""
        desk = service.client.rebalancing.state()
        return JsonBytes({"movable": desk is not None, "state": desk, "wishes": wishes.reports()})

    @app.post(
        "/experts/rebalance",
        summary="Move experts between ranks",
        openapi_extra=schema(RebalanceBody),
    )
    async def rebalance(request: HttpRequest) -> Response:
        """Plan on the load of the last steps and move experts; or to the placement that is given.

        Answers when that has ended (wait=false: at once, see GET). dry_run=true moves nothing."""
        service.client.check_ready()
        body: RebalanceBody = await read_body(request, RebalanceBody)
        options = body.options.model_dump(exclude_none=True)
        _check_options(service, options)
        table = b"" if body.placement is None else _table(in_use(service), body.placement)
        if (running := wishes.running) is not None:
            raise RebalanceRefused(
                f"a rebalance is under way (number {running.number}); wait until it has ended"
            )
        seen = service.client.rebalancing.state()
        wish, task = wishes.begin(
            dry_run=body.dry_run, force=body.force, options=options, table=table
        )
        if body.wait:
            await _ended(service, task)
        elif seen is not None and seen["state"] != "idle":  # it was, when rank 0 last reported
            await asyncio.wait({task}, timeout=REFUSAL_SECONDS)
        if wish.result == "refused":
            raise RebalanceRefused(wish.reason)
        if wish.result == "unknown":
            raise NotReady(wish.reason)
        return JsonBytes(wish.report(), status_code=200 if body.wait else 202)


async def _ended(service: Service, task: asyncio.Task[None]) -> None:
    """NotReady as soon as the server stops: whoever waits must not hold that up."""
    while not task.done():
        if service.client.draining:
            raise NotReady("the server is shutting down; this rebalance may not come to its end")
        await asyncio.wait({task}, timeout=LOOK_EVERY)


def _check_options(service: Service, options: dict[str, Any]) -> None:
    """InvalidRequest for what the planner would refuse whatever the loads are, together with the
    job's own settings: so that whoever does not wait hears of it too."""
    policy = options.get("policy", "ours")
    settled = {**planner_options(service.config), **options}
    if policy != "ours" and settled["max_moved_slots"] is not None:
        who = "options give" if "max_moved_slots" in options else "the job's own settings give"
        valid = f"must be ours: it alone knows max_moved_slots, which {who}"
        raise InvalidRequest("options.policy", policy, valid)
    if policy == "eplb" and settled["group_policy"] == "node" and not _eplb_can_group(service):
        valid = (
            "must be ours, or group_policy free: EPLB keeps groups on nodes only where groups "
            "divide by nodes and every expert has a group"
        )
        raise InvalidRequest("options.policy", policy, valid)


def _eplb_can_group(service: Service) -> bool:
    ready, now = service.client.fleet.ranks[0].ready, in_use(service)
    info: dict[str, Any] = {} if ready is None else ready.info
    nodes = max(1, now.num_ranks // int(info.get("ranks_per_node", 1)))
    whole = service.client.fleet.num_routed_experts() == now.num_logical_experts
    return int(info.get("expert_groups", 1)) % nodes == 0 and whole


def in_use(service: Service) -> ExpertPlacement:
    """As rank 0 last told. NotReady where this engine has none."""
    placement = service.client.fleet.placement
    if placement is None:
        raise NotReady("rank 0 has told no placement of experts")
    return placement


def _table(now: ExpertPlacement, rows: list[list[int]]) -> bytes:
    """As the wire wants it. InvalidRequest unless it is a placement of this job's shape."""
    shape = now.physical_to_logical.shape
    lengths = {len(row) for row in rows}
    if len(rows) != shape[0] or lengths != {shape[1]}:
        raise InvalidRequest(
            "placement",
            f"{len(rows)} layers of {sorted(lengths)[:4]} slots",
            f"{shape[0]} layers of {shape[1]} slots",
        )
    try:
        made = ExpertPlacement(np.array(rows, np.int64), now.num_logical_experts, now.num_ranks)
    except (PlacementError, OverflowError) as error:
        raise InvalidRequest("placement", "...", f"must be a placement: {error}") from None
    return made.physical_to_logical.astype("<i4").tobytes()


def placement_report(
    service: Service, layers: tuple[int, ...], rows: slice = slice(None)
) -> dict[str, Any]:
    """As JSON: physical_to_logical [L][P], replica_count [L][E], expert_bytes [L]."""
    placement = in_use(service)
    ready = service.client.fleet.ranks[0].ready
    info: dict[str, Any] = {} if ready is None else ready.info
    said = info.get("placement")
    said = said if isinstance(said, dict) else {}
    per_node = int(info.get("ranks_per_node", 1))
    hosts = [x.hello.host if x.hello is not None else "" for x in service.client.fleet.ranks]
    return {
        "generation": placement.generation,
        "fingerprint": placement.fingerprint,
        "layers": list(layers[rows]),
        "num_mtp_layers": int(info.get("mtp_layers", 0)),
        "num_ranks": placement.num_ranks,
        "ranks_per_node": per_node,
        "num_expert_groups": int(info.get("expert_groups", 1)),
        "num_logical_experts": placement.num_logical_experts,
        "num_routed_experts": int(said.get("num_routed_experts", placement.num_logical_experts)),
        "num_physical_experts": placement.num_physical_experts,
        "num_local_experts": placement.num_local_experts,
        "num_redundant_experts": placement.num_redundant_experts,
        "num_empty_slots": placement.num_empty_slots,
        "shared_expert": str(said.get("shared_expert", "none")),
        "picks_per_token": int(info.get("picks_per_token", 0)),
        "expert_bytes": list(info.get("expert_bytes", []))[rows],
        "ranks": [
            {
                "rank": rank,
                "node": rank // per_node,
                "host": hosts[rank],
                "first_slot": placement.slots_of(rank).start,
                "num_slots": placement.num_local_experts,
            }
            for rank in range(placement.num_ranks)
        ],
        "physical_to_logical": placement.physical_to_logical[rows].tolist(),
        "replica_count": placement.replica_count[rows].tolist(),
    }
