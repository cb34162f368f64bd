"""`moeserve trace`: a window of steps of all ranks of a running job, as a file for Perfetto.

Knows the server's routes, the order of asking, waiting, saving, and what a person sees. Spans lie
in the server until the end: it is asked for them at the beginning, on a thread, and answers at the
end, so that they come also where a rank dies or the server stops meanwhile.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.experts.http import ExpertsHttp
from launch.output import unwritable
from moeserve.errors import ConfigError, MoeserveError
from moeserve.terminal import counted

if TYPE_CHECKING:
    from moeserve.engine import Engine
    from moeserve.tracing_clocks import Offset
    from moeserve.tracing_job import JobTrace
    from moeserve.tracing_skew import Skew

LOOK_EVERY = 0.5  # seconds between two looks at how far it is
LAST_SECONDS = 30.0  # what a server may take to answer when the trace has ended
CUT_SHORT = "x-trace-cut-short"  # header: why it is shorter than was asked for
ROUTE = "/debug/trace"
_NUMBER = 1  # of the one trace that an engine makes here


@dataclass(frozen=True)
class TraceCommand:
    """The command's flags. seconds: end by then, with the steps that came."""

    url: str
    output: Path
    steps: int = 32
    seconds: float = 60.0
    as_json: bool = False
    admin_key: str | None = None

    def run(self) -> None:
        """Trace and save. ConfigError before anything is asked; MoeserveError: the server, or,
        after saving, that it ended before it was told to."""
        self._check()
        with ExpertsHttp(self.url, self.admin_key) as http:
            answer = _Answer(http, {"steps": self.steps, "seconds": self.seconds, "format": "raw"})
            try:
                self._wait(http, answer)
            except KeyboardInterrupt:
                print("stopping: the steps so far are saved", file=sys.stderr)
                http.post(f"{ROUTE}/stop")
            content, cut_short = answer.now()
        from moeserve.tracing_job import JobTrace

        trace = JobTrace.from_bytes(content)
        if not trace.num_steps:
            raise MoeserveError(f"{self.url}: nothing to save: {cut_short or 'no step came'}")
        save_and_tell(trace, self.output, self.as_json, source=self.url)
        if cut_short is not None:
            raise MoeserveError(
                f"{self.url}: the trace was cut short: {cut_short}; {trace.num_steps} of "
                f"{self.steps} steps are saved in {self.output}"
            )

    def _check(self) -> None:
        from moeserve.tracing_desk import MAX_SECONDS
        from moeserve.wire_trace import MAX_TRACE_STEPS

        problems = []
        if not 1 <= self.steps <= MAX_TRACE_STEPS:
            problems.append(f"--steps {self.steps}: must be 1 to {MAX_TRACE_STEPS}")
        if not 0 < self.seconds <= MAX_SECONDS:
            problems.append(f"--seconds {self.seconds:g}: must be above 0, {MAX_SECONDS:g} at most")
        problems += file_problems("--out", self.output)
        if problems:
            raise ConfigError(problems)

    def _wait(self, http: ExpertsHttp, answer: _Answer) -> None:
        shown = ""
        while not answer.came(LOOK_EVERY):
            try:
                state = http.get(ROUTE)
            except MoeserveError:
                return  # what it says at its end tells more
            text = f"{state.get('num_steps', 0)} of {self.steps} steps"
            if text != shown and sys.stderr.isatty():
                print(f"\rtracing: {text} (Ctrl-C ends it) ", end="", file=sys.stderr, flush=True)
            elif not shown:
                print("tracing; waits for steps that have tokens", file=sys.stderr, flush=True)
            shown = text
        if shown and sys.stderr.isatty():
            print(file=sys.stderr)


def file_problems(option: str, path: Path) -> list[str]:
    """Why a trace could not be saved there, before anything is traced."""
    problems = []
    if path.suffix != ".json":
        problems.append(f"{option} {str(path)!r}: must end in .json")
    problems += unwritable(option, path)
    return problems


class _Answer:
    """The answer to "trace, and give me the steps when they are over"."""

    def __init__(self, http: ExpertsHttp, body: dict[str, Any]) -> None:
        self._http, self._body = http, body
        self._content: bytes | None = None
        self._headers: Mapping[str, str] = {}
        self._error: MoeserveError | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="trace", daemon=True).start()

    def _run(self) -> None:
        try:
            patience = float(self._body["seconds"]) + LAST_SECONDS
            self._content, self._headers = self._http.post_for_bytes(ROUTE, patience, self._body)
        except MoeserveError as error:
            self._error = error
        except RuntimeError as error:  # of httpx, where the command ends first
            self._error = MoeserveError(str(error))
        finally:
            self._ended.set()

    def came(self, seconds: float) -> bool:
        """Whether it comes within so many seconds."""
        return self._ended.wait(seconds)

    def now(self) -> tuple[bytes, str | None]:
        """(the spans, why they are fewer than was asked for)."""
        if not self.came(LAST_SECONDS):
            raise MoeserveError(f"{self._http.url}: the trace did not come in {LAST_SECONDS:g} s")
        if self._content is None:
            assert self._error is not None
            raise self._error
        return self._content, self._headers.get(CUT_SHORT)


