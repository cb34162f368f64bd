"""`moeserve bench kernels --compile-only`: the GPU kernels compiled without a GPU, and shown.

Knows how that is asked for, shown, compared with the record and put into it. In which processes:
compile_pool.py; what a kernel compiles to: models/deepseek/kernels/gpu/aot.py; what of it may
change: compiled.py there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.bench.compile_pool import (
    PROCESSES,
    Failed,
    Task,
    compile_all,
    ends_on_sigterm,
    need_compiler,
)
from launch.bench.kernels_words import nowhere, refuse
from launch.bench.machine import describe_machine
from launch.bench.screen import only_json, wide_console
from launch.bench.steps import StepProgress
from launch.version import HOME
from moeserve.terminal import counted, say

if TYPE_CHECKING:
    from models.deepseek.kernels.gpu.aot import CompileReport
    from models.deepseek.kernels.gpu.compiled import Record

WORSE, NOTHING_COMPARED = 1, 3  # exit codes
NARROW = 110  # columns of a terminal: below, the table does without frames and long headings
NAMED = 8  # that do not compile: so many are named on the screen
BENCHMARKS = Path("BENCHMARKS.md")
MARKS = ("<!-- compiled kernels -->", "<!-- end of compiled kernels -->")


@dataclass(frozen=True)
class Compiled:
    """What came of it. failed: those that do not compile, and why; new: reports that the record
    has not; compared: reports beside which it has one of this compiler."""

    tasks: Sequence[Task]
    compiled: int  # the others are from the record
    reports: Sequence[CompileReport]
    failed: Sequence[Failed]
    worse: Sequence[str]
    new: int
    seconds: float
    triton: str
    recorded_with: str

    @property
    def compared(self) -> int:
        return len(self.reports) - self.new

    def lines(self, renewed: bool = False) -> list[str]:
        """Below the table. renewed: what the record had not is in it now."""
        said = [f"failed: {one.line}" for one in self.failed[:NAMED]]
        if len(self.failed) > NAMED:
            said.append(f"failed: {len(self.failed) - NAMED} more (all in the JSON)")
        said += [f"worse: {line}" for line in self.worse]
        if not self.reports:
            return said
        then = "they are recorded now" if renewed else "--renew records them"
        if not self.compared:
            return [*said, f"nothing compared: {self._why_not(renewed)}; {then}"]
        worse = len(self.worse) or "nothing"
        said.append(
            f"beside the record (triton {self.recorded_with}): {self.compared} compared, {worse} "
            "worse"
        )
        if self.new:
            said.append(f"not recorded: {self.new} of {len(self.reports)}; {then}")
        return said

    def _why_not(self, renewed: bool) -> str:
        """Of the record as it was before."""
        was = "was" if renewed else "is"
        if not self.recorded_with:
            return f"there {was} no record"
        if self.recorded_with != self.triton:
            return f"the record {was} of triton {self.recorded_with}, this is {self.triton}"
        return f"none of these {len(self.reports)} {was} in the record"

    def exit_code(self, renewed: bool) -> int:
        if self.failed or (self.worse and not renewed):
            return WORSE
        return 0 if self.compared or renewed else NOTHING_COMPARED

    def as_json(self) -> dict[str, Any]:
        return {
            "kernels": [asdict(report) for report in self.reports],
            "failed": [asdict(one) for one in self.failed],
            "triton": self.triton,
            "recorded_with": self.recorded_with,
            "compared": self.compared,
            "worse": list(self.worse),
            "not_recorded": self.new,
            "seconds": self.seconds,
        }


@dataclass(frozen=True)
class KernelCompilation:
    """What was typed. renew: what comes out becomes the record, and the table in BENCHMARKS.md;
    only what has changed since the last one is compiled."""

    only: str
    renew: bool = False
    processes: int = PROCESSES

    def run(self, as_json: bool, problems: Sequence[str] = ()) -> int:
        """The exit code: 1 when a kernel does not compile, or something is worse than recorded and
        that is not the record now; 3 when nothing was compared. problems: of other flags.
        ConfigError for them, for a name that is not there, where triton is missing, and for a
        record that is none."""
        from models.deepseek.kernels.gpu.compiled import kept_apart, read_record
        from models.deepseek.kernels.gpu.errors import RecordUnreadable, TritonMissing
        from models.deepseek.kernels.gpu.registry import all_cases

        cases = all_cases()
        tasks = [
            (index, arch)
            for index, case in enumerate(cases)
            if self.only in f"{case.name} {case.config}"
            for arch in case.archs
        ]
        found = list(problems)
        if not tasks:
            found += nowhere(self.only, (case.name for case in cases))
        if self.renew and self.only:
            found.append("--renew: the record is of all kernels, not with --only")
        version = ""
        record: Record = {}
        try:
            need_compiler()
            import triton

            version, record = read_record(*kept_apart(triton.__version__))
        except (RecordUnreadable, TritonMissing) as error:
            found.append(f"--compile-only: {error}")
        if self.renew:
            found += page_faults(HOME / BENCHMARKS)
        refuse(found)
        done = self._compile(tasks, version, record)
        said = "not renewed: the record is of kernels that all compile"
        if renewed := self.renew and not done.failed:
            said = renew(done.tasks, done.reports, done.triton)
        tell: Callable[[str], None] = say
        if not as_json:
            made = counted(done.compiled, "compilation")
            _show(f"{made} by triton {done.triton} in {done.seconds:.0f} s", done.reports)
            tell = print
        for line in done.lines(renewed):
            tell(line)
        if self.renew:
            say(said)
        if as_json:
            only_json(done.as_json() | {"machine": describe_machine()})
        return done.exit_code(self.renew)

    def _compile(self, tasks: Sequence[Task], version: str, record: Record) -> Compiled:
        import triton

        from models.deepseek.kernels.gpu.compiled import faults, gone, key_of
        from models.deepseek.kernels.gpu.errors import CompileFailed
        from models.deepseek.kernels.gpu.registry import all_cases

        cases = all_cases()
        began = time.monotonic()
        done: dict[Task, CompileReport] = {}
        if self.renew:
            done = unchanged(tasks, triton.__version__)
        failed: list[Failed] = []
        progress = StepProgress(True, unit=" compilations")
        todo = [task for task in tasks if task not in done]
        try:
            with ends_on_sigterm(), closing(compile_all(todo, self.processes)) as coming:
                for task, report in coming:
                    case = cases[task[0]]
                    if isinstance(report, CompileFailed):
                        failed.append(Failed.of(case, task[1], report))
                    else:
                        done[task] = report
                    progress(case.name, len(done) + len(failed), len(tasks))
        finally:
            progress.close()
        seconds = time.monotonic() - began
        there = record if version == triton.__version__ else {}  # of another compiler: no measure
        kept = [task for task in tasks if task in done]
        worse = [
            line
            for index, arch in kept
            for line in faults(cases[index], arch, done[index, arch], there)
        ]
        if not self.only:
            worse += [f"{name}: recorded, and there no more" for name in gone(cases, there)]
        reports = [done[task] for task in kept]
        new = sum(key_of(report) not in there for report in reports)
        return Compiled(
            kept, len(todo), reports, failed, worse, new, seconds, triton.__version__, version
        )


def unchanged(tasks: Sequence[Task], version: str) -> dict[Task, CompileReport]:
    """What the record holds as this compiler would make it again: to renew it, these need not be
    compiled."""
    from models.deepseek.kernels.gpu.aot import ARCHS
    from models.deepseek.kernels.gpu.compiled import kept_apart, outdated, read_record
    from models.deepseek.kernels.gpu.registry import all_cases

    cases = all_cases()
    _, record = read_record(*kept_apart(version))
    anew = set(outdated(cases, version, record))
    return {
        (index, arch): record[cases[index].name, cases[index].config, ARCHS[arch]].report
        for index, arch in tasks
        if (index, arch) not in anew
    }


def page_faults(page: Path) -> list[str]:
    """Why the table cannot be renewed in it. Where there is no such page (no checkout), it need not
    be."""
    if not page.exists():
        return []
    try:
        text = page.read_text()
    except (OSError, UnicodeDecodeError) as error:
        return [f"--renew: {page}: cannot be read: {getattr(error, 'strerror', None) or error}"]
    if all(text.count(mark) == 1 for mark in MARKS) and text.index(MARKS[0]) < text.index(MARKS[1]):
        return []
    return [f"--renew: {page}: the table's place must stand in it once: {MARKS[0]} ... {MARKS[1]}"]


def renew(tasks: Sequence[Task], reports: Sequence[CompileReport], version: str) -> str:
    """Write the record, and in a checkout the table between the marks in BENCHMARKS.md. Returns
    what was done, in words."""
    from models.deepseek.kernels.gpu.compiled import (
        RECORD,
        Recorded,
        kept_apart,
        markdown,
        write_record,
    )
    from models.deepseek.kernels.gpu.fingerprint import counted, fingerprint
    from models.deepseek.kernels.gpu.registry import all_cases

    cases = all_cases()
    write_record(
        version,
        [
            Recorded(report, fingerprint(cases[index], arch, version), counted(cases[index], arch))
            for (index, arch), report in zip(tasks, reports, strict=True)
        ],
        *(apart := kept_apart(version)),
    )
    said = f"renewed: {', '.join(path.name for path in apart) or RECORD.name}"
    page = HOME / BENCHMARKS
    if apart:  # another compiler's: the table is of one
        return said
    if not page.exists():
        return f"{said}; without the table of {page.name}, which is not in {HOME}"
    page.write_text(with_table(page.read_text(), markdown(reports)))
    return f"{said}, {page.name}"


def with_table(page: str, table: str) -> str:
    """The page with what stands between the marks replaced."""
    before, _, rest = page.partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    return f"{before}{MARKS[0]}\n\n{table}\n{MARKS[1]}{after}"


def _show(title: str, reports: Sequence[CompileReport]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from models.deepseek.kernels.gpu.compiled import unit_of, wide_loads

    console = wide_console()
    told = os.environ.get("COLUMNS", "")
    if told.isdecimal() and int(told):  # as `moeserve experts`: also for a pipe
        console.width = int(told)
    narrow = console.width < NARROW
    shape: dict[str, Any] = {"box": SIMPLE_HEAD, "collapse_padding": True, "pad_edge": False}
    table = Table(title=title, title_justify="left", **(shape if narrow else {}))
    table.add_column("kernel", overflow="fold")
    table.add_column("configuration", overflow="fold")
    table.add_column("for", overflow="fold", min_width=7 if narrow else None)
    for name in ("regs" if narrow else "registers", "spills", "shared KiB", "wide loads"):
        table.add_column(name, justify="right", overflow="fold")
    table.add_column("unit" if narrow else "matrix unit", overflow="fold")
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
    console.print(table)
