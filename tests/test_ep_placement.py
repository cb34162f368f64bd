"""ExpertPlacement: its invariants for any number of redundant slots; refusals that help."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ep.placement import EMPTY, ExpertPlacement, PlacementError


@st.composite
def placements(draw: st.DrawFn) -> ExpertPlacement:
    layers = draw(st.integers(1, 3))
    experts = draw(st.integers(1, 12))
    ranks = draw(st.integers(1, 6))
    redundant = draw(st.integers(0, 20))
    # Empty slots anywhere: what makes them divide, and now and then a rank's worth more.
    empty = -(experts + redundant) % ranks + ranks * draw(st.integers(0, 1))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = []
    for _ in range(layers):
        extra = rng.integers(0, experts, size=redundant)
        parts = [np.arange(experts), extra, np.full(empty, EMPTY)]
        rows.append(rng.permutation(np.concatenate(parts)))
    generation = draw(st.integers(0, 5))
    return ExpertPlacement.from_physical_to_logical(np.array(rows), ranks, experts, generation)


@given(placements())
@settings(max_examples=150, deadline=None)
def test_tables_say_the_same_in_both_directions(p: ExpertPlacement) -> None:
    table, back, counts = p.physical_to_logical, p.logical_to_physical, p.replica_count
    assert table.dtype == back.dtype == counts.dtype == np.int64
    assert back.shape == (p.num_layers, p.num_logical_experts, counts.max())
    hosting = p.num_logical_experts + p.num_redundant_experts
    assert hosting + p.num_empty_slots == p.num_physical_experts
    assert (counts.sum(axis=1) == hosting).all() and (counts >= 1).all()
    assert ((table == EMPTY).sum(axis=1) == p.num_empty_slots).all()
    for layer in range(p.num_layers):
        for expert in range(p.num_logical_experts):
            slots = [s for s in back[layer, expert].tolist() if s >= 0]
            assert len(slots) == counts[layer, expert]
            assert slots == np.flatnonzero(table[layer] == expert).tolist()
            assert (back[layer, expert, len(slots) :] == -1).all()


@given(placements())
@settings(max_examples=60, deadline=None)
def test_each_slot_has_one_rank(p: ExpertPlacement) -> None:
    owned = [slot for rank in range(p.num_ranks) for slot in p.slots_of(rank)]
    assert owned == list(range(p.num_physical_experts))
    for rank in range(p.num_ranks):
        assert all(p.rank_of(slot) == rank for slot in p.slots_of(rank))
        for layer in range(p.num_layers):
            expected = [p.physical_to_logical[layer, s] for s in p.slots_of(rank)]
            assert p.experts_of(rank, layer) == expected


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 90))
@settings(max_examples=200, deadline=None)
def test_trivial_takes_any_numbers(experts: int, ranks: int, redundant: int) -> None:
    p = ExpertPlacement.trivial(2, experts, ranks, redundant)
    assert p.num_redundant_experts == redundant
    assert p.num_local_experts == -(-(experts + redundant) // ranks)
    assert p.num_physical_experts == p.num_local_experts * ranks
    assert p.num_empty_slots == p.num_physical_experts - experts - redundant < ranks
    assert p.replica_count.max() - p.replica_count.min() <= 1 and p.replica_count.min() >= 1
    hosted = [[e for e in p.experts_of(rank, 1) if e != EMPTY] for rank in range(ranks)]
    sizes = [len(experts_here) for experts_here in hosted]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1
    for rank in range(ranks):  # an empty slot is the last of its rank
        assert p.experts_of(rank, 1)[: sizes[rank]] == hosted[rank]
        # No rank holds two copies of an expert unless it hosts more slots than there are experts.
        assert len(set(hosted[rank])) == min(sizes[rank], experts)
    for expert in range(experts):
        hosts = [p.rank_of(s) for s in p.logical_to_physical[0, expert].tolist() if s >= 0]
        assert len(set(hosts)) == min(len(hosts), ranks)


@pytest.mark.parametrize(
    ("experts", "ranks", "redundant", "local", "empty"),
    [
        (256, 3, 0, 86, 2),
        (256, 12, 0, 22, 8),
        (256, 12, 5, 22, 3),
        (256, 320, 0, 1, 64),  # ranks without an expert
        (256, 320, 70, 2, 314),
        (32, 2, 3, 18, 1),
        (32, 4, 3, 9, 1),
        (32, 3, 0, 11, 1),
        (32, 4, 32, 16, 0),
    ],
)
def test_known_sizes(experts: int, ranks: int, redundant: int, local: int, empty: int) -> None:
    p = ExpertPlacement.trivial(1, experts, ranks, redundant)
    found = (p.num_local_experts, p.num_empty_slots, p.num_redundant_experts)
    assert found == (local, empty, redundant)
    assert f"redundant={redundant}, empty={empty}" in repr(p)


def test_where_the_empty_slots_are() -> None:
    p = ExpertPlacement.trivial(1, 5, 3, 2)  # 7 hosted slots over 3 ranks: 3, 2 and 2
    assert p.physical_to_logical.tolist() == [[0, 1, 2, 3, 4, EMPTY, 0, 1, EMPTY]]
    few = ExpertPlacement.trivial(1, 2, 4)
    assert few.physical_to_logical.tolist() == [[0, 1, EMPTY, EMPTY]]
    assert few.experts_of(3, 0) == [EMPTY] and few.logical_to_physical.tolist() == [[[0], [1]]]


def test_a_given_table_gets_the_empty_slots_it_lacks() -> None:
    """As a trivial one does, from an array or a file; slots that are marked empty stay where they
    are, and layers may differ in how many they have."""
    p = ExpertPlacement.from_physical_to_logical([[2, 1, 0], [0, 1, 2]], 2)
    assert p.physical_to_logical.tolist() == [[2, 1, 0, EMPTY], [0, 1, 2, EMPTY]]
    q = ExpertPlacement.from_physical_to_logical([[-1, 1, 0, -1], [0, 1, -1, 1]], 2)
    assert (q.num_redundant_experts, q.num_empty_slots, q.num_logical_experts) == (1, 1, 2)
    assert q.replica_count.tolist() == [[1, 1], [1, 2]]
    assert q.logical_to_physical.tolist() == [[[2, -1], [1, -1]], [[0, -1], [1, 3]]]


@pytest.mark.parametrize(
    ("table", "ranks", "experts", "says"),
    [
        ([[0, 1, 2, 0]], 2, 4, "experts without a slot: [3]"),
        ([[0, 1, 2, 4]], 2, 4, "physical_to_logical[0, 3]=4"),
        (
            [[0, 1, -2, 1]],
            2,
            2,
            "physical_to_logical[0, 2]=-2: not an expert; valid are 0..1 and -1",
        ),
        ([[0, -1, -1, -1]], 2, 2, "experts without a slot: [1]"),
        ([[-1, -1]], 2, None, "num_experts=0"),
        ([[0, 1]], 1, 3, "2 slots cannot hold 3 experts"),
        ([[0, 1], [0, 1, 1]], 1, 2, "physical_to_logical"),
        ([[0.0, 1.0]], 1, 2, "float64"),
        ([0, 1], 1, 2, "[layers, slots]"),
        ([[]], 1, 1, "[layers, slots]"),
        ([[0, 1]], 0, 2, "num_ranks=0"),
    ],
)
def test_a_given_table_is_checked(table: list, ranks: int, experts: int | None, says: str) -> None:
    with pytest.raises(PlacementError) as error:
        ExpertPlacement.from_physical_to_logical(table, ranks, experts)
    assert says in str(error.value)


def test_slots_that_do_not_divide_are_refused_by_the_constructor() -> None:
    with pytest.raises(PlacementError, match="3 slots do not divide by 2 ranks; 4 would: .* -1"):
        ExpertPlacement(np.array([[0, 1, 1]]), 2, 2)


def test_frozen_to_the_last_element() -> None:
    given_table = np.array([[0, 1, 1, 0]])
    p = ExpertPlacement.from_physical_to_logical(given_table, 2)
    given_table[0, 0] = 1
    assert p.physical_to_logical[0, 0] == 0
    for array in (p.physical_to_logical, p.logical_to_physical, p.replica_count):
        with pytest.raises(ValueError, match="read-only"):
            array[0, 0] = 1
    with pytest.raises(AttributeError):
        p.generation = 3  # type: ignore[misc]


@given(placements(), st.sampled_from([".json", ".npz"]))
@settings(max_examples=30, deadline=None)
def test_files_bring_back_the_same(tmp_path_factory, p: ExpertPlacement, ending: str) -> None:
    path = tmp_path_factory.mktemp("placement") / f"p{ending}"
    p.save(path)
    q = ExpertPlacement.load(path)
    assert q == p and hash(q) == hash(p) and q.generation == p.generation
    assert (q.physical_to_logical == p.physical_to_logical).all()


def test_files_that_are_not_placements_are_refused(tmp_path) -> None:
    good = ExpertPlacement.trivial(2, 4, 2, 2)
    path = tmp_path / "p.json"
    good.save(path)
    head = json.loads(path.read_text())
    for change, says in (
        ({"version": 2}, "version=2"),
        ({"format": "x"}, "format='x'"),
        ({"num_ranks": "2"}, "num_ranks='2'"),
        ({"num_ranks": 0}, "num_ranks=0: valid are 1..65536"),
        ({"num_ranks": 10**12}, "num_ranks=1000000000000"),
        ({"num_logical_experts": 10**12}, "cannot hold 1000000000000 experts"),
        ({"physical_to_logical": [[0, 1, 2, 9, 3, 3]]}, "[0, 3]=9"),
        ({"physical_to_logical": "abc"}, "physical_to_logical"),
    ):
        path.write_text(json.dumps({**head, **change}))
        with pytest.raises(PlacementError) as error:
            ExpertPlacement.load(path)
        assert says in str(error.value) and "p.json" in str(error.value)
    for name, content in (
        ("a.json", b"{"),
        ("b.json", b"[]"),
        ("c.json", b"\xff"),
        ("d.npz", b""),
        ("e.npz", b"PK\x03\x04 truncated"),
        ("f.txt", b""),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(PlacementError, match=name):
            ExpertPlacement.load(tmp_path / name)
    path.write_text(json.dumps({**head, "num_ranks": 5}))
    assert ExpertPlacement.load(path).num_empty_slots == 4
    with pytest.raises(FileNotFoundError):
        ExpertPlacement.load(tmp_path / "none.json")


def test_a_damaged_archive_is_refused_wherever_the_damage_is(tmp_path: Path) -> None:
    path = tmp_path / "p.npz"
    good = ExpertPlacement.trivial(4, 16, 2, 4)
    good.save(path)
    raw = path.read_bytes()
    refused = 0
    for seed in range(300):
        place, by = np.random.default_rng(seed).integers((len(raw), 256))
        damaged = bytearray(raw)
        damaged[place] = by
        path.write_bytes(damaged)
        try:
            ExpertPlacement.load(path)  # some bytes of a zip file mean nothing
        except PlacementError as error:
            refused += 1
            assert "p.npz" in str(error) and "\n" not in str(error)
    assert refused > 100


def test_diff_names_each_changed_slot() -> None:
    a = ExpertPlacement.from_physical_to_logical([[0, 1, 2, 0], [0, 1, 2, 1]], 2)
    b = ExpertPlacement.from_physical_to_logical([[0, 1, 2, 1], [2, 1, 0, 1]], 2, generation=1)
    d = a.diff(b)
    filled = ExpertPlacement.trivial(1, 3, 2).diff(ExpertPlacement.trivial(1, 3, 2, 1))
    assert (filled.slots.tolist(), filled.before.tolist(), filled.after.tolist()) == (
        [3],
        [-1],
        [0],
    )
    rows = list(zip(*(x.tolist() for x in (d.layers, d.slots, d.before, d.after)), strict=True))
    assert rows == [(0, 3, 0, 1), (1, 0, 0, 2), (1, 2, 2, 0)] and len(d) == 3
    assert len(a.diff(a.with_generation(7))) == 0
    with pytest.raises(PlacementError, match="diff"):
        a.diff(ExpertPlacement.trivial(2, 4, 2))


def test_equality_is_of_everything_that_ranks_must_agree_on() -> None:
    a = ExpertPlacement.trivial(2, 4, 2, 2)
    assert a == ExpertPlacement.trivial(2, 4, 2, 2)
    others = [
        a.with_generation(1),
        ExpertPlacement.trivial(2, 4, 3, 2),
        ExpertPlacement.trivial(1, 4, 2, 2),
        ExpertPlacement.from_physical_to_logical([[0, 1, 2, 3, 1, 0]] * 2, 2),
    ]
    assert len({a, *others}) == 5
    assert a != "a placement"


def test_out_of_range_questions_are_refused() -> None:
    p = ExpertPlacement.trivial(2, 4, 2)
    for ask in (
        lambda: p.slots_of(2),
        lambda: p.slots_of(-1),
        lambda: p.rank_of(4),
        lambda: p.experts_of(0, 2),
        lambda: ExpertPlacement.trivial(0, 4, 2),
        lambda: ExpertPlacement.trivial(1, 4, 2, -2),
        lambda: p.with_generation(-1),
        lambda: p.save("p.txt"),
    ):
        with pytest.raises(PlacementError):
            ask()
