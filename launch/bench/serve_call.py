"""One call of `moeserve bench serve`: sent, read as it streams, and judged.

Reads the OpenAI-style stream itself, line by line, because the client's own time is in every
figure. Every way in which an answer may be missing, cut or too short has a name (`Fault`). Knows
HTTP and server-sent events; nothing of arrivals or of what calls come to.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from array import array
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

CUT = "cut short here"  # the run was stopped by whoever started it: no fault of the server
_DONE = b"[DONE]"
_AFTER_DONE = 1.0  # seconds
_PIECE = 4  # events of which it can be told
_SOONEST = 1e-4  # seconds a token: no model computes one sequence so fast
_FINE = ("stop", "length", "tool_calls", "function_call", "content_filter")
_decode = msgspec.json.Decoder().decode


class Fault:
    """Names of what can be wrong with an answer; HTTP's are `http 500` and so on."""

    CONNECT = "no connection"
    TIMEOUT = "timed out"
    BROKEN = "connection broke"
    NO_STREAM = "no event stream"
    BAD_EVENT = "event is no JSON"
    TOLD = "error told in the stream"
    NO_DONE = "stream ended without [DONE]"
    EMPTY = "empty answer"
    BLANK = "blank answer"
    NO_FINISH = "no finish_reason"
    BAD_FINISH = "finish_reason tells of a failure"
    SHORT = "fewer tokens than asked for"
    LONG = "more tokens than asked for"
    DISAGREES = "usage is not what was streamed"
    IMPOSSIBLE = "usage is not possible"


