"""`moeserve plan --rehearse`: a published layout at its full size, here, and what came of it.

Knows how a rehearsal's report is shown. What a rehearsal does: launch/rehearse.py.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launch.experts.units import show_bytes, show_seconds
from launch.rehearse_flags import Asked
from moeserve.errors import ConfigError

if TYPE_CHECKING:
    from launch.rehearse_report import Report


_ROWS = {"model": "fp32 rows", "fp8": "FP8 rows", "fp8_ue8m0": "FP8 rows, UE8M0 scales"}


@dataclass(frozen=True)
class Rehearse:
    """What was typed; None: not given. source: the file of loads, as argument or --trace."""

    rehearse: str
    routing: str | None
    source: str | None
    trace: Path | None
    seed: str | None
    dispatch: str | None
    wire: str | None
    as_json: bool
    array: str | None = None


def run_rehearsal(asked: Rehearse, unused: list[str]) -> None:
    """unused: flags that a rehearsal does not have. ConfigError for flags or the trace;
    RehearsalFailed if outputs are wrong. With as_json one object is all that stdout gets, in
    either case."""
    from launch.bench.steps import StepProgress

    problems = [f"{flag}: has no meaning with --rehearse" for flag in unused]
    file = asked.trace
    if asked.source is not None:
        if file is not None:
            problems.append(f"{asked.source}, --trace {file}: give one of the two")
        file = Path(asked.source)
    what = Asked(
        asked.rehearse,
        asked.routing or "random",
        file,
        asked.seed or "0",
        asked.dispatch or "torch",
        asked.wire or "model",
        asked.array,
    )
    problems += what.problems()
    if problems:
        raise ConfigError(problems)
    progress = StepProgress(shown=True, stages=True, unit="")
    try:
        progress("loading torch", 0, 1)
        from launch.rehearse import Rehearsal

        report = Rehearsal(
            what.name, what.routing, file, int(what.seed), what.dispatch, what.wire, what.array
        ).run(lambda stage, done, total: progress(f"{asked.rehearse}: {stage}", done, total))
    finally:
        progress.close()
    if asked.as_json:
        print(json.dumps(report.as_json()))
    else:
        show(report)
    sys.stdout.flush()
    report.check()


def show(report: Report) -> None:
    print(
        f"{report.rehearsal}: layout {report.layout}, {report.ranks} ranks on {report.nodes} nodes"
    )
    idle = report.idle_rank_steps / (report.ranks * report.steps)
    rows = (
        ("experts a layer", f"{report.experts} in {report.slots} slots"),
        ("layers, steps", f"{report.layers}, {report.steps} ({report.generations} placements)"),
        ("routing", f"{report.routing}, seed {report.seed}"),
        ("tokens", f"{report.tokens} ({100 * idle:.0f} % of ranks idle in a step)"),
        ("collectives", f"{report.collectives} on every rank, dispatcher {report.dispatch}"),
        ("sent there", _sent(report.dispatch_bytes, report.ideal_dispatch_bytes, _more(report))),
        ("sent back", _sent(report.combine_bytes, report.ideal_combine_bytes, "")),
        (
            "largest error",
            f"{report.max_error:.3g} against the dense fp32 reference"
            + ("" if report.wire == "model" else ", whose experts see FP8 rows too"),
        ),
        (
            "time",
            f"{show_seconds(report.seconds)}: dense reference "
            f"{show_seconds(report.reference_seconds)}, placement "
            f"{show_seconds(report.planning_seconds)}, ranks as threads "
            f"{show_seconds(report.ranks_seconds)}",
        ),
        ("memory", f"{show_bytes(report.peak_memory_bytes)} at most"),
    )
    for name, value in rows:
        print(f"  {name:16} {value}")


def _sent(sent: int, ideal: int, more: str) -> str:
    ratio = f", {sent / ideal:.2f} x" if ideal else ""
    return f"{show_bytes(sent)}, ideal {show_bytes(ideal)}{ratio}{more}"


def _more(report: Report) -> str:
    """Of what the bytes there are, and why they are more than the ideal ones."""
    rows = f" ({_ROWS[report.wire]}"
    if report.dispatch == "allgather":
        return f"{rows}; every row goes to every rank)"
    if report.wire == "model":
        return f"{rows}; small steps in blocks padded to one size, which saves a message)"
    return f"{rows}, never padded)"
