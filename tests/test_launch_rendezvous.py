"""Ranks meet, as threads over a store: one verdict for all, clocks, who is missing, last words."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from torch.distributed import HashStore, PrefixStore

from dispatch.step_guard import StepBroken
from launch import last_words, rendezvous
from launch.env import Launcher, RankEnv
from launch.last_words import LastWords
from launch.node_facts import Facts
from launch.rendezvous import Meeting, meet, open_store
from moeserve.errors import ConfigError, Unmet


def env_of(rank: int, nodes: int = 2, per_node: int = 2, **more) -> RankEnv:
    return RankEnv(rank, nodes * per_node, rank % per_node, per_node, "127.0.0.1", 1, **more)


def facts_of(env: RankEnv, problems: list[str] | None = None) -> Facts:
    host = f"h{env.node}"
    return Facts(
        env.rank, env.node, host, host, "eth0", f"10.0.0.{env.node}", problems=problems or []
    )


def on_all(size: int, body: Callable[[int], object]) -> list[object]:
    """body(rank) in a thread each -> what it gave or raised, by rank."""
    results: list[object] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = body(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def test_all_hear_the_same_and_clocks_are_measured():
    store = HashStore()

    def body(rank: int) -> Meeting:
        env = env_of(rank)
        clock = (lambda: time.time() + 7) if env.node else time.time
        return meet(store, env, facts_of(env), clock=clock)

    results = on_all(4, body)
    assert all(r == results[0] for r in results), results
    first = results[0]
    assert isinstance(first, Meeting) and first.names == ("h0", "h1")
    assert first.notes[0].startswith("network: h0 eth0 10.0.0.0, h1")
    assert "node h1: its clock is 7.0 s ahead of node h0's" in first.notes[1]
    nodes = first.report["nodes"]
    assert nodes[1]["ranks"] == [2, 3] and nodes[0]["clock_offset_seconds"] is None
    assert nodes[1]["clock_offset_seconds"] == pytest.approx(7, abs=1)


def test_a_problem_anywhere_is_everybodys():
    store = HashStore()

    def body(rank: int) -> Meeting:
        env = env_of(rank)
        return meet(store, env, facts_of(env, ["no such folder"] if env.node else []))

    results = on_all(4, body)
    assert all(isinstance(r, ConfigError) for r in results), results
    assert {str(r) for r in results} == {"node h1: no such folder"}


def test_rank_0_leaves_when_all_have_heard_what_is_wrong():
    store, left = HashStore(), threading.Event()

    def body(rank: int) -> None:
        env = env_of(rank, nodes=1)
        try:
            meet(store, env, facts_of(env, ["odd"]))
        finally:
            if rank == 0:
                assert store.add("heard", 0) == 1, "the store must not go before rank 1 has read it"
                left.set()

    on_all(2, body)
    assert left.is_set()


def test_who_does_not_come_is_named(capfd, monkeypatch):
    monkeypatch.setattr(rendezvous, "SAY_AFTER", 0.0)
    store = HashStore()

    def body(rank: int) -> object:
        env = env_of(rank, nodes=3)
        if env.node == 2:
            return None
        return meet(store, env, facts_of(env), patience=0.6)

    results = on_all(6, body)
    assert {type(r) for r in results[:4]} == {Unmet}, results
    text = str(results[0])
    assert "ranks 4-5 of 6 (node 2 of 0-2) did not come" in text and "from h0, h1" in text
    assert "waiting for ranks" in capfd.readouterr().err


def test_a_known_problem_waits_briefly_for_who_does_not_come(capfd, monkeypatch):
    monkeypatch.setattr(rendezvous, "BRIEF", 0.3)
    port = free_port()

    def body(rank: int) -> object:
        env = replace(env_of(rank, nodes=1, per_node=4), master_port=port)
        if rank == 3:
            return None
        store = PrefixStore("meet", open_store(env, patience=5))
        return meet(store, env, facts_of(env, ["odd"] if rank == 1 else []))

    results = on_all(4, body)
    assert {type(r) for r in results[:3]} == {ConfigError}, results
    first, missing = str(results[2]).splitlines()
    assert first == "odd" and missing.startswith("rank 3 of 4 did not come"), results
    assert "[c10d]" not in capfd.readouterr().err, "a wait must not print the store's own warnings"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_store_of_rank_0_and_a_space_of_its_own_for_each_attempt():
    port = free_port()
    host = replace(env_of(0, nodes=1), master_port=port)
    store = open_store(host)
    other = open_store(replace(env_of(1, nodes=1), master_port=port))
    store.set("a", "1")
    assert other.get("a") == b"1"
    again = open_store(replace(env_of(1, nodes=1), master_port=port))
    assert not again.check(["a"]), "torchrun's agents keep their store when ranks start again"


def test_a_taken_port_is_named_with_its_node():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        env = replace(env_of(0, nodes=1), master_port=port, launcher=Launcher.SLURM, node_name="h7")
        with pytest.raises(ConfigError) as caught:
            open_store(env)
    text = str(caught.value)
    assert f"node h7: MASTER_PORT={port}: another process listens there" in text
    assert "--resv-ports" in text


def test_nobody_at_the_store(capfd):
    with pytest.raises(Unmet, match="the job's store at 127.0.0.1:.*cannot be reached"):
        open_store(replace(env_of(1, nodes=1), master_port=free_port()), patience=0.3)
    assert capfd.readouterr().err == ""


def test_what_answers_at_the_stores_port_may_be_no_store(monkeypatch, capfd):
    monkeypatch.setattr("launch.rendezvous.HANDSHAKE", 0.5)
    with socket.socket() as mute:  # takes connections, says nothing
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        env = replace(env_of(1, nodes=1), master_port=mute.getsockname()[1])
        began = time.monotonic()
        with pytest.raises(Unmet, match="the job's store at 127.0.0.1:.*cannot be reached"):
            open_store(env)
    assert time.monotonic() - began < 30


def test_a_rank_says_that_it_waits_for_rank_0(monkeypatch, capfd):
    monkeypatch.setattr("launch.rendezvous.SAY_AFTER", 0.1)
    with pytest.raises(Unmet):
        open_store(replace(env_of(1, nodes=1), master_port=free_port()), patience=1.0)
    told = capfd.readouterr().err
    assert told.count("waiting for rank 0 at 127.0.0.1") == 1 and "rank 1 on " in told


# ---- last words --------------------------------------------------------------------------------


@pytest.fixture
def said(monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr(last_words, "say", lines.append)
    return lines


def mourners(ranks: list[int], **more) -> list[LastWords]:
    store = HashStore()
    words = [LastWords(PrefixStore("x", store), env_of(rank, **more)) for rank in ranks]
    for each in words:
        each.names = ("h0", "h1")
    return words


LOST = RuntimeError("Connection closed by peer")


def test_the_first_cause_is_said_once_on_one_terminal(said):
    words = mourners([0, 1, 2], one_terminal=True)
    words[0].give(3, "its connection was lost")  # as the front end does
    assert words[2].give(2, "too late") == words[0].known()
    on_all(3, lambda rank: words[rank].mourn(LOST))
    assert said == ["rank 3 on h1 died: its connection was lost; 3 other ranks ended because of it"]


def test_each_node_with_a_terminal_of_its_own_says_it_unless_the_rank_there_has(said):
    words = mourners([0, 1, 2])
    cause = words[0].give(3, "KeyError: 'x'", said=True)
    assert cause is not None and cause.who == "rank 3 on h1"
    on_all(3, lambda rank: words[rank].mourn(LOST))
    assert said == ["rank 3 on h1 died: KeyError: 'x'; 3 other ranks ended because of it"]


def test_what_a_rank_said_itself_is_not_said_again_on_one_terminal(said):
    words = mourners([0, 1, 2], one_terminal=True)
    words[0].give(3, "KeyError: 'x'", said=True)
    on_all(3, lambda rank: words[rank].mourn(LOST))
    assert said == []


def test_a_survivor_on_its_machine_knows_a_killed_rank(said):
    (words,) = mourners([2], one_terminal=True)
    lost = StepBroken(3, None)
    lost.__cause__ = LOST
    words.mourn(lost)
    assert said[0].startswith("rank 3 on h1 died: its process ended without a word; 3 other")


def test_no_cause_is_said_as_such(said, monkeypatch):
    (words,) = mourners([2], one_terminal=True)
    monkeypatch.setattr(words, "wait", lambda: None)
    words.mourn(LOST)
    assert said == ["a rank was lost; which one was first could not be found out"]
