"""`make gpu-check`: the kernels checked on a GPU, then timed, then the whole engine, as tables.

    make gpu-check [GPU_CHECK_ARGS="--only checks"]
    python3 scripts/gpu_check.py [--json FILE] [--only checks,kernels,engine]

The same: `make` only looks for a Python whose torch sees a GPU (that of .venv where there is one,
else python3) and says which it took. Under eight minutes on one H200, nothing installed, nothing
downloaded, no checkpoint. All figures go to one JSON file too, gpu-check.json in the root of the
repository if no other is named. Three parts, each in processes of its own, so that a kernel that
breaks the device's context breaks no other part:

    checks   the tests that carry the marker `gpu`, several files at a time
    kernels  times by events at DeepSeek-V3's shapes beside limits measured here, torch, and
             DeepGEMM, FlashMLA, FlashInfer where they are installed
    engine   a model of DeepSeek-V3's dimensions with few layers and random FP8 weights made on the
             device, EP 1: tokens/s, a step by kernel, idle share, predicted beside measured

What one part does not use of its time is the next one's. What is kept in the file is there as soon
as it is known: what ends a run early (a part's limit, Ctrl-C, SIGTERM) takes along no figure.

Exit codes: 0 checks ran and all that ran passed, and all that was asked for was measured; 1 a check
failed, a kernel or the engine raised, time ran out so that something is measured in part (it says
how much, and the file names what is missing), or the file could not be written; 2 nothing was
checked: no GPU, something missing, no check among what was asked for, or wrong arguments (each is
named); 130 interrupted (143 by SIGTERM). A time is never a failure, nor is a shape for which the
device has too little memory (it is named). (`make` ends with 2 for any of them but 0.)

What to carry to a machine without a network: this repository, and in its root a folder `carried`.
The machine itself has torch 2.11 or later for CUDA with its triton (3.6 or later) and Python 3.11
or later. For one with Python 3.12, on a machine with a network (of any system, torch not needed):

    pip install --target carried --python-version 3.12 --only-binary=:all: --no-deps \\
        --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 \\
        $(python3 scripts/gpu_check.py --list)

These are 24 packages, 260 MB. The tests look in `carried` before they look among the machine's own
packages: leave out what it has. The first lines of a run there name what is missing, and why.

--walk: kernels and engine with tiny shapes on CPUs, kernels in triton's interpreter, at least one
shape of each: it measures nothing and checks nothing (exit code 2; no file but one that --json
names), and shows that the script itself runs. About a minute.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HOME = Path(__file__).resolve().parent.parent
LIMIT_SECONDS = 470
PASSED, FAILED, NOTHING_CHECKED = 0, 1, 2
IN_PART = "measured in part"
MARKER = "mark.gpu"
NO_CHECK = "no test carries the marker gpu so far"
NO_TESTS = 5  # pytest's exit code
RAISED = 3  # a part's: what did is in its lines
PARTS = ("checks", "kernels", "engine")
# Seconds that a part has for sure. Of all that it has, so many at the end are for what has begun.
SECONDS = {"checks": 220.0, "kernels": 120.0, "engine": 125.0}
ENDING = {"kernels": 30.0, "engine": 40.0}
WALKING = 20.0  # of a walk, for kernels beyond one shape of each
GRACE = 5.0  # for tests that are told to end
FILES_AT_ONCE = 4
FORMAT = "moeserve gpu-check 1"
FILE = "gpu-check.json"  # in the root
CARRY = "carried"  # folder in the root
WHAT = {
    "kernels": "every kernel at DeepSeek-V3's shapes, timed beside its limit, torch and libraries",
    "engine": "an engine of DeepSeek-V3's dimensions on random weights: tokens/s, a step by kernel",
}


@dataclass
class Part:
    """result: passed, failed, measured, measured in part, walked, not run. lines: for the table.
    held: for the JSON file. said: by tests that ended badly."""

    name: str
    result: str = "not run"
    seconds: float = 0.0
    lines: list[str] = field(default_factory=list)
    held: Any = None
    said: list[str] = field(default_factory=list)


class Interrupted(Exception):
    """With what the part has so far, and how it ends."""

    def __init__(self, part: Part, error: KeyboardInterrupt) -> None:
        super().__init__(part.name)
        part.result = "failed"
        part.lines.insert(0, "interrupted")
        self.part, self.code = part, code_of(error)


def code_of(error: KeyboardInterrupt) -> int:
    """Of a process that a signal ended, as shells have it."""
    return 128 + (int(error.args[0]) if error.args else signal.SIGINT)


def main(arguments: Sequence[str] = ()) -> int:
    add_carried()
    from launch.bench import gpu_needs as needs

    asked = parse(arguments)
    if asked.list:
        print(needs.pinned())
        own = " and ".join(needs.GIVEN.values())
        print(f"The machine itself has {own}. The rest, for Python 3.12:", file=sys.stderr)
        print(needs.how_to_carry("$(python3 scripts/gpu_check.py --list)"), file=sys.stderr)
        return PASSED
    if asked.part:
        return run_part(asked)
    files = files_with_checks(HOME / "tests")
    missing = needs.broken([*needs.GIVEN, *needs.NEEDED, *needs.WANTED])
    if "torch" in missing or (asked.walk and not missing.keys().isdisjoint(needs.NEEDED)):
        return nothing_for_want_of(missing, "no device was looked for")
    if asked.walk:
        return run_all(asked, "no GPU: a walk", files)
    device = describe_device()
    if device is None:
        print(f"no GPU found: nothing was checked ({why_no_device()})", file=sys.stderr)
        print("on a GPU this runs", *what_is_run(asked.only, files), sep="\n  ", file=sys.stderr)
        print("what to bring to a machine that has one: --list, --help", file=sys.stderr)
        return NOTHING_CHECKED
    if not missing.keys().isdisjoint({**needs.GIVEN, **needs.NEEDED}):
        return nothing_for_want_of(missing, device)
    if missing:
        print("\n".join(needs.lines(missing)), file=sys.stderr)
    if not files and "checks" in asked.only:
        print(f"{device}: nothing was checked: {NO_CHECK}", file=sys.stderr)
        return NOTHING_CHECKED
    return run_all(asked, device, files)


def nothing_for_want_of(missing: dict[str, str], device: str) -> int:
    from launch.bench.gpu_needs import lines

    print("\n".join(lines(missing)), file=sys.stderr)
    print(f"{device}: nothing was checked; all that may be wanted: --list", file=sys.stderr)
    return NOTHING_CHECKED


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    from launch.output import unwritable

    parser = argparse.ArgumentParser(
        prog="gpu-check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help=f"All figures as JSON (default: {FILE}, not of a walk)"
    )
    parser.add_argument("--only", default=",".join(PARTS), metavar="PART,...", help="Of the parts")
    parser.add_argument("--walk", action="store_true", help="Tiny shapes on CPUs")
    parser.add_argument(
        "--list", action="store_true", help="Packages to bring along, with their versions"
    )
    parser.add_argument("--part", choices=PARTS[1:], help=argparse.SUPPRESS)  # in a child
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--limits", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=float, help=argparse.SUPPRESS)
    asked = parser.parse_args(list(arguments))
    given = asked.only
    asked.only = [name.strip() for name in given.split(",")]
    if any(name not in PARTS for name in asked.only):
        parser.error(f"--only {given!r}: must be one or more of {', '.join(PARTS)}, with commas")
    if asked.json is None and not (asked.walk or asked.part or asked.list):
        asked.json = HOME / FILE
    for problem in unwritable("--json", asked.json):
        parser.error(problem)
    return asked


def run_all(asked: argparse.Namespace, device: str, files: list[Path]) -> int:
    """The parts in order, a table at the end, the JSON file as they end; -> the exit code."""
    from launch.bench.kept import Kept

    began = time.monotonic()
    parts = [Part(name, lines=[why_not(name, asked) or "not begun"]) for name in PARTS]
    kept, versions = Kept(asked.json), software()

    def keep(code: int | None) -> float:
        """code: None: there is more to come. -> seconds so far."""
        seconds = time.monotonic() - began
        held = {
            "format": FORMAT,
            "device": device,
            "exit_code": code,
            "seconds": seconds,
            "software": versions,
            "parts": [
                {"name": p.name, "result": p.result, "seconds": p.seconds, "lines": p.lines}
                for p in parts
            ],
            **{p.name: p.held for p in parts},
        }
        kept.keep(held, last=code is not None)
        return seconds

    ended = 0
    try:
        with tempfile.TemporaryDirectory() as folder:
            for number, name in enumerate(PARTS):
                if why_not(name, asked):
                    continue
                limit = limit_of(name, asked.only, LIMIT_SECONDS - (time.monotonic() - began))
                if limit < 10:
                    part = Part(name, "failed", lines=[f"no time left of {LIMIT_SECONDS} s"])
                elif name == "checks":
                    part = run_checks(files, Path(folder), limit)
                else:
                    part = measure(name, Path(folder), limit, asked.walk)
                parts[number] = part
                keep(None)
                if name == "checks":
                    show_checks(device, part)
    except Interrupted as stopped:
        parts[PARTS.index(stopped.part.name)] = stopped.part
        ended = stopped.code
    except KeyboardInterrupt as error:  # between two parts
        ended = code_of(error)
    code = ended or exit_code(parts)
    seconds = keep(code)
    show_parts(device, parts, seconds)
    if kept.problem:
        print(f"--json {kept.problem}", file=sys.stderr)
        return ended or FAILED
    if asked.json is not None:
        print(f"written: {asked.json}")
    return code


def why_not(name: str, asked: argparse.Namespace) -> str:
    """Why a part is none of this run's; empty: it is."""
    if name not in asked.only:
        return "not asked for"
    return "a walk" if name == "checks" and asked.walk else ""


