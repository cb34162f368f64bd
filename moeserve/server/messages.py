"""Chat messages and tools as a caller gives them: what is wrong with them, all of it.

Checked is what any template may rely on; what one template wants beyond that, it says itself.
Pure. Knows nothing of templates.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from moeserve.chat import ROLES, content_text
from moeserve.errors import InvalidRequest, MissingField

_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_NAMES = "1 to 64 letters, digits, _, - and ."


def message_problems(messages: Sequence[dict[str, Any]]) -> list[InvalidRequest]:
    return [x for i, message in enumerate(messages) for x in _of_message(message, f"messages.{i}")]


def tool_problems(tools: Sequence[dict[str, Any]]) -> list[InvalidRequest]:
    return [x for i, tool in enumerate(tools) for x in _of_tool(tool, f"tools.{i}")]


def _of_message(message: dict[str, Any], path: str) -> Iterator[InvalidRequest]:
    role = message.get("role")
    if role is None:
        yield MissingField(f"{path}.role", f"one of {', '.join(ROLES)}")
    elif role not in ROLES:
        yield InvalidRequest(f"{path}.role", _short(role), f"must be one of {', '.join(ROLES)}")
    content = message.get("content")
    if content is None and role != "assistant":
        yield MissingField(f"{path}.content", "a string or a list of text parts")
    try:
        content_text(content, f"{path}.content")
    except InvalidRequest as error:
        yield error
    for key in ("name", "tool_call_id"):
        if not isinstance(message.get(key), str | None):
            yield InvalidRequest(f"{path}.{key}", _short(message[key]), "must be a string")
    calls = message.get("tool_calls")
    if calls is None:
        return
    if role != "assistant":
        valid = "only messages of the assistant have tool calls"
        yield InvalidRequest(f"{path}.tool_calls", _short(calls), valid)
    elif not isinstance(calls, list):
        yield InvalidRequest(f"{path}.tool_calls", _short(calls), "must be a list of tool calls")
    else:
        for number, call in enumerate(calls):
            yield from _of_call(call, f"{path}.tool_calls.{number}")


def _of_call(call: object, path: str) -> Iterator[InvalidRequest]:
    if not isinstance(call, dict):
        yield InvalidRequest(path, _short(call), "must be an object with id, type and function")
        return
    if not isinstance(call.get("id"), str | None):
        yield InvalidRequest(f"{path}.id", _short(call["id"]), "must be a string")
    if call.get("type") not in (None, "function"):
        yield InvalidRequest(f"{path}.type", _short(call["type"]), "must be 'function'")
    function = call.get("function")
    if not isinstance(function, dict):
        yield _wrong(f"{path}.function", function, "an object with name and arguments")
        return
    name = function.get("name")
    if not isinstance(name, str) or not name:
        yield _wrong(f"{path}.function.name", name, "a string, not empty")
    arguments = function.get("arguments")
    if not isinstance(arguments, str | dict | None):
        valid = "must be a string that holds a JSON object"
        yield InvalidRequest(f"{path}.function.arguments", _short(arguments), valid)


def _of_tool(tool: dict[str, Any], path: str) -> Iterator[InvalidRequest]:
    if tool.get("type") != "function":
        yield _wrong(f"{path}.type", tool.get("type"), "'function', the only kind that is served")
    function = tool.get("function")
    if not isinstance(function, dict):
        yield _wrong(f"{path}.function", function, "an object with name and parameters")
        return
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        yield _wrong(f"{path}.function.name", name, _NAMES)
    kinds: tuple[tuple[str, type, str], ...] = (
        ("description", str, "a string"),
        ("parameters", dict, "an object (a JSON schema)"),
        ("strict", bool, "true or false"),
    )
    for key, kind, valid in kinds:
        value = function.get(key)
        if value is not None and not isinstance(value, kind):
            yield _wrong(f"{path}.function.{key}", value, f"{valid}, or absent")


def _wrong(path: str, value: object, valid: str) -> InvalidRequest:
    if value is None:
        return MissingField(path, valid)
    return InvalidRequest(path, _short(value), f"must be {valid}")


def _short(value: object) -> object:
    return value if len(repr(value)) <= 80 else repr(value)[:80] + "..."
