"""Sampling in the interpreter: the engine's own draw token for token, and the sorted twin."""

from __future__ import annotations

import itertools
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

from models.deepseek.kernels.gpu.errors import ShapeRefused
from models.deepseek.kernels.gpu.language import tl, triton
from models.deepseek.kernels.gpu.race import race_state, waiting_time, waiting_times_twin
from models.deepseek.kernels.gpu.row_peaks import CHUNK, argmax, argmax_twin
from models.deepseek.kernels.gpu.sampling import Cuts, draw, sample
from models.deepseek.kernels.gpu.sampling_twin import draw_twin, sample_twin
from moeserve.draw import Race, arrivals, waiting_times
from moeserve.draw import draw as engine_draw
from moeserve.request import SamplingParams

SEEDS = (0, 1, 2**63, 2**64 - 1, 0x123456789ABCDEF0)


def cuts(params: list[SamplingParams], seeds: list[int], positions: list[int]) -> Cuts:
    signed = [s - (1 << 64) if s >= 1 << 63 else s for s in seeds]
    return Cuts(
        torch.tensor([p.temperature for p in params], dtype=torch.float32),
        torch.tensor([p.top_k for p in params], dtype=torch.int32),
        torch.tensor([p.top_p for p in params], dtype=torch.float64),
        torch.tensor([p.min_p for p in params], dtype=torch.float32),
        torch.tensor(signed, dtype=torch.int64),
        torch.tensor(positions, dtype=torch.int64),
    )


def rows_of(all_cuts: Cuts, row: int) -> Cuts:
    return Cuts(*(getattr(all_cuts, f.name)[row : row + 1] for f in fields(Cuts)))


def many(vocab: int, seed: int = 0) -> tuple[list[SamplingParams], list[int], list[int]]:
    """One row of each combination of cuts, with seeds and positions of every kind."""
    params = [
        SamplingParams(top_k=k, top_p=p, min_p=m)
        for k, p, m in itertools.product(
            (0, 2, 5, vocab - 1, vocab + 3), (1.0, 0.9, 0.3, 1e-6), (0.0, 0.05, 1.0)
        )
    ]
    random = np.random.default_rng(seed)
    seeds = [*SEEDS, *random.integers(0, 2**64, len(params), dtype=np.uint64).tolist()]
    positions = random.integers(0, 5000, len(params)).tolist()
    return params, [int(s) for s in seeds[: len(params)]], positions


@triton.jit
def _times(out, seed, position, race: tl.constexpr, n: tl.constexpr):
    at = tl.arange(0, n)
    state = race_state(tl.load(seed), tl.load(position), race)
    tl.store(out + at, waiting_time(state, at))


@pytest.mark.parametrize("race", list(Race))
@pytest.mark.parametrize("seed", SEEDS)
def test_waiting_times_are_the_engines(race: Race, seed: int) -> None:
    position, n = 4321, 256
    place = cuts([SamplingParams()], [seed], [position])
    got = torch.empty(n, dtype=torch.float64)
    _times[(1,)](got, place.seeds, place.positions, int(race), n)
    want = waiting_times(arrivals([seed], [position], race, np.arange(n)))[0]
    twin = waiting_times_twin(seed, position, race, list(range(n)))
    assert np.array_equal(twin, want)
    # log against log1p: two roundings of 2**-53 each.
    assert np.allclose(got.numpy(), want, rtol=4e-16, atol=0)


@pytest.mark.parametrize(
    ("vocab", "spread"), [(40, 1.0), (700, 3.0), (129, 0.0), (CHUNK + 130, 5.0)]
)
def test_a_draw_is_the_engines(vocab: int, spread: float) -> None:
    """The same probabilities, seeds and positions: the same tokens. spread 0: all are ties."""
    params, seeds, positions = many(vocab)
    if vocab > CHUNK:
        params, seeds, positions = params[::5], seeds[::5], positions[::5]
    random = torch.Generator().manual_seed(vocab)
    probs = torch.softmax(torch.randn(len(params), vocab, generator=random) * spread, dim=1)
    given = cuts(params, seeds, positions)
    got = draw(probs, given)
    assert got.tokens.tolist() == engine_draw(probs.numpy(), params, seeds, positions)
    assert not got.failed.any()
    if vocab < 200:
        assert got.tokens.tolist() == [draw_twin(p, given, j) for j, p in enumerate(probs)]


