"""A draft model follows the sequence: on the toy, whose next token is a hash of all it has in its
pages. As its own target it is accepted always."""

from __future__ import annotations

import random

import pytest
import torch
from speculate_world import pick_there

from models.interface import ForwardBatch
from moeserve.request import Request, SamplingParams
from moeserve.sequence import Sequence
from moeserve.speculate.draft_model import DraftModelDrafter, tokenizer_problems
from moeserve.speculate.drafter import DraftAsk, Drafter
from moeserve.speculate.late import judge
from moeserve.speculate.rounds_ahead import Pick
from moeserve.speculate.tree import DraftTree
from moeserve.toy_model import ToyConfig, ToyModel

VOCAB = 30


def sequence(name: str, num: int, **params: object) -> Sequence:
    rng = random.Random(name)
    sampling = SamplingParams(**{"max_tokens": 200, "temperature": 0.0} | params)  # type: ignore[arg-type]
    prompt = tuple(rng.randrange(VOCAB) for _ in range(num))
    return Sequence(Request(request_id=name, prompt_token_ids=prompt, sampling=sampling), 0, 500)


class Rows(ToyModel):
    """Remembers the rows of each forward."""

    def __init__(self) -> None:
        super().__init__(ToyConfig(vocab_size=VOCAB))
        self.rows: list[int] = []

    def forward(self, batch: ForwardBatch, *rest: object, **more: object):  # type: ignore[no-untyped-def,override]
        self.rows.append(batch.num_tokens)
        return super().forward(batch, *rest, **more)  # type: ignore[arg-type]


