"""The device's sampler in the interpreter: rows of every kind, as the CPU's sampler has them."""

from __future__ import annotations

import random

import numpy as np
import torch

from moeserve.request import Request, SamplingParams
from moeserve.row_draws import draws_of
from moeserve.sampler import sample
from moeserve.sampler_device import sample_on_device
from moeserve.sequence import Sequence

VOCAB = 300
MENU: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "seed": -1},
    {"temperature": 3.0, "top_k": 1},
    {"temperature": 0.9, "top_k": 5},
    {"temperature": 1.1, "top_p": 0.5},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.7},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 1.0, "repetition_penalty": 0.6, "frequency_penalty": 0.5},
    {"temperature": 0.0, "logit_bias": {4: 9.0, 9: -100.0, 0: -float("inf")}},
    {"temperature": 1.0, "min_tokens": 50, "stop_token_ids": (1, 2), "logit_bias": {1: 50.0}},
    {"temperature": 0.0, "logprobs": 4, "repetition_penalty": 1.3},
    {"temperature": 0.6, "logprobs": 3, "top_p": 0.9},
]


def sequence(number: int, params: dict[str, object]) -> Sequence:
    rng = random.Random(number)
    sampling = SamplingParams(max_tokens=100, **params)  # type: ignore[arg-type]
    prompt = tuple(rng.randrange(VOCAB) for _ in range(6))
    made = Sequence(Request(request_id=f"r{number}", prompt_token_ids=prompt, sampling=sampling),
                    0, 1000, frozenset({3, 5}))  # fmt: skip
    for _ in range(number % 5):
        made.append(rng.randrange(VOCAB))
    return made


def rows_and_logits(menu: list[dict[str, object]]) -> tuple[list[Sequence], torch.Tensor]:
    rows = [sequence(j, params) for j, params in enumerate(menu)]
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(len(menu))) * 3
    logits[:, ::7] = logits[:, 1:2]
    return rows, logits


def test_every_row_is_as_on_a_cpu() -> None:
    rows, logits = rows_and_logits(MENU * 2)
    some = {1, 3, 6, 8}  # 3 is greedy and has none
    want = sample(logits.clone(), rows, some)
    got = sample_on_device(logits.clone(), rows, some)
    assert got.token_ids == want.token_ids and got.failed == want.failed == {}
    assert got.logprobs == want.logprobs
    assert set(got.softmax) == set(want.softmax) == some - {3}
    for j, p in want.softmax.items():
        assert np.allclose(got.softmax[j], p, rtol=1e-5, atol=1e-30)


def test_greedy_rows_alone() -> None:
    rows, logits = rows_and_logits(MENU[:1] * 3)
    assert sample_on_device(logits, rows).token_ids == sample(logits, rows).token_ids


def test_rows_that_fail_fail_alone() -> None:
    barred = {"temperature": 1.0, "logit_bias": dict.fromkeys(range(VOCAB), -float("inf"))}
    menu = [*MENU[:6], barred, {"temperature": 1.0, "logprobs": 2}, *MENU[9:]]
    for spoilt in ([2], [7], []):
        rows, logits = rows_and_logits(menu)
        for j in spoilt:
            logits[j, 17] = float("nan")
        want, got = sample(logits.clone(), rows), sample_on_device(logits.clone(), rows)
        assert got.failed == want.failed and 6 in got.failed
        assert set(got.failed) == {6, *spoilt}
        sound = [j for j in range(len(menu)) if j not in got.failed]
        assert [got.token_ids[j] for j in sound] == [want.token_ids[j] for j in sound]
        for j in sound:
            assert got.logprobs.get(j) == want.logprobs.get(j)


def test_draws_of_one_copy() -> None:
    rows, _ = rows_and_logits(MENU)
    cuts = draws_of(rows, torch.device("cpu"))
    for j, row in enumerate(rows):
        hot = row.temperature >= 1e-5 and row.sampling.top_k != 1
        assert float(cuts.temperature[j]) == np.float32(row.temperature if hot else 0.0)
        assert int(cuts.top_k[j]) == row.sampling.top_k
        assert float(cuts.top_p[j]) == row.sampling.top_p
        assert float(cuts.min_p[j]) == np.float32(row.sampling.min_p)
        assert int(cuts.seeds[j]) % 2**64 == row.seed
        assert int(cuts.positions[j]) == row.num_output_tokens
