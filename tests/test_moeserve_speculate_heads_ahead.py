"""Heads whose drafts are chosen where their logits are draft what they draft on the host, ties
included; the host waits once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from heads_world import GREEDY, MOST, RANDOM, D, V, asks, eagle_asks, eagles, medusas, whole
from speculate_world import pick_there

from models import crossing
from moeserve.speculate import eagle_drafter, medusa
from moeserve.speculate.drafter import DraftAsk
from moeserve.speculate.likeliest import likeliest
from moeserve.speculate.medusa import MedusaDrafter, MedusaHead
from moeserve.speculate.tree import DraftTree
from moeserve.speculate.verify import Rule


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Each time that something is brought over."""
    found: list[int] = []

    def counted(parts: Any) -> Any:
        found.append(len(parts))
        return crossing.brought(parts)

    for home in (medusa, eagle_drafter):
        monkeypatch.setattr(home, "brought", counted)
    return found


@pytest.mark.parametrize("width", [1, 5, 60])
def test_of_equal_probabilities_the_lowest_id_comes_first(width: int) -> None:
    probs = torch.softmax(whole(9, V, seed=width), dim=-1)
    probs[3] = float("nan")
    want = [sorted(range(V), key=lambda t: (-row[t], t))[:width] for row in probs.tolist()]
    values, ids = likeliest(probs.clone(), width)
    sound = [row for row in range(9) if row != 3]
    assert [ids[row].tolist() for row in sound] == [want[row] for row in sound]
    assert torch.equal(values[sound], torch.gather(probs, 1, ids)[sound])
    assert values[3].tolist() == [0.0] * min(width, V) and len(set(ids[3].tolist())) == len(ids[3])


# -- Medusa ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 4, 9])
def test_medusas_chains_are_those_of_the_host(depth: int, looks: list[int]) -> None:
    lengths = set()
    for seed in range(6):
        host, there = medusas(seed)
        want = host.propose(asks(seed), depth)
        assert not looks
        assert there.propose(asks(seed), depth) == want
        assert len(looks) == 1
        looks.clear()
        lengths |= {tree.num_nodes for tree in want}
    assert lengths == {0, *(min(most, depth, 4) for most in MOST)}


def test_medusas_chain_ends_before_a_row_without_a_token() -> None:
    heads = [MedusaHead((), whole(V, D, seed=i)) for i in range(4)]
    for head in heads:
        assert head.out is not None
        head.out[:, :2] = 0.0
    for place in (0, 1):
        heads[2].out[:, place] = 3e38  # type: ignore[index]  # together they are infinite
    members = asks(1, (GREEDY,))
    for i, ask in enumerate(members):
        if ask.hidden is not None:
            ask.hidden[-1, :2] = float(i == 3)
    want = MedusaDrafter(heads).propose(members, 4)
    assert want[3].num_nodes == 2 and want[0].num_nodes == 3
    assert MedusaDrafter(heads, pick=pick_there).propose(members, 4) == want


