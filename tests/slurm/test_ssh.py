"""`moeserve launch hosts` over an ssh server that really runs, on loopback with keys made for the
test. Needs sshd: `make test-slurm`; no part of `make test`."""

from __future__ import annotations

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

import psutil
import pytest

ROOT = Path(__file__).parents[2]
TINY = str(ROOT / "checkpoints" / "tiny")
LIMIT = 150

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def ssh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The command that reaches this machine as any host."""
    server = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if server is None or shutil.which("ssh-keygen") is None:
        pytest.skip("no sshd here: apt-get install openssh-server")
    folder = tmp_path_factory.mktemp("ssh")
    for name in ("host", "user"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True
        )
    shutil.copy(folder / "user.pub", folder / "authorized")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = folder / "sshd_config"
    config.write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nStrictModes no\n"
        f"AuthorizedKeysFile {folder}/authorized\nPidFile {folder}/pid\nUsePAM no\n"
        "PasswordAuthentication no\nPermitRootLogin prohibit-password\n"
    )
    Path("/run/sshd").mkdir(exist_ok=True)
    process = subprocess.Popen(
        [server, "-D", "-e", "-f", str(config)], stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        first = process.stderr.readline()
        assert "listening" in first, first
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield (
            f"ssh -F none -i {folder}/user -p {port} -o BatchMode=yes -o LogLevel=ERROR "
            f"-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"
        )
    finally:
        process.kill()
        process.wait()


class Terminal:
    def __init__(self, ssh: str, tmp: Path, *words: str) -> None:
        self.lines: list[str] = []
        self.folder = tmp / "job"
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "moeserve", "launch", "hosts", "127.0.0.1,localhost"),
                *("--ssh", ssh, "--output", str(self.folder), "--", "serve", *words),
                *("--interface", "lo"),  # both hosts are this machine
            ],
            env=os.environ
            | {
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
                "XDG_STATE_HOME": str(tmp / "home"),
            },
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

    def url(self) -> str:
        deadline = time.monotonic() + LIMIT
        while "ready after" not in self.text:
            assert self.process.poll() is None and time.monotonic() < deadline, self.text
            time.sleep(0.1)
        line = next(x for x in self.lines if "ready after" in x)
        return line.split(": ")[-1].strip()

    def end(self) -> int:
        code = self.process.wait(LIMIT)
        self._reader.join()
        return code


@pytest.fixture
def start(ssh: str, tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    started: list[Terminal] = []

    def run(*words: str) -> Terminal:
        started.append(Terminal(ssh, tmp_path, *words))
        return started[-1]

    yield run
    for terminal in started:
        terminal.process.kill()
        terminal.end()


def health(url: str) -> dict:
    with urllib.request.urlopen(f"{url}/health", timeout=30) as answer:
        return json.load(answer)


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 20
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < deadline, "ranks are left behind"
        time.sleep(0.1)


def test_serve_status_and_ctrl_c(start, tmp_path, ssh):
    terminal = start(TINY, "--port", "0")
    told = health(terminal.url())
    assert told["ready"] and len(told["ranks"]) == 2
    env = os.environ | {"PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path / "home")}
    shown = subprocess.run(
        [sys.executable, "-m", "moeserve", "status", "--json"],
        env=env,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    report = json.loads(shown.stdout)
    assert report["kind"] == "hosts" and report["ready"] and report["num_ranks"] == 2
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.end() == 0 and terminal.text.endswith("moeserve: stopped\n")
    wait_until_gone([rank["pid"] for rank in told["ranks"]])


def test_a_killed_rank_is_named_and_nobody_is_left(start):
    terminal = start(TINY, "--port", "0")
    pids = {rank["rank"]: rank["pid"] for rank in health(terminal.url())["ranks"]}
    os.kill(pids[1], signal.SIGKILL)
    assert terminal.end() == 3
    assert "rank 1 on" in terminal.text and "died" in terminal.text
    wait_until_gone(list(pids.values()))


def test_a_killed_launcher_leaves_nobody(start):
    terminal = start(TINY, "--port", "0")
    pids = [rank["pid"] for rank in health(terminal.url())["ranks"]]
    terminal.process.kill()
    wait_until_gone(pids)


def test_a_line_that_is_cut_ends_all_hosts(start):
    terminal = start(TINY, "--port", "0")
    pids = [rank["pid"] for rank in health(terminal.url())["ranks"]]
    lines = psutil.Process(terminal.process.pid).children()
    next(x for x in lines if "localhost" in x.cmdline()).kill()
    assert terminal.end() in (1, 3)
    assert "host localhost: the line to it was cut" in terminal.text
    wait_until_gone(pids)
