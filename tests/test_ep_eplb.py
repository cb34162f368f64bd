"""The EPLB-equivalent policy against a slow, obvious twin; greedy replication and packing."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ep.planning.eplb import eplb_tables
from ep.planning.pack import pack_heaviest_first
from ep.planning.replicate import add_replicas, balance_bound

F = np.float32


def slow_pack(weights: list[F], packs: int) -> list[list[int]]:
    """Items of each pack, in the order they came."""
    room = len(weights) // packs
    if room == 1:
        return [[i] for i in range(packs)]
    held: list[list[int]] = [[] for _ in range(packs)]
    load = [F(0)] * packs
    for item in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        open_packs = [p for p in range(packs) if len(held[p]) < room]
        lightest = min(open_packs, key=lambda p: (load[p], p))
        held[lightest].append(item)
        load[lightest] = F(load[lightest] + weights[item])
    return held


def slow_replicas(weights: list[F], slots: int) -> list[int]:
    """Expert of each slot."""
    order = list(range(len(weights)))
    counts = Counter(order)
    while len(order) < slots:
        chosen = max(range(len(weights)), key=lambda e: (F(weights[e] / F(counts[e])), -e))
        order.append(chosen)
        counts[chosen] += 1
    return order


def slow_eplb(loads: list[float], slots: int, groups: int, nodes: int, gpus: int) -> list[int]:
    """Expert of each slot of one layer: groups to nodes, copies in nodes, copies to GPUs."""
    if groups % nodes:
        groups = nodes = 1
    weights = [F(x) for x in loads]
    size = len(weights) // groups
    members = [list(range(g * size, (g + 1) * size)) for g in range(groups)]
    totals = [F(sum(float(weights[e]) for e in m)) for m in members]
    table: list[int] = []
    for node in slow_pack(totals, nodes):
        experts = [e for group in node for e in members[group]]
        inside = [weights[e] for e in experts]
        order = slow_replicas(inside, slots // nodes)
        counts = Counter(order)
        share = [F(inside[e] / F(counts[e])) for e in order]
        for gpu in slow_pack(share, gpus // nodes):
            table += [experts[order[item]] for item in gpu]
    return table


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, int, int, int, int]:
    nodes = draw(st.integers(1, 3))
    gpus = nodes * draw(st.integers(1, 4))
    groups = draw(st.sampled_from([nodes, 2 * nodes, 1, 2]))
    experts = groups * draw(st.integers(1, 5))
    least = -(-experts // gpus)
    slots = gpus * (least + draw(st.integers(0, 3)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    many_ties = draw(st.booleans())
    shape = (draw(st.integers(1, 3)), experts)
    loads = rng.integers(0, 5, shape) if many_ties else rng.lognormal(3, 1, shape)
    return loads.astype(np.float64), slots, groups, nodes, gpus


@given(cases())
@settings(max_examples=150, deadline=None)
def test_same_table_as_the_slow_twin(case: tuple[np.ndarray, int, int, int, int]) -> None:
    loads, slots, groups, nodes, gpus = case
    table, copy = eplb_tables(loads, slots, groups, nodes, gpus)
    expected = [slow_eplb(layer.tolist(), slots, groups, nodes, gpus) for layer in loads]
    assert table.tolist() == expected
    for layer in range(len(loads)):
        for expert in range(loads.shape[1]):
            mine = np.sort(copy[layer][table[layer] == expert])
            assert mine.tolist() == list(range(len(mine)))


def test_a_wrong_tie_is_caught_by_the_twin() -> None:
    loads = np.array([[1.0, 1.0, 1.0, 1.0]])
    table, _ = eplb_tables(loads, 6, 1, 1, 2)
    reversed_ties, _ = eplb_tables(loads[:, ::-1], 6, 1, 1, 2)
    expected = slow_eplb(loads[0].tolist(), 6, 1, 1, 2)
    assert table[0].tolist() == expected
    assert (3 - reversed_ties[0]).tolist() != expected


def test_packing_takes_equal_counts_even_of_nothing() -> None:
    pack, place = pack_heaviest_first(np.zeros((2, 12)), 4)
    for row in range(2):
        assert np.bincount(pack[row]).tolist() == [3, 3, 3, 3]
        assert len({*zip(pack[row], place[row], strict=True)}) == 12


@pytest.mark.parametrize("limit", [None, 3])
def test_replication_makes_the_largest_share_least(limit: int | None) -> None:
    weights = np.array([[8.0, 4.0, 2.0, 1.0]])
    counts, order = add_replicas(weights, 9, limit)
    assert counts.tolist() == ([[5, 2, 1, 1]] if limit is None else [[3, 3, 2, 1]])
    assert np.bincount(order[0]).tolist() == counts[0].tolist()
    # The bound by trying every M that could be the least.
    for m in sorted(w / c for w in weights[0] for c in range(1, 10)):
        if np.ceil(weights[0] / m - 1e-12).sum() <= 9:
            break
    mean = weights.sum() / 3
    assert balance_bound(weights, 9, 3)[0] == pytest.approx(max(m / mean, 1.0))
