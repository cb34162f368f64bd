"""The routes beside generation: models, tokens, experts, pages, schema and metrics."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from server_world import (  # noqa: F401
    checkpoint_folder,
    http_of_the_file,
    openai_client,
    scripted_job,
)

from moeserve import wire
from moeserve.server.rehearsal import Rehearsal


def test_models(client: openai.OpenAI, http: httpx.Client) -> None:
    (card,) = client.models.list().data
    assert card.id == "tiny" and client.models.retrieve("tiny").id == "tiny"
    assert http.get("/v1/models").json()["data"][0]["max_model_len"] == 512
    with pytest.raises(openai.NotFoundError, match="'other' does not exist"):
        client.models.retrieve("other")


def test_tokenize_and_back(http: httpx.Client) -> None:
    got = http.post("/tokenize", json={"prompt": "hello 🎉"}).json()
    assert got["count"] == len(got["tokens"]) and got["max_model_len"] == 512
    text = http.post("/detokenize", json={"tokens": got["tokens"]}).json()["prompt"]
    assert text == "<s>hello 🎉"
    bare = http.post("/tokenize", json={"prompt": "hello 🎉", "add_special_tokens": False}).json()
    assert bare["tokens"] == got["tokens"][1:]
    assert http.post("/tokenize", json={}).status_code == 400
    assert http.post("/detokenize", json={"tokens": [640]}).status_code == 400


def test_experts_and_state(http: httpx.Client, job: Rehearsal) -> None:
    for rank in (0, 1):
        job.ranks[rank].send(stats(rank, expert_shape=(2, 3), expert_load=(1, 2, 3, 4, 0, 0)))
    wait_for(lambda: http.get("/v1/experts").json()["totals"] == [[2, 4, 6], [8, 0, 0]])
    got = http.get("/v1/experts").json()
    assert (got["num_layers"], got["num_logical_experts"]) == (2, 3)
    assert got["max_over_mean"] == [1.5, 3.0] and got["ranks"][1] == {"rank": 1, "balance": 1.25}
    state = http.get("/debug/state").json()
    assert state["ranks"][0]["stats"]["num_free_blocks"] == 40
    assert state["ranks"][0]["info"] == {"fake": True}


def test_state_says_which_libraries_serve_now(folder: Path) -> None:
    with Rehearsal(folder, num_ranks=1, ready=False) as job, httpx.Client(base_url=job.url) as http:
        (rank,) = job.ranks
        then, now = ["dense: deep_gemm"], ["dense: triton (no deep_gemm: it raised X: y)"]
        rank.send(wire.Ready(0, 16, 64, 512, 8, {"kernel_choices": then, "dtype": "bfloat16"}))

        def info() -> Any:
            return http.get("/debug/state").json()["ranks"][0].get("info", {})

        wait_for(lambda: info().get("kernel_choices") == then)
        rank.send(stats(0, kernel_choices=tuple(now)))
        wait_for(lambda: info()["kernel_choices"] == now)
        assert info()["dtype"] == "bfloat16"
        assert "kernel_choices" not in http.get("/debug/state").json()["ranks"][0]["stats"]


def test_health_says_on_what_ranks_compute_and_state_all_of_it(folder: Path) -> None:
    """Captured steps as they are now, not as they were at start."""
    memory = {"planned": {"workspace": 7}, "taken": {"workspace": 5}}
    info: dict[str, object] = {
        "device": "cuda", "dtype": "bfloat16", "kernels": "triton", "weights": "FP8",
        "kv_cache_dtype": "fp8", "ahead": True, "graphs": {"rows": [1, 2], "replays": 0},
        "memory_plan": memory,
    }  # fmt: skip
    with Rehearsal(folder, num_ranks=1, ready=False) as job, httpx.Client(base_url=job.url) as http:

        def compute() -> Any:
            return http.get("/health").json()["compute"]

        assert compute() is None
        job.ranks[0].send(wire.Ready(0, 16, 64, 512, 8, info))
        wait_for(lambda: compute() is not None)
        short = {name: info[name] for name in list(info)[:6]}
        assert compute() == short | {"graphs": [1, 2]}
        job.ranks[0].send(stats(0, graphs={"rows": [1], "replays": 9}))
        wait_for(lambda: compute()["graphs"] == [1])
        (rank,) = http.get("/debug/state").json()["ranks"]
        assert rank["info"] == info | {"graphs": {"rows": [1], "replays": 9}}
        assert "graphs" not in rank["stats"]


def test_health_and_metrics_say_how_tokens_travel(folder: Path) -> None:
    told = {
        "asked": "auto",
        "prefill": {"backend": "torch", "reason": "over gloo"},
        "decode": {"backend": "deepep_ll", "reason": "low latency"},
        "refused": {"nvshmem": "no such chip"},
        "wire": {"format": "fp8", "reason": "asked for"},
        "overlap": {"from_tokens": 256, "reason": "not measured"},
        "deterministic": False,
        "buffers_bytes": 123,
    }
    with Rehearsal(folder, num_ranks=2, ready=False) as job, httpx.Client(base_url=job.url) as http:
        assert http.get("/health").json()["dispatch"] is None  # nothing is known yet
        assert "moeserve_dispatch_info" not in http.get("/metrics").text
        for rank in job.ranks:
            rank.send(wire.Ready(rank.rank, 16, 64, 512, 8, {"dispatch": told}))
        wait_for(lambda: http.get("/health").json()["ready"])
        assert http.get("/health").json()["dispatch"] == told | {"masked_ranks": []}
        job.ranks[1].send(stats(1, masked_ranks=(0,)))
        wait_for(lambda: http.get("/health").json()["dispatch"]["masked_ranks"] == [0])
        text = http.get("/metrics").text
        line = (
            'moeserve_dispatch_info{decode="deepep_ll",deterministic="false",overlap="256",'
            'overlap_reason="not measured",prefill="torch",wire="fp8",wire_reason="asked for"} 1.0'
        )
        assert line in text and "moeserve_masked_ranks 1.0" in text


def test_mtp_rows_are_told_from_the_others(folder: Path) -> None:
    with Rehearsal(folder, ready=False) as job, httpx.Client(base_url=job.url) as http:
        got = http.get("/v1/experts").json()
        assert (got["num_mtp_layers"], got["totals"]) == (0, [])
        info = {"first_moe_layer": 3, "mtp_layers": 1}
        job.ranks[0].send(wire.Ready(0, 16, 64, 512, 8, info))
        job.ranks[0].send(stats(0, expert_shape=(3, 2), expert_load=(1, 2, 3, 4, 0, 0)))
        wait_for(lambda: http.get("/v1/experts").json()["num_layers"] == 3)
        got = http.get("/v1/experts").json()
        assert (got["first_moe_layer"], got["num_mtp_layers"]) == (3, 1)
        assert got["totals"][2] == [0, 0]


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_pages_load_nothing_from_elsewhere(http: httpx.Client, path: str) -> None:
    page = http.get(path)
    assert page.headers["content-type"].startswith("text/html") and "moeserve" in page.text
    assert "//" not in re.sub(r"^\s*//.*|// .*", "", page.text, flags=re.MULTILINE)
    assert not re.search(r"<(script|link|img)[^>]*(src|href)=.(?!data:)", page.text)


def test_the_legend_has_the_colours_of_the_bars(http: httpx.Client) -> None:
    page = http.get("/").text
    for name in ("used", "cached", "empty"):
        assert re.search(rf"\.{name} \{{ background:", page), name
        assert re.search(rf'<i\s+class="{name}"></i>{name}', page), name
    assert "part.className = name" in page and '["used", s.' in page and '["cached", s.' in page


def test_version_and_schema(http: httpx.Client) -> None:
    assert http.get("/version").json()["version"]
    schema = http.get("/openapi.json").json()
    body = schema["paths"]["/v1/completions"]["post"]["requestBody"]
    assert "temperature" in body["content"]["application/json"]["schema"]["properties"]
    assert "$ref" not in json.dumps(body)


def stats(rank: int, **changes: Any) -> wire.RankStats:
    """Counters of a rank, most of them 0."""
    values: dict[str, Any] = dict.fromkeys(wire.RankStats.__struct_fields__[:18], 0) | {
        "rank": rank,
        "num_used_blocks": 20,
        "num_cached_blocks": 4,
        "num_free_blocks": 40,
        "prompt_tokens": 100,
        "cached_tokens": 25,
        "rank_balance": 1.25,
    }
    return wire.RankStats(**(values | changes))


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_metrics(http: httpx.Client, job: Rehearsal) -> None:
    for rank in (0, 1):
        job.ranks[rank].send(stats(rank))
    wait_for(lambda: 'moeserve_kv_blocks{rank="1",state="free"} 40.0' in http.get("/metrics").text)
    http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 3})
    text = http.get("/metrics").text
    for line in (
        'moeserve_kv_usage_ratio{rank="0"} 0.3125',
        "moeserve_prefix_cache_hit_ratio 0.25",
        'moeserve_rank_expert_balance{rank="0"} 1.25',
        "moeserve_requests_in_flight 0.0",
        "moeserve_ready 1.0",
    ):
        assert line in text, line
    for name in (
        "time_to_first_token_seconds_count",
        "time_per_output_token_seconds_bucket",
        "request_seconds_sum",
        "preemptions_total",
        "dispatch_bytes_total",
        "kv_wasted_slots",
        "last_step_seconds",
        'requests_total{finish_reason="length"}',
    ):
        assert f"moeserve_{name}" in text, name
    assert "_created" not in text
    series = [x for x in text.splitlines() if x and not x.startswith("#")]
    assert len(series) < 250  # bounded, whatever the number of layers and experts
    assert len(series) == len({x.rpartition(" ")[0] for x in series})


# ---- what is told of the routes -----------------------------------------------------------------


def test_every_route_is_in_the_readme_and_says_what_it_does(http: httpx.Client) -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    paths = http.get("/openapi.json").json()["paths"]
    assert len(paths) > 10
    summaries: list[str] = []
    for path, methods in paths.items():
        for method, about in methods.items():
            assert about["description"], path
            summaries.append(about["summary"])
            row = f"{method.upper()} {path.replace('{name}', 'NAME')}`"
            if path.startswith("/experts/"):
                row = "`/experts/...`"  # as a family
            assert row in readme, f"README.md, HTTP routes: a row for {method} {path} is missing"
    assert len(set(summaries)) == len(summaries), "each says what it is"
    assert all(" " in x for x in summaries), "no function's name"
