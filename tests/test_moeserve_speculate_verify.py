"""Verification and its limits: the tokens of SAME are those without speculation, whatever is
drafted, as chain or tree, for every sampling setting; nothing is left of what was rejected."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

import pytest
import torch
from torch import Tensor

from moeserve.continuation import Continuation
from moeserve.request import FinishReason, Request, SamplingParams, TokenLogprob
from moeserve.sampler import sample, sample_slowly
from moeserve.sequence import Sequence
from moeserve.speculate.drafter import choose_drafts
from moeserve.speculate.run_limits import Run, cut_run, draft_room
from moeserve.speculate.tree import DraftTree, chain
from moeserve.speculate.verify import Rule, rows_of, verify

VOCAB = 40
EOS = frozenset({3, 5})
MENU: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 3, "repetition_penalty": 1.7},
    {"temperature": 0.0, "presence_penalty": 1.5, "frequency_penalty": 0.7},
    {"temperature": 0.0, "min_tokens": 12, "logit_bias": {3: 4.0}},
    {"temperature": 1.0},
    {"temperature": 0.7, "seed": 11, "logprobs": 2},
    {"temperature": 0.9, "top_k": 5, "frequency_penalty": 0.9},
    {"temperature": 1.1, "top_p": 0.5, "repetition_penalty": 1.4},
    {"temperature": 1.5, "min_p": 0.1, "top_p": 0.95, "top_k": 30},
    {"temperature": 1.0, "min_tokens": 15, "stop_token_ids": (1, 2), "logit_bias": {1: 5.0}},
]


def sequence(number: int, prompt: int = 5, **params: object) -> Sequence:
    rng = random.Random(number)
    request = Request(
        request_id=f"r{number}",
        prompt_token_ids=tuple(rng.randrange(VOCAB) for _ in range(prompt)),
        sampling=SamplingParams(**{"max_tokens": 100} | params),  # type: ignore[arg-type]
    )
    return Sequence(request, 0, 1000, EOS)


def model(tokens: Seq[int], wrong: float = 0.0) -> Tensor:
    """[V] logits after these tokens: of the last three. wrong: how far a drafter is off."""
    a, b, c = tokens[-3:]
    generator = torch.Generator().manual_seed(a * 1600 + b * 40 + c)
    x = torch.randn(VOCAB, generator=generator) * 2.5
    return x + torch.randn(VOCAB, generator=generator) * wrong


def without_speculation(one: Sequence, count: int) -> tuple[list[int], list[TokenLogprob]]:
    tokens, entries = [], []
    for _ in range(count):
        sampled = sample(model(one.tokens)[None], [one])
        one.append(sampled.token_ids[0])
        tokens.append(sampled.token_ids[0])
        entries += sampled.logprobs.values()
    return tokens, entries


def drafts_of(one: Sequence, k: int, wrong: float, rule: Rule = Rule.SAME) -> DraftTree:
    tokens: list[int] = []
    probs = []
    for _ in range(k):
        row = Continuation(one, tuple(tokens))
        ids, dists = choose_drafts(model(row.tokens, wrong)[None], [row], rule)
        assert ids[0] is not None
        tokens.append(ids[0])
        probs.append(dists[0])
    known = [q for q in probs if q is not None]
    return chain(tokens, known if len(known) == k and k else None)


def random_tree(one: Sequence, rng: random.Random, size: int) -> DraftTree:
    """Half of its nodes are what the sampler is going to choose."""
    tokens: list[int] = []
    parents: list[int] = []
    for i in range(size):
        parent = rng.randrange(-1, i)
        path: tuple[int, ...] = ()
        at = parent
        while at >= 0:
            path = (tokens[at], *path)
            at = parents[at]
        row = Continuation(one, path)
        right = sample(model(row.tokens)[None], [row]).token_ids[0]
        token = right if rng.random() < 0.5 else rng.randrange(VOCAB)
        if token not in [t for t, p in zip(tokens, parents, strict=True) if p == parent]:
            tokens.append(token)
            parents.append(parent)
        else:
            tokens.append(next(x for x in range(VOCAB) if x not in tokens))
            parents.append(parent)
    return DraftTree(tuple(tokens), tuple(parents))


def logits_of(one: Sequence, tree: DraftTree) -> Tensor:
    return torch.stack([model(row.tokens) for row in rows_of(one, tree)])


@pytest.mark.parametrize("kind", ["none", "wrong", "close", "right", "tree"])
def test_tokens_are_those_without_speculation(kind: str) -> None:
    """All settings in one batch, k from 0 to 8, for seeds of their own."""
    rng = random.Random(kind)
    plain = [without_speculation(sequence(i, **menu), 24) for i, menu in enumerate(MENU)]
    members = [sequence(i, **menu) for i, menu in enumerate(MENU)]
    entries: list[list[TokenLogprob]] = [[] for _ in members]
    accepted = steps = 0
    while any(one.num_output_tokens < 24 for one in members):
        trees = []
        for one in members:
            k = rng.randint(1, 8)
            match kind:
                case "none":
                    trees.append(DraftTree())
                case "tree":
                    trees.append(random_tree(one, rng, k))
                case _:
                    wrong = {"wrong": 50.0, "close": 1.0, "right": 0.0}[kind]
                    trees.append(drafts_of(one, k, wrong))
        logits = torch.cat([logits_of(a, b) for a, b in zip(members, trees, strict=True)])
        for i, verdict in enumerate(verify(logits, members, trees)):
            assert verdict.failed is None
            assert len(verdict.tokens) == verdict.num_accepted + 1 == len(verdict.rows)
            assert [trees[i].tokens[n] for n in verdict.nodes] == list(verdict.tokens[:-1])
            if kind == "right":
                assert verdict.num_accepted == trees[i].num_nodes  # a draft that is the target
            for token in verdict.tokens:
                members[i].append(token)
            entries[i] += verdict.logprobs
            accepted += verdict.num_accepted
            steps += 1
    least = {"none": 0, "wrong": 0, "close": 1.0, "right": 3.0, "tree": 0.5}[kind]
    assert least * steps <= accepted and (kind != "none" or accepted == 0)
    for one, (tokens, known), got in zip(members, plain, entries, strict=True):
        assert one.tokens[one.num_prompt_tokens :][:24] == tokens
        assert got[:24] == known[:24]


def test_rejection_is_greedy_exactly_and_takes_the_targets_numbers_without_drafts() -> None:
    for i, menu in enumerate(MENU):
        one, other = sequence(i, **menu), sequence(i, **menu)
        tokens, _ = without_speculation(one, 12)
        greedy = menu["temperature"] == 0.0
        while other.num_output_tokens < 12:
            k = 3 if greedy else 0
            tree = drafts_of(other, k, 1.0, Rule.REJECTION)
            assert not tree.probs
            for token in verify(logits_of(other, tree), [other], [tree], Rule.REJECTION)[0].tokens:
                other.append(token)
        assert other.tokens[other.num_prompt_tokens :][:12] == tokens


def test_rejection_accepts_a_drafter_that_is_the_target_always_and_tells_logprobs() -> None:
    for i, menu in enumerate(MENU):
        one = sequence(i, **menu)
        for wrong in (0.0, 2.0):
            for _ in range(4):
                tree = drafts_of(one, 3, wrong, Rule.REJECTION)
                verdict = verify(logits_of(one, tree), [one], [tree], Rule.REJECTION)[0]
                if wrong == 0.0:
                    assert verdict.num_accepted == 3
                if one.sampling.logprobs is not None:
                    assert [e.token_id for e in verdict.logprobs] == list(verdict.tokens)
                    for row, entry in zip(verdict.rows, verdict.logprobs, strict=True):
                        logp = torch.log_softmax(logits_of(one, tree)[row], -1)
                        assert entry.logprob == pytest.approx(float(logp[entry.token_id]), abs=1e-5)
                for token in verdict.tokens:
                    one.append(token)


def test_a_continuation_is_the_sequence_with_its_tokens_and_leaves_no_trace() -> None:
    rng = random.Random(4)
    for i, menu in enumerate(MENU):
        grown, base = sequence(i, **menu), sequence(i, **menu)
        drafted = tuple(rng.randrange(VOCAB) for _ in range(7))
        for token in drafted:
            grown.append(token)
        row = Continuation(base, drafted)
        before = list(base.tokens)
        logits = model(grown.tokens)
        expected = sample(logits[None].clone(), [grown])
        sampled = sample(logits[None].clone(), [row])
        assert (sampled.token_ids, sampled.logprobs) == (expected.token_ids, expected.logprobs)
        assert sample_slowly(logits, row)[0] == expected.token_ids[0]
        assert base.tokens == before
        if base.seen is not None:
            assert base.seen.counts.sum() == 0
    high = Continuation(sequence(1, **MENU[1]), (VOCAB + 9, 4))  # an id without a logit
    sample(model(high.sequence.tokens)[None], [high])


def test_company_changes_no_verdict() -> None:
    members = [sequence(i, **menu) for i, menu in enumerate(MENU)]
    for rule in Rule:
        trees = [drafts_of(one, 1 + i % 4, 1.0, rule) for i, one in enumerate(members)]
        logits = [logits_of(a, b) for a, b in zip(members, trees, strict=True)]
        together = verify(torch.cat(logits), members, trees, rule)
        for one, tree, rows, verdict in zip(members, trees, logits, together, strict=True):
            assert verify(rows.clone(), [one], [tree], rule) == [verdict]


def test_broken_logits_count_only_where_the_walk_comes() -> None:
    one = sequence(1, temperature=0.0)
    tree = drafts_of(one, 3, 0.0)
    rows = logits_of(one, tree)
    rows[2] = float("nan")
    verdict = verify(rows.clone(), [one], [tree])[0]
    assert verdict.num_accepted == 2 and len(verdict.tokens) == 2 and verdict.failed
    other = chain([(tree.tokens[0] + 1) % VOCAB, *tree.tokens[1:]])
    verdict = verify(rows, [one], [other])[0]
    assert verdict.failed is None and len(verdict.tokens) == 1
    assert verify(torch.zeros(0, VOCAB), [], []) == []


# -- limits ---------------------------------------------------------------------------------------


def one_by_one(one: Sequence, tokens: Seq[int]) -> Run:
    """The twin: append, look."""
    out = one.num_output_tokens
    if out >= one.max_output_tokens:
        return Run(0, FinishReason.LENGTH)
    for i, token in enumerate(tokens):
        out += 1
        if token in one.stop_ids:
            return Run(i + 1, FinishReason.STOP, token)
        if out == one.max_output_tokens:
            return Run(i + 1, FinishReason.LENGTH)
    return Run(len(tokens))


def test_a_run_ends_where_one_token_a_step_would_end_it() -> None:
    rng = random.Random(7)
    reasons = set()
    for _ in range(3000):
        params: dict[str, object] = {
            "max_tokens": rng.randint(0, 8),
            "stop_token_ids": (9,),
            "ignore_eos": rng.random() < 0.3,
        }
        one = sequence(rng.randrange(100), prompt=rng.randint(1, 6), **params)
        for _ in range(rng.randrange(3)):
            one.append(rng.randrange(14, VOCAB))
        tokens = [rng.randrange(14) for _ in range(rng.randint(1, 9))]
        run = cut_run(one, tokens)
        assert run == one_by_one(one, tokens), (tokens, one.tokens, params)
        reasons.add(run.reason)
    assert reasons == {None, FinishReason.STOP, FinishReason.LENGTH}


def test_eos_within_min_tokens_is_neither_drafted_nor_accepted() -> None:
    one = sequence(2, temperature=0.0, min_tokens=4, logit_bias={3: 1000.0})
    tree = drafts_of(one, 6, 0.0)
    assert 3 not in tree.tokens[:4] and tree.tokens[4] == 3
    tree = chain([3, *tree.tokens[1:]])
    assert verify(logits_of(one, tree), [one], [tree])[0].num_accepted == 0


def test_room_for_drafts_ends_at_the_limits() -> None:
    for max_tokens in range(1, 9):
        one = sequence(1, max_tokens=max_tokens)
        one.num_computed_tokens = one.num_tokens - 1
        while one.num_output_tokens < max_tokens:
            room = draft_room(one, 4)
            assert room == min(4, max_tokens - one.num_output_tokens - 1) >= 0
            one.append(20)
            one.num_computed_tokens += 1
    one = Sequence(sequence(1).request, 0, 7)  # the context has place for two more
    one.num_computed_tokens = 4
    assert draft_room(one, 8) == 1
    one.num_computed_tokens = 2  # a prefill
    assert draft_room(one, 8) == 0
    one.num_computed_tokens = 4
    one.aborted = FinishReason.ABORT
    assert draft_room(one, 8) == 0