# -- of an engine in hand ---------------------------------------------------------------------


def start_trace(engine: Engine, steps: int) -> None:
    """On every rank, between two steps."""
    engine.tracer.start(_NUMBER, steps)


def save_trace(engine: Engine, path: Path, source: str) -> None:
    """End it and have rank 0 write the file and say on stderr that it has. Collective: every rank
    calls it, idle."""
    from ep.group import gather_objects
    from moeserve.tracing_clocks import offsets
    from moeserve.tracing_job import TraceCollector

    engine.tracer.stop(_NUMBER)
    engine.step()  # in which the ranks agree to end it
    everywhere = gather_objects(engine.group, engine.tracer.take_reports())
    if engine.group.rank:
        return
    collector = TraceCollector(_NUMBER, engine.group.size, 0)
    for reports in everywhere:
        for report in reports:
            collector.heard(report)
    trace = collector.result()
    about = {"source": source, "steps": trace.num_steps, "ranks": engine.group.size}
    _write(trace, offsets(trace), path, about)
    print(f"trace of {trace.num_steps} steps: {path}", file=sys.stderr)


# -- what is told ---------------------------------------------------------------------------------


def save_and_tell(trace: JobTrace, output: Path, as_json: bool, source: str) -> None:
    """Write the file, and say on stdout who waits for whom: tables, or one JSON object."""
    from moeserve.tracing_clocks import offsets
    from moeserve.tracing_skew import skew_of

    found = offsets(trace)
    skew = skew_of(trace, found)
    steps = trace.ranks[0].steps["step"]
    report: dict[str, Any] = {
        "file": str(output),
        "source": source,
        "steps": trace.num_steps,
        "first_step": int(steps[0]),
        "last_step": int(steps[-1]),
        "ranks": len(trace.ranks),
        "hosts": sorted({rank.host for rank in trace.ranks}),
        "spans": sum(len(rank.spans) for rank in trace.ranks),
        "clocks": [
            {
                "rank": rank.rank,
                "host": rank.host,
                "offset_us": x.ns / 1e3,
                "error_us": x.error / 1e3,
            }
            for rank, x in zip(trace.ranks, found, strict=True)
        ],
        "cut_short": trace.cut_short,
        "skew": None if skew is None else asdict(skew),
    }
    _write(trace, found, output, report)
    report["bytes"] = output.stat().st_size
    if as_json:
        print(json.dumps(report))
        return
    print(
        f"{output}: steps {report['first_step']} to {report['last_step']} ({trace.num_steps}) of "
        f"{counted(len(trace.ranks), 'rank')} on {counted(len(report['hosts']), 'host')}, "
        f"{report['spans']} spans, "
        f"{report['bytes'] / 1e6:.1f} MB; open it at ui.perfetto.dev or chrome://tracing"
    )
    if worst := max((x.error for x in found), default=0):
        print(f"clocks of other machines are known to within {worst / 1e3:.0f} us")
    if skew is None:
        print(
            "one rank waits for nobody" if len(trace.ranks) == 1 else "ranks differ in their layers"
        )
        return
    _show(skew)


def _write(trace: JobTrace, found: Sequence[Offset], output: Path, about: dict[str, Any]) -> None:
    """Under another name first: readers see the old file or all of this one."""
    from moeserve.tracing_chrome import chrome_pieces

    draft = output.with_name(f".{output.name}.{os.getpid()}.part")
    try:
        with draft.open("w") as file:
            file.writelines(chrome_pieces(trace, found, about))
        draft.replace(output)
    finally:
        draft.unlink(missing_ok=True)


def _show(skew: Skew) -> None:
    from rich.table import Table

    from launch.bench.screen import wide_console

    console = wide_console()
    table = Table(title="arrivals at collectives: from the first rank to the last")
    for column in ("collective", "how many", "mean ms", "p99 ms", "mostly last"):
        table.add_column(column, justify="left" if column == "collective" else "right")
    for x in skew.spreads:
        last = f"rank {x.last} ({x.last_share:.0%})"
        table.add_row(x.kind, str(x.count), _ms(x.mean), _ms(x.p99), last)
    console.print(table)
    table = Table(title="a step of each rank, mean")
    for column in ("rank", "ms", "of which in collectives", "last at"):
        table.add_column(column, justify="right")
    most = sorted(skew.ranks, key=lambda x: x.within)[:8]  # who waits least is waited for
    for y in sorted(most, key=lambda x: x.rank):
        table.add_row(str(y.rank), _ms(y.step), _ms(y.within), f"{y.last_share:.0%}")
    console.print(table)
    if len(skew.ranks) > len(most):
        print(f"the {len(most)} of {len(skew.ranks)} ranks that wait least are shown")
    for z in skew.blames:
        print(
            f"late by {_ms(z.seconds)} ms a step: rank {z.rank}, {z.part} ({z.share:.0%} of what "
            "last ranks took longer for than the median)"
        )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"
