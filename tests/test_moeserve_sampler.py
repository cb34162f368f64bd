"""The sampler against its slow twin, row by row and in any company."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from moeserve.draw import BLOCK, Race, arrivals, draw, kept, uniforms, waiting_times
from moeserve.logprobs import token_logprobs
from moeserve.request import Request, SamplingParams, TokenLogprob
from moeserve.sampler import sample, sample_slowly
from moeserve.sequence import Sequence

EOS = frozenset({3, 5})


def sequence(
    vocab: int, number: int = 0, /, prompt: int = 6, output: int = 5, **params: object
) -> Sequence:
    rng = random.Random(number)
    request = Request(
        request_id=f"r{number}",
        prompt_token_ids=tuple(rng.randrange(vocab) for _ in range(prompt)),
        sampling=SamplingParams(max_tokens=100, **params),  # type: ignore[arg-type]
    )
    made = Sequence(request, 0, 1000, EOS)
    for _ in range(output):
        made.append(rng.randrange(vocab))
    return made


def logits_for(rows: int, vocab: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, vocab, generator=generator) * 3
    x[:, ::7] = x[:, 1:2]  # ties, across any width
    return x


def run(logits: Tensor, rows: list[Sequence]) -> tuple[list[int], dict[int, TokenLogprob]]:
    sampled = sample(logits, rows)
    assert sampled.failed == {}
    return sampled.token_ids, sampled.logprobs


MENU: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 1e-9},
    {"temperature": 1.0},
    {"temperature": 0.7, "seed": 11},
    {"temperature": 3.0, "top_k": 1},
    {"temperature": 0.9, "top_k": 5},
    {"temperature": 0.9, "top_k": 300},
    {"temperature": 1.1, "top_p": 0.5},
    {"temperature": 1.1, "top_p": 0.999},
    {"temperature": 1.5, "top_p": 1e-6},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.7},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 2.0, "min_p": 0.01, "top_p": 0.95, "top_k": 50},
    {"temperature": 0.0, "repetition_penalty": 1.7},
    {"temperature": 1.0, "repetition_penalty": 0.6, "frequency_penalty": 0.5},
    {"temperature": 0.0, "presence_penalty": 1.5, "frequency_penalty": -0.25},
    {"temperature": 0.0, "logit_bias": {4: 9.0, 9: -100.0, 0: -float("inf")}},
    {"temperature": 1.0, "min_tokens": 50, "stop_token_ids": (1, 2), "logit_bias": {1: 50.0}},
    {"temperature": 0.0, "min_tokens": 50, "ignore_eos": True, "logit_bias": {3: 50.0}},
    {"temperature": 0.0, "min_tokens": 5, "logit_bias": {3: 50.0}},
    {"temperature": 1.0, "logprobs": 0},
    {"temperature": 0.0, "logprobs": 4, "repetition_penalty": 1.3},
    {"temperature": 0.6, "logprobs": 20, "top_p": 0.9},
]


@pytest.mark.parametrize("vocab", [12, 700])
def test_batched_sampling_is_the_slow_twin_row_by_row(vocab: int) -> None:
    rows = [sequence(vocab, i, **menu) for i, menu in enumerate(MENU * 3)]
    logits = logits_for(len(rows), vocab)
    tokens, logprobs = run(logits.clone(), rows)
    for j, row in enumerate(rows):
        token, entry = sample_slowly(logits[j], row)
        assert tokens[j] == token, (j, row.sampling)
        assert logprobs.get(j) == entry


def test_company_changes_no_bit() -> None:
    vocab = 700
    rows = [sequence(vocab, i, **menu) for i, menu in enumerate(MENU * 2)]
    logits = logits_for(len(rows), vocab)
    tokens, logprobs = run(logits.clone(), rows)
    rng = random.Random(1)
    for size in (1, 1, 2, 3, 5, 17, len(rows)):
        some = rng.sample(range(len(rows)), size)
        got, entries = run(logits[some].clone(), [rows[j] for j in some])
        assert got == [tokens[j] for j in some]
        for i, j in enumerate(some):
            assert entries.get(i) == logprobs.get(j)


@pytest.mark.parametrize("threads", [1, 2])
def test_one_row_is_summed_as_many_are(threads: int) -> None:
    """A long row alone may tempt a library to split its sum over threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        logits = logits_for(6, 40_000)
        rows = [sequence(40_000, i, logprobs=2, top_p=1.0 - 0.1 * (i % 2)) for i in range(6)]
        tokens, logprobs = run(logits.clone(), rows)
        for j in range(6):
            alone, entry = run(logits[j : j + 1].clone(), [rows[j]])
            assert alone == [tokens[j]] and entry[0] == logprobs[j]
    finally:
        torch.set_num_threads(before)


