"""`make gpu-check`: the kernels checked on a GPU, then timed, then the whole engine, as tables.

    python3 scripts/gpu_check.py [--json FILE] [--only checks,kernels,engine]

Under eight minutes on one H200, from the root of the repository, nothing installed, nothing
downloaded, no checkpoint. Three parts, each in processes of its own, so that a kernel that breaks
the device's context breaks no other part:

    checks   the tests that carry the marker `gpu`, several files at a time
    kernels  times by events at DeepSeek-V3's shapes beside limits measured here, torch, and
             DeepGEMM, FlashMLA, FlashInfer where they are installed
    engine   a model of DeepSeek-V3's dimensions with few layers and random FP8 weights made on the
             device, EP 1: tokens/s, a step by kernel, idle share, predicted beside measured

Exit codes: 0 checks ran and all that ran passed, and what was asked for was measured; 1 a check
failed, a kernel or the engine raised, or time ran out; 2 nothing was checked: no GPU, something
missing, no check among what was asked for, or wrong arguments (each is named). A time is never a
failure. (`make` ends with 2 for any of them but 0.)

What to carry to a machine without a network: this repository, and in its root a folder `carried`.
The machine itself has torch 2.11 or later for CUDA with its triton (3.6 or later) and Python 3.11
or later. For one with Python 3.12, on a machine with a network (of any system, torch not needed):

    pip install --target carried --python-version 3.12 --only-binary=:all: --no-deps \\
        --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 \\
        $(python3 scripts/gpu_check.py --list)

These are 24 packages, 260 MB. The tests look in `carried` before they look among the machine's own
packages: leave out what it has. The first lines of a run there name what is missing, and why.

--walk: kernels and engine with tiny shapes on CPUs, kernels in triton's interpreter: it measures
nothing and checks nothing (exit code 2), and shows that the script itself runs.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HOME = Path(__file__).resolve().parent.parent
LIMIT_SECONDS = 470
PASSED, FAILED, NOTHING_CHECKED = 0, 1, 2
MARKER = "mark.gpu"
NO_TESTS = 5  # pytest's exit code
PARTS = ("checks", "kernels", "engine")
# Most seconds of a part. What begins after so many of them is left out: it ends by itself.
SECONDS = {"checks": 220.0, "kernels": 120.0, "engine": 125.0}
MEASURING = 0.7
FILES_AT_ONCE = 4
FORMAT = "moeserve gpu-check 1"
CARRY = "carried"  # folder in the root


@dataclass
class Part:
    """result: passed, failed, measured, not run. lines: for the table. held: for the JSON file."""

    name: str
    result: str = "not run"
    seconds: float = 0.0
    lines: list[str] = field(default_factory=list)
    held: Any = None


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
        print(f"on a GPU this runs {describe(files)}", file=sys.stderr)
        print("what to bring to a machine that has one: --list, --help", file=sys.stderr)
        return NOTHING_CHECKED
    if not missing.keys().isdisjoint({**needs.GIVEN, **needs.NEEDED}):
        return nothing_for_want_of(missing, device)
    if missing:
        print("\n".join(needs.lines(missing)), file=sys.stderr)
    if not files and "checks" in asked.only:
        print(f"{device}: nothing was checked: {describe(files)}", file=sys.stderr)
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
    parser.add_argument("--json", type=Path, metavar="FILE", help="All figures as one JSON file")
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
    for problem in unwritable("--json", asked.json):
        parser.error(problem)
    return asked


def run_all(asked: argparse.Namespace, device: str, files: list[Path]) -> int:
    """The parts in order, a table at the end, the JSON file; -> the exit code."""
    began = time.monotonic()
    parts = []
    with tempfile.TemporaryDirectory() as folder:
        for name in PARTS:
            left = LIMIT_SECONDS - (time.monotonic() - began)
            if name not in asked.only or (name == "checks" and asked.walk):
                part = Part(name, lines=["not asked for" if name not in asked.only else "a walk"])
            elif left < 10:
                part = Part(name, "failed", lines=[f"no time left of {LIMIT_SECONDS} s"])
            elif name == "checks":
                part = run_checks(device, files, Path(folder), min(SECONDS[name], left))
            else:
                part = measure(name, Path(folder), min(SECONDS[name], left), asked.walk)
            parts.append(part)
    seconds = time.monotonic() - began
    code = exit_code(parts)
    show_parts(device, parts, seconds)
    if asked.json is not None:
        held = {
            "format": FORMAT,
            "device": device,
            "exit_code": code,
            "seconds": seconds,
            "software": software(),
            "parts": [{"name": p.name, "result": p.result, "seconds": p.seconds} for p in parts],
            **{p.name: p.held for p in parts},
        }
        asked.json.write_text(json.dumps(held, indent=1, default=str) + "\n")
        print(f"written: {asked.json}")
    return code


def exit_code(parts: Sequence[Part]) -> int:
    if any(part.result == "failed" for part in parts):
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


def run_checks(device: str, files: list[Path], folder: Path, limit: float) -> Part:
    """The tests with the marker, a process for each file; the table on stdout."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    began = time.monotonic()
    at_once = max(1, min(FILES_AT_ONCE, (os.cpu_count() or 1) // 2, len(files)))
    with ThreadPoolExecutor(at_once) as pool:
        done = list(pool.map(lambda path: _pytest(path, folder, began + limit), files))
    seconds = time.monotonic() - began
    table = Table(title=f"checks on {device}, {seconds:.0f} s", title_justify="left")
    for column in ("part", "check", "result", "seconds", "why"):
        table.add_column(column)
    totals: Counter[str] = Counter()
    by_part: dict[str, Counter[str]] = {}
    held = []
    for case in sorted((case for run in done for case in run.cases), key=part_of):
        kinds = {child.tag: child.get("message", "") for child in case}
        bad = "failure" in kinds or "error" in kinds
        result = "failed" if bad else "not run" if "skipped" in kinds else "passed"
        why = "".join(next(iter(kinds.values()), "").splitlines()[:1])
        # A test's parameters stand in brackets, which are no markup.
        texts = [escape(text) for text in (case.get("name", ""), why)]
        colour = {"failed": "red", "passed": "green"}.get(result, "yellow")
        part = part_of(case)
        table.add_row(part, texts[0], f"[{colour}]{result}", case.get("time", ""), texts[1])
        by_part.setdefault(part, Counter())[result] += 1
        totals[result] += 1
        held.append({"part": part, "check": case.get("name", ""), "result": result, "why": why})
    if totals:
        console.print(table)
    lines = [f"{name}: {told(counts)}" for name, counts in by_part.items()]
    ran = totals["passed"] + totals["failed"]
    lines.append(
        f"{totals.total()} checks; {ran} ran, {totals['failed']} failed, "
        f"{totals['not run']} not run."
    )
    broken = [run for run in done if run.code not in (0, NO_TESTS)]
    for run in broken:
        if run.code is None:
            lines.append(f"{run.name}: not done after {limit:.0f} s")
        console.print(run.said, markup=False)
    result = "failed" if totals["failed"] or broken else "passed" if ran else "not run"
    return Part("checks", result, seconds, lines, held)


@dataclass
class _Run:
    """code None: it took too long."""

    name: str
    code: int | None
    cases: list[ElementTree.Element]
    said: str


def _pytest(path: Path, folder: Path, deadline: float) -> _Run:
    report = folder / f"{path.stem}.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    command += [f"--junitxml={report}", str(path)]
    code: int | None = None
    said = ""
    try:
        done = subprocess.run(
            command, cwd=HOME, capture_output=True, text=True, env=environment(),
            timeout=max(1.0, deadline - time.monotonic()),
        )  # fmt: skip
        code, said = done.returncode, done.stdout[-4000:] + done.stderr[-2000:]
    except subprocess.TimeoutExpired as error:
        out = error.stdout or b""
        said = (out.decode(errors="replace") if isinstance(out, bytes) else out)[-2000:]
    cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    return _Run(path.name, code, cases, said)


def told(counts: Counter[str]) -> str:
    return ", ".join(f"{counts[kind]} {kind}" for kind in ("passed", "failed", "not run"))


def part_of(case: ElementTree.Element) -> str:
    """What a check is about, by its file: tests/gpu/test_dispatch_gpu.py is about dispatch."""
    modules = [name for name in case.get("classname", "").split(".") if name.startswith("test_")]
    return modules[0].split("_")[1] if modules else "other"


def files_with_checks(tests: Path) -> list[Path]:
    """Test files that name the marker: read, not imported, which would take half a minute."""
    return sorted(p for p in tests.rglob("test_*.py") if MARKER in p.read_text(encoding="utf-8"))


def describe(files: list[Path]) -> str:
    if not files:
        return "no check: no test carries the marker gpu so far"
    return "the checks in " + ", ".join(str(p.relative_to(HOME)) for p in files)


# -- measuring -----------------------------------------------------------------------------------


def measure(name: str, folder: Path, limit: float, walk: bool) -> Part:
    """A part in a process of its own: it shows its tables and leaves a file."""
    out, limits = folder / f"{name}.json", folder / "kernels.json"
    command = [sys.executable, str(HOME / "scripts" / "gpu_check.py"), "--part", name]
    command += ["--out", str(out), "--budget", str(1.0 if walk else MEASURING * limit)]
    command += ["--limits", str(limits)] if limits.exists() else []
    env = environment()
    if walk:
        command.append("--walk")
        env["TRITON_INTERPRET"] = "1"
    began = time.monotonic()
    sys.stdout.flush()
    try:
        code = subprocess.run(command, cwd=HOME, env=env, timeout=limit).returncode
    except subprocess.TimeoutExpired:
        return Part(name, "failed", limit, [f"not done after {limit:.0f} s"])
    seconds = time.monotonic() - began
    if not out.exists():
        return Part(name, "failed", seconds, [f"ended with exit code {code}, see above"])
    held = json.loads(out.read_text())
    result = "failed" if code else "walked" if walk else "measured"
    return Part(name, result, seconds, held.pop("lines"), held)


def run_part(asked: argparse.Namespace) -> int:
    """In a child: measure, show, write. Exit code 1 where something raised."""
    import torch

    from launch.bench.gpu_parts import run_engine, run_kernels

    device = torch.device("cpu" if asked.walk else "cuda")
    if asked.part == "kernels":
        lines, held, failed = run_kernels(device, asked.walk, asked.budget)
    else:
        lines, held, failed = run_engine(device, asked.walk, asked.budget, asked.limits)
    asked.out.write_text(json.dumps({"lines": lines, **held}, default=str))
    return FAILED if failed else PASSED


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
