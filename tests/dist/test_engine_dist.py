"""Ranks as processes behind the real EngineClient, on the toy model (one collective a forward):
load with aborts, requests on one rank only, a rank that fails and a rank that is killed.

Run as a script this file is one rank.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_ranks import join, script_environment

from ep.group import EPGroup
from moeserve.cache import BlockCache
from moeserve.client import EngineClient
from moeserve.config import ServeConfig
from moeserve.engine import Engine
from moeserve.errors import RankDied
from moeserve.rank_loop import run_rank
from moeserve.request import FinishReason, Request, SamplingParams
from moeserve.runner import ModelRunner
from moeserve.scheduler import ScheduleLimits, Scheduler
from moeserve.toy_model import ToyModel

BLOCKS, SIZE, LENGTH = 60, 4, 160
TOY = ToyModel()

Body = Callable[[EngineClient, list[subprocess.Popen[bytes]]], Awaitable[None]]


def with_ranks(num_ranks: int, folder: Path, body: Body, fail_at: str = "") -> list[int]:
    """Start ranks, run body(client, processes), -> their exit codes."""
    processes: list[subprocess.Popen[bytes]] = []

    async def main() -> None:
        client = EngineClient(num_ranks)
        address = client.bind()
        client.start()
        for rank in range(num_ranks):
            processes.append(
                subprocess.Popen(
                    [sys.executable, __file__, str(rank), str(num_ranks), str(folder), address],
                    env=script_environment() | ({"FAIL_AT": fail_at} if fail_at else {}),
                    stderr=(folder / f"stderr{rank}").open("wb"),
                )
            )
        try:
            await client.wait_ready()
            await body(client, processes)
        finally:
            client.close()

    try:
        asyncio.run(asyncio.wait_for(main(), 100))
        return [process.wait(20) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def ask(name: str, prompt: list[int], num: int, salt: str = "") -> Request:
    sampling = SamplingParams(temperature=0, max_tokens=num)
    return Request(
        request_id=name, prompt_token_ids=tuple(prompt), sampling=sampling, cache_salt=salt
    )


async def all_on_one_rank_and_then_on_another(client: EngineClient) -> None:
    """The other ranks run empty batches, whichever they are, and idle in between."""
    for round_, rank in enumerate((2, 0, 3)):
        requests = [ask(f"{round_}-{i}", [i, i + 1], 6) for i in range(12)]
        client._loads = [0 if r == rank else 10**9 for r in range(4)]
        found = await asyncio.gather(*(tokens_of(client, r) for r in requests))
        assert found == [TOY.continue_prompt(list(r.prompt_token_ids), 6) for r in requests]
        await asyncio.sleep(0.05)  # idle ticks
    while any(r.stats is None for r in client.fleet.ranks):
        await asyncio.sleep(0.05)
    assert client.fleet.ranks[1].stats.finished == 0  # type: ignore[union-attr]
    client._loads = [0] * 4


@pytest.mark.dist
def test_load_with_aborts_leaks_nothing_and_answers_right(tmp_path: Path) -> None:
    rng = random.Random(3)
    base = [rng.randrange(97) for _ in range(50)]

    async def one(client: EngineClient, i: int) -> tuple[Request, list[int], Any]:
        prompt = base[: rng.randrange(51)] + [rng.randrange(97) for _ in range(1 + i % 9)]
        request = ask(f"r{i}", prompt, rng.randrange(1, 40))
        leave_after = rng.randrange(0, 6) if i % 4 == 0 else None
        tokens: list[int] = []
        reason = None
        async for output in client.submit(request):
            tokens += output.token_ids
            reason = output.finish_reason
            if leave_after is not None and len(tokens) >= leave_after:
                break  # the client left: its request is aborted
        return request, tokens, reason

    async def body(client: EngineClient, processes: Any) -> None:
        await all_on_one_rank_and_then_on_another(client)
        found = await asyncio.gather(*(one(client, i) for i in range(160)))
        for request, tokens, reason in found:
            whole = TOY.continue_prompt(list(request.prompt_token_ids), request.sampling.max_tokens)
            assert tokens == whole[: len(tokens)], request.request_id
            assert reason is not FinishReason.ERROR
            if int(request.request_id[1:]) % 4:
                assert tokens == whole and reason is FinishReason.LENGTH
        stats: list[Any] = []
        while not stats or any(s is None or s.num_running or s.num_used_blocks for s in stats):
            await asyncio.sleep(0.05)
            stats = [r.stats for r in client.fleet.ranks]
        assert all(s.num_free_blocks == BLOCKS and s.num_waiting == 0 for s in stats)
        assert len({s.finished > 0 for s in stats}) == 1, "all ranks got some"
        assert sum(s.aborted for s in stats) > 0 and sum(s.cached_tokens for s in stats) > 0
        assert await client.stop()

    assert with_ranks(4, tmp_path, body) == [0] * 4


async def tokens_of(client: EngineClient, request: Request) -> list[int]:
    tokens: list[int] = []
    async for output in client.submit(request):
        tokens += output.token_ids
        if output.finish_reason is FinishReason.ERROR:
            raise RuntimeError(output.error)
    return tokens


async def all_end_with_errors(client: EngineClient, start: Callable[[], None]) -> list[str]:
    tasks = [asyncio.create_task(tokens_of(client, ask(f"{i}", [i], 150))) for i in range(8)]
    while not any(flight.num_output_tokens for flight in client._flights.values()):
        await asyncio.sleep(0.01)
    start()
    ended = time.monotonic()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert time.monotonic() - ended < 10
    assert all(isinstance(r, RuntimeError) for r in results)
    return [str(r) for r in results]


@pytest.mark.dist
def test_a_rank_that_fails_inside_a_step_leaves_nobody_waiting(tmp_path: Path) -> None:
    async def body(client: EngineClient, processes: Any) -> None:
        reasons = await all_end_with_errors(client, lambda: None)
        assert all("rank 1" in reason and "no memory" in reason for reason in reasons), reasons
        while client.failed is None:
            await asyncio.sleep(0.02)
        assert isinstance(client.failed, RankDied) and client.failed.rank == 1
        assert "rank 1 has no memory" in str(client.failed)

    assert with_ranks(3, tmp_path, body, fail_at="1:12") == [1, 1, 1]
    assert "RuntimeError: rank 1 has no memory" in (tmp_path / "stderr1").read_text()
    for peer in (0, 2):  # each by itself, whether it waited in the forward or in the next lockstep
        said = (tmp_path / f"stderr{peer}").read_text()
        assert re.search(r"rank 1 broke off step \d+: RuntimeError: rank 1 has no memory", said)


@pytest.mark.dist
def test_a_rank_that_is_killed_is_named(tmp_path: Path) -> None:
    async def body(client: EngineClient, processes: list[subprocess.Popen[bytes]]) -> None:
        await all_end_with_errors(client, lambda: processes[1].send_signal(signal.SIGKILL))
        while client.failed is None:
            await asyncio.sleep(0.02)
        assert client.failed.rank == 1

    assert with_ranks(2, tmp_path, body) == [1, -signal.SIGKILL]
    said = (tmp_path / "stderr0").read_text()
    assert "rank 1 is gone: its process ended without a word" in said


# -- one rank -----------------------------------------------------------------------------------


class FailingToy(ToyModel):
    """Raises at the forward that FAIL_AT=rank:number names, on that rank only."""

    def forward(self, batch, cache, observer=None):  # type: ignore[no-untyped-def]
        assert self.group is not None
        rank, _, number = os.environ.get("FAIL_AT", "-1:0").partition(":")
        if self.group.rank == int(rank) and self.num_forwards == int(number):
            raise RuntimeError(f"rank {rank} has no memory")
        return super().forward(batch, cache, observer)


def toy_engine(config: ServeConfig, group: EPGroup, progress: Any) -> Engine:
    model = FailingToy(group=group)
    cache = BlockCache(BLOCKS, SIZE, 8)
    pages = model.cache_spec.allocate(BLOCKS, SIZE, torch.device("cpu"))
    limits = ScheduleLimits(8, 48, 20, LENGTH, 97)
    return Engine(ModelRunner(model, pages, cache.tables), Scheduler(cache, limits), group)


def main() -> None:
    rank, size, folder, address = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    group = join(rank, size, Path(folder))
    try:
        run_rank(ServeConfig(), group, address, toy_engine)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
