"""The MTP drafter on a small random model: drafts as the layer gives them over the whole sequence,
whatever was drafted before, in any company, with as many rounds as were agreed."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from speculate_world import pick_there
from torch import Tensor

from dispatch.local import LocalDispatcher
from dispatch.thread_group import ThreadBoard, ThreadedCollective
from ep.group import EPGroup
from models.deepseek.kernels.select import create_kernels
from models.deepseek.load import load_model
from models.deepseek.model import DeepSeekModel
from models.deepseek.random_checkpoint import write_random_checkpoint
from models.deepseek.random_families import family_config
from models.interface import ForwardOutput
from models.offline import OfflineRunner
from moeserve.cache import BlockCache
from moeserve.continuation import Continuation
from moeserve.request import Request, SamplingParams
from moeserve.sampler import sample
from moeserve.sequence import Sequence
from moeserve.speculate import draft_rounds, mtp
from moeserve.speculate.drafter import DraftAsk, Drafter
from moeserve.speculate.mtp import MtpDrafter
from moeserve.speculate.rounds_ahead import Pick
from moeserve.speculate.tree import DraftTree
from moeserve.speculate.verify import Rule, verify

SINGLE = EPGroup.single()
BLOCK = 4
PICKS = pytest.mark.parametrize("pick", [None, pick_there], ids=["host", "there"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("v3")
    write_random_checkpoint(made, family_config("v3"), tokenizer=False)
    return made


def load(folder: Path, group: EPGroup) -> DeepSeekModel:
    kernels = create_kernels("torch").kernels
    kind = LocalDispatcher if group.size == 1 else ThreadedCollective
    return load_model(
        folder,
        dtype=torch.float32,
        kernels=kernels,
        group=group,
        dispatcher_factory=lambda config: kind(group, config, combine_pairs=kernels.combine_pairs),
        max_tokens_per_rank=64,
        num_threads=1,
    )


@pytest.fixture(scope="module")
def model(folder: Path) -> DeepSeekModel:
    return load(folder, SINGLE)


class Desk:
    """A drafter with blocks, and the target's hidden states from elsewhere."""

    def __init__(self, model: Any, rule: Rule = Rule.SAME, pick: Pick | None = None) -> None:
        self.model = model
        pages = model.cache_spec.allocate(64, BLOCK, torch.device("cpu"))
        for layer in pages.layers:
            layer.fill_(7.0)  # what nobody wrote is not to be read
        self.blocks = BlockCache(64, BLOCK, 8)
        self.drafter = MtpDrafter(
            model, pages, len(pages.layers) - 1, model.config.hidden_size, rule=rule, pick=pick
        )

    def begin(self, name: str, num: int, **params: object) -> Sequence:
        generator = torch.Generator().manual_seed(num)
        tokens = torch.randint(0, 512, (num,), generator=generator).tolist()
        sampling = SamplingParams(**{"max_tokens": 60, "temperature": 0.0} | params)  # type: ignore[arg-type]
        request = Request(request_id=name, prompt_token_ids=tuple(tokens), sampling=sampling)
        one = Sequence(request, 0, 200)
        opened = self.blocks.open(name, 1, [])
        assert opened is not None
        one.lease = opened[0]
        return one

    def ask(self, one: Sequence, first: int, most: int, end: int | None = None) -> DraftAsk:
        assert one.lease is not None
        self.blocks.grow(one.lease, one.num_tokens + 8)
        end = one.num_tokens - 1 if end is None else end
        return DraftAsk(one, most, first, self.hidden(one.tokens)[first:end])

    def hidden(self, tokens: list[int]) -> Tensor:
        return OfflineRunner(self.model).step({0: tokens}).hidden[0]

    def by_hand(self, one: Sequence, depth: int) -> list[int]:
        """The layer over the whole sequence, then fed with its own."""
        runner = OfflineRunner(self.model)
        hidden = runner.step({0: one.tokens[:-1]}).hidden[0]
        out = runner.draft({0: hidden}, {0: one.tokens[1:]})
        drafts: list[int] = []
        while len(drafts) < depth:
            row = Continuation(one, tuple(drafts))
            drafts += sample(out.logits[0][-1:].clone(), [row]).token_ids
            out = runner.draft({0: out.hidden[0][-1:]}, {0: drafts[-1:]})
        return drafts


