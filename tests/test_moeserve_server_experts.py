"""Routes under /experts, over HTTP against a real rank on a toy with a gate; who may use them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from gated_toy import EXPERTS, LAYERS, TOP, real_job
from server_world import checkpoint_folder, http_of_the_test  # noqa: F401

from ep.recording import ExpertRecording
from moeserve.errors import NotReady
from moeserve.load_desk import LoadDesk, RecordingConflict
from moeserve.server.rehearsal import Rehearsal
from moeserve.wire_experts import RecordingEnded, StartRecording, StopRecording


@pytest.fixture
def job(folder: Path) -> Iterator[Rehearsal]:
    with real_job(folder) as running:
        yield running
        running.ranks[0].die()  # while somebody hears its last words


def complete(http: httpx.Client, number: int) -> None:
    body = {"prompt": [1 + number, 2, 3 + number % 5] * (1 + number % 4), "max_tokens": 3 + number}
    answer = http.post("/v1/completions", json=body | {"temperature": 0, "ignore_eos": True})
    assert answer.status_code == 200, answer.text


def totals(load: dict[str, Any]) -> np.ndarray:
    return np.array([load["totals"]["prefill"], load["totals"]["decode"]])


def test_a_recording_over_http_is_the_difference_of_totals(
    job: Rehearsal, http: httpx.Client
) -> None:
    complete(http, 1)
    twin = job.ranks[0].twin  # type: ignore[attr-defined]
    begin = len(twin.steps)
    before = http.get("/experts/load").json()
    assert http.get("/experts/recording").json() == {"status": "none"}
    started = http.post("/experts/recording/start", json={"interval_steps": 2})
    assert started.status_code == 200 and started.json()["status"] == "recording"
    assert started.json()["interval_steps"] == 2
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda i: complete(http, i), range(24)))
    busy = http.post("/experts/recording/start")
    assert busy.status_code == 409 and "recording 1 runs" in busy.json()["error"]["message"]
    short = http.post("/experts/recording/stop?format=json").json()
    assert short["status"] == "finished" and short["missing_picks"] == 0
    answer = http.get("/experts/recording/stop")
    assert answer.headers["content-type"] == "application/octet-stream"
    assert 'filename="experts-20' in answer.headers["content-disposition"]
    recording = ExpertRecording.from_bytes(answer.content)
    end = len(twin.steps)
    complete(http, 2)
    after = http.get("/experts/load").json()
    assert (totals(after) == twin.total()).all(), "the engine's own totals"
    recorded = np.sum(twin.steps[begin:end], axis=0)
    assert (recording.counts.sum(axis=0) == recorded).all()
    rest = np.sum(twin.steps[end:], axis=0)
    assert (totals(after) - totals(before) == recorded + rest).all() and rest.sum() > 0
    assert recording.tokens.sum() * TOP == recording.totals().sum(axis=1)[0]
    assert recording.num_steps.max() == 2 and recording.num_steps.sum() == short["num_steps"]
    assert recording.info.checkpoint == "gated" and recording.info.layers == (1, 2, 3)
    assert recording.placement_of(0) is not None and recording.info.moeserve_version
    again = http.post("/experts/recording/stop")
    assert again.content == answer.content, "it can be taken again"


def test_load_as_json(http: httpx.Client) -> None:
    complete(http, 3)
    load = http.get("/experts/load").json()
    assert load["layers"] == [1, 2, 3] and load["num_logical_experts"] == EXPERTS
    assert load["picks_per_token"] == TOP and load["traffic"][0][0] > 0
    counts = totals(load)
    assert counts.shape == (2, LAYERS, EXPERTS)
    tokens = [load["tokens"]["prefill"], load["tokens"]["decode"]]
    assert (counts.sum(axis=2) == TOP * np.array(tokens)[:, None]).all() and min(tokens) > 0
    assert load["window"]["totals"] == load["totals"]
    window = load["window"]
    assert window["steps"] == 6 and window["last_step"] - window["first_step"] >= 5
    one = http.get("/experts/load?layer=2").json()
    assert one["layers"] == [2] and one["totals"]["decode"] == [load["totals"]["decode"][1]]
    for wrong in ("0", "4", "x", "-1", "²", "9" * 30):
        answer = http.get("/experts/load", params={"layer": wrong})
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == "layer"
        assert "1 to 3" in error["message"]


def test_a_recording_may_end_by_itself(http: httpx.Client) -> None:
    body = {"interval_steps": 3, "max_steps": 4}
    assert http.post("/experts/recording/start", json=body).status_code == 200
    complete(http, 5)  # eight steps
    recording = ExpertRecording.from_bytes(http.post("/experts/recording/stop").content)
    assert recording.num_steps.tolist() == [3, 1]
    assert http.get("/experts/recording").json()["status"] == "finished"
    assert http.post("/experts/recording/start").status_code == 200, "another may follow"
    empty = ExpertRecording.from_bytes(http.post("/experts/recording/stop").content)
    assert empty.num_intervals == 0 and empty.num_layers == LAYERS


def test_what_is_refused(http: httpx.Client) -> None:
    answer = http.post("/experts/recording/stop")
    assert answer.status_code == 409 and "no recording" in answer.json()["error"]["message"]
    for body, field in (
        ({"interval_steps": 0}, "interval_steps"),
        ({"max_steps": -1}, "max_steps"),
        ({"steps": 3}, "steps"),
        ({"interval_steps": "many"}, "interval_steps"),
    ):
        answer = http.post("/experts/recording/start", json=body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == field
    http.post("/experts/recording/start")
    answer = http.post("/experts/recording/stop?format=csv")
    assert answer.status_code == 400 and http.get("/experts/recording").json()["status"] != "none"


def test_loading_is_said(folder: Path) -> None:
    with Rehearsal(folder, ready=False) as job, httpx.Client(base_url=job.url) as http:
        for method, path in (("GET", "/experts/load"), ("POST", "/experts/recording/start")):
            assert http.request(method, path).status_code == 503
        assert http.get("/experts/recording").status_code == 200


# -- keys ---------------------------------------------------------------------------------------

ADMIN = ("/experts/recording", "/debug/state")
OPEN = ("/health", "/metrics", "/version")


@pytest.mark.parametrize(
    ("settings", "for_admin", "for_api"),
    [
        ({}, None, None),
        ({"api_key": "a"}, "a", "a"),
        ({"admin_key": "b"}, "b", None),
        ({"api_key": "a", "admin_key": "b"}, "b", "a"),
    ],
)
def test_which_key_opens_what(
    folder: Path, settings: dict[str, str], for_admin: str | None, for_api: str | None
) -> None:
    with Rehearsal(folder, server=settings) as job, httpx.Client(base_url=job.url) as http:
        for key in (None, "a", "b", "c"):
            wanted = {x for x in (for_api, for_admin) if x is not None}
            headers = {} if key is None else {"authorization": f"bearer {key}"}
            allowed = not wanted or key in wanted
            answer = http.get("/v1/experts", headers=headers)
            assert (answer.status_code != 401) == allowed, (key, wanted)
        for paths, wanted in ((ADMIN, for_admin), (("/v1/models",), for_api), (OPEN, None)):
            for path in paths:
                for key in (None, "a", "b", "c"):
                    headers = {} if key is None else {"authorization": f"Bearer {key}"}
                    answer = http.get(path, headers=headers)
                    allowed = wanted is None or key == wanted
                    assert (answer.status_code != 401) == allowed, (path, key)
                    if not allowed:
                        assert answer.json()["error"]["code"] == "invalid_api_key"
        if for_admin is not None:  # else stopping would wait for ranks that do not record
            for path in ("/reset_prefix_cache", "/experts/recording/start", "/experts/load/"):
                assert http.post(path).status_code == 401, path
            assert http.post("/experts/recording/stop").status_code == 401


# -- the desk -----------------------------------------------------------------------------------


def desk(sent: list[Any], ranks: int = 2) -> LoadDesk:
    info = {"placement": {"num_layers": LAYERS}}
    return LoadDesk(ranks, lambda rank, message: sent.append((rank, message)), lambda: info)


def test_ranks_that_do_not_answer_are_waited_for_so_long_and_no_longer() -> None:
    async def body() -> None:
        sent: list[Any] = []
        mine = desk(sent)
        with pytest.raises(NotReady, match="within 0.02 s"):
            await mine.load(0.02)
        mine.start(4)
        assert sent[-2:] == [(0, StartRecording(1, 4, 0)), (1, StartRecording(1, 4, 0))]
        mine.heard(RecordingEnded(0, 1, 0))
        with pytest.raises(NotReady):
            await mine.stop(0.02)
        assert sent[-1] == (1, StopRecording(1)) and mine.status == "recording"
        with pytest.raises(RecordingConflict):
            mine.start()
        mine.heard(RecordingEnded(1, 9, 0))  # of some other recording
        assert mine.status == "recording"
        mine.heard(RecordingEnded(1, 1, 0))
        assert (await mine.stop(0.02)).num_intervals == 0

    asyncio.run(body())


def test_a_lost_rank_ends_the_waiting() -> None:
    async def body() -> None:
        mine = desk([])
        mine.start()
        asking = asyncio.ensure_future(mine.load(30))
        stopping = asyncio.ensure_future(mine.stop(30))
        await asyncio.sleep(0)
        mine.lost("rank 1 died")
        with pytest.raises(NotReady, match="rank 1 died"):
            await asking
        assert (await stopping).num_intervals == 0 and mine.cut_short == "rank 1 died"
        assert mine.state()["status"] == "failed" and mine.state()["reason"] == "rank 1 died"

    asyncio.run(body())
