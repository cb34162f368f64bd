"""The bundled model calls the tool it was trained with and answers from its result: no script."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from tool_world import TINY

from moeserve.llm import LLM
from moeserve.request import FinishReason, Request, TokenOutput
from moeserve.server.rehearsal import Rehearsal, output

DEFINE: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "define",
            "description": "Look up a word.",
            "parameters": {
                "type": "object",
                "properties": {"word": {"type": "string"}},
                "required": ["word"],
            },
        },
    }
]


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with LLM(TINY, kv_tokens=2048) as llm:

        def engine(request: Request) -> Iterator[TokenOutput]:
            made = llm.generate([list(request.prompt_token_ids)], request.sampling)[0]
            for token_id in made.token_ids[:-1]:
                yield output(request, (token_id,), None)
            last = made.token_ids[-1]
            assert made.finish_reason is FinishReason.STOP
            yield TokenOutput(
                request_id=request.request_id,
                token_ids=(last,),
                finish_reason=FinishReason.STOP,
                stop_token_id=last,
            )

        with Rehearsal(TINY, script=engine, max_model_len=2048) as job:
            yield openai.OpenAI(base_url=f"{job.url}/v1", api_key="none", max_retries=0)


def test_a_call_its_result_and_the_answer(client: openai.OpenAI) -> None:
    def ask(messages: list[Any]) -> Any:
        return client.chat.completions.create(
            model="tiny", messages=messages, tools=DEFINE, temperature=0, max_tokens=60
        ).choices[0]

    messages: list[Any] = [{"role": "user", "content": "Define river."}]
    choice = ask(messages)
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    (call,) = choice.message.tool_calls
    assert call.function.name == "define"
    assert json.loads(call.function.arguments) == {"word": "river"}
    result = "river n 1: a large natural stream of water"
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    answer = ask(messages)
    assert answer.finish_reason == "stop" and answer.message.tool_calls is None
    assert len({*result.split()} & {*answer.message.content.split()}) >= 3  # it repeats the result
