"""Where tokens go: drawn by loads and group limits, in the placement whose balance is told."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from dispatch.route import RoutingTable, route
from ep.planner import PlanOptions, plan
from launch.capacity.balance import balance, typical
from launch.capacity.deployment import from_preset
from launch.capacity.known import load_shape
from launch.capacity.picks import Grid, least_free, picks_of, reach_of

V3 = load_shape("deepseek-v3").config
LOADS = typical(256, "prefill")
PREFILL = from_preset("v3-prefill-32")


def test_picks_keep_the_gates_limits_and_the_loads() -> None:
    picks = picks_of(V3, LOADS, 1)
    assert picks.shape[2] == 9 and (picks[..., 8] == 256).all()
    routed = np.sort(picks[..., :8], axis=2)
    assert (np.diff(routed, axis=2) > 0).all()
    groups = np.sort(routed // 32, axis=2)
    assert (1 + (np.diff(groups, axis=2) > 0).sum(axis=2)).max() == 4
    for layer, share in zip(routed, LOADS / LOADS.sum(axis=1, keepdims=True), strict=True):
        seen = np.bincount(layer.ravel(), minlength=256) / layer.size
        of_groups = np.abs(seen.reshape(8, 32).sum(1) - share.reshape(8, 32).sum(1)).sum() / 2
        assert np.corrcoef(seen, share)[0, 1] > 0.9 and of_groups < 0.03


def test_tokens_go_where_our_dispatch_sends_them() -> None:
    placement = plan(LOADS, num_gpus=32, num_slots=288, options=PlanOptions()).placement
    picks = picks_of(V3, LOADS, 0)[:2]
    whole = reach_of(picks, placement, 8)
    ranks, nodes = [], []
    for layer in range(2):
        slots = route(torch.from_numpy(picks[layer]), RoutingTable.build(placement, layer))
        ranks += [len({int(s) // 9 for s in row}) for row in slots]
        nodes += [len({int(s) // 72 for s in row}) for row in slots]
    assert whole.ranks == pytest.approx(np.mean(ranks))
    assert whole.nodes == pytest.approx(np.mean(nodes))


def test_balance_and_reach_are_of_one_placement() -> None:
    """Anywhere: even, but 3.6 of 4 nodes a token. On nodes: 3.1, but the hot group's node waits."""
    free, node = (balance(replace(PREFILL, groups=g)) for g in ("free", "node"))
    assert free.mean < 1.001 and free.reach.nodes == pytest.approx(3.61, abs=0.02)
    assert node.mean > 1.3 and node.reach.nodes == pytest.approx(3.15, abs=0.03)
    scattered = Grid(32, 8, 9).scattered(8)
    assert scattered.nodes == pytest.approx(4 * (1 - _missed(216, 288)))
    assert free.reach.nodes == pytest.approx(scattered.nodes, rel=0.01)
    assert free.reach.ranks == pytest.approx(scattered.ranks, rel=0.02)


def _missed(left: int, slots: int) -> float:
    return float(np.prod([(left - i) / (slots - i) for i in range(8)]))


@pytest.mark.parametrize("gpus", [16, 36, 72, 320])
def test_what_chance_gives_is_met_with_a_last_node_that_is_not_whole(gpus: int) -> None:
    pool = replace(PREFILL, gpus=gpus, redundant=-(-288 // gpus) * gpus - 256)
    found = balance(pool).reach
    grid = Grid(gpus, 8, pool.slots_per_gpu)
    chance, least = grid.scattered(8), least_free(8, grid)
    assert found.nodes == pytest.approx(chance.nodes, rel=0.03)
    assert least.nodes < found.nodes and least.ranks < found.ranks
