"""Tool calls out of a model's text, as it streams: each goes out once it is whole.

Two ways to write calls are known; which one a checkpoint uses is told by the marker tokens of its
tokenizer, not by its name:

- DeepSeek: V3 and R1 write a type, the name and a fenced JSON object, V3.1 the name and the bare
  object. The markers are the same, so each call shows for itself which of the two it is.
- Kimi-K2: an id functions.NAME:INDEX and the bare object. The id is kept: the model reads it again.

A call counts once its arguments are a whole JSON object and nothing but its end follows. Until then
nothing of it goes out, for a stream could not take it back. What looks like a call and is none
(unfinished, not JSON, no name) is text, markers and all: it comes as the content that it would have
been without this parser. So whole and streamed answers say the same.

Nothing here checks arguments against a tool's schema. Knows text only.
"""

from __future__ import annotations

import enum
import json
import re
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NoReturn

from moeserve.tokenizer import Tokenizer

_HEADER = 256  # characters a name, type or id may take; longer is no call
_NAME = re.compile(r"[^\s<>{}\"'`]{1,128}")
_KIMI_ID = re.compile(r"(?:functions\.)?(?P<name>.+?)(?::(?P<index>\d+))?")
_FENCE = "```"
_OPENING = re.compile(_FENCE + r"[a-z]*\s*")


class Marker(enum.Enum):
    SECTION = enum.auto()
    END_SECTION = enum.auto()
    CALL = enum.auto()
    SEPARATOR = enum.auto()
    END_CALL = enum.auto()


@dataclass(frozen=True)
class ToolFormat:
    """The markers of a way to write calls: text -> what it marks."""

    name: str
    markers: dict[str, Marker]
    ends_reasoning: bool  # a section may begin amid the reasoning and ends it

    @property
    def reasoning_ends(self) -> list[str]:
        """Markers that end a reasoning part in which they come."""
        begins = [x for x, kind in self.markers.items() if kind is Marker.SECTION]
        return begins if self.ends_reasoning else []


def _deepseek() -> ToolFormat:
    def marker(words: str) -> str:
        return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"  # their own bars and blanks

    return ToolFormat(
        "deepseek",
        {
            marker("tool calls begin"): Marker.SECTION,
            marker("tool calls end"): Marker.END_SECTION,
            marker("tool call begin"): Marker.CALL,
            marker("tool sep"): Marker.SEPARATOR,
            marker("tool call end"): Marker.END_CALL,
        },
        ends_reasoning=False,
    )


def _kimi() -> ToolFormat:
    return ToolFormat(
        "kimi",
        {
            "<|tool_calls_section_begin|>": Marker.SECTION,
            "<|tool_calls_section_end|>": Marker.END_SECTION,
            "<|tool_call_begin|>": Marker.CALL,
            "<|tool_call_argument_begin|>": Marker.SEPARATOR,
            "<|tool_call_end|>": Marker.END_CALL,
        },
        ends_reasoning=True,
    )


def tool_format(tokenizer: Tokenizer) -> ToolFormat | None:
    """The format whose markers are all tokens of this tokenizer; None when none is."""
    for found in (_deepseek(), _kimi()):
        if all(tokenizer.fast.token_to_id(x) is not None for x in found.markers):
            return found
    return None


