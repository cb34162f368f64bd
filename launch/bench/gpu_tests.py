"""The tests that want a GPU, part of `scripts/gpu_check.py`: run, ended in time, summed up, shown.

Each file in a process of its own. Knows pytest's report; nothing of what is tested or measured.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from launch.bench.gpu_part import Interrupted, Part

NO_TESTS = 5  # pytest's exit code
GRACE = 5.0  # seconds for tests that are told to end
FILES_AT_ONCE = 4


def run_checks(
    home: Path, env: Mapping[str, str], files: list[Path], folder: Path, limit: float
) -> Part:
    """The tests with the marker, within `limit` seconds. home: the root. folder: for reports.
    Interrupted: with those that ran."""
    began = time.monotonic()
    at_once = max(1, min(FILES_AT_ONCE, (os.cpu_count() or 1) // 2, len(files)))
    tests, interrupted = Tests(home, env, folder, began + limit - GRACE), None
    with ThreadPoolExecutor(at_once) as pool:
        runs = [pool.submit(tests.run, path) for path in files]
        try:
            wait(runs)
        except KeyboardInterrupt as error:
            interrupted = error
            tests.end()
    part = sum_up([run.result() for run in runs], time.monotonic() - began)
    if interrupted is not None:
        raise Interrupted(part, interrupted)
    return part


def sum_up(done: Sequence[Run], seconds: float) -> Part:
    totals: Counter[str] = Counter()
    by_part: dict[str, Counter[str]] = {}
    held = []
    for case in sorted((case for run in done for case in run.cases), key=part_of):
        kinds = {child.tag: child.get("message", "") for child in case}
        bad = "failure" in kinds or "error" in kinds
        result = "failed" if bad else "not run" if "skipped" in kinds else "passed"
        why = "".join(next(iter(kinds.values()), "").splitlines()[:1])
        name, part = case.get("name", ""), part_of(case)
        by_part.setdefault(part, Counter())[result] += 1
        totals[result] += 1
        took = float(case.get("time") or 0)
        held.append(
            {"part": part, "check": name, "result": result, "why": why, "seconds": took}
        )  # fmt: skip
    lines = [f"{name}: {told(counts)}" for name, counts in by_part.items()]
    ran = totals["passed"] + totals["failed"]
    lines.append(
        f"{totals.total()} checks; {ran} ran, {totals['failed']} failed, "
        f"{totals['not run']} not run."
    )
    broken = [run for run in done if run.code not in (0, NO_TESTS)]
    lines += [f"{run.name}: not done after {run.seconds:.0f} s" for run in broken if not run.code]
    result = "failed" if totals["failed"] or broken else "passed" if ran else "not run"
    return Part("checks", result, seconds, lines, held, [run.said for run in broken])


def show_checks(device: str, part: Part) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    table = Table(title=f"checks on {device}, {part.seconds:.0f} s", title_justify="left")
    for column in ("part", "check", "result", "seconds", "why"):
        table.add_column(column)
    for case in part.held:
        # A test's parameters stand in brackets, which are no markup.
        name, why = escape(case["check"]), escape(case["why"])
        colour = {"failed": "red", "passed": "green"}.get(case["result"], "yellow")
        seconds = f"{case['seconds']:.3f}"
        table.add_row(case["part"], name, f"[{colour}]{case['result']}", seconds, why)
    if part.held:
        console.print(table)
    for said in part.said:
        console.print(said, markup=False)


@dataclass
class Run:
    """code None: it was ended, after so many seconds. cases: those that were done."""

    name: str
    code: int | None
    cases: list[ElementTree.Element] = field(default_factory=list)
    said: str = ""
    seconds: float = 0.0


class Tests:
    """Files of tests, each in a process of its own, which end by `deadline`, or when told to."""

    def __init__(self, home: Path, env: Mapping[str, str], folder: Path, deadline: float) -> None:
        self._home, self._env = home, env
        self._folder, self._deadline = folder, deadline
        self._lock = threading.Lock()
        self._ended = False
        self._running: list[subprocess.Popen[str]] = []

    def end(self) -> None:
        """Nothing begins any more; what runs writes down what was done."""
        with self._lock:
            self._ended, running = True, list(self._running)
        until = time.monotonic() + GRACE
        for process in running:
            _signal(process, signal.SIGINT)
        while time.monotonic() < until and any(p.poll() is None for p in running):
            time.sleep(0.05)
        for process in running:
            _signal(process, signal.SIGKILL)

    def run(self, path: Path) -> Run:
        report = self._folder / f"{path.stem}.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
        command += [f"--junitxml={report}", str(path)]
        began = time.monotonic()
        with self._lock:
            if self._ended or began >= self._deadline:
                return Run(path.name, None)
            # Of a group of its own: a terminal's Ctrl-C comes once, from `end`.
            process = subprocess.Popen(
                command, cwd=self._home, env=self._env, text=True, errors="replace",
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                process_group=0,
            )  # fmt: skip
            self._running.append(process)
        ended, said = False, ""
        for limit, number in (
            (max(1.0, self._deadline - began), signal.SIGINT),
            (GRACE, signal.SIGKILL),
            (GRACE, signal.SIGKILL),
        ):
            try:
                said = process.communicate(timeout=limit)[0]
                break
            except subprocess.TimeoutExpired:
                ended = True
                _signal(process, number)
        with self._lock:
            self._running.remove(process)
            ended = ended or self._ended
        code = None if ended else process.returncode
        return Run(path.name, code, _cases(report), said[-6000:], time.monotonic() - began)


def _signal(process: subprocess.Popen[str], number: int) -> None:
    """To its whole group: what it started too."""
    if process.poll() is None:
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return


def _cases(report: Path) -> list[ElementTree.Element]:
    """Those in pytest's file, which it writes at its end."""
    try:
        return list(ElementTree.parse(report).iter("testcase"))
    except (OSError, ElementTree.ParseError):
        return []


def told(counts: Counter[str]) -> str:
    return ", ".join(f"{counts[kind]} {kind}" for kind in ("passed", "failed", "not run"))


def part_of(case: ElementTree.Element) -> str:
    """What a check is about, by its file: tests/gpu/test_dispatch_gpu.py is about dispatch."""
    modules = [name for name in case.get("classname", "").split(".") if name.startswith("test_")]
    return modules[0].split("_")[1] if modules else "other"
