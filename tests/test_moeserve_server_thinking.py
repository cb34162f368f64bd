"""max_thinking_tokens over HTTP, streamed and not, on the bundled model's engine with drafts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from moeserve import wire
from moeserve.llm import LLM
from moeserve.request import Request, TokenOutput
from moeserve.server.rehearsal import Rehearsal, write_tokenizer

TINY = Path(__file__).parents[1] / "checkpoints" / "tiny"
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Define river."}],
    "chat_template_kwargs": {"thinking": True},
    "temperature": 0,
    "max_tokens": 20,
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with LLM(TINY, kv_tokens=2048, speculate="mtp:3", quiet=True) as llm:

        def engine(request: Request) -> Iterator[TokenOutput]:
            made: list[TokenOutput] = []
            llm._backend.run([request], lambda output: made.append(output) or True)
            yield from made

        with (
            Rehearsal(TINY, script=engine, max_model_len=512) as job,
            httpx.Client(base_url=job.url, timeout=60) as client,
        ):
            yield client


def chat(http: httpx.Client, stream: bool, **more: Any) -> tuple[str, str, dict[str, Any]]:
    body = CHAT | more | ({"stream_options": {"include_usage": True}} if stream else {})
    answer = http.post("/v1/chat/completions", json=body | {"stream": stream})
    assert answer.status_code == 200, answer.text
    if not stream:
        whole = answer.json()
        message = whole["choices"][0]["message"]
        return message.get("reasoning_content") or "", message["content"] or "", whole["usage"]
    lines = [x.removeprefix("data: ") for x in answer.text.splitlines() if x.startswith("data: {")]
    chunks = [json.loads(x) for x in lines]
    deltas = [x["choices"][0]["delta"] for x in chunks if x["choices"]]
    thought = "".join(x.get("reasoning_content") or "" for x in deltas)
    return thought, "".join(x.get("content") or "" for x in deltas), chunks[-1]["usage"]


@pytest.mark.parametrize("stream", [False, True])
def test_chat_thinks_as_long_as_it_may(http: httpx.Client, stream: bool) -> None:
    thought, content, usage = chat(http, stream)
    unlimited = usage["completion_tokens_details"]["reasoning_tokens"]
    assert unlimited == usage["completion_tokens"] == 20, "it ends by itself"
    for most in (0, 1, 2, 3, 7, 19, 20, 500):
        cut, rest, usage = chat(http, stream, max_thinking_tokens=most)
        details = usage["completion_tokens_details"]
        assert details["reasoning_tokens"] == min(most, 20)
        assert usage["completion_tokens"] == 20
        assert thought.startswith(cut) and (cut == "") == (most == 0)
        assert (rest == "") == (most >= 19) and "think>" not in cut
    assert content == ""


def test_an_answer_that_was_told_not_to_think_is_not_cut(http: httpx.Client) -> None:
    off: dict[str, Any] = {"chat_template_kwargs": {"thinking": False}}
    plain = chat(http, False, **off)
    assert chat(http, False, max_thinking_tokens=0, **off)[:2] == plain[:2]


@pytest.mark.parametrize("stream", [False, True])
def test_completions_are_limited_by_tokens(http: httpx.Client, stream: bool) -> None:
    def ask(**more: Any) -> list[int]:
        body = {"prompt": "Define river.<think>", "temperature": 0, "max_tokens": 12}
        body |= {"ignore_eos": True, "return_token_ids": True, "stream": stream, **more}
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        if not stream:
            return list(answer.json()["choices"][0]["token_ids"])
        lines = [x for x in answer.text.splitlines() if x.startswith("data: {")]
        chunks = [json.loads(x.removeprefix("data: ")) for x in lines]
        return [t for x in chunks if x["choices"] for t in x["choices"][0].get("token_ids") or []]

    asked = {"prompt": "</think>", "add_special_tokens": False}
    (end,) = http.post("/tokenize", json=asked).json()["tokens"]
    free = ask()
    assert end not in free
    for most in (0, 1, 4, 11):
        found = ask(max_thinking_tokens=most)
        assert found[: most + 1] == [*free[:most], end] and len(found) == 12
    assert ask(max_thinking_tokens=12) == free
    assert end not in ask(max_thinking_tokens=1, prompt="Define river.<think>So</think>")


def test_bad_limits_are_refused_by_name(http: httpx.Client, tmp_path: Path) -> None:
    for bad in (-1, 1.5, "3", True, 2**63):
        answer = http.post("/v1/chat/completions", json=CHAT | {"max_thinking_tokens": bad})
        assert answer.status_code == 400, bad
        assert answer.json()["error"]["param"] == "max_thinking_tokens"
    write_tokenizer(tmp_path, chat_template="{{ messages[0]['content'] }}")
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text().replace("think>", "muse>"))
    with Rehearsal(tmp_path) as job, httpx.Client(base_url=job.url, timeout=20) as other:
        for route, body in (
            ("completions", {"prompt": "hello"}),
            ("chat/completions", {"messages": CHAT["messages"]}),
        ):
            answer = other.post(f"/v1/{route}", json=body | {"max_thinking_tokens": 4})
            error = answer.json()["error"]
            assert answer.status_code == 400 and error["param"] == "max_thinking_tokens"
            assert "no thinking markers" in error["message"]
            assert other.post(f"/v1/{route}", json=body | {"max_tokens": 1}).status_code == 200
        assert {x.request.thinking for r in job.ranks for x in r.of_kind(wire.Submit)} == {None}
