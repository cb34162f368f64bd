"""Tools and past calls on their way into a prompt, over HTTP with the real openai client."""

from __future__ import annotations

from typing import Any

import httpx
import openai
from tool_world import (  # noqa: F401
    KIMI,
    TOOLS,
    USER,
    V31,
    Scripted,
    deepseek_job,
    kimi_job,
)


def _history(client: openai.OpenAI) -> list[Any]:
    """The conversation with the answer's message put back as the client dumps it."""
    answer = client.chat.completions.create(model="tiny", messages=USER, tools=TOOLS)
    message = answer.choices[0].message
    assert message.tool_calls
    results = [
        {"role": "tool", "tool_call_id": x.id, "content": f"{number} degrees"}
        for number, x in enumerate(message.tool_calls)
    ]
    return [*USER, message.model_dump(), *results]


def test_calls_and_results_round_trip(deepseek: Scripted, kimi: Scripted) -> None:
    for job, text in ((deepseek, V31), (kimi, KIMI)):
        job.says(text)
        history = _history(job.client)
        prompt = job.prompt(messages=history, tools=TOOLS)
        assert text in prompt  # byte by byte what the model wrote
        assert "0 degrees" in prompt and "1 degrees" in prompt
        job.says("Warm.")
        answer = job.client.chat.completions.create(model="tiny", messages=history, tools=TOOLS)
        assert answer.choices[0].message.content == "Warm."


def test_tools_may_leave_things_out(deepseek: Scripted) -> None:
    def prompt(**function: Any) -> str:
        tools = [{"type": "function", "function": {"name": "now"} | function}]
        return deepseek.prompt(messages=USER, tools=tools)

    bare = prompt()
    assert "### now" in bare and '"properties"' in bare
    assert prompt(description=None, parameters=None, strict=None) == bare
    assert prompt(description="the time") != bare
    assert prompt(strict=False) == bare


def test_wrong_tools_are_named(deepseek: Scripted) -> None:
    tools = [
        {"type": "web_search"},
        {"type": "function", "function": {"name": "a b", "parameters": "x"}},
        {"type": "function", "function": {"description": 5}},
    ]
    answer = httpx.post(
        deepseek.job.url + "/v1/chat/completions", json={"messages": USER, "tools": tools}
    )
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "tools.0.type"
    for path in (
        "0.type='web_search'",
        "0.function is missing",
        "1.function.name='a b'",
        "1.function.parameters='x'",
        "2.function.name is missing",
        "2.function.description=5",
    ):
        assert f"tools.{path}" in error["message"]
