"""Migration plans: applied to simulated slots they give the new placement, within their bounds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ep.migrate import (
    MigrationError,
    MigrationPlan,
    StagingTooSmall,
    keep_slots,
    plan_migration,
)
from ep.placement import EMPTY, ExpertPlacement


def random_placement(
    rng: np.random.Generator, layers: int, experts: int, ranks: int, local: int
) -> ExpertPlacement:
    """Every expert once, the other slots any expert or empty, in any order."""
    rows = []
    for _ in range(layers):
        rest = rng.integers(-1, experts, ranks * local - experts)
        rows.append(rng.permutation(np.concatenate([np.arange(experts), rest])))
    return ExpertPlacement(np.array(rows), experts, ranks, generation=3)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[ExpertPlacement, ExpertPlacement, int]:
    ranks_per_node = draw(st.sampled_from([1, 2, 3]))
    ranks = ranks_per_node * draw(st.integers(1, 3))
    local = draw(st.integers(1, 4))
    experts = draw(st.integers(1, ranks * local))
    layers = draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    old = random_placement(rng, layers, experts, ranks, local)
    new = random_placement(rng, layers, experts, ranks, local)
    if draw(st.booleans()):  # some layers stay as they are
        table = new.physical_to_logical.copy()
        table[::2] = old.physical_to_logical[::2]
        new = ExpertPlacement(table, experts, ranks)
    return old, new, ranks_per_node


def simulate(plan: MigrationPlan, staging: int) -> None:
    """Slots hold (layer, expert) or what was left in them; ranks hold only what a plan brings."""
    old, local = plan.old, plan.old.num_local_experts
    slots = old.physical_to_logical.copy()
    came, went = np.zeros(old.num_ranks, int), np.zeros(old.num_ranks, int)
    for number, batch in enumerate(plan.batches):
        staged, held = [], np.zeros(old.num_ranks, int)
        for move in batch.moves:
            here, there = move.slots[0] // local, move.source // local
            assert {s // local for s in move.slots} == {here}, "one rank a move"
            assert move.layer in batch.layers
            # what a source sends is what it holds now, before any layer of this batch switched
            assert slots[move.layer, move.source] == move.expert
            held[here] += plan.layer_bytes[move.layer]
            if here != there:
                assert move.expert not in slots[move.layer, here * local : (here + 1) * local]
                came[here] += plan.layer_bytes[move.layer]
                went[there] += plan.layer_bytes[move.layer]
            staged.append((move, slots[move.layer, move.source]))
        assert held.max() <= staging
        assert (held <= plan.staging_bytes).all()
        for move, content in staged:
            slots[move.layer, list(move.slots)] = content
        after = plan.placement_after(number + 1)
        full = after.physical_to_logical != EMPTY
        assert (slots[full] == after.physical_to_logical[full]).all()
        assert after.generation == old.generation + number + 1
    assert plan.placement_after(len(plan.batches)) == plan.new
    assert (came == plan.bytes_in).all() and (went == plan.bytes_out).all()


@given(pairs(), st.integers(1, 5))
@settings(max_examples=150, deadline=None)
def test_a_plan_gives_the_new_placement(
    case: tuple[ExpertPlacement, ExpertPlacement, int], layers_at_once: int
) -> None:
    old, new, node = case
    sizes = [10 + 7 * layer for layer in range(old.num_layers)]
    staging = layers_at_once * old.num_local_experts * max(sizes)
    plan = plan_migration(old, new, sizes, max_staging_bytes=staging, ranks_per_node=node)
    assert (plan.new.physical_to_logical == new.physical_to_logical).all()
    simulate(plan, staging)
    again = plan_migration(old, new, sizes, max_staging_bytes=staging, ranks_per_node=node)
    assert again.digest == plan.digest
    changed = np.flatnonzero((old.physical_to_logical != new.physical_to_logical).any(axis=1))
    assert [x for b in plan.batches for x in b.layers] == changed.tolist()


@given(pairs())
@settings(max_examples=60, deadline=None)
def test_sources_of_the_same_node_come_first(
    case: tuple[ExpertPlacement, ExpertPlacement, int],
) -> None:
    old, new, node = case
    plan = plan_migration(old, new, [1] * old.num_layers, max_staging_bytes=99, ranks_per_node=node)
    local = old.num_local_experts
    for move in (m for b in plan.batches for m in b.moves):
        here = move.slots[0] // local
        count = old.replica_count[move.layer, move.expert]
        ranks = old.logical_to_physical[move.layer, move.expert, :count] // local
        near = [r for r in ranks if r // node == here // node]
        if near and here not in near:
            assert move.source // local in near


@given(pairs())
@settings(max_examples=60, deadline=None)
def test_experts_that_stay_keep_their_slot(
    case: tuple[ExpertPlacement, ExpertPlacement, int],
) -> None:
    old, new, _ = case
    kept = keep_slots(old, new)
    shape = (old.num_layers, old.num_ranks, old.num_local_experts)
    before, wanted, got = (x.physical_to_logical.reshape(shape) for x in (old, new, kept))
    assert (np.sort(wanted, axis=2) == np.sort(got, axis=2)).all(), "the same experts a rank"
    for layer in range(shape[0]):
        for rank in range(shape[1]):
            was, now = before[layer, rank].tolist(), got[layer, rank].tolist()
            stay = sum(min(was.count(x), now.count(x)) for x in set(was))
            assert sum(a == b for a, b in zip(was, now, strict=True)) == stay


def test_replicas_share_the_sending() -> None:
    """Expert 0 lies on ranks 0..3 and comes to ranks 4..7: each replica sends once."""
    old = ExpertPlacement(np.array([[0, 0, 0, 0, 1, 2, 3, 4]]), 5, 8)
    new = ExpertPlacement(np.array([[1, 2, 3, 4, 0, 0, 0, 0]]), 5, 8)
    plan = plan_migration(old, new, [100], max_staging_bytes=100, ranks_per_node=8)
    sources = [m.source for m in plan.batches[0].moves if m.expert == 0]
    assert sorted(sources) == [0, 1, 2, 3]
    assert plan.bytes_out.tolist() == [100] * 8 and plan.num_moved_slots == 8


def test_two_copies_on_one_rank_travel_once() -> None:
    old = ExpertPlacement(np.array([[0, 1, 2, 3]]), 4, 2)
    new = ExpertPlacement(np.array([[0, 1, 2, 3]]), 4, 2)
    assert plan_migration(old, new, [8], max_staging_bytes=0, ranks_per_node=2).batches == ()
    old = ExpertPlacement(np.array([[0, 0, 1, 1]]), 2, 2)
    new = ExpertPlacement(np.array([[1, 1, 0, 0]]), 2, 2)
    plan = plan_migration(old, new, [8], max_staging_bytes=8, ranks_per_node=2)
    assert [m.slots for m in plan.batches[0].moves] == [(0, 1), (2, 3)]
    assert plan.bytes_in.tolist() == [8, 8] and plan.num_moved_slots == 4


def test_a_layer_that_cannot_be_staged_says_what_it_needs() -> None:
    old = ExpertPlacement(np.array([[0, 1, 2, 3]] * 2), 4, 2)
    new = ExpertPlacement(np.array([[0, 1, 2, 3], [2, 3, 0, 1]]), 4, 2)
    with pytest.raises(StagingTooSmall, match=r"max_staging_bytes=19.*at least 20") as error:
        plan_migration(old, new, [10, 10], max_staging_bytes=19, ranks_per_node=1)
    assert (error.value.needed, error.value.layer) == (20, 1)
    needed = error.value.needed
    plan = plan_migration(old, new, [10, 10], max_staging_bytes=needed, ranks_per_node=1)
    assert plan.staging_bytes.tolist() == [20, 20]


def test_slots_that_only_become_empty_switch_without_a_move() -> None:
    old = ExpertPlacement(np.array([[0, 1, 1, 0]]), 2, 2)
    new = ExpertPlacement(np.array([[0, EMPTY, 1, EMPTY]]), 2, 2)
    plan = plan_migration(old, new, [10], max_staging_bytes=0, ranks_per_node=1)
    assert [(b.layers, b.moves) for b in plan.batches] == [((0,), ())]
    assert plan.num_moved_slots == 0 and plan.new.generation == old.generation + 1


@pytest.mark.parametrize(
    ("new", "word"),
    [
        (ExpertPlacement.trivial(2, 4, 2), "layers"),
        (ExpertPlacement.trivial(1, 4, 2, 2), "slots"),
        (ExpertPlacement.trivial(1, 4, 4), "ranks"),
        (ExpertPlacement(np.array([[0, 1, 2, 2]]), 3, 2), "logical experts"),
    ],
)
def test_placements_that_do_not_fit(new: ExpertPlacement, word: str) -> None:
    old = ExpertPlacement.trivial(1, 4, 2)
    with pytest.raises(MigrationError, match=word):
        plan_migration(old, new, [1], max_staging_bytes=9, ranks_per_node=1)


def test_bundle_sizes_and_nodes_must_fit() -> None:
    old = ExpertPlacement.trivial(1, 4, 2)
    with pytest.raises(MigrationError, match="bundle sizes"):
        plan_migration(old, old, [1, 1], max_staging_bytes=9, ranks_per_node=1)
    with pytest.raises(MigrationError, match="ranks_per_node=3"):
        plan_migration(old, old, [1], max_staging_bytes=9, ranks_per_node=3)
