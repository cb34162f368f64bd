"""Keeps what users and tools say text: spellings of control tokens in it become no tokens.

A template writes control tokens as text, and a tokenizer finds them in the finished prompt, so a
user who writes one could forge a turn. Where content of the roles GUARDED spells one, a mark is put
into the spelling before the template runs; the rendered prompt is then encoded in pieces, split at
the marks. The pieces hold every character and no spelling. Content without such a spelling takes
the plain way: its prompt is encoded in one piece, with the same ids as ever.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from moeserve.chat import content_text
from moeserve.tokenizer import Tokenizer

GUARDED = frozenset({"user", "tool", "function"})
_TEXTS = ("name", "tool_call_id")  # beside content, what templates show of a message
_MARKS = range(0xE000, 0xF900)  # characters for private use


class ContentGuard:
    """For one tokenizer. `works` is False where pieces of a text cannot be encoded apart (a
    tokenizer that puts a blank before each): content is then left as it is."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.fast.get_added_tokens_decoder().values()
        spellings = [x.content for x in added if x.special or re.fullmatch("<.+>", x.content)]
        spellings = sorted((x for x in spellings if len(x) > 1), key=len, reverse=True)
        self._spelling = re.compile("|".join(map(re.escape, spellings)) or "(?!)")
        apart = [tokenizer.encode(x, add_special_tokens=False) for x in ("<", "a")]
        self.works = tokenizer.decode(sum(apart, []), skip_special_tokens=False) == "<a"

    def marked(
        self, messages: Sequence[dict[str, Any]], beside: str
    ) -> tuple[list[dict[str, Any]], str | None]:
        """The messages with marks in them, and the mark; None where nothing has to be marked.
        beside: everything else that the prompt may show, which must not hold the mark."""
        texts = [self._texts(x) if x.get("role") in GUARDED else {} for x in messages]
        spoken = [text for found in texts for text in found.values()]
        if not self.works or not any(map(self._spelling.search, spoken)):
            return list(messages), None
        taken = set(beside + repr(messages) + "".join(spoken))
        mark = next(x for x in map(chr, _MARKS) if x not in taken)
        return [
            message | {key: self._mark(text, mark) for key, text in found.items()}
            for message, found in zip(messages, texts, strict=True)
        ], mark

    @staticmethod
    def _texts(message: dict[str, Any]) -> dict[str, str]:
        texts = {key: message.get(key) for key in _TEXTS}
        texts["content"] = content_text(message.get("content"), "content")
        return {key: text for key, text in texts.items() if isinstance(text, str)}

    def _mark(self, text: str, mark: str) -> str:
        while self._spelling.search(text):  # again: spellings may overlap
            text = self._spelling.sub(lambda x: x.group()[0] + mark + x.group()[1:], text)
        return text
