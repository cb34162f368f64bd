"""Splits a chat answer into reasoning (between <think> and </think>) and content, as it streams.

Reasoning is only looked for where the template or the answer opens it: the rendered prompt ends in
<think>, or the answer begins with <think>. Tags elsewhere are ordinary text. Some models begin tool
calls amid their reasoning: such a beginning ends it too, and is content. Knows text only.
"""

from __future__ import annotations

from collections.abc import Sequence

OPEN, CLOSE = "<think>", "</think>"


class ReasoningSplitter:
    """Feed text deltas; get (reasoning, content) deltas whose concatenation loses only the tags.

    `reasoning` tells whether the text so far ends inside the reasoning part. ends: texts that end
    it as </think> does, but belong to the content.
    """

    def __init__(self, *, opened: bool, ends: Sequence[str] = ()) -> None:
        self._ends = (CLOSE, *ends)
        self.reasoning = opened
        self._start = not opened  # an opening tag may still come
        self._held = ""

    def push(self, text: str) -> tuple[str, str]:
        self._held += text
        if self._start:
            stripped = self._held.lstrip()
            if stripped.startswith(OPEN):
                self._held = stripped[len(OPEN) :]
                self._start, self.reasoning = False, True
            elif stripped == "" or OPEN.startswith(stripped):
                return "", ""
            else:
                self._start = False
        if not self.reasoning:
            return "", self._take(len(self._held))
        hits = [(at, end) for end in self._ends if (at := self._held.find(end)) >= 0]
        if hits:
            at, end = min(hits)
            thought = self._take(at)
            if end == CLOSE:
                self._held = self._held[len(CLOSE) :]
            self.reasoning = False
            return thought, self._take(len(self._held))
        keep = max(_overlap(self._held, end) for end in self._ends)
        return self._take(len(self._held) - keep), ""

    def flush(self) -> tuple[str, str]:
        """The answer has ended: a partial tag was text after all."""
        held = self._take(len(self._held))
        return (held, "") if self.reasoning else ("", held)

    def _take(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        return text


def _overlap(text: str, end: str) -> int:
    """Length of the longest tail of text that is a beginning of `end`, not all of it."""
    return next((n for n in range(len(end) - 1, 0, -1) if text.endswith(end[:n])), 0)


def prompt_opens_reasoning(prompt: str) -> bool:
    """Whether a rendered chat prompt leaves the model inside an open <think>."""
    return prompt.rstrip().endswith(OPEN)
