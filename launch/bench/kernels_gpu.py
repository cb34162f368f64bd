"""`moeserve bench kernels --device cuda`: the GPU kernels on a device, beside limits and libraries.

Knows how that is measured within a budget of seconds, shown as a table and kept as JSON. The cases:
models/deepseek/kernels/gpu/bench. `scripts/gpu_check.py` shows the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.bench.kernels_words import nowhere, refuse
from launch.bench.machine import describe_machine
from launch.bench.screen import only_json, wide_console
from launch.bench.steps import StepProgress
from moeserve.terminal import say

if TYPE_CHECKING:
    import torch

    from models.deepseek.kernels.gpu.bench.clock import Clock
    from models.deepseek.kernels.gpu.bench.limits import Limits
    from models.deepseek.kernels.gpu.bench.run import Measured, Row
    from models.deepseek.kernels.gpu.bench.sizes import Sizes
    from models.deepseek.kernels.gpu.bench.winners import Winners

FORMAT = "moeserve bench kernels gpu 1"
BUDGET = 130.0  # seconds
GOAL = 0.8  # of the limit, where memory binds
CPU_NAME = "CPU"  # where kernels are only walked
NAMED = 6  # shapes that are named where there are many


@dataclass(frozen=True)
class KernelReport:
    device: str
    limits: Limits
    measured: Measured
    winners: Winners

    def as_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "device": self.device,
            "limits": asdict(self.limits),
            "kernels": [row.as_json() for row in self.measured.rows],
            "not_measured": self.measured.left,
            "too_large": dict(self.measured.too_large),
            "seconds": self.measured.seconds,
            "winners_table": self.winners.as_json(),
        }


def measure_kernels(
    device: torch.device,
    sizes: Sizes,
    budget: float = BUDGET,
    only: str = "",
    clock: Clock | None = None,
    limits: Limits | None = None,
    progress: Callable[[str, int, int], None] = lambda name, done, total: None,
    keep: Callable[[KernelReport], None] = lambda so_far: None,
    each_kernel: bool = False,
) -> KernelReport:
    """ConfigError for an `only` that is in no kernel's name. clock None: that of the device; limits
    None: measured now. keep: told behind each shape what there is so far. each_kernel: for a walk:
    one shape of each whatever the budget says, each as often as must be."""
    from models.deepseek.kernels.gpu.bench.clock import make_clock
    from models.deepseek.kernels.gpu.bench.limits import measure_limits
    from models.deepseek.kernels.gpu.bench.run import (
        SECONDS_EACH,
        Measured,
        all_cases,
        measure_all,
    )
    from models.deepseek.kernels.gpu.bench.winners import Winners

    refuse(no_such_kernel(sizes, device, only))
    cases = all_cases(sizes, device, only)
    clock = clock or make_clock(device)
    limits = limits or measure_limits(clock, device)
    name = device_name(device)

    def report(measured: Measured) -> KernelReport:
        return KernelReport(name, limits, measured, Winners.from_rows(name, measured.rows))

    keep(report(Measured([], [case.name for case in cases], 0.0)))  # the limits are known
    least = len({case.kernel for case in cases}) if each_kernel else 0
    measured = measure_all(
        cases, clock, limits, budget, progress, 0.0 if each_kernel else SECONDS_EACH,
        least=least, keep=lambda so_far: keep(report(so_far)),
    )  # fmt: skip
    return report(measured)


def no_such_kernel(sizes: Sizes, device: torch.device, only: str) -> list[str]:
    """Of an `only` that is in no kernel's name: they and their shapes are known without a GPU."""
    from models.deepseek.kernels.gpu.bench.run import all_cases

    cases = all_cases(sizes, device)
    if any(only in case.name for case in cases):
        return []
    return nowhere(only, (case.kernel for case in cases))


def device_name(device: torch.device) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else CPU_NAME


@dataclass(frozen=True)
class GpuKernelBench:
    """What was typed. seconds: of all. json, winners: files."""

    only: str
    seconds: float
    winners: Path | None = None

    def run(self, as_json: bool, problems: Sequence[str] = ()) -> int:
        """The exit code: 1 where a kernel raised or a shape was not measured. problems: of
        other flags. ConfigError for them, for a name that is not there, and where there is no
        device. KeyboardInterrupt, behind what was measured until then, shown and kept."""
        import torch

        from models.deepseek.kernels.gpu.bench.sizes import V3
        from models.deepseek.kernels.gpu.language import HAVE_TRITON, HOW_TO_GET_IT
        from moeserve.device.choose import look, no_cuda, refused

        found = [*problems, *no_such_kernel(V3, torch.device("cpu"), self.only)]
        why = no_cuda(look())
        if why is not None:
            found.append(f"--device cuda: {refused(why, '--compile-only needs none')}")
        elif not HAVE_TRITON:
            found.append(f"--device cuda: {HOW_TO_GET_IT}")
        refuse(found)
        progress = StepProgress(True, unit=" shapes")
        so_far: deque[KernelReport] = deque(maxlen=1)
        interrupted = False
        try:
            report = measure_kernels(
                torch.device("cuda"), V3, self.seconds, self.only,
                progress=progress, keep=so_far.append,
            )  # fmt: skip
        except KeyboardInterrupt:
            if not so_far or not so_far[0].measured.rows:
                raise
            report, interrupted = so_far[0], True
        finally:
            progress.close()
        if not as_json:
            show(report)
        if self.winners is not None:
            report.winners.save(self.winners)
            say(f"written: {self.winners}")
        if as_json:
            only_json(report.as_json() | {"machine": describe_machine()})
        if interrupted:
            raise KeyboardInterrupt
        return 1 if report.measured.failed or report.measured.left else 0


