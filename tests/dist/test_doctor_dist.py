"""Four real gloo ranks as two nodes: links, clocks and an all-to-all, measured together.

Run as a script this file is the ranks (gloo_ranks.py).
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_ranks import fork_ranks, run_ranks

from ep.group import EPGroup
from launch.doctor.check import ok
from launch.doctor.compare import NodeReport
from launch.doctor.measure import measure_clocks
from launch.doctor.nodes import examine


def body(group: EPGroup, folder: Path) -> Any:
    group = replace(group, ranks_per_node=2)
    node = group.rank // 2

    def local() -> NodeReport:
        values = {"torch": f"2.{node}", "python": "3.11"}
        return NodeReport("box", [ok("host", "cores", str(node))], values)

    report = examine(group, torch.device("cpu"), local, "gloo", shown=False)
    ahead = 100.0 * node  # a node whose clock is wrong
    clocks = measure_clocks(group, lambda: time.time() + ahead)
    return {"report": report.as_json(), "clocks": clocks}


@pytest.mark.dist
def test_four_ranks(tmp_path: Path) -> None:
    found = run_ranks(__file__, 4, tmp_path, timeout=90)
    assert all(x == found[0] for x in found[1:])  # the same on every rank
    report = found[0]["report"]
    assert [(x["a"], x["b"]) for x in report["links"]] == [
        (0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3),
    ]  # fmt: skip
    assert all(
        0 < x["latency"] < 1 and x["there"] > 1e5 and x["back"] > 1e5 for x in report["links"]
    )
    assert report["all_to_all"]["correct"] and report["all_to_all"]["rows"] > 0
    assert [n["name"] for n in report["nodes"]] == ["box#0", "box#1"]
    checks = {c["name"]: c for c in report["checks"]}
    assert checks["torch"]["state"] == "fails" and "box#1: 2.1" in checks["torch"]["found"]
    assert "serve refuses" in checks["torch"]["reason"]
    assert checks["python"]["state"] == "ok" and not report["ok"]
    (_, _), (offset, error) = found[0]["clocks"]
    assert abs(offset - 100) <= error + 1e-3 and error < 5


if __name__ == "__main__":
    sys.exit(fork_ranks(body))
