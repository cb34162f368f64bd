"""`moeserve bench serve` against a real server of two ranks: what only real ranks can tell."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from launch.cli import app

pytestmark = pytest.mark.dist


@contextmanager
def serving(checkpoint: Path) -> Iterator[str]:
    """The URL of a real server."""
    process = subprocess.Popen(
        [sys.executable, "-m", "moeserve", "serve", str(checkpoint), "--ep=2", "--port=0"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stderr is not None
    said = b""
    try:
        deadline = time.monotonic() + 90
        while not (ready := re.search(rb"ready: (http://\S+)\s", said)):
            wait = select.select([process.stderr], [], [], deadline - time.monotonic())[0]
            piece = os.read(process.stderr.fileno(), 65536) if wait else b""
            assert piece, said.decode(errors="replace")
            said += piece
        yield ready[1].decode()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # its own session: nobody else's
            process.communicate()


def test_ranks_tell_their_steps_and_experts(random_checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    load = ("--concurrency=4", "--requests=10", "--input-tokens=24", "--output-tokens=8")
    with serving(random_checkpoint) as url:
        words = ["bench", "serve", url, *load, "--ignore-eos", "--shared-prefix=16", "--warmup=1"]
        done = CliRunner().invoke(app, [*words, f"--out={file}"])
    assert done.exit_code == 0, done.output
    report = json.loads(file.read_text())
    assert report["gpus"] == 2 and report["gpus_are"] == "CPU ranks" and report["nodes"] == 1
    assert report["tokens"]["input"] == 240 and report["tokens"]["output"] == 80
    assert 0 < report["tokens"]["cached_input"] <= 240 and report["preemptions"] == 0
    assert [x["rank"] for x in report["steps"]] == [0, 1]
    model = {"attention", "gate", "dispatch", "experts", "combine"}
    for row in report["steps"]:
        parts = row["parts_ms"]
        assert model | {"sampling", "host", "lockstep"} <= parts.keys()
        assert row["steps"] >= 8 and min(parts.values()) >= 0 and row["dispatch_bytes"] > 0
        assert sum(parts[x] for x in model) <= row["step_ms"]
    assert report["experts"]["experts_max_over_mean"] >= 1
    assert report["experts"]["redundant_experts"] == 0
    assert report["server"]["dispatch"]["decode"]["backend"] == "torch"
    assert any("prefix cache was emptied" in x for x in report["caveats"])
