"""Faults that serving with moved and copied experts has had elsewhere: each check passes on ours
and fails on a version made wrong in that one way. Those of planners: test_ep_planner_faults.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dispatch.route import RoutingTable, count_picks, route, token_keys
from ep.migrate import MigrationPlan, plan_migration
from ep.placement import EMPTY, ExpertPlacement
from ep.rebalance import Ballot, Cause, Do, Order, Position, Result, Say, Stage, advance

EXPERTS, RANKS, TOKENS = 16, 4, 64


def placement(seed: int, generation: int = 0) -> ExpertPlacement:
    rng = np.random.default_rng(seed)
    rows = [rng.permutation(np.r_[np.arange(EXPERTS), rng.choice(EXPERTS, 8)]) for _ in range(2)]
    return ExpertPlacement.from_physical_to_logical(np.array(rows), RANKS, EXPERTS, generation)


def picks(seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.rand(TOKENS, EXPERTS, generator=g).topk(3).indices.to(torch.int32)


# -- a replica chosen by the rank that looks: a row is computed twice, or by nobody

Router = Callable[[Tensor, RoutingTable, int], Tensor]  # ids, table, looking rank -> slots


def exactly_one_rank_computes(router: Router) -> None:
    """Each rank works out all slots (no all-to-all) and takes those that are its own."""
    p = placement(1)
    table, ids = RoutingTable.build(p, 0), picks()
    owners = torch.zeros_like(ids)
    for rank in range(RANKS):
        owners += (router(ids, table, rank) // p.num_local_experts == rank).to(owners.dtype)
    assert (owners == 1).all()


def our_router(ids: Tensor, table: RoutingTable, looking: int) -> Tensor:
    return route(ids, table, token_keys(len(ids)))


def by_looking_rank(ids: Tensor, table: RoutingTable, looking: int) -> Tensor:
    return route(ids, table, token_keys(len(ids), looking))


# -- after a rebalance a path still uses logical ids, or the map of before


def slots_host_what_was_picked(router: Router) -> None:
    before, after = placement(1), placement(2, generation=1)
    for p in (before, after):
        slots = router(picks(3), RoutingTable.build(p, 1), 0)
        held = torch.from_numpy(p.physical_to_logical[1].copy())[slots.long()]
        assert torch.equal(held, picks(3).long())


def stays_logical(ids: Tensor, table: RoutingTable, looking: int) -> Tensor:
    return ids


def keeps_the_first_map() -> Router:
    first = RoutingTable.build(placement(1), 1)
    return lambda ids, table, looking: route(ids, first, token_keys(len(ids)))


# -- load counted on slots, or with masked picks: the planner sees another model

Counter = Callable[[Tensor, RoutingTable], Tensor]  # ids [T, K] with -1, table -> [E]


def load_is_of_logical_experts(counter: Counter) -> None:
    ids = picks(5)
    ids[::4] = -1  # padding
    counts = counter(ids, RoutingTable.build(placement(1), 0))
    assert counts.tolist() == [int((ids == e).sum()) for e in range(EXPERTS)]


def our_counter(ids: Tensor, table: RoutingTable) -> Tensor:
    return count_picks(ids, EXPERTS)


def counts_slots(ids: Tensor, table: RoutingTable) -> Tensor:
    return count_picks(route(ids, table), EXPERTS)


def counts_padding(ids: Tensor, table: RoutingTable) -> Tensor:
    return count_picks(ids.clamp(min=0), EXPERTS)


# -- a bundle read where it no longer is, or a slot overwritten before it was sent

Mover = Callable[[MigrationPlan, np.ndarray], np.ndarray]  # slots' contents [L, P] -> after


def every_slot_holds_its_expert(mover: Mover) -> None:
    for seed in range(6):
        old, new = placement(seed), placement(seed + 50)
        moves = plan_migration(old, new, [64, 64], max_staging_bytes=64 * 64, ranks_per_node=RANKS)
        contents = mover(moves, old.physical_to_logical.copy())
        after = moves.placement_after(len(moves.batches)).physical_to_logical
        assert np.array_equal(contents[after != EMPTY], after[after != EMPTY])


def staged(moves: MigrationPlan, contents: np.ndarray) -> np.ndarray:
    for batch in range(len(moves.batches)):
        of_all = [m for rank in range(RANKS) for m in moves.moves_to(rank, batch)]
        buffers = [contents[m.layer, m.source] for m in of_all]
        for move, bundle in zip(of_all, buffers, strict=True):
            contents[move.layer, list(move.slots)] = bundle
    return contents


def in_place(moves: MigrationPlan, contents: np.ndarray) -> np.ndarray:
    for batch in range(len(moves.batches)):
        for rank in range(RANKS):
            for move in moves.moves_to(rank, batch):
                contents[move.layer, list(move.slots)] = contents[move.layer, move.source]
    return contents


def one_buffer_for_all(moves: MigrationPlan, contents: np.ndarray) -> np.ndarray:
    for batch in range(len(moves.batches)):
        of_all = [m for rank in range(RANKS) for m in moves.moves_to(rank, batch)]
        buffer = [contents[m.layer, m.source] for m in of_all][-1:] * len(of_all)
        for move, bundle in zip(of_all, buffer, strict=True):
            contents[move.layer, list(move.slots)] = bundle
    return contents


# -- ranks that switch although one is not ready, has failed, or sees another plan

Judge = Callable[..., tuple[Position, tuple[Order, ...]]]
MOVING = Position(stage=Stage.MOVING, plan=1)
READY, QUIET = Ballot(Say.READY, 0), Ballot()


def judged(judge: Judge, at: Position, ballots: Sequence[Ballot]) -> tuple[Order, ...]:
    orders = judge(at, ballots, ran=True, num_batches=1, interval_steps=8)[1]
    return orders


def nobody_switches_alone(judge: Judge) -> None:
    assert judged(judge, MOVING, [READY, QUIET, READY]) == ()
    assert judged(judge, MOVING, [READY] * 3)[0].do is Do.SWITCH


def a_failure_ends_it_for_all(judge: Judge) -> None:
    orders = judged(judge, MOVING, [READY, Ballot(Say.FAILED, cause=Cause.CHECKSUM), READY])
    assert [(o.do, o.result) for o in orders] == [(Do.END, Result.ABANDONED)]


def plans_are_compared(judge: Judge) -> None:
    at = replace(MOVING, stage=Stage.CHECKING)
    orders = judged(judge, at, [Ballot(Say.CHECKED, 7), Ballot(Say.CHECKED, 8)])
    assert [(o.do, o.cause) for o in orders] == [(Do.END, Cause.DIFFERS)]


def rank_0_speaks_for_all(at: Position, ballots: Sequence[Ballot], **rest: Any) -> Any:
    return advance(at, [ballots[0]] * len(ballots), **rest)


def deaf_to_failures(at: Position, ballots: Sequence[Ballot], **rest: Any) -> Any:
    return advance(at, [QUIET if b.say is Say.FAILED else b for b in ballots], **rest)


@pytest.mark.parametrize(
    ("check", "ours", "wrong"),
    [
        (exactly_one_rank_computes, our_router, by_looking_rank),
        (slots_host_what_was_picked, our_router, stays_logical),
        (slots_host_what_was_picked, our_router, keeps_the_first_map()),
        (load_is_of_logical_experts, our_counter, counts_slots),
        (load_is_of_logical_experts, our_counter, counts_padding),
        (every_slot_holds_its_expert, staged, in_place),
        (every_slot_holds_its_expert, staged, one_buffer_for_all),
        (nobody_switches_alone, advance, rank_0_speaks_for_all),
        (a_failure_ends_it_for_all, advance, deaf_to_failures),
        (a_failure_ends_it_for_all, advance, rank_0_speaks_for_all),
        (plans_are_compared, advance, rank_0_speaks_for_all),
    ],
    ids=lambda f: getattr(f, "__name__", None),
)
def test_immune_and_the_check_can_tell(check: Callable[[Any], None], ours: Any, wrong: Any) -> None:
    check(ours)
    with pytest.raises((AssertionError, IndexError, RuntimeError)):
        check(wrong)
