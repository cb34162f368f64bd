"""`moeserve serve`: one rank when torchrun started this process, else the launcher of all ranks.

Knows which of the two it is and what can be checked before any rank starts.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

from launch.cluster.jobs import LOCAL, enter, record_of_this_process, registered
from launch.cluster.stages import VARIABLE
from launch.env import RankEnv
from launch.failure import Failure
from launch.processes import leave
from launch.settings import Given, no_problems
from moeserve.config import ServeConfig
from moeserve.errors import ConfigError, RankDied
from moeserve.lifeline import when_parent_ends
from moeserve.terminal import counted, say


def serve(given: Given, front_end: str | None, arguments: Sequence[str]) -> None:
    """arguments: the command line as given, which each rank parses again."""
    env = RankEnv.read(os.environ)
    # Whoever brings a front end of their own sends token ids.
    needs_text = front_end is None and (env is None or env.front_end is None)
    ours = env is not None and env.supervisor is not None  # our launcher has looked at the port
    listens = needs_text and not ours and (env is None or env.rank == 0)

    ranks_here = None if env is None else env.local_size
    if ours or front_end is not None or (env is not None and env.front_end is not None):
        ranks_here = 0  # our launcher has looked; whoever brought a front end hears it from a rank

    def read() -> ServeConfig:
        return given.resolve(
            needs_text=needs_text,
            more=port_problems if listens else no_problems,
            on_rank=env is not None,
            ranks_here=ranks_here,
        )

    if env is not None:
        from launch.rank import settings_on_rank
        from launch.serving_rank import ServingRank

        env = replace(env, front_end=front_end or env.front_end)
        config, problems = settings_on_rank(read, env)
        unwatched = env.supervisor is None and VARIABLE not in os.environ
        record = None
        if env.rank == 0 and env.front_end is None and unwatched:  # torchrun or srun by hand
            record = record_of_this_process(LOCAL, None, env.num_nodes, env.size, arguments)
            enter(record)
        if config.server.max_restarts and env.rank == 0 and not ours:
            say(
                f"--max-restarts is not used under {env.launcher.value}, which starts these ranks; "
                "torchrun has a --max-restarts of its own"
            )
        rank = ServingRank(config, env, given.in_users_words, problems, record)
        rank.run(rank.serve)
        return
    config = read()
    if front_end is not None:  # whoever gave it has started us (moeserve.llm_backends)
        when_parent_ends(lambda: os.kill(os.getpid(), signal.SIGTERM))
    from launch.job import run_job

    if front_end is None:
        ranks = config.parallel.ep
        record = record_of_this_process(
            LOCAL,
            None,
            1,
            ranks,
            arguments,
            drain_seconds=config.server.drain_seconds,
            restarts=config.server.max_restarts,
        )
        with registered(record):
            failure = run_job(ranks, arguments, restarts=record.restarts)
        end_job(failure, ranks, "stopped")
    failure = run_job(config.parallel.ep, arguments, front_end)
    if failure is not None and failure.told:
        leave(failure.exit_code)  # whoever gave the front end has heard it there
    end_job(failure, config.parallel.ep)


def end_job(failure: Failure | None, num_ranks: int, good_word: str = "") -> NoReturn:
    """Say how the job of this launcher ended, and leave with its exit code."""
    if failure is None:
        say(good_word)
        leave(0)
    print(failure.details, end="", file=sys.stderr)
    others = f"{counted(num_ranks - 1, 'other rank')} ended because of it"
    because = f"; {others}" if num_ranks > 1 else ""
    if failure.exit_code < 0 and failure.rank >= 0:
        death = RankDied(failure.rank, failure.reason)
        say(f"{death}{because}")
        leave(death.exit_code)
    one_of_many = num_ranks > 1 and failure.rank >= 0
    alike = failure.exit_code == ConfigError.exit_code  # found on all ranks
    who = f"rank {failure.rank}: " if one_of_many and not alike else ""
    for line in failure.reason.splitlines():
        say(f"{who}{line}")
    if who:
        say(others)
    leave(failure.exit_code)


def port_problems(config: ServeConfig) -> list[str]:
    """A taken port, an address that is not ours: the front end would find out seconds later."""
    host, port = config.server.host, config.server.port
    if port == 0:
        return []
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        return [f"server.host={host!r}: does not resolve: {error.strerror}"]
    with socket.socket(family, kind) as probe:
        # As the server does: a port whose connections only linger may be taken again.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                return [f"server.host={host!r}: is no address of this machine"]
            if error.errno == errno.EADDRINUSE:
                valid = "another process listens there; choose another, or 0 for any free one"
            else:
                valid = f"cannot listen on {host}: {error.strerror}"
            return [f"server.port={port}: {valid}"]
    return []
