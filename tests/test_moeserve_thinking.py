"""A limit on thinking cuts at the right token: alone, at every row of a run of drafts, whatever was
drafted and how deep; where it means nothing it is refused by name.

Several ranks: tests/dist/test_thinking_dist.py. HTTP: tests/test_moeserve_server_thinking.py.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from models.deepseek.random_checkpoint import write_random_checkpoint
from models.deepseek.random_families import family_config
from moeserve.admission import check_request, typed_sampling
from moeserve.continuation import Continuation
from moeserve.errors import InvalidRequest
from moeserve.llm import LLM
from moeserve.request import FinishReason, Request, SamplingParams, ThinkingMarkers
from moeserve.sampler import sample, sample_slowly
from moeserve.sequence import Sequence
from moeserve.speculate.drafter import choose_drafts
from moeserve.speculate.run_limits import cut_run
from moeserve.speculate.tree import chain
from moeserve.speculate.verify import Rule, rows_of, verify
from moeserve.thinking import Thought, markers_of
from moeserve.tokenizer import Tokenizer

BUNDLED = Path(__file__).parents[1] / "checkpoints" / "tiny"
VOCAB = 12
ONE = ThinkingMarkers((1,), (2,), ((3,),))
SPELLED = ThinkingMarkers((1, 4), (4, 4, 5), ((3,),))  # its beginning may begin within itself


pytestmark = pytest.mark.usefixtures("one_thread")


def asked(prompt: tuple[int, ...], most: int | None, markers: Any = ONE, **params: Any) -> Request:
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 40} | params)
    sampling = msgspec.structs.replace(sampling, max_thinking_tokens=most)
    return Request(request_id="t", prompt_token_ids=prompt, sampling=sampling, thinking=markers)


def sequence(prompt: tuple[int, ...], most: int | None, markers: Any = ONE, **params: Any) -> Any:
    return Sequence(asked(prompt, most, markers, **params), 0, 1000)


# -- what is forced -------------------------------------------------------------------------------


def forced_slowly(prompt: list[int], output: list[int], most: int, m: ThinkingMarkers) -> Any:
    """The twin: read all tokens from the first, markers where they are whole."""
    open_part, count, since = False, 0, []
    for i, token in enumerate([*prompt, *output]):
        since.append(token)
        if open_part:
            count += i >= len(prompt)
            if any(tuple(since[-len(e) :]) == e for e in (m.end, *m.also_ends)):
                open_part, since = False, []
        elif tuple(since[-len(m.start) :]) == m.start:
            open_part, count, since = True, 0, []
    if not open_part or count < most:
        return None
    return next(
        m.end[n] for n in range(len(m.end) - 1, -1, -1) if n == 0 or tuple(since[-n:]) == m.end[:n]
    )


@pytest.mark.parametrize("markers", [ONE, SPELLED], ids=["one", "spelled"])
def test_forced_tokens_are_those_of_the_twin(markers: ThinkingMarkers) -> None:
    rng, seen = random.Random(3), 0
    for _ in range(3000):
        prompt = [rng.randrange(1, 8) for _ in range(rng.randrange(1, 4))]
        output = [rng.randrange(1, 8) for _ in range(rng.randrange(14))]
        most = rng.randrange(6)
        thought = Thought.of(asked(tuple(prompt), most, markers))
        assert thought is not None
        for i in range(len(output) + 1):
            wanted = forced_slowly(prompt, output[:i], most, markers)
            assert thought.after_all(output[:i]).forced == wanted, (prompt, output[:i], most)
            seen += wanted is not None
    assert seen > 500


@pytest.mark.parametrize(
    ("prompt", "thinks"),
    [((1,), True), ((1, 9, 9), True), ((9, 1, 9, 2), False), ((1, 3), False), ((9,), False)]
    + [((2, 1), True), ((1, 2, *[9] * 40), False), ((1, *[9] * 40), True)],
)
def test_a_prompt_opens_thinking(prompt: tuple[int, ...], thinks: bool) -> None:
    assert sequence(prompt, 0).thought.forced == (2 if thinks else None)
    assert sequence(prompt, None).thought is None


def test_markers_of_tokenizers(tmp_path: Path) -> None:
    tokenizer = Tokenizer(BUNDLED)
    ids = [tokenizer.fast.token_to_id(x) for x in ("<think>", "</think>")]
    assert markers_of(tokenizer) == ThinkingMarkers((ids[0],), (ids[1],))
    assert markers_of(tokenizer, also_ends=["<think>", "no token"]) == ThinkingMarkers(
        (ids[0],), (ids[1],), ((ids[0],),)
    )
    text = (BUNDLED / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(text.replace("think>", "muse>"))
    other = Tokenizer(tmp_path)
    assert markers_of(other) is None
    spelled = markers_of(other, thinks=True)
    assert spelled is not None and len(spelled.end) > 1
    assert other.decode(spelled.end, skip_special_tokens=False) == "</think>"


# -- the sampler and verification -----------------------------------------------------------------


def model(tokens: list[int]) -> Tensor:
    """[V] logits after these tokens; markers are unlikely but come."""
    generator = torch.Generator().manual_seed(sum((i + 1) * t for i, t in enumerate(tokens[-3:])))
    return torch.randn(VOCAB, generator=generator) * 2


SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"logprobs": 2},
    {"temperature": 1.0, "seed": 5, "logprobs": 1},
    {"temperature": 0.8, "top_k": 4, "top_p": 0.9, "min_p": 0.05, "seed": 6},
    {"temperature": 0.9, "frequency_penalty": 0.7, "logit_bias": {2: -100.0, 4: -1.0}, "seed": 7},
    {"min_tokens": 20, "stop_token_ids": (11,), "repetition_penalty": 1.4},
]


def one_by_one(one: Sequence, count: int) -> tuple[list[int], list[Any]]:
    entries: list[Any] = []
    for _ in range(count):
        row = model(one.tokens)
        sampled = sample(row[None].clone(), [one])
        slowly = sample_slowly(row, one)
        assert sampled.token_ids[0] == slowly[0]
        forced = one.thought.forced if one.thought is not None else None
        assert forced is None or sampled.token_ids[0] == forced
        for entry in sampled.logprobs.values():  # the model's own, also of what was forced
            own = torch.log_softmax(row, dim=-1)
            assert entry.logprob == pytest.approx(float(own[entry.token_id]), abs=1e-5)
            entries.append(entry)
        one.append(sampled.token_ids[0])
    return one.tokens[one.num_prompt_tokens :], entries


@pytest.mark.parametrize("markers", [ONE, SPELLED], ids=["one", "spelled"])
def test_a_run_of_drafts_crosses_the_limit_at_every_offset(markers: ThinkingMarkers) -> None:
    """Drafts: what comes without a limit, what comes with it, and the latter with one wrong."""
    prompt, length, cut = (9, *markers.start), 18, 0
    for params in SAMPLINGS:
        free, _ = one_by_one(sequence(prompt, None, **params), length)
        for most in range(6):
            wanted, entries = one_by_one(sequence(prompt, most, markers, **params), length)
            cut += wanted[most : most + 1] == [markers.end[0]] and free[most] != markers.end[0]
            for k in range(1, 6):
                for kind in ("free", "right", "wrong"):
                    one = sequence(prompt, most, markers, **params)
                    got: list[Any] = []
                    while one.num_output_tokens < length:
                        at = one.num_output_tokens
                        drafts = (free if kind == "free" else wanted)[at : at + k]
                        if kind == "wrong":
                            place = at % len(drafts)
                            drafts = [*drafts]
                            drafts[place] = (drafts[place] + 1) % VOCAB
                        tree = chain(drafts)
                        before = one.thought
                        rows = torch.stack([model(r.tokens) for r in rows_of(one, tree)])
                        (verdict,) = verify(rows, [one], [tree])
                        assert one.thought == before and verdict.failed is None
                        run = cut_run(one, verdict.tokens)
                        assert run.reason is None or 11 in verdict.tokens
                        for token in verdict.tokens:
                            one.append(token)
                        got += verdict.logprobs
                        if kind == "right" and at + k < length:
                            assert verdict.num_accepted == k
                    assert one.tokens[len(prompt) :][:length] == wanted, (params, most, k, kind)
                    assert got[:length] == entries
    assert cut > 15


def test_the_rejection_rule_forces_too() -> None:
    """Drafts with probabilities, drawn where the limit is not known."""
    markers, forced = SPELLED, 0
    for seed in range(60):
        one = sequence((9, *markers.start), seed % 4, markers, temperature=1.0, seed=seed)
        while one.num_output_tokens < 12:
            params: dict[str, Any] = {"temperature": 1.0, "seed": seed + 1}
            plain = sequence(tuple(one.tokens), None, **params)
            path: list[int] = []
            probs: list[Any] = []
            for _ in range(4):
                row = Continuation(plain, tuple(path))
                ids, found = choose_drafts(model(row.tokens)[None], [row], Rule.REJECTION)
                assert ids[0] is not None
                path.append(ids[0])
                probs.append(found[0])
            tree = chain(path, probs)
            rows = torch.stack([model(r.tokens) for r in rows_of(one, tree)])
            (verdict,) = verify(rows, [one], [tree], Rule.REJECTION)
            for token in verdict.tokens:
                wanted = one.thought.forced
                assert wanted is None or token == wanted
                forced += wanted is not None
                one.append(token)
    assert forced > 100


def test_forcing_wins_over_bars_and_leaves_the_model_s_faults() -> None:
    one = sequence((1,), 0, min_tokens=5, stop_token_ids=(2,), logit_bias={2: float("-inf")})
    row = model(one.tokens)
    assert sample(row[None].clone(), [one]).token_ids == [2]
    row[4] = float("nan")
    assert sample(row[None], [one]).failed
    (row_of,) = [Continuation(sequence((9,), 2), (1, 8, 8))]
    assert row_of.thought is not None and row_of.thought.forced == 2


# -- the engine -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("thinking") / "v3"
    config = family_config("v3", num_hidden_layers=2, max_position_embeddings=256)
    write_random_checkpoint(made, config)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (made / name).write_bytes((BUNDLED / name).read_bytes())
    return made


def generate(
    folder: Path, prompts: list[list[int]], each: list[SamplingParams], **more: Any
) -> Any:
    with LLM(folder, kv_tokens=2048, max_model_len=96, quiet=True, **more) as llm:
        return llm.generate(prompts, each)


def told(outputs: Any) -> list[Any]:
    return [(o.token_ids, o.logprobs, o.finish_reason) for o in outputs]


def test_llm_gives_the_same_tokens_with_every_drafter_and_depth() -> None:
    tokenizer = Tokenizer(BUNDLED)
    (start, end) = (tokenizer.fast.token_to_id(x) for x in ("<think>", "</think>"))
    text = tokenizer.encode("one two one two one two one two", add_special_tokens=True)
    samplings = [
        SamplingParams(**{"temperature": 0.0, "max_tokens": 16, "ignore_eos": True} | params)
        for params in ({"logprobs": 1}, {"temperature": 0.9, "seed": 3, "logprobs": 0})
    ]
    limited = [
        msgspec.structs.replace(s, max_thinking_tokens=most) for s in samplings for most in range(7)
    ]
    # It thinks what it thought before: a prompt look-up has drafts from the first token on.
    again = generate(BUNDLED, [[*text, start]], samplings[:1])[0].token_ids
    prompts: Any = [[*text, start, *again, end, *text, start]] * len(limited)
    free = generate(BUNDLED, prompts[:2], samplings)
    plain = generate(BUNDLED, prompts, limited)
    for output, sampling in zip(plain, limited, strict=True):
        most = sampling.max_thinking_tokens
        assert most is not None and len(output.token_ids) == 16
        unlimited = free[sampling.temperature > 0].token_ids
        assert end not in unlimited[:7], "the model ends its thinking itself: nothing is shown"
        assert output.token_ids[: most + 1] == [*unlimited[:most], end]
        assert output.logprobs[most].logprob < 0 and output.logprobs[most].token_id == end
    for depth in range(1, 5):
        for name in ("mtp", "ngram"):
            ran = generate(BUNDLED, prompts, limited, speculate=f"{name}:{depth}")
            assert told(ran) == told(plain), (name, depth)
            assert sum(o.num_accepted for o in ran) > 0 and sum(o.num_rejected for o in ran) > 0


def test_limits_and_models_without_markers_are_refused_by_name(folder: Path) -> None:
    for most, word in ((-1, "at least 0"), (2**63, "below")):
        with pytest.raises(InvalidRequest, match=f"max_thinking_tokens.*{word}"):
            check_request(asked((1,), most), max_model_len=50)
    with pytest.raises(InvalidRequest, match="max_thinking_tokens=3.*no thinking markers"):
        check_request(asked((1,), 3, None), max_model_len=50)
    with pytest.raises(InvalidRequest, match="max_thinking_tokens.*within"):
        check_request(asked((1,), 3), max_model_len=50, vocab_size=2)
    for bad in (True, 1.5, "2"):
        with pytest.raises(InvalidRequest, match="max_thinking_tokens"):
            typed_sampling(SamplingParams(max_thinking_tokens=bad))  # type: ignore[arg-type]
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("think>", "muse>"))
    config = folder / "tokenizer_config.json"
    config.write_text(config.read_text().replace("think>", "muse>"))
    with LLM(folder, kv_tokens=512, max_model_len=96, quiet=True) as llm:
        with pytest.raises(InvalidRequest, match="max_thinking_tokens=2.*no thinking markers"):
            llm.generate([[5, 6]], SamplingParams(max_thinking_tokens=2))
        assert llm.generate([[5, 6]])[0].finish_reason is FinishReason.LENGTH
