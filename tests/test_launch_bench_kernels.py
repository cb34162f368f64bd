"""`moeserve bench kernels`: what it measures is what it says, and wrong names are told."""

from __future__ import annotations

import json

import pytest

from launch.bench.kernels import KernelBench
from moeserve.errors import ConfigError


def test_one_kernel_beside_torch_and_the_limits(capsys: pytest.CaptureFixture[str]) -> None:
    KernelBench("gate 32", "torch", 0.01, None).run(as_json=True)
    out = capsys.readouterr().out
    found = json.loads(out.splitlines()[-1])
    (row,) = found["kernels"]
    assert "gate 32" in row["kernel"] and row["kernel"] in out
    assert row["ours"] > 0 and row["theirs"] > 0 and row["ratio"] > 0
    assert row["of_read"] == pytest.approx(row["gbytes"] / found["limits"]["gbytes"])
    assert row["of_peak"] == pytest.approx(row["gflops"] / found["limits"]["gflops"])


def test_a_wrong_name_is_told_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="must be one of auto, native, torch; nearest: native"):
        KernelBench("", "nativ", 0.01, None).run(as_json=False)