def drafter_of(model: ToyModel, **settings: object) -> DraftModelDrafter:
    return DraftModelDrafter(model, 60, 4, 3, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("pick", [None, pick_there], ids=["host", "there"])
def test_as_its_own_target_it_drafts_the_targets_tokens_whatever_was_accepted(
    pick: Pick | None,
) -> None:
    model = Rows()
    drafter: Drafter = drafter_of(model, pick=pick)
    one, other = sequence("a", 9), sequence("b", 5)
    rng = random.Random(2)
    for _ in range(25):
        asks = [DraftAsk(other, 2), DraftAsk(one, 4)]
        model.rows.clear()
        trees = drafter.propose(asks, 4)
        assert list(trees[1].tokens) == model.continue_prompt(one.tokens, 4)
        assert list(trees[0].tokens) == model.continue_prompt(other.tokens, 2)
        assert len(model.rows) == 4 and model.rows[2:] == [1, 1]
        for member, tree in ((one, trees[1]), (other, trees[0])):
            accepted = rng.randint(0, tree.num_nodes)
            for token in [*tree.tokens[:accepted], rng.randrange(VOCAB)]:
                member.append(token)
            drafter.settle(member, accepted, tree.num_nodes - accepted)
    model.rows.clear()
    drafter.propose([DraftAsk(one, 4)], 4)
    assert model.rows[0] <= 2  # the token that was added, and a last draft that never ran
    assert drafter.memory_bytes() > 0


@pytest.mark.parametrize("sampled", [False, True])
def test_before_the_host_knows_what_was_accepted(sampled: bool) -> None:
    """Steps of a target that is the same model, judged where they are: drafts behind whatever was
    accepted are those that follow."""
    params = {"temperature": 0.9, "seed": 4} if sampled else {}
    model = Rows()
    drafter, known = drafter_of(model, pick=pick_there), drafter_of(model)
    members = [sequence("a", 9, **params), sequence("b", 5, **params), sequence("c", 30)]
    trees = [DraftTree()] * 3
    rng = random.Random(3)
    lengths = set()
    for step in range(20):
        # What the target chooses: drafts up to a place, and another token there.
        accepted = [rng.randint(0, tree.num_nodes) for tree in trees]
        chosen: list[int] = []
        for tree, num in zip(trees, accepted, strict=True):
            kept = list(tree.tokens[:num])
            wrong = [(t + 1) % VOCAB for t in tree.tokens[num : num + 1]] or [7]
            chosen += [*kept, *wrong, *(3,) * (tree.num_nodes - num)]
        tokens = torch.tensor(chosen)
        late = judge(tokens, torch.zeros(len(chosen), dtype=torch.bool), trees)
        assert late.accepted.tolist() == accepted
        most = [4, rng.randint(0, 3), 2]
        asks = [DraftAsk(s, m, late=j) for j, (s, m) in enumerate(zip(members, most, strict=True))]
        model.rows.clear()
        under_way = drafter.ask_late(asks, 4, late)
        assert len(model.rows) == 4
        for j, member in enumerate(members):
            first = late.firsts[j]
            for token in chosen[first : first + accepted[j] + 1]:
                member.append(token)
            drafter.settle(member, accepted[j], trees[j].num_nodes - accepted[j])
        trees = under_way.told(under_way.tensors, accepted)
        asks = [DraftAsk(s, m) for s, m in zip(members, most, strict=True)]
        assert trees == known.propose(asks, 4), step
        lengths |= {tree.num_nodes for tree in trees}
    assert lengths == {0, 1, 2, 3, 4}
    assert all(
        len(drafter._known[s.request_id].tokens) >= s.num_tokens - 1 for s in members
    )  # they keep up


def test_late_rows_have_their_place_among_the_most_of_a_step() -> None:
    """A prompt that does not fit drafts once it has been computed."""
    model = Rows()
    drafter = drafter_of(model, max_rows=16, pick=pick_there)
    long, trees = sequence("long", 40), []
    for _ in range(4):
        model.rows.clear()
        late = judge(torch.tensor([5]), torch.tensor([False]), [DraftTree()])
        under_way = drafter.ask_late([DraftAsk(long, 3, late=0)], 3, late)
        long.append(5)
        trees += under_way.told(under_way.tensors, [0])
        assert model.rows[0] <= 16
    assert [tree.num_nodes for tree in trees] == [0, 0, 3, 3]
    assert list(trees[-1].tokens) == model.continue_prompt(long.tokens, 3)


def test_long_prompts_are_computed_in_parts_and_full_pools_only_cost_drafts() -> None:
    model = Rows()
    drafter = drafter_of(model, max_rows=16)
    long, short = sequence("long", 40), sequence("short", 6)
    sizes = []
    for _ in range(4):
        model.rows.clear()
        trees = drafter.propose([DraftAsk(long, 3), DraftAsk(short, 0)], 3)
        sizes.append(trees[0].num_nodes)
        assert model.rows[0] <= 16
    assert sizes == [0, 0, 3, 3]
    assert list(trees[0].tokens) == model.continue_prompt(long.tokens, 3)
    assert (
        drafter.propose([DraftAsk(sequence("c", 5), 2), DraftAsk(sequence("d", 5), 2)], 2)[
            1
        ].num_nodes
        == 0
    )  # three sequences are its limit
    huge = sequence("huge", 300)
    drafter.forget(["short", "c", "nobody"])
    assert drafter.propose([DraftAsk(huge, 2)], 2)[0].num_nodes == 0
    drafter.forget(["long", "huge"])
    assert drafter._blocks.num_available == 60


def test_what_ends_an_output_is_followed_by_nothing_wherever_drafts_are_chosen() -> None:
    stops = {"stop_token_ids": tuple(range(0, VOCAB, 3))}
    found = []
    for pick in (None, pick_there):
        model, trees = ToyModel(ToyConfig(vocab_size=VOCAB)), []
        drafter = drafter_of(model, pick=pick)
        one = sequence("a", 9, temperature=0.9, seed=4, **stops)
        for _ in range(12):
            trees.append(drafter.propose([DraftAsk(one, 3)], 4)[0].tokens)
            for token in [*trees[-1][:2], 5]:
                one.append(token)
        found.append(trees)
    assert found[0] == found[1] and {len(tokens) for tokens in found[0]} == {1, 2, 3}


@pytest.mark.parametrize("pick", [None, pick_there], ids=["host", "there"])
def test_rounds_are_those_agreed_where_it_is_collective(pick: Pick | None) -> None:
    model = Rows()
    drafter = drafter_of(model, collective=True, pick=pick)
    assert drafter.propose([], 3) == [] and model.rows == [0, 0, 0]
    model.rows.clear()
    drafter.propose([DraftAsk(sequence("a", 5), 1)], 3)
    assert model.rows == [5, 0, 0]
    model.rows.clear()
    alone = drafter_of(model, pick=pick)
    alone.propose([], 3)
    alone.propose([DraftAsk(sequence("a", 5), 1)], 3)
    assert model.rows == [5]


class _Words:
    def __init__(self, vocab: dict[str, int]) -> None:
        self.fast = self
        self._vocab = vocab

    def get_vocab(self) -> dict[str, int]:
        return self._vocab


def test_another_tokenizer_is_told() -> None:
    same, other = _Words({"a": 0, "b": 1}), _Words({"a": 0, "c": 1})
    assert tokenizer_problems(same, _Words({"a": 0, "b": 1})) == []  # type: ignore[arg-type]
    said = tokenizer_problems(other, same)  # type: ignore[arg-type]
    assert len(said) == 1 and "2 differ" in said[0] and "'b' is None there and 1 here" in said[0]


@pytest.mark.parametrize("rows", [0, 3])
def test_a_round_without_rows_is_an_empty_batch(rows: int) -> None:
    from moeserve.speculate.draft_rounds import RoundRows

    made = RoundRows()
    if rows:
        made.add(4, 2, [7, 8, 9], [5, 1], True)
        made.add(6, 0, [3], [2], False)
    batch = made.batch(4, torch.device("cpu"))
    if not rows:
        assert batch.num_tokens == batch.num_sequences == 0 and batch.block_tables.shape == (0, 0)
        return
    assert batch.slot_mapping.tolist() == [22, 23, 4, 8]
    assert batch.positions.tolist() == [2, 3, 4, 0] and batch.context_len.tolist() == [5, 1]
    assert batch.block_tables.tolist() == [[5, 1], [2, -1]] and batch.logits_rows.tolist() == [2]
    assert made.going == [4]
