"""`moeserve bench dispatch` as it is typed: its own ranks, several sizes, one JSON object."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = ("--hidden", "256", "--experts", "16", "--top-k", "4", "--steps", "2", "--warmup", "1")


def moeserve(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "moeserve", "bench", "dispatch", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        timeout=150,
    )


@pytest.mark.dist
def test_backends_side_by_side_at_two_and_three_ranks(tmp_path: Path) -> None:
    picture = tmp_path / "a.png"
    done = moeserve(
        *("--dispatch", "torch,allgather,deepep_normal", "--emulate", "--form", "pairs,summed"),
        *("--sweep", "ranks", "--ep", "3", "--experts", "18", "--tokens", "5", *SMALL[:2]),
        *(*SMALL[4:], "--skew", "zipf:1", "--plot", str(picture), "--json"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert picture.stat().st_size > 5000
    found = json.loads(done.stdout)  # and nothing else
    assert "gloo over this machine's loopback" in found["transport"]
    assert any("emulated" in line for line in found["said"])
    rows = {(r["ranks"], r["backend"], r["wire"], r["form"]): r for r in found["rows"]}
    assert len(rows) == 2 * 2 * 2 * 2 + 2  # deepep_normal: two ranks, summed
    for ranks in (2, 3):
        for wire in ("model", "fp8"):
            for form in ("pairs", "summed"):
                torch, gather = (rows[ranks, n, wire, form] for n in ("torch", "allgather"))
                assert torch["ok"] and gather["ok"], (torch, gather)
                there = torch["bytes"]["dispatch"]
                assert 0 < there["ideal"] <= there["sent"]
                assert torch["bytes"]["combine"]["ratio"] == 1.0
                assert gather["bytes"]["both"]["sent"] > torch["bytes"]["combine"]["sent"]
                assert torch["times_plain"] > 0 and torch["plain_gb_per_s"] > 0
    assert rows[2, "deepep_normal", "model", "summed"]["emulated"]
    entries = found["not_measured"]
    assert {entry["backend"] for entry in entries} == {"deepep_normal"}
    assert any("as pairs" in entry["reason"] and entry["forms"] == ["pairs"] for entry in entries)
    # Three ranks are no number that the library knows.
    (three,) = (entry for entry in entries if "summed" in entry["forms"])
    assert "3 ranks" in three["reason"] and three["ranks"] == [3]
    fp8, model = (rows[2, "torch", wire, "pairs"]["bytes"]["dispatch"] for wire in ("fp8", "model"))
    assert fp8["ideal"] < 0.6 * model["ideal"]


@pytest.mark.dist
def test_the_only_one_asked_for_refuses() -> None:
    done = moeserve("--dispatch", "deepep_ll", "--ep", "1", "--tokens", "4", *SMALL)
    assert done.returncode == 1, done.stderr
    assert "moeserve: not measured: deepep_ll: deep_ep is not" in done.stderr
    assert "not measured" not in done.stdout
    assert "Traceback" not in done.stderr
