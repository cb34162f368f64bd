"""LoadWindow counts what it is given, over the last steps; balancedness against a slow count."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ep.load import LoadWindow, balancedness, load_of_ranks
from ep.placement import ExpertPlacement


@given(st.integers(1, 4), st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=12))
@settings(max_examples=80, deadline=None)
def test_totals_are_the_last_complete_steps(window: int, steps: list[list[int]]) -> None:
    load = LoadWindow(num_layers=2, num_experts=3, num_steps=window)
    history = []
    for step in steps:
        counts = np.zeros((2, 3), dtype=np.int64)
        for i, number in enumerate(step):
            row = np.array([number, i, 1])
            load.add(i % 2, row)
            counts[i % 2] += row
        history.append(counts)
        load.roll()
    expected = sum(history[-window:], np.zeros((2, 3), dtype=np.int64))
    assert (load.totals() == expected).all()
    assert load.steps == min(len(steps), window)


def test_nothing_is_counted_while_disabled() -> None:
    load = LoadWindow(1, 2, 3)
    load.enabled = False
    load.add(0, [5, 5])
    load.roll()
    assert load.totals().sum() == 0 and load.steps == 0
    load.enabled = True
    load.add(0, [1, 0])
    load.roll()
    assert load.totals().tolist() == [[1, 0]] and load.steps == 1
    load.reset()
    assert load.totals().sum() == 0 and load.steps == 0


def test_totals_are_a_copy() -> None:
    load = LoadWindow(1, 2, 3)
    load.totals()[0, 0] = 9
    assert load.totals().sum() == 0


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_sizes_are_checked(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="=0: must be at least 1"):
        LoadWindow(*sizes)


def test_wrong_counts_are_refused() -> None:
    load = LoadWindow(2, 3, 1)
    with pytest.raises(ValueError, match="layer=2"):
        load.add(2, [1, 2, 3])
    with pytest.raises(ValueError, match=r"must be \(3,\)"):
        load.add(0, [1, 2])
    with pytest.raises(ValueError, match="totals"):
        balancedness(np.zeros((1, 3)), ExpertPlacement.trivial(2, 3, 3))


def test_load_of_ranks_splits_over_replicas() -> None:
    p = ExpertPlacement.from_physical_to_logical([[0, 1, 0, 2]], 2)
    ranks = load_of_ranks([[8, 3, 5]], p)
    assert ranks.tolist() == [[4 + 3, 4 + 5]]
    assert balancedness([[8, 3, 5]], p).tolist() == [9 / 8]
    assert balancedness([[0, 0, 0]], p).tolist() == [1.0]


def test_empty_slots_have_no_load() -> None:
    p = ExpertPlacement.from_physical_to_logical([[0, 1, 0, -1, 2, -1]], 3)
    assert load_of_ranks([[8, 3, 50]], p).tolist() == [[4 + 3, 4, 50]]
    idle = ExpertPlacement.trivial(1, 2, 4)  # two ranks host nothing
    assert load_of_ranks([[6, 2]], idle).tolist() == [[6, 2, 0, 0]]
    assert balancedness([[6, 2]], idle).tolist() == [3.0]


@given(st.integers(1, 9), st.integers(1, 7), st.integers(0, 12), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_no_token_is_lost_between_ranks(
    experts: int, ranks: int, redundant: int, seed: int
) -> None:
    p = ExpertPlacement.trivial(2, experts, ranks, redundant)
    totals = np.random.default_rng(seed).integers(0, 50, (2, experts))
    loads = load_of_ranks(totals, p)
    assert loads.shape == (2, ranks) and np.allclose(loads.sum(axis=1), totals.sum(axis=1))
