"""How many tokens each prompt of a call may get, and bodies that say a thing twice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from server_world import USER

from moeserve import wire
from moeserve.request import SamplingParams
from moeserve.server.rehearsal import Rehearsal, write_tokenizer

LIMIT = 512


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rehearsal]:
    folder = tmp_path_factory.mktemp("bounds")
    write_tokenizer(folder)
    with Rehearsal(folder, max_model_len=LIMIT) as running:
        yield running


def sent(job: Rehearsal, route: str, **body: Any) -> list[SamplingParams]:
    """What the ranks were asked for."""
    job.ranks[0].received.clear()
    answer = httpx.post(f"{job.url}/v1/{route}", json=body)
    assert answer.status_code == 200, answer.text
    return [x.request.sampling for x in job.ranks[0].of_kind(wire.Submit)]


def refused(job: Rehearsal, route: str, **body: Any) -> tuple[str, str]:
    answer = httpx.post(f"{job.url}/v1/{route}", json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return error["param"], error["message"]


def test_a_long_prompt_shortens_no_other(job: Rehearsal) -> None:
    prompts = [[5] * (LIMIT - 3), [5], [5] * (LIMIT - 9)]
    assert [x.max_tokens for x in sent(job, "completions", prompt=prompts)] == [3, 16, 9]
    twice = sent(job, "completions", prompt=prompts, n=2, seed=1)
    assert [(x.max_tokens, x.seed) for x in twice] == [
        *((3, 1), (3, 2)),
        *((16, 1), (16, 2)),
        *((9, 1), (9, 2)),
    ]


def test_a_length_asked_for_that_one_prompt_exceeds_names_that_prompt(job: Rehearsal) -> None:
    prompts = [[5], [5] * (LIMIT - 3), [5]]
    param, message = refused(job, "completions", prompt=prompts, max_tokens=4)
    assert param == "max_tokens" and "prompt.1" in message and "max_tokens=4" in message
    param, message = refused(job, "completions", prompt=[[5], [5] * LIMIT])
    assert param == "prompt.1" and "max_tokens" not in message
    param, message = refused(job, "completions", prompt=[5] * LIMIT)
    assert param == "prompt" and "max_tokens" not in message and str(LIMIT) in message
    assert refused(job, "completions", prompt=["a", "a " * 600])[0] == "prompt.1"


def test_min_tokens_moves_the_default(job: Rehearsal) -> None:
    (got,) = sent(job, "completions", prompt="a", min_tokens=20)
    assert (got.min_tokens, got.max_tokens) == (20, 20)
    (got,) = sent(job, "completions", prompt="a", min_tokens=3)
    assert (got.min_tokens, got.max_tokens) == (3, 16)
    (got,) = sent(job, "completions", prompt=[5] * (LIMIT - 20), min_tokens=20)
    assert (got.min_tokens, got.max_tokens) == (20, 20)
    (got,) = sent(job, "chat/completions", messages=USER, min_tokens=20, stop="nothing")
    assert got.min_tokens == 20 and got.max_tokens > 400


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("completions", {"prompt": [5] * (LIMIT - 4)}),
        ("chat/completions", {"messages": [{"role": "user", "content": "dog " * 245}]}),
    ],
)
def test_errors_cite_only_what_was_sent(job: Rehearsal, route: str, body: dict[str, Any]) -> None:
    param, message = refused(job, route, **body, min_tokens=500)
    assert param == "min_tokens" and "min_tokens=500" in message and "max_tokens" not in message
    param, message = refused(job, route, **body, min_tokens=5, max_tokens=4)
    assert param == "min_tokens" and "max_tokens=4" in message
    name = "max_tokens" if route == "completions" else "max_completion_tokens"
    param, message = refused(job, route, **body, **{name: 600})
    assert param == name and f"{name}=600" in message


def test_one_token_in_two_spellings_is_refused(job: Rehearsal) -> None:
    for bias in ({"5": 1, "05": -1}, {"0": 1, "00": 1}):
        param, message = refused(job, "completions", prompt="a", logit_bias=bias)
        assert param == "logit_bias" and repr(list(bias)[1]) in message
        assert repr(list(bias)[0]) in message
    (got,) = sent(job, "completions", prompt="a", logit_bias={"05": 1, "50": 2})
    assert got.logit_bias == {5: 1.0, 50: 2.0}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ('{"prompt": "a", "prompt": "b"}', "prompt"),
        ('{"prompt": "a", "max_tokens": 1, "max_tokens": 1}', "max_tokens"),
        ('{"prompt": "a", "logit_bias": {"7": 1, "7": 2}}', "7"),
        ('{"prompt": "a", "pr\\u006fmpt": null}', "prompt"),
        ('{"user": "a", "user": "b", "prompt": "a"}', "user"),
    ],
)
def test_a_name_that_comes_twice_is_refused(job: Rehearsal, body: str, param: str) -> None:
    for route in ("/v1/completions", "/tokenize"):
        answer = httpx.post(job.url + route, content=body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == param and "twice" in error["message"]
    fine = '{"prompt": "say \\"prompt\\": twice", "logit_bias": {"7": 1, "8": 1e0}, "seed": 12}'
    assert httpx.post(job.url + "/v1/completions", content=fine).status_code == 200
