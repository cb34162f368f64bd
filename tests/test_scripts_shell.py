"""scripts/setup.sh and scripts/test.sh: what they refuse, and how they sum up."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"


def run(*command: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", *map(str, command)], capture_output=True, text=True, timeout=60,
        env=os.environ | environ,
    )  # fmt: skip


def test_setup_refuses_an_environment_that_is_a_link(tmp_path: Path) -> None:
    """It would install this checkout where another one's lies."""
    other, link = tmp_path / "other", tmp_path / ".venv"
    other.mkdir()
    link.symlink_to(other)
    done = run(SCRIPTS / "setup.sh", link, PYTHON=sys.executable)
    assert done.returncode == 1 and done.stdout == ""
    assert f"setup: {link} is a symbolic link (to {other})" in done.stderr
    assert "remove the link" in done.stderr and not list(other.iterdir())


PYTEST = """#!/usr/bin/env bash
case "$* ${TRITON_INTERPRET:-}" in
  *tests/interpreter*1) echo "== 625 passed, 2 skipped in 8.30s ==" ;;
  *"not dist"*) echo "4 failed, 10 passed in 1.00s"; exit 1 ;;
  *"-m dist"*) echo "7 passed, 1 skipped in 2.00s" ;;
esac
"""


@pytest.mark.skipif(sys.platform != "linux", reason="tail --pid")
def test_all_runs_are_summed_up_at_the_end_each_and_together(tmp_path: Path) -> None:
    (tmp_path / "python").write_text(PYTEST)
    (tmp_path / "python").chmod(0o755)
    done = run(SCRIPTS / "test.sh", tmp_path)
    *_, first, second, third, last = done.stdout.splitlines()
    assert first == "tests without ranks: 4 failed, 10 passed in 1.00s"
    assert second == "GPU kernels, interpreted: 625 passed, 2 skipped in 8.30s"
    assert third == "tests with ranks: 7 passed, 1 skipped in 2.00s"
    assert last.startswith("4 failed, 642 passed, 3 skipped in ")
    assert done.returncode == 1