def limit_of(name: str, asked: Sequence[str], left: float) -> float:
    """Seconds of a part, of those that are left: all but what those behind it have for sure."""
    behind = [part for part in PARTS[PARTS.index(name) + 1 :] if part in asked]
    return max(min(SECONDS[name], left), left - sum(SECONDS[part] for part in behind))


def exit_code(parts: Sequence[Part]) -> int:
    if any(part.result in ("failed", IN_PART) for part in parts):
        return FAILED
    checked = any(part.name == "checks" and part.result == "passed" for part in parts)
    return PASSED if checked else NOTHING_CHECKED


def show_parts(device: str, parts: Sequence[Part], seconds: float) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=f"gpu-check on {device}: {seconds:.0f} s", title_justify="left")
    for column in ("part", "result", "seconds", ""):
        table.add_column(column)
    for part in parts:
        table.add_row(part.name, part.result, f"{part.seconds:.0f}", escape("\n".join(part.lines)))
    Console().print(table)


def software() -> dict[str, str]:
    import torch

    found = {"python": sys.version.split()[0], "torch": torch.__version__}
    if importlib.util.find_spec("triton") is not None:
        import triton

        found["triton"] = triton.__version__
    return found


# -- checks --------------------------------------------------------------------------------------


def run_checks(files: list[Path], folder: Path, limit: float) -> Part:
    """The tests with the marker, a process for each file. Interrupted: with those that ran."""
    began = time.monotonic()
    at_once = max(1, min(FILES_AT_ONCE, (os.cpu_count() or 1) // 2, len(files)))
    tests, interrupted = _Tests(folder, began + limit - GRACE), None
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


def sum_up(done: Sequence[_Run], seconds: float) -> Part:
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
class _Run:
    """code None: it was ended, after so many seconds. cases: those that were done."""

    name: str
    code: int | None
    cases: list[ElementTree.Element] = field(default_factory=list)
    said: str = ""
    seconds: float = 0.0


class _Tests:
    """Files of tests, each in a process of its own, which end by `deadline`, or when told to."""

    def __init__(self, folder: Path, deadline: float) -> None:
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

    def run(self, path: Path) -> _Run:
        report = self._folder / f"{path.stem}.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
        command += [f"--junitxml={report}", str(path)]
        began = time.monotonic()
        with self._lock:
            if self._ended:
                return _Run(path.name, None)
            # Of a group of its own: a terminal's Ctrl-C comes once, from `end`.
            process = subprocess.Popen(
                command, cwd=HOME, env=environment(), text=True, errors="replace",
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
        return _Run(path.name, code, _cases(report), said[-6000:], time.monotonic() - began)


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


def files_with_checks(tests: Path) -> list[Path]:
    """Test files that name the marker: read, not imported, which would take half a minute."""
    return sorted(p for p in tests.rglob("test_*.py") if MARKER in p.read_text(encoding="utf-8"))


def what_is_run(asked: Sequence[str], files: list[Path]) -> list[str]:
    """Of each part that is asked for, in lines that a terminal holds."""
    folders: dict[Path, list[str]] = {}
    for path in files:
        folders.setdefault(path.parent.relative_to(HOME), []).append(path.name)
    checks = [f"{len(names)} of {at}: {', '.join(names)}" for at, names in folders.items()]
    told = {"checks": "; ".join(checks) or NO_CHECK} | WHAT
    return [
        line
        for part in PARTS
        if part in asked
        for line in textwrap.wrap(f"{part}: {told[part]}", 96, subsequent_indent="    ")
    ]


# -- measuring -----------------------------------------------------------------------------------


def measure(name: str, folder: Path, limit: float, walk: bool) -> Part:
    """A part in a process of its own: it shows its tables, and leaves a file that holds what was
    measured whenever it ends. Interrupted: with that."""
    out, limits = folder / f"{name}.json", folder / "kernels.json"
    command = [sys.executable, str(HOME / "scripts" / "gpu_check.py"), "--part", name]
    budget = WALKING if walk else max(limit / 2, limit - ENDING[name])
    command += ["--out", str(out), "--budget", str(budget)]
    command += ["--limits", str(limits)] if limits.exists() else []
    env = environment()
    if walk:
        command.append("--walk")
        env["TRITON_INTERPRET"] = "1"
    began = time.monotonic()
    sys.stdout.flush()
    part, interrupted = Part(name, "failed"), None
    try:
        code = subprocess.run(command, cwd=HOME, env=env, timeout=limit).returncode
        if code not in (PASSED, RAISED) or not out.exists():
            part.lines = [f"ended with exit code {code}, see above"]
    except subprocess.TimeoutExpired:
        code, part.lines = FAILED, [f"not done after {limit:.0f} s"]
    except KeyboardInterrupt as error:
        code, interrupted = FAILED, error
    part.seconds = time.monotonic() - began
    if out.exists():
        part.held = json.loads(out.read_text(encoding="utf-8"))
        part.lines += part.held.pop("lines")
        if code == PASSED:
            in_part = part.held["not_measured"]
            part.result = "walked" if walk else IN_PART if in_part else "measured"
    if interrupted is not None:
        raise Interrupted(part, interrupted)
    return part


def run_part(asked: argparse.Namespace) -> int:
    """In a child: measure, write what there is as it comes, show. RAISED where something did."""
    import torch

    from launch.bench.gpu_parts import Held, run_engine, run_kernels
    from launch.bench.kept import Kept

    kept = Kept(asked.out)

    def keep(held: Held) -> None:
        kept.keep({"lines": held[0], **held[1]})

    device = torch.device("cpu" if asked.walk else "cuda")
    if asked.part == "kernels":
        good = run_kernels(device, asked.walk, asked.budget, keep)
    else:
        good = run_engine(device, asked.walk, asked.budget, asked.limits, keep)
    if kept.problem:
        print(kept.problem, file=sys.stderr)
        return FAILED
    return PASSED if good else RAISED


# -- where it runs -------------------------------------------------------------------------------


def add_carried() -> None:
    """The repository first, what was brought along last."""
    if str(HOME) not in sys.path:
        sys.path.insert(0, str(HOME))
    carried = HOME / CARRY
    if carried.is_dir() and str(carried) not in sys.path:
        sys.path.append(str(carried))


def environment() -> dict[str, str]:
    """Of children: they find what this process finds. (What PYTHONPATH names comes before a
    machine's own packages: it is extended only where something was brought along.)"""
    env = dict(os.environ)
    paths = [str(HOME)]
    if (HOME / CARRY).is_dir():
        paths.append(str(HOME / CARRY))
    paths += [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    env["PYTHONPATH"] = os.pathsep.join(paths)
    return env


def describe_device() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def why_no_device() -> str:
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return f"torch {torch.__version__} sees no CUDA device"


# -- how it ends ---------------------------------------------------------------------------------


def run(arguments: Sequence[str]) -> int:
    """main() of a process of its own: whatever ends it early is a line, not a traceback."""
    heard: list[int] = []

    def stop(number: int, frame: object) -> None:
        """Once: what a terminal and a launcher both send must not end how it ends."""
        heard.append(number)
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt(number)

    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(each) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(each, stop)
    code = FAILED
    try:
        code = main(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt as error:
        code = code_of(error)
    except OSError as error:  # nobody reads, or what is written to is full
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        print(
            f"gpu-check: {error.filename or 'output'}: {error.strerror or error}", file=sys.stderr
        )
    if heard and "--part" not in arguments:
        name = signal.Signals(heard[0]).name
        print(f"gpu-check: interrupted ({name}) before it was done", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
