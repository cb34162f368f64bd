"""`moeserve launch slurm` on a Slurm that really runs: two nodes with names and addresses of their
own on this machine (scripts/slurm_world.sh). As root: `make test-slurm`; no part of `make test`.

What is tested is what the submitting terminal says, and that nothing is left behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORLD = ROOT / "scripts" / "slurm_world.sh"
LIMIT = 150  # seconds for anything that is waited for; reached only by failures
SOON = 20  # seconds from a fault to the words and the end, on a busy machine

pytestmark = pytest.mark.timeout(400)


class World:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = os.environ | {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "XDG_STATE_HOME": str(folder / "home"),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }

    def on(self, node: str, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command where jobs of that node run."""
        whole = ["bash", str(WORLD), "in", str(self.folder), node, *command]
        return subprocess.run(whole, check=check, capture_output=True, text=True)

    def run(self, *command: str, **more: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, env=self.env, capture_output=True, text=True, timeout=LIMIT, cwd=ROOT
        )

    def moeserve(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, "-m", "moeserve", *arguments)

    def queue(self) -> str:
        return self.run("squeue", "-h", "-o", "%i %T").stdout.strip()


class Terminal:
    """A `moeserve launch slurm` that is being watched."""

    def __init__(self, world: World, *arguments: str) -> None:
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "moeserve", "launch", "slurm", *arguments],
            env=world.env,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(self.process.stdout)

    @property
    def text(self) -> str:
        return "".join(self.lines)

    def wait_for(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT
        while not done():
            assert self.process.poll() is None, f"ended: {self.text}"
            assert time.monotonic() < deadline, self.text
            time.sleep(0.1)

    def url(self) -> str:
        self.wait_for(lambda: "ready after" in self.text)
        line = next(x for x in self.lines if "ready after" in x)
        return line.split(": ")[-1].strip()

    def end(self, within: float = LIMIT) -> int:
        code = self.process.wait(within)
        self._reader.join()
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._reader.join()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    if os.geteuid() != 0 or shutil.which("slurmctld") is None:
        pytest.skip("needs root and Slurm: make test-slurm")
    folder = tmp_path_factory.mktemp("slurm")
    folder.chmod(0o755)
    try:
        subprocess.run(["bash", str(WORLD), "up", str(folder), "2"], check=True, timeout=120)
        yield World(folder)
    finally:
        subprocess.run(["bash", str(WORLD), "down", str(folder)], timeout=60)


@pytest.fixture
def start(world: World, tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    started: list[Terminal] = []

    def run(*words: str, options: tuple[str, ...] = ("--submit",)) -> Terminal:
        sizes = ("--nodes", "2", "--ranks-per-node", "2", "--output", str(tmp_path / "job"))
        started.append(Terminal(world, *sizes, *options, "--", "serve", *words))
        return started[-1]

    yield run
    for terminal in started:
        terminal.close()
    world.run("scancel", "--user=root")
    deadline = time.monotonic() + 60
    while world.queue():
        assert time.monotonic() < deadline, world.queue()
        time.sleep(0.2)


@pytest.fixture(scope="module")
def checkpoint(world: World) -> Path:
    """A copy of the bundled one, whose nodes can be given something else."""
    folder = world.folder / "tiny"
    shutil.copytree(ROOT / "checkpoints" / "tiny", folder)
    return folder


def ask(url: str, **more: object) -> dict:
    body = {"model": "tiny", "prompt": "Psalms 23", "temperature": 0, "max_tokens": 12} | more
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def no_ranks_left() -> bool:
    """Neither ranks nor a front end run any more on this machine, in whatever namespace."""
    mark = b"MOESERVE_STAGES=" + b"/"
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        with contextlib.suppress(OSError):
            if b"SLURM_JOB_ID" in (env := (folder / "environ").read_bytes()) and mark in env:
                return False
    return True


def wait_until_empty() -> None:
    deadline = time.monotonic() + SOON
    while not no_ranks_left():
        assert time.monotonic() < deadline, "ranks are left behind"
        time.sleep(0.2)


def test_submit_serve_answer_status_stop(world, start, checkpoint):
    terminal = start(str(checkpoint), "--port", "0")
    url = terminal.url()
    for node in ("node0 (ranks 0-1)", "node1 (ranks 2-3)"):
        assert f"{node}: ready" in terminal.text
    alone = world.moeserve(
        "generate", str(checkpoint), "--prompt", "Psalms 23", "--max-tokens", "12", "--json"
    )
    answer = ask(url)["choices"][0]["text"]
    assert answer in json.loads(alone.stdout)["outputs"][0]["text"], "EP 4 on two nodes, and EP 1"

    report = json.loads(world.moeserve("status", "--json").stdout)
    assert report["kind"] == "slurm" and report["state"] == "ready" and report["url"] == url
    assert [n["host"] for n in report["nodes"]] == ["node0", "node1"]
    assert report["num_ranks"] == 4 and report["slurm"]["state"] == "RUNNING"
    shown = world.moeserve("status", report["id"])
    assert shown.returncode == 0 and "node1" in shown.stdout and url in shown.stdout

    stopped = world.moeserve("stop", report["id"])
    assert stopped.returncode == 0, stopped.stderr
    assert terminal.end(SOON) == 0
    assert "has ended: stopped" in terminal.text
    assert "no job of yours" in world.moeserve("status").stdout
    wait_until_empty()


def test_a_checkpoint_that_differs_on_one_node(world, start, checkpoint, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(checkpoint, other)
    config = json.loads((other / "config.json").read_text())
    config["rope_theta"] = config.get("rope_theta", 10000) * 2
    (other / "config.json").write_text(json.dumps(config))
    world.on("node1", "mount", "--bind", str(other), str(checkpoint))
    try:
        terminal = start(str(checkpoint), "--port", "0")
        assert terminal.end() in (1, 2)
    finally:
        world.on("node1", "umount", str(checkpoint))
    assert "node1" in terminal.text and "checkpoint" in terminal.text.lower()
    assert "ready after" not in terminal.text
    wait_until_empty()


def test_a_checkpoint_that_is_absent_on_one_node(world, start, checkpoint, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    world.on("node1", "mount", "--bind", str(empty), str(checkpoint))
    try:
        terminal = start(str(checkpoint), "--port", "0")
        assert terminal.end() == 2
    finally:
        world.on("node1", "umount", str(checkpoint))
    assert "node1" in terminal.text and "config.json" in terminal.text
    wait_until_empty()


def test_a_port_that_is_taken_on_the_first_node(world, start, checkpoint):
    code = (
        "import socket, time; s = socket.create_server(('0.0.0.0', 8765)); "
        "print('up', flush=True); time.sleep(600)"
    )
    command = ["bash", str(WORLD), "in", str(world.folder), "node0", sys.executable, "-c", code]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "up\n"
        terminal = start(str(checkpoint), "--port", "8765")
        assert terminal.end() == 2
    finally:
        holder.kill()
        holder.wait()
    assert "--port 8765" in terminal.text
    wait_until_empty()


def test_a_rank_that_is_killed(world, start, checkpoint):
    terminal = start(str(checkpoint), "--port", "0")
    with urllib.request.urlopen(f"{terminal.url()}/health") as answer:
        ranks = json.load(answer)["ranks"]
    victim = next(x for x in ranks if x["rank"] == 3)
    assert victim["host"] == "node1"
    os.kill(victim["pid"], signal.SIGKILL)
    assert terminal.end(SOON) == 3
    assert "rank 3 on node1: died" in terminal.text
    wait_until_empty()


def test_a_job_that_is_cancelled_by_somebody_else(world, start, checkpoint):
    terminal = start(str(checkpoint), "--port", "0")
    terminal.url()
    job = world.queue().split()[0]
    world.run("scancel", job)
    assert terminal.end(SOON) == 3
    assert f"job {job} was cancelled, not by this terminal" in terminal.text
    wait_until_empty()


def test_ctrl_c_while_it_starts(world, start, checkpoint):
    terminal = start(str(checkpoint), "--port", "0")
    terminal.wait_for(lambda: "): starting" in terminal.text)
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.end(SOON + 20) == 130
    assert "is cancelled" in terminal.text
    wait_until_empty()


def test_ctrl_c_lets_a_running_request_end(world, start, checkpoint):
    terminal = start(str(checkpoint), "--port", "0")
    url, answers = terminal.url(), []
    asking = threading.Thread(
        target=lambda: answers.append(ask(url, max_tokens=300, ignore_eos=True))
    )
    asking.start()

    def runs() -> bool:
        with urllib.request.urlopen(f"{url}/health") as answer:
            return json.load(answer)["requests_in_flight"] > 0

    terminal.wait_for(runs)
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.end(SOON + 40) == 0
    asking.join(SOON)
    assert answers and answers[0]["usage"]["completion_tokens"] == 300
    assert "stopping job" in terminal.text and terminal.text.endswith("moeserve: stopped\n")
    wait_until_empty()


def test_a_file_that_is_submitted_by_hand(world, start, checkpoint, tmp_path):
    terminal = start(str(checkpoint), "--port", "0", options=())
    assert terminal.end() == 0
    script = terminal.text.splitlines()[-1]
    job = world.run("sbatch", "--parsable", script).stdout.strip()
    deadline = time.monotonic() + LIMIT
    while True:
        report = json.loads(world.moeserve("status", job, "--json").stdout)
        if report["state"] == "running" or (tmp_path / "job").glob("node-*.jsonl"):
            break
        assert time.monotonic() < deadline
    assert report["kind"] == "slurm"
    assert world.moeserve("stop", job, "--now").returncode == 0
    wait_until_empty()


def test_all_that_is_wrong_is_said_before_anything_is_submitted(world):
    done = world.moeserve(
        *("launch", "slurm", "--submit", "--nodes", "3", "--gpus-per-node", "9"),
        *("--", "serve", "/gone", "--ep", "3", "--colour", "blue"),
    )
    assert done.returncode == 2
    for words in (
        "--nodes 3: partition main has 2 nodes",
        "--gpus-per-node 9",
        "--colour",
    ):
        assert words in done.stderr, done.stderr
    done = world.moeserve(
        *("launch", "slurm", "--submit", "--nodes", "2", "--gpus-per-node", "2"),
        *("--partition", "gold", "--", "serve", "checkpoints/tiny", "--ep", "3"),
    )
    assert done.returncode == 2 and "--partition gold" in done.stderr and "--ep 3" in done.stderr
    assert not world.queue()


def test_gpus_are_asked_of_slurm(world, start, checkpoint, tmp_path):
    """Its fake GPUs: every rank of a node sees all of them."""
    probe = tmp_path / "probe"
    probe.write_text("#!/bin/bash\necho $SLURM_LOCALID $CUDA_VISIBLE_DEVICES\n")
    probe.chmod(0o755)
    options = ("--nodes", "2", "--gpus-per-node", "2", "--output", str(tmp_path / "gpus"))
    done = world.moeserve(
        "launch", "slurm", *options, "--python", str(probe), "--", "serve", str(checkpoint)
    )
    assert done.returncode == 0, done.stderr
    world.run("sbatch", "--wait", done.stdout.strip())
    logs = sorted(p.read_text() for p in (tmp_path / "gpus").glob("rank-*.log"))
    assert logs == ["0 0,1\n", "0 0,1\n", "1 0,1\n", "1 0,1\n"]


def test_the_namespaces_are_real(world):
    names = {world.on(node, "hostname").stdout.strip() for node in ("node0", "node1")}
    assert names == {"node0", "node1"} and socket.gethostname() not in names


def test_a_job_that_may_starts_again_after_a_death(world, start, checkpoint):
    terminal = start(str(checkpoint), "--port", "0", "--max-restarts", "1")

    def kill_rank_3(url: str) -> None:
        with urllib.request.urlopen(f"{url}/health") as answer:
            os.kill(json.load(answer)["ranks"][3]["pid"], signal.SIGKILL)

    kill_rank_3(terminal.url())
    terminal.wait_for(lambda: terminal.text.count("ready after") == 2)
    assert terminal.text.count("rank 3 on node1: died") == 1
    second = [x for x in terminal.lines if "ready after" in x][1].split(": ")[-1].strip()
    assert ask(second)["choices"][0]["text"]
    kill_rank_3(second)
    assert terminal.end(SOON) == 3
    assert terminal.text.count("rank 3 on node1: died") == 2
    wait_until_empty()
