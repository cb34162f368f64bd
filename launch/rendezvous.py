"""The rendezvous: ranks find their store, tell rank 0 what they know of their nodes, and hear what
does not fit, all of it, each rank the same, before any group is made or weight is read.

    rank r   facts/r ->            (answers pings, if it leads a node)            -> verdict
    rank 0   facts of all -> clocks of the nodes, by round trips -> judge -> verdict to all

A rank with problems of its own comes too: its problems are said once, with those of the others, and
nobody waits for it. Knows the store and the order of talking; what fits is `launch.node_facts`'.
"""

from __future__ import annotations

import errno
import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore

from launch.env import Launcher, RankEnv
from launch.interface import resolve_master
from launch.node_facts import (
    Clock,
    Facts,
    describe_network,
    judge,
    node_names,
    spans,
    warnings,
)
from moeserve.errors import ConfigError, Unmet
from moeserve.terminal import counted, say

PATIENCE = 300.0  # seconds for all ranks to come: one may still import torch from a slow disk
# As soon as anything is known to be wrong the job cannot come to be: peers that are a moment behind
# are to hear of it too, and no more.
BRIEF = 10.0
LINGER = 3.0  # seconds that rank 0 gives the others to read a bad verdict
SAY_AFTER = 15.0  # seconds after which a rank says for whom it waits
HANDSHAKE = 30.0  # seconds for what listens there to answer as a store does: it may be another
_POLL_LEAST, _POLL_MOST = 0.01, 0.2  # seconds between two looks
PINGS = 3  # round trips to each node; the shortest counts


@dataclass(frozen=True)
class Meeting:
    """What came of it, the same on every rank. names: of nodes. report: for /health."""

    names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    report: dict[str, Any] = field(default_factory=dict)


def open_store(env: RankEnv, *, loopback: bool = False, patience: float = PATIENCE) -> Store:
    """The store by which this job's ranks meet, a space of its own for each attempt. ConfigError:
    its address or port cannot be used. Unmet: nobody answers there."""
    address = resolve_master(env, loopback)
    if env.hosts_store:
        _check_port(env)
    else:
        _wait_for_listener(env, address, patience)
    try:
        store = _tcp_store(env, address, patience)
        # torchrun's agents keep their store when they start all ranks again: each rank counts.
        attempt = store.add(f"moeserve/attempts/{env.rank}", 1)
    except RuntimeError as error:  # DistNetworkError and its like
        text = str(error).strip().splitlines()
        raise _unreachable(env, address, text[0] if text else type(error).__name__) from None
    return PrefixStore(f"moeserve/{attempt}", store)


def _tcp_store(env: RankEnv, address: str, patience: float) -> TCPStore:
    """RuntimeError: nobody answers there as a store does. In a thread of its own, since torch waits
    for ever for the first word of whoever listens (another job's web server)."""
    came: queue.SimpleQueue[TCPStore | RuntimeError] = queue.SimpleQueue()

    def connect() -> None:
        try:
            came.put(
                TCPStore(
                    address,
                    env.master_port,
                    env.size,
                    env.hosts_store,
                    timedelta(seconds=patience),
                    wait_for_workers=False,
                )
            )
        except RuntimeError as error:
            came.put(error)

    threading.Thread(target=connect, daemon=True, name="store").start()
    try:
        found = came.get(timeout=HANDSHAKE)
    except queue.Empty:
        text = f"what listens there does not answer as a store does, for {HANDSHAKE:g} s"
        raise RuntimeError(f"{text}; is it another program's port?") from None
    if isinstance(found, RuntimeError):
        raise found
    return found


def _wait_for_listener(env: RankEnv, address: str, patience: float) -> None:
    """Until something listens there: the store's own attempts print a stack trace each."""
    began, told = time.monotonic(), False
    deadline = began + patience
    while True:
        left = deadline - time.monotonic()
        try:
            socket.create_connection((address, env.master_port), max(0.1, min(left, 5.0))).close()
            return
        except OSError as error:
            why = error.strerror or str(error)
        if not told and time.monotonic() - began > SAY_AFTER:
            told = True
            say(
                f"rank {env.rank} on {env.here}: waiting for rank 0 at {env.master_addr}:"
                f"{env.master_port}: {why}"
            )
        if time.monotonic() + _POLL_MOST > deadline:
            raise _unreachable(env, address, f"{why}, for {patience:g} s")
        time.sleep(_POLL_MOST)