def test_what_wants_the_host_is_chosen_there_and_said_once(
    looks: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = (GREEDY, RANDOM, {"repetition_penalty": 1.5})
    host, there = medusas(1)
    for _ in range(2):
        assert there.propose(asks(1, kinds), 4) == host.propose(asks(1, kinds), 4)
    assert not looks
    assert capsys.readouterr().err.count("penalties, biases") == 1
    host, there = medusas(1, rule=Rule.REJECTION)
    want, got = (drafter.propose(asks(1), 4) for drafter in (host, there))
    assert [t.tokens for t in got] == [t.tokens for t in want] and any(t.probs for t in got)
    assert not looks and "a temperature, and rule rejection" in capsys.readouterr().err
    assert there.propose(asks(1, (GREEDY,)), 4) == host.propose(asks(1, (GREEDY,)), 4)
    assert len(looks) == 1


@pytest.mark.parametrize(("nodes", "width"), [(5, 3), (12, 8), (30, 2)])
def test_medusas_trees_are_brought_once(nodes: int, width: int, looks: list[int]) -> None:
    for seed in range(3):
        host, there = medusas(seed, max_nodes=nodes, width=width)
        members = asks(seed)
        for depth in (1, 3):
            want = host.propose(members, depth)
            looks.clear()
            assert there.propose(members, depth) == want
            assert looks == [2 * depth]
            full = sum(width**d for d in range(1, depth + 1))
            assert [t.num_nodes for t in want] == [
                0 if ask.hidden is None else min(ask.most, nodes, full) for ask in members
            ]


# -- EAGLE ----------------------------------------------------------------------------------------


def go_on(asks: list[DraftAsk], trees: list[DraftTree], seed: int, more: int) -> list[DraftAsk]:
    """A step later: a part of the first path was accepted, and a token of the target's own."""
    made = []
    for i, (ask, tree) in enumerate(zip(asks, trees, strict=True)):
        one, before = ask.sequence, ask.sequence.num_tokens - 1
        for token in [*tree.paths[-1][: (seed + i) % 3], 5]:
            one.append(token)
        generator = torch.Generator().manual_seed(99 + 10 * seed + i)
        hidden = torch.randn(one.num_tokens - 1 - before, D, generator=generator)
        made.append(DraftAsk(one, more * MOST[(seed + i) % len(MOST)], before, hidden))
    return made


SETTINGS: dict[str, dict[str, Any]] = {
    "chains": {"max_depth": 4},
    "narrow": {"max_depth": 4, "max_nodes": 6, "width": 2},
    "wide": {"max_depth": 3, "max_nodes": 40, "width": 5},
    "level": {"max_depth": 1, "max_nodes": 4, "width": 4},
    "wider than the vocabulary": {"max_depth": 3, "max_nodes": 90, "width": V + 3},
}


@pytest.mark.parametrize("kind", SETTINGS)
def test_eagles_drafts_are_those_of_the_host(kind: str, looks: list[int]) -> None:
    """Steps in which parts of them are accepted; some sequences have no room, some end."""
    settings, more = SETTINGS[kind], 1 if kind == "chains" else 6
    sizes, shapes = set(), set()
    for depth in {settings["max_depth"], 2, 1}:
        host, there = eagles(**settings)
        ours, theirs = eagle_asks(depth, more=more), eagle_asks(depth, more=more)
        for step in range(3):
            want = host.propose(ours, depth)
            assert not looks
            assert there.propose(theirs, depth) == want
            assert len(looks) == 1
            looks.clear()
            sizes |= {tree.num_nodes for tree in want}
            shapes |= {(tree.depth, tree.is_chain) for tree in want}
            ours, theirs = go_on(ours, want, step, more), go_on(theirs, want, step, more)
            for drafter, members in ((host, ours), (there, theirs)):
                for ask in members:
                    drafter.settle(ask.sequence, 0, 0)
                drafter.forget([members.pop(step).sequence.request_id])
    assert {depth for depth, _ in shapes} == set(range(settings["max_depth"] + 1))
    assert 0 in sizes and any(not is_chain for _, is_chain in shapes) is (kind != "chains")


def test_eagles_trees_hold_nothing_of_drafts_and_may_branch_anywhere(looks: list[int]) -> None:
    _, there = eagles(max_depth=4, max_nodes=30, width=4)
    members = eagle_asks(3)
    trees = there.propose(members, 4)
    ends = [there._known[a.sequence.request_id].end for a in members if a.hidden is not None]
    assert ends == [a.sequence.num_tokens - 1 for a in members if a.hidden is not None]
    assert there.propose([], 4) == [] and there.propose(members[5:6], 4)[0].num_nodes == 0
    assert len(looks) == 1
    whole_tree = there.propose([DraftAsk(members[0].sequence, 30, 2)], 4)
    assert whole_tree[0].num_nodes == 0  # nothing was computed of it
    assert any(not tree.is_chain for tree in trees)


def test_eagle_says_what_wants_the_host(
    looks: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = (GREEDY, {"frequency_penalty": 0.5}, RANDOM)
    host, there = eagles(max_depth=3)
    for seed in range(2):
        assert there.propose(eagle_asks(seed, kinds), 3) == host.propose(eagle_asks(seed, kinds), 3)
    assert not looks and capsys.readouterr().err.count("penalties, biases") == 1
    host, there = eagles(max_depth=3, max_nodes=9)  # trees ask for nothing of the sort
    assert there.propose(eagle_asks(1, kinds), 3) == host.propose(eagle_asks(1, kinds), 3)
    assert len(looks) == 1 and not capsys.readouterr().err
