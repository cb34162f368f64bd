"""What `bench dispatch` did not measure, and why: in the words of its own flags, with the flag that
would help.

Backends speak of a job's settings (`num_physical_experts=256`); whoever measures has typed flags.
Knows rows without times; nothing of how a backend finds its reason.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from dispatch import emulated_names
from launch.bench.dispatch_flags import EMULATED_HIDDEN, Asked
from moeserve.terminal import counted

FAILED = "failed: "  # begins a reason that is no refusal but an error
Row = dict[str, Any]

_FLAGS = {"hidden_size": "--hidden", "top_k": "--top-k", "max_tokens_per_rank": "--tokens"}
_SETTING = re.compile(r"\b(hidden_size|top_k|max_tokens_per_rank|num_physical_experts)=(\d+)")
_DETERMINISTIC = re.compile(
    r"deterministic mode: (the library [^;]*?)"
    r"; (?:use `torch`, or turn it off|--no-deterministic allows it)"
)


def words(reason: str, row: Row, asked: Asked) -> str:
    """A backend's reason as the bench says it, with what would have it measured."""
    said = _DETERMINISTIC.sub(r"results cannot come home as pairs: \1", reason)
    if said != reason:
        return f"{said}; --form summed, or auto, measures it"
    said = _SETTING.sub(lambda m: _flag(m[1], m[2], asked), reason)
    if "come home summed only" in reason or "come home pairs only" in reason:
        return f"{said}; --form auto takes what each backend does"
    if "GB of this machine" in reason:
        return f"{said}; fewer --tokens, --hidden or --experts would do"
    if row["backend"] in emulated_names() and not row["emulated"]:
        if "not installed" in reason or "no CUDA device" in reason:
            return f"{said}; --emulate measures bytes and limits of its emulation"
        return said
    helps = []
    if "num_physical_experts=" in reason:
        fewer = row["ranks"] * 16
        most = min(fewer, asked.experts - asked.experts % row["ranks"])
        if most >= asked.top_k:
            helps.append(f"--experts {most}")
    if "hidden_size=" in reason:
        helps.append(f"--hidden {EMULATED_HIDDEN[0]}")
    return f"{said}; {' '.join(helps)} would do" if helps else said


def not_measured(asked: Asked, rows: Sequence[Row]) -> list[Row]:
    """rows: all without times -> as JSON, one entry for each backend and reason: of which wires,
    forms and sizes."""
    found: dict[tuple[str, str], Row] = {}
    for row in rows:
        why = words(row["reason"], row, asked)
        entry = found.setdefault(
            (row["backend"], why),
            {"backend": row["backend"], "emulated": row["emulated"], "reason": why}
            | {"failed": row["reason"].startswith(FAILED)}
            | {f"{name}s": [] for name in ("wire", "form")}
            | {name: [] for name in ("ranks", "tokens", "hidden")},
        )
        for name in ("wire", "form", "ranks", "tokens", "hidden"):
            values = entry[f"{name}s" if name in ("wire", "form") else name]
            if row[name] not in values:
                values.append(row[name])
    return list(found.values())


def lines(entries: Sequence[Row], measured: Sequence[Row]) -> list[str]:
    """of `not_measured` -> a line for each reason. Wires, forms and sizes are named where the
    backend ran otherwise."""
    by_reason: dict[str, list[str]] = {}
    for entry in entries:
        ran = [row for row in measured if row["backend"] == entry["backend"]]
        by_reason.setdefault(entry["reason"], []).append(_who(entry, ran))
    return [f"{', '.join(who)}: {why}" for why, who in by_reason.items()]


def missing(asked: Asked, entries: Sequence[Row], measured: Sequence[Row]) -> list[Row]:
    """The entries of backends that must be measured and were nowhere, and of those that broke."""
    ran = {row["backend"] for row in measured}
    return [
        entry
        for entry in entries
        if entry["failed"]
        or not ran
        or (entry["backend"] in asked.named and entry["backend"] not in ran)
    ]


def name_of(row: Row) -> str:
    return f"{row['backend']} (emulated)" if row["emulated"] else str(row["backend"])


def _who(entry: Row, ran: Sequence[Row]) -> str:
    if not ran:
        return name_of(entry)
    only = []
    for plural, name in (("wires", "wire"), ("forms", "form")):
        if set(entry[plural]) != {row[name] for row in ran} | set(entry[plural]):
            only.append(f"{name} {' and '.join(entry[plural])}")
    for name in ("ranks", "tokens", "hidden"):
        if set(entry[name]) != {row[name] for row in ran} | set(entry[name]):
            many = _joined([str(n) for n in entry[name]])
            only.append(f"hidden {many}" if name == "hidden" else f"{many} {name}")
    return f"{name_of(entry)} with {', '.join(only)}" if only else name_of(entry)


def _joined(names: list[str], most: int = 4) -> str:
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def _flag(setting: str, value: str, asked: Asked) -> str:
    if setting != "num_physical_experts":
        return f"{_FLAGS[setting]} {value}"
    copies = int(value) - asked.experts
    extra = f" with {counted(copies, 'slot')} for copies" if copies > 0 else ""
    return f"--experts {asked.experts}{extra}"
