"""EngineClient against fake ranks: streams, refusals, aborts, draining, and the death of ranks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from moeserve import wire
from moeserve.cache.block_hash import block_hashes
from moeserve.client import EngineClient
from moeserve.errors import InvalidRequest, JobDied, LauncherDied, NotReady, QueueFull, RankDied
from moeserve.request import FinishReason, Request, SamplingParams, TokenOutput
from moeserve.server.rehearsal import FakeRank, echo, output, say


def ask(name: str, prompt: tuple[int, ...] = (5, 6, 7), **sampling: Any) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        sampling=SamplingParams(**{"max_tokens": 4} | sampling),
        arrival=time.time(),
    )


def job(
    body: Callable[[EngineClient, list[FakeRank]], Awaitable[None]],
    *,
    ranks: int = 1,
    script: Any = echo,
    ready: bool = True,
    **options: Any,
) -> None:
    """Run a test body beside a client and its fake ranks."""

    async def run() -> None:
        client = EngineClient(ranks, **options)
        address = client.bind()
        client.start()
        fakes = [FakeRank(r, ranks, address, script=script, ready=ready) for r in range(ranks)]
        try:
            if ready:
                await asyncio.wait_for(client.wait_ready(), 10)
            await asyncio.wait_for(body(client, fakes), 30)
        finally:
            client.close()
            for fake in fakes:
                fake.die()

    asyncio.run(run())


async def until(condition: Callable[[], bool]) -> None:
    async def wait() -> None:
        while not condition():
            await asyncio.sleep(0.002)

    await asyncio.wait_for(wait(), 10)


async def collect(client: EngineClient, request: Request) -> list[TokenOutput]:
    return [x async for x in client.submit(request)]


def tokens(outputs: list[TokenOutput]) -> list[int]:
    return [x for o in outputs for x in o.token_ids]


def test_outputs_come_in_order_and_end() -> None:
    async def body(client: EngineClient, ranks: list[FakeRank]) -> None:
        got = await asyncio.gather(*(collect(client, ask(f"r{i}", (i, 99))) for i in range(20)))
        for i, outputs in enumerate(got):
            assert tokens(outputs) == [i, 99, i, 99]
            assert [x.finish_reason for x in outputs[-1:]] == [FinishReason.LENGTH]
        assert client.num_in_flight == 0 and client.loads() == [0, 0]
        assert all(x.of_kind(wire.Submit) for x in ranks)  # both were used

    job(body, ranks=2)


def test_requests_before_ready_are_refused_with_the_reason() -> None:
    async def body(client: EngineClient, ranks: list[FakeRank]) -> None:
        with pytest.raises(NotReady, match="1 of 1 ranks are not ready"):
            client.open([ask("a")])
        ranks[0].send(wire.Loading(0, "weights", 5, 10))
        await until(lambda: client.fleet.ranks[0].stage == "weights")
        with pytest.raises(NotReady, match="weights"):
            client.open([ask("a")])
        ranks[0].become_ready()
        await client.wait_ready()
        assert tokens(await collect(client, ask("a"))) == [5, 6, 7, 5]

    job(body, ready=False)


def test_full_queue_is_refused_whole() -> None:
    async def body(client: EngineClient, ranks: list[FakeRank]) -> None:
        ranks[0].pause()
        stream = client.open([ask("a"), ask("b")])
        with pytest.raises(QueueFull) as caught:
            client.open([ask("c"), ask("d")])
        assert (caught.value.waiting, caught.value.limit) == (2, 3)
        assert 1 <= caught.value.retry_after <= 60
        assert client.num_in_flight == 2 and client.num_rejected == 2
        with pytest.raises(InvalidRequest, match="max_queue=3"):
            client.open([ask(str(i)) for i in range(4)])
        ranks[0].resume()
        while await stream.get():
            pass
        assert tokens(await collect(client, ask("e"))) == [5, 6, 7, 5]

    job(body, max_queue=3)


def test_leaving_a_stream_aborts_at_the_rank() -> None:
    async def body(client: EngineClient, ranks: list[FakeRank]) -> None:
        generator = client.submit(ask("a", max_tokens=100_000))
        async for _ in generator:
            break
        await generator.aclose()
        await until(lambda: ranks[0].of_kind(wire.Abort) == [wire.Abort(("a",))])
        await until(lambda: not ranks[0].running)
        assert client.num_in_flight == 0

    job(body)


def test_idle_ranks_are_woken_and_prefixes_meet() -> None:
    async def body(client: EngineClient, ranks: list[FakeRank]) -> None:
        prompt = tuple(range(100, 148))
        ranks[0].pause()
        ranks[1].pause()
        ranks[1].send(wire.CacheEvents(1, tuple(block_hashes(prompt, 16))))
        await until(lambda: client._index.num_cached(1) == 3)
        client.open([ask("a", prompt)])
        await until(lambda: bool(ranks[1].of_kind(wire.Submit)))
        await until(lambda: bool(ranks[0].of_kind(wire.Wake)))
        assert not ranks[0].of_kind(wire.Submit)
        client.open([ask("b", (1, 2, 3))])  # nothing cached: the idle rank
        await until(lambda: bool(ranks[0].of_kind(wire.Submit)))

    job(body, ranks=2)


def test_twins_that_arrive_together_meet_on_one_rank() -> None:
    async def body(client: EngineClient, ranks: list[FakeRank]) -> None:
        for rank in ranks:
            rank.pause()
        prompt = tuple(range(64))
        client.open([ask("a", prompt), ask("b", prompt)])
        await until(lambda: sum(len(x.of_kind(wire.Submit)) for x in ranks) == 2)
        assert sorted(len(x.of_kind(wire.Submit)) for x in ranks) == [0, 2]

    job(body, ranks=2)


@pytest.mark.parametrize("way", ["vanish", "fatal", "unreadable", "wrong size"])
def test_death_of_a_rank_ends_all_streams_and_names_it(way: str) -> None:
    died: list[RankDied] = []

    async def body(client: EngineClient, ranks: list[FakeRank]) -> None:
        for rank in ranks:
            rank.pause()
        streams = [client.open([ask(f"r{i}")]) for i in range(4)]
        await until(lambda: sum(len(x.running) for x in ranks) == 4)
        begun = time.monotonic()
        match way:
            case "vanish":
                ranks[1].die()
            case "fatal":
                ranks[1].send(wire.Fatal(1, "out of memory"))
            case "unreadable":
                client._link.take(wire.rank_identity(1), b"\xc1 no message")
            case "wrong size":
                ranks[1].send(wire.Hello(1, 7, 0, "elsewhere"))
        for stream in streams:
            last = (await stream.get())[-1]
            assert last.finish_reason is FinishReason.ERROR
            assert last.error is not None and "rank 1 died" in last.error
            assert await stream.get() == []
        assert time.monotonic() - begun < 5
        await until(lambda: bool(died))
        assert [x.rank for x in died] == [1] and client.num_in_flight == 0
        with pytest.raises(NotReady, match="rank 1 died"):
            client.open([ask("later")])

    job(body, ranks=2, on_rank_died=died.append)


GLOO = "gloo: Connection closed by peer [10.0.0.2]:3512"


@pytest.mark.parametrize("dead", [0, 1, 2, 3])
@pytest.mark.parametrize("first", ["the survivors' words", "the death"])
def test_the_silent_rank_is_blamed_not_those_that_lost_it(dead: int, first: str) -> None:
    died: list[RankDied] = []
    survivors = [r for r in range(4) if r != dead]

    async def body(client: EngineClient, ranks: list[FakeRank]) -> None:
        if first == "the death":
            ranks[dead].die()
            await until(lambda: bool(client.fleet.losses))
        for rank in survivors:
            ranks[rank].send(wire.Fatal(rank, GLOO, peer_lost=True))
        await until(lambda: len(client.fleet.losses) >= 3)
        ranks[dead].die()
        await until(lambda: bool(died))
        assert died[0].rank == dead and "its connection was lost" in died[0].reason

    job(body, ranks=4, on_rank_died=died.append)


def test_last_words_that_are_read_after_the_end_of_their_connection_count() -> None:
    died: list[RankDied] = []

    async def body(client: EngineClient, ranks: list[FakeRank]) -> None:
        for rank in (0, 1):
            client._unreachable(rank)  # their words still lie in the socket
        client._unreachable(2)
        for rank in (1, 0):
            client._received(rank, wire.encode(wire.Fatal(rank, GLOO, peer_lost=True)))
        await until(lambda: bool(died))
        assert died[0].rank == 2

    job(body, ranks=3, on_rank_died=died.append)


def test_words_of_the_survivors_are_waited_for_but_not_long() -> None:
    died: list[RankDied] = []

    async def body(client: EngineClient, ranks: list[FakeRank]) -> None:
        for rank in (1, 2):  # it is not clear which of them was first ...
            client._unreachable(rank)
        await asyncio.sleep(0.4)
        assert not died
        client._received(1, wire.encode(wire.Fatal(1, GLOO, peer_lost=True)))  # ... until now
        await until(lambda: bool(died))
        assert died[0].rank == 2

    job(body, ranks=3, on_rank_died=died.append)


def test_a_rank_of_which_nothing_is_heard_is_named_when_all_others_lost_it() -> None:
    died: list[RankDied] = []

    async def body(client: EngineClient, ranks: list[FakeRank]) -> None:
        for rank in (0, 2):
            ranks[rank].send(wire.Fatal(rank, GLOO, peer_lost=True))
        await until(lambda: bool(died))
        assert died[0].rank == 1 and "all other ranks lost" in died[0].reason

    job(body, ranks=3, on_rank_died=died.append)


def test_all_ranks_gone_at_once_are_said_to_be() -> None:
    died: list[RankDied] = []

    async def body(client: EngineClient, ranks: list[FakeRank]) -> None:
        for rank in range(3):
            client._unreachable(rank)
        await until(lambda: bool(died))
        assert "all other ranks are gone as well" in died[0].reason

    job(body, ranks=3, on_rank_died=died.append)


def test_the_launcher_is_named_where_ranks_left_because_it_had() -> None:
    died: list[Any] = []

    async def body(client: EngineClient, ranks: list[FakeRank]) -> None:
        ranks[0].pause()
        ranks[1].pause()
        stream = client.open([ask("a")])
        ranks[1].die()
        (last,) = await stream.get()
        assert last.error is not None and last.error.startswith("the launcher died")
        await until(lambda: bool(died))
        assert isinstance(died[0], LauncherDied) and "rank 1" not in str(died[0])

    job(body, ranks=2, on_rank_died=died.append, launcher_gone=lambda: True)


def test_nothing_is_taken_from_the_first_sign_of_a_loss_on() -> None:
    died: list[JobDied] = []

    async def body(client: EngineClient, ranks: list[FakeRank]) -> None:
        assert client.failing is None
        client._unreachable(1)
        assert client.failed is None, "the verdict takes its time"
        with pytest.raises(NotReady, match="finding out which rank died"):
            client.open([ask("a")])
        await until(lambda: bool(died))
        with pytest.raises(NotReady, match="rank 1 died"):
            client.open([ask("a")])

    job(body, ranks=2, on_rank_died=died.append)


def test_ranks_that_leave_at_a_stop_have_not_died() -> None:
    died: list[RankDied] = []

    async def body(client: EngineClient, ranks: list[FakeRank]) -> None:
        client._unreachable(0)
        await client.stop(0)
        await asyncio.sleep(0.5)
        assert not died and client.failed is None

    job(body, ranks=2, on_rank_died=died.append)


def test_a_stop_waits_for_no_rank_that_has_said_its_last_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The end of its connection is no news afterwards: it counts as lost already."""

    async def body(client: EngineClient, ranks: list[FakeRank]) -> None:
        monkeypatch.setattr(client, "_send", lambda *_: None)  # these would answer
        stopping = asyncio.ensure_future(client.stop(60))
        await asyncio.sleep(0)
        for rank in range(2):
            client._received(rank, wire.encode(wire.Fatal(rank, GLOO, peer_lost=True)))
        assert await asyncio.wait_for(stopping, 20)

    job(body, ranks=2)


