"""POST /v1/completions: the legacy shape, with echo, prompt log-probabilities, token-id prompts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from moeserve.detokenize import Detokenizer
from moeserve.server.answer import Choice, Delta, TokenEntry, finite
from moeserve.server.errors import error_body
from moeserve.server.fields import CompletionBody
from moeserve.server.run import pairs, steps, whole
from moeserve.server.service import Job, Service
from moeserve.server.sse import DONE, event
from moeserve.streams import OutputStream
from moeserve.tokenizer import Tokenizer


@dataclass(frozen=True)
class _Echo:
    """A prompt's text, and where in it the text of each of its tokens begins."""

    text: str
    offsets: list[int]


class CompletionWriter:
    """Writes the answer to one call."""

    def __init__(self, service: Service, body: CompletionBody, job: Job) -> None:
        self._service, self._body, self._job = service, body, job
        self._echoes = [self._echo(p) for p in range(len(job.prompt_ids))] if body.echo else []

    async def answer(self, stream: OutputStream) -> dict[str, Any]:
        """The whole answer."""
        deltas = await whole(self._job, stream)
        choices = []
        for choice, delta in zip(self._job.choices, deltas, strict=True):
            choices.append(self._choice(choice, delta, first=True))
        return self._envelope(choices) | {"usage": self._job.usage()}

    async def events(self, stream: OutputStream) -> AsyncIterator[bytes]:
        """The answer as events, one write a step."""
        options = self._body.stream_options
        usage_at_end = bool(options and options.include_usage)
        usage_always = bool(options and options.continuous_usage_stats)
        begun: set[int] = set()
        async for batch in steps(self._job, stream):
            written = []
            for choice, delta in batch:
                first = choice.index not in begun
                if delta.empty and not (
                    (first and self._body.echo) or (self._body.return_token_ids and delta.token_ids)
                ):
                    continue
                begun.add(choice.index)
                chunk = self._envelope([self._choice(choice, delta, first=first)])
                if usage_always:
                    chunk["usage"] = self._job.usage()
                elif usage_at_end:
                    chunk["usage"] = None
                written.append(event(chunk))
                if delta.finish_reason == "error":
                    message = delta.error or "the engine failed"
                    written.append(event(error_body(message, "server_error", None, "engine_error")))
            if written:
                yield b"".join(written)
        last = b""
        if usage_at_end:
            last = event(self._envelope([]) | {"usage": self._job.usage()})
        yield last + DONE

    def _envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._job.id,
            "object": "text_completion",
            "created": self._job.created,
            "model": self._service.model_name,
            "choices": choices,
        }

    def _choice(self, choice: Choice, delta: Delta, *, first: bool) -> dict[str, Any]:
        prompt = choice.index // self._job.n
        echo = self._echoes[prompt] if self._body.echo else _Echo("", [])
        written: dict[str, Any] = {
            "index": choice.index,
            "text": (echo.text if first else "") + delta.text,
            "logprobs": None,
            "finish_reason": delta.finish_reason,
        }
        if self._body.logprobs is not None:
            entries: list[TokenEntry] = []
            if first and self._body.echo:
                entries = self._prompt_entries(choice, prompt)
            written["logprobs"] = self._logprobs(entries, delta.tokens, len(echo.text))
        if self._body.return_token_ids:
            written["token_ids"] = delta.token_ids
            if first:
                written["prompt_token_ids"] = self._job.prompt_ids[prompt]
        return written

    def _echo(self, prompt: int) -> _Echo:
        """A prompt as the walk over its tokens says it. Left out with skip_special_tokens: special
        tokens; of a text only those that were put around it, for what it spells is the caller's."""
        ids, text = self._job.prompt_ids[prompt], self._job.prompt_texts[prompt]
        tokenizer = self._service.tokenizer
        hidden = set[int]()
        if self._body.skip_special_tokens:
            hidden = {place for place, x in enumerate(ids) if x in tokenizer.special_ids}
            if text is not None and hidden and not _is_added_first(tokenizer, ids, text, hidden):
                own = tokenizer.encode(text, add_special_tokens=False)
                starts = range(len(ids) - len(own) + 1)
                start = next((x for x in starts if ids[x : x + len(own)] == own), 0)
                hidden -= set(range(start, start + len(own)))
        walk = Detokenizer(tokenizer, self._service.table, skip_special_tokens=False)
        parts, offsets = [], []
        for place, token_id in enumerate(ids):
            if place in hidden:
                offsets.append(walk.num_characters)
            else:
                offsets.append(walk.offset(token_id))
                parts.append(walk.push(token_id))
        parts.append(walk.flush())
        return _Echo("".join(parts), offsets)

    def _prompt_entries(self, choice: Choice, prompt: int) -> list[TokenEntry]:
        """The prompt's tokens with what the engine said of them; the first one has no context."""
        ids = self._job.prompt_ids[prompt]
        said = choice.prompt_logprobs or [None] * len(ids)
        offsets = self._echoes[prompt].offsets
        return [TokenEntry(*x) for x in zip(ids, offsets, said, strict=True)]

    def _logprobs(
        self, prompt: list[TokenEntry], output: list[TokenEntry], output_offset: int
    ) -> dict[str, Any]:
        token_text = self._service.tokenizer.token_text
        entries = [*prompt, *output]
        top: list[dict[str, float] | None] = []
        for entry in entries:
            if entry.logprob is None:
                top.append(None)
                continue
            row: dict[str, float] = {}
            for token_id, logprob in pairs(entry):
                text = token_text(token_id, first=entry.offset == 0)
                row.setdefault(text, finite(logprob))  # best first: the best stays
            top.append(row)
        return {
            "tokens": [token_text(x.token_id, first=x.offset == 0) for x in entries],
            "token_logprobs": [x.logprob and finite(x.logprob.logprob) for x in entries],
            "top_logprobs": top,
            "text_offset": [x.offset for x in prompt] + [output_offset + x.offset for x in output],
        }


def _is_added_first(tokenizer: Tokenizer, ids: list[int], text: str, special: set[int]) -> bool:
    """Whether the one special token is the first, and not spelled by the text: the usual case."""
    return special == {0} and not text.startswith(tokenizer.token_text(ids[0]))
