"""What goes wrong over HTTP: bad requests, full queue, leaving clients, loading, stalls, death."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server_world import checkpoint_folder, http_of_the_test  # noqa: F401

from moeserve import wire
from moeserve.request import FinishReason, Request, TokenOutput
from moeserve.server.fields import ChatBody, CompletionBody
from moeserve.server.rehearsal import Rehearsal, echo, output, write_tokenizer

USER = [{"role": "user", "content": "hello"}]
COMPLETION = ("/v1/completions", {"prompt": "hello", "max_tokens": 4})
CHAT = ("/v1/chat/completions", {"messages": USER, "max_tokens": 4})


@pytest.fixture(scope="module")
def job(folder: Path) -> Iterator[Rehearsal]:
    with Rehearsal(folder, server={"max_queue": 4, "max_body_bytes": 100_000}) as running:
        yield running


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


# ---- refused requests ---------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "body"), [COMPLETION, CHAT])
def test_wrong_values_are_400_and_name_the_field(
    http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    error = error_of(http.post(path, json=body | {"temperature": 5}), 400)
    assert error["param"] == "temperature" and "temperature=5" in error["message"]
    assert "0 to 2" in error["message"]
    nan = json.dumps(body | {"temperature": float("nan")})
    assert error_of(http.post(path, content=nan), 400)["param"] == "temperature"
    error = error_of(http.post(path, json=body | {"best": 1}), 400)
    assert error["param"] == "best" and "unknown field" in error["message"]
    error = error_of(http.post(path, json=body | {"logit_bias": {"640": 1}}), 400)
    assert "0 to 639" in error["message"]
    error = error_of(http.post(path, json=body | {"stop_token_ids": [640]}), 400)
    assert error["param"] == "stop_token_ids.0"
    assert error_of(http.post(path, content=b"{nope"), 400)["param"] == "body"


def test_all_wrong_fields_are_named_in_one_answer(http: httpx.Client) -> None:
    body = {"top_p": 7, "stop_token_ids": [640], "prompt": [[641]], "best_of": 3, "seeds": 1}
    error = error_of(http.post("/v1/completions", json=body), 400)
    assert error["param"] == "top_p" and error["code"] == "invalid_value"
    for part in (
        "5 fields are not valid",
        "top_p=7 is not valid: must be a number above 0, at most 1",
        "stop_token_ids.0=640 is not valid: must be a token id from 0 to 639",
        "prompt.0.0=641 is not valid: must be a token id from 0 to 639",
        "best_of=3 is not valid: must be the same as n, which is 1",
        "seeds=1 is not valid: unknown field (did you mean seed?)",
    ):
        assert part in error["message"]
    error = error_of(http.post("/v1/chat/completions", json={"max_tokens": 0}), 400)
    assert error["param"] == "messages" and "messages is missing" in error["message"]
    assert "max_tokens=0" in error["message"] and "None" not in error["message"]


def test_oversize_prompts_are_400_with_both_numbers(http: httpx.Client) -> None:
    ids = [9] * 500
    error = error_of(http.post("/v1/completions", json={"prompt": ids, "max_tokens": 13}), 400)
    assert error["code"] == "context_length_exceeded" and error["param"] == "max_tokens"
    for number in ("500", "13", "512", "513"):
        assert number in error["message"]
    fits = http.post("/v1/completions", json={"prompt": ids, "max_tokens": 12})
    assert fits.json()["usage"]["total_tokens"] == 512
    long = [{"role": "user", "content": "dog " * 600}]
    error = error_of(http.post("/v1/chat/completions", json={"messages": long}), 400)
    assert error["code"] == "context_length_exceeded" and "512" in error["message"]
    assert error["param"] == "messages"


def test_token_ids_outside_of_the_vocabulary(http: httpx.Client) -> None:
    for prompt, place in (([5, 640], "prompt.1"), ([[5], [7, 8, -1]], "prompt.1.2")):
        error = error_of(http.post("/v1/completions", json={"prompt": prompt}), 400)
        assert error["param"] == place and "0 to 639" in error["message"]
    error = error_of(http.post("/detokenize", json={"tokens": [1, 99999]}), 400)
    assert "tokens.1=99999 is not valid: must be a token id from 0 to 639" in error["message"]
    ids = {"prompt": [5] * 200 + [9999]}
    assert error_of(http.post("/v1/completions", json=ids), 400)["param"] == "prompt.200"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ('"hello"', "must be a JSON object"),
        ('{"prompt": "x", "n": true}', "n=true is not valid: must be an integer"),
        ('{"prompt": "x", "top_p": NaN}', "top_p=NaN is not valid: must be a number"),
        ('{"prompt": "x", "stop": [null]}', "stop=[null] is not valid: must be a string"),
        ('{"prompt": "x", "stop_token_ids": {"a": true}}', "stop_token_ids={'a': true} is not"),
        ('{"prompt": "x", "usr": 1}', "accepted and without effect: metadata, "),
    ],
)
def test_problems_say_what_must_be_in_the_spelling_of_json(
    http: httpx.Client, content: str, text: str
) -> None:
    assert text in error_of(http.post("/v1/completions", content=content), 400)["message"]


def test_a_whole_answer_that_a_death_takes_can_be_asked_for_elsewhere(folder: Path) -> None:
    with Rehearsal(folder, num_ranks=2) as job, ThreadPoolExecutor(1) as pool:
        for rank in job.ranks:
            rank.pause()
        asked = pool.submit(httpx.post, job.url + COMPLETION[0], json=COMPLETION[1], timeout=20)
        wait_for(lambda: sum(len(x.running) for x in job.ranks) == 1)
        job.ranks[1].die()
        answer = asked.result()
        assert "rank 1 died" in error_of(answer, 503)["message"] and answer.headers["retry-after"]


def test_from_the_first_sign_of_a_loss_on_nothing_is_ready(folder: Path) -> None:
    with Rehearsal(folder, num_ranks=2) as job:
        client = job.service.client
        job.on_loop(lambda: setattr(client, "_schedule_verdict", lambda: None))  # it takes long
        job.on_loop(lambda: client._unreachable(1))
        health = httpx.get(job.url + "/health")
        assert health.status_code == 503 and "finding out" in health.json()["reason"]
        refused = httpx.post(job.url + COMPLETION[0], json=COMPLETION[1])
        assert "finding out" in error_of(refused, 503)["message"] and refused.headers["retry-after"]
        assert "moeserve_ready 0.0" in httpx.get(job.url + "/metrics").text


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "robot", "content": "x"}], "messages.0.role"),
        ([{"content": "x"}], "messages.0.role"),
        ([{"role": "user"}], "messages.0.content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages.0.content.0.type"),
        ([{"role": "tool", "content": "x"}], "messages"),  # the template raises
    ],
)
def test_wrong_messages(http: httpx.Client, messages: list[Any], param: str) -> None:
    error = error_of(http.post("/v1/chat/completions", json={"messages": messages}), 400)
    assert error["param"] == param


def test_unknown_models_routes_and_methods(http: httpx.Client) -> None:
    error = error_of(http.post(COMPLETION[0], json=COMPLETION[1] | {"model": "gpt"}), 404)
    assert error["code"] == "model_not_found" and "'tiny'" in error["message"]
    error_of(http.get("/v2/nothing"), 404)
    error_of(http.get("/v1/completions"), 405)


def test_huge_bodies_are_413(job: Rehearsal) -> None:
    with httpx.Client(base_url=job.url, timeout=20) as client:
        error = error_of(client.post("/v1/completions", content=b"x" * 100_001), 413)
        assert "100000" in error["message"]

    def chunks() -> Iterator[bytes]:
        for _ in range(11):
            yield b" " * 10_000

    with httpx.Client(base_url=job.url, timeout=20) as client:
        error_of(client.post("/v1/completions", content=chunks()), 413)


def test_checkpoint_without_chat_template(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, chat_template=None)
    with Rehearsal(tmp_path) as job, httpx.Client(base_url=job.url) as http:
        error = error_of(http.post("/v1/chat/completions", json={"messages": USER}), 400)
        assert "no chat template" in error["message"]
        assert http.post(*COMPLETION[:1], json=COMPLETION[1]).status_code == 200


def test_api_key(folder: Path) -> None:
    with Rehearsal(folder, server={"api_key": "secret"}) as job:
        with httpx.Client(base_url=job.url) as http:
            assert error_of(http.get("/v1/models"), 401)["code"] == "invalid_api_key"
            wrong = {"authorization": "Bearer wrong"}
            error_of(http.post("/v1/completions", json=COMPLETION[1], headers=wrong), 401)
            assert http.get("/health").status_code == 200
        client = openai.OpenAI(base_url=f"{job.url}/v1", api_key="secret", max_retries=0)
        assert client.models.list().data[0].id == "tiny"


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["user", "text", "role", "content"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
fields = st.sampled_from(sorted({*CompletionBody.model_fields, *ChatBody.model_fields}))


@settings(
    max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    call=st.sampled_from([COMPLETION, CHAT]), extra=st.dictionaries(fields, json_values, max_size=3)
)
def test_no_body_is_a_fault_of_ours(
    http: httpx.Client, call: tuple[str, dict[str, Any]], extra: dict[str, Any]
) -> None:
    path, body = call
    answer = http.post(path, content=json.dumps(body | extra))
    assert answer.status_code in (200, 400, 404, 429), (extra, answer.text)
    if answer.status_code == 400:
        assert answer.json()["error"]["param"]


# ---- full queue and leaving clients -------------------------------------------------------------


def test_full_queue_is_429_with_retry_after(job: Rehearsal, http: httpx.Client) -> None:
    rank = job.ranks[0]
    rank.pause()
    body = COMPLETION[1] | {"stream": True, "n": 4}
    with http.stream("POST", "/v1/completions", json=body) as stream:
        wait_for(lambda: len(rank.running) == 4)
        for path, other in (COMPLETION, CHAT):
            answer = httpx.post(job.url + path, json=other)
            error = error_of(answer, 429)
            assert error["code"] == "queue_full" and "max_queue=4" in error["message"]
            assert int(answer.headers["retry-after"]) >= 1
        client = openai.OpenAI(base_url=f"{job.url}/v1", api_key="x", max_retries=0)
        with pytest.raises(openai.RateLimitError):
            client.completions.create(model="tiny", prompt="x")
        rank.resume()
        assert stream.read().endswith(b"data: [DONE]\n\n")
    assert httpx.post(job.url + COMPLETION[0], json=COMPLETION[1]).status_code == 200
    error = error_of(http.post("/v1/completions", json=COMPLETION[1] | {"n": 5}), 400)
    assert error["param"] == "n" and "max_queue=4" in error["message"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("paused", [True, False])
def test_a_client_that_leaves_is_aborted(job: Rehearsal, stream: bool, paused: bool) -> None:
    rank = job.ranks[0]
    rank.received.clear()
    if paused:
        rank.pause()
    body = json.dumps({"prompt": "hi", "max_tokens": 500, "n": 2, "stream": stream}).encode()
    if not paused:
        rank.script = _endless
    host, _, port = job.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))) as raw:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        raw.sendall(head.encode() + body)
        if stream and not paused:
            assert raw.recv(100)
        wait_for(lambda: len(rank.of_kind(wire.Submit)) == 2)
    submitted = {x.request.request_id for x in rank.of_kind(wire.Submit)}
    wait_for(lambda: {y for x in rank.of_kind(wire.Abort) for y in x.request_ids} == submitted)
    wait_for(lambda: not rank.running and job.client.num_in_flight == 0)
    rank.resume()
    rank.script = echo


def _endless(request: Request) -> Iterator[TokenOutput]:
    while True:
        yield output(request, (300,), None)


def test_a_client_that_leaves_amid_its_body_is_no_fault_of_ours(
    job: Rehearsal, http: httpx.Client
) -> None:
    def errors() -> str:
        return "".join(x for x in http.get("/metrics").text.splitlines() if "http_errors" in x)

    before = errors()
    host, port = job.url.removeprefix("http://").split(":")
    for _ in range(3):
        with socket.create_connection((host, int(port))) as line:
            line.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
    assert http.get("/health").status_code == 200  # served after those were noticed
    assert errors() == before


def test_stop_string_ends_the_engines_request(job: Rehearsal, http: httpx.Client) -> None:
    def endless_echo(request: Request) -> Iterator[TokenOutput]:
        while True:
            for token_id in request.prompt_token_ids:
                yield output(request, (token_id,), None)

    rank = job.ranks[0]
    rank.received.clear()
    rank.script = endless_echo
    stops = job.service.metrics.requests.labels("stop")._value.get()
    body = {"prompt": "the fox", "max_tokens": 400, "stop": "foxthe"}
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["text"] == "the " and choice["finish_reason"] == "stop"
    wait_for(lambda: bool(rank.of_kind(wire.Abort)) and not rank.running)
    assert job.service.metrics.requests.labels("stop")._value.get() == stops + 1
    rank.script = echo


# ---- failures of the engine ---------------------------------------------------------------------


def failing(request: Request) -> Iterator[TokenOutput]:
    yield output(request, request.prompt_token_ids[1:2], None, first=True)
    yield TokenOutput(
        request_id=request.request_id,
        token_ids=(),
        finish_reason=FinishReason.ERROR,
        error="step 7 failed on rank 0",
    )


def test_a_failed_step_is_told_not_hidden(folder: Path) -> None:
    with Rehearsal(folder, script=failing) as job:
        for path, body in (COMPLETION, CHAT):
            error = error_of(httpx.post(job.url + path, json=body), 500)
            assert "step 7 failed" in error["message"] and error["code"] == "engine_error"
            text = httpx.post(job.url + path, json=body | {"stream": True}).text
            events = [x.removeprefix("data: ") for x in text.split("\n\n") if x]
            assert events[-1] == "[DONE]"
            assert "step 7 failed" in json.loads(events[-2])["error"]["message"]
            assert json.loads(events[-3])["choices"][0]["finish_reason"] == "error"
        client = openai.OpenAI(base_url=f"{job.url}/v1", api_key="x", max_retries=0)
        with pytest.raises(openai.APIError, match="step 7 failed"):
            list(client.completions.create(model="tiny", prompt="x", stream=True))
        metrics = httpx.get(job.url + "/metrics").text
        assert 'moeserve_requests_total{finish_reason="error"} 5.0' in metrics
        assert httpx.get(job.url + "/health").status_code == 200


def test_death_of_a_rank_ends_streams_with_an_error(folder: Path) -> None:
    with Rehearsal(folder, num_ranks=2) as job:
        for rank in job.ranks:
            rank.pause()
        body = COMPLETION[1] | {"stream": True, "n": 3}
        with httpx.stream("POST", job.url + COMPLETION[0], json=body, timeout=10) as stream:
            wait_for(lambda: sum(len(x.running) for x in job.ranks) == 3)
            job.ranks[1].die()
            text = stream.read().decode()
        assert text.count('"finish_reason":"error"') == 3 and "rank 1 died" in text
        health = httpx.get(job.url + "/health")
        assert health.status_code == 503 and health.json()["status"] == "failed"
        assert "rank 1 died" in health.json()["reason"]
        assert health.json()["ranks"][1]["state"] == "dead"
        assert httpx.get(job.url + "/health/live").status_code == 503
        error_of(httpx.post(job.url + COMPLETION[0], json=COMPLETION[1]), 503)


# ---- health -------------------------------------------------------------------------------------


def test_health_while_loading_ready_and_draining(folder: Path) -> None:
    with Rehearsal(folder, num_ranks=2, ready=False) as job:
        http = httpx.Client(base_url=job.url)
        wait_for(lambda: http.get("/health").json()["ranks"][1]["state"] == "starting")
        job.ranks[0].send(wire.Loading(0, "weights", 3_000_000, 10_000_000))
        wait_for(lambda: http.get("/health").json()["ranks"][0]["state"] == "weights")
        answer = http.get("/health")
        health = answer.json()
        assert answer.status_code == 503 and health["status"] == "loading"
        assert (health["live"], health["ready"]) == (True, False)
        assert health["ranks"][0]["done_bytes"] == 3_000_000
        assert "0 of 2 ranks are ready, 3 of 10 MB read" in health["reason"]
        assert http.get("/health/live").status_code == 200
        assert http.get("/health/ready").status_code == 503
        answer = http.post("/v1/completions", json=COMPLETION[1])
        assert "loading" in error_of(answer, 503)["message"]
        assert "retry-after" in answer.headers
        assert http.get("/v1/models").status_code == 200
        assert "moeserve_ready 0.0" in http.get("/metrics").text
        for rank in job.ranks:
            rank.become_ready()
        wait_for(lambda: http.get("/health").status_code == 200)
        assert http.post("/v1/completions", json=COMPLETION[1]).status_code == 200
        job.client.draining = True
        assert http.get("/health").json()["status"] == "draining"
        assert (
            "shutting down"
            in error_of(http.post("/v1/completions", json=COMPLETION[1]), 503)["message"]
        )


def test_health_tells_a_stalled_lockstep(folder: Path) -> None:
    with Rehearsal(folder, lockstep_timeout=0.3) as job:
        http = httpx.Client(base_url=job.url)
        wait_for(lambda: http.get("/health").status_code == 503)
        health = http.get("/health").json()
        assert health["status"] == "stalled" and "rank 0" in health["reason"]
        assert "moeserve_lockstep_stalled 1.0" in http.get("/metrics").text
        http.post("/v1/completions", json=COMPLETION[1])  # a step ends
        assert http.get("/health").json()["status"] == "ready"
