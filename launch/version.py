"""`moeserve --version`: what answers here, in the lines that a bug report needs.

Knows package metadata and, in a checkout, git. What the kernels are is asked of them last: the
first time they may have to be compiled.
"""

from __future__ import annotations

import importlib.metadata as metadata
import platform
import subprocess
from pathlib import Path

HOME = Path(__file__).resolve().parent.parent
GIT_SECONDS = 5


def print_version() -> None:
    print(f"moeserve {_installed('moeserve')}{commit_of(HOME)}")
    print(f"python {platform.python_version()} on {platform.machine()}")
    for library in ("torch", "safetensors", "tokenizers"):
        print(f"{library} {_installed(library)}", flush=True)
    print(_kernels())


def _installed(library: str) -> str:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return "not installed"


def commit_of(home: Path) -> str:
    """In a checkout its commit, and whether the files differ from it; else nothing."""
    if not (home / ".git").exists():
        return ""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(home), *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=GIT_SECONDS
        )
        return done.stdout.strip()

    try:
        commit = git("rev-parse", "--short=12", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return " (a checkout; git cannot tell its commit)"
    return f" (commit {commit}{', with changes' if changed else ''})"


def _kernels() -> str:
    try:
        from models.deepseek.kernels.select import create_kernels

        return create_kernels().reason
    except Exception as error:  # a broken torch or compiler: the other lines still stand
        return f"kernels: none ({type(error).__name__}: {error})"