@PICKS
def test_drafts_are_the_layers_own_whatever_was_drafted_before(
    model: DeepSeekModel, pick: Pick | None
) -> None:
    desk = Desk(model, pick=pick)
    drafter: Drafter = desk.drafter
    one = desk.begin("a", 9)
    other = desk.begin("b", 6, temperature=0.9, top_p=0.9, seed=4)
    drafter.propose([desk.ask(one, 0, 0, end=5)], 2)  # a chunk of the prompt
    done = {"a": 5, "b": 0}
    for accepted in (0, 3, 1):
        asks = [desk.ask(other, done["b"], 2), desk.ask(one, done["a"], 3)]
        trees = drafter.propose(asks, 3)
        assert desk.drafter.failure is None
        assert list(trees[1].tokens) == desk.by_hand(one, 3)
        assert list(trees[0].tokens) == desk.by_hand(other, 2)
        assert not trees[0].probs
        for member, tree in ((one, trees[1]), (other, trees[0])):
            done[member.request_id] = member.num_tokens - 1
            for token in [*tree.tokens[:accepted], 5]:
                member.append(token)
            drafter.settle(member, accepted, 3 - accepted)
    assert drafter.memory_bytes() == 0


class Counting:
    """Rows of each round."""

    def __init__(self, model: DeepSeekModel) -> None:
        self.model, self.rows = model, []  # type: ignore[var-annotated]

    def draft(self, batch: Any, *rest: Any) -> ForwardOutput:
        self.rows.append(batch.num_tokens)
        return self.model.draft(batch, *rest)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def test_rounds_are_those_agreed_whatever_a_rank_has(
    model: DeepSeekModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting = Counting(model)
    desk = Desk(counting)
    assert desk.drafter.propose([], 3) == [] and counting.rows == [0, 0, 0]
    counting.rows.clear()
    one = desk.begin("a", 6)
    asks = [desk.ask(one, 0, 1)]
    assert desk.drafter.propose(asks, 4)[0].num_nodes == 1 and counting.rows == [5, 0, 0, 0]
    counting.rows.clear()
    assert desk.drafter.propose(asks, 0)[0].num_nodes == 0 and counting.rows == []
    first = desk.by_hand(one, 1)[0]
    counting.rows.clear()
    one.stop_ids = frozenset({first})  # nothing follows a token that ends the output
    assert desk.drafter.propose([desk.ask(one, 0, 3)], 3)[0].tokens == (first,)
    assert counting.rows == [5, 0, 0]
    counting.rows.clear()

    def broken(*args: object) -> None:
        raise RuntimeError("no room for this")

    monkeypatch.setattr(draft_rounds, "choose_drafts", broken)
    assert desk.drafter.propose([desk.ask(one, 0, 3)], 3)[0].num_nodes == 0
    assert counting.rows == [5, 0, 0] and "no room" in str(desk.drafter.failure)


def test_after_a_pause_it_goes_on_from_the_pauses_end(model: DeepSeekModel) -> None:
    desk = Desk(model)
    one = desk.begin("a", 6)
    desk.drafter.propose([desk.ask(one, 0, 2)], 2)
    for token in (5, 6, 7, 8, 9, 10):  # steps of depth 0
        one.append(token)
    tree = desk.drafter.propose([desk.ask(one, 10, 2)], 2)[0]
    known = desk.drafter._known["a"]
    assert (known.base, known.end) == (8, 11) and tree.num_nodes == 2
    # The same as a sequence of which nothing else was ever there.
    fresh = Desk(model)
    twin = fresh.begin("twin", 2)
    twin.tokens = one.tokens[8:]
    assert twin.lease is not None
    fresh.blocks.grow(twin.lease, 12)
    fresh.drafter._pages[twin.lease.table.ids[0], :2] = 0
    hidden = desk.hidden(one.tokens)[10:11]
    fresh.drafter._known["twin"] = mtp._Known(0, 2, 0)
    assert fresh.drafter.propose([DraftAsk(twin, 2, 2, hidden)], 2)[0].tokens == tree.tokens
    desk.drafter.forget(["a"])  # preempted: computed again from the beginning
    again = desk.drafter.propose([desk.ask(one, 0, 2)], 2)[0]
    assert list(again.tokens) == desk.by_hand(one, 2)


@pytest.mark.parametrize("params", [{}, {"temperature": 0.8, "top_p": 0.9, "seed": 5}])
def test_the_output_is_that_without_speculation(
    model: DeepSeekModel, params: dict[str, object]
) -> None:
    desk = Desk(model)
    alone = desk.begin("alone", 7, **params)
    while alone.num_output_tokens < 10:
        logits = OfflineRunner(model).step({0: alone.tokens}).logits[0][-1:].clone()
        alone.append(sample(logits, [alone]).token_ids[0])
    for k in (1, 4):
        one = desk.begin(f"k{k}", 7, **params)
        tree, done = DraftTree(), 0
        while one.num_output_tokens < 10:
            logits = OfflineRunner(model).step({0: [*one.tokens, *tree.tokens]}).logits[0]
            verdict = verify(logits[-tree.num_rows :].clone(), [one], [tree])[0]
            for token in verdict.tokens:
                one.append(token)
            desk.drafter.settle(one, verdict.num_accepted, tree.num_nodes - verdict.num_accepted)
            tree = desk.drafter.propose([desk.ask(one, done, k)], k)[0]
            done = one.num_tokens - 1
            assert tree.num_nodes == k
        assert one.tokens[7:][:10] == alone.tokens[7:]


@PICKS
def test_drafts_are_the_same_expert_parallel_and_a_rank_without_sequences_takes_part(
    model: DeepSeekModel, folder: Path, pick: Pick | None
) -> None:
    """Four ranks: one has two sequences, two none, one a sequence at its limit of drafts."""
    prompts = {0: [(9, 3), (5, 2)], 2: [(7, 0)]}

    def asks_of(desk: Desk, rank: int) -> list[DraftAsk]:
        made = []
        for num, most in prompts.get(rank, ()):
            one = desk.begin(f"s{num}", num)
            assert one.lease is not None
            desk.blocks.grow(one.lease, num + 8)
            hidden = OfflineRunner(model).step({0: one.tokens[:-1]}).hidden[0]
            made.append(DraftAsk(one, most, 0, hidden))
        return made

    alone = Desk(model)
    wanted = {rank: alone.drafter.propose(asks_of(alone, rank), 3) for rank in prompts}
    board = ThreadBoard(4)
    desks = [Desk(load(folder, board.group(rank)), pick=pick) for rank in range(4)]
    asks = [asks_of(desk, rank) for rank, desk in enumerate(desks)]
    found: dict[int, list[DraftTree]] = {}

    def rank_main(rank: int) -> None:
        try:
            found[rank] = desks[rank].drafter.propose(asks[rank], 3)
        except BaseException as error:
            board.abort(rank, error)
            raise

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for rank in range(4):
        assert [t.tokens for t in found[rank]] == [t.tokens for t in wanted.get(rank, ())]
    assert [tree.num_nodes for tree in wanted[0]] == [3, 2]


def test_by_chance_it_tells_what_it_drew_from(model: DeepSeekModel) -> None:
    desk = Desk(model, Rule.REJECTION)
    one = desk.begin("a", 6, temperature=1.0, top_k=5, seed=2)
    tree = desk.drafter.propose([desk.ask(one, 0, 3)], 3)[0]
    assert sorted(tree.probs) == [0, 1, 2]
    assert all(q[t] > 0 for q, t in zip(tree.probs.values(), tree.tokens, strict=True))


def test_what_a_pause_computed_is_caught_up_with(
    model: DeepSeekModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk(model)
    drafter = desk.drafter
    one = desk.begin("a", 6)
    drafter.propose([desk.ask(one, 0, 2)], 2)
    done = 5
    for token in (5, 6, 7, 8, 9, 10):  # steps of depth 0
        one.append(token)
        drafter.hold([desk.ask(one, done, 0)])
        done = one.num_tokens - 1
    assert drafter.num_held("a") == 6 and drafter.memory_bytes() > 0
    one.append(11)
    tree = drafter.propose([desk.ask(one, done, 2)], 2)[0]
    assert list(tree.tokens) == desk.by_hand(one, 2)  # as if there had been no pause
    assert drafter.num_held("a") == 0 and drafter._known["a"].base == 0
    monkeypatch.setattr(mtp, "HELD", 2)
    done = one.num_tokens - 1
    for token in (5, 6, 7, 8, 9):
        one.append(token)
        drafter.hold([desk.ask(one, done, 0)])
        done = one.num_tokens - 1
    assert drafter.num_held("a") == 2
    one.append(3)
    tree = drafter.propose([desk.ask(one, done, 2)], 2)[0]
    base = (done - 2) // BLOCK * BLOCK  # it begins in the block of the first that was kept
    assert drafter._known["a"].base == base and tree.num_nodes == 2
    drafter.hold([desk.ask(one, done, 0)])
    drafter.forget(["a"])
    assert drafter.memory_bytes() == 0
