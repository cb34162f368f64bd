"""`make gpu-check`: what can be checked on a GPU today, run and shown as one table.

Honest by construction: the list is what pytest collects under the marker `gpu`; where there is no
GPU, every check is shown as not run, and the exit code says so (2). Failures: 1.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from rich.console import Console
from rich.table import Table

HOME = Path(__file__).resolve().parent.parent
LIMIT_SECONDS = 480


def main() -> int:
    console = Console()
    device = describe_device()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        began = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--junitxml={report}"]
        try:
            done = subprocess.run(
                command, cwd=HOME, capture_output=True, text=True, timeout=LIMIT_SECONDS
            )
        except subprocess.TimeoutExpired:
            console.print(f"[red]gpu-check took longer than {LIMIT_SECONDS} s")
            return 1
        seconds = time.monotonic() - began
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    table = Table(title=f"gpu-check on {device or 'no GPU'}, {seconds:.0f} s")
    for column in ("check", "result", "seconds", "why"):
        table.add_column(column)
    failed = ran = 0
    for case in cases:
        kinds = {child.tag: child.get("message", "") for child in case}
        bad = "failure" in kinds or "error" in kinds
        skipped = "skipped" in kinds
        failed += bad
        ran += not skipped
        result = "[red]failed" if bad else "[yellow]not run" if skipped else "[green]passed"
        why = next(iter(kinds.values()), "").splitlines()[:1]
        table.add_row(case.get("name"), result, case.get("time", ""), "".join(why))
    console.print(table)
    console.print(f"{len(cases)} checks exist; {ran} ran, {failed} failed.")
    if not cases:
        console.print("No check wants a GPU yet: moeserve runs on CPUs so far.")
    if failed or done.returncode not in (0, 5):  # 5: nothing collected
        console.print(done.stdout[-4000:] + done.stderr[-2000:], markup=False)
        return 1
    return 0 if ran else 2


def describe_device() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


if __name__ == "__main__":
    sys.exit(main())
