"""That speculative sampling gives the target's distribution, by chi-square over 200,000 samples.

A target of 6 tokens, whose logits depend on all tokens before; the sampler's own code makes its
probabilities, penalties of the drafted prefix included. Drafters: right, always wrong, sharply
biased, flat. Everything is a function of fixed seeds, so the outcome never varies. Rules that are
wrong on purpose fail the same test.

Shape letters: N samples, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import chi2

from moeserve.continuation import Continuation
from moeserve.draw import Doubles, Stream, kept, uniforms
from moeserve.request import Request, SamplingParams
from moeserve.sampler import sample
from moeserve.sequence import Sequence
from moeserve.speculate.drafter import choose_drafts, draw_children
from moeserve.speculate.rejection import Ids, acceptance_rate, accepts, pick, residual, without
from moeserve.speculate.tree import DraftTree, chain
from moeserve.speculate.verify import Rule, rows_of, verify

V = 6
N = 200_000
PROMPT = (1, 4, 4)
SETTINGS: list[dict[str, object]] = [
    {"temperature": 1.0},
    {"temperature": 0.4, "repetition_penalty": 1.6},
    {"temperature": 1.7, "top_p": 0.8},
    {"temperature": 1.0, "top_k": 3, "presence_penalty": 1.0, "logit_bias": {2: 1.5}},
    {"temperature": 1.2, "min_p": 0.12, "frequency_penalty": 0.8},
    {"temperature": 0.9, "top_k": 4, "top_p": 0.9, "min_tokens": 3, "stop_token_ids": (0,)},
]
DRAFTERS = ["right", "wrong", "biased", "flat"]
Tables = list[Doubles]  # by depth d: [V, ..., V] of d + 1 axes, the last one the distribution


def sequence(seed: int, params: dict[str, object]) -> Sequence:
    sampling = SamplingParams(max_tokens=50, seed=seed, **params)  # type: ignore[arg-type]
    request = Request(request_id=f"r{seed}", prompt_token_ids=PROMPT, sampling=sampling)
    made = Sequence(request, 0, 1000)
    made.append(4)
    return made


def target_logits(scale: float = 1.6, seed: int = 5) -> list[torch.Tensor]:
    """By depth, [V ** d, V]: row of a prefix as a number of d digits."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(V**d, V, generator=generator) * scale for d in range(3)]


def prefixes(depth: int) -> list[tuple[int, ...]]:
    return [tuple(map(int, at)) for at in np.ndindex(*(V,) * depth)]


def probabilities(logits: list[torch.Tensor], params: dict[str, object]) -> Tables:
    """What the sampler draws from, by its own code."""
    one = sequence(0, params)
    tables = []
    for depth, rows in enumerate(logits):
        members = [Continuation(one, prefix) for prefix in prefixes(depth)]
        softmax = sample(rows.clone(), members, range(len(members))).softmax
        made = [kept(softmax[j], one.sampling) for j in range(len(members))]
        tables.append(np.stack(made).reshape((V,) * (depth + 1)))
    return tables


def draft_logits(kind: str, logits: list[torch.Tensor]) -> list[torch.Tensor]:
    match kind:
        case "right":
            return logits
        case "wrong":  # what the target likes least, almost surely
            return [-6 * x for x in logits]
        case "biased":  # sharp, and mostly elsewhere
            return [4 * x.roll(1, -1) + x for x in logits]
        case _:
            return [torch.zeros_like(x) for x in logits]


@functools.cache
def numbers(position: int, stream: Stream, number: int = 0) -> Doubles:
    return uniforms(range(N), [position] * N, stream.round(number))


def at(tables: Tables, tokens: list[Ids]) -> Doubles:
    """[N, V] of the prefix of each sample."""
    table = tables[len(tokens)]
    return table[tuple(tokens)] if tokens else np.broadcast_to(table, (N, V))


Step = Callable[[Doubles, Doubles, Ids, int], tuple[NDArray[np.bool_], Ids]]


def right_rule(p: Doubles, q: Doubles, draft: Ids, position: int) -> tuple[NDArray[np.bool_], Ids]:
    accepted = accepts(p, q, draft, numbers(position, Stream.ACCEPT))
    other = pick(residual(p, q), numbers(position, Stream.RESIDUAL))
    return accepted, np.where(accepted, draft, other)


def speculate(p: Tables, q: Tables, step: Step = right_rule) -> tuple[NDArray[np.int64], Doubles]:
    """Two drafts and what follows -> tokens [N, 3], share accepted at each of the two."""
    tokens: list[Ids] = []
    going = np.ones(N, np.bool_)
    rates = np.zeros(2)
    for depth in range(3):
        position = 1 + depth
        here = at(p, tokens)
        own = pick(here, numbers(position, Stream.TARGET))
        if depth == 2:
            tokens.append(own)
            break
        theirs = at(q, tokens)
        draft = pick(theirs, numbers(position, Stream.DRAFT))
        accepted, token = step(here, theirs, draft, position)
        rates[depth] = (accepted & going).sum() / max(going.sum(), 1)
        tokens.append(np.where(going, token, own))
        going = going & accepted
    return np.stack(tokens, axis=-1), rates


