"""torchrun's folder goes when nothing is in it, and when nobody is left to read it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from launch.torchrun_folder import TorchrunFolder

ROOT = Path(__file__).parents[1]


@pytest.fixture
def error_file(tmp_path: Path) -> Path:
    attempt = tmp_path / "torchelastic_x1" / "none_y2" / "attempt_0"
    for rank in range(3):
        (attempt / str(rank)).mkdir(parents=True)
    return attempt / "1" / "error.json"


def test_empty_folders_go(error_file: Path, tmp_path: Path) -> None:
    TorchrunFolder(error_file).remove_empty()
    assert list(tmp_path.iterdir()) == []
    TorchrunFolder(error_file).remove_empty()  # another rank did it already


def test_a_reason_stays(error_file: Path) -> None:
    error_file.write_text("{}")
    TorchrunFolder(error_file).remove_empty()
    assert error_file.exists() and not (error_file.parents[1] / "0").exists()


def test_a_folder_of_the_users_own_stays(tmp_path: Path) -> None:
    rank = tmp_path / "logs" / "run" / "attempt_0" / "0"
    rank.mkdir(parents=True)
    for file in (rank / "error.json", None, Path("error.json")):
        TorchrunFolder(file).remove_empty()
    assert rank.is_dir()


def test_all_goes_with_a_killed_agent(error_file: Path, tmp_path: Path) -> None:
    """Agent, rank and front end as three processes; the first two are killed."""
    error_file.write_text("{}")
    front_end = (
        "import os, sys, time; from pathlib import Path; parent = os.getppid();"
        "from launch.torchrun_folder import TorchrunFolder;"
        f"folder = TorchrunFolder(Path({str(error_file)!r}));"
        "folder.remove_if_orphaned(); print('kept', flush=True);"
        "sys.stdin.read();"
        # The pipe of who ends is closed a moment before its children have another parent.
        "[time.sleep(0.01) for _ in iter(lambda: os.getppid() == parent, False)];"
        "folder.remove_if_orphaned(); print('done', flush=True)"
    )
    rank = (
        "import subprocess, sys, time;"
        f"p = subprocess.Popen([sys.executable, '-c', {front_end!r}], stdin=subprocess.PIPE);"
        "sys.stdin.read()"
    )
    agent = (
        "import subprocess, sys, time;"
        f"p = subprocess.Popen([sys.executable, '-c', {rank!r}], stdin=subprocess.PIPE);"
        "time.sleep(600)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", agent], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "kept\n" and error_file.exists()
    process.kill()
    process.wait()
    assert process.stdout.read() == "done\n"
    assert list(tmp_path.iterdir()) == []
