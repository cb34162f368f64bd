"""/experts/placement and /experts/rebalance over HTTP, against ranks that answer from a script."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from expert_world import EXPERTS, LAYERS, RANKS, ExpertRank, better, expert_job, placement
from server_world import checkpoint_folder, http_of_the_test  # noqa: F401

from moeserve.server.rehearsal import Rehearsal
from moeserve.wire_rebalance import Rebalance


@pytest.fixture
def job(folder: Path) -> Iterator[Rehearsal]:
    with expert_job(folder) as running:
        yield running


def rank0(job: Rehearsal) -> ExpertRank:
    first = job.ranks[0]
    assert isinstance(first, ExpertRank)
    return first


def test_the_placement_in_use(job: Rehearsal, http: httpx.Client) -> None:
    now = http.get("/experts/placement").json()
    table = placement().physical_to_logical
    assert now["physical_to_logical"] == table.tolist() and now["generation"] == 0
    assert now["layers"] == list(LAYERS) and now["num_mtp_layers"] == 1
    assert now["replica_count"] == placement().replica_count.tolist()
    assert now["num_logical_experts"] == EXPERTS and now["num_ranks"] == RANKS
    assert now["num_redundant_experts"] == 2 and now["num_empty_slots"] == 2
    assert now["expert_bytes"] == [1000, 1000, 500] and now["num_expert_groups"] == 2
    assert [(r["rank"], r["node"], r["first_slot"]) for r in now["ranks"]] == [
        (0, 0, 0), (1, 0, 3), (2, 1, 6), (3, 1, 9),
    ]  # fmt: skip
    one = http.get("/experts/placement?layer=5").json()
    assert one["layers"] == [5] and one["physical_to_logical"] == [table[1].tolist()]
    assert one["expert_bytes"] == [1000] and len(one["replica_count"]) == 1
    wrong = http.get("/experts/placement?layer=3")
    assert wrong.status_code == 400 and "4 to 6" in wrong.json()["error"]["message"]


def test_a_new_placement_shows_as_soon_as_it_is_told(job: Rehearsal, http: httpx.Client) -> None:
    rank0(job).wishes = [("done", "", better(), {"moved_slots": 5})]
    answer = http.post("/experts/rebalance")  # no body: all by default
    said = answer.json()
    assert answer.status_code == 200 and said["result"] == "done" and not said["dry_run"]
    assert said["explanation"] == {"moved_slots": 5}
    now = http.get("/experts/placement").json()
    assert now["generation"] == 1
    assert now["physical_to_logical"] == better().physical_to_logical.tolist()


def test_what_rank_0_is_asked(job: Rehearsal, http: httpx.Client) -> None:
    rank0(job).wishes = [("nothing", "why not", None, {})] * 3
    http.post("/experts/rebalance", json={"dry_run": True, "force": False})
    options = {"group_policy": "node", "robust": "mean+1.5*std", "max_moved_slots": 7}
    http.post("/experts/rebalance", json={"options": options})
    http.post("/experts/rebalance", json={"placement": better().physical_to_logical.tolist()})
    first, second, third = rank0(job).of_kind(Rebalance)
    assert first.dry_run and not first.force and first.options == {} and not first.table
    assert not second.dry_run and second.force and second.options == options
    table = np.frombuffer(third.table, "<i4").reshape(better().physical_to_logical.shape)
    assert (table == better().physical_to_logical).all() and third.options == {}
    state = http.get("/experts/rebalance").json()
    assert state["movable"] and state["state"]["state"] == "idle"
    assert [x["number"] for x in state["wishes"]] == [3, 2, 1], "the newest first"
    assert state["wishes"][2]["reason"] == "why not" and state["wishes"][2]["dry_run"]


def test_not_waiting_for_the_end(job: Rehearsal, http: httpx.Client) -> None:
    rank = rank0(job)
    rank.wishes = [("done", "", better(), {})]
    answer = http.post("/experts/rebalance", json={"wait": False})
    assert answer.status_code == 202 and answer.json()["result"] == "running"
    number = answer.json()["number"]
    while (wish := http.get("/experts/rebalance").json()["wishes"][0])["result"] == "running":
        pass
    assert wish["number"] == number and wish["result"] == "done"


def test_a_refusal_is_a_conflict(job: Rehearsal, http: httpx.Client) -> None:
    rank0(job).wishes = [("refused", "a rebalance is under way", None, {})]
    answer = http.post("/experts/rebalance", json={})
    error = answer.json()["error"]
    assert answer.status_code == 409 and error["code"] == "rebalance_refused"
    assert error["message"] == "a rebalance is under way"
    assert http.get("/experts/rebalance").json()["wishes"][0]["result"] == "refused"


def test_one_at_a_time(job: Rehearsal, http: httpx.Client) -> None:
    rank0(job).wishes = [("never", "", None, {})]
    assert http.post("/experts/rebalance", json={"wait": False}).status_code == 202
    answer = http.post("/experts/rebalance", json={"wait": False})
    assert answer.status_code == 409 and "under way (number 1)" in answer.text


def test_whoever_does_not_wait_hears_of_a_refusal(job: Rehearsal, http: httpx.Client) -> None:
    rank0(job).wishes = [("refused", "a rebalance is under way", None, {})]
    rank0(job).tell("moving")  # one of the job's own
    while http.get("/health").json()["rebalance"]["state"] != "moving":
        pass
    answer = http.post("/experts/rebalance", json={"wait": False})
    assert answer.status_code == 409 and "a rebalance is under way" in answer.text


def test_a_server_that_stops_does_not_wait_for_the_end(job: Rehearsal, http: httpx.Client) -> None:
    rank0(job).wishes = [("never", "", None, {})]
    answers: list[httpx.Response] = []
    waiting = threading.Thread(target=lambda: answers.append(http.post("/experts/rebalance")))
    waiting.start()
    with httpx.Client(base_url=job.url) as other:
        while not other.get("/experts/rebalance").json()["wishes"]:
            pass
    job.on_loop(lambda: setattr(job.client, "draining", True))
    waiting.join(10)
    (answer,) = answers
    assert answer.status_code == 503 and "shutting down" in answer.text


def bad_tables() -> list[tuple[Any, str]]:
    good = better().physical_to_logical.tolist()
    return [
        (good[:2], "3 layers of 12 slots"),
        ([row[:-1] for row in good], "3 layers of 12 slots"),
        ([[9] + row[1:] for row in good], "not an expert"),
        ([[1] * 12] * 3, "experts without a slot"),
        ([[2**70] * 12] * 3, "placement"),
        ([["x"] * 12] * 3, "[layers][slots]"),
    ]


@pytest.mark.parametrize(("table", "said"), bad_tables())
def test_a_table_that_cannot_be(http: httpx.Client, table: Any, said: str) -> None:
    answer = http.post("/experts/rebalance", json={"placement": table})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"].startswith("placement"), error
    assert said in error["message"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"dry": True}, "dry"),
        ({"dry_run": "yes"}, "dry_run"),
        ({"options": {"group_policy": "nodes"}}, "options.group_policy"),
        ({"options": {"robust": "median"}}, "options.robust"),
        ({"options": {"max_moved_slots": 0}}, "options.max_moved_slots"),
        ({"options": {"extra_slots_per_gpu": 1}}, "options.extra_slots_per_gpu"),
        ({"options": {"robust": "max"}, "placement": [[0]]}, "options"),
        ({"force": False, "placement": [[0]]}, "force"),
        ({"options": {"policy": "eplb", "max_moved_slots": 3}, "wait": False}, "options.policy"),
        ({"options": {"policy": "contiguous", "max_moved_slots": 3}}, "options.policy"),
    ],
)
def test_wrong_fields_are_named(job: Rehearsal, http: httpx.Client, body: Any, field: str) -> None:
    answer = http.post("/experts/rebalance", json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == field, error
    if field.startswith("options.extra"):
        assert "max_moved_slots" in error["message"], "the fields that there are"
    assert not rank0(job).of_kind(Rebalance)


def test_keys_and_loading(folder: Path) -> None:
    with expert_job(folder, server={"admin_key": "boss", "api_key": "user"}) as job:
        for path, method in (("placement", "GET"), ("rebalance", "GET"), ("rebalance", "POST")):
            for key, status in ((None, 401), ("user", 401)):
                headers = {} if key is None else {"Authorization": f"Bearer {key}"}
                url = f"{job.url}/experts/{path}"
                assert httpx.request(method, url, headers=headers).status_code == status
        headers = {"Authorization": "Bearer boss"}
        assert httpx.get(f"{job.url}/experts/placement", headers=headers).status_code == 200
    with Rehearsal(folder, ready=False) as job:
        assert httpx.get(f"{job.url}/experts/placement").status_code == 503
        assert httpx.post(f"{job.url}/experts/rebalance").status_code == 503
        assert httpx.get(f"{job.url}/experts/rebalance").json()["movable"] is False


def test_the_routes_are_documented(http: httpx.Client) -> None:
    paths = http.get("/openapi.json").json()["paths"]
    body = paths["/experts/rebalance"]["post"]["requestBody"]["content"]["application/json"]
    assert set(body["schema"]["properties"]) == {
        "dry_run", "force", "wait", "options", "placement",
    }  # fmt: skip
    assert "group_policy" in body["schema"]["properties"]["options"]["properties"]
    assert paths["/experts/placement"]["get"]["parameters"][0]["name"] == "layer"
