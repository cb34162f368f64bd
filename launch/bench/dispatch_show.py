"""What `bench dispatch` found, on the screen and as JSON: a table for each number of ranks and each
hidden size, what was emulated or drawn in plain words, refusals with their reasons.

Knows rich and rows of measurements; nothing of how they were made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from launch.bench.dispatch_flags import Asked
from launch.bench.screen import wide_console
from moeserve.terminal import counted

if TYPE_CHECKING:
    from rich.table import Table

LEGEND = (
    "over steps, of each step's slowest rank. MB, GB/s: all ranks together, both ways; ideal: each "
    "token once for each other rank that wants it (hidden, scales, ids, weights), results as the "
    "form says. plain: all_to_all_single of the ideal bytes in the same steps; x plain: median of "
    "the steps' ratios."
)
_FULL_WIDTH = 146
EMULATED = (
    "emulated: a library's calls, limits and layouts in Python over gloo. Its times say nothing of "
    "the library's; its bytes are what the library would send."
)


def as_json(
    asked: Asked, rows: list[dict[str, Any]], loads: str, transport: str, machine: dict[str, Any]
) -> dict[str, Any]:
    return {
        "command": "bench dispatch",
        "machine": machine,
        "transport": transport,
        "device": "cuda" if transport.startswith("NCCL") or "GPU" in transport else "cpu",
        "skew": loads,
        "experts": asked.experts,
        "redundant": asked.redundant,
        "top_k": asked.top_k,
        "steps": asked.steps,
        "warmup": asked.warmup,
        "seed": asked.seed,
        "sweep": asked.sweep,
        "said": list(words(asked, rows, loads, transport)),
        "rows": rows,
    }


def words(
    asked: Asked, rows: Sequence[dict[str, Any]], loads: str, transport: str
) -> Iterator[str]:
    """What must be known of the figures, a sentence each."""
    yield f"transport: {transport}."
    busiest = [row["busiest"] for row in rows]
    span = (
        f"{min(busiest):.2f}"
        if max(busiest) - min(busiest) < 0.005
        else (f"{min(busiest):.2f} to {max(busiest):.2f}")
    )
    copies = f", {counted(asked.redundant, 'copy').replace('copys', 'copies')}"
    yield (
        f"work: {counted(asked.experts, 'expert')}{copies if asked.redundant else ''}, top-"
        f"{asked.top_k}, picks drawn {loads}; the busiest rank has {span} times the mean rank's "
        "picks. Experts are stand-ins and are not timed, nor is rounding to FP8 before dispatch."
    )
    if any(row["emulated"] and row["ok"] for row in rows):
        yield EMULATED
    notes = {
        f"{backend_of(row)}: {note}" for row in rows if row["ok"] for note in row.get("notes", ())
    }
    yield from sorted(notes)
    if any(row["ok"] for row in rows):
        yield "checked: every backend's results, before it was timed, against the slow twin."


def show(
    asked: Asked, rows: list[dict[str, Any]], loads: str, transport: str, machine: dict[str, Any]
) -> None:
    """Tables on stdout."""
    from rich.text import Text

    console = wide_console()
    for line in words(asked, rows, loads, transport):
        console.print(Text(line))
    where = f"{machine['cpu']}, {counted(machine['cores'], 'core')}"
    console.print(Text(f"machine: {where}, torch {machine['torch']}{machine['commit']}."))
    measured = [row for row in rows if row["ok"]]
    full = console.width >= _FULL_WIDTH
    by_size = groupby(measured, key=lambda r: (r["ranks"], r["hidden"]))
    for (ranks, hidden), group in by_size:
        console.print(_table(ranks, hidden, list(group), full))
    if measured:
        told = "median p90 p99" if full else "median (p90, p99: from 146 columns up)"
        console.print(Text(f"ms: {told} {LEGEND}", style="dim"))
    for who, why in refusals(rows):
        hint = " (here: --form summed)" if "deterministic mode" in why else ""
        console.print(Text(f"not measured: {who}: {why}{hint}", style="yellow"))


def refusals(rows: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Who and why. Wire and form are named where a backend does not refuse all for that reason,
    sizes where it ran at others."""
    ran = {_way(row) for row in rows if row["ok"]}
    ways: dict[str, set[str]] = {}  # of each backend
    refused: dict[str, dict[str, set[str]]] = {}  # reason -> backend -> ways
    sizes: dict[tuple[str, str], str] = {}
    for row in rows:
        name, way = backend_of(row), _way(row)
        ways.setdefault(name, set()).add(way)
        if not row["ok"]:
            refused.setdefault(row["reason"], {}).setdefault(name, set()).add(way)
            size = f"{row['ranks']} ranks, {row['tokens']} tokens, hidden {row['hidden']}"
            sizes.setdefault((row["reason"], way), size)
    found = []
    for reason, backends in refused.items():
        names = []
        for name, its in backends.items():
            if its == ways[name] and not its & ran:
                names.append(name)
                continue
            names += [f"{way} ({sizes[reason, way]})" if way in ran else way for way in sorted(its)]
        found.append((_joined(names), reason))
    return found


def _joined(names: list[str], most: int = 4) -> str:
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def _way(row: dict[str, Any]) -> str:
    return f"{backend_of(row)} {row['wire']} {row['form']}"


def backend_of(row: dict[str, Any]) -> str:
    return f"{row['backend']} (emulated)" if row["emulated"] else str(row["backend"])


def _table(ranks: int, hidden: int, rows: list[dict[str, Any]], full: bool) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(
        title=f"{counted(ranks, 'rank')}, hidden {hidden}",
        box=SIMPLE_HEAD,
        title_justify="left",
        collapse_padding=True,
        pad_edge=False,
    )
    several = len({row["form"] for row in rows}) > 1
    left = ("backend", "wire", "form") if several else ("backend", "wire")
    for name in (
        *("tokens", *left, "dispatch\nms", "combine\nms", "both\nms", "GB/s", "MB", "ideal\nMB"),
        *("sent /\nideal", "plain\nms", "plain\nGB/s", "x\nplain"),
    ):
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    before = None
    for row in rows:
        if before is not None and row["tokens"] != before:
            table.add_section()
        names = [backend_of(row), row["wire"], *([row["form"]] if several else [])]
        table.add_row(
            str(row["tokens"]) if row["tokens"] != before else "", *names, *_cells(row, full)
        )
        before = row["tokens"]
    return table


def _cells(row: dict[str, Any], full: bool) -> list[str]:
    whole, plain = row["bytes"]["both"], row["plain_ms"]
    return [
        *(_spread(row[f"{part}_ms"], full) for part in ("dispatch", "combine", "both")),
        _number(row["gb_per_s"]),
        _number(whole["sent"] / 1e6),
        _number(whole["ideal"] / 1e6),
        "-" if whole["ratio"] is None else f"{whole['ratio']:.2f}",
        "-" if plain is None else _number(plain["median"]),
        "-" if plain is None else _number(row["plain_gb_per_s"]),
        "-" if plain is None else _number(row["times_plain"]),
    ]


def _spread(ms: dict[str, float], full: bool) -> str:
    names = ("median", "p90", "p99") if full else ("median",)
    return " ".join(_number(ms[name]) for name in names)


def _number(value: float) -> str:
    """Three digits that count, of small numbers two."""
    if value >= 1:
        return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
    return f"{value:.2f}" if value >= 0.1 or not value else f"{value:.2g}"
