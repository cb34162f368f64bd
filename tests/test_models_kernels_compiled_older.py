"""What triton 3.6 makes of the kernels (GPU machines with torch 2.11 have it), as recorded."""

from __future__ import annotations

from models.deepseek.kernels.gpu.compiled import kept_apart, read_record

# Numbers of the unit at hand, stored and read once a unit, outside of the loop (LOG.md).
LEFT = 16


def test_the_record_of_another_version_holds_the_same_and_spills_no_more_than_is_known() -> None:
    version, record = read_record(*kept_apart("3.6.0"))
    assert version == "3.6.0" and kept_apart("3.8.0") == ()
    kernels = {(kernel, arch) for kernel, _, arch in record}
    assert kernels == {(kernel, arch) for kernel, _, arch in read_record()[1]}
    spilled = {key: row.report.spills for key, row in record.items() if row.report.spills}
    assert {(kernel, arch) for kernel, _, arch in spilled} == {("mla_decode", "sm_90a")}
    assert max(spilled.values()) <= LEFT