def test_greedy_takes_the_lowest_id_of_a_tie() -> None:
    for vocab in (5, 64, 4096):
        logits = torch.zeros(3, vocab)
        logits[1, vocab // 2 :] = 1.0
        logits[2, -1] = 2.0
        rows = [sequence(vocab, i, temperature=0.0) for i in range(3)]
        assert sample(logits, rows).token_ids == [0, vocab // 2, vocab - 1]


def test_a_seed_and_a_position_make_the_draw() -> None:
    vocab = 50
    logits = logits_for(1, vocab) / 9
    one = sequence(vocab, 1, temperature=1.5, seed=7)
    token = sample(logits.clone(), [one]).token_ids
    assert sample(logits.clone(), [one]).token_ids == token  # nothing was used up
    one.preempted()
    assert sample(logits.clone(), [one]).token_ids == token
    drawn = set()
    for _ in range(30):
        one.append(0)
        drawn.add(sample(logits.clone(), [one]).token_ids[0])
    assert len(drawn) > 5
    unseeded = [sequence(vocab, i, temperature=1.5).seed for i in range(4)]
    assert len(set(unseeded)) == 4
    request = one.request
    assert (
        Sequence(request, 0, 9, engine_seed=1).seed == Sequence(request, 0, 9, engine_seed=2).seed
    )


def test_uniforms_are_uniform_and_below_one() -> None:
    u = uniforms([5] * 4000 + list(range(4000)), list(range(4000)) + [3] * 4000)
    assert u.min() >= 0 and u.max() < 1
    for part in (u[:4000], u[4000:]):
        counts = np.histogram(part, 20, (0, 1))[0]
        assert ((counts - 200) ** 2 / 200).sum() < 50  # chi square, 19 degrees, p about 1e-4
        assert abs(np.corrcoef(part[:-1], part[1:])[0, 1]) < 0.06
    assert uniforms([2**64 - 1, 0], [0, 2**31]).shape == (2,)
    # The numbers themselves are part of the promise "same seed, same tokens".
    assert uniforms([0, 1], [0, 1]).tolist() == uniforms([1, 0], [1, 0]).tolist()[::-1]


def test_runners_wait_independently_of_each_other() -> None:
    """Along runners, positions and seeds, and from one race to another."""
    n = 4000
    lines = [
        arrivals([7], [3], Race.ALONE, np.arange(n))[0],
        arrivals([7] * n, list(range(n)), Race.WITHIN, np.array([5]))[:, 0],
        arrivals(list(range(n)), [3] * n, Race.BLOCKS, np.array([0]))[:, 0],
        arrivals([7], [4], Race.ALONE, np.arange(n))[0],
        arrivals([7], [3], Race.WITHIN, np.arange(n))[0],
    ]
    times = [waiting_times(bits) for bits in lines]
    for line in times:
        assert line.min() > 0 and np.isfinite(line).all()
        counts = np.histogram(1 - np.exp(-line), 20, (0, 1))[0]
        assert ((counts - 200) ** 2 / 200).sum() < 50
        assert abs(np.corrcoef(line[:-1], line[1:])[0, 1]) < 0.06
    for i, line in enumerate(times):
        for other in times[:i]:
            assert abs(np.corrcoef(line, other)[0, 1]) < 0.06
    every = arrivals([2**64 - 1, 0], [0, 2**31], Race.BLOCKS, np.arange(3))
    assert (arrivals([0], [2**31], Race.BLOCKS, np.arange(3)) == every[1:]).all()


@pytest.mark.parametrize("cut", [{}, {"top_p": 0.7}, {"top_k": 90}, {"min_p": 0.02}])
def test_draws_over_several_blocks_follow_the_distribution(cut: dict[str, object]) -> None:
    """Chi-square over the draws of 300 tokens."""
    n, vocab = 60_000 if not cut else 10_000, 2 * BLOCK + 44
    generator = torch.Generator().manual_seed(8)
    p = torch.softmax(torch.randn(vocab, generator=generator) * 2, -1).numpy()
    params = SamplingParams(**cut)  # type: ignore[arg-type]
    found = np.zeros(vocab)
    for start in range(0, n, 2000):
        seeds = list(range(start, start + 2000))
        rows = np.broadcast_to(p, (2000, vocab))
        found += np.bincount(draw(rows, [params] * 2000, seeds, [9] * 2000), minlength=vocab)
    wanted = kept(p, params) * n
    assert not found[wanted == 0].any()
    large = wanted >= 8
    off = ((found - wanted)[large] ** 2 / wanted[large]).sum()
    degrees = int(large.sum()) - 1
    assert off < degrees + 4 * np.sqrt(2 * degrees)


def test_rows_that_are_alike_choose_alike() -> None:
    """What makes a draft drawn with the same numbers the target's token: see `draw`."""
    generator = torch.Generator().manual_seed(2)
    n, vocab = 1500, 3 * BLOCK
    a = torch.randn(vocab, generator=generator) * 2
    for off, cut in ((0.3, {}), (1.0, {}), (0.3, {"top_p": 0.9}), (1.0, {"top_k": 20})):
        b = a + torch.randn(vocab, generator=generator) * off
        params = SamplingParams(**cut)  # type: ignore[arg-type]
        both = [torch.softmax(x, -1).numpy() for x in (a, b)]
        drawn = [
            np.array(draw(np.broadcast_to(p, (n, vocab)), [params] * n, list(range(n)), [0] * n))
            for p in both
        ]
        far = 0.5 * np.abs(kept(both[0], params) - kept(both[1], params)).sum()
        same = float((drawn[0] == drawn[1]).mean())
        assert same > (1 - far) / (1 + far) - (0.04 if "top_k" in cut else 0.1)
        assert same <= 1 - far + 0.04  # no way to draw does better


def test_draws_follow_the_distribution() -> None:
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    for params, target in (
        ({"temperature": 1.0}, [0.5, 0.3, 0.15, 0.05]),
        ({"temperature": 1.0, "top_k": 2}, [0.625, 0.375, 0, 0]),
        ({"temperature": 1.0, "top_p": 0.8}, [0.625, 0.375, 0, 0]),
        ({"temperature": 1.0, "top_p": 0.81}, [0.526, 0.316, 0.158, 0]),
        ({"temperature": 1.0, "min_p": 0.25}, [0.526, 0.316, 0.158, 0]),
        ({"temperature": 0.5}, [0.685, 0.247, 0.062, 0.007]),
    ):
        rows = [sequence(4, i, seed=i, **params) for i in range(3000)]
        tokens = sample(logits.repeat(3000, 1), rows).token_ids
        share = np.bincount(tokens, minlength=4) / 3000
        assert np.abs(share - target).max() < 0.035, params


def test_rank_agrees_with_the_order_of_the_alternatives() -> None:
    logits = logits_for(4, 30)
    ids = [0, 7, 14, 3]
    for j, entry in enumerate(token_logprobs(logits, ids, [30] * 4)):
        assert [t for t, _ in entry.top].index(ids[j]) == entry.rank - 1
        assert dict(entry.top)[ids[j]] == entry.logprob
        assert abs(sum(np.exp(v) for _, v in entry.top) - 1) < 1e-5
    assert token_logprobs(logits[:0], [], []) == []
    assert token_logprobs(logits, ids, [0] * 4)[1].top == ()


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    row = sequence(3, 1, temperature=0.0, logprobs=3, logit_bias={0: 50.0})
    tokens, entries = run(logits.clone(), [row])
    assert tokens == [0]
    assert entries[0].rank == 3
    assert entries[0].logprob == pytest.approx(-2.4076, abs=1e-3)


def test_masked_rows_and_ids_outside_the_vocabulary() -> None:
    row = sequence(8, 1, temperature=0.0, min_tokens=50, stop_token_ids=(99,), repetition_penalty=2)
    row.tokens[0] = 50  # a prompt token that has no logit
    logits = torch.zeros(1, 8)
    logits[0, 3] = 9.0
    logits[0, 6] = 8.0
    assert sample(logits.clone(), [row]).token_ids == [sample_slowly(logits[0], row)[0]]
    assert sample(logits.clone(), [row]).token_ids != [3]


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0, "logprobs": 2}])
def test_broken_rows_are_found_and_spoil_no_others(params: dict[str, object]) -> None:
    logits = logits_for(6, 20)
    logits[1, 2] = float("nan")
    logits[2, 0] = float("inf")
    logits[3] = float("-inf")
    logits[4, :10] = float("-inf")
    rows = [sequence(20, i, **params) for i in range(6)]
    sampled = sample(logits.clone(), rows)
    assert sorted(sampled.failed) == [1, 2, 3]
    for j in (0, 4, 5):
        assert sampled.token_ids[j] == sample_slowly(logits[j], rows[j])[0]
    assert sample(torch.zeros(0, 4), []).token_ids == []