def _unreachable(env: RankEnv, address: str, why: str) -> Unmet:
    return Unmet(
        f"node {env.here}: the job's store at {env.master_addr}:{env.master_port} ({address}) "
        f"cannot be reached: {why}"
    )


def _check_port(env: RankEnv) -> None:
    """The store would say of a taken port only that it failed to listen."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", env.master_port))
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            why = "another process listens there" if taken else str(error.strerror)
            if env.launcher is Launcher.SLURM:
                remedy = "export MASTER_PORT=<a free one> before srun, or give srun --resv-ports"
            else:
                remedy = "choose another"
            text = f"node {env.here}: MASTER_PORT={env.master_port}: {why}; {remedy}"
            raise ConfigError([text]) from None


def meet(
    store: Store,
    env: RankEnv,
    mine: Facts,
    *,
    patience: float = PATIENCE,
    clock: Callable[[], float] = time.time,
) -> Meeting:
    """Collective over all ranks. ConfigError on every rank alike: what is wrong anywhere, and who
    did not come to hear of it. Unmet: who did not come, where nothing else is wrong."""
    store.set(_facts_key(env.rank), mine.to_json())
    # Rank 0 gives the verdict within BRIEF of this rank's facts, if they hold a problem.
    verdict_patience = BRIEF + 2.0 if mine.problems else 2 * patience
    try:
        if env.rank == 0:
            verdict = _preside(store, env, patience, clock)
            store.set("verdict", json.dumps(verdict))
            if verdict["missing"] or verdict["problems"]:
                _wait_until_heard(store, verdict["came"] - 1)
        else:
            if env.local_rank == 0:
                _wait(store, "all came", verdict_patience)
                if store.get("all came") == b"yes":
                    _answer_pings(store, env.node, patience, clock)
            _wait(store, "verdict", verdict_patience)
            verdict = json.loads(store.get("verdict"))
            store.add("heard", 1)
    except RuntimeError as error:
        if env.rank == 0:
            raise
        text = f"rank 0 has left the rendezvous or did not end it: {_first_line(error)}"
        if mine.problems:
            raise ConfigError([*mine.problems, text]) from None
        raise Unmet(text) from None
    if verdict["missing"]:
        if verdict["problems"]:
            raise ConfigError([*verdict["problems"], verdict["missing"]])
        raise Unmet(verdict["missing"])
    if verdict["problems"]:
        raise ConfigError(verdict["problems"])
    return Meeting(tuple(verdict["names"]), tuple(verdict["notes"]), verdict["report"])


def _preside(
    store: Store, env: RankEnv, patience: float, clock: Callable[[], float]
) -> dict[str, Any]:
    """On rank 0 -> the verdict."""
    everyone, missing, waited = _gather(store, env, patience)
    store.set("all came", "no" if missing else "yes")
    if missing:
        problems = list(dict.fromkeys(p for f in everyone for p in f.problems))
        text = _missing_text(env, everyone, missing, waited)
        return {"missing": text, "problems": problems, "came": len(everyone)}
    names = node_names(everyone)
    clocks = {node: _ping(store, node, patience, clock) for node in range(1, env.num_nodes)}
    notes = warnings(names, clocks)
    network = describe_network(everyone, names)
    return {
        "missing": "",
        "came": len(everyone),
        "names": names,
        "problems": judge(everyone, names),
        "notes": [network, *notes],
        "report": {
            "launcher": env.launcher.value,
            "network": network.removeprefix("network: "),
            "nodes": _nodes(everyone, names, clocks),
            "warnings": notes,
        },
    }


def alone(env: RankEnv) -> dict[str, Any]:
    """The report of a job of one rank, which meets nobody."""
    return {"launcher": env.launcher.value, "network": "", "nodes": [], "warnings": []}


def _nodes(
    everyone: Sequence[Facts], names: Sequence[str], clocks: dict[int, Clock]
) -> list[dict[str, Any]]:
    nodes = []
    for node, name in enumerate(names):
        ranks = [f.rank for f in everyone if f.node == node]
        first = everyone[ranks[0]]
        clock = clocks.get(node)
        nodes.append(
            {
                "name": name,
                "ranks": ranks,
                "interface": first.interface,
                "address": first.address,
                "clock_offset_seconds": None if clock is None else round(clock.offset, 4),
            }
        )
    return nodes


def _gather(store: Store, env: RankEnv, patience: float) -> tuple[list[Facts], list[int], float]:
    """The facts of all ranks in order, or of those that came, the numbers of the others and the
    seconds that they were waited for."""
    began, told, pause = time.monotonic(), False, _POLL_LEAST
    deadline = began + patience
    came: dict[int, Facts] = {}
    while True:
        before = len(came)
        for rank in range(env.size):
            if rank not in came and store.check([_facts_key(rank)]):
                came[rank] = Facts.from_json(store.get(_facts_key(rank)))
                if came[rank].problems:
                    deadline = min(deadline, time.monotonic() + BRIEF)
        absent = [r for r in range(env.size) if r not in came]
        now = time.monotonic()
        if not absent or now > deadline:
            return [came[r] for r in sorted(came)], absent, now - began
        if not told and now - began > SAY_AFTER:
            told = True
            say(f"waiting for {_ranks(env, absent)} to come to the rendezvous")
        pause = _POLL_LEAST if len(came) > before else min(1.5 * pause, _POLL_MOST)
        time.sleep(pause)


def _wait_until_heard(store: Store, count: int) -> None:
    """A bad verdict ends rank 0, and with it the store that the others read it from."""
    deadline = time.monotonic() + LINGER
    while store.add("heard", 0) < count and time.monotonic() < deadline:
        time.sleep(_POLL_LEAST)


def _wait(store: Store, key: str, patience: float) -> None:
    """RuntimeError: it is not there by then. The store's own wait would print what it does."""
    deadline, pause = time.monotonic() + patience, _POLL_LEAST
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise RuntimeError(f"no word within {patience:.0f} s")
        time.sleep(pause)
        pause = min(1.5 * pause, _POLL_MOST)


