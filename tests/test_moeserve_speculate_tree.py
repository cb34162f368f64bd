"""Draft trees and prompt lookup against plain ways to say the same."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve.request import Request, SamplingParams
from moeserve.sequence import Sequence
from moeserve.speculate.drafter import DraftAsk, Drafter, draw_children
from moeserve.speculate.ngram import NgramDrafter, follow, propose_slowly
from moeserve.speculate.tree import Candidate, DraftTree, best_nodes, chain, product_tree


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    num = draw(st.integers(0, 9))
    parents = tuple(draw(st.integers(-1, i - 1)) for i in range(num))
    taken: dict[int, set[int]] = {}
    tokens = []
    for parent in parents:
        free = sorted(set(range(12)) - taken.setdefault(parent, set()))
        tokens.append(draw(st.sampled_from(free)))
        taken[parent].add(tokens[-1])
    return DraftTree(tuple(tokens), parents)


@settings(max_examples=100, deadline=None)
@given(trees())
def test_rows_paths_and_mask_say_the_same(tree: DraftTree) -> None:
    mask = tree.ancestor_mask()
    assert mask.shape == (tree.num_rows, tree.num_rows)
    assert mask[:, 0].all() and not np.triu(mask, 1).any()
    for row in range(tree.num_rows):
        above = [j for j in range(1, tree.num_rows) if mask[row, j]]
        assert tuple(tree.tokens[j - 1] for j in above) == tree.paths[row]
        assert tree.depths[row] == len(tree.paths[row]) == mask[row].sum() - 1
        for node in tree.children[row]:
            assert tree.parents[node] == row - 1
            assert tree.child(row, tree.tokens[node]) == node
        assert tree.child(row, 99) is None
    assert len(set(tree.paths)) == tree.num_rows
    assert tree.positions(7).tolist() == [7 + d for d in tree.depths]
    assert sum(len(x) for x in tree.children) == tree.num_nodes


@settings(max_examples=100, deadline=None)
@given(trees(), st.integers(0, 4), st.frozensets(st.integers(0, 11), max_size=4))
def test_cutting_keeps_paths(tree: DraftTree, depth: int, stop_ids: frozenset[int]) -> None:
    got = set(tree.cut(depth, stop_ids).paths)
    wanted = {p for p in tree.paths if len(p) <= depth and not stop_ids & set(p[:-1])}
    assert got == wanted


@settings(max_examples=100, deadline=None)
@given(trees(), st.sets(st.integers(0, 8)))
def test_keeping_nodes_keeps_what_stands_on_kept_ones(tree: DraftTree, nodes: set[int]) -> None:
    one = np.full(12, 1 / 12)
    tree = DraftTree(tree.tokens, tree.parents, {r: one * (r + 1) for r in range(tree.num_rows)})
    kept = tree.keep(nodes)
    wanted = []
    for i in range(tree.num_nodes):
        at, whole = i, True
        while at >= 0:
            whole, at = whole and at in nodes, tree.parents[at]
        if whole:
            wanted.append(tree.paths[i + 1])
    assert list(kept.paths[1:]) == wanted
    for row, path in enumerate(kept.paths):
        assert kept.probs[row][0] == tree.probs[tree.paths.index(path)][0]


def test_chains() -> None:
    tree = chain([4, 5, 4])
    assert tree.is_chain and tree.depth == 3 and tree.paths[-1] == (4, 5, 4)
    assert np.array_equal(tree.ancestor_mask(), np.tril(np.ones((4, 4), bool)))
    assert chain([]).num_rows == 1 and chain([]).depth == 0 and chain([]).is_chain
    assert not DraftTree((1, 2), (-1, -1)).is_chain
    q = np.full(6, 1 / 6)
    assert set(chain([1, 2], [q, q]).probs) == {0, 1}
    assert set(chain([1, 2], [q, q]).cut(1).probs) == {0, 1}


def test_impossible_trees_are_refused() -> None:
    for tokens, parents in (((1,), (0,)), ((1, 1), (-1, -1)), ((1, 2), (-1,)), ((1,), (-2,))):
        with pytest.raises(AssertionError):
            DraftTree(tokens, parents)


# -- bounded trees --------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(-1, 5), st.floats(0, 1)), min_size=1, max_size=7),
    st.integers(0, 4),
)
def test_the_best_nodes_are_the_best_tree(drawn: list[tuple[int, float]], most: int) -> None:
    found = [Candidate(i, min(p, i - 1), c) for i, (p, c) in enumerate(drawn)]

    def reach(i: int) -> float:
        parent = found[i].parent
        return found[i].probability * (reach(parent) if parent >= 0 else 1.0)

    tree = best_nodes(found, most)
    assert tree.num_nodes == min(most, len(found))
    value = sum(reach(token) for token in tree.tokens)  # its token is its number
    sets = itertools.combinations(range(len(found)), tree.num_nodes)
    closed = [s for s in sets if all(found[i].parent in (-1, *s) for i in s)]
    assert value == pytest.approx(max(sum(reach(i) for i in s) for s in closed))
    for node, token in enumerate(tree.tokens):
        parent = tree.parents[node]
        assert (tree.tokens[parent] if parent >= 0 else -1) == found[token].parent


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.floats(0.01, 1), min_size=1, max_size=3), min_size=1, max_size=3),
    st.integers(1, 8),
)
def test_a_tree_of_independent_heads_is_the_best_part_of_their_product(
    chances: list[list[float]], most: int
) -> None:
    tops = [[(i, c) for i, c in enumerate(sorted(head, reverse=True))] for head in chances]
    tree = product_tree(tops, most)
    every = {}
    for depth in range(1, len(tops) + 1):
        for some in itertools.product(*tops[:depth]):
            every[tuple(t for t, _ in some)] = float(np.prod([c for _, c in some]))
    assert tree.num_nodes == min(most, len(every))
    best = sorted(every.values(), reverse=True)[: tree.num_nodes]
    assert sorted((every[p] for p in tree.paths[1:]), reverse=True) == pytest.approx(best)


def test_children_are_drawn_without_replacement() -> None:
    q = np.array([0.0, 0.5, 0.3, 0.2, 0.0])
    first = np.zeros(5)
    for seed in range(2000):
        tokens = draw_children(q, 2, seed, 4)
        assert len(set(tokens)) == 2 and not set(tokens) & {0, 4}
        first[tokens[0]] += 1
    assert np.abs(first / 2000 - q).max() < 0.04
    assert sorted(draw_children(q, 9, 1, 4)) == [1, 2, 3]
    assert draw_children(q, 3, 5, 4)[:2] == draw_children(q, 2, 5, 4)


# -- prompt lookup --------------------------------------------------------------------------------


def sequence(name: str, tokens: list[int]) -> Sequence:
    request = Request(
        request_id=name, prompt_token_ids=tuple(tokens), sampling=SamplingParams(max_tokens=500)
    )
    return Sequence(request, 0, 1000)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=30),
    st.lists(st.integers(0, 3), max_size=12),
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(1, 3),
)
def test_lookup_is_the_backward_search(
    prompt: list[int], output: list[int], k: int, shortest: int, more: int
) -> None:
    """Also while the sequence grows; another sequence is nothing to it."""
    drafter: Drafter = NgramDrafter(4, longest=shortest + more, shortest=shortest)
    one, other = sequence("a", prompt), sequence("b", [3, 2, 1, 0] * 4)
    for token in [*output, 0]:
        trees = drafter.propose([DraftAsk(other, k), DraftAsk(one, k)], 6)
        assert list(trees[1].tokens) == propose_slowly(one.tokens, k, shortest + more, shortest)
        assert trees[1].is_chain and not trees[1].probs
        drafter.settle(one, 0, trees[1].num_nodes)
        one.append(token)


def test_the_longest_and_latest_match_is_followed_and_periods_go_on() -> None:
    drafter = NgramDrafter(100, longest=3, shortest=1)

    def drafts(tokens: list[int], k: int = 4, depth: int = 8) -> list[int]:
        drafter.forget(["a"])
        return list(drafter.propose([DraftAsk(sequence("a", tokens), k)], depth)[0].tokens)

    assert drafts([1, 2, 3, 9, 2, 3, 7, 1, 2, 3]) == [9, 2, 3, 7]  # three tokens beat two
    assert drafts([2, 3, 9, 5, 2, 3, 7, 6, 2, 3], 2) == [7, 6]  # the later of two
    assert drafts([5, 5], 4) == [5, 5, 5, 5]
    assert drafts([1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]
    assert drafts([1, 2, 3]) == [] and drafts([1]) == []
    assert drafts([1, 2, 1], 0) == [] and drafts([1, 2, 3, 1], 4, depth=2) == [2, 3]
    assert drafts([1, 200, 1]) == []  # an id without a logit
    assert drafts([1, 2, 200, 1]) == [2]
    assert drafter.memory_bytes() > 0
    drafter.forget(["a", "unknown"])
    assert drafter.memory_bytes() == 0
    assert follow([1, 2], 0, 3) == [1, 2, 1]


def test_a_step_indexes_a_bounded_number_of_tokens() -> None:
    drafter = NgramDrafter(10_000, longest=2, shortest=2, index_per_step=100)
    one, other = sequence("a", [*range(1000), 0, 1]), sequence("b", [7, 8, 9, 7, 8])
    ask, late = DraftAsk(one, 3), DraftAsk(other, 3)
    assert drafter.propose([late, ask], 8)[0].tokens == (9, 7, 8)
    assert drafter._indices["a"].num_indexed == 96
    assert drafter.propose([ask], 8)[0].tokens == (2, 3, 4)  # the front is known already
    steps = 2
    while drafter._indices["a"].num_indexed < 1001:
        drafter.propose([ask], 8)
        steps += 1
    assert steps == 11
    drafter.propose([DraftAsk(one, 0)], 8)  # only keeps up