@dataclass(frozen=True)
class Target:
    """Where calls go and what all of them say. token_ids: the server tells the ids of tokens, so
    that each is counted when it comes. keep_text: answers are looked at after the run."""

    url: str
    model: str
    chat: bool
    headers: Mapping[str, str] = field(default_factory=dict)
    temperature: float = 0.0
    ignore_eos: bool = False
    token_ids: bool = False
    keep_text: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)
    timeout: float = 600.0

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, prompt: Any, max_tokens: int) -> dict[str, Any]:
        """prompt: messages for chat, else text or token ids."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages" if self.chat else "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.token_ids:
            body["return_token_ids"] = True
        return body | dict(self.extra)

    def client(self) -> httpx.AsyncClient:
        timeout = httpx.Timeout(self.timeout, connect=min(self.timeout, 30.0), pool=None)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        return httpx.AsyncClient(
            base_url=self.url,
            timeout=timeout,
            limits=limits,
            headers=dict(self.headers),
            verify=self.url.startswith("https"),  # else certificates would be read for nothing
        )


@dataclass
class Call:
    """What became of a call. Times are seconds since the run's start; token counts are the
    server's usage, or None. counts: tokens of each event in `times`, where ids were told. held:
    seconds by which the answer before came after the time that was recorded for this turn."""

    conversation: int
    turn: int
    asked_input: int
    asked_output: int
    due: float | None
    held: float = 0.0
    sent: float = 0.0
    ended: float = 0.0
    times: array[float] = field(default_factory=lambda: array("d"))
    counts: array[int] | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    finish: str | None = None
    fault: str | None = None
    detail: str = ""
    text: str = ""  # the answer; dropped when the conversation has gone on, save for keep_text
    beside: bool = False  # reasoning or calls of tools came, which are no text
    calls_tools: bool = False
    num_bytes: int = 0  # of text and reasoning
    num_events: int = 0  # those without text too

    @property
    def good(self) -> bool:
        return self.fault is None

    @property
    def streamed_tokens(self) -> int | None:
        return None if self.counts is None else sum(self.counts)

    @property
    def num_output(self) -> int:
        """Tokens of the answer: usage, else what was seen (an event counts as one). Of a call that
        failed never more than was seen, nor than was asked for."""
        seen = len(self.times) if self.counts is None else sum(self.counts)
        if not self.good:
            return min(seen, self.asked_output)
        return seen if self.output_tokens is None else self.output_tokens

    @property
    def in_one_event(self) -> bool:
        return len(self.times) == 1 and self.num_output > 1

    @property
    def in_one_piece(self) -> bool:
        """Several events were read at about one moment: they had waited for each other."""
        if len(self.times) < _PIECE:
            return False
        return self.times[-1] - self.times[0] < _SOONEST * (len(self.times) - 1)

    @property
    def at_once(self) -> bool:
        """All of several tokens came at once: nothing tells how long each took."""
        return self.in_one_event or self.in_one_piece

    @property
    def ttft(self) -> float | None:
        return self.times[0] - self.sent if self.times else None

    @property
    def tpot(self) -> float | None:
        """Mean seconds of a token after the first; None where that cannot be seen."""
        if len(self.times) < 2 or self.num_output < 2 or self.at_once:
            return None
        return (self.times[-1] - self.times[0]) / (self.num_output - 1)

    @property
    def seconds(self) -> float:
        return self.ended - self.sent


async def make_call(
    http: httpx.AsyncClient, target: Target, call: Call, prompt: Any, start: float
) -> None:
    """Send it now, read it to its end, fill in the call. start: the run's, of time.monotonic.

    Cancelled: the call says so, and the cancellation goes on."""
    body = msgspec.json.encode(target.body(prompt, call.asked_output))
    reader = _Reader(call, target, start)
    call.sent = time.monotonic() - start
    try:
        headers = {"content-type": "application/json"}
        request = http.stream("POST", target.path, content=body, headers=headers)
        async with request as response:
            if response.status_code != httpx.codes.OK:
                await response.aread()
                call.fault = f"http {response.status_code}"
                call.detail = _message(response)
            elif not response.headers.get("content-type", "").startswith("text/event-stream"):
                await response.aread()
                call.fault, call.detail = Fault.NO_STREAM, _message(response)
            else:
                chunks = response.aiter_bytes()
                async for chunk in chunks:
                    reader.push(chunk, time.monotonic() - start)
                    if reader.over:
                        break
                await _read_out(chunks)
    except asyncio.CancelledError:
        call.fault, call.detail = CUT, ""
        raise
    except httpx.ConnectError as error:
        _blame(call, Fault.CONNECT, error)
    except httpx.TimeoutException as error:
        _blame(call, Fault.TIMEOUT, error)
    except (httpx.HTTPError, OSError) as error:
        _blame(call, Fault.BROKEN, error)
    finally:
        call.ended = call.ended or time.monotonic() - start
        _refuse_impossible(call)
    if call.fault is None:
        judge(call, target, reader.over)


class _Reader:
    """The stream's bytes, as they come."""

    def __init__(self, call: Call, target: Target, start: float) -> None:
        self._call, self._start = call, start
        self._rest = b""
        self._parts: list[str] = []
        self.over = False
        if target.token_ids:
            call.counts = array("q")

    def push(self, chunk: bytes, now: float) -> None:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue  # comments, event names, the blank between events
            data = line[5:].strip()
            if data == _DONE:
                self.over = True
                self._call.ended = now
                self._call.text = "".join(self._parts)
                return
            try:
                event = _decode(data)
                self._take(event, now)
            except (msgspec.DecodeError, TypeError, AttributeError, LookupError, ValueError):
                self._call.fault = self._call.fault or Fault.BAD_EVENT
                self._call.detail = self._call.detail or data[:200].decode(errors="replace")

    def _take(self, event: dict[str, Any], now: float) -> None:
        call = self._call
        if (error := event.get("error")) is not None:
            told = error.get("message") if isinstance(error, dict) else error
            call.fault, call.detail = Fault.TOLD, str(told)[:200]
        if usage := event.get("usage"):
            call.prompt_tokens = usage.get("prompt_tokens")
            call.output_tokens = usage.get("completion_tokens")
            details = usage.get("prompt_tokens_details") or {}
            call.cached_tokens = details.get("cached_tokens", call.cached_tokens)
        for choice in event.get("choices") or ():
            said = choice.get("text") or ""
            thought = tools = None
            if delta := choice.get("delta"):
                said = delta.get("content") or ""
                thought = delta.get("reasoning_content") or delta.get("reasoning")
                tools = delta.get("tool_calls")
            beside = thought or tools
            call.num_events += 1
            call.num_bytes += len(said.encode()) + len(str(thought or "").encode())
            call.calls_tools = call.calls_tools or bool(tools)
            count = len(choice.get("token_ids") or ()) if call.counts is not None else 0
            if count or (call.counts is None and (said or beside)):
                call.times.append(now)
                call.beside = call.beside or bool(beside)
                if call.counts is not None:
                    call.counts.append(count)
            if said:
                self._parts.append(said)
            call.finish = choice.get("finish_reason") or call.finish