def _ranks(env: RankEnv, ranks: Sequence[int]) -> str:
    nodes = sorted({r // env.local_size for r in ranks})
    text = f"{'rank' if len(ranks) == 1 else 'ranks'} {spans(ranks)} of {env.size}"
    return f"{text} (node {spans(nodes)} of 0-{env.num_nodes - 1})" if env.num_nodes > 1 else text


def _missing_text(
    env: RankEnv, everyone: Sequence[Facts], missing: Sequence[int], waited: float
) -> str:
    hosts = list(dict.fromkeys(f.host for f in everyone))
    return (
        f"{_ranks(env, missing)} did not come to the rendezvous at {env.master_addr}:"
        f"{env.master_port} within {waited:.0f} s; {counted(len(everyone), 'rank')} came from "
        f"{', '.join(hosts[:8])}"
    )


# -- clocks -------------------------------------------------------------------------------------


def _ping(store: Store, node: int, patience: float, clock: Callable[[], float]) -> Clock:
    """How far the clock of a node is ahead of this one's, by the quickest of some round trips."""
    best: Clock | None = None
    for number in range(PINGS):
        began, before = clock(), time.monotonic()
        store.set(f"ping/{node}/{number}", "")
        store.wait([f"pong/{node}/{number}"], timedelta(seconds=patience))
        there = float(store.get(f"pong/{node}/{number}"))
        half = (time.monotonic() - before) / 2
        if best is None or half < best.error:
            best = Clock(there - (began + half), half)
    assert best is not None
    return best


def _answer_pings(store: Store, node: int, patience: float, clock: Callable[[], float]) -> None:
    for number in range(PINGS):
        key = f"ping/{node}/{number}"
        store.wait([key], timedelta(seconds=2 * patience))
        store.set(f"pong/{node}/{number}", repr(clock()))


def _facts_key(rank: int) -> str:
    return f"facts/{rank}"


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__
