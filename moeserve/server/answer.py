"""One choice of an answer as it grows: token outputs in, text deltas and log-probabilities out.

Joins detokenizer, stop strings, the reasoning split, the parser of tool calls and the held-back
tail, the same for streams and for whole answers, so that a stream's pieces add up to the whole
answer. Knows nothing of HTTP
or of the shape of the JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from moeserve.detokenize import Detokenizer, TokenBytes
from moeserve.reasoning import ReasoningSplitter
from moeserve.request import FinishReason, SamplingParams, TokenLogprob, TokenOutput
from moeserve.tokenizer import Tokenizer
from moeserve.tool_calls import CallPiece, ToolCall, ToolCallParser

LOWEST = -9999.0  # what -inf becomes: JSON has no infinity


@dataclass(frozen=True)
class TokenEntry:
    """A token with its log-probability, and the offset of its text in the choice's text."""

    token_id: int
    offset: int
    logprob: TokenLogprob | None


@dataclass
class Delta:
    """What one or several outputs add to a choice. text excludes reasoning and tool calls."""

    text: str = ""
    reasoning: str = ""
    calls: list[CallPiece] = field(default_factory=list)
    tokens: list[TokenEntry] = field(default_factory=list)  # those whose text is now shown
    token_ids: list[int] = field(default_factory=list)  # as they came
    finish_reason: str | None = None
    error: str | None = None

    @property
    def empty(self) -> bool:
        return not (self.text or self.reasoning or self.calls or self.tokens or self.finish_reason)


class Choice:
    """State of one choice. `request_id` is its engine request; `index` its place in the answer."""

    def __init__(
        self,
        index: int,
        request_id: str,
        sampling: SamplingParams,
        tokenizer: Tokenizer,
        table: TokenBytes | None,
        *,
        skip_special_tokens: bool,
        include_stop: bool,
        reasoning: ReasoningSplitter | None = None,
        tools: ToolCallParser | None = None,
    ) -> None:
        self.index, self.request_id = index, request_id
        # Where tags and markers are special tokens they must still be seen.
        seen = [] if reasoning is None else ["<think>", "</think>"]
        seen += [] if tools is None else tools.markers
        ids = map(tokenizer.fast.token_to_id, seen)
        keep = frozenset(x for x in ids if x is not None)
        self._detokenizer = Detokenizer(
            tokenizer,
            table,
            stop=sampling.stop,
            min_tokens=sampling.min_tokens,
            skip_special_tokens=skip_special_tokens,
            include_stop=include_stop,
            keep=keep,
        )
        self._include_stop = include_stop
        self._wants_logprobs = sampling.logprobs is not None
        self._reasoning, self._tools = reasoning, tools
        self._waiting: list[TokenEntry] = []
        self._shown = 0  # characters of text shown, reasoning and its tags included
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.num_cached_tokens = 0
        self.num_accepted = self.num_rejected = 0  # drafts of these tokens, and those that are none
        self.finish_reason: str | None = None
        self.prompt_logprobs: Sequence[TokenLogprob | None] | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def calls(self) -> list[ToolCall]:
        """Whole tool calls so far."""
        return [] if self._tools is None else self._tools.calls

    @property
    def _cut(self) -> bool:
        """What follows is not wanted: a stop string was found, or as many calls as are allowed."""
        done = self._tools is not None and self._tools.done
        return done or self._detokenizer.stopped is not None

    def push(self, output: TokenOutput) -> Delta:
        """Take an output. After a stop string or the last allowed tool call the rest of it, and all
        later ones, are dropped; the caller then aborts the engine's request."""
        delta = Delta()
        if self.finished:
            return delta
        self.num_cached_tokens = output.num_cached_tokens
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        last, before = len(output.token_ids) - 1, self.num_tokens
        for position, token_id in enumerate(output.token_ids):
            self.num_tokens += 1
            delta.token_ids.append(token_id)
            if self._wants_logprobs:
                logprob = output.logprobs[position] if position < len(output.logprobs) else None
                offset = self._detokenizer.offset(token_id)
                self._waiting.append(TokenEntry(token_id, offset, logprob))
            ends_it = output.stop_token_id is not None and position == last
            if ends_it and not self._include_stop:
                break  # an end token is counted, its text is not shown
            inside = self._reasoning is not None and self._reasoning.reasoning
            self._show(delta, self._detokenizer.push(token_id))
            if inside and self._reasoning is not None and self._reasoning.reasoning:
                self.num_reasoning_tokens += 1  # neither marker is one
            if self._cut:
                break
        accepted = min(output.num_accepted, self.num_tokens - before)
        self.num_accepted += accepted
        self.num_rejected += output.num_rejected + output.num_accepted - accepted
        if not self._cut and output.finish_reason is not None:
            self._show(delta, self._detokenizer.flush())
        if self._cut or output.finish_reason is not None:
            self._flush(delta)
            reason = FinishReason.STOP if self._cut else output.finish_reason
            assert reason is not None
            called = reason is FinishReason.STOP and self.calls
            self.finish_reason = delta.finish_reason = "tool_calls" if called else reason.value
            delta.error = None if self._cut else output.error
        self._release(delta, everything=self.finished and not self._cut)
        return delta

    def _show(self, delta: Delta, text: str) -> None:
        if not text:
            return
        self._shown += len(text)
        if self._reasoning is not None:
            thought, text = self._reasoning.push(text)
            delta.reasoning += thought
        self._content(delta, text)

    def _content(self, delta: Delta, text: str) -> None:
        if self._tools is not None:
            text, calls = self._tools.push(text)
            delta.calls += calls
        delta.text += text

    def _flush(self, delta: Delta) -> None:
        """The answer has ended: what was held back goes out."""
        if self._reasoning is not None:
            thought, text = self._reasoning.flush()
            delta.reasoning += thought
            self._content(delta, text)
        if self._tools is not None:
            text, calls = self._tools.flush()
            delta.text += text
            delta.calls += calls

    def _release(self, delta: Delta, *, everything: bool) -> None:
        """Entries go out with their text; those cut off by a stop string never do."""
        count = 0
        while count < len(self._waiting) and (
            everything or self._waiting[count].offset < self._shown
        ):
            count += 1
        delta.tokens = self._waiting[:count]
        self._waiting = self._waiting[count:]


def finite(logprob: float) -> float:
    return max(logprob, LOWEST)
