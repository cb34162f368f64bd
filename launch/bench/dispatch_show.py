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
from launch.experts.units import show_bytes
from moeserve.terminal import counted

if TYPE_CHECKING:
    from rich.table import Table

LEGEND = (
    "ms: median p90 p99 over steps, each step's slowest rank. MB: all ranks, a layer; ideal: each "
    "token once for each other rank\nthat wants it (hidden, scales, ids, weights), results as the "
    "form says. plain: all_to_all_single of the ideal bytes in the\nsame steps; x plain: median of "
    "the steps' ratios."
)
EMULATED = (
    "emulated: DeepEP's calls, limits and layouts in Python over gloo. Its times say nothing of "
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
        f"{row['backend']}: {note}" for row in rows if row["ok"] for note in row.get("notes", ())
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
    by_size = groupby(measured, key=lambda r: (r["ranks"], r["hidden"]))
    for (ranks, hidden), group in by_size:
        console.print(_table(ranks, hidden, list(group)))
    if measured:
        console.print(Text(LEGEND, style="dim"))
    for who, why in refusals(rows):
        console.print(Text(f"not measured: {who}: {why}", style="yellow"))


def refusals(rows: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Who and why; sizes are named where a backend ran at others."""
    ran = {_way(row) for row in rows if row["ok"]}
    ways: dict[str, list[str]] = {}  # by reason
    for row in rows:
        if row["ok"]:
            continue
        who = _way(row)
        if who in ran or len({_way(r) for r in rows}) == 1:
            who += f" ({row['ranks']} ranks, {row['tokens']} tokens, hidden {row['hidden']})"
        names = ways.setdefault(row["reason"], [])
        if who not in names:
            names.append(who)
    return [(_joined(names), why) for why, names in ways.items()]


def _joined(names: list[str], most: int = 4) -> str:
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def _way(row: dict[str, Any]) -> str:
    return f"{row['backend']} {row['wire']} {row['form']}"


def _table(ranks: int, hidden: int, rows: list[dict[str, Any]]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(
        title=f"{counted(ranks, 'rank')}, hidden {hidden}", box=SIMPLE_HEAD, title_justify="left"
    )
    left = ("backend", "wire", "form")
    for name in (
        *("tokens", *left, "dispatch ms", "combine ms", "both ms", "GB/s", "MB", "ideal"),
        *("sent / ideal", "plain ms", "GB/s", "x plain"),
    ):
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    before = None
    for row in rows:
        if before is not None and row["tokens"] != before:
            table.add_section()
        table.add_row(str(row["tokens"]) if row["tokens"] != before else "", *_cells(row))
        before = row["tokens"]
    return table


def _cells(row: dict[str, Any]) -> list[str]:
    whole, plain = row["bytes"]["both"], row["plain_ms"]
    return [
        row["backend"],
        row["wire"],
        row["form"],
        _spread(row["dispatch_ms"]),
        _spread(row["combine_ms"]),
        _spread(row["both_ms"]),
        f"{row['gb_per_s']:.2f}",
        show_bytes(whole["sent"]).removesuffix(" MB"),
        show_bytes(whole["ideal"]).removesuffix(" MB"),
        "-" if whole["ratio"] is None else f"{whole['ratio']:.2f}",
        "-" if plain is None else _number(plain["median"]),
        "-" if plain is None else f"{row['plain_gb_per_s']:.2f}",
        "-" if plain is None else f"{row['times_plain']:.2f}",
    ]


def _spread(ms: dict[str, float]) -> str:
    return " ".join(_number(ms[name]) for name in ("median", "p90", "p99"))


def _number(value: float) -> str:
    """Three digits that count."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
