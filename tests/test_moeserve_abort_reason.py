"""Only what a client aborts counts as aborted: a stop string found by the front end is an end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from scheduler_world import ask, make, step

from moeserve import wire
from moeserve.rank_loop import RankLoop
from moeserve.request import FinishReason, Request, TokenOutput
from moeserve.server.rehearsal import Rehearsal, output, write_tokenizer


@pytest.mark.parametrize("reason", list(FinishReason))
def test_the_reason_crosses_the_wire(reason: FinishReason) -> None:
    message = wire.Abort(("a", "b"), reason)
    assert wire.decode_to_rank(wire.encode(message)) == message
    assert wire.Abort(("a",)).reason is FinishReason.ABORT


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.ABORT, FinishReason.ERROR])
def test_the_scheduler_counts_by_reason(reason: FinishReason, in_flight: bool) -> None:
    scheduler, memory = make()
    scheduler.add(ask("a", [1, 2, 3], 9))
    step(scheduler, memory)
    plan = scheduler.schedule() if in_flight else None
    assert scheduler.abort("a", reason) and not scheduler.abort("a", reason)
    if plan is not None:
        scheduler.commit(plan, memory.run(plan))
    (ended,) = scheduler.take_outbox()
    assert ended.finish_reason is reason and not scheduler.has_work
    counted = (scheduler.counters.finished, scheduler.counters.aborted)
    assert counted == ((0, 1) if reason is FinishReason.ABORT else (1, 0))


def test_a_rank_hands_the_reason_on() -> None:
    told: list[object] = []
    group = SimpleNamespace(rank=0, size=1)
    engine = SimpleNamespace(group=group, abort=lambda *given: told.append(given))
    loop = RankLoop(cast(Any, engine), cast(Any, None))
    loop._handle(wire.Abort(("a",), FinishReason.STOP))
    loop._handle(wire.Abort(("b",)))
    assert told == [(("a",), FinishReason.STOP), (("b",), FinishReason.ABORT)]


def endless(request: Request) -> Iterator[TokenOutput]:
    while True:
        for token_id in request.prompt_token_ids:
            yield output(request, (token_id,), None)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_ranks_are_told_why(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    with Rehearsal(tmp_path, script=endless) as job:
        rank = job.ranks[0]
        body = {"prompt": "the fox", "max_tokens": 400}
        httpx.post(job.url + "/v1/completions", json=body | {"stop": "foxthe"})
        wait_for(lambda: bool(rank.of_kind(wire.Abort)))
        with httpx.stream("POST", job.url + "/v1/completions", json=body | {"stream": True}) as it:
            next(it.iter_bytes())
        wait_for(lambda: len(rank.of_kind(wire.Abort)) == 2)
        reasons = [x.reason for x in rank.of_kind(wire.Abort)]
        assert reasons == [FinishReason.STOP, FinishReason.ABORT]
        with httpx.stream("POST", job.url + "/v1/completions", json=body | {"stream": True}) as it:
            wait_for(lambda: bool(rank.running))
            job.on_loop(lambda: job.client.cut("time is up"))
            it.read()
        wait_for(lambda: len(rank.of_kind(wire.Abort)) == 3)
        assert rank.of_kind(wire.Abort)[-1].reason is FinishReason.ERROR
