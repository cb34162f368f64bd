"""Completions and chat over HTTP, with httpx and with the real openai client, on fake ranks."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from server_world import (  # noqa: F401
    USER,
    bias,
    checkpoint_folder,
    events,
    http_of_the_file,
    openai_client,
    scripted_job,
)

from moeserve import wire
from moeserve.server.rehearsal import Rehearsal

# ---- completions --------------------------------------------------------------------------------


def test_completion_whole_and_streamed_say_the_same(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="tiny", prompt="hello world 🎉", max_tokens=12)
    choice = whole.choices[0]
    assert choice.text == "hello world 🎉hello world 🎉he"  # bos is skipped
    assert choice.finish_reason == "length"
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (5, 12)
    assert whole.usage.total_tokens == 17
    details = whole.usage.prompt_tokens_details
    assert details is not None and details.cached_tokens == 4
    stream = client.completions.create(
        model="tiny", prompt="hello world 🎉", max_tokens=12, stream=True
    )
    chunks = list(stream)
    assert "".join(x.choices[0].text for x in chunks) == choice.text
    assert [x.choices[0].finish_reason for x in chunks if x.choices[0].finish_reason] == ["length"]


def test_prompts_in_all_shapes(http: httpx.Client, job: Rehearsal) -> None:
    ids = job.service.tokenizer.encode("hello", add_special_tokens=False)

    def texts(prompt: object, **more: Any) -> list[tuple[int, str]]:
        body = {"prompt": prompt, "max_tokens": 2 * len(ids)} | more
        answer = http.post("/v1/completions", json=body).json()
        return [(x["index"], x["text"]) for x in answer["choices"]]

    assert texts(ids) == [(0, "hellohello")]  # token ids are taken as they are: no bos
    assert texts([ids, ids]) == [(0, "hellohello"), (1, "hellohello")]
    assert [x[0] for x in texts(["hello", "world"], n=2)] == [0, 1, 2, 3]
    four = texts([ids, ids[::-1]], n=2)
    assert four[0][1] == four[1][1] != four[2][1] == four[3][1]


def test_echo_and_logprobs_as_lm_eval_asks(http: httpx.Client, job: Rehearsal) -> None:
    contexts = [[7, 300, 301, 302], [8, 9]]
    body = {
        "model": "tiny",
        "prompt": contexts,
        "max_tokens": 1,
        "temperature": 0,
        "logprobs": 1,
        "echo": True,
        "seed": 1234,
    }
    choices = http.post("/v1/completions", json=body).json()["choices"]
    for context, choice in zip(contexts, choices, strict=True):
        got = choice["logprobs"]
        assert len(got["tokens"]) == len(context) + 1
        assert got["token_logprobs"][0] is None and got["top_logprobs"][0] is None
        expected = [-(x % 7) - 0.5 for x in context[1:]]
        assert got["token_logprobs"][1:-1] == expected
        assert [max(x.values()) for x in got["top_logprobs"][1:-1]] == expected
        assert choice["text"].startswith(job.service.tokenizer.decode(context))
    zero = http.post("/v1/completions", json=body | {"max_tokens": 0, "logprobs": 0}).json()
    got = zero["choices"][0]["logprobs"]
    assert len(got["tokens"]) == len(contexts[0]) and zero["usage"]["completion_tokens"] == 0
    assert zero["choices"][0]["text"] == job.service.tokenizer.decode(contexts[0])


def test_logprob_offsets_point_into_the_text(http: httpx.Client) -> None:
    body = {"prompt": "the fox 🎉 é", "max_tokens": 20, "logprobs": 2, "echo": True}
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    got = choice["logprobs"]
    for token, offset in zip(got["tokens"], got["text_offset"], strict=True):
        if token not in ("<s>",) and "\ufffd" not in token:
            assert choice["text"][offset:].startswith(token)


def test_streamed_logprobs_add_up(http: httpx.Client) -> None:
    body = {"prompt": "the quick brown fox", "max_tokens": 9, "logprobs": 2, "echo": True}
    whole = http.post("/v1/completions", json=body).json()["choices"][0]
    chunks = events(http.post("/v1/completions", json=body | {"stream": True}).text)
    assert "".join(x["choices"][0]["text"] for x in chunks) == whole["text"]
    for name in ("tokens", "token_logprobs", "text_offset"):
        joined = [y for x in chunks for y in x["choices"][0]["logprobs"][name]]
        assert joined == whole["logprobs"][name]


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_across_tokens(http: httpx.Client, job: Rehearsal, stream: bool) -> None:
    body = {
        "prompt": "x",
        "max_tokens": 50,
        "logit_bias": bias(job, "the quick brown fox jumps"),
        "stop": ["never", "k bro"],
        "stream": stream,
        "logprobs": 0,
    }
    answer = http.post("/v1/completions", json=body)
    chunks = events(answer.text) if stream else [answer.json()]
    assert "".join(x["choices"][0]["text"] for x in chunks) == "the quic"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    tokens = [y for x in chunks for y in x["choices"][0]["logprobs"]["tokens"]]
    assert "".join(tokens).startswith("the quic") and "brown" not in "".join(tokens)
    kept = http.post("/v1/completions", json=body | {"include_stop_str_in_output": True})
    chunks = events(kept.text) if stream else [kept.json()]
    assert "".join(x["choices"][0]["text"] for x in chunks) == "the quick bro"


def test_end_tokens_are_counted_and_not_shown(http: httpx.Client, job: Rehearsal) -> None:
    body = {"prompt": "x", "max_tokens": 50, "logit_bias": bias(job, "the fox", 1)}
    answer = http.post("/v1/completions", json=body | {"return_token_ids": True}).json()
    choice = answer["choices"][0]
    assert choice["text"] == "the fox" and choice["token_ids"][-1] == 1
    assert answer["usage"]["completion_tokens"] == len(choice["token_ids"])
    shown = http.post("/v1/completions", json=body | {"skip_special_tokens": False}).json()
    assert shown["choices"][0]["text"] == "the fox</s>"


def test_usage_options_of_streams(http: httpx.Client) -> None:
    body = {"prompt": "hello", "max_tokens": 3, "stream": True}
    assert all("usage" not in x for x in events(http.post("/v1/completions", json=body).text))
    options = {"stream_options": {"include_usage": True}}
    chunks = events(http.post("/v1/completions", json=body | options).text)
    assert all(x["usage"] is None for x in chunks[:-1])
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 3
    options["stream_options"]["continuous_usage_stats"] = True
    chunks = events(http.post("/v1/completions", json=body | options).text)
    counts = [x["usage"]["completion_tokens"] for x in chunks]
    assert counts == sorted(counts) and counts[-1] == 3


# ---- chat ---------------------------------------------------------------------------------------


def test_chat_with_the_openai_client(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=USER, max_tokens=4, n=2, logprobs=True, top_logprobs=2, seed=5
    )
    assert [x.index for x in answer.choices] == [0, 1]
    assert answer.choices[0].message.content == "<|user|>hello"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 8
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None and len(logprobs.content) == 4
    entry = logprobs.content[2]
    assert bytes(entry.bytes or []).decode() == entry.token == "he"
    assert len(entry.top_logprobs) == 2 and entry.top_logprobs[0].logprob == entry.logprob


def test_chat_stream_with_the_openai_client(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tiny",
        messages=USER,
        max_completion_tokens=4,
        n=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    texts, finished = ["", ""], [None, None]
    chunks = list(stream)
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            finished[choice.index] = choice.finish_reason or finished[choice.index]
    assert texts == ["<|user|>hello"] * 2 and finished == ["length"] * 2
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8


def test_max_tokens_that_nobody_asked_for_gives_way(http: httpx.Client, job: Rehearsal) -> None:
    limit = job.service.client.fleet.max_model_len()
    for room in (1, 7, 16, 40):
        ids = [5] * (limit - room)
        for rank in job.ranks:
            rank.received.clear()
        answer = http.post("/v1/completions", json={"prompt": [ids, [5]]})
        assert answer.status_code == 200, answer.text
        sent = [x.request for rank in job.ranks for x in rank.of_kind(wire.Submit)]
        bounds = {len(x.prompt_token_ids): x.sampling.max_tokens for x in sent}
        assert bounds == {limit - room: min(16, room), 1: 16}  # each its own
    asked = {"prompt": [5] * (limit - 7), "max_tokens": 16}
    assert http.post("/v1/completions", json=asked).status_code == 400
    assert http.post("/v1/completions", json={"prompt": [5] * limit}).status_code == 400


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"thinkin": True}}, "chat_template_kwargs.thinkin"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
    ],
)
def test_template_variables_that_nobody_reads(
    http: httpx.Client, body: dict[str, Any], param: str
) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": USER, "max_tokens": 1} | body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def test_n_choices_with_a_seed_get_seeds_of_their_own(http: httpx.Client, job: Rehearsal) -> None:
    http.post("/v1/chat/completions", json={"messages": USER, "max_tokens": 1, "n": 3, "seed": 40})
    sent = [x.request for rank in job.ranks for x in rank.of_kind(wire.Submit)]
    assert {x.sampling.seed for x in sent} >= {40, 41, 42}
    http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1, "n": 2, "seed": -1})
    sent = [x.request for rank in job.ranks for x in rank.of_kind(wire.Submit)]
    assert {x.sampling.seed for x in sent} >= {-1, 0}  # as the offline API counts


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_split_off(http: httpx.Client, job: Rehearsal, stream: bool) -> None:
    close = job.service.tokenizer.fast.token_to_id("</think>")
    fox = job.service.tokenizer.encode("the fox", add_special_tokens=False)
    said = [*fox, close, *job.service.tokenizer.encode("hello", add_special_tokens=False)]
    body = {
        "messages": USER,
        "max_tokens": 30,
        "chat_template_kwargs": {"thinking": True},
        "logit_bias": {str(x): index for index, x in enumerate(said)},
        "stream": stream,
        **({"stream_options": {"include_usage": True}} if stream else {}),
    }
    answer = http.post("/v1/chat/completions", json=body)
    if stream:
        chunks = events(answer.text)
        deltas = [x["choices"][0]["delta"] for x in chunks[:-1]]
        reasoning = "".join(x.get("reasoning_content", "") for x in deltas)
        content = "".join(x.get("content", "") for x in deltas)
        usage = chunks[-1]["usage"]
    else:
        message = answer.json()["choices"][0]["message"]
        reasoning, content = message["reasoning_content"], message["content"]
        usage = answer.json()["usage"]
    assert (reasoning, content) == ("the fox", "hello")
    assert usage["completion_tokens"] == len(said)
    assert usage["completion_tokens_details"]["reasoning_tokens"] == len(fox)


def test_content_parts_system_and_tools(http: httpx.Client) -> None:
    def ids(**fields: Any) -> list[int]:
        return http.post("/tokenize", json=fields).json()["tokens"]

    parts = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    assert ids(messages=parts) == ids(messages=USER)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert len(ids(messages=USER, tools=tools)) > len(ids(messages=USER))
    body = {"messages": USER, "tools": tools, "max_tokens": 1}
    with_tools = http.post("/v1/chat/completions", json=body).json()
    without = http.post("/v1/chat/completions", json=body | {"tool_choice": "none"}).json()
    assert with_tools["usage"]["prompt_tokens"] > without["usage"]["prompt_tokens"]


def test_chat_without_max_tokens_may_fill_the_context(http: httpx.Client) -> None:
    usage = http.post("/v1/chat/completions", json={"messages": USER}).json()["usage"]
    assert usage["total_tokens"] == 512
