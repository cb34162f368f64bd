"""What `bench dispatch` found, as text and as JSON: what was drawn or emulated in plain words, then
the tables (`dispatch_tables`), then what was not measured.

Knows results; nothing of how they were made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from launch.bench.dispatch_flags import Asked
from launch.bench.dispatch_refused import Row, lines
from launch.bench.dispatch_tables import spread_names, tables, width_of
from launch.bench.screen import wide_console
from moeserve.terminal import counted

if TYPE_CHECKING:
    from rich.console import Console

FORMS_TOLD = {
    "pairs": "pairs: results come home one by one, summed there in routing order (deterministic)",
    "summed": "summed: a rank's results of a token come home as one row",
}
EMULATED = (
    "* emulated: a library's calls, limits and layouts in Python over gloo. Its times say nothing "
    "of the library's; its bytes are what the library would send."
)


@dataclass(frozen=True)
class Result:
    """rows: as measured, in JSON's types. entries: what was not measured (`dispatch_refused`).
    loads: what was drawn, in words."""

    asked: Asked
    rows: list[Row]
    entries: list[Row]
    loads: str
    transport: str
    machine: dict[str, Any]

    def made_on(self) -> str:
        """Machine and versions, for whoever compares figures."""
        m = self.machine
        changed = ", with changes" if m.get("changed") else ""
        commit = f", moeserve commit {m['commit']}{changed}" if m["commit"] else ""
        return f"{m['cpu']}, {counted(m['cores'], 'core')}, torch {m['torch']}{commit}"


def as_json(result: Result) -> dict[str, Any]:
    asked, transport = result.asked, result.transport
    return {
        "command": "bench dispatch",
        "machine": result.machine,
        "transport": transport,
        "device": "cuda" if transport.startswith("NCCL") or "GPU" in transport else "cpu",
        "skew": result.loads,
        "experts": asked.experts,
        "redundant": asked.redundant,
        "top_k": asked.top_k,
        "steps": asked.steps,
        "warmup": asked.warmup,
        "seed": asked.seed,
        "sweep": asked.sweep,
        "said": list(words(result)),
        "rows": result.rows,
        "not_measured": result.entries,
    }


def words(result: Result) -> Iterator[str]:
    """What must be known of the figures, a sentence each."""
    asked, rows = result.asked, result.rows
    yield f"transport: {result.transport}."
    busiest = [row["busiest"] for row in rows]
    span = f"{min(busiest):.2f}" if busiest else ""
    if busiest and max(busiest) - min(busiest) >= 0.005:
        span += f" to {max(busiest):.2f}"
    most = f"; the busiest rank has {span} times the mean rank's picks" if span else ""
    copies = f", {asked.redundant} {'copy' if asked.redundant == 1 else 'copies'}"
    yield (
        f"work: {counted(asked.experts, 'expert')}{copies if asked.redundant else ''}, top-"
        f"{asked.top_k}, picks drawn {result.loads}{most}. Experts are stand-ins and are not timed,"
        " nor is rounding to FP8 before dispatch."
    )
    if any(row["emulated"] for row in rows):
        yield EMULATED
    forms = [form for form in FORMS_TOLD if any(row["form"] == form for row in rows)]
    if forms:
        yield f"form {'; '.join(FORMS_TOLD[form] for form in forms)}."
    yield from sorted({f"{row['backend']}: {n}" for row in rows for n in row.get("notes", ())})
    if rows:
        yield "checked: every backend's results, before it was timed, against the slow twin."


def show(result: Result, refused: Sequence[Row], console: Console | None = None) -> None:
    """On stdout. refused: of the entries those that are not told as an error."""
    from rich.text import Text

    console = console or wide_console()
    if result.rows:
        for line in words(result):
            console.print(Text(line))
        console.print(Text(f"machine: {result.made_on()}."))
    for (ranks, hidden), rows in groupby(result.rows, key=lambda r: (r["ranks"], r["hidden"])):
        title = f"{counted(ranks, 'rank')}, hidden {hidden}"
        made = tables(title, list(rows), result.asked.steps, console)
        # A narrow terminal may wrap a table, but no number is ever cut.
        width, most = console.width, max(width_of(table, console) for table in made)
        console.width = max(width, most)
        for table in made:
            console.print(table)
        console.width = width
    if result.rows:
        console.print(Text(_legend(result.asked.steps), style="dim"))
    for line in lines(refused, result.rows):
        console.print(Text(f"not measured: {line}", style="yellow"))


def _legend(steps: int) -> str:
    names = spread_names(steps)
    told = "; p90 from 10 steps on, p99 from 100"
    return (
        f"Times: {' '.join(names)} over {counted(steps, 'step')}, of each step's slowest rank"
        f"{told if len(names) < 3 else ''}. MB, GB/s: all ranks together, both ways; ideal: each "
        "token once for each other rank that wants it (hidden, scales, ids, weights), results as "
        "the form says. plain: all_to_all_single of the ideal bytes in the same steps; x plain: "
        "median of the steps' ratios."
    )
