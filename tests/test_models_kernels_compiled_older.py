"""What triton 3.6 makes of the kernels (GPU machines with torch 2.11 have it), as recorded: nothing
compiles them here, so the record must be of the source as it is."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from launch.version import HOME
from models.deepseek.kernels.gpu.compiled import Record, kept_apart, key_of, read_record

pytest.importorskip("triton", reason="triton is built for Linux only")
OLDER = "3.6.0"
# Numbers of the unit at hand, stored and read once a unit, outside of the loop (LOG.md).
LEFT = 16
RENEW = (
    "run `moeserve bench kernels --compile-only --renew` under triton "
    f"{OLDER} (CONTRIBUTING.md says how), and commit what it writes"
)
# The cases as they are where that version is installed: some follow from it.
AS_OLDER = """
import json, sys
import triton
triton.__version__ = version = sys.argv[1]
from models.deepseek.kernels.gpu.aot import ARCHS
from models.deepseek.kernels.gpu.fingerprint import counted, fingerprint
from models.deepseek.kernels.gpu.registry import all_cases
print(json.dumps([
    [case.name, case.config, ARCHS[arch], fingerprint(case, arch, version), counted(case, arch)]
    for case in all_cases() for arch in case.archs
]))
"""
Known = dict[tuple[str, str, str], tuple[str, str]]  # by kernel, config, arch: fingerprint, counted


@pytest.fixture(scope="module")
def source() -> Known:
    run = subprocess.run(
        [sys.executable, "-c", AS_OLDER, OLDER], cwd=HOME, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return {(a, b, c): (made, how) for a, b, c, made, how in json.loads(run.stdout)}


def differing(record: Record, source: Known) -> list[str]:
    """A line for each kernel whose rows are not the source's."""
    lines: dict[str, None] = {}
    for key in sorted(record.keys() | source.keys()):
        row, known = record.get(key), source.get(key)
        if row is None or known is None:
            why = "is not recorded" if row is None else "is recorded, and there no more"
            lines[f"{key[0]} ({key[1]}) {why}"] = None
        elif row.fingerprint != known[0]:
            lines[f"{key[0]} has changed since it was recorded"] = None
        elif row.counted != known[1]:
            lines["instructions are counted otherwise since (aot.py)"] = None
    return list(lines)


def test_the_record_is_of_the_source_as_it_is(source: Known) -> None:
    version, record = read_record(*kept_apart(OLDER))
    assert version == OLDER and kept_apart("3.8.0") == ()
    found = differing(record, source)
    assert not found, "; ".join([*found, RENEW])


def test_whatever_differs_is_named(source: Known) -> None:
    """And cases do follow from the version: those of the one that is installed are others."""
    _, rows = read_record(*kept_apart(OLDER))
    row = next(iter(rows.values()))
    record = {
        key: replace(row, report=replace(row.report, kernel=key[0]), fingerprint=a, counted=b)
        for key, (a, b) in source.items()
    }
    assert differing(record, source) == []
    key = next(key for key in source if key[0] == "quant")
    for spoilt, said in (
        ({**record, key: replace(record[key], fingerprint="")}, "quant has changed since"),
        ({**record, key: replace(record[key], counted="")}, "instructions are counted otherwise"),
        ({k: x for k, x in record.items() if k != key}, f"quant ({key[1]}) is not recorded"),
        ({**record, ("k", "c", "a"): record[key]}, "k (c) is recorded, and there no more"),
    ):
        (line,) = differing(spoilt, source)
        assert line.startswith(said)


def test_it_spills_no_more_than_is_known() -> None:
    _, record = read_record(*kept_apart(OLDER))
    spilled = {key: row.report.spills for key, row in record.items() if row.report.spills}
    assert {(kernel, arch) for kernel, _, arch in spilled} == {("mla_decode", "sm_90a")}
    assert max(spilled.values()) <= LEFT
    assert all(key == key_of(row.report) for key, row in record.items())
