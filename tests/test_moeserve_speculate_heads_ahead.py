"""Heads whose drafts are chosen where their logits are draft what they draft on the host, ties
included; the host waits once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from speculate_world import pick_there
from torch import Tensor

from models import crossing
from moeserve.request import Request, SamplingParams
from moeserve.sequence import Sequence
from moeserve.speculate import medusa
from moeserve.speculate.drafter import DraftAsk
from moeserve.speculate.likeliest import likeliest
from moeserve.speculate.medusa import MedusaDrafter, MedusaHead
from moeserve.speculate.verify import Rule

D, V = 12, 40
GREEDY: dict[str, Any] = {}
RANDOM: dict[str, Any] = {"temperature": 0.9, "top_p": 0.9, "top_k": 12, "seed": 5}
KINDS = (GREEDY, RANDOM, {"logprobs": 2}, {"temperature": 1.3, "min_p": 0.05, "seed": 9})
MOST = (3, 1, 0, 4, 2, 3, 7)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Each time that something is brought over."""
    found: list[int] = []

    def counted(parts: Any) -> Any:
        found.append(len(parts))
        return crossing.brought(parts)

    monkeypatch.setattr(medusa, "brought", counted)
    return found


def whole(*shape: int, seed: int, most: int = 2) -> Tensor:
    """Small whole numbers: sums of products are exact in any order, and many are equal."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most + 1, shape, generator=generator).float()


def sequence(number: int, num_tokens: int = 5, **sampling: Any) -> Sequence:
    params = SamplingParams(**({"max_tokens": 50, "temperature": 0.0} | sampling))
    tokens = tuple((7 * i + number) % V for i in range(num_tokens))
    return Sequence(
        Request(request_id=f"{number}", prompt_token_ids=tokens, sampling=params), number, 100
    )


def asks(seed: int, kinds: Any = KINDS) -> list[DraftAsk]:
    """Of all kinds; one without hidden states, some without room."""
    made = []
    for i, most in enumerate(MOST):
        hidden = None if i == 5 else whole(1 + i % 3, D, seed=10 * seed + i)
        made.append(DraftAsk(sequence(i, **kinds[i % len(kinds)]), most, 2, hidden))
    return made


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


def medusas(seed: int, **settings: Any) -> tuple[MedusaDrafter, MedusaDrafter]:
    """On the host, there. Four heads without blocks: their logits are whole numbers."""
    heads = [MedusaHead((), whole(V, D, seed=100 * seed + i, most=1)) for i in range(4)]
    return MedusaDrafter(heads, **settings), MedusaDrafter(heads, **settings, pick=pick_there)


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
