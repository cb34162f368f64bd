"""Experts in /metrics: what the figures are, and that there are few of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ep.placement import ExpertPlacement
from moeserve import wire
from moeserve.expert_metrics import TOP, expert_series, num_series
from moeserve.fleet import RECENT_REPORTS, Fleet
from moeserve.wire_experts import PlacementInUse


def fleet_of(placement: ExpertPlacement, load: np.ndarray, routed: int | None = None) -> Fleet:
    """load [L, E] of each rank, as told once."""
    fleet = Fleet(placement.num_ranks)
    experts = placement.num_logical_experts
    info: dict[str, Any] = {"first_moe_layer": 3}
    info["placement"] = {"num_routed_experts": experts if routed is None else routed}
    fleet.heard(0, PlacementInUse.of(0, placement), 0.0)
    for rank in range(placement.num_ranks):
        fleet.heard(rank, wire.Ready(rank, 16, 64, 512, 8, info), 0.0)
        report(fleet, rank, load)
    return fleet


def report(fleet: Fleet, rank: int, load: np.ndarray, now: float = 0.0) -> None:
    zeros = dict.fromkeys(wire.RankStats.__struct_fields__[:18], 0) | {"rank": rank}
    flat = tuple(load.ravel().tolist())
    fleet.heard(rank, wire.RankStats(**zeros, expert_shape=load.shape, expert_load=flat), now)


def samples(fleet: Fleet) -> dict[tuple[str, str], float]:
    """(name, the value of its one label) -> value."""
    out = {}
    for family in expert_series(fleet):
        for sample in family.samples:
            assert len(sample.labels) == 1, sample
            out[sample.name, next(iter(sample.labels.values()))] = sample.value
    return out


def test_figures() -> None:
    table = ExpertPlacement.trivial(2, 4, 2)
    load = np.array([[1, 2, 3, 6], [0, 0, 0, 0]])
    seen = samples(fleet_of(table, load))
    assert seen["moeserve_expert_layer_picks_total", "3"] == 24  # of both ranks
    assert seen["moeserve_expert_layer_hottest_ratio", "3"] == 2.0  # 6 of a mean of 3
    assert seen["moeserve_expert_layer_balance", "3"] == 1.5  # 9 of a mean of 6
    assert seen["moeserve_expert_layer_balance", "4"] == 0
    assert seen["moeserve_expert_rank_load_ratio", "0"] == 0.5
    assert seen["moeserve_expert_rank_load_ratio", "1"] == 1.5
    assert seen["moeserve_expert_top_load_ratio", "1"] == 2.0
    assert seen["moeserve_expert_top_layer", "1"] == 3 and seen["moeserve_expert_top_id", "1"] == 3
    assert ("moeserve_expert_top_id", "5") not in seen, "idle experts have no place"


def test_the_placement_in_use_counts() -> None:
    load = np.array([[1, 2, 3, 6]])
    fleet = fleet_of(ExpertPlacement.trivial(1, 4, 2), load)
    other = ExpertPlacement(np.array([[0, 3, 1, 2]]), 4, 2, generation=1)
    fleet.heard(0, PlacementInUse.of(0, other), 1.0)
    seen = samples(fleet)
    assert seen["moeserve_expert_rank_load_ratio", "0"] == 7 / 6
    assert seen["moeserve_expert_rank_load_ratio", "1"] == 5 / 6


def test_a_hosted_shared_expert_is_no_hot_expert() -> None:
    table = ExpertPlacement.trivial(1, 5, 1)
    seen = samples(fleet_of(table, np.array([[1, 2, 3, 6, 100]]), routed=4))
    assert seen["moeserve_expert_top_id", "1"] == 3
    assert seen["moeserve_expert_layer_hottest_ratio", "3"] == 2.0


def test_lately_forgets_what_is_old() -> None:
    table = ExpertPlacement.trivial(1, 2, 1)
    old, new = np.array([[1000, 0]]), np.array([[1000, 10]])
    fleet = fleet_of(table, old)
    assert samples(fleet)["moeserve_expert_top_id", "1"] == 0
    for i in range(RECENT_REPORTS - 1):
        report(fleet, 0, old, float(i))
    report(fleet, 0, new, 99.0)
    assert samples(fleet)["moeserve_expert_top_id", "1"] == 1
    assert fleet.recent_expert_load().tolist() == [[0, 10]]
    assert samples(fleet)["moeserve_expert_layer_picks_total", "3"] == 1010, "since start"


@pytest.mark.parametrize("size", [(58, 256, 144, 288), (61, 384, 320, 640), (1, 2, 1, 2)])
def test_series_are_few_whatever_the_model(size: tuple[int, int, int, int]) -> None:
    layers, experts, ranks, slots = size
    table = ExpertPlacement.trivial(layers, experts, ranks, slots - experts)
    fleet = Fleet(ranks)
    fleet.heard(0, PlacementInUse.of(0, table), 0.0)
    report(fleet, 0, np.arange(1, layers * experts + 1).reshape(layers, experts))
    seen = samples(fleet)
    most = num_series(layers, ranks)
    assert len(seen) <= most == 3 * layers + ranks + 3 * TOP
    if layers == 58:
        assert len(seen) == most == 348, "58 layers x 256 experts x 144 ranks would be 2 million"


def test_nothing_before_ranks_have_reported() -> None:
    assert list(expert_series(Fleet(3))) == []
