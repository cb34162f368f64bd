"""The rank loop over a real socket: a thread is the rank (on the toy model), the test is the front
end."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import zmq

from ep.group import EPGroup
from moeserve import wire
from moeserve.cache import BlockCache
from moeserve.client import EngineClient
from moeserve.config import ServeConfig
from moeserve.engine import Engine
from moeserve.errors import ConfigError, EngineFailed
from moeserve.rank_loop import run_rank
from moeserve.request import FinishReason, Request, SamplingParams
from moeserve.runner import ModelRunner
from moeserve.scheduler import ScheduleLimits, Scheduler
from moeserve.toy_model import ToyModel


def toy_engine(config: Any, group: EPGroup, progress: Any, model: ToyModel | None = None) -> Engine:
    model = model or ToyModel()
    progress("weights", 1, 2)
    progress("weights", 2, 2)
    cache = BlockCache(64, 4, 8)
    pages = model.cache_spec.allocate(64, 4, torch.device("cpu"))
    limits = ScheduleLimits(8, 32, None, 200, 97)
    engine = Engine(ModelRunner(model, pages, cache.tables), Scheduler(cache, limits), group)
    engine.info["hello"] = "there"
    return engine


class FrontEnd:
    """A ROUTER socket with a timeout on everything."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.set(zmq.LINGER, 0)
        self.address = f"tcp://127.0.0.1:{self.socket.bind_to_random_port('tcp://127.0.0.1')}"
        self.outputs: dict[str, list[int]] = {}
        self.ends: dict[str, Any] = {}

    def send(self, message: wire.ToRank) -> None:
        self.socket.send_multipart([wire.rank_identity(0), wire.encode(message)])

    def read(self) -> wire.ToFrontEnd:
        assert self.socket.poll(10_000), "the rank is silent"
        identity, payload = self.socket.recv_multipart()
        assert identity == b"rank-0"
        message = wire.decode_to_front_end(payload)
        if isinstance(message, wire.Outputs):
            for o in message.outputs:
                self.outputs.setdefault(o.request_id, []).extend(o.token_ids)
                if o.finish_reason is not None:
                    self.ends[o.request_id] = (o.finish_reason, o.error)
        return message

    def read_until(self, done: Callable[[wire.ToFrontEnd], bool]) -> list[wire.ToFrontEnd]:
        messages = [self.read()]
        while not done(messages[-1]):
            messages.append(self.read())
        return messages


@contextlib.contextmanager
def running(builder: Any) -> Iterator[tuple[FrontEnd, list[BaseException]]]:
    front, errors = FrontEnd(), []

    def main() -> None:
        try:
            run_rank(ServeConfig(), EPGroup.single(), front.address, builder)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=main, daemon=True)
    thread.start()
    try:
        yield front, errors
    finally:
        thread.join(20)
        front.socket.close()
        front.context.term()
        assert not thread.is_alive(), "the rank did not end"


def ask(name: str, prompt: list[int], num: int = 5) -> Request:
    sampling = SamplingParams(temperature=0, max_tokens=num)
    return Request(request_id=name, prompt_token_ids=tuple(prompt), sampling=sampling)


def kind(*kinds: type) -> Callable[[object], bool]:
    return lambda message: isinstance(message, kinds)


def test_a_life() -> None:
    with running(toy_engine) as (front, errors):
        start = front.read_until(kind(wire.Ready))
        assert [type(m).__name__ for m in start] == ["Hello"] + ["Loading"] * 3 + ["Ready"]
        stages = [(m.stage, m.done_bytes) for m in start if isinstance(m, wire.Loading)]
        assert stages == [("rendezvous", 0), ("weights", 1), ("weights", 2)]
        ready = start[-1]
        assert isinstance(ready, wire.Ready)
        assert (ready.block_size, ready.num_blocks, ready.max_model_len) == (4, 64, 200)
        assert ready.info == {"hello": "there", "ahead": False, "graphs": None}

        front.send(wire.Submit(ask("a", [1, 2, 3, 4, 5], 9)))
        front.send(wire.Submit(ask("bad", [1] * 300)))
        front.send(wire.Submit(ask("c", [7], 100)))
        front.send(wire.Wake())
        front.read_until(lambda m: "a" in front.ends)
        assert front.outputs["a"] == ToyModel().continue_prompt([1, 2, 3, 4, 5], 9)
        reason, error = front.ends["bad"]
        assert reason is FinishReason.ERROR and "300 tokens" in error and "200" in error
        front.send(wire.Abort(("c", "unknown")))
        front.read_until(lambda m: "c" in front.ends or "c" in front.outputs)
        later = front.read_until(lambda m: isinstance(m, wire.RankStats) and not m.num_running)
        stats = later[-1]
        assert isinstance(stats, wire.RankStats)
        assert (stats.num_free_blocks, stats.num_used_blocks, stats.num_waiting) == (64, 0, 0)
        front.send(wire.ResetPrefixCache())
        events = front.read_until(kind(wire.CacheEvents))[-1]
        assert isinstance(events, wire.CacheEvents) and events.removed
        front.send(wire.Submit(ask("d", [1, 2], 150)))  # still at work when the late one comes
        front.send(wire.Stop(drain=True))
        front.send(wire.Submit(ask("late", [1, 2], 3)))
        front.read_until(kind(wire.Stopped))
        assert front.outputs["d"] == ToyModel().continue_prompt([1, 2], 150)
        assert front.ends["late"][0] is FinishReason.ERROR
    assert errors == []


