"""What the tests of tool calls over HTTP share: a job whose ranks say a given text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from moeserve.request import FinishReason, Request, TokenOutput
from moeserve.server.rehearsal import Rehearsal, output, write_tokenizer
from moeserve.tool_calls import _deepseek, _kimi

# The bundled checkpoint has DeepSeek's own markers and a template of the V3.1 kind.
TINY = Path(__file__).parents[1] / "checkpoints" / "tiny"
CALLS, END_CALLS, CALL, SEP, END = _deepseek().markers
KIMI_TEMPLATE = (
    "{% if tools %}<|im_system|>{{ tools | tojson }}<|im_end|>{% endif %}"
    "{% for m in messages %}<|im_{{ m.role }}|>"
    "{% if m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{% endif %}"
    "{% if m.content is string %}{{ m.content }}{% endif %}"
    "{% if m.tool_calls %}<|tool_calls_section_begin|>{% for c in m.tool_calls %}"
    "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
    "{% if c.function.arguments is string %}{{ c.function.arguments }}"
    "{% else %}{{ c.function.arguments | tojson }}{% endif %}<|tool_call_end|>{% endfor %}"
    "<|tool_calls_section_end|>{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>"
    "<think>{{ '' if thinking else '</think>' }}{% endif %}"
)
USER: list[Any] = [{"role": "user", "content": "Weather in Paris and Rome?"}]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "the weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    },
    {"type": "function", "function": {"name": "now"}},  # no description, no parameters
]
PARIS, ROME = '{"city": "Paris", "é": [{"x": "}"}]}', '{"city": "Rome"}'
V31 = f"Let me look.{CALLS}{CALL}weather{SEP}{PARIS}{END}{CALL}weather{SEP}{ROME}{END}{END_CALLS}"
V3 = (
    f"Let me look.{CALLS}{CALL}function{SEP}weather\n```json\n{PARIS}\n```{END}\n"
    f"{CALL}function{SEP}weather\n```json\n{ROME}\n```{END}{END_CALLS}"
)
KIMI = (
    "Let me look.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
    f"<|tool_call_argument_begin|>{PARIS}<|tool_call_end|><|tool_call_begin|>functions.weather:1"
    f"<|tool_call_argument_begin|>{ROME}<|tool_call_end|><|tool_calls_section_end|>"
)
BOTH = [("weather", PARIS), ("weather", ROME)]


class Scripted:
    """A job whose ranks say `text`, so many tokens an output, then end as told (None: never)."""

    def __init__(self, folder: Path) -> None:
        self.says("")
        self.job = Rehearsal(folder, script=self._script, max_model_len=4096)

    def _script(self, request: Request) -> Iterator[TokenOutput]:
        tokenizer = self.job.service.tokenizer
        ids = tokenizer.encode(self.text, add_special_tokens=False)
        for start in range(0, len(ids), self.step):
            yield output(request, tuple(ids[start : start + self.step]), None, first=start == 0)
        while self.end is None:
            yield output(request, (ids[0],), None)
        eos = tokenizer.fast.token_to_id(tokenizer.eos_token)
        last = output(request, (eos,) if self.end is FinishReason.STOP else (), self.end)
        if self.end is FinishReason.STOP:
            last = TokenOutput(
                request_id=last.request_id,
                token_ids=last.token_ids,
                logprobs=last.logprobs,
                finish_reason=last.finish_reason,
                stop_token_id=eos,
            )
        yield last

    def says(self, text: str, step: int = 1, end: FinishReason | None = FinishReason.STOP) -> None:
        self.text, self.step, self.end = text, step, end

    @property
    def client(self) -> openai.OpenAI:
        url = f"{self.job.url}/v1"
        return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=20)

    def prompt(self, **fields: Any) -> str:
        """What the model would read."""
        answer = httpx.post(self.job.url + "/tokenize", json=fields)
        assert answer.status_code == 200, answer.text
        tokens = answer.json()["tokens"]
        return self.job.service.tokenizer.decode(tokens, skip_special_tokens=False)

    def ask(self, stream: bool, **fields: Any) -> tuple[str, str, list[tuple[str, str]], str]:
        """reasoning, content, calls, finish reason; streams checked for their order on the way."""
        fields = {"model": "tiny", "messages": USER, "tools": TOOLS} | fields
        if not stream:
            choice = self.client.chat.completions.create(**fields).choices[0]
            message = choice.message
            calls = [(x.function.name, x.function.arguments) for x in message.tool_calls or []]
            assert all(x.type == "function" and x.id for x in message.tool_calls or [])
            assert message.content is not None or calls
            reasoning = (message.model_extra or {}).get("reasoning_content", "")
            return reasoning, message.content or "", calls, choice.finish_reason
        reasoning = content = finish = ""
        found: list[dict[str, Any]] = []
        for chunk in self.client.chat.completions.create(**fields, stream=True):
            (part,) = chunk.choices
            assert not finish  # nothing after the reason
            finish = part.finish_reason or ""
            content += part.delta.content or ""
            reasoning += (part.delta.model_extra or {}).get("reasoning_content", "")
            for call in part.delta.tool_calls or []:
                assert call.function is not None
                if call.index == len(found):
                    assert call.id and call.type == "function" and call.function.name
                    found.append({"id": call.id, "name": call.function.name, "arguments": ""})
                else:
                    assert call.index == len(found) - 1 and not call.id and not call.function.name
                found[call.index]["arguments"] += call.function.arguments or ""
        assert len({x["id"] for x in found}) == len(found)
        return reasoning, content, [(x["name"], x["arguments"]) for x in found], finish


@pytest.fixture(scope="module", name="deepseek")
def deepseek_job() -> Iterator[Scripted]:
    made = Scripted(TINY)
    with made.job:
        yield made


@pytest.fixture(scope="module", name="kimi", params=[False, True], ids=["plain", "special"])
def kimi_job(tmp_path_factory: pytest.TempPathFactory, request: Any) -> Iterator[Scripted]:
    folder: Path = tmp_path_factory.mktemp("kimi")
    write_tokenizer(
        folder, chat_template=KIMI_TEMPLATE, markers=list(_kimi().markers), special=request.param
    )
    made = Scripted(folder)
    with made.job:
        yield made
