"""The front end as a process: announcements, exit codes, signals, and the death of a rank."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from moeserve import wire
from moeserve.config import ServeConfig
from moeserve.server.rehearsal import FakeRank, write_tokenizer

pytestmark = pytest.mark.dist

BODY = {"prompt": "hello", "max_tokens": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("checkpoint")
    write_tokenizer(path)
    return path


class FrontEnd:
    """The process with its announcements read from a pipe."""

    def __init__(self, config: ServeConfig, folder: Path, num_ranks: int) -> None:
        path = folder / f"config-{os.urandom(4).hex()}.json"
        path.write_text(config.model_dump_json())
        self._read, write = os.pipe()
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "moeserve.frontend", "--config", str(path)),
                *("--num-ranks", str(num_ranks), "--announce-fd", str(write)),
            ],
            pass_fds=[write],
            stderr=subprocess.PIPE,
            text=True,
        )
        os.close(write)
        self._pending = b""

    def announced(self, what: str) -> str:
        """The value of the next announcement, which must be this one."""
        deadline = time.monotonic() + 20
        while b"\n" not in self._pending:
            ready, _, _ = select.select([self._read], [], [], deadline - time.monotonic())
            assert ready, f"no announcement of {what!r}"
            piece = os.read(self._read, 4096)
            assert piece, self.process.communicate()[1]
            self._pending += piece
        line, _, self._pending = self._pending.partition(b"\n")
        message: dict[str, str] = json.loads(line)
        assert message["what"] == what
        return message["value"]

    def end(self, timeout: float = 10) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=timeout)
        return self.process.returncode, errors

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()
        os.close(self._read)


@contextmanager
def serving(folder: Path, num_ranks: int = 2, **server: Any) -> Iterator[tuple[Any, str, Any]]:
    config = ServeConfig.model_validate(
        {"model": {"checkpoint": str(folder)}, "server": {"port": 0} | server}
    )
    front_end = FrontEnd(config, folder, num_ranks)
    ranks: list[FakeRank] = []
    try:
        address = front_end.announced("engine")
        url = front_end.announced("http")
        assert httpx.get(f"{url}/health").json()["status"] == "loading"
        ranks += [FakeRank(r, num_ranks, address) for r in range(num_ranks)]
        assert front_end.announced("ready") == url
        yield front_end, url, ranks
    finally:
        front_end.close()
        for rank in ranks:
            rank.die()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_stops_every_rank(folder: Path, number: signal.Signals) -> None:
    with serving(folder) as (front_end, url, ranks):
        assert httpx.post(f"{url}/v1/completions", json=BODY).status_code == 200
        for rank in ranks:
            rank.pause()
        with httpx.stream("POST", f"{url}/v1/completions", json=BODY | {"stream": True}) as stream:
            wait_for(lambda: sum(len(x.running) for x in ranks) == 1)
            front_end.process.send_signal(number)
            wait_for(lambda: httpx.get(f"{url}/health").json()["status"] == "draining")
            assert httpx.post(f"{url}/v1/completions", json=BODY).status_code == 503
            for rank in ranks:
                rank.resume()
            text = stream.read().decode()
        assert '"finish_reason":"length"' in text and text.endswith("data: [DONE]\n\n")
        assert front_end.end()[0] == 0
        assert all(len(x.of_kind(wire.Stop)) == 1 for x in ranks)


@pytest.mark.parametrize("hurry", ["second signal", "drain_seconds"])
def test_draining_ends_even_if_requests_do_not(folder: Path, hurry: str) -> None:
    seconds = 60 if hurry == "second signal" else 0.2
    with serving(folder, drain_seconds=seconds) as (front_end, url, ranks):
        for rank in ranks:
            rank.pause()
        with httpx.stream("POST", f"{url}/v1/completions", json=BODY | {"stream": True}) as stream:
            wait_for(lambda: sum(len(x.running) for x in ranks) == 1)
            front_end.process.send_signal(signal.SIGTERM)
            if hurry == "second signal":
                wait_for(lambda: httpx.get(f"{url}/health").json()["status"] == "draining")
                front_end.process.send_signal(signal.SIGTERM)  # within a second: the same wish
                began = time.monotonic()
                wait_for(lambda: time.monotonic() - began > 1.1)
                assert httpx.get(f"{url}/health").json()["requests_in_flight"] == 1
                front_end.process.send_signal(signal.SIGTERM)
            text = stream.read().decode()
        assert '"finish_reason":"error"' in text and "stopped" in text
        code, said = front_end.end()
        assert code == 0 and "died" not in said
        assert ("stopped hard by a second signal: 1 request" in said) == (hurry == "second signal")


# More than the kernel takes: 7 MB, whole or streamed.
BIG = {"prompt": [5] * 9, "max_tokens": 480, "logprobs": 20}
SEQUENCES = {True: 24, False: 72}


@contextmanager
def unread(url: str, ranks: list[FakeRank], stream: bool) -> Iterator[socket.socket]:
    """A connection whose client reads nothing of its big answer; the ranks have done their part."""
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(20)
        client.connect((host, int(port)))
        body = json.dumps(BIG | {"stream": stream, "n": SEQUENCES[stream]}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        sent = SEQUENCES[stream]
        wait_for(lambda: sum(len(x.of_kind(wire.Submit)) for x in ranks) == sent)
        wait_for(lambda: not any(x.running for x in ranks))
        assert client.recv(1, socket.MSG_PEEK)  # it has begun
        yield client


def read_all(client: socket.socket) -> bytes:
    parts = []
    try:
        while part := client.recv(1 << 16):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_is_read_slowly_is_whole_in_spite_of_a_signal(
    folder: Path, stream: bool
) -> None:
    with serving(folder) as (front_end, url, ranks), unread(url, ranks, stream) as client:
        front_end.process.send_signal(signal.SIGTERM)
        wait_for(lambda: httpx.get(f"{url}/health").json()["status"] == "draining")
        head, _, answer = read_all(client).partition(b"\r\n\r\n")
        if stream:
            assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") and b'"error"' not in answer
        else:
            length = int(head.lower().partition(b"content-length: ")[2].split()[0])
            assert length == len(answer) > 6_000_000 and json.loads(answer)["usage"]
        code, said = front_end.end()
        assert code == 0 and "Traceback" not in said and "not read in time" not in said


@pytest.mark.parametrize(("stream", "hurry"), [(True, False), (False, True)])
def test_an_answer_that_nobody_reads_holds_no_server_and_that_is_told(
    folder: Path, stream: bool, hurry: bool
) -> None:
    seconds = 60 if hurry else 0.3
    with (
        serving(folder, drain_seconds=seconds) as (front_end, url, ranks),
        unread(url, ranks, stream) as client,
    ):
        asked = time.monotonic()
        front_end.process.send_signal(signal.SIGTERM)
        if hurry:
            wait_for(lambda: httpx.get(f"{url}/health").json()["status"] == "draining")
            wait_for(lambda: time.monotonic() - asked > 1.5)  # until then it is the same wish
            front_end.process.send_signal(signal.SIGTERM)
        code, said = front_end.end()
        assert code == 0 and said.count("1 answers were not read in time") == 1
        assert "Traceback" not in said and "Exception in ASGI" not in said
        assert not read_all(client).endswith(b"0\r\n\r\n")  # nobody takes it for whole


def test_a_stream_that_is_read_again_too_late_says_that_it_is_cut(folder: Path) -> None:
    with (
        serving(folder, drain_seconds=0) as (front_end, url, ranks),
        unread(url, ranks, True) as client,
    ):
        front_end.process.send_signal(signal.SIGTERM)
        lines = iter(front_end.process.stderr.readline, "")
        assert any("1 answers may be read for up to 0 s" in x for x in lines)
        answer = read_all(client)
        assert b"the server stopped before this answer was read" in answer[-400:]
        assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        code, said = front_end.end()
        assert code == 0 and "Traceback" not in said


def test_a_dead_rank_ends_the_job_and_is_named(folder: Path) -> None:
    with serving(folder) as (front_end, url, ranks):
        for rank in ranks:
            rank.pause()
        with httpx.stream("POST", f"{url}/v1/completions", json=BODY | {"stream": True}) as stream:
            wait_for(lambda: sum(len(x.running) for x in ranks) == 1)
            begun = time.monotonic()
            ranks[1].die()
            text = stream.read().decode()
        assert '"finish_reason":"error"' in text and "rank 1 died" in text
        code, errors = front_end.end()
        assert time.monotonic() - begun < 5
        assert code == 3 and "rank 1 died: its connection was lost" in errors
        assert "may run on" not in errors, "nobody asked for a drain"
        assert "rank 1 died" in front_end.announced("failed")


def test_a_frozen_rank_is_dead_after_rank_timeout(folder: Path) -> None:
    """Its host is silent, the connection stays open: only the heartbeat can tell."""
    code = (
        "import sys; from moeserve.server.rehearsal import FakeRank; "
        "FakeRank(1, 2, sys.argv[1]); sys.stdin.read()"
    )
    config = ServeConfig.model_validate(
        {"model": {"checkpoint": str(folder)}, "server": {"port": 0, "rank_timeout": 1.5}}
    )
    front_end = FrontEnd(config, folder, 2)
    frozen = None
    ranks = []
    try:
        address = front_end.announced("engine")
        front_end.announced("http")
        ranks.append(FakeRank(0, 2, address))
        frozen = subprocess.Popen([sys.executable, "-c", code, address], stdin=subprocess.PIPE)
        front_end.announced("ready")
        frozen.send_signal(signal.SIGSTOP)
        assert "rank 1 died" in front_end.announced("failed")
        assert front_end.end()[0] == 3
    finally:
        front_end.close()
        if frozen is not None:
            frozen.kill()
            frozen.communicate()
        for rank in ranks:
            rank.die()


def test_stopping_while_ranks_load_does_not_wait_for_them(folder: Path) -> None:
    config = ServeConfig.model_validate(
        {"model": {"checkpoint": str(folder)}, "server": {"port": 0}}
    )
    front_end = FrontEnd(config, folder, 2)
    try:
        front_end.announced("engine")
        front_end.announced("http")
        front_end.process.send_signal(signal.SIGTERM)
        assert front_end.end(5)[0] == 0
    finally:
        front_end.close()


def test_wrong_settings_are_told_before_anything_is_announced(folder: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cases = [
            ({"model": {"checkpoint": str(folder)}, "server": {"port": port}}, f"port={port}"),
            ({"model": {"checkpoint": str(tmp_path / "none")}}, "tokenizer.json"),
        ]
        for values, text in cases:
            front_end = FrontEnd(ServeConfig.model_validate(values), folder, 1)
            try:
                assert text in front_end.announced("failed")
                code, errors = front_end.end()
                assert code == 2 and "Traceback" not in errors
            finally:
                front_end.close()