@pytest.mark.parametrize("vocab", [1, 2, 127, 128, 129, 1000])
@pytest.mark.parametrize("scale", [0.0, 0.05, 1.0, 6.0])
def test_draws_are_the_twin_for_flat_and_steep_rows(vocab: int, scale: float) -> None:
    cuts = [
        {"top_p": p, "top_k": k, "min_p": m}
        for p in (1e-9, 0.1, 0.5, 0.95, 1.0)
        for k in (0, 2, 40)
        for m in (0.0, 0.3)
    ]
    rows = [sequence(vocab, i, temperature=0.9, **cut) for i, cut in enumerate(cuts)]
    logits = (
        logits_for(len(rows), vocab, seed=vocab)[:, :vocab] if vocab > 1 else torch.zeros(30, 1)
    )
    logits = logits * scale / 3
    tokens = run(logits.clone(), rows)[0]
    for j, row in enumerate(rows):
        assert tokens[j] == sample_slowly(logits[j], row)[0], (j, row.sampling)


def test_top_k_and_top_p_keep_no_more_than_they_say() -> None:
    """Of equal logits too, where the lowest ids stand first."""
    for params, most in (
        ({"top_k": 5}, 5),
        ({"top_p": 0.25}, 16),
        ({"top_k": 32, "top_p": 0.25}, 8),
        ({"top_k": 1}, 1),
        ({"top_p": 1e-9}, 1),
    ):
        rows = [sequence(64, i, temperature=1.0, seed=i, **params) for i in range(600)]
        tokens = run(torch.zeros(600, 64), rows)[0]
        assert set(tokens) == set(range(most)), params


