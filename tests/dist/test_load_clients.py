"""200 streaming clients at once, a third of which leave: nothing leaks, hangs or says wrong text.

The real server over two ranks, with a cache too small for all (so that sequences are preempted and
blocks evicted) and few places to run in (so that most requests wait).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.dist

NUM_CLIENTS = 200
NUM_PROMPTS = 16
MAX_TOKENS = 40
SETTINGS = [
    "--ep=2",
    "--port=0",
    "--kv-tokens=384",
    "--max-num-sequences=12",
    "--max-model-len=256",
]


@contextmanager
def serving(checkpoint: Path) -> Iterator[str]:
    """The URL of a real server; ended by SIGTERM, which must end it well."""
    process = subprocess.Popen(
        [sys.executable, "-m", "moeserve", "serve", str(checkpoint), *SETTINGS],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stderr is not None
    said = b""
    try:
        deadline = time.monotonic() + 90
        while not (ready := re.search(rb"ready: (http://\S+)\s", said)):
            wait = select.select([process.stderr], [], [], deadline - time.monotonic())[0]
            piece = os.read(process.stderr.fileno(), 65536) if wait else b""
            assert piece, said.decode(errors="replace")
            said += piece
        yield ready[1].decode()
        process.send_signal(signal.SIGTERM)
        rest = process.communicate(timeout=30)[1]
        assert process.returncode == 0, (said + rest).decode(errors="replace")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # its own session: nobody else's
            process.communicate()


@dataclass
class Client:
    """One call: what it asks, when it leaves (after so many events; None: never), what it got."""

    prompt: int
    max_tokens: int
    leaves_after: int | None
    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    done: bool = False

    async def run(self, address: tuple[str, int], prompts: list[list[int]]) -> None:
        body = json.dumps(
            {
                "prompt": prompts[self.prompt],
                "max_tokens": self.max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "return_token_ids": True,
            }
        ).encode()
        reader, writer = await asyncio.open_connection(*address)
        try:
            head = (
                f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
            )
            writer.write(head.encode() + body)
            if self.leaves_after == 0:
                return
            events = 0
            while not self.done:
                line = await reader.readline()
                assert line, "the connection ended before [DONE]"
                assert not line.startswith(b"HTTP/1.1 ") or b" 200 " in line, line
                if not line.startswith(b"data: "):
                    continue
                self._take(line[6:].strip())
                events += 1
                if events == self.leaves_after:
                    return
        finally:
            writer.close()

    def _take(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.done = True
            return
        event = json.loads(data)
        assert "error" not in event, event
        choice = event["choices"][0]
        self.ids += choice["token_ids"]
        self.text += choice["text"]
        self.finish = choice["finish_reason"] or self.finish


def samples(url: str, name: str) -> dict[str, float]:
    """A metric's samples by their labels."""
    text = httpx.get(f"{url}/metrics").text
    found = re.findall(rf"^moeserve_{name}(\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
    return {labels: float(value) for labels, value in found}


async def storm(address: tuple[str, int], prompts: list[list[int]], clients: list[Client]) -> None:
    await asyncio.wait_for(
        asyncio.gather(*(client.run(address, prompts) for client in clients)), 120
    )


def test_two_hundred_clients_with_random_aborts(random_checkpoint: Path) -> None:
    dice = random.Random(7)
    shared = [dice.randrange(3, 90) for _ in range(40)]  # some prompts share a prefix
    prompts = [
        shared[: 8 * (number % 6)] + [dice.randrange(3, 90) for _ in range(dice.randrange(3, 40))]
        for number in range(NUM_PROMPTS)
    ]
    with serving(random_checkpoint) as url:
        host, _, port = url.removeprefix("http://").partition(":")
        address = (host, int(port))
        alone: list[Any] = []
        for number in range(NUM_PROMPTS):
            client = Client(number, MAX_TOKENS, None)
            asyncio.run(storm(address, prompts, [client]))
            assert len(client.ids) == MAX_TOKENS and client.done
            alone.append(client)
        httpx.post(f"{url}/reset_prefix_cache")

        clients = [
            Client(
                dice.randrange(NUM_PROMPTS),
                dice.randrange(1, MAX_TOKENS + 1),
                dice.choice([None, None, dice.randrange(0, 12)]),
            )
            for _ in range(NUM_CLIENTS)
        ]
        asyncio.run(storm(address, prompts, clients))

        for client in clients:
            reference = alone[client.prompt]
            assert client.ids == reference.ids[: len(client.ids)]  # right as far as it was read
            if client.leaves_after is None:
                assert client.done and client.finish == "length"
                assert len(client.ids) == client.max_tokens
            if client.done and client.max_tokens == MAX_TOKENS:
                assert client.text == reference.text
        left = [x for x in clients if not x.done]
        assert len(left) > 20

        blocks = {
            x["rank"]: x["num_blocks"] for x in httpx.get(f"{url}/debug/state").json()["ranks"]
        }
        deadline = time.monotonic() + 15
        while True:  # ranks report once a second
            used = samples(url, "kv_blocks")
            busy = [
                *samples(url, "requests_in_flight").values(),
                *samples(url, "running").values(),
                *samples(url, "queue_waiting").values(),
                *(used[f'{{rank="{rank}",state="used"}}'] for rank in blocks),
            ]
            if not any(busy):
                break
            assert time.monotonic() < deadline, busy
            time.sleep(0.1)
        for rank, count in blocks.items():
            assert used[f'{{rank="{rank}",state="free"}}'] == count  # the pool is whole again
        ended = samples(url, "requests_total")
        assert sum(ended.values()) >= NUM_CLIENTS - sum(x.leaves_after == 0 for x in clients)
        assert ended['{finish_reason="error"}'] == 0 and ended['{finish_reason="abort"}'] > 0
        assert sum(samples(url, "preemptions_total").values()) > 0  # the cache was too small
