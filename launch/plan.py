"""`moeserve plan --rehearse`: a published layout at its full size, here, and what came of it.

Knows how a rehearsal's report is shown. What a rehearsal does: launch/rehearse.py.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launch.experts.units import show_bytes, show_seconds
from moeserve.errors import ConfigError

if TYPE_CHECKING:
    from launch.rehearse import Report


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
    RehearsalFailed if outputs are wrong. With as_json the last line of stdout is one object, in
    either case."""
    from launch.rehearse import Rehearsal

    problems = [f"{flag}: has no meaning with --rehearse" for flag in unused]
    file = asked.trace
    if asked.source is not None:
        if file is not None:
            problems.append(f"{asked.source}, --trace={file}: give one of the two")
        file = Path(asked.source)
    seed = asked.seed or "0"
    if not re.fullmatch(r"-?\d{1,18}", seed):
        problems.append(f"--seed={seed}: must be a whole number")
    if problems:
        raise ConfigError(problems)
    report = Rehearsal(
        asked.rehearse,
        asked.routing or "random",
        file,
        int(seed),
        asked.dispatch or "torch",
        asked.wire or "model",
        asked.array,
    ).run()
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
        (
            "sent",
            f"{show_bytes(report.dispatch_bytes)} there ({_ROWS[report.wire]}), "
            f"{show_bytes(report.combine_bytes)} back",
        ),
        (
            "largest error",
            f"{report.max_error:.3g} against the dense fp32 reference"
            + ("" if report.wire == "model" else ", whose experts see FP8 rows too"),
        ),
        ("time, memory", f"{show_seconds(report.seconds)}, {show_bytes(report.peak_memory_bytes)}"),
    )
    for name, value in rows:
        print(f"  {name:16} {value}")