def show(report: KernelReport) -> None:
    from rich.markup import escape
    from rich.table import Table

    console = wide_console()
    limits = report.limits
    table = Table(
        title=f"kernels on {report.device}: {limits.memory / 1e12:.2f} TB/s copied, "
        f"{limits.bf16 / 1e12:.0f} TFLOP/s bf16, {limits.fp8 / 1e12:.0f} TFLOP/s e4m3 "
        f"({limits.fp8_by}), an empty run {limits.overhead * 1e6:.1f} us",
        title_justify="left",
    )
    table.add_column("kernel, shape")
    for name in ("us", "limit us", "of limit"):
        table.add_column(name, justify="right")
    table.add_column("bound")
    for name in ("TB/s", "TFLOP/s"):
        table.add_column(name, justify="right")
    table.add_column("others, us")
    table.add_column("won")
    for row in sorted(report.measured.rows, key=lambda row: row.kernel):
        table.add_row(*(escape(cell) for cell in _cells(row)))
    console.print(table)
    for line in summary(report):
        console.print(line, markup=False)


def _cells(row: Row) -> list[str]:
    if row.error:
        return [row.name, "failed", f"{row.limit * 1e6:.1f}", "", row.bound, "", "", row.error, ""]
    others = [
        f"{name} {seconds * 1e6:.1f}" + (" (differs)" if name in row.wrong else "")
        for name, seconds in row.rivals.items()
    ]
    return [
        row.name + ("" if row.captured else " *"),
        f"{row.ours * 1e6:.1f}",
        f"{row.limit * 1e6:.1f}",
        f"{row.of_limit:.0%}",
        row.bound,
        f"{row.bytes / row.ours / 1e12:.2f}",
        f"{row.flops / row.ours / 1e12:.0f}",
        ", ".join(others),
        row.winner,
    ]


def summary(report: KernelReport) -> list[str]:
    """Lines below the table: what was reached, who was not here, what is missing."""
    rows = [row for row in report.measured.rows if not row.error]
    lines = []
    by_memory = [row for row in rows if row.bound == "memory"]
    reached = sum(row.of_limit >= GOAL for row in by_memory)
    if by_memory:
        lines.append(
            f"bound by memory: {reached} of {len(by_memory)} shapes at {GOAL:.0%} of their limit "
            "or more"
        )
    products = [row for row in rows if row.kernel == "fp8_gemm" and row.bound == "compute"]
    if products:
        best = max(products, key=lambda row: row.of_limit)
        lines.append(f"block-FP8 GEMM: {best.of_limit:.0%} of the measured rate ({best.name})")
    absent: dict[str, str] = {}
    for row in rows:
        for name, why in row.absent.items():
            if name not in row.rivals:
                absent.setdefault(name, why)
    lines += [f"not beside ours: {name} ({why})" for name, why in absent.items()]
    wrong = [f"{name} at {row.name}" for row in rows for name in row.wrong]
    if wrong:
        lines.append(f"other results than ours: {', '.join(wrong)}")
    if any(not row.captured for row in rows):
        lines.append("*: not captured, the host's launches are in the time")
    failed = [row.name for row in report.measured.failed]
    if failed:
        lines.append(f"failed: {', '.join(failed)}")
    large = [f"{name} ({why})" for name, why in report.measured.too_large.items()]
    if large:
        lines.append(f"left out for want of memory: {_some(large)}")
    left = report.measured.left
    if left:
        whole = len(report.measured.rows) + len(left)
        done = "walked" if report.device == CPU_NAME else "measured"
        lines.append(f"{done} in part: {len(rows)} of {whole} shapes")
        lines.append(f"not measured: {_some(left)}")
    lines.append(f"{len(rows)} shapes in {report.measured.seconds:.0f} s")
    return lines


def _some(names: Sequence[str]) -> str:
    """The first of many."""
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f", and {more} more (in the JSON)" if more > 0 else "")
