"""The record of what each kernel compiles to (compiled.json beside this file), and what is lost.

Knows how to compare, what may differ and by how much. A case is known by its fingerprint, so that
only what has changed since the record need be compiled again. Pure but for reading and writing the
record; compiling is aot.py's, fingerprints are fingerprint.py's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from models.deepseek.kernels.gpu.aot import (
    ARCHS,
    WIDE_LOADS,
    CompileCase,
    CompileReport,
    missing_words,
)
from models.deepseek.kernels.gpu.errors import RecordUnreadable
from models.deepseek.kernels.gpu.fingerprint import counted, fingerprint

RECORD = Path(__file__).with_name("compiled.json")
# Of another compiler in use (GPU machines with torch 2.11 have it), kept beside it.
OTHERS = {"3.6": RECORD.with_name("compiled_triton36.json")}
# What may differ without a word: ptxas places a few registers otherwise after harmless changes.
REGISTERS_SLACK = 16
SHARED_SLACK = 1024
NEWER_UNITS = ("wgmma.mma_async", "tcgen05.mma")
UNITS = (*NEWER_UNITS, "mma.sync")
TILES, AHEAD = "cp.async.bulk.tensor", "cp.async.cg"  # loads that nobody waits for at once
# Instructions that load or store widely -> pieces of 16 bytes.
PIECES = {
    "loads": {AHEAD: 1, "ld.global.v4": 1, "ld.global.v2.b64": 1, "ld.global.v8": 2},
    "stores": {"st.global.v4": 1, "st.global.v2.b64": 1, "st.global.v8": 2},
}
_KINDS = {"str": str, "int": int, "dict": dict}  # of a report's fields


@dataclass(frozen=True)
class Recorded:
    """counted: see fingerprint.py."""

    report: CompileReport
    fingerprint: str
    counted: str = ""


Record = dict[tuple[str, str, str], Recorded]  # by kernel, config, arch


def key_of(report: CompileReport) -> tuple[str, str, str]:
    return report.kernel, report.config, report.arch


def read_record(path: Path = RECORD) -> tuple[str, Record]:
    """The triton version it was made with, and what it holds; nothing where there is no file.
    RecordUnreadable for a file that is no record."""
    if not path.exists():
        return "", {}
    try:
        found = json.loads(path.read_text())
        version = found["triton"]
        if not isinstance(version, str) or not version:
            raise TypeError(f"triton={version!r}: must be the compiler's version")
        rows = [_recorded(row) for row in found["kernels"]]
    except RecursionError:
        raise _unreadable(path, "brackets within brackets without end") from None
    except KeyError as error:
        raise _unreadable(path, f"{error.args[0]!r} is missing") from None
    except (OSError, ValueError, TypeError) as error:
        raise _unreadable(path, str(error).splitlines()[0]) from None
    return version, {key_of(row.report): row for row in rows}


def _recorded(row: Mapping[str, Any]) -> Recorded:
    """KeyError, TypeError where a row is not one of write_record's."""
    if not isinstance(row, dict):
        raise TypeError(f"a kernel is {row!r:.60}: must be an object")
    made: dict[str, Any] = {}
    for part in fields(CompileReport):
        value, kind = row[part.name], _KINDS[str(part.type).partition("[")[0]]
        if type(value) is not kind:
            raise TypeError(f"{part.name}={value!r:.60}: must be of type {kind.__name__}")
        made[part.name] = value
    counts = made["instructions"]
    if not all(type(count) is int for count in counts.values()):
        raise TypeError(f"instructions={counts!r:.60}: must be counts by word")
    return Recorded(CompileReport(**made), str(row["fingerprint"]), str(row.get("counted", "")))


def _unreadable(path: Path, why: str) -> RecordUnreadable:
    return RecordUnreadable(
        f"{path}: no record of compiled kernels: {why}; restore it, or remove it and make it anew "
        "with --renew"
    )


def kept_apart(triton: str) -> tuple[Path, ...]:
    """Where the record of this version of triton is, if RECORD is not where: an argument or none
    for read_record and write_record."""
    return tuple(path for begin, path in OTHERS.items() if triton.startswith(f"{begin}."))


def write_record(triton: str, rows: Iterable[Recorded], path: Path = RECORD) -> None:
    """One line a row, so that a change shows as one."""
    lines = [
        json.dumps(asdict(row.report) | {"fingerprint": row.fingerprint, "counted": row.counted})
        for row in rows
    ]
    body = ",\n".join(lines)
    path.write_text(f'{{"triton": "{triton}", "kernels": [\n{body}\n]}}\n')


def changed(cases: Sequence[CompileCase], triton: str, record: Record) -> list[tuple[int, int]]:
    """(index of the case, arch) of what the record does not hold as it is now."""
    found = []
    for index, case in enumerate(cases):
        for arch in case.archs:
            row = record.get((case.name, case.config, ARCHS[arch]))
            if row is None or row.fingerprint != fingerprint(case, arch, triton):
                found.append((index, arch))
    return found


def outdated(cases: Sequence[CompileCase], triton: str, record: Record) -> list[tuple[int, int]]:
    """The same, and what was counted otherwise: what there is to renew."""
    anew = set(changed(cases, triton, record))
    for index, case in enumerate(cases):
        for arch in case.archs:
            row = record.get((case.name, case.config, ARCHS[arch]))
            if row is not None and row.counted != counted(case, arch):
                anew.add((index, arch))
    return sorted(anew)