def test_requests_that_fail_for_a_lost_peer_end_with_its_death() -> None:
    async def body(client: EngineClient, ranks: list[FakeRank]) -> None:
        ranks[0].pause()
        ranks[1].pause()
        stream = client.open([ask("a")])
        await until(lambda: bool(ranks[0].running))
        ranks[0].send(wire.Fatal(0, GLOO, peer_lost=True))
        await until(lambda: bool(client.fleet.losses))
        ranks[1].die()
        (last,) = await stream.get()
        assert last.error is not None and last.error.startswith("rank 1 died")

    job(body, ranks=2)


def test_a_rank_that_names_its_own_fault_is_blamed() -> None:
    died: list[RankDied] = []

    async def body(client: EngineClient, ranks: list[FakeRank]) -> None:
        ranks[0].send(wire.Fatal(0, "no memory for 5 blocks"))
        await until(lambda: bool(client.fleet.losses))
        ranks[1].die()
        await until(lambda: bool(died))
        assert died[0].rank == 0

    job(body, ranks=2, on_rank_died=died.append)


def test_drain_lets_running_requests_end_and_refuses_new_ones() -> None:
    async def body(client: EngineClient, ranks: list[FakeRank]) -> None:
        ranks[0].pause()
        stream = client.open([ask("a")])
        draining = asyncio.create_task(client.drain(20))
        await asyncio.sleep(0)
        with pytest.raises(NotReady, match="shutting down"):
            client.open([ask("b")])
        assert not draining.done()
        ranks[0].resume()
        assert await draining
        assert tokens(await stream.get()) and await client.stop(10)
        assert ranks[0].of_kind(wire.Stop) == [wire.Stop(drain=False)]
        await asyncio.sleep(0.5)  # the closed connection of a stopped rank is no death
        assert client.failed is None

    job(body)


