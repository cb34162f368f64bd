"""The choice of a rank: prefix, then load, bounded imbalance; and the block names it rests on."""

from __future__ import annotations

import subprocess
import sys

from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve.cache.block_hash import ROOT, block_hash, block_hashes
from moeserve.router import FREE_IMBALANCE, REQUEST_COST, PrefixIndex, RankLoad, choose_rank


def pick(*loads: tuple[int, int]) -> int:
    return choose_rank([RankLoad(r, load, cached) for r, (load, cached) in enumerate(loads)]).rank


def test_longest_prefix_then_load_then_number() -> None:
    assert pick((0, 0), (0, 0), (0, 0)) == 0
    assert pick((10, 0), (0, 0), (0, 0)) == 1
    assert pick((0, 0), (100, 64)) == 1
    assert pick((0, 32), (50, 64)) == 1
    assert pick((50, 64), (0, 64)) == 1
    assert pick((50, 64), (50, 64)) == 0


def test_a_prefix_does_not_bury_a_rank() -> None:
    assert pick((0, 0), (FREE_IMBALANCE + 64, 64)) == 1
    assert pick((0, 0), (FREE_IMBALANCE + 65, 64)) == 0


loads = st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 500)), min_size=1, max_size=12)


@given(loads)
def test_excess_load_of_the_choice_is_bounded(values: list[tuple[int, int]]) -> None:
    rank = pick(*values)
    least = min(x[0] for x in values)
    mean = sum(x[0] for x in values) / len(values)
    load, cached = values[rank]
    assert load - least <= cached + max(FREE_IMBALANCE, mean / 4)
    if cached == 0:
        assert load == least


def test_one_popular_prompt_spreads_over_all_ranks() -> None:
    load, index, hashes = [0] * 4, PrefixIndex(4), block_hashes(range(512), 16)
    for _ in range(100):
        choice = choose_rank(
            [RankLoad(r, load[r], 16 * index.prefix_blocks(r, hashes)) for r in range(4)]
        )
        load[choice.rank] += 512 + REQUEST_COST
        index.expect(choice.rank, hashes)
    assert max(load) <= 1.25 * sum(load) / 4 + 512 + FREE_IMBALANCE
    assert min(load) > 0


def test_index_follows_events_and_requests_in_flight() -> None:
    index, hashes = PrefixIndex(2), block_hashes(range(64), 16)
    assert index.prefix_blocks(0, hashes) == 0
    index.changed(0, hashes[:3], (), False)
    assert (index.prefix_blocks(0, hashes), index.prefix_blocks(1, hashes)) == (3, 0)
    index.changed(0, (), hashes[1:2], False)  # a hole: what lies behind it does not count
    assert index.prefix_blocks(0, hashes) == 1
    index.changed(0, hashes[1:2], hashes[1:2], False)
    assert index.prefix_blocks(0, hashes) == 3
    index.changed(0, (), (), True)
    assert index.prefix_blocks(0, hashes) == 0 and index.num_cached(0) == 0
    index.expect(1, hashes)
    index.expect(1, hashes)
    index.unexpect(1, hashes)
    assert index.prefix_blocks(1, hashes) == 4
    index.unexpect(1, hashes)
    assert index.prefix_blocks(1, hashes) == 0


@settings(max_examples=50)
@given(st.lists(st.integers(0, 200_000), max_size=40), st.integers(1, 9), st.text(max_size=5))
def test_block_names_are_chains_of_full_blocks(ids: list[int], size: int, salt: str) -> None:
    hashes = block_hashes(ids, size, salt)
    assert len(hashes) == len(ids) // size
    assert all(0 <= x < 2**63 for x in hashes) and len(set(hashes)) == len(hashes)
    parent = ROOT
    for number, value in enumerate(hashes):
        parent = block_hash(parent, ids[number * size : (number + 1) * size], salt)
        assert parent == value
    if hashes:
        assert block_hashes(ids, size, salt + "x")[0] != hashes[0]


def test_block_names_are_equal_in_every_process() -> None:
    code = "from moeserve.cache.block_hash import block_hash as h; print(h(7, [1, 2, 3], 's'))"
    values = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert values == {str(block_hash(7, [1, 2, 3], "s"))} == {"3187076981021744808"}
