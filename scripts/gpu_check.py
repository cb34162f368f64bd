"""`make gpu-check`: what can be checked on a GPU today, run and shown as one table.

Honest by construction: the checks are the tests that carry the marker `gpu`, and where none ran
the exit code is not 0. Exit codes: 0 all that ran passed, 1 a check failed, 2 nothing was checked
(no GPU, or no check). Without a GPU it says so at once and names the files that would be run.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

HOME = Path(__file__).resolve().parent.parent
LIMIT_SECONDS = 480
PASSED, FAILED, NOTHING_CHECKED = 0, 1, 2
MARKER = "mark.gpu"
NO_TESTS = 5  # pytest's exit code


def main() -> int:
    files = files_with_checks(HOME / "tests")
    device = describe_device()
    if device is None:
        print(f"no GPU found: nothing was checked ({why_no_device()})", file=sys.stderr)
        print(f"on a GPU this runs {describe(files)}", file=sys.stderr)
        return NOTHING_CHECKED
    if not files:
        print(f"{device}: nothing was checked: {describe(files)}", file=sys.stderr)
        return NOTHING_CHECKED
    return run(device, files)


def run(device: str, files: list[Path]) -> int:
    """Run the checks in these files; the table on stdout."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        began = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--junitxml={report}"]
        command += map(str, files)
        try:
            done = subprocess.run(
                command, cwd=HOME, capture_output=True, text=True, timeout=LIMIT_SECONDS
            )
        except subprocess.TimeoutExpired:
            console.print(f"[red]gpu-check took longer than {LIMIT_SECONDS} s")
            return FAILED
        seconds = time.monotonic() - began
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    table = Table(title=f"gpu-check on {device}, {seconds:.0f} s")
    for column in ("part", "check", "result", "seconds", "why"):
        table.add_column(column)
    failed = ran = 0
    parts: dict[str, Counter[str]] = {}
    for case in sorted(cases, key=part_of):  # stable: within a part as they ran
        part = part_of(case)
        kinds = {child.tag: child.get("message", "") for child in case}
        bad = "failure" in kinds or "error" in kinds
        skipped = "skipped" in kinds
        failed += bad
        ran += not skipped
        result = "[red]failed" if bad else "[yellow]not run" if skipped else "[green]passed"
        why = next(iter(kinds.values()), "").splitlines()[:1]
        # A test's parameters stand in brackets, which are no markup.
        texts = [escape(text) for text in (case.get("name", ""), "".join(why))]
        table.add_row(part, texts[0], result, case.get("time", ""), texts[1])
        parts.setdefault(part, Counter())[
            "failed" if bad else "not run" if skipped else "passed"
        ] += 1
    if cases:
        console.print(table)
    for part, counts in parts.items():
        told = ", ".join(f"{counts[kind]} {kind}" for kind in ("passed", "failed", "not run"))
        console.print(f"{part}: {told}")
    console.print(f"{len(cases)} checks; {ran} ran, {failed} failed, {len(cases) - ran} not run.")
    if failed or done.returncode not in (0, NO_TESTS):
        console.print(done.stdout[-4000:] + done.stderr[-2000:], markup=False)
        return FAILED
    return PASSED if ran else NOTHING_CHECKED


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


def describe_device() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def why_no_device() -> str:
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return f"torch {torch.__version__} sees no CUDA device"


if __name__ == "__main__":
    sys.exit(main())
