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
import time
from collections.abc import Sequence
from pathlib import Path

HOME = Path(__file__).resolve().parent.parent
if str(HOME) not in sys.path:  # as a script, nothing being installed
    sys.path.insert(0, str(HOME))

from launch.bench.gpu_part import Interrupted, Part, code_of  # noqa: E402
from launch.bench.gpu_tests import run_checks, show_checks  # noqa: E402

LIMIT_SECONDS = 470
PASSED, FAILED, NOTHING_CHECKED = 0, 1, 2
IN_PART = "measured in part"
MARKER = "mark.gpu"
NO_CHECK = "no test carries the marker gpu so far"
RAISED = 3  # a part's: what did is in its lines
PARTS = ("checks", "kernels", "engine")
# Seconds that a part has for sure. Of all that it has, so many at the end are for what has begun.
SECONDS = {"checks": 220.0, "kernels": 120.0, "engine": 125.0}
ENDING = {"kernels": 30.0, "engine": 40.0}
WALKING = 20.0  # of a walk, for kernels beyond one shape of each
FORMAT = "moeserve gpu-check 1"
FILE = "gpu-check.json"  # in the root
CARRY = "carried"  # folder in the root
WHAT = {
    "kernels": "every kernel at DeepSeek-V3's shapes, timed beside its limit, torch and libraries",
    "engine": "an engine of DeepSeek-V3's dimensions on random weights: tokens/s, a step by kernel",
}


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
        "--json", type=Path, metavar="FILE", help=f"All figures as JSON; default: {FILE}"
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
                    part = run_checks(HOME, environment(), files, Path(folder), limit)
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


# -- what is there ---------------------------------------------------------------------------------


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
