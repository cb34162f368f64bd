"""The part of /metrics about single layers, ranks and the hottest experts.

Series stay few whatever the model: 3 a layer, 1 a rank, 3 for each of TOP places; never a layer's
experts one by one (those are in /experts/load as JSON). A place is a label, its layer and expert
are values: which experts are hot changes, and each new label would be a series for ever.

Shape letters: L layers that have experts, E logical experts, R ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ep.load import load_of_ranks
from moeserve.fleet import Fleet

TOP = 10


def num_series(num_layers: int, num_ranks: int) -> int:
    """The most that `expert_series` gives."""
    return 3 * num_layers + num_ranks + 3 * TOP


def expert_series(fleet: Fleet) -> Iterator[Metric]:
    """Of the last minute or so (`Fleet.recent_expert_load`); nothing before ranks have reported."""
    totals, recent = fleet.expert_totals(), fleet.recent_expert_load()
    if not totals.size:
        return
    names = _layer_names(fleet, len(totals))
    picks = CounterMetricFamily(
        "moeserve_expert_layer_picks",
        "Experts chosen by tokens, all experts of the layer, since start",
        labels=["layer"],
    )
    for name, count in zip(names, totals.sum(axis=1).tolist(), strict=True):
        picks.add_metric([name], count)
    yield picks
    heat = _heat(recent, fleet.num_routed_experts())
    hottest = GaugeMetricFamily(
        "moeserve_expert_layer_hottest_ratio",
        "Load of the layer's hottest routed expert over the mean one, lately; 0 without load",
        labels=["layer"],
    )
    for name, row in zip(names, heat, strict=True):
        hottest.add_metric([name], float(row.max(initial=0.0)))
    yield hottest
    yield from _of_ranks(fleet, recent, names)
    yield from _of_places(heat, names)


def _layer_names(fleet: Fleet, num: int) -> list[str]:
    """The model's numbers."""
    ready = fleet.ranks[0].ready
    first = int(str(ready.info.get("first_moe_layer", 0))) if ready is not None else 0
    return [str(first + row) for row in range(num)]


def _heat(recent: NDArray[np.int64], routed: int) -> NDArray[np.float64]:
    """[L, E]: load over the mean of the layer's routed experts; 0 in idle layers."""
    loads = recent[:, :routed].astype(np.float64)
    mean = loads.mean(axis=1, keepdims=True)
    out = np.zeros_like(loads)
    np.divide(loads, mean, out=out, where=mean > 0)
    return out


def _of_ranks(fleet: Fleet, recent: NDArray[np.int64], names: list[str]) -> Iterator[Metric]:
    """By the placement in use now; nothing where it does not fit the loads."""
    placement = fleet.placement
    if placement is None or recent.shape != (placement.num_layers, placement.num_logical_experts):
        return
    ranks = load_of_ranks(recent, placement)  # [L, R]
    mean = ranks.mean(axis=1)
    balance = np.zeros(len(ranks))
    np.divide(ranks.max(axis=1), mean, out=balance, where=mean > 0)
    layers = GaugeMetricFamily(
        "moeserve_expert_layer_balance",
        "Load of the layer's busiest rank over the mean one, lately, as experts are placed now; 0 "
        "without load",
        labels=["layer"],
    )
    for name, value in zip(names, balance.tolist(), strict=True):
        layers.add_metric([name], value)
    yield layers
    total = ranks.sum(axis=0)
    share = total / total.mean() if total.any() else total
    loads = GaugeMetricFamily(
        "moeserve_expert_rank_load_ratio",
        "Load of the rank's experts over the mean rank's, all layers, lately; 0 without load",
        labels=["rank"],
    )
    for rank, value in enumerate(share.tolist()):
        loads.add_metric([str(rank)], value)
    yield loads


def _of_places(heat: NDArray[np.float64], names: list[str]) -> Iterator[Metric]:
    families = [
        GaugeMetricFamily(f"moeserve_expert_top_{name}", text, labels=["place"])
        for name, text in (
            ("load_ratio", "Load of the hottest experts of all layers over their layers' means"),
            ("layer", "Layer of the expert in this place"),
            ("id", "Number of the expert in this place, within its layer"),
        )
    ]
    order = np.argsort(-heat, axis=None, kind="stable")[:TOP]
    for place, flat in enumerate(order.tolist(), 1):
        layer, expert = divmod(flat, heat.shape[1])
        if heat[layer, expert] <= 0:
            break
        values = (float(heat[layer, expert]), float(names[layer]), float(expert))
        for family, value in zip(families, values, strict=True):
            family.add_metric([str(place)], value)
    yield from families
