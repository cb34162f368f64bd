"""`moeserve launch hosts` on two hosts that are namespaces with names and addresses of their own
(those of scripts/slurm_world.sh): torchrun across them, and a line that is cut."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
WORLD = ROOT / "scripts" / "slurm_world.sh"
TINY = str(ROOT / "checkpoints" / "tiny")
LIMIT = 150

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def ssh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A program that runs a command on node0 or node1."""
    if os.geteuid() != 0 or shutil.which("slurmctld") is None:
        pytest.skip("needs root and Slurm: make test-slurm")
    folder = tmp_path_factory.mktemp("slurm")
    folder.chmod(0o755)
    program = folder / "ssh"
    program.write_text(
        '#!/bin/bash\nhost=$1; shift\nexec nsenter --target "$(cat '
        f'{folder}/slurmd.$host.pid)" --net --uts --mount -- sh -c "$*"\n'
    )
    program.chmod(0o755)
    try:
        subprocess.run(["bash", str(WORLD), "up", str(folder), "2"], check=True, timeout=120)
        yield program
    finally:
        subprocess.run(["bash", str(WORLD), "down", str(folder)], timeout=60)


def test_two_hosts_serve_and_a_cut_line_ends_all(ssh: Path, tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-m", "moeserve", "launch", "hosts", "node0,node1"),
        *("--ranks-per-node", "2", "--ssh", str(ssh), "--output", str(tmp_path / "job")),
        *("--", "serve", TINY, "--port", "0"),
    ]
    env = os.environ | {"OMP_NUM_THREADS": "1", "XDG_STATE_HOME": str(tmp_path / "home")}
    process = subprocess.Popen(
        command,
        env=env | {"PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines: list[str] = []
    assert process.stdout is not None
    reader = threading.Thread(target=lambda: lines.extend(process.stdout))
    reader.start()
    try:
        deadline = time.monotonic() + LIMIT
        while not any("ready after" in line for line in lines):
            assert process.poll() is None and time.monotonic() < deadline, "".join(lines)
            time.sleep(0.1)
        url = next(line for line in lines if "ready after" in line).split(": ")[-1].strip()
        with urllib.request.urlopen(f"{url}/health", timeout=30) as answer:
            ranks = json.load(answer)["ranks"]
        assert [x["host"] for x in ranks] == ["node0", "node0", "node1", "node1"]
        body = {"model": "tiny", "prompt": "Psalms 23", "temperature": 0, "max_tokens": 8}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 8

        line = next(
            child
            for child in psutil.Process(process.pid).children()
            if psutil.Process(ranks[2]["pid"]) in child.children(recursive=True)
        )
        line.send_signal(signal.SIGKILL)  # with it the remote part's standard input ends
        assert process.wait(30) in (1, 3)
        reader.join()
        assert "host node1: the line to it was cut" in "".join(lines), "".join(lines)
        deadline = time.monotonic() + 20
        while any(psutil.pid_exists(x["pid"]) for x in ranks):
            assert time.monotonic() < deadline, "ranks are left behind"
            time.sleep(0.1)
    finally:
        process.kill()
        process.wait()
        reader.join()
