"""`moeserve bench kernels --compile-only`: the GPU kernels compiled without a GPU, and shown.

Knows how that is asked for, done in two processes, shown, compared with the record and put into it.
What a kernel compiles to: models/deepseek/kernels/gpu/aot.py; what of it may change: compiled.py.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launch.bench.machine import describe_machine
from launch.bench.screen import last_line, wide_console
from launch.bench.steps import StepProgress
from launch.env import usable_cores
from launch.signals import die_with_parent
from launch.version import HOME
from moeserve.errors import ConfigError

if TYPE_CHECKING:
    from models.deepseek.kernels.gpu.aot import CompileReport

PROCESSES = 2  # a compiler keeps one core busy and holds some hundred MB
Task = tuple[int, int]  # index of a case in the registry, architecture
BENCHMARKS = Path("BENCHMARKS.md")
MARKS = ("<!-- compiled kernels -->", "<!-- end of compiled kernels -->")


@dataclass(frozen=True)
class KernelCompilation:
    """What was typed. renew: what comes out becomes the record, and the table in BENCHMARKS.md;
    only what has changed since the last one is compiled."""

    only: str
    renew: bool = False
    processes: int = PROCESSES

    def run(self, as_json: bool) -> int:
        """The exit code: 1 when something is worse than recorded, and that is not the record now.
        ConfigError where triton is missing, for a name that is not there, for a kernel that does
        not compile."""
        from models.deepseek.kernels.gpu.compiled import faults, gone, key_of, read_record
        from models.deepseek.kernels.gpu.errors import CompileFailed, TritonMissing
        from models.deepseek.kernels.gpu.language import need_triton
        from models.deepseek.kernels.gpu.registry import all_cases

        try:
            need_triton()
        except TritonMissing as error:
            raise ConfigError([f"--compile-only: {error}"]) from None
        import triton

        cases = all_cases()
        tasks = [
            (index, arch)
            for index, case in enumerate(cases)
            if self.only in f"{case.name} {case.config}"
            for arch in case.archs
        ]
        if not tasks:
            names = ", ".join(dict.fromkeys(case.name for case in cases))
            raise ConfigError([f"--only {self.only!r}: in no kernel's name: {names}"])
        if self.renew and self.only:
            raise ConfigError(["--renew: the record is of all kernels, not with --only"])
        version, record = read_record()
        began = time.monotonic()
        done = unchanged(tasks, triton.__version__) if self.renew else {}
        todo = [task for task in tasks if task not in done]
        progress = StepProgress(True, unit=" compilations")
        try:
            for task, report in compile_all(todo, self.processes):
                done[task] = report
                progress(report.kernel, len(done), len(tasks))
        except (CompileFailed, TritonMissing) as error:
            raise ConfigError([f"--compile-only: {error}"]) from None
        finally:
            progress.close()
        seconds = time.monotonic() - began
        reports = [done[task] for task in tasks]
        if self.renew:
            renew(tasks, reports, triton.__version__)
        if version != triton.__version__:
            record = {}  # another compiler: only spills, and what a case wants
        worse = [
            line
            for (index, arch), report in zip(tasks, reports, strict=True)
            for line in faults(cases[index], arch, report, record)
        ]
        if not self.only:
            worse += [f"{name}: recorded, and there no more" for name in gone(cases, record)]
        new = sum(key_of(report) not in record for report in reports) if record else 0
        title = f"{len(todo)} compilations by triton {triton.__version__} in {seconds:.0f} s"
        _show(title, reports)
        for line in worse:
            print(f"worse: {line}")
        against = f"the record (triton {version})"
        if version != triton.__version__:
            against = f"no record of triton {triton.__version__} (of {version or 'none'})"
        print(f"beside {against}: {len(worse) or 'nothing'} worse")
        if new and not self.renew:
            print(f"not recorded: {new} of {len(reports)}; --renew records them")
        if as_json:
            last_line(
                {
                    "kernels": [asdict(report) for report in reports],
                    "triton": triton.__version__,
                    "recorded_with": version,
                    "worse": worse,
                    "not_recorded": new,
                    "seconds": seconds,
                    "machine": describe_machine(),
                }
            )
        return 1 if worse and not self.renew else 0


def compile_all(
    tasks: Sequence[Task], processes: int = PROCESSES
) -> Iterator[tuple[Task, CompileReport]]:
    """Each as it is done, in as many processes as there are cores, `processes` at most. Raises
    CompileFailed for the first that does not compile; the others are not waited for."""
    if not tasks:
        return
    workers = max(1, min(processes, usable_cores(), len(tasks)))
    with ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),  # torch's threads do not survive a fork
        initializer=die_with_parent,
        initargs=(os.getpid(),),
    ) as pool:
        waiting = {pool.submit(_compile, task): task for task in tasks}
        try:
            for future in as_completed(waiting):
                yield waiting[future], future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _compile(task: Task) -> CompileReport:
    """In a process of the pool: the case is looked up there, as kernels cannot be sent."""
    from models.deepseek.kernels.gpu.aot import compile_case
    from models.deepseek.kernels.gpu.registry import all_cases

    index, arch = task
    return compile_case(all_cases()[index], arch)


def unchanged(tasks: Sequence[Task], version: str) -> dict[Task, CompileReport]:
    """What the record holds as this compiler would make it again: to renew it, these need not be
    compiled. (Without a record all are: remove it when aot.py counts otherwise.)"""
    from models.deepseek.kernels.gpu.aot import ARCHS
    from models.deepseek.kernels.gpu.compiled import changed, read_record
    from models.deepseek.kernels.gpu.registry import all_cases

    cases = all_cases()
    _, record = read_record()
    anew = set(changed(cases, version, record))
    return {
        (index, arch): record[cases[index].name, cases[index].config, ARCHS[arch]].report
        for index, arch in tasks
        if (index, arch) not in anew
    }


def renew(tasks: Sequence[Task], reports: Sequence[CompileReport], version: str) -> None:
    """Write the record, and in a checkout the table between the marks in BENCHMARKS.md."""
    from models.deepseek.kernels.gpu.compiled import (
        RECORD,
        Recorded,
        fingerprint,
        markdown,
        write_record,
    )
    from models.deepseek.kernels.gpu.registry import all_cases

    cases = all_cases()
    write_record(
        version,
        [
            Recorded(report, fingerprint(cases[index], arch, version))
            for (index, arch), report in zip(tasks, reports, strict=True)
        ],
    )
    said = [RECORD.name]
    page = HOME / BENCHMARKS
    if page.exists() and MARKS[0] in page.read_text():
        page.write_text(with_table(page.read_text(), markdown(reports)))
        said.append(page.name)
    print(f"renewed: {', '.join(said)}", file=sys.stderr)


def with_table(page: str, table: str) -> str:
    """The page with what stands between the marks replaced."""
    before, _, rest = page.partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    return f"{before}{MARKS[0]}\n\n{table}\n{MARKS[1]}{after}"


def _show(title: str, reports: Sequence[CompileReport]) -> None:
    from rich.table import Table

    from models.deepseek.kernels.gpu.compiled import unit_of, wide_loads

    table = Table(title=title, title_justify="left")
    table.add_column("kernel", no_wrap=True)
    table.add_column("configuration")
    table.add_column("for")
    for name in ("registers", "spills", "shared KiB", "wide loads"):
        table.add_column(name, justify="right")
    table.add_column("matrix unit")
    for report in reports:
        table.add_row(
            report.kernel,
            report.config,
            report.arch,
            str(report.registers),
            str(report.spills),
            f"{report.shared_bytes / 1024:.1f}",
            str(wide_loads(report)),
            unit_of(report),
        )
    wide_console().print(table)
