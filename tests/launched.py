"""A command as a process, with all that it starts: for tests of what ends how and what stays."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
LIMIT = 90  # seconds for anything that is waited for; reached only by failures


class Running:
    """A started command, its output so far, everything it started, and its temporary folder."""

    def __init__(self, command: list[str], tmp: Path, env: dict[str, str] | None = None) -> None:
        self.output: list[str] = []
        self._tmp = tmp
        tmp.mkdir(exist_ok=True)
        self.process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env=os.environ
            | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp)}
            | (env or {}),
        )
        self.tree: list[psutil.Process] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.output.extend(self.process.stdout)

    @property
    def text(self) -> str:
        return "".join(self.output)

    def wait_for(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT
        while not done():
            assert self.process.poll() is None, f"ended with {self.process.returncode}: {self.text}"
            assert time.monotonic() < deadline, self.text
            time.sleep(0.02)
        self.tree = psutil.Process(self.process.pid).children(recursive=True)

    def end(self) -> int:
        """Its exit code; all that it started must be gone a moment later, temporary files too."""
        code = self.process.wait(LIMIT)
        _, alive = psutil.wait_procs(self.tree, timeout=10)
        assert not alive, f"still there: {alive}\n{self.text}"
        self._reader.join()
        left = [x.name for x in self._tmp.iterdir() if not x.name.startswith("torchinductor")]
        assert not left, f"files left behind: {left}"
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.tree += psutil.Process(self.process.pid).children(recursive=True)
            self.process.kill()
            self.process.wait()
        for child in self.tree:
            if child.is_running():
                child.kill()
        self._reader.join()
