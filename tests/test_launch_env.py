"""A process's place in the job, as read from the environment."""

from __future__ import annotations

import pytest

from launch.env import RankEnv, threads_per_rank, usable_cores
from moeserve.errors import ConfigError

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_ERROR_FILE": "/e/error.json",
}  # fmt: skip


def test_outside_of_a_job():
    assert RankEnv.read({"HOME": "/"}) is None


def test_torchrun():
    env = RankEnv.read(TORCHRUN)
    assert env is not None
    assert (env.rank, env.size, env.local_rank, env.local_size) == (5, 8, 1, 4)
    assert (env.master_addr, env.master_port, env.num_nodes) == ("10.0.0.1", 29500, 2)
    assert str(env.error_file) == "/e/error.json"
    assert env.front_end is None and env.supervisor is None


def test_our_launcher_adds_its_own():
    more = {"MOESERVE_FRONTEND": "tcp://h:1", "MOESERVE_SUPERVISOR": "77", "MOESERVE_THREADS": "3"}
    env = RankEnv.read(TORCHRUN | more)
    assert env is not None
    assert (env.front_end, env.supervisor, env.threads) == ("tcp://h:1", 77, 3)


@pytest.mark.parametrize(
    "change, parts",
    [
        ({"RANK": None}, ["RANK is not set"]),
        ({"WORLD_SIZE": None}, ["WORLD_SIZE is not set"]),
        ({"RANK": "x", "MASTER_PORT": "-1"}, ["RANK='x'", "MASTER_PORT='-1'"]),
        ({"RANK": "8"}, ["RANK=8", "WORLD_SIZE=8"]),
        ({"MASTER_ADDR": None}, ["MASTER_ADDR is not set"]),
        ({"MASTER_PORT": None}, ["MASTER_PORT is not set"]),
        ({"MASTER_PORT": "0"}, ["MASTER_PORT='0': must be a port, 1 to 65535"]),
        ({"MASTER_PORT": "99999999"}, ["MASTER_PORT='99999999': must be a port"]),
        ({"LOCAL_WORLD_SIZE": "3"}, ["LOCAL_WORLD_SIZE=3"]),
        ({"LOCAL_RANK": "4"}, ["LOCAL_RANK=4"]),
        ({"LOCAL_WORLD_SIZE": "0", "LOCAL_RANK": "0"}, ["LOCAL_RANK=0"]),
    ],
)
def test_a_broken_environment_names_everything(change, parts):
    environ = {k: v for k, v in (TORCHRUN | change).items() if v is not None}
    with pytest.raises(ConfigError) as caught:
        RankEnv.read(environ)
    for part in parts:
        assert any(part in line for line in caught.value.problems), caught.value.problems


def test_threads():
    env = RankEnv.read(TORCHRUN)
    assert env is not None
    assert threads_per_rank(7, env) == 7
    assert threads_per_rank(None, env) == max(1, usable_cores() // 4)
    told = RankEnv.read(TORCHRUN | {"MOESERVE_THREADS": "3"})
    assert told is not None and threads_per_rank(None, told) == 3