def test_extreme_penalties_and_biases_leave_a_token_or_fail_alone() -> None:
    ban = dict.fromkeys(range(20), -float("inf"))
    menu: list[dict[str, object]] = [
        {"repetition_penalty": 1e-40},
        {"repetition_penalty": 1e-40, "top_p": 0.5},
        {"repetition_penalty": 1e30, "top_k": 3},
        {"logit_bias": ban},
        {"logit_bias": ban, "top_p": 0.5, "logprobs": 1},
        {"logit_bias": ban, "temperature": 0.0},
        {"logit_bias": {k: v for k, v in ban.items() if k != 11}},
        {"top_p": 0.5},
    ]
    rows = [sequence(20, i, **{"temperature": 0.01} | params) for i, params in enumerate(menu)]
    sampled = sample(logits_for(8, 20), rows)
    assert sorted(sampled.failed) == [3, 4, 5]
    assert all("logit_bias" in reason for reason in sampled.failed.values())
    assert sampled.token_ids[6] == 11
    assert sampled.token_ids[7] == sample_slowly(logits_for(8, 20)[7], rows[7])[0]


def test_logits_that_overflow_over_a_temperature_are_greedy_and_spoil_no_others() -> None:
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(7, 300, generator=generator) * 1e35
    logits[0] /= 1e35
    logits[5] -= 1e37  # all of them
    cuts: list[dict[str, object]] = [
        {}, {}, {"top_k": 5}, {"min_p": 0.1}, {"top_p": 0.5}, {}, {"temperature": 1.0}
    ]  # fmt: skip
    rows = [
        sequence(300, j, **({"temperature": 1e-4, "seed": j} | cut)) for j, cut in enumerate(cuts)
    ]
    wanted = [sample_slowly(logits[j], row)[0] for j, row in enumerate(rows)]
    tokens, _ = run(logits.clone(), rows)
    assert tokens == wanted
    assert tokens[1:6] == logits[1:6].argmax(dim=1).tolist()


def test_penalties_follow_the_tokens_as_they_come() -> None:
    """What is kept from step to step is what would be counted afresh."""
    vocab = 40
    params = {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.4}
    row = sequence(vocab, 3, prompt=90, output=0, **params)
    for step in range(200):
        logits = logits_for(1, vocab, seed=step)
        token = run(logits.clone(), [row])[0][0]
        assert token == sample_slowly(logits[0], row)[0]
        row.append(token)