def gone(cases: Sequence[CompileCase], record: Record) -> list[str]:
    """Recorded configurations that no longer exist."""
    here = {(case.name, case.config) for case in cases}
    return sorted(
        {f"{kernel} ({config})" for kernel, config, _ in record}
        - {f"{kernel} ({config})" for kernel, config in here}
    )


def faults(case: CompileCase, arch: int, report: CompileReport, record: Record) -> list[str]:
    """What is worse than it was, or missing whatever it was; empty: fine. More registers than 16
    above the record, more than 1 KiB more shared memory, any more spilled bytes (without a record:
    any), fewer instructions of the newer units, more of mma.sync, no unit at all where there was
    one, and what `_narrowed` says of access to memory."""
    name = f"{report.kernel} ({report.config}) for {report.arch}"
    said = [f"no {word} any more" for word in missing_words(case, arch, report)]
    row = record.get(key_of(report))
    if row is None:
        said += [f"spills {report.spills} bytes"] if report.spills else []
        return [f"{name}: {what}" for what in said]
    was = row.report
    if report.spills > was.spills:
        said.append(f"spills {report.spills} bytes, recorded {was.spills}")
    if report.registers > was.registers + REGISTERS_SLACK:
        said.append(f"{report.registers} registers, recorded {was.registers}")
    if report.shared_bytes > was.shared_bytes + SHARED_SLACK:
        said.append(f"{report.shared_bytes} bytes shared, recorded {was.shared_bytes}")
    for unit in UNITS:
        before, now = was.instructions.get(unit, 0), report.instructions.get(unit, 0)
        if now < before if unit in NEWER_UNITS else now > before:
            said.append(f"{now} x {unit}, recorded {before}")
    if unit_of(was) == "mma" and unit_of(report) == "-":
        said.append("no mma.sync, and nothing in its place")
    said += _narrowed(was, report)
    return [f"{name}: {what}" for what in said]


def _narrowed(was: CompileReport, report: CompileReport) -> list[str]:
    """What is loaded or stored in smaller pieces than before, or waited for. One compiler makes the
    same of the same text, so a single wide one that is gone is told; if the kernel is meant to move
    less, its record is renewed. No fault: two of 16 bytes as one of 32, and loads by whole tiles
    (TMA) where nothing became narrow."""

    def count(word: str) -> tuple[int, int]:
        return was.instructions.get(word, 0), report.instructions.get(word, 0)

    said = []
    tiles_before, tiles = count(TILES)
    if tiles < tiles_before:
        said.append(f"{tiles} x {TILES}, recorded {tiles_before}")
    for kind, weights in PIECES.items():
        counts = {word: count(word) for word in (*weights, f"{kind} of 8 bytes", f"{kind} of less")}
        before, now = (sum(weights[word] * counts[word][i] for word in weights) for i in (0, 1))
        (eights_before, eights), (less_before, less) = list(counts.values())[-2:]
        narrower = eights + less > eights_before + less_before
        if kind == "loads" and tiles > tiles_before and not narrower:
            continue
        told = ", ".join(f"{word} {b} -> {n}" for word, (b, n) in counts.items() if b != n)
        if now < before:
            said.append(f"{now} wide {kind}, recorded {before} ({told})")
        elif kind == "loads" and counts[AHEAD][1] < counts[AHEAD][0]:
            said.append(f"{counts[AHEAD][1]} x {AHEAD}, recorded {counts[AHEAD][0]} ({told})")
        elif 2 * now + eights < 2 * before + eights_before and less > less_before:
            said.append(f"{eights} {kind} of 8 bytes, recorded {eights_before} ({told})")
    return said


def wide_loads(report: CompileReport) -> int:
    return sum(report.instructions.get(word, 0) for word in WIDE_LOADS)


def unit_of(report: CompileReport) -> str:
    """Which matrix unit it uses, in short; "-" for none."""
    used = [unit.split(".")[0] for unit in UNITS if report.instructions.get(unit)]
    return "+".join(used) or "-"


def markdown(reports: Sequence[CompileReport]) -> str:
    """A table, both architectures of a configuration in one row: registers / spilled bytes / KiB
    shared / wide loads, and the matrix unit."""
    rows: dict[tuple[str, str], dict[str, CompileReport]] = {}
    for report in reports:
        rows.setdefault((report.kernel, report.config), {})[report.arch] = report
    lines = [
        "| kernel | configuration | " + " | ".join(ARCHS.values()) + " |",
        "|---|---|" + "---|" * len(ARCHS),
    ]
    for (kernel, config), found in rows.items():
        cells = [_cell(found.get(arch)) for arch in ARCHS.values()]
        lines.append(f"| {kernel} | {config} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(report: CompileReport | None) -> str:
    if report is None:
        return ""
    shared = f"{report.shared_bytes / 1024:.3g}"
    numbers = f"{report.registers} / {report.spills} / {shared} / {wide_loads(report)}"
    return f"{numbers} {unit_of(report)}" if unit_of(report) != "-" else numbers