def joint(p: Tables) -> Doubles:
    """[V, V, V] chance of each three tokens."""
    return p[0][:, None, None] * p[1][:, :, None] * p[2]


def p_value(tokens: NDArray[np.int64], expected: Doubles) -> float:
    """Chi-square of the joint counts; cells under 5 expected are one. 0 where a token came that has
    no chance."""
    flat = expected.reshape(-1)
    cells = np.ravel_multi_index(tuple(tokens.T), expected.shape)
    counts = np.bincount(cells, minlength=flat.size)
    if counts[flat == 0].any():
        return 0.0
    mean = flat * len(tokens)
    large = mean >= 5
    observed, wanted = [*counts[large]], [*mean[large]]
    if mean[~large].sum() >= 5:
        observed.append(counts[~large].sum())
        wanted.append(mean[~large].sum())
    o, e = np.array(observed, float), np.array(wanted)
    return float(chi2.sf(((o - e) ** 2 / e).sum(), max(len(e) - 1, 1)))


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("params", SETTINGS, ids=[str(i) for i in range(len(SETTINGS))])
def test_rejection_gives_the_targets_distribution(drafter: str, params: dict[str, object]) -> None:
    logits = target_logits()
    p, q = probabilities(logits, params), probabilities(draft_logits(drafter, logits), params)
    tokens, rates = speculate(p, q)
    assert p_value(tokens, joint(p)) > 1e-4
    first = float(acceptance_rate(p[0][None], q[0][None])[0])
    assert abs(rates[0] - first) < 0.006  # as often as the theory says
    if drafter == "right":
        assert rates.tolist() == [1.0, 1.0]
    if drafter == "wrong":
        assert rates[0] < 0.1


def keeps_p(p: Doubles, q: Doubles, draft: Ids, position: int) -> tuple[NDArray[np.bool_], Ids]:
    """Wrong: draws from p after a rejection."""
    accepted = accepts(p, q, draft, numbers(position, Stream.ACCEPT))
    return accepted, np.where(accepted, draft, pick(p, numbers(position, Stream.RESIDUAL)))


def one_number(p: Doubles, q: Doubles, draft: Ids, position: int) -> tuple[NDArray[np.bool_], Ids]:
    """Wrong: the number that rejected also draws from the residual."""
    u = numbers(position, Stream.ACCEPT)
    accepted = accepts(p, q, draft, u)
    return accepted, np.where(accepted, draft, pick(residual(p, q), u))


def takes_likely(
    p: Doubles, q: Doubles, draft: Ids, position: int
) -> tuple[NDArray[np.bool_], Ids]:
    """Wrong: accepts what is likely enough ("typical acceptance")."""
    accepted = p[np.arange(N), draft] > 0.2
    other = pick(residual(p, q), numbers(position, Stream.RESIDUAL))
    return accepted, np.where(accepted, draft, other)


def ignores_q(p: Doubles, q: Doubles, draft: Ids, position: int) -> tuple[NDArray[np.bool_], Ids]:
    """Wrong: takes a drawn draft for a certain one."""
    sure = np.zeros_like(q)
    sure[np.arange(N), draft] = 1.0
    return right_rule(p, sure, draft, position)


@pytest.mark.parametrize("rule", [keeps_p, one_number, takes_likely])
def test_a_wrong_rule_fails(rule: Step) -> None:
    logits, params = target_logits(), SETTINGS[0]
    p, q = probabilities(logits, params), probabilities(draft_logits("biased", logits), params)
    assert p_value(speculate(p, q, rule)[0], joint(p)) < 1e-9
    p, q = probabilities(logits, params), probabilities(draft_logits("flat", logits), params)
    assert p_value(speculate(p, q, rule)[0], joint(p)) < 1e-9


def test_a_draw_taken_for_certain_is_right_and_accepted_less() -> None:
    """Why SAME loses nothing for drafts that no chance chose, and loses for those drawn apart."""
    logits, params = target_logits(), SETTINGS[0]
    p, q = probabilities(logits, params), probabilities(draft_logits("flat", logits), params)
    tokens, rates = speculate(p, q, ignores_q)
    assert p_value(tokens, joint(p)) > 1e-4
    assert rates[0] < speculate(p, q)[1][0] - 0.1


