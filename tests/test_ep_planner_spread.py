"""Parts of a fresh plan over GPUs: the same parts, nodes even in each layer, GPUs over all."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ep.load import load_of_ranks
from ep.placement import ExpertPlacement
from ep.planner import PlanOptions, plan
from ep.planning.shapes import check_shape
from ep.planning.spread import spread


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    nodes=st.integers(1, 4),
    gpus=st.integers(1, 4),
    slots=st.integers(1, 3),
    grouped=st.booleans(),
)
def test_parts_change_places_only(
    seed: int, nodes: int, gpus: int, slots: int, grouped: bool
) -> None:
    rng = np.random.default_rng(seed)
    total = nodes * gpus
    table = rng.integers(-1, 6, size=(4, total, slots))
    shape = check_shape(6, total, num_slots_per_gpu=max(slots, 6), num_nodes=nodes)
    loads = rng.integers(0, 9, size=(4, 6)).astype(float)
    out = spread(loads, table, shape, np.full(4, grouped))
    for before, after in zip(table, out, strict=True):
        assert sorted(before.tolist()) == sorted(after.tolist())
        if grouped:
            sets = [sorted(part.tolist()) for part in before.reshape(nodes, gpus, slots)]
            assert sorted(sets) == sorted(
                sorted(part.tolist()) for part in after.reshape(nodes, gpus, slots)
            )


def node_loads(loads: np.ndarray, placement: ExpertPlacement, nodes: int) -> np.ndarray:
    """[L, N] mean GPU load of each node over the mean of all."""
    ranks = load_of_ranks(loads, placement)
    return (ranks / ranks.mean(axis=1, keepdims=True)).reshape(len(ranks), nodes, -1).mean(axis=2)


@pytest.mark.parametrize(("gpus", "slots"), [(64, 64), (64, 128)])
def test_no_node_hosts_the_hottest_of_every_layer(gpus: int, slots: int) -> None:
    loads = np.random.default_rng(7).lognormal(0, 0.7, size=(12, 48))
    made = plan(loads, num_gpus=gpus, num_slots=slots, num_nodes=8)
    assert made.explanation.after.mean() > 1.02, "GPUs differ, so that there is something to deal"
    assert node_loads(loads, made.placement, 8).max() < 1.1
    over_layers = load_of_ranks(loads, made.placement)
    over_layers /= over_layers.mean(axis=1, keepdims=True)
    assert over_layers.mean(axis=0).max() < 1.1, "nor one GPU of all layers"


def test_a_previous_placement_is_not_dealt_anew() -> None:
    loads = np.random.default_rng(3).lognormal(0, 0.7, size=(6, 16))
    first = plan(loads, num_gpus=8, num_slots=16, num_nodes=2)
    again = plan(loads, num_gpus=8, num_slots=16, num_nodes=2, previous=first.placement)
    assert again.explanation.moved is not None and again.explanation.moved.sum() == 0


def test_groups_stay_on_their_nodes() -> None:
    loads = np.random.default_rng(5).lognormal(0, 0.7, size=(6, 32))
    options = PlanOptions(group_policy="node")
    made = plan(loads, num_gpus=8, num_slots=40, num_nodes=4, num_groups=8, options=options)
    node_of = np.arange(40) // 10
    for row in made.placement.physical_to_logical:
        for group in range(8):
            assert len(set(node_of[(row >= 0) & (row // 4 == group)].tolist())) == 1
