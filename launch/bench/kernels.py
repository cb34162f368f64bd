"""`moeserve bench kernels`: each kernel of a layer beside plain torch and this machine's limits.

Knows how that is asked for and shown. What is measured: models/deepseek/kernels/bench.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from launch.bench.kernels_words import nowhere, refuse
from launch.bench.machine import describe_machine
from launch.bench.screen import only_json, wide_console
from launch.bench.steps import StepProgress
from launch.choices import not_one_of

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

    def run(self, as_json: bool, problems: Sequence[str] = ()) -> None:
        """problems: of other flags. ConfigError for them and for names that are not there."""
        found = list(problems)
        if self.kernels not in NAMES:
            found.append(not_one_of("--kernels", self.kernels, NAMES))
        import torch

        from models.deepseek.kernels.bench import all_cases, measure, measure_limits
        from models.deepseek.kernels.select import create_kernels

        # Names need no kernels; to build the native ones may take a minute.
        plain = create_kernels("torch").kernels
        found += nowhere(self.only, [maker.name for maker in all_cases(plain)])
        refuse(found)
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        choice = create_kernels(self.kernels)
        makers = [maker for maker in all_cases(choice.kernels) if self.only in maker.name]
        limits = measure_limits()
        rows: list[Row] = []
        progress = StepProgress(True, unit=" kernels")
        try:
            for maker in makers:
                progress(maker.name, len(rows), len(makers))
                case = maker.make()
                assert case.name == maker.name, (case.name, maker.name)
                rows.append(measure(case, limits, self.seconds))
            progress("done", len(makers), len(makers))
        finally:
            progress.close()
        threads = torch.get_num_threads()
        if not as_json:
            _show(rows, choice.reason, limits, threads)
            return
        only_json(
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
