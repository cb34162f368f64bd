"""A rank's place as srun tells it: lists of nodes, shapes that are refused, whose word wins."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.env import Launcher, RankEnv
from launch.rank import check_size
from launch.slurm_env import (
    FIRST_PORT,
    NUM_PORTS,
    SlurmTask,
    expand_counts,
    expand_nodelist,
    port_of,
)
from moeserve.config import ServeConfig
from moeserve.errors import ConfigError

TASK = {
    "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_STEP_NODELIST": "h[0,7]",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_NTASKS": "8",
}  # fmt: skip


@pytest.mark.parametrize(
    "text, names",
    [
        ("h0", "h0"),
        ("h[0-3,7],gpu01", "h0 h1 h2 h3 h7 gpu01"),
        ("n[08-11]", "n08 n09 n10 n11"),
        ("rack[0-1]n[1-2]", "rack0n1 rack0n2 rack1n1 rack1n2"),
        ("a-b[2]-x.example,c", "a-b2-x.example c"),
        ("h[3,1]", "h3 h1"),
    ],
)
def test_lists_of_nodes(text, names):
    assert expand_nodelist(text) == names.split()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "h[",
        "h]",
        "h[]",
        "h[a]",
        "h[3-1]",
        "h[0-1",
        "a,,b",
        "h[[0]]",
        "h[0-999999999]",
        "a,",
        "[x]",
    ]
    + ["h[0-9999][0-9999]"],
)
def test_lists_that_are_none_are_named(text):
    with pytest.raises(ConfigError) as caught:
        expand_nodelist(text)
    assert repr(text) in str(caught.value)


NAMES = st.from_regex(r"[a-z]([a-z.-]{0,6}[a-z])?", fullmatch=True)


@given(st.lists(st.tuples(NAMES, st.integers(0, 3), st.sets(st.integers(0, 300), max_size=12))))
def test_what_is_put_together_comes_apart_again(groups):
    """Names with numbers, of some width, in ranges as Slurm writes them."""
    wanted, parts = [], []
    for name, width, numbers in groups:
        if not numbers:
            wanted.append(name)
            parts.append(name)
            continue
        runs: list[list[int]] = []
        for n in sorted(numbers):
            if runs and n == runs[-1][-1] + 1:
                runs[-1].append(n)
            else:
                runs.append([n])
        spelled = [
            f"{r[0]:0{width}}" if len(r) == 1 else f"{r[0]:0{width}}-{r[-1]:0{width}}" for r in runs
        ]
        parts.append(f"{name}[{','.join(spelled)}]")
        # A range has the width of its first number.
        wanted += [f"{name}{n:0{len(f'{r[0]:0{width}}')}}" for r in runs for n in r]
    if parts:
        assert expand_nodelist(",".join(parts)) == wanted


@given(st.text(alphabet="h0-9[],x ", max_size=20))
def test_any_text_gives_names_or_a_reason(text):
    try:
        assert all(expand_nodelist(text))
    except ConfigError as error:
        assert error.problems


def test_counts():
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]
    with pytest.raises(ConfigError, match="tasks per node '2x3'"):
        expand_counts("2x3")


def test_a_task_of_several_is_a_rank():
    env = RankEnv.read(TASK)
    assert env is not None
    assert (env.rank, env.size, env.local_rank, env.local_size) == (5, 8, 1, 4)
    assert (env.num_nodes, env.node, env.here) == (2, 1, "h7")
    assert (env.master_addr, env.master_port) == ("h0", port_of(77, 0))
    assert env.launcher is Launcher.SLURM and env.one_terminal and not env.agent_store
    assert env.error_file is None and env.supervisor is None and env.threads is None


def test_rank_0_hosts_the_store():
    first = RankEnv.read(TASK | {"SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"})
    assert first is not None and first.hosts_store


@pytest.mark.parametrize(
    "more, port",
    [
        ({"SLURM_STEP_RESV_PORTS": "12003-12006"}, 12003),
        ({"MASTER_PORT": "29511", "SLURM_STEP_RESV_PORTS": "12003-12006"}, 29511),
    ],
)
def test_ports_that_were_set_aside_or_given(more, port):
    env = RankEnv.read(TASK | more)
    assert env is not None and env.master_port == port


def test_an_address_that_a_script_gave_wins():
    env = RankEnv.read(TASK | {"MASTER_ADDR": "10.0.0.9", "OMP_NUM_THREADS": "3"})
    assert env is not None and (env.master_addr, env.threads) == ("10.0.0.9", 3)


@given(st.integers(0, 2**31), st.integers(0, 1000))
def test_ports_lie_below_those_of_the_system(job, step):
    assert FIRST_PORT <= port_of(job, step) < FIRST_PORT + NUM_PORTS <= 32768
    assert port_of(job, step) != port_of(job, step + 1)


@pytest.mark.parametrize(
    "gone",
    [
        {"SLURM_STEP_NUM_TASKS"},  # a batch script: it has the job's variables and SLURM_PROCID=0
        {"SLURM_STEP_ID"},
    ],
)
def test_a_batch_script_is_no_rank(gone):
    assert RankEnv.read({k: v for k, v in TASK.items() if k not in gone}) is None


def test_a_step_of_one_task_starts_its_own_ranks():
    assert RankEnv.read(TASK | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) is None


def test_torchrun_within_srun_wins():
    """Its agent is task 1 of 2; its rank 3 of 4 is no task."""
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    torchrun |= {"MASTER_ADDR": "h0", "MASTER_PORT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    env = RankEnv.read(TASK | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"} | torchrun)
    assert env is not None
    assert (env.rank, env.size, env.local_size, env.launcher) == (3, 4, 2, Launcher.TORCHRUN)
    assert env.agent_store and not env.hosts_store and env.one_terminal
    alone = RankEnv.read(torchrun)
    assert alone is not None and not alone.one_terminal


@pytest.mark.parametrize(
    "change, parts",
    [
        ({"SLURM_PROCID": None, "SLURM_LOCALID": "x"}, ["SLURM_PROCID is not set", "LOCALID='x'"]),
        ({"SLURM_STEP_NODELIST": "h[0"}, ["SLURM_STEP_NODELIST: list of nodes 'h[0'"]),
        ({"SLURM_STEP_TASKS_PER_NODE": "5,3"}, ["--ntasks-per-node", "5,3"]),
        ({"SLURM_STEP_TASKS_PER_NODE": "4"}, ["does not fit SLURM_STEP_NUM_TASKS=8"]),
        ({"SLURM_PROCID": "3"}, ["SLURM_PROCID=3 is task 1 of node 1", "--distribution=block"]),
        ({"SLURM_STEP_RESV_PORTS": "x"}, ["SLURM_STEP_RESV_PORTS='x'"]),
        ({"MASTER_PORT": "99999"}, ["MASTER_PORT='99999'"]),
    ],
)
def test_what_cannot_be_served_is_named(change, parts):
    environ = {k: v for k, v in (TASK | change).items() if v is not None}
    with pytest.raises(ConfigError) as caught:
        RankEnv.read(environ)
    for part in parts:
        assert part in str(caught.value)


def test_a_number_of_ranks_that_contradicts_the_tasks():
    env = RankEnv.read(TASK)
    assert env is not None
    config = ServeConfig.load(None, {"parallel": {"ep": "16"}})
    with pytest.raises(ConfigError) as caught:
        check_size(config, env)
    text = str(caught.value)
    assert "parallel.ep=16" in text and "8 tasks" in text and "--ntasks 16" in text
    assert "torchrun --nproc-per-node 8" in text
    assert check_size(ServeConfig(), env).parallel.ep == 8


def test_tasks_say_how_many_cores_they_have(monkeypatch):
    monkeypatch.setattr("launch.env.usable_cores", lambda: 6)
    for cpus, threads in (("4", 4), ("16", 6)):
        env = RankEnv.read(TASK | {"SLURM_CPUS_PER_TASK": cpus})
        assert env is not None and env.threads == threads


def test_outside_of_slurm():
    assert SlurmTask.read({"HOME": "/"}) is None
