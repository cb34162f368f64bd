"""When all ranks of a job start again, after how long, and when not."""

from __future__ import annotations

import json

import pytest

from launch import job
from launch.env import RESTARTS, RankEnv
from launch.failure import LOST_PEER, Failure
from launch.job import MOST_WAIT_SECONDS, STEADY_SECONDS, _Restarts

KILLED = Failure(2, -9, "killed by SIGKILL")


@pytest.fixture(autouse=True)
def said(monkeypatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(job, "say", lines.append)
    return lines


def test_waits_double_up_to_a_cap_and_end(said):
    policy = _Restarts(7)
    waits = [policy.wait_after(KILLED, 1.0) for _ in range(8)]
    assert waits == [1, 2, 4, 8, 16, MOST_WAIT_SECONDS, MOST_WAIT_SECONDS, None]
    assert said[:2] == ["rank 2 died: killed by SIGKILL", "restart 1 of 7 in 1 s"]
    assert said[-1] == "not started again: --max-restarts 7 are used up"


def test_a_steady_run_begins_anew_but_does_not_add_restarts():
    policy = _Restarts(3)
    waits = [policy.wait_after(KILLED, ran) for ran in (1, 1, STEADY_SECONDS + 1, 1)]
    assert waits == [1, 2, 1, None]


def test_nobody_restarts_by_default_nor_what_settings_or_files_are_to_blame_for(said):
    assert _Restarts(0).wait_after(KILLED, 1.0) is None
    assert _Restarts(3).wait_after(Failure(0, 2, "model.checkpoint: torn"), 1.0) is None
    assert said == []


def test_ranks_hear_how_often_and_why():
    policy = _Restarts(3)
    assert json.loads(policy.environment[RESTARTS]) == {"count": 0, "max": 3, "reasons": []}
    policy.wait_after(KILLED, 1.0)
    policy.wait_after(Failure(1, 1, "KeyError: 'x'\nmore"), 1.0)
    policy.wait_after(Failure(-1, LOST_PEER, "an agent"), 1.0)
    ours = {"RANK": "0", "WORLD_SIZE": "1", "MOESERVE_SUPERVISOR": "7"}
    env = RankEnv.read(ours | policy.environment)
    assert env is not None and env.restarts is not None
    assert env.restarts["count"] == 3
    assert env.restarts["reasons"] == [
        "rank 2 died: killed by SIGKILL",
        "rank 1: KeyError: 'x'",
        "an agent",
    ]
    assert _Restarts(0).environment == {}
