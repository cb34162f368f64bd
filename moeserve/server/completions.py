"""POST /v1/completions: the legacy shape, with echo, prompt log-probabilities, token-id prompts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from moeserve.detokenize import Detokenizer
from moeserve.server.answer import Choice, Delta, TokenEntry, finite
from moeserve.server.errors import error_body
from moeserve.server.fields import CompletionBody
from moeserve.server.run import pairs, steps, whole
from moeserve.server.service import Job, Service
from moeserve.server.sse import DONE, event
from moeserve.streams import OutputStream


class CompletionWriter:
    """Writes the answer to one call."""

    def __init__(self, service: Service, body: CompletionBody, job: Job) -> None:
        self._service, self._body, self._job = service, body, job
        self._echoed = [self._echo_text(p) if body.echo else "" for p in range(len(job.prompt_ids))]

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
        echoed = self._echoed[prompt] if first else ""
        written: dict[str, Any] = {
            "index": choice.index,
            "text": echoed + delta.text,
            "logprobs": None,
            "finish_reason": delta.finish_reason,
        }
        if self._body.logprobs is not None:
            entries: list[TokenEntry] = []
            if first and self._body.echo:
                entries = self._prompt_entries(choice, prompt)
            written["logprobs"] = self._logprobs(entries, delta.tokens, len(self._echoed[prompt]))
        if self._body.return_token_ids:
            written["token_ids"] = delta.token_ids
            if first:
                written["prompt_token_ids"] = self._job.prompt_ids[prompt]
        return written

    def _echo_text(self, prompt: int) -> str:
        text = self._job.prompt_texts[prompt]
        if text is not None:
            return text
        return self._service.tokenizer.decode(
            self._job.prompt_ids[prompt], skip_special_tokens=self._body.skip_special_tokens
        )

    def _prompt_entries(self, choice: Choice, prompt: int) -> list[TokenEntry]:
        """The prompt's tokens with what the engine said of them; the first one has no context."""
        ids = self._job.prompt_ids[prompt]
        said = choice.prompt_logprobs or [None] * len(ids)
        walk = Detokenizer(
            self._service.tokenizer,
            self._service.table,
            skip_special_tokens=self._body.skip_special_tokens,
        )
        entries = []
        for token_id, logprob in zip(ids, said, strict=True):
            entries.append(TokenEntry(token_id, walk.num_characters, logprob))
            walk.push(token_id)
        return entries

    def _logprobs(
        self, prompt: list[TokenEntry], output: list[TokenEntry], output_offset: int
    ) -> dict[str, Any]:
        text_of = self._service.tokenizer.token_text
        entries = [*prompt, *output]
        top: list[dict[str, float] | None] = []
        for entry in entries:
            if entry.logprob is None:
                top.append(None)
                continue
            row: dict[str, float] = {}
            for token_id, logprob in pairs(entry):
                row.setdefault(text_of(token_id), finite(logprob))  # best first: the best stays
            top.append(row)
        return {
            "tokens": [text_of(x.token_id) for x in entries],
            "token_logprobs": [x.logprob and finite(x.logprob.logprob) for x in entries],
            "top_logprobs": top,
            "text_offset": [x.offset for x in prompt] + [output_offset + x.offset for x in output],
        }
