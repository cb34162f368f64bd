"""The record of what each kernel compiles to (compiled.json beside this file), and what is lost.

Knows how to compare, what may differ and by how much. A case is known by a fingerprint of all that
the compiler reads, so that only what has changed since the record need be compiled again. Pure but
for reading and writing the record; compiling is aot.py's.
"""

from __future__ import annotations

import hashlib
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

RECORD = Path(__file__).with_name("compiled.json")
# Of another compiler in use (GPU machines with torch 2.11 have it), kept beside it.
OTHERS = {"3.6": RECORD.with_name("compiled_triton36.json")}
# What may differ without a word: ptxas places a few registers otherwise after harmless changes.
REGISTERS_SLACK = 16
SHARED_SLACK = 1024
NEWER_UNITS = ("wgmma.mma_async", "tcgen05.mma")
UNITS = (*NEWER_UNITS, "mma.sync")
_KINDS = {"str": str, "int": int, "dict": dict}  # of a report's fields


@dataclass(frozen=True)
class Recorded:
    report: CompileReport
    fingerprint: str


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
    return Recorded(CompileReport(**made), str(row["fingerprint"]))


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
    lines = [json.dumps(asdict(row.report) | {"fingerprint": row.fingerprint}) for row in rows]
    body = ",\n".join(lines)
    path.write_text(f'{{"triton": "{triton}", "kernels": [\n{body}\n]}}\n')


def fingerprint(case: CompileCase, arch: int, triton: str) -> str:
    """Of the compiler's version, the kernel's text, that of all it calls, the constants they name
    and the case. 16 hex digits."""
    texts: dict[str, str] = {}
    _read_text(case.kernel, texts)
    settings = (
        *(sorted(case.signature.items()), sorted(case.constexprs.items(), key=str)),
        *(case.num_warps, case.num_stages, sorted(case.divisible), arch, triton),
    )
    whole = json.dumps([sorted(texts.items()), settings], default=str)
    return hashlib.sha256(whole.encode()).hexdigest()[:16]


def _read_text(kernel: Any, texts: dict[str, str]) -> None:
    """The source of a jitted function and of those it calls, values of its global constants."""
    name = f"{kernel.fn.__module__}.{kernel.fn.__qualname__}"
    if name in texts:
        return
    texts[name] = kernel.src
    for used in kernel.fn.__code__.co_names:
        value = kernel.fn.__globals__.get(used)
        if hasattr(value, "src") and hasattr(value, "fn"):
            _read_text(value, texts)
        elif type(value).__name__ == "constexpr":
            texts[f"{name}.{used}"] = repr(value)


def changed(cases: Sequence[CompileCase], triton: str, record: Record) -> list[tuple[int, int]]:
    """(index of the case, arch) of what the record does not hold as it is now."""
    found = []
    for index, case in enumerate(cases):
        for arch in case.archs:
            row = record.get((case.name, case.config, ARCHS[arch]))
            if row is None or row.fingerprint != fingerprint(case, arch, triton):
                found.append((index, arch))
    return found


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
    one, fewer than half as many wide loads."""
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
    before, now = wide_loads(was), wide_loads(report)
    if 2 * now < before:
        said.append(f"{now} wide loads, recorded {before}")
    return [f"{name}: {what}" for what in said]


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
