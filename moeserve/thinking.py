"""How far a sequence has thought, and the token that its limit on thinking forces next.

A model thinks from a start marker (<think>) to an end marker (</think>), each some token ids. Once
a sequence has put out `max_thinking_tokens` tokens of a thinking part that is still open, its next
tokens are the end marker's, in order; a piece of the marker that it has just written counts as the
marker's beginning. Tokens of the prompt count for nothing but to tell whether a part is open; the
start marker is no token of the part, and one amid a part is a token like any other.

What is forced is a function of the tokens alone, so it is the same at each row of a run of drafts,
after preemption, and whatever was drafted.

Knows: token ids and counts, and where a tokenizer has the markers. Knows nothing of logits.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moeserve.reasoning import CLOSE, OPEN
from moeserve.request import Request, ThinkingMarkers

if TYPE_CHECKING:
    from moeserve.chat import ChatTemplate
    from moeserve.tokenizer import Tokenizer
    from moeserve.tool_calls import ToolFormat

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Thought:
    """State after some tokens. count: tokens put out of the open part; None: none is open. tail:
    the last tokens since a marker, as many as a marker may have begun with."""

    markers: ThinkingMarkers
    most: int
    count: int | None = None
    tail: Ids = ()

    @classmethod
    def of(cls, request: Request) -> Thought | None:
        """Of a request's prompt; None where its thinking has no limit."""
        most, markers = request.sampling.max_thinking_tokens, request.thinking
        if most is None or markers is None:
            return None
        prompt = request.prompt_token_ids
        every = (markers.start, markers.end, *markers.also_ends)
        lasts, longest = {marker[-1] for marker in every}, max(map(len, every))
        for at in range(len(prompt), 0, -1):
            if prompt[at - 1] not in lasts:
                continue
            before = prompt[max(at - longest, 0) : at]
            if any(_ends(before, marker) for marker in every):
                count = 0 if _ends(before, markers.start) else None
                return cls(markers, most, count, prompt[at:][-longest:])
        return cls(markers, most, None, prompt[-longest:])

    def after(self, token: int) -> Thought:
        """The state one token later."""
        markers, tail = self.markers, (*self.tail, token)
        if self.count is None:
            if _ends(tail, markers.start):
                return Thought(markers, self.most, 0)
            return Thought(markers, self.most, None, tail[-len(markers.start) :])
        ends = (markers.end, *markers.also_ends)
        if any(_ends(tail, end) for end in ends):
            return Thought(markers, self.most)
        return Thought(markers, self.most, self.count + 1, tail[-max(map(len, ends)) :])

    def after_all(self, tokens: Seq[int]) -> Thought:
        thought = self
        for token in tokens:
            thought = thought.after(token)
        return thought

    @property
    def forced(self) -> int | None:
        """The only token that may come next; None: any may."""
        if self.count is None or self.count < self.most:
            return None
        end = self.markers.end
        begun = next(n for n in range(len(end) - 1, -1, -1) if _ends(self.tail, end[:n]))
        return end[begun]


def _ends(tokens: Seq[int], marker: Seq[int]) -> bool:
    return len(tokens) >= len(marker) and tuple(tokens[len(tokens) - len(marker) :]) == marker


def model_markers(
    tokenizer: Tokenizer, template: ChatTemplate | None, form: ToolFormat | None
) -> ThinkingMarkers | None:
    """`markers_of` a model that writes chats and tool calls like this."""
    return markers_of(
        tokenizer,
        thinks=template is not None and template.uses_reasoning,
        also_ends=() if form is None else form.reasoning_ends,
    )


def markers_of(
    tokenizer: Tokenizer, *, thinks: bool = False, also_ends: Seq[str] = ()
) -> ThinkingMarkers | None:
    """The markers as a model writes them. thinks: its chat template has them, so that they are
    known even where they are spelled in several tokens; else None unless each is one token.
    also_ends: other texts that end a thinking part; those that are no one token are left out."""
    start, end = (tokenizer.fast.token_to_id(text) for text in (OPEN, CLOSE))
    others = (tokenizer.fast.token_to_id(text) for text in also_ends)
    found = tuple((token,) for token in others if token is not None)
    if start is not None and end is not None:
        return ThinkingMarkers((start,), (end,), found)
    if not thinks:
        return None
    opens, closes = (tuple(tokenizer.encode(x, add_special_tokens=False)) for x in (OPEN, CLOSE))
    return ThinkingMarkers(opens, closes, found) if opens and closes else None