@dataclass(frozen=True)
class CallPiece:
    """What a delta adds to call number `index`; id and name are in its first piece only."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True)
class ToolCall:
    """A whole call. arguments is the text of a JSON object as the model wrote it."""

    id: str
    name: str
    arguments: str


class _State(enum.Enum):
    TEXT = enum.auto()
    SECTION = enum.auto()  # between calls
    HEADER = enum.auto()  # of a call, up to the separator
    BODY = enum.auto()  # after it, before the object begins
    OBJECT = enum.auto()
    AFTER = enum.auto()  # the object is whole, the call's end has not come
    BROKEN = enum.auto()  # no call after all: text up to its end


class ToolCallParser:
    """Feed text, get (content, pieces); `calls` are the whole ones so far.

    names: of the tools that the model was given. hidden: markers left out of what becomes content
    (special tokens, where those are not shown). most: stop after so many calls; `done` then says
    so, and the rest is dropped.
    """

    def __init__(
        self,
        form: ToolFormat,
        names: Collection[str] = (),
        *,
        hidden: Collection[str] = (),
        most: int | None = None,
        new_id: Callable[[], str] = lambda: "call_" + uuid.uuid4().hex[:24],
    ) -> None:
        self.calls: list[ToolCall] = []
        self.done = False
        self._form, self._names, self._hidden = form, frozenset(names), tuple(hidden)
        self._most, self._new_id = most, new_id
        self._any_marker = re.compile("|".join(map(re.escape, form.markers)))
        self._state = _State.TEXT
        self._held = ""  # may be the beginning of a marker
        self._raw = ""  # text that is content if no call comes of it
        self._header = ""
        self._body = ""
        self._after = ""
        self._object = _ObjectScanner()
        self._current = ToolCall("", "", "")
        self._content: list[str] = []
        self._pieces: list[CallPiece] = []

    @property
    def markers(self) -> list[str]:
        return list(self._form.markers)

    @property
    def ends_reasoning(self) -> list[str]:
        """Markers that end a reasoning part in which they come."""
        return self._form.reasoning_ends

    def push(self, text: str) -> tuple[str, list[CallPiece]]:
        self._held += text
        while not self.done and (found := self._any_marker.search(self._held)) is not None:
            before, self._held = self._held[: found.start()], self._held[found.end() :]
            self._text(before)
            self._marker(found.group())
        if not self.done:
            keep = max(_overlap(self._held, x) for x in self._form.markers)
            cut = len(self._held) - keep
            text, self._held = self._held[:cut], self._held[cut:]
            self._text(text)
        return self._take()

    def flush(self) -> tuple[str, list[CallPiece]]:
        """The answer has ended: what is unfinished was text after all."""
        if not self.done:
            held, self._held = self._held, ""
            self._text(held)
            match self._state:
                case _State.AFTER:
                    self._finish()
                case _State.HEADER | _State.BODY | _State.OBJECT:
                    self._break()
                case _State.SECTION if self._raw.strip() or not self.calls:
                    self._say(self._raw)
        return self._take()

    # ---- what comes ------------------------------------------------------------------------

    def _text(self, text: str) -> None:
        if not text:
            return
        match self._state:
            case _State.TEXT | _State.BROKEN:
                self._say(text)
                return
            case _State.SECTION if text.strip():
                self._say(self._raw + text)
                self._raw = ""
                return
        self._raw += text
        match self._state:
            case _State.HEADER:
                self._header += text
                if len(self._header) > _HEADER:
                    self._break()
            case _State.BODY:
                self._body += text
                self._read_body(ended=False)
            case _State.OBJECT:
                self._read_object(text)
            case _State.AFTER:
                self._read_after(text)

    def _marker(self, text: str) -> None:
        kind = self._form.markers[text]
        state = self._state
        if state is _State.HEADER and kind is Marker.SEPARATOR:
            self._raw += text
            self._body, self._state = "", _State.BODY
            return
        if state is _State.BODY and kind is Marker.END_CALL:
            self._read_body(ended=True)
        if self._state is _State.AFTER and kind is not Marker.SEPARATOR:
            self._finish()
            if kind is Marker.END_CALL or self.done:
                return
        elif self._state in (_State.HEADER, _State.BODY, _State.OBJECT, _State.AFTER):
            self._break()
        match kind:
            case Marker.CALL:
                self._raw += text
                self._header, self._state = "", _State.HEADER
            case Marker.SECTION:
                self._say(self._raw)
                self._raw, self._state = text, _State.SECTION
            case Marker.END_SECTION:
                if self._state is not _State.SECTION or self._raw.strip() or not self.calls:
                    self._say(self._raw + text)
                self._raw, self._state = "", _State.TEXT
            case Marker.END_CALL if self._state is _State.BROKEN:
                self._say(text)
                self._state = _State.SECTION
            case _:
                self._say(self._raw + text)
                self._raw = ""

    # ---- parts of a call -------------------------------------------------------------------

    def _read_body(self, *, ended: bool) -> None:
        """Read the object once it begins; `ended`: the call's end marker is here."""
        try:
            call, rest = self._named(ended)
        except ValueError:
            self._break()
            return
        if call is None:
            return
        self._current = call
        self._object, self._after = _ObjectScanner(), ""
        self._state = _State.OBJECT
        self._read_object(rest or "{}")

    def _named(self, ended: bool) -> tuple[ToolCall | None, str]:
        """The call and the text from its object on ("": it has no arguments); None: too early to
        tell. ValueError: this is no call."""
        header, body = self._header.strip(), self._body.lstrip()
        call_id, name, rest = "", header, body or None
        if self._form.ends_reasoning:
            found = _KIMI_ID.fullmatch(header)
            if found is None:
                raise ValueError("an id is missing")
            name = found["name"]
            call_id = f"functions.{name}:{found['index'] or len(self.calls)}"
        elif body and not body.startswith("{"):  # a type came first, as V3 and R1 write it
            line, newline, after = body.partition("\n")
            if header != "function" or len(line) > _HEADER:
                raise ValueError("neither an object nor a name follows")
            name, rest = line.strip(), _unfenced(after, ended) if newline else None
        elif header == "function" and body and header not in self._names:
            raise ValueError("a type without a name")
        if rest is None and not ended:
            return None, ""
        if not _NAME.fullmatch(name) or not (rest or "{").startswith("{"):
            raise ValueError("no name, or no object")
        return ToolCall(call_id or self._new_id(), name, ""), rest or ""

    def _read_object(self, text: str) -> None:
        length = self._object.push(text)
        piece, rest = text[:length], text[length:]
        call = self._current
        self._current = ToolCall(call.id, call.name, call.arguments + piece)
        if self._object.closed and not _is_object(self._current.arguments):
            self._break()
        elif self._object.closed:
            self._state = _State.AFTER
            self._read_after(rest)

    def _read_after(self, text: str) -> None:
        self._after += text
        if not _FENCE.startswith(self._after.strip()):
            self._break()

    def _finish(self) -> None:
        call, index = self._current, len(self.calls)
        self.calls.append(call)
        self._pieces.append(CallPiece(index, id=call.id, name=call.name))
        self._pieces.append(CallPiece(index, arguments=call.arguments))
        self._raw, self._state = "", _State.SECTION
        self.done = self._most is not None and len(self.calls) >= self._most

    def _break(self) -> None:
        """No call after all."""
        self._say(self._raw)
        self._raw, self._state = "", _State.BROKEN

    # ---- what goes out ---------------------------------------------------------------------

    def _say(self, text: str) -> None:
        for marker in self._hidden:
            text = text.replace(marker, "")
        self._content.append(text)

    def _take(self) -> tuple[str, list[CallPiece]]:
        content, pieces = "".join(self._content), self._pieces
        self._content, self._pieces = [], []
        return content, pieces


class _ObjectScanner:
    """Finds where a JSON object ends, without judging what is in it."""

    def __init__(self) -> None:
        self.closed = False
        self._depth = 0
        self._in_string = self._escaped = False

    def push(self, text: str) -> int:
        """How many characters of the text belong to the object."""
        for place, char in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._in_string = False
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.closed = True
                    return place + 1
        return len(text)


def _unfenced(text: str, ended: bool) -> str | None:
    """What follows the opening fence, if there is one; None: too early to tell."""
    text = text.lstrip()
    if found := _OPENING.match(text):
        text = text[found.end() :]
    if not ended:
        return None if _FENCE.startswith(text.rstrip()) else text
    return text.rstrip().removesuffix(_FENCE).rstrip()


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text, parse_constant=_no_constant), dict)
    except (ValueError, RecursionError):
        return False


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)  # NaN and its like are not JSON


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of text that is a beginning of the marker, not all of it."""
    return next((n for n in range(len(marker) - 1, 0, -1) if text.endswith(marker[:n])), 0)
