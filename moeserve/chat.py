"""Chat messages to prompt text, by the checkpoint's own jinja2 template in a sandbox.

Where the template comes from: --chat-template, else chat_template.jinja beside the checkpoint, else
chat_template of tokenizer_config.json (a string, or a list of named ones: "default" is taken, and
"tool_use" where tools are given). Templates are foreign code: they run in jinja2's immutable
sandbox, and what they raise becomes a 400. What a caller may leave out (a tool's parameters, an
empty content) is filled in here, in the form that the template can read. Knows no token ids.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.meta
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from moeserve.errors import ConfigError, InvalidRequest, raise_problems
from moeserve.tokenizer import Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}

# Variables of a template that come from other fields of a request.
_OURS = frozenset({"messages", "tools", "add_generation_prompt"})


class _Refusal(jinja2.TemplateError):
    """The template called raise_exception."""


@dataclass(frozen=True)
class CallForm:
    """How a template reads the tool calls of past messages."""

    arguments_as_object: bool  # else as the text of a JSON object
    empty_content: str | None  # what content must be beside calls when there is none
    text_beside: bool  # whether content beside calls is shown


class _GenerationTag(Extension):
    """{% generation %}...{% endgeneration %} marks training targets; rendering it is its body."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template. `source` is its text, for what can only be told by looking at it."""

    def __init__(self, templates: dict[str, str], special_tokens: dict[str, str]) -> None:
        self._special_tokens = special_tokens
        self.source = templates.get("default") or next(iter(templates.values()))
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._default = environment.from_string(self.source)
            tool_use = templates.get("tool_use")
            self._tool_use = environment.from_string(tool_use) if tool_use else self._default
        except jinja2.TemplateError as error:
            raise ConfigError([f"chat template: not valid jinja2: {error}"]) from None
        found = [environment.parse(text) for text in {self.source, tool_use or self.source}]
        names = set[str]().union(*map(jinja2.meta.find_undeclared_variables, found))
        # What a caller may set: names that the template reads and nobody else fills in.
        self.uses_tools = "tools" in names
        self.variables = names - _OURS - environment.globals.keys() - special_tokens.keys()
        self.uses_reasoning = "</think>" in self.source

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: dict[str, Any] | None = None,
    ) -> str:
        """Prompt text. InvalidRequest where the template refuses what it is given."""
        raise_problems(self.problems(tools=tools, variables=variables))
        template = self._tool_use if tools else self._default
        values: dict[str, Any] = {**self._special_tokens, **(variables or {})}
        values |= {
            "messages": self._adapt(messages),
            "add_generation_prompt": add_generation_prompt,
        }
        given = [_without_nulls(x) for x in tools or ()]
        filled = [_filled(x) for x in given]
        # A template that copes with what was left out gets the tools as they are.
        choices = [{"tools": x} for x in ([given, filled] if filled != given else [given])]
        for choice in choices if tools else [{}]:
            try:
                return template.render(values | choice)
            except Exception as error:  # anything: it is the checkpoint's code on the user's data
                reason = error
        raise _refused(messages, bool(tools), reason)

    def problems(
        self, *, tools: Sequence[dict[str, Any]] | None, variables: dict[str, Any] | None
    ) -> list[InvalidRequest]:
        """What this template cannot read, told before anything is rendered."""
        found = []
        if tools and not self.uses_tools:
            valid = "the chat template of this model knows no tools (see --chat-template)"
            found.append(InvalidRequest("tools", f"[{len(tools)} tools]", valid))
        for name, value in (variables or {}).items():
            if name not in self.variables:
                known = ", ".join(sorted(self.variables)) or "none"
                valid = f"the chat template of this model has no such variable; it reads: {known}"
                field = f"chat_template_kwargs.{name}"
                found.append(InvalidRequest(field, _short(value), valid))
        return found

    def _adapt(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Content parts become text; fields that are null go, as templates ask whether they are
        there. A template that does not know "developer" sees "system"."""
        adapted = []
        for index, given in enumerate(messages):
            message = {name: value for name, value in given.items() if value is not None}
            message["content"] = content_text(given.get("content"), f"messages.{index}.content")
            if message.get("role") == "developer" and "developer" not in self.source:
                message["role"] = "system"
            if calls := message.pop("tool_calls", None):
                self._adapt_calls(message, calls, f"messages.{index}")
            elif message["content"] is None:
                message["content"] = ""
            adapted.append(message)
        return adapted

    def _adapt_calls(self, message: dict[str, Any], calls: list[Any], path: str) -> None:
        """Put the calls into the message in the form that the template reads."""
        form = self.call_form
        if form is None or (message["content"] and not form.text_beside):
            what = "tool calls" if form is None else "text beside tool calls"
            valid = f"the chat template of this model does not show {what} of past messages"
            raise InvalidRequest(f"{path}.tool_calls", f"[{len(calls)} calls]", valid)
        message["content"] = message["content"] or form.empty_content
        message["tool_calls"] = [
            _adapt_call(call, form.arguments_as_object, f"{path}.tool_calls.{number}")
            for number, call in enumerate(calls)
        ]

    @cached_property
    def call_form(self) -> CallForm | None:
        """Found by rendering a call in each form and looking for it; None: it shows none."""
        for as_object in (False, True):
            for empty in (None, ""):
                if self._shows_call(as_object, empty):
                    return CallForm(as_object, empty, self._shows_call(as_object, "text beside"))
        return None

    def _shows_call(self, as_object: bool, content: str | None) -> bool:
        name, arguments = "name_of_probe", '{"key_of_probe": 17}'
        call = {
            "id": f"functions.{name}:0",
            "type": "function",
            "function": {
                "name": name,
                "arguments": json.loads(arguments) if as_object else arguments,
            },
        }
        messages = [
            {"role": "user", "content": "question"},
            {"role": "assistant", "content": content, "tool_calls": [call]},
        ]
        values = {**self._special_tokens, "messages": messages, "add_generation_prompt": False}
        try:
            text = self._tool_use.render(values)
        except Exception:  # the checkpoint's code: it cannot read this form
            return False
        shown = "key_of_probe" in text if as_object else arguments in text
        return shown and name in text and (content or "") in text


def _adapt_call(call: dict[str, Any], as_object: bool, path: str) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments") or "{}"
    if as_object and isinstance(arguments, str):
        field, valid = f"{path}.function.arguments", "must be the text of a JSON object"
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            raise InvalidRequest(field, _short(arguments), valid) from None
        if not isinstance(parsed, dict):
            raise InvalidRequest(field, _short(arguments), valid)
        arguments = parsed
    elif not as_object and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {"type": "function", **_without_nulls(call)} | {
        "function": {**function, "arguments": arguments}
    }


def _without_nulls(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool or call without the fields that are null, its function's too."""
    kept = {name: value for name, value in tool.items() if value is not None}
    if isinstance(function := kept.get("function"), dict):
        kept["function"] = {name: value for name, value in function.items() if value is not None}
    return kept


def _filled(tool: dict[str, Any]) -> dict[str, Any]:
    """With what may be left out: no description, and a function without parameters."""
    function = tool.get("function")
    if not isinstance(function, dict):
        return tool
    defaults = {"description": "", "parameters": NO_PARAMETERS}
    return tool | {"function": defaults | function}


def _refused(
    messages: Sequence[dict[str, Any]], with_tools: bool, error: Exception
) -> InvalidRequest:
    reason = str(error) or type(error).__name__
    if isinstance(error, _Refusal):
        text = f"the model's chat template refuses messages with these roles: {reason}"
    else:
        what = "these messages and tools" if with_tools else "these messages"
        text = f"the model's chat template cannot render {what}: {reason}"
    return InvalidRequest("messages", [x.get("role") for x in messages], text)


def content_text(content: object, field: str) -> str | None:
    """A message's content as one string: parts of type text are joined by newlines."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(field, _short(content), "must be a string or a list of text parts")
    texts = []
    for index, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        text = None
        if isinstance(part, dict):
            text = part.get("refusal" if kind == "refusal" else "text")
        if kind not in ("text", "input_text", "refusal", "output_text"):
            raise InvalidRequest(
                f"{field}.{index}.type", kind, "must be 'text': this model reads text only"
            )
        if not isinstance(text, str):
            raise InvalidRequest(f"{field}.{index}.text", _short(text), "must be a string")
        texts.append(text)
    return "\n".join(texts)


def load_chat_template(
    folder: Path, tokenizer: Tokenizer, given: Path | None = None
) -> ChatTemplate | None:
    """The checkpoint's template, or the one given; None when there is none at all."""
    path = given or folder / "chat_template.jinja"
    if given is not None or path.is_file():
        try:
            return ChatTemplate(
                {"default": path.read_text(encoding="utf-8")}, tokenizer.special_tokens
            )
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError([f"model.chat_template={path}: cannot be read: {error}"]) from None
    found = tokenizer.config.get("chat_template")
    if isinstance(found, list):
        found = {x["name"]: x["template"] for x in found if isinstance(x, dict) and "name" in x}
    elif isinstance(found, str):
        found = {"default": found}
    if not found:
        return None
    return ChatTemplate(found, tokenizer.special_tokens)


def _short(value: object) -> object:
    text = repr(value)
    return value if len(text) <= 80 else text[:80] + "..."


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    # Not jinja2's own filter: that one escapes <, > and & for HTML, which prompts must not have.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


def _raise(message: str) -> NoReturn:
    raise _Refusal(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