def test_ties_at_the_edge_of_top_k() -> None:
    """Probabilities of few values: which of equals top-k keeps decides what can be drawn."""
    vocab, rows = 90, 24
    random = torch.Generator().manual_seed(3)
    probs = torch.randint(0, 3, (rows, vocab), generator=random).float() + 1e-3
    probs = probs / probs.sum(dim=1, keepdim=True)
    params = [SamplingParams(top_k=2 + 2 * j, top_p=(1.0, 0.5)[j % 2]) for j in range(rows)]
    seeds, positions = list(range(rows)), [7] * rows
    got = draw(probs, cuts(params, seeds, positions)).tokens.tolist()
    assert got == engine_draw(probs.numpy(), params, seeds, positions)


def test_zeros_are_never_drawn() -> None:
    probs = torch.zeros(20, 300)
    probs[:, 5], probs[:, 299] = 0.75, 0.25
    params = [SamplingParams(top_p=(1.0, 0.9)[j % 2], top_k=(0, 3)[j // 10]) for j in range(20)]
    got = draw(probs, cuts(params, list(range(20)), [0] * 20)).tokens.tolist()
    assert set(got) == {5, 299}
    assert got == engine_draw(probs.numpy(), params, list(range(20)), [0] * 20)


@pytest.mark.parametrize("min_p", [1e-45, 1e-40, 1e-38])
def test_a_least_probability_that_is_nothing_keeps_all(min_p: float) -> None:
    """min_p times the best underflows, or is the least number that there is."""
    random = torch.Generator().manual_seed(0)
    probs = torch.softmax(torch.randn(12, 700, generator=random) * 3, dim=1)
    probs[:, 5::7] = 0.0
    params = [
        SamplingParams(min_p=min_p, top_p=(1.0, 0.9)[j % 2], top_k=(0, 9, 0)[j % 3])
        for j in range(12)
    ]
    seeds, positions = list(range(12)), [3] * 12
    got = draw(probs, cuts(params, seeds, positions)).tokens.tolist()
    assert got == engine_draw(probs.numpy(), params, seeds, positions)


def test_logits_that_overflow_over_the_temperature_are_greedy() -> None:
    random = torch.Generator().manual_seed(1)
    logits = torch.randn(6, 300, generator=random) * 1e35
    logits[5] -= 1e37  # all of them
    fields: list[dict[str, Any]] = [
        {}, {"top_k": 5}, {"min_p": 0.1}, {"top_p": 0.5}, {"top_k": 4, "top_p": 0.5}, {}
    ]  # fmt: skip
    params = [SamplingParams(temperature=1e-4, **x) for x in fields]
    given = cuts(params, list(range(6)), [0] * 6)
    got = sample(logits, given)
    assert got.tokens.tolist() == logits.argmax(dim=1).tolist() == sample_twin(logits, given)[0]
    assert not got.failed.any()


@pytest.mark.parametrize("vocab", [1, 50, 300, CHUNK + 5])
def test_from_logits(vocab: int) -> None:
    rows = 8
    random = torch.Generator().manual_seed(vocab)
    padded = torch.full((rows, vocab + 9), float("nan"))
    logits = padded[:, :vocab]
    logits.copy_(torch.randn(rows, vocab, generator=random) * 4)
    logits[1] = logits[1].round()  # ties of the best
    heats = [0.0, 0.0, 1.0, 0.3, 2.0, 1.0, 0.01, 1.0]
    params = [
        SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m)
        for t, k, p, m in zip(
            heats,
            [0, 5, 0, 0, 3, 1, 0, 0],
            [1, 0.5, 1, 0.9, 0.8, 1, 1, 1],
            [0, 0, 0, 0, 0, 0, 0, 0.1],
            strict=True,
        )
    ]
    given = cuts(params, list(range(rows)), [3] * rows)
    got = sample(logits, given)
    tokens, probs = sample_twin(logits, given)
    assert got.tokens.tolist() == tokens and not got.failed.any()
    assert got.probs is not None
    hot = [j for j, heat in enumerate(heats) if heat > 0]
    # exp of a logit over a temperature: its error is that of their quotient, times the quotient.
    size = (logits / given.temperature.clamp_min(0.01)[:, None]).abs().amax(dim=1)[hot, None]
    error = (got.probs[hot].double() - probs[hot]).abs()
    assert (error <= (2**-23 * (4 + size)) * probs[hot] + 1e-38).all()
    alone = sample(logits[3:4], rows_of(given, 3))
    assert torch.equal(alone.tokens, got.tokens[3:4])
    assert alone.probs is not None and torch.equal(alone.probs[0], got.probs[3])


def test_the_first_is_that_of_probabilities_where_logits_differ() -> None:
    """Logits an ulp apart have one probability: top-p keeps the lowest id, top-k 1 the largest."""
    vocab, rows = CHUNK + 90, 12
    logits = torch.full((rows, vocab), -30.0)
    logits[:, 10] = 0.1
    logits[:, 77] = float(np.nextafter(np.float32(0.1), np.float32(1)))
    logits[6:, 77] = -30.0
    logits[6:, CHUNK + 5] = float(np.nextafter(np.float32(0.1), np.float32(1)))
    params = [SamplingParams(top_p=0.3, min_p=(0.0, 0.01)[j % 2]) for j in range(rows)]
    params[0] = SamplingParams(top_p=0.3, top_k=2)
    params[5] = params[11] = SamplingParams(top_p=0.3, top_k=1)
    seeds = list(range(rows))
    got = sample(logits, cuts(params, seeds, [0] * rows))
    assert got.probs is not None and torch.equal(got.probs[0, 10], got.probs[0, 77])
    want = engine_draw(got.probs.numpy(), params, seeds, [0] * rows)
    want[5], want[11] = 77, CHUNK + 5
    assert got.tokens.tolist() == want
    assert set(want) == {10, 77, CHUNK + 5}


def test_greedy_takes_the_lowest_id_of_a_tie() -> None:
    logits = torch.zeros(4, 2 * CHUNK + 7)
    logits[1, [CHUNK, CHUNK + 3, 2 * CHUNK + 1]] = 5.0
    logits[2, 2 * CHUNK + 6] = 1.0
    logits[3] = float("-inf")
    logits[3, 17] = -1e30
    tokens, failed = argmax(logits)
    assert tokens.tolist() == [0, CHUNK, 2 * CHUNK + 6, 17] and not failed.any()
    assert torch.equal(tokens, argmax_twin(logits))
    assert torch.equal(sample(logits, None).tokens, tokens)


def test_rows_without_a_finite_best_fail_alone() -> None:
    logits = torch.randn(5, 200, generator=torch.Generator().manual_seed(0))
    logits[1, 7] = float("nan")
    logits[2] = float("-inf")
    logits[3, 9] = float("inf")
    clean = sample(logits[[0, 4]], cuts([SamplingParams(top_p=0.5)] * 2, [1, 2], [0, 0]))
    for params in (SamplingParams(top_p=0.5), SamplingParams(top_k=3), SamplingParams(min_p=0.1)):
        got = sample(logits, cuts([params] * 5, [1, 0, 0, 0, 2], [0] * 5))
        assert got.failed.tolist() == [False, True, True, True, False]
        assert ((got.tokens >= 0) & (got.tokens < 200)).all()
        if params.top_p < 1:
            assert torch.equal(got.tokens[[0, 4]], clean.tokens)
    assert argmax(logits)[1].tolist() == [False, True, True, True, False]


def test_no_rows_and_wrong_shapes() -> None:
    none = torch.zeros(0, 9)
    assert sample(none, cuts([], [], [])).tokens.shape == (0,)
    good = cuts([SamplingParams()], [0], [0])
    with pytest.raises(ShapeRefused, match="logits"):
        sample(torch.zeros(1, 9, dtype=torch.bfloat16), good)
    with pytest.raises(ShapeRefused, match="temperature"):
        sample(torch.zeros(2, 9), good)
