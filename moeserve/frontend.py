"""The front end as a process: HTTP, tokenizer, router and the wire to all ranks, in one event loop.

The contract with whoever starts it (launch):

- `run_front_end(config, num_ranks=N, bind_host=H, ...)` blocks, in the main thread of a process of
  its own. It needs no torch, joins no process group and reads nothing of the checkpoint but
  tokenizer and JSON files.
- It first binds the HTTP port and the engine's ROUTER socket on tcp://H:<free port>, then calls
  `announce("engine", "tcp://H:PORT")` and `announce("http", "http://HOST:PORT")`; each rank
  connects a DEALER with identity `wire.rank_identity(rank)` to the former and sends Hello,
  Loading..., Ready. When all are Ready: `announce("ready", "http://HOST:PORT")`. HTTP is served
  from the start; /health says what is loading.
- Wrong settings (no tokenizer, port taken) raise ConfigError before any announce.
- SIGTERM or SIGINT drains: new requests get 503, running ones, and answers that are not written out
  yet because their clients read slowly, get `server.drain_seconds`, then Stop goes to every rank
  and the function returns when all said Stopped (or after STOP_SECONDS). A second signal cuts the
  draining short. It returns normally: exit code 0.
- A rank whose connection is lost, that says Fatal or whose host stays silent for
  `server.rank_timeout` ends the job: every running request ends with an error, the other ranks are
  told to stop, `announce("failed", message)` is called and RankDied (exit code 3, names the rank)
  is raised, all within about a second; LauncherDied, where the ranks left for that. From the first
  sign on /health is not ready and new requests get 503. A rank that dies before its Hello is
  launch's to notice.

As a command, for a launcher that starts processes and not functions:

    python -m moeserve.frontend --config CONFIG.json --num-ranks N --bind-host H [--announce-fd FD]

CONFIG.json is `ServeConfig.model_dump_json()`. Each announcement is one line of
JSON on FD (default 1, stdout), {"what": "engine" | "http" | "ready" | "failed", "value": ...};
wrong settings are announced as "failed" too (one problem a line). Exit codes are as above.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import uvicorn

from moeserve.client import EngineClient
from moeserve.config import ServeConfig
from moeserve.errors import ConfigError, JobDied, MoeserveError
from moeserve.metrics import Metrics
from moeserve.server.app import create_app
from moeserve.server.service import Service
from moeserve.terminal import log_to_terminal, say

log = logging.getLogger("moeserve.frontend")

STOP_SECONDS = 10.0  # how long ranks may take to say Stopped
# How long open connections may take to close after the last answer; after the death of a rank,
# when the whole job has to end soon.
_CLOSE_SECONDS, _CLOSE_AT_DEATH_SECONDS = 2, 1
_SAME_WISH_SECONDS = 1.0  # within which two signals are one wish, as on ranks
_LOOK_AGAIN = 0.02  # seconds between looks at what clients have read: nothing tells

Announce = Callable[[str, str], None]


def run_front_end(
    config: ServeConfig,
    *,
    num_ranks: int,
    bind_host: str = "127.0.0.1",
    announce: Announce = lambda what, value: None,
    on_rank_died: Callable[[JobDied], None] = lambda error: None,
    launcher_gone: Callable[[], bool] = lambda: False,
) -> None:
    """Serve until a signal (returns) or the death of a rank (raises JobDied). See above.
    on_rank_died hears of that death while streams are being ended. launcher_gone: whether whoever
    started the ranks is gone, which is why they are."""
    import uvloop

    front_end = _FrontEnd(config, num_ranks, bind_host, announce, on_rank_died, launcher_gone)
    uvloop.run(front_end.run())


class _FrontEnd:
    """The process's life: start, serve, drain, end."""

    def __init__(
        self,
        config: ServeConfig,
        num_ranks: int,
        bind_host: str,
        announce: Announce,
        on_rank_died: Callable[[JobDied], None],
        launcher_gone: Callable[[], bool],
    ) -> None:
        self._config, self._num_ranks = config, num_ranks
        self._bind_host, self._announce = bind_host, announce
        self._tell_death, self._launcher_gone = on_rank_died, launcher_gone
        self._ending = asyncio.Event()  # a signal came, or a rank died
        self._hurry = asyncio.Event()  # a second signal came
        self._asked = 0.0  # when the first one did

    async def run(self) -> None:
        metrics = Metrics()
        client = EngineClient(
            self._num_ranks,
            max_queue=self._config.server.max_queue,
            rank_timeout=self._config.server.rank_timeout,
            lockstep_timeout=self._config.engine.lockstep_timeout,
            prefix_cache=self._config.cache.prefix_cache,
            on_first_token=metrics.first_token,
            on_finished=metrics.finished,
            on_rank_died=self._on_rank_died,
            launcher_gone=self._launcher_gone,
        )
        try:
            service = Service(self._config, client, metrics)
            metrics.watch(client)
            listener = listen(self._config.server.host, self._config.server.port)
            with contextlib.closing(listener):
                await self._serve(client, service, listener)
        finally:
            client.close()

    async def _serve(self, client: EngineClient, service: Service, listener: socket.socket) -> None:
        url = url_of(self._config.server.host, listener, self._bind_host)
        client.on_ready = lambda: self._announce("ready", url)
        try:
            address = client.bind(self._bind_host)
        except OSError as error:  # zmq's errors are OSErrors too
            raise ConfigError([f"bind_host={self._bind_host}: cannot be bound: {error}"]) from None
        server = Server(
            uvicorn.Config(
                create_app(service),
                loop="none",
                http="httptools",
                lifespan="off",
                access_log=self._config.server.log_level == "debug",
                log_config=None,  # its lines come in our style, or not at all (moeserve.terminal)
                timeout_graceful_shutdown=_CLOSE_SECONDS,
                server_header=False,
            )
        )
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, client)
        client.start()
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            self._announce("engine", address)
            self._announce("http", url)
            ending = asyncio.create_task(self._ending.wait())
            await asyncio.wait([serving, ending], return_when=asyncio.FIRST_COMPLETED)
            ending.cancel()
            if client.failed is None:
                await self._drain(client, server, service)
            else:
                await client.stop(0)
        finally:
            patience = _CLOSE_SECONDS if client.failed is None else _CLOSE_AT_DEATH_SECONDS
            server.config.timeout_graceful_shutdown = patience
            await self._let_go(server, service, patience)
            server.should_exit = True
            await serving
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
        if client.failed is not None:
            raise client.failed

    async def _drain(self, client: EngineClient, server: Server, service: Service) -> None:
        seconds = self._config.server.drain_seconds
        unread = len(server.owing())
        if client.num_in_flight:
            log.warning(
                "stopping: %d requests may run on for up to %g s (a second signal cuts them off)",
                client.num_in_flight,
                seconds,
            )
        elif unread:
            log.warning("stopping: %d answers may be read for up to %g s more", unread, seconds)
        draining = asyncio.create_task(self._drained(client, server, seconds))
        hurry = asyncio.create_task(self._hurry.wait())
        await asyncio.wait([draining, hurry], return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if not draining.done():
            draining.cancel()
            if client.failed is None:
                cut = max(client.num_in_flight, len(server.owing()))
                log.warning("stopped hard by a second signal: %d requests are cut off", cut)
            client.cut("the server was stopped before this request had ended")
        if client.failed is None:
            await self._let_go(server, service, _CLOSE_SECONDS)
        if client.failed is None and not await client.stop(STOP_SECONDS):
            log.warning("not every rank said that it stopped within %g s", STOP_SECONDS)

    async def _drained(self, client: EngineClient, server: Server, seconds: float) -> None:
        """Return when every request has ended and every answer is written out, or after so long."""
        deadline = time.monotonic() + seconds
        await client.drain(seconds)
        await _nothing_owed(server, deadline)

    async def _let_go(self, server: Server, service: Service, seconds: float) -> None:
        """End what is still open: streams say so if their clients read on, then connections close.
        uvicorn would cancel them with a traceback each."""
        if not server.owing():
            return
        service.stopped = True
        await _nothing_owed(server, time.monotonic() + seconds)
        late = server.owing()
        for connection in late:
            connection.transport.abort()
        if late:
            log.warning("%d answers were not read in time", len(late))

    def _on_signal(self, client: EngineClient) -> None:
        # Slurm tells every process of a job, and rank 0 hands its own signal on: one wish.
        now = time.monotonic()
        self._asked = self._asked or now
        if self._ending.is_set() and now - self._asked > _SAME_WISH_SECONDS:
            self._hurry.set()
        client.draining = True  # from this moment on /health and new requests know
        self._ending.set()

    def _on_rank_died(self, error: JobDied) -> None:
        log.error("%s", error)
        self._tell_death(error)
        self._announce("failed", str(error))
        self._ending.set()
        self._hurry.set()


class Server(uvicorn.Server):
    """uvicorn without its signal handlers: they would close connections that still stream."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def owing(self) -> list[Any]:
        """Connections (uvicorn's) whose answer is not handed to the kernel yet."""
        return [x for x in self.server_state.connections if _owes(x)]


def _owes(connection: Any) -> bool:
    cycle = connection.cycle
    if cycle is not None and not cycle.response_complete:
        # Who has not sent all of a body yet waits for nothing.
        return bool(cycle.response_started or not cycle.more_body)
    return connection.transport is not None and connection.transport.get_write_buffer_size() > 0


async def _nothing_owed(server: Server, deadline: float) -> None:
    while server.owing() and time.monotonic() < deadline:
        await asyncio.sleep(_LOOK_AGAIN)


def listen(host: str, port: int) -> socket.socket:
    """The HTTP socket, bound before anything else so that a taken port is told at once."""
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = infos[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ConfigError([f"server.host={host}, server.port={port}: {error.strerror}"]) from None
    listener.listen(2048)
    listener.setblocking(False)
    return listener


def url_of(host: str, listener: socket.socket, reachable: str = "127.0.0.1") -> str:
    """reachable: an address of this machine, for a socket that listens on all of them."""
    port = listener.getsockname()[1]
    local = reachable == "127.0.0.1"
    shown = {"0.0.0.0": reachable, "": reachable, "::": "[::1]" if local else reachable}.get(
        host, host
    )
    if ":" in shown and not shown.startswith("["):
        shown = f"[{shown}]"
    return f"http://{shown}:{port}"


def main(
    on_rank_died: Callable[[JobDied], None] = lambda error: None,
    launcher_gone: Callable[[], bool] = lambda: False,
) -> int:
    """The command described in the module; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m moeserve.frontend")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--num-ranks", type=int, required=True)
    parser.add_argument("--bind-host", default="127.0.0.1")
    parser.add_argument("--announce-fd", type=int, default=1)
    options = parser.parse_args()
    config = ServeConfig.model_validate_json(options.config.read_text())
    log_to_terminal(config.server.log_level)
    told: set[str] = set()

    def announce(what: str, value: str) -> None:
        told.add(what)
        line = json.dumps({"what": what, "value": value}) + "\n"
        with contextlib.suppress(BrokenPipeError):  # nobody listens any more: not our end
            os.write(options.announce_fd, line.encode())

    try:
        run_front_end(
            config,
            num_ranks=options.num_ranks,
            bind_host=options.bind_host,
            announce=announce,
            on_rank_died=on_rank_died,
            launcher_gone=launcher_gone,
        )
    except MoeserveError as error:
        if "failed" not in told:
            announce("failed", str(error))
        if options.announce_fd <= 2:  # else whoever listens says it
            say(str(error))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
