"""POST /v1/chat/completions: messages in, a message (or its deltas) out; reasoning and tool calls
apart."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from moeserve.server.answer import Choice, Delta, TokenEntry, finite
from moeserve.server.errors import error_body
from moeserve.server.fields import ChatBody
from moeserve.server.run import pairs, steps, whole
from moeserve.server.service import Job, Service
from moeserve.server.sse import DONE, event
from moeserve.streams import OutputStream
from moeserve.tool_calls import CallPiece, ToolCall


class ChatWriter:
    """Writes the answer to one call."""

    def __init__(self, service: Service, body: ChatBody, job: Job) -> None:
        self._service, self._body, self._job = service, body, job

    async def answer(self, stream: OutputStream) -> dict[str, Any]:
        """The whole answer."""
        deltas = await whole(self._job, stream)
        choices = []
        for choice, delta in zip(self._job.choices, deltas, strict=True):
            message: dict[str, Any] = {"role": "assistant", "content": delta.text, "refusal": None}
            if delta.reasoning:
                message["reasoning_content"] = delta.reasoning
            if choice.calls:
                message["content"] = delta.text or None
                message["tool_calls"] = [_call(x) for x in choice.calls]
            written = {
                "index": choice.index,
                "message": message,
                "logprobs": self._logprobs(delta.tokens),
                "finish_reason": delta.finish_reason,
            }
            if self._body.return_token_ids:
                written["token_ids"] = delta.token_ids
            choices.append(written)
        answer = self._envelope("chat.completion", choices) | {"usage": self._job.usage()}
        if self._body.return_token_ids:
            answer["prompt_token_ids"] = self._job.prompt_ids[0]
        return answer

    async def events(self, stream: OutputStream) -> AsyncIterator[bytes]:
        """The answer as events, one write a step: a role, deltas, a finish reason for each choice;
        then usage if asked for."""
        options = self._body.stream_options
        usage_at_end = bool(options and options.include_usage)
        usage_always = bool(options and options.continuous_usage_stats)

        def chunk(
            choice: Choice, delta: dict[str, Any], source: Delta, finish: str | None
        ) -> bytes:
            written: dict[str, Any] = {
                "index": choice.index,
                "delta": delta,
                "logprobs": None if finish else self._logprobs(source.tokens),
                "finish_reason": finish,
            }
            if self._body.return_token_ids and not finish:
                written["token_ids"] = source.token_ids
            payload = self._envelope("chat.completion.chunk", [written])
            if usage_always:
                payload["usage"] = self._job.usage()
            elif usage_at_end:
                payload["usage"] = None
            return event(payload)

        begun: set[int] = set()
        async for batch in steps(self._job, stream):
            written = []
            for choice, delta in batch:
                if choice.index not in begun:
                    begun.add(choice.index)
                    role = {"role": "assistant", "content": ""}
                    written.append(chunk(choice, role, Delta(), None))
                wants_ids = self._body.return_token_ids and delta.token_ids
                if delta.text or delta.reasoning or delta.calls or delta.tokens or wants_ids:
                    parts = {
                        "reasoning_content": delta.reasoning,
                        "content": delta.text,
                        "tool_calls": _pieces(delta.calls),
                    }
                    shown = {name: part for name, part in parts.items() if part}
                    written.append(chunk(choice, shown, delta, None))
                if delta.finish_reason is not None:
                    written.append(chunk(choice, {}, delta, delta.finish_reason))
                if delta.finish_reason == "error":
                    message = delta.error or "the engine failed"
                    written.append(event(error_body(message, "server_error", None, "engine_error")))
            if written:
                yield b"".join(written)
        last = b""
        if usage_at_end:
            last = event(self._envelope("chat.completion.chunk", []) | {"usage": self._job.usage()})
        yield last + DONE

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._job.id,
            "object": kind,
            "created": self._job.created,
            "model": self._service.model_name,
            "choices": choices,
        }

    def _logprobs(self, entries: list[TokenEntry]) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        content = []
        for entry in entries:
            if entry.logprob is None:
                continue
            written = self._token(entry.token_id, entry.logprob.logprob)
            best = pairs(entry)[: self._body.top_logprobs or 0]
            written["top_logprobs"] = [self._token(*pair) for pair in best]
            content.append(written)
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._service.tokenizer.token_text(token_id)
        table = self._service.table
        raw = table[token_id] if table is not None else text.encode()
        return {"token": text, "logprob": finite(logprob), "bytes": list(raw)}


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _pieces(calls: list[CallPiece]) -> list[dict[str, Any]]:
    """One entry a call, whatever the number of its pieces; the first of a call has its name."""
    written: dict[int, dict[str, Any]] = {}
    for piece in calls:
        if piece.name:
            function = {"name": piece.name, "arguments": ""}
            head = {"index": piece.index, "id": piece.id, "type": "function", "function": function}
            written[piece.index] = head
        empty = {"index": piece.index, "function": {"arguments": ""}}
        entry = written.setdefault(piece.index, empty)
        entry["function"]["arguments"] += piece.arguments
    return list(written.values())
