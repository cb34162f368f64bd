"""The front end as a process: HTTP, tokenizer, router and the wire to all ranks, in one event loop.

The contract with whoever starts it (launch):

- `run_front_end(config, num_ranks=N, bind_host=H, ...)` blocks, in the main thread of a process of
  its own. It needs no torch, joins no process group and reads nothing of the checkpoint but
  tokenizer and JSON files.
- It first binds the HTTP port and the engine's ROUTER socket on tcp://H:<free port>, then calls
  `announce("engine", "tcp://H:PORT")` and `announce("http", "http://HOST:PORT")`; each rank connects
  a DEALER with identity `wire.rank_identity(rank)` to the former and sends Hello, Loading..., Ready.
  When all are Ready: `announce("ready", "http://HOST:PORT")`. HTTP is served from the start; /health
  says what is loading.
- What is wrong with the settings (no tokenizer, port taken) raises ConfigError before any announce.
- SIGTERM or SIGINT drains: new requests get 503, running ones get `server.drain_seconds`, then Stop
  goes to every rank and the function returns when all said Stopped (or after STOP_SECONDS). A second
  signal cuts the draining short. It returns normally: exit code 0.
- A rank whose connection is lost, that says Fatal or whose host stays silent for
  `server.rank_timeout` ends the job: every running request ends with an error, the other ranks are
  told to stop, RankDied (exit code 3, names the rank) is raised within about a second.

As a command, for a launcher that starts processes and not functions:

    python -m moeserve.frontend --config CONFIG.json --num-ranks N --bind-host H [--announce-fd FD]

CONFIG.json is `ServeConfig.model_dump_json()`. Each announcement is one line of JSON on FD (default:
stdout), {"what": "engine" | "http" | "ready" | "failed", "value": ...}; the exit code is as above.
"""

from __future__ import annotations

from collections.abc import Callable

from moeserve.config import ServeConfig

STOP_SECONDS = 10.0  # how long ranks may take to say Stopped


def run_front_end(
    config: ServeConfig,
    *,
    num_ranks: int,
    bind_host: str = "127.0.0.1",
    announce: Callable[[str, str], None] = lambda what, value: None,
) -> None:
    """Serve until a signal (returns) or the death of a rank (raises RankDied). See above."""
    raise NotImplementedError
