"""Where an LLM over several ranks may start its processes: once, from the script that is run.

And what it makes of ranks' reports. No rank is started here; over ranks:
tests/dist/test_llm_dist.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from moeserve import llm_backends
from moeserve.errors import ConfigError, EngineFailed
from moeserve.llm import LLM
from moeserve.llm_backends import _is_fresh
from moeserve.wire import RankStats

ROOT = Path(__file__).parents[1]

# As a careless user writes it: the LLM at the top, then children that import this very file. What
# would start ranks counts instead.
SCRIPT = """
import multiprocessing, os, sys
from moeserve import llm_backends
from moeserve.llm import LLM

class Counted:
    def __init__(self, command, **rest):
        with open("started", "a") as file:
            file.write(f"{os.getpid()} {' '.join(command)}\\n")
        raise SystemExit("counted")

llm_backends.subprocess.Popen = Counted
child = multiprocessing.current_process().name != "MainProcess"
if child:
    LLM(sys.argv[1], ep=2)
else:
    try:
        LLM(sys.argv[1], ep=2)
    except SystemExit:
        pass

def work(): print("worked")

process = multiprocessing.get_context("spawn").Process(target=work)
process.start()
process.join()
sys.exit(process.exitcode)
"""


def test_a_script_without_a_guard_gets_one_error_and_no_second_job(
    random_checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py", str(random_checkpoint)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1 and "worked" not in done.stdout
    last = done.stderr.splitlines()[-1]
    assert "parallel.ep=2: starts ranks" in last and 'if __name__ == "__main__":' in last
    started = (tmp_path / "started").read_text().splitlines()
    assert len(started) == 1, "the child started ranks as well"
    # Ranks are commands of ours, which import nothing of the user's: no guard is needed for them.
    assert " -P -m moeserve serve " in started[0] and "script.py" not in started[0]


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_under_torchrun_no_rank_starts_ranks(
    random_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "1")
    monkeypatch.setattr(llm_backends.subprocess, "Popen", lambda *_, **__: pytest.fail("started"))
    with pytest.raises(ConfigError, match=f"parallel.ep=2: .*{name} is set: run .* without torchr"):
        LLM(random_checkpoint, ep=2)


def _stats(step: int, running: int = 0) -> RankStats:
    counts = dict.fromkeys(RankStats.__struct_fields__[1:18], 0)
    return RankStats(**{"rank": 0, **counts, "step": step, "num_running": running})


def test_reports_are_fresh_when_all_ranks_fell_idle_at_the_same_step() -> None:
    old = _stats(7)
    assert _is_fresh([None, None], [_stats(3), _stats(3)])
    assert _is_fresh([old, old], [_stats(9), _stats(9)])
    assert _is_fresh([_stats(6), old], [_stats(9), _stats(10)])  # a step had failed on one before
    assert not _is_fresh([None, None], [_stats(3), None])
    assert not _is_fresh([old, old], [_stats(7), _stats(7)])  # said before the requests came
    assert not _is_fresh([old, old], [_stats(9), _stats(7)])
    assert not _is_fresh([old, old], [_stats(9), _stats(8)])  # this one had ended early
    assert not _is_fresh([old, old], [_stats(9, running=1), _stats(9)])


def test_ranks_that_never_meet_end_the_start(
    random_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    popen = subprocess.Popen
    before = set(psutil.Process().children(recursive=True))  # what other tests left in this process

    def hanging(command: list[str], **more: Any) -> subprocess.Popen[bytes]:
        return popen([sys.executable, "-c", "input()"], **more)

    monkeypatch.setattr(subprocess, "Popen", hanging)
    monkeypatch.setattr(llm_backends, "MEETING_SECONDS", 0.2)
    with pytest.raises(EngineFailed, match=r"not met within 0.2 s: rank 0 is absent, rank 1"):
        LLM(random_checkpoint, ep=2)
    assert set(psutil.Process().children(recursive=True)) <= before
