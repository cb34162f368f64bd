"""`moeserve experts` on a job of two real ranks: what it shows, and that `apply` moves experts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from expert_world import experts
from launched import ROOT, Running

from ep.load import balancedness
from ep.placement import ExpertPlacement

pytestmark = pytest.mark.dist

TEXTS = ("def get_name(self):", "Psalms 23", "Enter KING. KING.", "What is a river?")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    flags = ["--ep", "2", "--redundant-experts", "4", "--port", "0", "--kv-tokens", "4096"]
    command = ["-m", "moeserve", "serve", str(ROOT / "checkpoints" / "tiny"), *flags]
    job = Running(command, tmp_path_factory.mktemp("run") / "tmp")
    try:
        job.wait_for(lambda: "ready: http" in job.text)
        found = re.search(r"ready: (http://\S+)", job.text)
        assert found is not None
        yield found[1]
    finally:
        job.close()


def complete(url: str, text: str, tokens: int = 24) -> str:
    body = {"prompt": text, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    text_out: str = answer.json()["choices"][0]["text"]
    return text_out


def as_json(capsys: Any, *arguments: object) -> dict[str, Any]:
    experts(*arguments, "--json")
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def test_experts_are_seen_and_moved(url: str, tmp_path: Path, capsys: Any) -> None:
    with ThreadPoolExecutor(4) as pool:
        before = list(pool.map(lambda text: complete(url, text), TEXTS))
    top = as_json(capsys, "top", url)
    assert top["generation"] == 0 and top["num_ranks"] == 2 and top["picks"] > 0
    assert top["links"]["rows"] > 0 and [x["mtp"] for x in top["layers"]][-1]
    assert top["balance"]["mean"] > 1.01, "experts in order are not even"
    path = tmp_path / "plan.json"
    plan = as_json(capsys, "plan", url, "-o", path)
    assert plan["cases"][0]["after"]["mean"] < top["balance"]["mean"]
    dry = as_json(capsys, "apply", url, "--dry-run")
    assert dry["explanation"]["moved_slots"] > 0
    now = httpx.get(f"{url}/experts/placement").json()
    assert now["generation"] == 0, "a dry run moves nothing"

    done = as_json(capsys, "apply", url, "--placement", path, "--wait")
    assert done["result"] == "done" and done["generation_after"] == 1
    now = httpx.get(f"{url}/experts/placement").json()
    wanted = ExpertPlacement.load(path).physical_to_logical
    live = np.array(now["physical_to_logical"])
    hosted = [np.sort(x.reshape(len(x), 2, -1), axis=2) for x in (live, wanted)]
    assert (hosted[0] == hosted[1]).all(), "the same experts on each rank"
    moved = as_json(capsys, "diff", url, path)
    assert moved["churn"]["moved"] == 0
    after = as_json(capsys, "top", url)
    assert after["generation"] == 1
    assert after["balance"]["mean"] < top["balance"]["mean"]
    load = httpx.get(f"{url}/experts/load").json()["window"]["totals"]
    totals = np.array(load["prefill"]) + np.array(load["decode"])
    placed = ExpertPlacement(live, 32, 2)
    balance = balancedness(totals, placed)[totals.any(axis=1)]
    assert after["balance"]["mean"] == pytest.approx(balance.mean(), abs=1e-6)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda text: complete(url, text), TEXTS)) == before
    wishes = httpx.get(f"{url}/experts/rebalance").json()["wishes"]
    assert [x["result"] for x in wishes] == ["done", "nothing"]


def test_metrics_of_experts(url: str) -> None:
    complete(url, TEXTS[0], 4)
    text = httpx.get(f"{url}/metrics").text
    for layer in (1, 2, 3, 4, 5):
        assert f'moeserve_expert_layer_balance{{layer="{layer}"}}' in text
    for name in ("rank_load_ratio", "top_load_ratio", "layer_picks_total"):
        assert f"moeserve_expert_{name}" in text
    series = [x for x in text.splitlines() if x.startswith("moeserve_expert_")]
    assert len(series) < 70
