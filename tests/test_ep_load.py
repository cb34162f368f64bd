"""LoadWindow counts what it is given, over the last steps; balancedness against a slow count."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ep.load import DECODE, WINDOW_BYTES, LoadWindow, balancedness, load_of_ranks
from ep.placement import ExpertPlacement


@given(
    st.integers(1, 9),
    st.integers(1, 5),
    st.lists(st.integers(0, 10**6), max_size=30),
    st.integers(1, 5),
)
@settings(max_examples=120, deadline=None)
def test_the_window_is_the_last_steps_in_buckets(
    num_steps: int, buckets: int, seeds: list[int], stride: int
) -> None:
    """Against a list of all steps: which ones are covered, their sums, their history."""
    load = LoadWindow(2, 3, num_steps, max_bytes=buckets * 2 * 2 * 3 * 4)
    assert load.num_buckets <= buckets or load.num_buckets == 1
    every: list[np.ndarray] = []
    for i, seed in enumerate(seeds):
        every.append(np.random.default_rng(seed).integers(0, 9, (2, 2, 3)))
        load.add(every[-1], i * stride)
        covered = load.steps
        full = min(i + 1, num_steps)
        assert abs(full - covered) < load.bucket_steps
        assert load.step_range == ((i + 1 - covered) * stride, i * stride)
        last = every[-covered:]
        assert (load.totals_by_phase() == np.sum(last, axis=0)).all()
        assert (load.totals() == np.sum(last, axis=(0, 1))).all()
        history = load.history("decode")
        assert len(history) == -(-covered // load.bucket_steps)
        assert (history.sum(axis=0) == np.sum(last, axis=0)[DECODE]).all()
        assert (load.history()[0] == np.sum(last[: load.bucket_steps], axis=(0, 1))).all()
    load.reset()
    assert load.totals().sum() == 0 and load.steps == 0 and load.step_range is None
    assert load.history().shape == (0, 2, 3)


def test_memory_is_bounded_whatever_is_added() -> None:
    load = LoadWindow(58, 256, 1000)
    assert load.nbytes <= WINDOW_BYTES + 58 * 256 * 2 * 8
    assert load.bucket_steps == 8 and load.num_buckets == 125
    before = load.nbytes
    counts = np.ones((2, 58, 256), np.int64)
    for step in range(5):
        load.add(counts, step)
    assert load.nbytes == before
    assert LoadWindow(4, 32, 256).bucket_steps == 1  # small ones keep every step


def test_totals_and_history_are_copies() -> None:
    load = LoadWindow(1, 2, 3)
    load.add(np.zeros((2, 1, 2), int), 1)
    load.totals()[0, 0] = 9
    load.totals("decode")[0, 0] = 9
    load.totals_by_phase()[0, 0, 0] = 9
    load.history("prefill")[0, 0, 0] = 9
    assert load.totals().sum() == 0 and load.history().sum() == 0


@pytest.mark.parametrize("sizes", [(0, 1, 1, 1), (1, 0, 1, 1), (1, 1, 0, 1), (1, 1, 1, 0)])
def test_sizes_are_checked(sizes: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="=0: must be at least 1"):
        LoadWindow(*sizes[:3], max_bytes=sizes[3])


def test_wrong_counts_are_refused() -> None:
    load = LoadWindow(2, 3, 1)
    with pytest.raises(ValueError, match=r"must be \(2, 2, 3\)"):
        load.add(np.zeros((2, 3), int), 0)
    load.add(np.zeros((2, 2, 3), int), 5)
    with pytest.raises(ValueError, match="step=5: must be above 5"):
        load.add(np.zeros((2, 2, 3), int), 5)
    with pytest.raises(ValueError, match="phase='both': valid are prefill, decode"):
        load.totals("both")
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
