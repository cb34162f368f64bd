"""Tool calls over HTTP with the real openai client, whole and streamed, on scripted ranks."""

from __future__ import annotations

import itertools
import logging
import re
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tool_world import (  # noqa: F401
    BOTH,
    CALL,
    CALLS,
    END,
    END_CALLS,
    KIMI,
    PARIS,
    ROME,
    SEP,
    TOOLS,
    USER,
    V3,
    V31,
    Scripted,
    deepseek_job,
    kimi_job,
)

from moeserve import wire
from moeserve.request import FinishReason
from moeserve.server.rehearsal import write_tokenizer

# ---- calls that come back -----------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", [V31, V3], ids=["v31", "v3"])
def test_deepseek_calls(deepseek: Scripted, text: str, stream: bool, step: int) -> None:
    deepseek.says(text, step)
    assert deepseek.ask(stream) == ("", "Let me look.", BOTH, "tool_calls")


@pytest.mark.parametrize("step", [1, 5])
@pytest.mark.parametrize("stream", [False, True])
def test_kimi_calls(kimi: Scripted, stream: bool, step: int) -> None:
    kimi.says(KIMI, step)
    assert kimi.ask(stream) == ("", "Let me look.", BOTH, "tool_calls")
    kimi.says("I should" + KIMI.removeprefix("Let me look."), step)  # the reasoning is not closed
    thinking = {"chat_template_kwargs": {"thinking": True}}
    assert kimi.ask(stream, extra_body=thinking) == ("I should", "", BOTH, "tool_calls")


def test_kimi_ids_are_its_own(kimi: Scripted) -> None:
    kimi.says(KIMI)
    answer = kimi.client.chat.completions.create(model="tiny", messages=USER, tools=TOOLS)
    calls = answer.choices[0].message.tool_calls
    assert calls and [x.id for x in calls] == ["functions.weather:0", "functions.weather:1"]


def test_each_call_is_streamed_as_soon_as_it_is_whole(deepseek: Scripted) -> None:
    deepseek.says(V31)
    chunks = list(
        deepseek.client.chat.completions.create(
            model="tiny", messages=USER, tools=TOOLS, stream=True, logprobs=True
        )
    )
    deltas = [c.choices[0].delta.tool_calls or [] for c in chunks]
    at = {x.index: place for place, pieces in enumerate(deltas) for x in pieces}
    assert at[0] + 5 < at[1] < len(chunks) - 1  # the first while the second is being written


def test_calls_after_reasoning(deepseek: Scripted) -> None:
    deepseek.says("I should ask.</think>" + V31)
    for stream in (False, True):
        got = deepseek.ask(stream, extra_body={"chat_template_kwargs": {"thinking": True}})
        assert got == ("I should ask.", "Let me look.", BOTH, "tool_calls")


def test_content_is_null_beside_calls_and_only_there(deepseek: Scripted) -> None:
    body = {"messages": USER, "tools": TOOLS}
    deepseek.says(V31.removeprefix("Let me look."))
    url = deepseek.job.url + "/v1/chat/completions"
    choice = httpx.post(url, json=body).json()["choices"][0]
    assert choice["message"]["content"] is None and len(choice["message"]["tool_calls"]) == 2
    deepseek.says("Hello.")
    message = httpx.post(url, json=body).json()["choices"][0]["message"]
    assert message["content"] == "Hello." and "tool_calls" not in message


def test_metrics_count_answers_that_call_tools_apart(deepseek: Scripted) -> None:
    def counted() -> dict[str, float]:
        text = httpx.get(deepseek.job.url + "/metrics").text
        named = re.findall(r'moeserve_requests_total\{finish_reason="(\w+)"\} (\S+)', text)
        return {reason: float(count) for reason, count in named}

    for stream in (False, True):
        for text, reason in ((V31, "tool_calls"), ("Hello.", "stop")):
            before = counted()
            deepseek.says(text)
            deepseek.ask(stream)
            assert counted() == before | {reason: before[reason] + 1}
    assert not deepseek.job.service.metrics._unread


def test_several_choices_and_log_probabilities(deepseek: Scripted) -> None:
    deepseek.says(V31)
    answer = deepseek.client.chat.completions.create(
        model="tiny", messages=USER, tools=TOOLS, n=2, logprobs=True
    )
    ids = [y.id for x in answer.choices for y in x.message.tool_calls or []]
    assert len(set(ids)) == 4
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None and answer.usage is not None
    assert len(logprobs.content) == answer.usage.completion_tokens // 2


# ---- what is no call ----------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "text",
    [
        f"Hm.{CALLS}{CALL}weather{SEP}Paris{END}{END_CALLS} So.",
        f"Hm.{CALLS}{END_CALLS}",
        f"Hm.{CALLS}{CALL}function{SEP}weather{END_CALLS}",
        f"Hm.{END}{SEP}{END_CALLS}",
        f"Hm.{CALLS}{CALL}",
    ],
)
def test_malformed_calls_are_content(deepseek: Scripted, text: str, stream: bool) -> None:
    deepseek.says(text)
    assert deepseek.ask(stream) == ("", text, [], "stop")


