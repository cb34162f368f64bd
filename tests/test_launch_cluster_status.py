"""`moeserve status`: what it says of a server's speculation."""

from __future__ import annotations

from typing import Any

import pytest

from launch.cluster import status
from launch.cluster.targets import Target
from launch.cluster.watch import Progress

SPECULATION = {
    "drafter": "mtp",
    "drafted_tokens": 200,
    "accepted_tokens": 120,
    "mean_accepted": 1.2,
    "temperature": 0.5,
    "recent_steps": 9,
    "recent_depth": 2.0,
    "predicted_speedup": 1.43,
    "failures": 0,
}


@pytest.mark.parametrize(
    ("told", "line"),
    [
        (
            SPECULATION,
            "speculation: mtp, 60% of 200 drafts accepted, 1.20 a run at temperature 0.5, "
            "depth 2.0, predicted 1.43 x",
        ),
        ({"drafter": "ngram", "depth": None}, "speculation: ngram, nothing drafted yet"),
        (
            SPECULATION | {"failures": 2, "failure": "no room", "recent_steps": 0},
            "speculation: mtp, 60% of 200 drafts accepted, 1.20 a run at temperature 0.5, "
            "2 failures, last: no room",
        ),
        (None, None),
    ],
)
def test_a_line_on_speculation(
    told: dict[str, Any] | None,
    line: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    health = {"status": "ready", "ready": True, "ranks": [], "speculation": told}
    target = Target(url="http://host:1", record=None, progress=Progress())
    monkeypatch.setattr(status, "ask_health", lambda url: health)
    monkeypatch.setattr(status, "all_jobs", list)
    monkeypatch.setattr(status, "find", lambda named, jobs: target)
    assert status.status("http://host:1", as_json=False) == 0
    lines = [x for x in capsys.readouterr().out.splitlines() if x.startswith("speculation")]
    assert lines == ([] if line is None else [line])
    assert status.report_of(target)["speculation"] == told
