"""Bodies: every wrong field, type and value is refused by name with what would be valid."""

from __future__ import annotations

import json
from typing import Any

import pytest

from moeserve.admission import check_sampling
from moeserve.errors import InvalidFields, InvalidRequest, MissingField
from moeserve.request import SamplingParams
from moeserve.server.fields import IGNORED, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from moeserve.server.parse import MOST, parse

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def completion(**fields: Any) -> CompletionBody:
    body = parse(CompletionBody, json.dumps({"prompt": "p"} | fields).encode())
    body.prompts()
    body.stops()
    return body


def chat(**fields: Any) -> ChatBody:
    body = parse(ChatBody, json.dumps(CHAT | fields).encode())
    body.stops()
    return body


@pytest.mark.parametrize(
    ("field", "value", "valid"),
    [
        ("temperature", -0.1, "0 to 2"),
        ("temperature", 2.1, "0 to 2"),
        ("temperature", "hot", "0 to 2"),
        ("temperature", True, "0 to 2"),
        ("temperature", float("nan"), "0 to 2"),
        ("temperature", float("inf"), "0 to 2"),
        ("presence_penalty", float("-inf"), "-2 to 2"),
        ("top_p", 0, "above 0, at most 1"),
        ("top_p", 1.5, "above 0, at most 1"),
        ("top_k", -2, "-1 or 0: off"),
        ("top_k", 1.5, "-1 or 0: off"),
        ("min_p", 2, "0 to 1"),
        ("repetition_penalty", 0, "above 0"),
        ("presence_penalty", 3, "-2 to 2"),
        ("frequency_penalty", -3, "-2 to 2"),
        ("n", 0, "1 to 128"),
        ("n", "2", "1 to 128"),
        ("seed", 1.5, "64 bits"),
        ("seed", 2**70, "64 bits"),
        ("stop", 5, "up to 16"),
        ("stop", [""], "none empty"),
        ("stop", ["a"] * 17, "up to 16"),
        ("stop", ["a", 5], "up to 16"),
        ("stop_token_ids", "1", "token ids"),
        ("stop_token_ids", [-1], "token ids"),
        ("logit_bias", {"1": 101}, "-100 to 100"),
        ("logit_bias", [1], "-100 to 100"),
        ("stream", "yes", "true or false"),
        ("ignore_eos", 1, "true or false"),
        ("response_format", {"type": "json_object"}, "not supported yet"),
        ("stream_options", {"include_usage": True}, "stream=true"),
        ("model", 5, "/v1/models"),
    ],
)
@pytest.mark.parametrize("make", [completion, chat])
def test_wrong_values_are_named(make: Any, field: str, value: Any, valid: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        make(**{field: value})
    assert caught.value.field.split(".")[0] == field
    assert valid in str(caught.value)
    assert field in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", -1),
        ("max_tokens", "5"),
        ("best_of", 2),
        ("suffix", "x"),
        ("logprobs", 21),
        ("logprobs", True),
        ("echo", 1),
        ("prompt", []),
        ("prompt", 5),
        ("prompt", [1, "a"]),
        ("prompt", [[1], []]),
        ("prompt", [[1], [True]]),
        ("prompt", [1.0]),
        ("prompt", {"a": 1}),
    ],
)
def test_completion_fields(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        completion(**{field: value})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", []),
        ("messages", "hi"),
        ("messages", ["hi"]),
        ("max_tokens", 0),
        ("max_completion_tokens", 0),
        ("logprobs", 5),
        ("top_logprobs", 3),  # without logprobs
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("chat_template_kwargs", 5),
        ("modalities", ["audio"]),
        ("prompt", "x"),
    ],
)
def test_chat_fields(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(**{field: value})
    assert caught.value.field.split(".")[0] == field


def test_rules_over_two_fields() -> None:
    with pytest.raises(InvalidRequest, match="max_completion_tokens=6"):
        chat(max_tokens=5, max_completion_tokens=6)
    assert chat(max_tokens=5, max_completion_tokens=5).asked_limit() == ("max_completion_tokens", 5)
    assert chat(max_completion_tokens=7).asked_limit() == ("max_completion_tokens", 7)
    assert chat().asked_limit() is None
    with pytest.raises(InvalidRequest, match="min_tokens=9"):
        chat(max_tokens=8, min_tokens=9)
    assert completion(best_of=3, n=3).n == 3


def test_unknown_fields_are_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(InvalidRequest, match="did you mean temperature") as caught:
        completion(temprature=1)
    assert caught.value.field == "temprature"
    with pytest.raises(InvalidRequest, match="unknown field") as caught:
        chat(stream=True, stream_options={"usage": True})
    assert caught.value.field == "stream_options.usage"


def test_harmless_fields_and_nulls_are_let_pass() -> None:
    body = completion(**dict.fromkeys(IGNORED, "x"), temperature=None, stop=None, logit_bias=None)
    assert body.temperature == 1.0 and body.stops() == ()


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"null", b'"x"', b"\xff", b'{"a":"\\ud800"}', b"[" * 10_000]
)
def test_bodies_that_are_no_json_object(raw: bytes) -> None:
    with pytest.raises(InvalidRequest, match="a JSON object") as caught:
        parse(ChatBody, raw)
    assert caught.value.field == "body" and len(str(caught.value)) < 300


def test_missing_fields_are_named() -> None:
    for kind, field in ((CompletionBody, "prompt"), (ChatBody, "messages")):
        with pytest.raises(InvalidRequest, match="is required") as caught:
            parse(kind, b"{}")
        assert caught.value.field == field