def test_drain_cuts_off_what_does_not_end() -> None:
    async def body(client: EngineClient, ranks: list[FakeRank]) -> None:
        ranks[0].pause()
        stream = client.open([ask("a")])
        assert not await client.drain(0.05)
        (last,) = await stream.get()
        assert last.finish_reason is FinishReason.ERROR and "stopped" in str(last.error)
        await until(lambda: bool(ranks[0].of_kind(wire.Abort)))

    job(body)


def test_stall_shows_and_goes() -> None:
    async def body(client: EngineClient, ranks: list[FakeRank]) -> None:
        await until(lambda: client.fleet.stalled(time.monotonic(), 0.05) is not None)
        assert client.fleet.stalled(time.monotonic(), 60) is None
        stream = client.open([ask("a", max_tokens=1)])
        await stream.get()
        assert client.fleet.stalled(time.monotonic(), 1) is None

    job(body)


def test_flights_are_measured() -> None:
    finished: list[Any] = []

    async def body(client: EngineClient, ranks: list[FakeRank]) -> None:
        await collect(client, ask("a"))
        (flight,) = finished
        assert flight.num_output_tokens == 4 and flight.num_cached_tokens == 3
        assert flight.request.arrival <= flight.first_token_at <= flight.last_token_at

    job(body, on_finished=finished.append)


def test_errors_of_single_requests_come_through() -> None:
    def failing(request: Request) -> Iterator[TokenOutput]:
        yield output(request, (1,), None)
        yield TokenOutput(
            request_id=request.request_id,
            token_ids=(),
            finish_reason=FinishReason.ERROR,
            error="step 5 failed",
        )

    async def body(client: EngineClient, ranks: list[FakeRank]) -> None:
        outputs = await collect(client, ask("a"))
        assert tokens(outputs) == [1] and outputs[-1].error == "step 5 failed"
        assert client.failed is None and client.num_in_flight == 0

    job(body, script=failing)


def test_peers_that_are_no_ranks_are_ignored() -> None:
    async def body(client: EngineClient, ranks: list[FakeRank]) -> None:
        client._link.take(b"rank-9", wire.encode(wire.Fatal(9, "boo")))
        assert client.failed is None
        assert tokens(await collect(client, ask("a"))) == [5, 6, 7, 5]

    job(body, script=say(5, 6, 7, 5))
