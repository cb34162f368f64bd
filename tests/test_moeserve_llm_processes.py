"""Where an LLM over several ranks may start its processes: once, from the script that is run.

Nothing is started here; over ranks: tests/dist/test_llm_dist.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moeserve import llm_backends
from moeserve.errors import ConfigError
from moeserve.llm import LLM

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
