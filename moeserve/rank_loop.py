"""One rank as a process: connect to the front end, build the engine, step until all agree to stop.

The contract with whoever starts it (launch):

- `run_rank(config, group, front_end)` blocks. `front_end` is the address of the front end's ROUTER
  socket (tcp://host:port). Process groups exist already; this function does not destroy them.
- It says Hello, Loading..., Ready, then steps. It returns when all ranks agreed to stop (Stop
  messages of the front end; Ctrl-C is the front end's business: ranks should ignore SIGINT).
- ConfigError: a setting or file is wrong, on all ranks alike where they agreed on it. EngineFailed:
  a step failed in a way that peers may not survive; the process should exit at once, so that
  peers' collectives end. Both are told to the front end (Fatal) before they are raised.
"""

from __future__ import annotations

from ep.group import EPGroup
from moeserve.config import ServeConfig


def run_rank(config: ServeConfig, group: EPGroup, front_end: str) -> None:
    raise NotImplementedError
