"""Runs a job on the engine and feeds its choices, for streams and for whole answers alike."""

from __future__ import annotations

from collections.abc import AsyncIterator

from moeserve.errors import EngineFailed
from moeserve.request import FinishReason
from moeserve.server.answer import Choice, Delta, TokenEntry
from moeserve.server.service import Job
from moeserve.streams import OutputStream


async def steps(job: Job, stream: OutputStream) -> AsyncIterator[list[tuple[Choice, Delta]]]:
    """What each wake-up adds, until all choices have ended. The engine's requests are aborted when
    a stop string, or the last tool call that is allowed, ended them first."""
    try:
        while outputs := await stream.get():
            batch = []
            for output in outputs:
                choice = job.by_request[output.request_id]
                if choice.finished:
                    continue
                delta = choice.push(output)
                if choice.finished and output.finish_reason is None:
                    stream.abort(output.request_id, FinishReason.STOP)
                batch.append((choice, delta))
            yield batch
    finally:
        for choice in job.choices:
            job.on_end(choice.request_id, choice.finish_reason)


async def whole(job: Job, stream: OutputStream) -> list[Delta]:
    """All choices to their end, one summed delta each. EngineFailed when one ended in an error."""
    sums = [Delta() for _ in job.choices]
    try:
        async for batch in steps(job, stream):
            for choice, delta in batch:
                total = sums[choice.index]
                total.text += delta.text
                total.reasoning += delta.reasoning
                total.calls += delta.calls
                total.tokens += delta.tokens
                total.token_ids += delta.token_ids
                total.finish_reason = delta.finish_reason or total.finish_reason
                if delta.finish_reason == "error":
                    raise EngineFailed(delta.error or "the engine failed")
    finally:
        stream.abort()
    return sums


def pairs(entry: TokenEntry) -> list[tuple[int, float]]:
    """The alternatives of a token, best first, the chosen one among them."""
    assert entry.logprob is not None
    chosen = (entry.token_id, entry.logprob.logprob)
    top = list(entry.logprob.top)
    return top if any(x[0] == entry.token_id for x in top) else [*top, chosen]
