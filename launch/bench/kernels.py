"""`moeserve bench kernels`: each kernel of a layer beside plain torch and this machine's limits.

Knows how that is asked for and shown. What is measured: models/deepseek/kernels/bench.py.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from launch.bench.machine import describe_machine
from launch.bench.screen import last_line, wide_console
from launch.bench.steps import StepProgress
from launch.choices import not_one_of
from moeserve.errors import ConfigError

if TYPE_CHECKING:
    from models.deepseek.kernels.bench import Limits, Row

NAMES = ("auto", "native", "torch")


@dataclass(frozen=True)
class KernelBench:
    """What was typed."""

    only: str
    kernels: str
    seconds: float
    threads: int | None

    def run(self, as_json: bool) -> None:
        """ConfigError for a name that is not there, before torch is imported."""
        if self.kernels not in NAMES:
            raise ConfigError([not_one_of("--kernels", self.kernels, NAMES)])
        import torch

        from models.deepseek.kernels.bench import all_cases, cases_named, measure, measure_limits
        from models.deepseek.kernels.select import create_kernels

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        choice = create_kernels(self.kernels)
        limits = measure_limits()
        rows: list[Row] = []
        whole = len(all_cases(choice.kernels))
        progress = StepProgress(True, unit=" kernels")
        for case in cases_named(choice.kernels, self.only):
            progress(case.name, len(rows), whole)
            rows.append(measure(case, limits, self.seconds))
        progress("done", whole, whole)
        if not rows:
            names = [case.name for case in cases_named(choice.kernels)]
            raise ConfigError([f"--only {self.only!r}: in no kernel's name: {', '.join(names)}"])
        threads = torch.get_num_threads()
        _show(rows, choice.reason, limits, threads)
        if as_json:
            last_line(
                {
                    "kernels": [asdict(row) for row in rows],
                    "chosen": choice.reason,
                    "threads": threads,
                    "limits": asdict(limits),
                    "machine": describe_machine(),
                }
            )


def _show(rows: list[Row], reason: str, limits: Limits, threads: int) -> None:
    from rich.table import Table

    console = wide_console()
    table = Table(
        title=f"{reason}; {threads} threads. Limits now: {limits.gflops:.0f} GFLOP/s "
        f"(torch, bf16), {limits.gbytes:.1f} GB/s read",
        title_justify="left",
    )
    table.add_column("kernel")
    for name in ("ours us", "torch us", "ratio", "GFLOP/s", "of peak", "GB/s", "of read"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.kernel,
            f"{row.ours * 1e6:.0f}",
            "-" if row.theirs is None else f"{row.theirs * 1e6:.0f}",
            "-" if row.ratio is None else f"{row.ratio:.2f}",
            f"{row.gflops:.0f}",
            f"{row.of_peak:.0%}",
            f"{row.gbytes:.1f}",
            f"{row.of_read:.0%}" + (" *" if row.of_read > 1 else ""),
        )
    console.print(table)
    console.print("ratio: torch's time over ours, median of pairs; -: torch has no such kernel")
    if any(row.of_read > 1 for row in rows):
        console.print("*: more than memory gives: what it read lay in the caches")
