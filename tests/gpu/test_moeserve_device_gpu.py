"""A whole engine on a GPU: captured steps and steps planned ahead give the tokens of plain ones."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from ep.group import EPGroup
from models.deepseek.random_checkpoint import write_random_checkpoint
from models.deepseek.random_families import family_config
from moeserve.build import build_engine
from moeserve.config import ServeConfig
from moeserve.device.ahead import AheadEngine
from moeserve.device.api import CudaApi
from moeserve.engine import Engine
from moeserve.request import Request, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PROMPTS = ([3, 120, 17, 99, 4], [7, 8, 9], [11] * 40, [5, 6])


@pytest.fixture(scope="module", params=[None, "fp32"], ids=["bf16", "fp8"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    config = family_config("v3", "bench", num_hidden_layers=3, num_nextn_predict_layers=1)
    return write_random_checkpoint(path, config, tokenizer=False, fp8=request.param)


def open_engine(folder: Path, speculate: str = "off", **engine: Any) -> Engine:
    sections: dict[str, dict[str, Any]] = {
        "model": {"checkpoint": folder, "dtype": "bfloat16"},
        "cache": {"kv_tokens": 4096},
        "schedule": {"max_model_len": 256, "max_num_sequences": 6, "token_budget": 32},
        "engine": {"device": "cuda", "quiet": True, "ahead": "off"} | engine,
        "speculate": {"method": speculate},
    }
    return build_engine(ServeConfig.load(None, sections), EPGroup.single())


def tokens(engine: Engine, waits: list[int] | None = None, **sampling: Any) -> list[list[int]]:
    """waits: gets how often torch itself waited for the device, of each step."""
    said: list[list[int]] = [[] for _ in PROMPTS]
    for number, prompt in enumerate(PROMPTS):
        params = SamplingParams(
            max_tokens=20 + number, ignore_eos=True, **({"temperature": 0.0} | sampling)
        )
        engine.add_request(
            Request(request_id=str(number), prompt_token_ids=tuple(prompt), sampling=params)
        )
    while engine.has_work:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                outputs = engine.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        if waits is not None:
            waits.append(sum("synchronizing CUDA operation" in str(w.message) for w in told))
        for output in outputs:
            assert output.error is None, output.error
            said[int(output.request_id)] += output.token_ids
    assert [len(each) for each in said] == [20, 21, 22, 23]
    return said


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_p": 0.9, "seed": 3}])
def test_captured_and_ahead_give_the_same(folder: Path, sampling: dict[str, Any]) -> None:
    want = tokens(open_engine(folder, graphs="off"), **sampling)
    captured = open_engine(folder)
    assert captured.runner.graphs is not None, captured.info["notes"]
    assert captured.runner.graphs.rungs == (1, 2, 4, 6)
    assert tokens(captured, **sampling) == want
    assert captured.runner.graphs.num_replays > 10
    ahead = open_engine(folder, ahead="auto")
    assert isinstance(ahead, AheadEngine)
    assert tokens(ahead, **sampling) == want


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_p": 0.9, "seed": 3}])
@pytest.mark.parametrize(("how", "most"), [("off", 1), ("ahead", 0), ("mtp:3", 2)])
def test_how_often_a_step_waits(
    folder: Path, sampling: dict[str, Any], how: str, most: int
) -> None:
    """Drafts change no token. Planned ahead a step waits for an event alone."""
    want = tokens(open_engine(folder), **sampling)
    engine = open_engine(
        folder, how if how.startswith("mtp") else "off", ahead="on" if how == "ahead" else "off"
    )
    waits: list[int] = []
    assert tokens(engine, waits, logprobs=2, **sampling) == want
    assert max(waits) == most, waits


def test_memory_is_planned_and_held(folder: Path) -> None:
    plan: Any = open_engine(folder).info["memory_plan"]
    assert {"weights", "kv_cache", "workspace", "graphs"} <= plan["taken"].keys()
    assert plan["taken"]["weights"] > 0


def test_events_and_graphs_of_the_thin_class() -> None:
    api = CudaApi(torch.device("cuda", 0))
    x = torch.zeros(4, device="cuda")
    host = api.pinned(16).view(torch.float32)
    event = api.event()
    event.wait()  # of nothing

    def body() -> list[torch.Tensor]:
        return [x * 2 + 1]

    api.warm_up(body)
    graph = api.capture(body)
    x.fill_(3)
    graph.replay()
    host.copy_(graph.outputs[0], non_blocking=True)
    event.record()
    event.wait()
    assert host.tolist() == [7, 7, 7, 7]
    assert api.free_bytes() > 0
