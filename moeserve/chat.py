"""Chat messages to prompt text, by the checkpoint's own jinja2 template in a sandbox.

Where the template comes from: --chat-template, else chat_template.jinja beside the checkpoint, else
chat_template of tokenizer_config.json (a string, or a list of named ones: "default" is taken, and
"tool_use" where tools are given). Templates are foreign code: they run in jinja2's immutable
sandbox, and what they raise becomes a 400. Knows nothing of token ids.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.meta
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from moeserve.errors import ConfigError, InvalidRequest
from moeserve.tokenizer import Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


# Variables of a template that come from other fields of a request.
_OURS = frozenset({"messages", "tools", "add_generation_prompt"})


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
        self.uses_tools = "tools" in (tool_use or self.source)
        found = [environment.parse(text) for text in {self.source, tool_use or self.source}]
        names = set[str]().union(*map(jinja2.meta.find_undeclared_variables, found))
        # What a caller may set: names that the template reads and nobody else fills in.
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
        if tools and not self.uses_tools:
            raise InvalidRequest(
                "tools", f"[{len(tools)} tools]", "the chat template of this model knows no tools"
            )
        for name, value in (variables or {}).items():
            if name not in self.variables:
                known = ", ".join(sorted(self.variables)) or "none"
                raise InvalidRequest(
                    f"chat_template_kwargs.{name}",
                    _short(value),
                    f"the chat template of this model has no such variable; it reads: {known}",
                )
        template = self._tool_use if tools else self._default
        values: dict[str, Any] = {**self._special_tokens, **(variables or {})}
        values |= {
            "messages": self._adapt(messages),
            "add_generation_prompt": add_generation_prompt,
        }
        if tools:
            values["tools"] = list(tools)
        try:
            return template.render(values)
        except Exception as error:  # anything: it is the checkpoint's code on the user's data
            reason = str(error) or type(error).__name__
            raise InvalidRequest(
                "messages",
                [x.get("role") for x in messages],
                f"the model's chat template refuses messages with these roles: {reason}",
            ) from None

    def _adapt(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Content parts become text. A template that does not know "developer" sees "system"."""
        adapted = []
        for index, message in enumerate(messages):
            message = dict(message)
            message["content"] = content_text(message.get("content"), f"messages.{index}.content")
            if message.get("role") == "developer" and "developer" not in self.source:
                message["role"] = "system"
            adapted.append(message)
        return adapted


def content_text(content: object, field: str) -> str | None:
    """A message's content as one string: parts of type text are joined by newlines."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(field, _short(content), "a string or a list of text parts")
    texts = []
    for index, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text") if isinstance(part, dict) else None
        if kind not in ("text", "input_text", "refusal", "output_text"):
            raise InvalidRequest(
                f"{field}.{index}.type", kind, "'text': this model reads text only"
            )
        if not isinstance(text, str):
            raise InvalidRequest(f"{field}.{index}.text", _short(text), "a string")
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
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
