"""What does not fit between nodes: each problem once, with the node that has it."""

from __future__ import annotations

import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from launch.env import RankEnv
from launch.interface import Interface
from launch.node_facts import (
    Clock,
    Facts,
    checkpoint_facts,
    describe_network,
    judge,
    look,
    node_names,
    room_problems,
    spans,
    warnings,
)
from moeserve.config import ServeConfig

TINY = Path(__file__).parents[1] / "checkpoints" / "tiny"
VERSIONS = {"moeserve": "1", "torch": "2.13", "python": "3.11.7"}


def job(nodes: int = 2, per_node: int = 2, **of_rank: dict[str, object]) -> list[Facts]:
    """Facts of all ranks, alike but for what `r3={...}` says of rank 3."""
    facts = [
        Facts(
            rank=rank,
            node=rank // per_node,
            host=f"h{rank // per_node}",
            machine=f"m{rank // per_node}",
            interface="eth0",
            address=f"10.0.0.{rank // per_node}",
            why="the way to rank 0",
            usable="usable here: eth0",
            versions=VERSIONS,
            folder="/c",
            checkpoint={"config.json": "aa", "s.safetensors": "5 bytes"},
            settings={"schedule.token_budget": 512},
        )
        for rank in range(nodes * per_node)
    ]
    for name, change in of_rank.items():
        facts[int(name[1:])] = replace(facts[int(name[1:])], **change)
    return facts


def judged(facts: list[Facts]) -> list[str]:
    return judge(facts, node_names(facts))


def test_alike_is_fine_and_travels():
    facts = job()
    assert judged(facts) == []
    assert Facts.from_json(facts[3].to_json()) == facts[3]


def test_problems_of_a_rank_a_node_and_all():
    own = {"problems": ["odd"]}
    assert judged(job(r3=own)) == ["node h1 (rank 3): odd"]
    assert judged(job(r2=own, r3=own)) == ["node h1: odd"]
    assert judged(job(r2=own)) == ["node h1: odd"], "its first rank looks for all of a node"
    assert judged(job(r0=own, r1=own, r2=own, r3=own)) == ["odd"]
    assert judged(job(nodes=1, r1=own)) == ["rank 1: odd"]


def test_all_problems_of_all_nodes_at_once():
    facts = job(
        nodes=3,
        r2={"checkpoint": {"config.json": "bb", "s.safetensors": "6 bytes", "t.safetensors": "1"}},
        r4={"versions": VERSIONS | {"torch": "2.14"}, "problems": ["no such folder"]},
        r5={"problems": ["no such folder"]},
    )
    found = judged(facts)
    assert len(found) == 3
    assert found[0] == "node h2: no such folder"
    assert found[1].startswith("node h1: model.checkpoint='/c': is not what node h0 has in '/c': ")
    for part in ("config.json differs", "6 bytes, not 5 bytes", "t.safetensors is there only"):
        assert part in found[1]
    assert found[2] == "node h2: torch 2.14, but 2.13 on node h0: all nodes need the same"


@pytest.mark.parametrize(
    "change, problem",
    [
        ({"versions": VERSIONS | {"moeserve": "2"}}, "moeserve 2, but 1 on node h0"),
        ({"versions": VERSIONS | {"python": "3.12.1"}}, "python 3.12, but 3.11 on node h0"),
        ({"versions": VERSIONS | {"python": "3.11.9"}}, None),
        ({"commit": "abc"}, None),  # rank 0's node is no checkout
        ({"checkpoint": None}, None),  # which then is a problem of its own
    ],
)
def test_versions(change, problem):
    found = judged(job(r2=change))
    assert bool(found) == bool(problem)
    assert not problem or problem in found[0]


def test_commits():
    facts = [replace(f, commit="abc" if f.node else "def") for f in job()]
    assert judged(facts) == [
        "node h1: moeserve is of commit abc, but def on node h0: all nodes need the same"
    ]


def test_flags_that_differ():
    other = {"settings": {"schedule.token_budget": 256}}
    assert judged(job(r2=other, r3=other)) == [
        "node h1: schedule.token_budget=256, but 512 on node h0: all ranks need the same"
    ]
    assert judged(job(nodes=1, r1=other)) == [
        "rank 1: schedule.token_budget=256, but 512 on rank 0: all ranks need the same"
    ]


def test_settings_of_one_machine_may_differ():
    env, interface = RankEnv(0, 2, 0, 1, "h0", 1), Interface("lo", "127.0.0.1", "")
    sections = ({"parallel": {"interface": "a"}}, {"engine": {"threads": 3}, "server": {"port": 1}})
    a, b = (look(env, ServeConfig.load(None, s), interface) for s in sections)
    assert a.settings == b.settings and "parallel.interface" not in a.settings
    assert a.machine and a.versions["torch"]


def test_loopback_between_machines_is_refused_and_within_one_is_not():
    lo = {"interface": "lo", "address": "127.0.0.1", "why": "GLOO_SOCKET_IFNAME says so"}
    found = judged(job(r2=lo, r3=lo))
    assert len(found) == 1 and found[0].startswith("node h1: parallel.interface='lo'")
    assert "usable here: eth0" in found[0]
    assert any(p.startswith("node h0: ") for p in judged(job(r0=lo, r1=lo)))
    same = [replace(f, machine="m", **lo) for f in job()]
    assert judged(same) == []


def test_ranks_of_one_node_that_are_on_two_machines():
    facts = job(r1={"machine": "other", "host": "h9", "local_size_given": False})
    assert (
        "rank 0 on h0 and rank 1 on h9 were taken to be on one node (LOCAL_WORLD_SIZE"
        in (judged(facts)[0])
    )


def test_nodes_of_one_name_are_told_apart():
    assert node_names([replace(f, host="vm") for f in job()]) == ["vm#0", "vm#1"]
    assert node_names(job()) == ["h0", "h1"]


def test_clocks_are_a_word_only_where_they_are_surely_apart():
    clocks = {1: Clock(0.8, 0.1), 2: Clock(-0.9, 0.5), 3: Clock(-7.0, 0.01)}
    said = warnings(["h0", "h1", "h2", "h3"], clocks)
    assert len(said) == 2
    assert "node h1: its clock is 0.8 s ahead of node h0's (measured to 100 ms)" in said[0]
    assert "node h3: its clock is 7.0 s behind" in said[1]


def test_the_network_is_one_line():
    facts = job()
    assert describe_network(facts, node_names(facts)) == (
        "network: h0 eth0 10.0.0.0, h1 eth0 10.0.0.1 (the way to rank 0)"
    )
    many = job(nodes=40, per_node=1)
    line = describe_network(many, node_names(many))
    assert "35 more" in line and "h39" in line and len(line) < 200


def test_a_checkpoints_facts():
    facts = checkpoint_facts(ServeConfig.load(None, {"model": {"checkpoint": TINY}}))
    assert facts is not None
    assert len(facts["config.json"]) == 16
    assert [v for k, v in facts.items() if k.startswith("model-")][0].endswith(" bytes")
    assert checkpoint_facts(ServeConfig()) is None


def test_too_little_room(monkeypatch):
    memory, disk = namedtuple("M", "available"), namedtuple("D", "free")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory(10**9))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk(64 << 20))
    assert room_problems(4) == []
    found = room_problems(8)
    assert "1.0 GB of free memory are too little for 8 ranks" in found[0]
    assert "/dev/shm has 67 MB free for 8 ranks" in found[1] and "--shm-size" in found[1]


def test_spans():
    assert spans([5, 0, 1, 2]) == "0-2, 5" and spans([7]) == "7"