def test_a_call_that_is_cut_off_is_told_as_content(deepseek: Scripted) -> None:
    text = f'{CALLS}{CALL}weather{SEP}{{"city": "Pa'
    deepseek.says(text, end=FinishReason.LENGTH)
    for stream in (False, True):
        assert deepseek.ask(stream) == ("", text, [], "length")
    deepseek.says(V31, end=FinishReason.LENGTH)
    for stream in (False, True):
        assert deepseek.ask(stream) == ("", "Let me look.", BOTH, "length")


def test_special_markers_of_malformed_calls_are_not_shown(kimi: Scripted) -> None:
    text = "Hm.<|tool_calls_section_begin|><|tool_call_begin|>nothing<|tool_calls_section_end|>"
    special = bool(kimi.job.service.tokenizer.special_ids - {0, 1, 2})
    kimi.says(text)
    for stream in (False, True):
        assert kimi.ask(stream)[1] == ("Hm.nothing" if special else text)
        shown = kimi.ask(stream, extra_body={"skip_special_tokens": False})[1]
        assert shown.startswith(text)


def test_without_tools_nothing_is_parsed(deepseek: Scripted) -> None:
    deepseek.says(V31)
    for fields in ({"tools": openai.omit}, {"tool_choice": "none"}):
        for stream in (False, True):
            assert deepseek.ask(stream, **fields) == ("", V31, [], "stop")


def test_a_tokenizer_without_markers_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_tokenizer(tmp_path)
    made = Scripted(tmp_path)
    with caplog.at_level(logging.WARNING), made.job:
        assert "tool calls are returned as text" in caplog.text
        made.says(V31)
        assert made.ask(False) == ("", V31, [], "stop")


# ---- what callers may ask for -------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_one_call_at_a_time(deepseek: Scripted, stream: bool) -> None:
    rank = deepseek.job.ranks[0]
    rank.received.clear()
    for step in (1, 1000):
        deepseek.says(V31 + " and much more", step, end=None)
        got = deepseek.ask(stream, parallel_tool_calls=False)
        assert got == ("", "Let me look.", BOTH[:1], "tool_calls")
    deadline = time.monotonic() + 10
    while len(aborts := rank.of_kind(wire.Abort)) < 2 and time.monotonic() < deadline:
        time.sleep(0.005)  # they come after the answer
    assert [x.reason for x in aborts] == [FinishReason.STOP] * 2
    deepseek.says(V31)
    assert deepseek.ask(stream, parallel_tool_calls=True)[2] == BOTH


@pytest.mark.parametrize(
    "choice", ["required", "any", {"type": "function", "function": {"name": "weather"}}]
)
def test_calls_cannot_be_forced_and_that_is_said(deepseek: Scripted, choice: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        deepseek.ask(False, tool_choice=choice)
    text = str(caught.value)
    assert caught.value.param == "tool_choice"
    assert "'auto' or 'none'" in text and "not supported yet" in text


def test_strict_is_told_to_be_a_wish_once(
    deepseek: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    tools = [openai.pydantic_function_tool(_Weather)]
    deepseek.says("Hello.")
    for _ in range(2):
        assert deepseek.ask(False, tools=tools)[1] == "Hello."
    assert caplog.text.count("not held to its schema") == 1


class _Weather(openai.BaseModel):
    """The weather of a city."""

    city: str


def test_ids_are_new_for_each_call(deepseek: Scripted) -> None:
    deepseek.says(V31)
    answers = [
        deepseek.client.chat.completions.create(model="tiny", messages=USER, tools=TOOLS)
        for _ in range(2)
    ]
    ids = [x.id for a in answers for x in a.choices[0].message.tool_calls or []]
    assert len(set(ids)) == 4 and all(x.startswith("call_") for x in ids)


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_streams_of_a_broken_call_among_good_ones(deepseek: Scripted, step: int) -> None:
    for broken in (PARIS, ROME):
        deepseek.says(V31.replace(broken, '{"city": }'), step)
        whole = deepseek.ask(False)
        assert deepseek.ask(True) == whole
        assert len(whole[2]) == 1 and whole[3] == "tool_calls" and '{"city": }' in whole[1]


def test_stop_strings_still_cut(deepseek: Scripted) -> None:
    deepseek.says(V31)
    for stream, stop in itertools.product((False, True), ("look.", [END_CALLS])):
        _, content, calls, finish = deepseek.ask(stream, stop=stop)
        expected = (
            ("Let me ", [], "stop") if stop == "look." else ("Let me look.", BOTH, "tool_calls")
        )
        assert (content, calls, finish) == expected
