"""Faults that placement planners have had: each check passes on ours and fails on a planner made
wrong in that one way.

From public issue threads; what a check is called says which kind of fault it is immune to.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from ep.placement import EMPTY, ExpertPlacement
from ep.planner import PlanOptions, plan
from ep.planning.duplicates import is_duplicate
from ep.planning.eplb import eplb_tables
from ep.planning.plan_loads import PlanError

# (loads [L, E], slots, groups, nodes, gpus, previous, live) -> table [L, P]
Planner = Callable[..., np.ndarray]


def ours(
    loads: np.ndarray,
    slots: int,
    groups: int = 1,
    nodes: int = 1,
    gpus: int = 1,
    previous: ExpertPlacement | None = None,
    live: np.ndarray | None = None,
) -> np.ndarray:
    grouped = "node" if groups > 1 else "free"
    made = plan(
        loads, num_slots=slots, num_groups=groups, num_nodes=nodes, num_gpus=gpus,
        previous=previous, live_gpus=live, options=PlanOptions(group_policy=grouped),
    )  # fmt: skip
    return made.placement.physical_to_logical


def skewed(layers: int = 6, experts: int = 32) -> np.ndarray:
    return np.random.default_rng(3).lognormal(2, 1.2, (layers, experts))


# -- copies of one expert on one GPU: a slot wasted, and moved weights taken for another's (EPLB#22)


def no_expert_twice_on_a_gpu(planner: Planner) -> None:
    table = planner(skewed(20, 40), 60, gpus=6)
    assert not is_duplicate(table.reshape(20, 6, 10)).any()


def eplb_as_it_is(
    loads: np.ndarray, slots: int, groups: int = 1, nodes: int = 1, gpus: int = 1, **_: object
) -> np.ndarray:
    return eplb_tables(loads, slots, groups, nodes, gpus)[0]


# -- ties decided by the sort of the day: ranks on two machines disagree (EPLB#8)


def ties_do_not_matter(planner: Planner) -> None:
    loads = np.random.default_rng(0).integers(1, 4, (4, 32))
    tables = [planner(loads, 40, gpus=8) for _ in range(3)]
    assert all((t == tables[0]).all() for t in tables)


def unstable_ties() -> Planner:
    rng = np.random.default_rng()

    def planner(loads: np.ndarray, slots: int, **more: int) -> np.ndarray:
        return ours(loads + rng.random(loads.shape) * 1e-9, slots, **more)

    return planner


# -- groups that are said to stay on nodes and silently do not (EPLB: 8 groups, 3 nodes)


def grouped_or_refused(planner: Planner) -> None:
    loads = skewed(3, 32)
    try:
        table = planner(loads, 48, groups=8, nodes=3, gpus=12)
    except PlanError:
        return
    node = np.arange(48) // 16
    for group in range(8):
        assert len(np.unique(node[(table[0] // 4) == group])) == 1


# -- the arithmetic left to the user: an assertion about a remainder (vllm#52435, sglang#8253)


def remainders_are_named(planner: Planner) -> None:
    for slots, nodes, gpus in ((256, 1, 3), (320, 1, 12), (256, 2, 1)):
        with pytest.raises(PlanError, match="could be|nearest valid"):
            planner(np.ones((1, 256)), slots, nodes=nodes, gpus=gpus)


def asserts_a_remainder(loads: np.ndarray, slots: int, nodes: int = 1, gpus: int = 1) -> np.ndarray:
    assert slots % gpus == 0 and gpus % nodes == 0
    return ours(loads, slots, gpus=gpus)


# -- the shared expert as one more routed expert: 257 do not divide into 8 groups


def shared_expert_may_be_hosted(planner: Planner) -> None:
    loads = np.ones((1, 33))
    loads[:, 32] = 4
    table = planner(loads, 48, groups=8, nodes=4, gpus=8)
    assert (np.bincount(table[0], minlength=33) >= 1).all()


def with_ungrouped(loads: np.ndarray, slots: int, groups: int, nodes: int, gpus: int) -> np.ndarray:
    options = PlanOptions(group_policy="node", num_ungrouped=loads.shape[1] % groups)
    made = plan(
        loads, num_slots=slots, num_groups=groups, num_nodes=nodes, num_gpus=gpus, options=options
    )
    return made.placement.physical_to_logical


# -- windows that hold nothing, or nonsense: negative counters (vllm#57883), idle steps


def nonsense_is_refused(planner: Planner) -> None:
    for wrong in (-1.0, np.nan, np.inf):
        loads = np.ones((2, 8))
        loads[1, 5] = wrong
        with pytest.raises(PlanError, match="layer 1, expert 5"):
            planner(loads, 12, gpus=4)


def idle_layers_get_even_copies(planner: Planner) -> None:
    table = planner(np.zeros((1, 8)), 16, gpus=4)
    assert (np.bincount(table[0]) == 2).all()


def takes_what_comes(loads: np.ndarray, slots: int, gpus: int = 1) -> np.ndarray:
    return eplb_tables(np.nan_to_num(loads), slots, 1, 1, gpus)[0]


# -- no notion of what is in place: nine slots of ten move for nothing (EPLB#25)


def small_drift_moves_little(planner: Planner) -> None:
    loads = skewed(6, 64)
    first = ExpertPlacement(planner(loads, 96, gpus=8), 64, 8)
    nudged = loads * np.random.default_rng(1).uniform(0.98, 1.02, loads.shape)
    moved = planner(nudged, 96, gpus=8, previous=first) != first.physical_to_logical
    assert moved.mean() < 0.2


# -- dead ranks that are still given experts (what elastic forks had to add)


def dead_gpus_host_nothing(planner: Planner) -> None:
    live = np.array([True, False, True, True])
    table = planner(skewed(2, 12), 20, gpus=4, live=live)
    assert (table.reshape(2, 4, 5)[:, 1] == EMPTY).all()
    assert all(len(np.unique(row[row >= 0])) == 12 for row in table)


# -- a search that gives up where all load is on one expert and copies exceed the GPUs (FlashLB)


def one_hot_expert_is_placed(planner: Planner) -> None:
    loads = np.zeros((1, 8))
    loads[0, 2] = 1000
    table = planner(loads, 24, gpus=4).reshape(1, 4, 6)
    assert (table == 2).any(axis=2).all()
    assert (table == 2).sum() == 4


CHECKS: list[tuple[Callable[[Planner], None], Planner, Planner]] = [
    (no_expert_twice_on_a_gpu, ours, eplb_as_it_is),
    (ties_do_not_matter, ours, unstable_ties()),
    (grouped_or_refused, ours, eplb_as_it_is),
    (remainders_are_named, ours, asserts_a_remainder),
    (shared_expert_may_be_hosted, with_ungrouped, eplb_as_it_is),
    (nonsense_is_refused, ours, takes_what_comes),
    (idle_layers_get_even_copies, ours, partial(takes_what_comes)),
    (small_drift_moves_little, ours, eplb_as_it_is),
    (dead_gpus_host_nothing, ours, eplb_as_it_is),
    (one_hot_expert_is_placed, ours, eplb_as_it_is),
]


@pytest.mark.parametrize(("check", "right", "wrong"), CHECKS, ids=[c[0].__name__ for c in CHECKS])
def test_immune_and_the_check_can_tell(
    check: Callable[[Planner], None], right: Planner, wrong: Planner
) -> None:
    check(right)
    with pytest.raises((AssertionError, ValueError, pytest.fail.Exception)):
        check(wrong)