def test_stale_penalties_fail() -> None:
    """Counts of the drafted prefix matter: without them the distribution is another."""
    logits, params = target_logits(), SETTINGS[1]
    p = probabilities(logits, params)
    one = sequence(0, params)
    stale = [p[0]]
    for depth in (1, 2):
        rows = logits[depth]
        softmax = sample(rows.clone(), [Continuation(one)] * len(rows), range(len(rows))).softmax
        made = [kept(softmax[j], one.sampling) for j in range(len(rows))]
        stale.append(np.stack(made).reshape((V,) * (depth + 1)))
    q = probabilities(draft_logits("biased", logits), params)
    assert p_value(speculate(stale, q)[0], joint(p)) < 1e-9


# -- siblings -----------------------------------------------------------------------------------


def candidates(
    p: Doubles, q: Doubles, most: int, forget: bool = False
) -> tuple[NDArray[np.int64], float]:
    """One row of the tree, N times -> tokens [N, 1], share accepted. forget: the wrong rule, which
    goes on with the same q."""
    p, q = np.broadcast_to(p, (N, V)), np.broadcast_to(q, (N, V))
    rest, judged = q, q
    token, going = np.zeros(N, np.int64), np.ones(N, np.bool_)
    for number in range(most):
        left = rest.any(axis=-1)
        draft = pick(np.where(left[:, None], rest, 1.0), numbers(1, Stream.DRAFT, number))
        taken = accepts(p, judged, draft, numbers(1, Stream.ACCEPT, number)) & going & left
        token[taken] = draft[taken]
        still = (going & ~taken & left)[:, None]
        p = np.where(still, residual(p, judged), p)
        rest = without(rest, draft)
        judged = judged if forget else rest
        going &= ~taken
    other = pick(p, numbers(1, Stream.RESIDUAL))
    return np.where(going, other, token)[:, None], 1 - going.mean()


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("params", [SETTINGS[0], SETTINGS[3]], ids=["plain", "cut"])
def test_siblings_give_the_targets_distribution(drafter: str, params: dict[str, object]) -> None:
    logits = target_logits(scale=0.7)[:1]
    p = probabilities(logits, params)[0]
    q = probabilities(draft_logits(drafter, logits), params)[0]
    rates = []
    for most in (1, 2, 4):
        tokens, rate = candidates(p, q, most)
        assert p_value(tokens, p) > 1e-4
        rates.append(rate)
    assert rates == sorted(rates)
    if drafter == "flat" and len(params) == 1:
        assert rates[2] > rates[0] + 0.1
        assert p_value(candidates(p, q, 4, forget=True)[0], p) < 1e-9


# -- what serves is what was tested ---------------------------------------------------------------


@pytest.mark.parametrize("params", [SETTINGS[1], SETTINGS[3]], ids=["penalties", "cut"])
def test_verify_takes_the_very_tokens_of_the_tested_rule(params: dict[str, object]) -> None:
    logits = target_logits()
    guesses = draft_logits("biased", logits)
    p, q = probabilities(logits, params), probabilities(guesses, params)
    wanted = speculate(p, q)[0]
    for seed in range(250):
        one = sequence(seed, params)
        drafts: list[int] = []
        dists: list[Doubles] = []
        for depth in range(2):
            row = np.ravel_multi_index(tuple(drafts), (V,) * depth) if depth else 0
            ids, probs = choose_drafts(
                guesses[depth][row][None].clone(),
                [Continuation(one, tuple(drafts))],
                Rule.REJECTION,
            )
            assert ids[0] is not None and probs[0] is not None
            drafts.append(ids[0])
            dists.append(probs[0])
        a, b = drafts
        rows = torch.stack([logits[0][0], logits[1][a], logits[2][a * V + b]])
        verdict = verify(rows, [one], [chain(drafts, dists)], Rule.REJECTION)[0]
        judged = min(len(verdict.tokens), 2)  # what follows two accepted ones is the sampler's
        assert verdict.tokens[:judged] == tuple(wanted[seed][:judged].tolist())
        assert list(verdict.tokens[:-1]) == drafts[: verdict.num_accepted]


def test_verify_judges_siblings_by_the_tested_rule() -> None:
    logits, params = target_logits(scale=0.7), SETTINGS[0]
    p = probabilities(logits[:1], params)[0]
    q = probabilities(draft_logits("flat", logits)[:1], params)[0]
    wanted = candidates(p, q, 3)[0]
    for seed in range(200):
        one = sequence(seed, params)
        tokens = draw_children(q, 3, seed, one.num_output_tokens)
        tree = DraftTree(tuple(tokens), (-1, -1, -1), {0: q})
        rows = torch.cat([logits[0], logits[1][tokens]])
        assert len(rows_of(one, tree)) == 4
        verdict = verify(rows, [one], [tree], Rule.REJECTION)[0]
        assert verdict.tokens[0] == wanted[seed][0]
