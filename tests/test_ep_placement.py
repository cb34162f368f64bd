"""ExpertPlacement: its invariants for any number of redundant slots; refusals that help."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ep.placement import ExpertPlacement, PlacementError, valid_redundant_experts


@st.composite
def placements(draw: st.DrawFn) -> ExpertPlacement:
    layers = draw(st.integers(1, 3))
    experts = draw(st.integers(1, 12))
    ranks = draw(st.integers(1, 6))
    redundant = -experts % ranks + ranks * draw(st.integers(0, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = []
    for _ in range(layers):
        extra = rng.integers(0, experts, size=redundant)
        rows.append(rng.permutation(np.concatenate([np.arange(experts), extra])))
    generation = draw(st.integers(0, 5))
    return ExpertPlacement.from_physical_to_logical(np.array(rows), ranks, experts, generation)


@given(placements())
@settings(max_examples=150, deadline=None)
def test_tables_say_the_same_in_both_directions(p: ExpertPlacement) -> None:
    table, back, counts = p.physical_to_logical, p.logical_to_physical, p.replica_count
    assert table.dtype == back.dtype == counts.dtype == np.int64
    assert back.shape == (p.num_layers, p.num_logical_experts, counts.max())
    assert (counts.sum(axis=1) == p.num_physical_experts).all() and (counts >= 1).all()
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
def test_trivial_spreads_copies_or_names_the_nearest_valid(
    experts: int, ranks: int, redundant: int
) -> None:
    if (experts + redundant) % ranks:
        with pytest.raises(PlacementError, match="nearest valid") as error:
            ExpertPlacement.trivial(1, experts, ranks, redundant)
        below, above = valid_redundant_experts(experts, ranks, redundant)
        valid = [n for n in range(redundant + ranks + 1) if (experts + n) % ranks == 0]
        assert below == max((n for n in valid if n < redundant), default=None)
        assert above == min(n for n in valid if n > redundant)
        assert str(above) in str(error.value)
        return
    p = ExpertPlacement.trivial(1, experts, ranks, redundant)
    assert p.replica_count.max() - p.replica_count.min() <= 1
    for expert in range(experts):
        hosts = [p.rank_of(s) for s in p.logical_to_physical[0, expert].tolist() if s >= 0]
        assert len(set(hosts)) == min(len(hosts), ranks)


@pytest.mark.parametrize(
    ("experts", "ranks", "redundant", "valid"),
    [
        (256, 3, 0, "2 (none below)"),
        (256, 12, 0, "8 (none below)"),
        (256, 320, 0, "64 (none below)"),
        (256, 320, 70, "64 or 384"),
        (256, 3, 10, "8 or 11"),
    ],
)
def test_the_refusal_does_the_arithmetic(
    experts: int, ranks: int, redundant: int, valid: str
) -> None:
    with pytest.raises(PlacementError) as error:
        ExpertPlacement.trivial(1, experts, ranks, redundant)
    message = str(error.value)
    assert message.endswith(f"nearest valid numbers of redundant experts: {valid}")
    assert f"num_redundant={redundant}" in message and f"{ranks} ranks" in message


@pytest.mark.parametrize(
    ("table", "ranks", "experts", "says"),
    [
        ([[0, 1, 2, 0]], 2, 4, "experts without a slot: [3]"),
        ([[0, 1, 2, 4]], 2, 4, "physical_to_logical[0, 3]=4"),
        ([[0, 1, -1, 1]], 2, 2, "physical_to_logical[0, 2]=-1"),
        ([[0, 1, 1]], 2, 2, "nearest valid"),
        ([[0, 1]], 1, 3, "2 slots cannot hold 3 experts"),
        ([[0, 1], [0, 1, 1]], 1, 2, "physical_to_logical"),
        ([[0.0, 1.0]], 1, 2, "float64"),
        ([0, 1], 1, 2, "[layers, slots]"),
        ([[]], 1, 1, "[layers, slots]"),
        ([[0, 1]], 0, 2, "num_ranks=0"),
    ],
)
def test_a_given_table_is_checked(table: list, ranks: int, experts: int, says: str) -> None:
    with pytest.raises(PlacementError) as error:
        ExpertPlacement.from_physical_to_logical(table, ranks, experts)
    assert says in str(error.value)


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
        ({"num_ranks": 5}, "nearest valid"),
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
