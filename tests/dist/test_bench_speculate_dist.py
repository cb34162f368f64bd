"""`moeserve bench speculate` as it is typed, on two ranks: one of them is idle at batch 1."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TINY = ROOT / "checkpoints" / "tiny"


@pytest.mark.dist
def test_drafters_change_in_one_engine_of_two_ranks(tmp_path: Path) -> None:
    picture = tmp_path / "a.png"
    words = ("--speculate", "mtp", "--speculate", "ngram:2", "--k", "2,auto", "--batch", "1,3")
    size = ("--prompt-length", "8", "--output-length", "12", "--repeat", "1", "--warmup", "0")
    done = subprocess.run(
        [sys.executable, "-m", "moeserve", "bench", "speculate", str(TINY), "--ep", "2"]
        + [*words, *size, "--temperature", "0.7", "--plot", str(picture), "--json", "-q"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert picture.stat().st_size > 5000
    found = json.loads(done.stdout)  # and nothing else
    assert found["ep"] == 2 and found["temperature"] == 0.7 and found["speedup"] > 0
    rows = [(r["drafter"], r["depth"], r["batch"]) for r in found["rows"]]
    drafters = [("mtp", 2), ("mtp", "auto"), ("ngram", 2)]
    assert rows == [(*drafter, batch) for batch in (1, 3) for drafter in drafters]
    assert all(r["same_tokens"] is True for r in found["rows"])
    mtp = found["rows"][0]
    assert len(mtp["acceptance"]) == 2 and mtp["runs"] > 0 and mtp["cost_ratio"] > 0
    assert mtp["acceptance"][0] >= mtp["acceptance"][1] and 1.5 < mtp["mean_depth"] <= 2
