"""`make gpu-check`: which Python it takes, and that it wants no setup."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

HOME = Path(__file__).parents[1]
SEES, HAS_TORCH, HAS_NONE = 0, 3, 1
FAKE = """#!/usr/bin/env bash
if [ "$1" = -c ]; then exit {code}; fi
echo "$0 ran $*"
"""


def fake_python(path: Path, code: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(FAKE.format(code=code))
    path.chmod(0o755)
    return path


def check_with(tmp_path: Path, venv: int | None, other: int) -> tuple[str, str]:
    """-> which one ran, and what was said of it."""
    if venv is not None:
        fake_python(tmp_path / "venv" / "bin" / "python", venv)
    python = fake_python(tmp_path / "python3", other)
    done = subprocess.run(
        ["make", "-s", "gpu-check", f"VENV={tmp_path / 'venv'}", f"PYTHON={python}",
         "GPU_CHECK_ARGS=--only engine --json x.json"],
        cwd=HOME, capture_output=True, text=True, timeout=60,
        env={k: v for k, v in os.environ.items() if not k.startswith("MAKE")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    who, ran, script, *rest = done.stdout.split()
    assert ran == "ran" and script.endswith("scripts/gpu_check.py")
    assert rest == ["--only", "engine", "--json", "x.json"]
    assert (tmp_path / "venv").exists() is (venv is not None), "nothing is set up"
    return str(Path(who).relative_to(tmp_path)), done.stderr


@pytest.mark.parametrize(
    ("venv", "other", "taken", "why"),
    [
        (SEES, SEES, "venv/bin/python", "its torch sees a GPU"),
        (HAS_TORCH, SEES, "python3", "its torch sees a GPU"),
        (None, SEES, "python3", "its torch sees a GPU"),
        (HAS_TORCH, HAS_NONE, "venv/bin/python", "its torch sees no GPU, nor does another here"),
        (None, HAS_TORCH, "python3", "its torch sees no GPU, nor does another here"),
        (None, HAS_NONE, "python3", "no torch was found"),
        (HAS_NONE, HAS_NONE, "python3", "no torch was found"),
    ],
)
def test_the_python_whose_torch_sees_a_gpu_is_taken(
    tmp_path: Path, venv: int | None, other: int, taken: str, why: str
) -> None:
    who, said = check_with(tmp_path, venv, other)
    assert who == taken and said == f"gpu-check with {tmp_path / taken}: {why}\n"
