"""text_offset: the text of a choice, from a token's offset on, begins with that token's text."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server_world import events, write_sentencepiece_like

from moeserve.request import FinishReason, Request, TokenOutput
from moeserve.server.rehearsal import Rehearsal, output, write_tokenizer


def _anything(request: Request) -> Iterator[TokenOutput]:
    """Any tokens: special ones, halves of characters, ids without a text."""
    sampling = request.sampling
    chance = random.Random(sampling.seed)
    for index in range(sampling.max_tokens):
        last = index == sampling.max_tokens - 1
        token = chance.choice([chance.randrange(290), 0, 1, 2])
        yield output(request, (token,), FinishReason.LENGTH if last else None, first=index == 0)
    if sampling.max_tokens == 0:
        yield output(request, (), FinishReason.LENGTH, first=True)


@pytest.fixture(scope="module", params=["bytes", "sentencepiece"])
def job(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rehearsal]:
    folder = tmp_path_factory.mktemp(request.param)
    (write_tokenizer if request.param == "bytes" else write_sentencepiece_like)(folder)
    with Rehearsal(folder, script=_anything) as running:
        yield running


@pytest.fixture(scope="module")
def http(job: Rehearsal) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=job.url) as client:
        yield client


words = st.sampled_from(
    ["the", " hello", "  ", "é🎉", "你", "</s>", "<s>", "\n", "ﬁ", "<unk>", "ll"]
)
prompts = st.lists(words, min_size=1, max_size=6).map("".join) | st.lists(
    st.integers(0, 280), min_size=1, max_size=8
)


@settings(max_examples=70, deadline=None)
@given(
    prompt=prompts,
    body=st.fixed_dictionaries(
        {
            "max_tokens": st.integers(0, 9),
            "echo": st.booleans(),
            "skip_special_tokens": st.booleans(),
            "n": st.integers(1, 2),
            "seed": st.integers(0, 10**6),
        }
    ),
)
def test_offsets_point_at_their_tokens(
    job: Rehearsal, http: httpx.Client, prompt: Any, body: dict[str, Any]
) -> None:
    body = body | {"prompt": prompt, "logprobs": 1, "return_token_ids": True}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    tokenizer = job.service.tokenizer
    for choice in answer.json()["choices"]:
        got, text = choice["logprobs"], choice["text"]
        offsets, tokens = got["text_offset"], got["tokens"]
        ids = [*(choice["prompt_token_ids"] if body["echo"] else []), *choice["token_ids"]]
        assert len(ids) == len(tokens) == len(offsets) and offsets == sorted(offsets)
        for token_id, token, offset in zip(ids, tokens, offsets, strict=True):
            assert 0 <= offset <= len(text)
            shown = text[offset:].startswith(token)
            hidden = body["skip_special_tokens"] and token_id in tokenizer.special_ids
            # One that stands for a byte shows as its neighbours let it.
            in_bytes = (tokenizer.fast.id_to_token(token_id) or "").startswith("<0x")
            if "\ufffd" not in token and not hidden and not in_bytes:
                assert shown, (text, token, offset)
        for row, token in zip(got["top_logprobs"], tokens, strict=True):
            assert row is None or token in row


@settings(max_examples=25, deadline=None)
@given(prompt=prompts, skip=st.booleans(), seed=st.integers(0, 99))
def test_echoed_text_is_the_same_with_and_without_log_probabilities_and_streamed(
    http: httpx.Client, prompt: Any, skip: bool, seed: int
) -> None:
    body = {"prompt": prompt, "echo": True, "skip_special_tokens": skip, "max_tokens": 4}
    body |= {"seed": seed}
    plain = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    told = http.post("/v1/completions", json=body | {"logprobs": 0}).json()["choices"][0]
    assert told["text"] == plain
    chunks = events(http.post("/v1/completions", json=body | {"logprobs": 0, "stream": True}).text)
    assert "".join(x["choices"][0]["text"] for x in chunks) == plain
    joined = [y for x in chunks for y in x["choices"][0]["logprobs"]["text_offset"]]
    assert joined == told["logprobs"]["text_offset"]


def test_what_a_prompt_spells_is_echoed_and_what_was_put_before_it_on_demand(
    job: Rehearsal, http: httpx.Client
) -> None:
    for prompt in ("the", "<s>the", "the</s>he", "</s>"):
        body = {"prompt": prompt, "echo": True, "max_tokens": 0}
        short = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
        long = http.post("/v1/completions", json=body | {"skip_special_tokens": False}).json()
        text = long["choices"][0]["text"].replace(" ", "")
        assert text == prompt if prompt.startswith("<s>") else "<s>" + prompt
        if job.service.table is not None:
            assert short == prompt
    ids = [1, *job.service.tokenizer.encode("the", add_special_tokens=False), 2]
    body = {"prompt": ids, "echo": True, "max_tokens": 0}
    assert http.post("/v1/completions", json=body).json()["choices"][0]["text"].strip() == "the"