def judge(call: Call, target: Target, done: bool) -> None:
    """Is this a whole answer? done: the stream said that it has ended."""
    tokens, streamed = call.num_output, call.streamed_tokens
    asked = call.asked_output
    if not done:
        call.fault = Fault.NO_DONE
        call.detail = f"after {len(call.times)} events"
    elif not call.times or not tokens:
        call.fault = Fault.EMPTY
        call.detail = f"finish_reason {call.finish!r}, usage {call.output_tokens} tokens"
    elif call.counts is None and tokens > 1 and not call.beside and not call.text.strip():
        # where ids were told they are the answer; one token may well be a line's end
        call.fault, call.detail = Fault.BLANK, f"{tokens} tokens of white space"
    elif call.finish is None:
        call.fault = Fault.NO_FINISH
        call.detail = f"after {tokens} tokens"
    elif call.finish not in _FINE:
        call.fault, call.detail = Fault.BAD_FINISH, f"{call.finish!r} after {tokens} tokens"
    elif streamed is not None and call.output_tokens not in (None, streamed):
        call.fault = Fault.DISAGREES
        call.detail = f"{streamed} tokens streamed, {call.output_tokens} in usage"
    elif (
        call.counts is None
        and call.output_tokens is not None
        and not call.calls_tools
        and call.output_tokens > call.num_bytes + call.num_events
    ):  # a token is a byte at least, or came without text in an event of its own
        call.fault = Fault.DISAGREES
        call.detail = (
            f"{call.output_tokens} tokens in usage, {call.num_bytes} bytes of text in "
            f"{call.num_events} events"
        )
    elif call.counts is None and call.output_tokens is None:
        return  # nothing tells how many tokens there were
    elif tokens > asked:
        call.fault, call.detail = Fault.LONG, f"{tokens} of {asked}"
    elif tokens < asked and (target.ignore_eos or call.finish == "length"):
        call.fault = Fault.SHORT
        call.detail = f"{tokens} of {asked}, finish_reason {call.finish!r}"


def _refuse_impossible(call: Call) -> None:
    """A usage that cannot be true is a fault, and none of it is kept: sums would hold it."""
    told = {
        "prompt_tokens": (call.prompt_tokens, 1),
        "completion_tokens": (call.output_tokens, 0),
        "cached_tokens": (call.cached_tokens, 0),
    }
    wrong = [
        f"{name} {value!r}"
        for name, (value, least) in told.items()
        if value is not None and (type(value) is not int or value < least)
    ]
    prompt, cached = call.prompt_tokens, call.cached_tokens
    if not wrong and prompt is not None and cached is not None and cached > prompt:
        wrong.append(f"cached_tokens {cached} of prompt_tokens {prompt}")
    if wrong:
        call.prompt_tokens = call.cached_tokens = call.output_tokens = None
        if call.fault is None:
            call.fault, call.detail = Fault.IMPOSSIBLE, ", ".join(wrong)


async def _read_out(chunks: AsyncIterator[bytes]) -> None:
    """What follows [DONE], so that the connection can be used again; a server that leaves it open
    is not waited for."""
    with contextlib.suppress(TimeoutError, httpx.HTTPError):
        async with asyncio.timeout(_AFTER_DONE):
            async for _ in chunks:
                pass


def _blame(call: Call, fault: str, error: Exception) -> None:
    if call.fault is None:
        call.fault, call.detail = fault, str(error) or type(error).__name__


def _message(response: httpx.Response) -> str:
    with contextlib.suppress(ValueError, LookupError, TypeError):
        return str(response.json()["error"]["message"])[:200]
    return response.text[:200].strip()
