"""What the server says of itself: /health, /v1/experts, /debug/state, /v1/models, as plain data."""

from __future__ import annotations

import time
from typing import Any

from moeserve.server.service import Service

_NOW = ("kernel_choices", "graphs")  # of a rank's info, what it tells again and again


def health(service: Service) -> dict[str, Any]:
    """live: the job can still serve, now or once loaded. ready: it takes requests now."""
    client, fleet = service.client, service.client.fleet
    now = time.monotonic()
    stalled = fleet.stalled(now, client.lockstep_timeout)
    if (failing := client.failing) is not None:
        status, reason = "failed", failing
    elif client.draining:
        status, reason = "draining", f"shutting down; {client.num_in_flight} requests still run"
    elif not fleet.all_ready:
        status, reason = "loading", _progress(service)
    elif stalled is not None:
        rank, age = stalled
        status = "stalled"
        reason = f"no step has ended on rank {rank} for {age:.0f} s (lockstep_timeout)"
    else:
        status, reason = "ready", ""
    return {
        "status": status,
        "live": status not in ("failed", "stalled"),
        "ready": status == "ready",
        "reason": reason,
        "model": service.model_name,
        "uptime_seconds": round(time.time() - service.started, 1),
        "requests_in_flight": client.num_in_flight,
        "shared_expert_replicas": fleet.shared_replicas(),
        "compute": fleet.compute(),
        "dispatch": fleet.dispatch(),
        "rebalance": client.rebalancing.state(),
        "speculation": fleet.speculation(),
        "launch": fleet.launch(),
        "ranks": [x.report() for x in fleet.ranks],
    }


def _progress(service: Service) -> str:
    ranks = service.client.fleet.ranks
    ready = sum(x.ready is not None for x in ranks)
    done = sum(x.done_bytes for x in ranks)
    total = sum(x.total_bytes for x in ranks)
    text = f"loading: {ready} of {len(ranks)} ranks are ready"
    return f"{text}, {done / 1e6:.0f} of {total / 1e6:.0f} MB read" if total else text


def experts(service: Service) -> dict[str, Any]:
    """Tokens routed to each logical expert since start, per MoE layer, and the balance of ranks.

    Where the shared expert lies in slots, its pieces are the logical experts from
    num_routed_experts on; max_over_mean is of the routed ones. Row r of totals is layer
    first_moe_layer + r; the last num_mtp_layers rows are MTP layers, all zero while nothing drafts
    with them.
    """
    fleet = service.client.fleet
    totals = fleet.expert_totals()
    routed = totals[:, : fleet.num_routed_experts()]
    stats = [x.stats for x in fleet.ranks if x.stats is not None]
    ready = fleet.ranks[0].ready
    info = ready.info if ready is not None else {}
    return {
        "num_layers": totals.shape[0],
        "first_moe_layer": info.get("first_moe_layer", 0),
        "num_mtp_layers": info.get("mtp_layers", 0),
        "num_logical_experts": totals.shape[1],
        "num_routed_experts": routed.shape[1],
        "totals": totals.tolist(),
        "max_over_mean": [float(r.max() / r.mean()) if r.sum() else 0.0 for r in routed],
        "placement_generation": max((x.placement_generation for x in stats), default=0),
        "ranks": [{"rank": x.rank, "balance": x.rank_balance} for x in stats],
    }


def state(service: Service) -> dict[str, Any]:
    """Everything known of the ranks; for people, not for programs."""
    client, fleet = service.client, service.client.fleet
    ranks = []
    for rank in fleet.ranks:
        view = rank.report() | {"load_tokens": client.loads()[rank.rank]}
        if rank.ready is not None:
            view |= {
                "block_size": rank.ready.block_size,
                "num_blocks": rank.ready.num_blocks,
                "max_model_len": rank.ready.max_model_len,
                "info": rank.ready.info,
            }
        if rank.stats is not None:
            s = rank.stats
            view["stats"] = {
                name: getattr(s, name)
                for name in s.__struct_fields__
                if name not in ("expert_load", *_NOW)
            }
            if rank.ready is not None:
                live = {name: getattr(s, name) for name in _NOW if name in rank.ready.info}
                view["info"] = rank.ready.info | live
        ranks.append(view)
    return {
        "requests_in_flight": client.num_in_flight,
        "requests_rejected": client.num_rejected,
        "max_queue": client.max_queue,
        "ranks": ranks,
    }


def model_card(service: Service) -> dict[str, Any]:
    card: dict[str, Any] = {
        "id": service.model_name,
        "object": "model",
        "created": int(service.started),
        "owned_by": "moeserve",
    }
    if service.client.fleet.all_ready:
        card["max_model_len"] = service.client.fleet.max_model_len()
    return card
