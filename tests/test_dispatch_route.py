"""Routing: the slot holds the expert, one owner, even over replicas, the same everywhere."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatch.route import RoutingTable, count_picks, route, token_keys
from ep.placement import EMPTY, ExpertPlacement


def random_placement(experts: int, ranks: int, redundant: int, seed: int) -> ExpertPlacement:
    """Slots in any order, the empty ones among them."""
    rng = np.random.default_rng(seed)
    empty = np.full(-(experts + redundant) % ranks, EMPTY)
    rows = [
        rng.permutation(
            np.concatenate([np.arange(experts), rng.integers(0, experts, redundant), empty])
        )
        for _ in range(2)
    ]
    return ExpertPlacement.from_physical_to_logical(np.array(rows), ranks, experts)


def random_ids(tokens: int, top_k: int, experts: int, seed: int, masked: bool) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, experts, generator=g).argsort(dim=1)[:, :top_k].to(torch.int32)
    if masked:
        ids[torch.rand(tokens, ids.shape[1], generator=g) < 0.3] = -1
    return ids


case = given(
    st.integers(2, 12),
    st.integers(1, 5),
    st.integers(0, 13),
    st.integers(0, 20),
    st.integers(0, 10**6),
    st.booleans(),
)


@case
@settings(max_examples=150, deadline=None)
def test_exactly_one_owner_and_the_right_expert(
    experts: int, ranks: int, redundant: int, tokens: int, seed: int, masked: bool
) -> None:
    p = random_placement(experts, ranks, redundant, seed)
    ids = random_ids(tokens, 3, experts, seed, masked)
    for layer in range(p.num_layers):
        slots = route(ids, RoutingTable.build(p, layer))
        assert slots.dtype == torch.int32 and slots.shape == ids.shape
        table = torch.from_numpy(p.physical_to_logical[layer].copy())
        held = torch.where(slots >= 0, table[slots.long().clamp(min=0)], -1)
        assert torch.equal(held, ids.long())
        # Each pick is local on one rank, a masked one on none.
        owners = sum((slots // p.num_local_experts == rank).int() for rank in range(ranks))
        assert torch.equal(owners, (ids >= 0).int())


@case
@settings(max_examples=60, deadline=None)
def test_matches_the_rule_one_pick_at_a_time(
    experts: int, ranks: int, redundant: int, tokens: int, seed: int, masked: bool
) -> None:
    p = random_placement(experts, ranks, redundant, seed)
    ids = random_ids(tokens, 3, experts, seed, masked)
    keys = token_keys(tokens, home_rank=seed % 7)
    slots = route(ids, RoutingTable.build(p, 1), keys)
    for t in range(tokens):
        for k in range(ids.shape[1]):
            expert = int(ids[t, k])
            if expert < 0:
                assert slots[t, k] == -1
                continue
            count = p.replica_count[1, expert]
            replica = (int(keys[t]) + expert) % count
            assert slots[t, k] == p.logical_to_physical[1, expert, replica]


def test_the_choice_does_not_depend_on_the_company() -> None:
    """A token with a given key goes to the same replica alone and among others."""
    p = random_placement(8, 4, 3, 1)
    table = RoutingTable.build(p, 0)
    ids, keys = random_ids(40, 4, 8, 2, False), token_keys(40)
    whole = route(ids, table, keys)
    for t in range(40):
        assert torch.equal(route(ids[t : t + 1], table, keys[t : t + 1]), whole[t : t + 1])


def test_even_over_replicas_within_a_rank_and_across_ranks() -> None:
    p = ExpertPlacement.trivial(1, 4, 4, 8)  # three copies of each expert
    table = RoutingTable.build(p, 0)
    one = torch.zeros(60, 1, dtype=torch.int32)
    many_tokens = route(one, table)
    single_tokens = torch.cat([route(one[:1], table, token_keys(1, rank)) for rank in range(60)])
    for slots in (many_tokens, single_tokens):
        counts = torch.bincount(slots.flatten(), minlength=12)
        assert sorted(counts.tolist()) == [0] * 9 + [20] * 3


def test_without_redundancy() -> None:
    ids = random_ids(9, 2, 6, 3, True)
    trivial = RoutingTable.build(ExpertPlacement.trivial(1, 6, 3), 0)
    assert trivial.is_identity and torch.equal(route(ids, trivial), ids)
    swapped = ExpertPlacement.from_physical_to_logical([[1, 0, 3, 2, 5, 4]], 3)
    table = RoutingTable.build(swapped, 0)
    assert not table.is_identity
    expected = torch.where(ids >= 0, ids ^ 1, -1)
    assert torch.equal(route(ids, table), expected)
    assert torch.equal(route(ids.long(), table), expected)


def test_identity_is_of_the_slots_before_the_first_empty_one() -> None:
    at_the_end = RoutingTable.build(ExpertPlacement.trivial(1, 5, 2), 0)
    assert at_the_end.is_identity and at_the_end.num_physical_experts == 6
    between = RoutingTable.build(ExpertPlacement.trivial(1, 4, 3), 0)  # 0 1 | 2 - | 3 -
    assert not between.is_identity
    ids = torch.tensor([[0, 1, -1], [2, 3, 0]], dtype=torch.int32)
    assert route(ids, between).tolist() == [[0, 1, -1], [2, 4, 0]]
    assert torch.equal(route(ids, at_the_end), ids)


def test_picks_are_counted_on_logical_experts_without_the_masked() -> None:
    ids = torch.tensor([[0, 2], [2, -1], [-1, -1]], dtype=torch.int32)
    assert count_picks(ids, 4).tolist() == [1, 0, 2, 0]
    assert count_picks(ids[:0], 4).tolist() == [0, 0, 0, 0]
