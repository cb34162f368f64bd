"""Several machines for real: network namespaces with addresses and names of their own, torchrun
across them, EP = 4. What is answered, who is named when a rank dies, what is refused at once.

Needs root and `ip`. Part of the usual tests: two machines, once. All of it: `make test-namespaces`
(four machines, a delay on the wire, differing checkpoints and flags, srun's variables).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from launched import LIMIT, ROOT, Running
from namespaces import Machines, why_not

from moeserve.llm import LLM
from moeserve.request import SamplingParams

pytestmark = pytest.mark.dist
TINY = ROOT / "checkpoints" / "tiny"
PORT, STORE = "8000", "29400"
PROMPT, TOKENS = "In the beginning", 12
SOON = 20  # seconds from a fault to the end of all, on a busy machine; alone it takes 3 to 5

REASON = why_not()
needs_namespaces = pytest.mark.skipif(REASON is not None, reason=f"namespaces: {REASON}")
in_full = pytest.mark.namespaces  # left out by conftest.py unless asked for: they take minutes


class World:
    """Machines, and what runs on them; httpx without the proxies of this one."""

    def __init__(self, tmp: Path, num: int, delay: float = 0.0) -> None:
        self._tmp = tmp
        self.machines = Machines(num, tmp, delay)
        self.running: list[Running] = []
        self.http = httpx.Client(
            base_url=f"http://{self.machines.address(0)}:{PORT}", trust_env=False, timeout=LIMIT
        )

    def start(self, i: int, *command: str, **env: str) -> Running:
        state = {"XDG_STATE_HOME": str(self._tmp / "state"), "TORCH_CPP_LOG_LEVEL": "ERROR"}
        job = Running(
            self.machines.command(i, *command),
            self._tmp / f"tmp{len(self.running)}",
            self.machines.env | state | env,
        )
        self.running.append(job)
        return job

    def torchrun(self, i: int, per_node: int, *serve: str) -> Running:
        m = self.machines
        flags = ["--nnodes", str(m.num), "--nproc-per-node", str(per_node), "--rdzv-id", "t"]
        flags += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{m.address(0)}:{STORE}"]
        flags += ["--local-addr", m.address(i), "-m", "moeserve", "serve"]
        return self.start(i, "-m", "torch.distributed.run", *flags, *serve)

    def answer(self) -> str:
        asked = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        return str(self.http.post("/v1/completions", json=asked).json()["choices"][0]["text"])

    def wait(self, done: Callable[[], bool], seconds: float = LIMIT) -> float:
        """-> how long it took."""
        began = time.monotonic()
        while not done():
            assert time.monotonic() - began < seconds, self.text
            time.sleep(0.05)
        return time.monotonic() - began

    def wait_until_ready(self) -> None:
        def ready() -> bool:
            assert all(job.process.poll() is None for job in self.running), self.text
            return "ready: " in self.text

        self.wait(ready)

    def wait_for_all(self, seconds: float = LIMIT) -> float:
        return self.wait(lambda: all(j.process.poll() is not None for j in self.running), seconds)

    @property
    def text(self) -> str:
        return "".join(f"--- {i}\n{job.text}" for i, job in enumerate(self.running))

    def close(self) -> None:
        self.http.close()
        for job in self.running:
            job.close()
        self.machines.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(num: int, delay: float = 0.0) -> World:
        made.append(World(tmp_path, num, delay))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture(scope="module")
def one_rank() -> str:
    """What one rank answers."""
    with LLM(TINY, kv_tokens=2048, quiet=True) as llm:
        sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        return llm.generate(PROMPT, sampling)[0].text


SERVE = [str(TINY), "--port", PORT, "--host", "0.0.0.0", "--kv-tokens", "4096"]


@needs_namespaces
def test_two_machines_serve_and_name_the_rank_that_dies(world, one_rank):
    here = world(2)
    jobs = [here.torchrun(i, 2, *SERVE) for i in range(2)]
    here.wait_until_ready()
    address = here.machines.address(0)
    assert f"moeserve: ready: http://{address}:{PORT}" in jobs[0].text
    assert here.answer() == one_rank, "the same tokens as on one rank"
    health = here.http.get("/health").json()
    launch = health["launch"]
    assert [x["ranks"] for x in launch["nodes"]] == [[0, 1], [2, 3]]
    assert [x["name"] for x in launch["nodes"]] == [here.machines.name(i) for i in range(2)]
    assert [x["interface"] for x in launch["nodes"]] == ["eth0", "eth0"]
    assert f"the way to rank 0's node {address}" in launch["network"]
    assert [r["host"] for r in health["ranks"]] == [here.machines.name(i // 2) for i in range(4)]

    asked = {"prompt": PROMPT, "max_tokens": 1500, "temperature": 0, "ignore_eos": True}
    with here.http.stream("POST", "/v1/completions", json=asked | {"stream": True}) as stream:
        lines = stream.iter_lines()
        next(lines)
        os.kill(health["ranks"][3]["pid"], signal.SIGKILL)
        rest = "\n".join(lines)
    assert '"finish_reason":"error"' in rest and "rank 3 died" in rest
    here.wait_for_all(SOON)
    who = f"moeserve: rank 3 on {here.machines.name(1)} died: "
    for job in jobs:
        said = [x for x in job.text.splitlines() if x.startswith(who)]
        assert len(said) == 1 and said[0].endswith("; 3 other ranks ended because of it"), job.text
        assert "gloo" not in job.text.partition("ready: ")[2]
    assert "Root Cause" in jobs[0].text and "ended because of it)" in jobs[0].text


@needs_namespaces
@in_full
def test_a_checkpoint_and_a_flag_that_differ_are_refused_by_name(world, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(TINY, other, ignore=shutil.ignore_patterns("heldout"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    here = world(2)
    here.torchrun(0, 1, *SERVE)
    here.torchrun(1, 1, str(other), *SERVE[1:-1], "2048")
    here.wait_for_all()
    name, first = here.machines.name(1), here.machines.name(0)
    for job in here.running:
        assert f"moeserve: node {name}: CHECKPOINT" in job.text, job.text
        assert f"is not what node {first} has" in job.text and "config.json differs" in job.text
        assert f"node {name}: --kv-tokens 2048, but 4096 on node {first}" in job.text or (
            f"node {name}: --kv-tokens" in job.text
        )
        assert "weights" not in job.text and "HTTP on" not in job.text


@needs_namespaces
@in_full
def test_a_checkpoint_that_is_missing_on_one_machine(world, tmp_path):
    here = world(2)
    here.torchrun(0, 1, *SERVE)
    here.torchrun(1, 1, str(tmp_path / "nowhere"), *SERVE[1:])
    here.wait_for_all()
    for job in here.running:
        assert f"moeserve: node {here.machines.name(1)}: CHECKPOINT" in job.text, job.text
        assert "no such folder" in job.text and "weights" not in job.text


@needs_namespaces
@in_full
def test_four_machines_with_two_milliseconds_between_them(world, one_rank):
    here = world(4, delay=0.002)
    for i in range(4):
        here.torchrun(i, 1, *SERVE)
    here.wait_until_ready()
    began = time.monotonic()
    assert here.answer() == one_rank
    # 12 tokens, each with two all-to-alls in several layers: the wire is really that long.
    assert time.monotonic() - began > TOKENS * 2 * 0.004
    nodes = here.http.get("/health").json()["launch"]["nodes"]
    assert [x["ranks"] for x in nodes] == [[0], [1], [2], [3]]
    assert all(abs(x["clock_offset_seconds"]) < 0.5 for x in nodes[1:])


def task(here: World, number: int, per_node: int, *serve: str, **more: str) -> Running:
    """A task as srun would start it."""
    node, num = number // per_node, here.machines.num
    names = [here.machines.name(i) for i in range(num)]
    slurm = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(num * per_node),
        "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x{num})",
        "SLURM_STEP_NODELIST": f"{names[0][:-1]}[0-{num - 1}]",
        "SLURM_PROCID": str(number),
        "SLURM_LOCALID": str(number % per_node),
        "SLURM_NODEID": str(node),
    }
    return here.start(node, "-m", "moeserve", "serve", *serve, **slurm, **more)


@needs_namespaces
@in_full
def test_tasks_of_srun_are_ranks_and_end_with_the_first(world, one_rank):
    here = world(2)
    for number in range(4):
        task(here, number, 2, *SERVE)
    here.wait_until_ready()
    assert here.answer() == one_rank
    os.kill(here.http.get("/health").json()["ranks"][2]["pid"], signal.SIGKILL)
    here.wait_for_all(SOON)
    assert here.text.count("3 other ranks ended because of it") == 1, here.text
    assert f"moeserve: rank 2 on {here.machines.name(1)} died: " in here.text
    codes = [job.process.returncode for job in here.running]
    assert codes == [75, 75, -9, 75], here.text


@needs_namespaces
@in_full
def test_what_contradicts_srun_or_would_use_loopback_is_said_once(world):
    here = world(2)
    for number in range(2):
        task(here, number, 1, *SERVE, "--ep", "4", MASTER_ADDR="127.0.0.1")
    here.wait_for_all()
    for job in here.running:
        assert "moeserve: --ep 4: srun started 2 tasks" in job.text
        assert "MASTER_ADDR='127.0.0.1' is this machine itself" in job.text, job.text
        assert job.process.returncode == 2
