"""Real gloo ranks for a test: the test's file runs itself once as a script, which forks the ranks.

A fresh process imports torch, then forks (cheap, and nothing of the test runner's threads is
inherited). Ranks meet through a file, run on one thread and die with their parent. Knows nothing
of what ranks do: the test calls `run_ranks(__file__, ...)`, the script `fork_ranks(body)`.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ep.group import EPGroup

ROOT = Path(__file__).parents[1]

# body(group, folder) on each rank -> its report, which must be JSON
Body = Callable[[EPGroup, Path], Any]


def script_environment() -> dict[str, str]:
    """For a test file that is started as a script: our packages, these helpers, one thread."""
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def run_ranks(script: str, num_ranks: int, folder: Path, timeout: float) -> list[Any]:
    """Start `script`, whose main is fork_ranks -> the ranks' reports. timeout in seconds."""
    run = subprocess.run(
        [sys.executable, script, str(num_ranks), str(folder)],
        env=script_environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return [json.loads(_report(folder, rank).read_text()) for rank in range(num_ranks)]


def fork_ranks(body: Body, before: Callable[[Path], object] | None = None) -> int:
    """The script's main: body on each rank, reports written -> exit code. `before` runs first, once
    for all, and leaves no threads behind."""
    size, folder = int(sys.argv[1]), Path(sys.argv[2])
    if before is not None:
        before(folder)
    parent, children = os.getpid(), []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                group = join(rank, size, folder)
                if os.getppid() == parent:  # else it died before we were tied to it
                    _report(folder, rank).write_text(json.dumps(body(group, folder)))
                    dist.barrier()
                    dist.destroy_process_group()
                    code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return max(abs(code) for code in codes)


def join(rank: int, size: int, folder: Path) -> EPGroup:
    """Become a rank: dies with its parent, one thread, in a group that meets in `folder`."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=120),
    )
    return EPGroup(rank, size, size, dist.group.WORLD, dist.new_group(backend="gloo"))


def _report(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.json"