def test_stop_without_drain_aborts() -> None:
    with running(toy_engine) as (front, errors):
        front.read_until(kind(wire.Ready))
        front.send(wire.Submit(ask("a", [1], 150)))
        front.read_until(lambda m: "a" in front.outputs)
        front.send(wire.Stop(drain=False))
        front.read_until(kind(wire.Stopped))
        assert front.ends["a"][0] is FinishReason.ABORT or len(front.outputs["a"]) == 150
    assert errors == []


def test_a_wrong_setting_is_told_before_it_is_raised() -> None:
    def broken(config: Any, group: EPGroup, progress: Any) -> Engine:
        raise ConfigError(["one thing", "another thing"])

    with running(broken) as (front, errors):
        fatal = front.read_until(kind(wire.Fatal))[-1]
        assert isinstance(fatal, wire.Fatal) and fatal.reason == "one thing\nanother thing"
    assert isinstance(errors[0], ConfigError)


def test_an_engine_that_cannot_go_on_ends_its_requests_first() -> None:
    class Dead(ToyModel):
        def forward(self, batch, cache, observer=None):  # type: ignore[no-untyped-def]
            raise RuntimeError("no more memory")

    def builder(config: Any, group: EPGroup, progress: Any) -> Engine:
        return toy_engine(config, group, progress, Dead())

    with running(builder) as (front, errors):
        front.read_until(kind(wire.Ready))
        for i in range(40):
            front.send(wire.Submit(ask(str(i), [1], 3)))
        fatal = front.read_until(kind(wire.Fatal))[-1]
        assert isinstance(fatal, wire.Fatal) and "no more memory" in fatal.reason
        assert front.ends and {end[0] for end in front.ends.values()} == {FinishReason.ERROR}
    assert isinstance(errors[0], EngineFailed)


def test_with_the_real_client() -> None:
    """The front end's own class on the other side."""
    errors: list[BaseException] = []

    async def body() -> list[list[int]]:
        client = EngineClient(1)
        address = client.bind()
        client.start()

        def main() -> None:
            try:
                run_rank(ServeConfig(), EPGroup.single(), address, toy_engine)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=main, daemon=True)
        thread.start()
        try:
            await asyncio.wait_for(client.wait_ready(), 20)

            async def one(i: int) -> list[int]:
                tokens: list[int] = []
                async for output in client.submit(ask(str(i), [i] * (i + 1), 6)):
                    tokens += output.token_ids
                return tokens

            found = await asyncio.gather(*map(one, range(20)))
            assert await client.stop()
            thread.join(10)
            return found
        finally:
            client.close()

    found = asyncio.run(asyncio.wait_for(body(), 60))
    assert found == [ToyModel().continue_prompt([i] * (i + 1), 6) for i in range(20)]
    assert errors == []


@pytest.mark.parametrize("stage", ["weights"])
def test_progress_is_throttled_but_its_end_is_told(stage: str) -> None:
    def builder(config: Any, group: EPGroup, progress: Any) -> Engine:
        for done in range(1001):
            progress(stage, done, 1000)
        return toy_engine(config, group, lambda *_: None)

    with running(builder) as (front, _):
        told = front.read_until(kind(wire.Ready))
        done = [m.done_bytes for m in told if isinstance(m, wire.Loading) and m.stage == stage]
        assert done[0] == 0 and done[-1] == 1000 and len(done) < 50
        front.send(wire.Stop())
        front.read_until(kind(wire.Stopped))