def test_all_shapes_of_prompts() -> None:
    assert completion(prompt="a").prompts() == ["a"]
    assert completion(prompt=["a", "b"]).prompts() == ["a", "b"]
    assert completion(prompt=[1, 2]).prompts() == [[1, 2]]
    assert completion(prompt=[[1, 2], [3]]).prompts() == [[1, 2], [3]]
    assert completion(prompt="").prompts() == [""]


# ---- several problems, missing fields -----------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "body", "field"),
    [
        (CompletionBody, {}, "prompt"),
        (CompletionBody, {"prompt": None}, "prompt"),
        (ChatBody, {}, "messages"),
        (ChatBody, {"messages": [{"content": "x"}]}, "messages.0.role"),
        (ChatBody, {"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
        (ChatBody, CHAT | {"tools": [{"type": "function"}]}, "tools.0.function"),
        (ChatBody, CHAT | {"tools": [{"function": {"name": "f"}}]}, "tools.0.type"),
        (TokenizeBody, {}, "prompt"),
        (DetokenizeBody, {}, "tokens"),
    ],
)
def test_what_is_missing_is_called_missing(kind: Any, body: dict[str, Any], field: str) -> None:
    with pytest.raises(MissingField, match="is missing: it is required and must be ") as caught:
        parse(kind, json.dumps(body).encode())
    assert caught.value.field == field
    assert "None" not in str(caught.value) and "must be must" not in str(caught.value)


def test_all_that_is_wrong_is_named_in_the_order_of_the_body() -> None:
    with pytest.raises(InvalidFields) as caught:
        chat(
            top_p=7,  # a single field
            temprature=0.5,  # an unknown one
            stream_options={"include_usage": True, "usage": 1},
            top_logprobs=3,  # a rule over two
            max_tokens=5,
            min_tokens=9,
            stop=["a", ""],
            response_format={"type": "json_object"},
            tool_choice="required",
            tools=[{"type": "function", "function": {"name": "no blanks"}}],
            messages=[{"role": "robot", "content": "x"}, {"role": "user"}],
            n=2,
        )
    fields = [x.field for x in caught.value.problems]
    assert fields == [
        "messages.0.role",
        "messages.1.content",
        "top_p",
        "temprature",
        "stream_options.usage",
        "top_logprobs",
        "min_tokens",
        "stop",
        "response_format",
        "tool_choice",
        "tools.0.function.name",
    ]
    assert caught.value.field == "messages.0.role"
    text = str(caught.value)
    assert text.startswith("11 fields are not valid: (1) messages.0.role='robot'")
    assert "top_p=7 is not valid: must be a number above 0, at most 1" in text
    assert "messages.1.content is missing" in text and "did you mean temperature?" in text


def test_a_missing_field_comes_first_and_the_others_with_it() -> None:
    with pytest.raises(InvalidFields) as caught:
        parse(CompletionBody, b'{"max_tokens": 2, "min_tokens": 3, "n": 0, "best_of": 2}')
    # best_of is not blamed: what it is compared with is wrong itself
    assert [x.field for x in caught.value.problems] == ["prompt", "min_tokens", "n"]
    many = json.dumps({"prompt": "x", "logit_bias": dict.fromkeys(map(str, range(90)), 500)})
    with pytest.raises(InvalidFields) as caught:
        parse(CompletionBody, many.encode())
    assert len(caught.value.problems) == MOST


def test_offline_sampling_too_names_all() -> None:
    with pytest.raises(InvalidFields) as caught:
        check_sampling(SamplingParams(temperature=-1, top_p=2, stop=("",)))
    assert [x.field for x in caught.value.problems] == ["temperature", "top_p", "stop"]


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([{"role": "user", "content": "x", "tool_calls": [1]}], "tool_calls"),
        ([{"role": "assistant", "tool_calls": "x"}], "tool_calls"),
        ([{"role": "assistant", "tool_calls": [1]}], "tool_calls.0"),
        ([{"role": "assistant", "tool_calls": [{"id": 1}]}], "tool_calls.0.id"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "tool_calls.0.function.name"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 1}}]}],
            "tool_calls.0.function.arguments",
        ),
        ([{"role": "assistant", "tool_calls": [{"type": "x"}]}], "tool_calls.0.type"),
        ([{"role": "user", "content": "x", "name": 5}], "name"),
        ([{"role": "tool", "content": "x", "tool_call_id": 5}], "tool_call_id"),
    ],
)
def test_wrong_calls_and_names_in_messages(messages: list[Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(messages=messages)
    assert caught.value.field == f"messages.0.{field}"


def test_what_openai_lets_callers_leave_out() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for message in (
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "tool_calls": [call], "refusal": None, "audio": None},
        {"role": "assistant", "content": "x", "tool_calls": None},
        {"role": "user", "content": "x", "name": "Ann"},
        {"role": "developer", "content": [{"type": "text", "text": "x"}]},
        {"role": "tool", "content": "x", "tool_call_id": "1"},
    ):
        chat(messages=[message])
    for function in (
        {"name": "f"},
        {"name": "f", "description": None, "parameters": None, "strict": None},
        {"name": "f", "description": "d", "parameters": {}, "strict": True},
    ):
        chat(tools=[{"type": "function", "function": function}])
    chat(tools=None, tool_choice=None, parallel_tool_calls=None)
