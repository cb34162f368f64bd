"""Rejected drafts in the paged cache: written, never read. On the toy, whose next token is a hash
of all that lies in a sequence's blocks, so that any trace gives other tokens."""

from __future__ import annotations

import random

import pytest
import torch

from models.interface import ForwardBatch, PagedKVCache
from moeserve.cache import BlockCache
from moeserve.request import FinishReason, Request, SamplingParams
from moeserve.sampler import sample
from moeserve.sequence import Sequence
from moeserve.speculate.run_limits import cut_run, draft_room
from moeserve.speculate.tree import DraftTree, chain
from moeserve.speculate.verify import verify
from moeserve.toy_model import ToyConfig, ToyModel

CONTEXT = 60


class Loop:
    """One sequence at a time through the toy, as an engine would do it."""

    def __init__(self, block_size: int) -> None:
        self.model = ToyModel(ToyConfig(vocab_size=20))
        self.pages: PagedKVCache = self.model.cache_spec.allocate(
            100, block_size, torch.device("cpu")
        )
        self.blocks = BlockCache(100, block_size, 4)

    def begin(self, prompt: list[int], number: int, **params: object) -> Sequence:
        sampling = SamplingParams(**{"max_tokens": 24, "seed": 3} | params)  # type: ignore[arg-type]
        request = Request(
            request_id=f"r{number}", prompt_token_ids=tuple(prompt), sampling=sampling
        )
        one = Sequence(request, 0, CONTEXT, frozenset({19}))
        opened = self.blocks.open("", len(prompt), self.blocks.match(prompt, ""))
        assert opened is not None
        one.lease, one.num_computed_tokens = opened
        return one

    def step(self, one: Sequence, tree: DraftTree) -> FinishReason | None:
        """All that is not computed, and the drafts."""
        lease, start = one.lease, one.num_computed_tokens
        assert lease is not None and tree.is_chain
        tokens = [*one.tokens[start:], *tree.tokens]
        end, size = start + len(tokens), self.pages.block_size
        assert end <= CONTEXT
        self.blocks.grow(lease, end)
        positions = torch.arange(start, end)
        table = torch.tensor(lease.table.ids)
        batch = ForwardBatch(
            token_ids=torch.tensor(tokens),
            positions=positions,
            slot_mapping=table[positions // size] * size + positions % size,
            query_start=torch.tensor([0, len(tokens)], dtype=torch.int32),
            context_len=torch.tensor([end], dtype=torch.int32),
            block_tables=table[None].to(torch.int32),
            logits_rows=torch.arange(len(tokens) - tree.num_rows, len(tokens)),
            max_query_len=len(tokens),
            max_context_len=end,
        )
        logits = self.model.forward(batch, self.pages).logits
        verdict = verify(logits, [one], [tree])[0]
        run = cut_run(one, verdict.tokens)
        for token in verdict.tokens[: run.num_tokens]:
            one.append(token)
        one.num_computed_tokens = len(one.tokens) - 1
        self.blocks.commit(lease, one.tokens, one.num_computed_tokens)
        self.blocks.check()
        if run.reason is not None:
            self.blocks.close(lease)
        return run.reason


def plain(prompt: list[int], **params: object) -> tuple[list[int], FinishReason]:
    """One token a step, without any cache."""
    loop = Loop(4)
    one = loop.begin(prompt, 0, **params)
    while True:
        places = [float(i) for i in range(one.num_tokens)]
        logits = loop.model.logits_of([float(t) for t in one.tokens], places)
        tokens = sample(logits[None], [one]).token_ids
        run = cut_run(one, tokens)
        one.append(tokens[0])
        if run.reason is not None:
            return one.tokens[one.num_prompt_tokens :], run.reason


SETTINGS: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.5, "ignore_eos": True},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.3, "ignore_eos": True, "max_tokens": 200, "frequency_penalty": 0.3},
]


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("params", SETTINGS, ids=["greedy", "penalty", "sampled", "context-limit"])
def test_rejected_drafts_leave_no_trace(block_size: int, params: dict[str, object]) -> None:
    rng = random.Random(block_size)
    loop = Loop(block_size)
    shared = [rng.randrange(18) for _ in range(9)]
    for number in range(4):  # later ones begin on blocks of earlier ones
        prompt = shared if number % 2 else [*shared, 1, 2, number]
        wanted, why = plain(prompt, **params)
        one = loop.begin(prompt, number, **params)
        if number > 1 and block_size < 9:
            assert one.num_computed_tokens > 0
        reason = loop.step(one, DraftTree())
        steps = 1
        while reason is None:
            done = one.num_output_tokens
            right = [*wanted[done:], *[0] * 9][: rng.randint(0, 8)]
            wrong_from = rng.randint(0, len(right))
            drafts = [*right[:wrong_from], *[(t + 1) % 19 for t in right[wrong_from:]]]
            reason = loop.step(one, chain(drafts[: draft_room(one, 8)]))
            steps += 1
        assert one.tokens[one.num_prompt_tokens :] == wanted and reason is why
        assert steps < len(wanted) or len(wanted) < 4
    # The tree holds what was accepted, and only that.
    held = {node.hash for node in loop.blocks.tree._by_block.values()}
    known = set()
    for number in range(4):
        prompt = shared if number % 2 else [*shared, 1, 2, number]
        tokens = [*prompt, *plain(prompt, **params)[0]]
        known |= {node.hash for node in loop.blocks.tree.match(tokens, "", len(tokens))}
    assert held == known
    assert loop.blocks.num_available == 100
