"""An engine put together for a GPU that is not there: plan printed, weights moved, steps captured,
a request served. And the lines that know torch.cuda, beside stand-ins for it."""

from __future__ import annotations

import inspect
import sys
import types
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import CUDA, UnlaunchedKernels, fake_cuda, move

from ep.group import EPGroup
from launch import groups
from launch.env import RankEnv
from models.deepseek.kernels.gpu.launches import uncovered
from models.deepseek.kernels.gpu.registry import all_cases
from models.deepseek.kernels.select import KernelChoice
from models.deepseek.model import DeepSeekModel
from models.deepseek.random_checkpoint import write_random_checkpoint
from models.deepseek.random_families import family_config
from moeserve import build, runner, startup
from moeserve.config import ServeConfig
from moeserve.device import api, opening
from moeserve.device.ahead import AheadEngine
from moeserve.device.choose import Cuda
from moeserve.errors import ConfigError
from moeserve.request import Request, SamplingParams
from moeserve.speculate.build import SpeculatePlan

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="triton is built for Linux only")
GIB = 1 << 30


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """What is free on it."""
    memory = {"free": 100 * GIB}
    kernels = UnlaunchedKernels(torch.device("cpu"))
    real_load = build.load_model

    def load(*args: Any, device: torch.device, **kwargs: Any) -> Any:
        assert device == CUDA
        model = real_load(*args, **kwargs)
        move(model)
        return model

    monkeypatch.setattr(build, "load_model", load)
    monkeypatch.setattr(startup, "look", lambda: Cuda("13.0", 1))
    monkeypatch.setattr(startup, "create_kernels", lambda *_: KernelChoice(kernels, "kernels: -"))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (memory["free"], 140 * GIB))
    for place in (build, runner, opening):
        monkeypatch.setattr(place, "CudaApi", api.ReplayedApi)
    return memory


def settings(folder: Path, **sections: Any) -> ServeConfig:
    base: dict[str, Any] = {
        "model": {"checkpoint": folder, "dtype": "bfloat16"},
        "schedule": {"max_model_len": 128, "max_num_sequences": 3, "token_budget": 32},
    }
    return ServeConfig.load(None, base | sections)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = family_config("v3", num_hidden_layers=2)
    return write_random_checkpoint(
        tmp_path_factory.mktemp("v3"), config, tokenizer=False, fp8="fp32"
    )


@pytest.mark.parametrize("ahead", ["auto", "off", "drafts"])
def test_an_engine_for_a_gpu(
    folder: Path, gpu: dict[str, int], capsys: pytest.CaptureFixture[str], ahead: str
) -> None:
    stages: list[tuple[str, int, int]] = []
    with warnings.catch_warnings(), fake_cuda() as fake:
        warnings.simplefilter("ignore")  # the address of a fake tensor is asked for
        engine = build.build_engine(
            settings(folder, speculate={"method": "ngram:1"})
            if ahead == "drafts"
            else settings(folder, engine={"ahead": ahead}),
            EPGroup.single(),
            lambda *told: stages.append(told),
        )
        assert isinstance(engine, AheadEngine) is (ahead == "auto")
        assert engine.runner.cache.layers[0].device == CUDA
        sampling = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        engine.add_request(Request(request_id="a", prompt_token_ids=(3, 4), sampling=sampling))
        said = 0
        while engine.has_work:
            for output in engine.step():
                assert output.error is None, output.error
                said += len(output.token_ids)
        assert said == 4
        assert uncovered(fake.launches, all_cases()) == []
    rows = [1, 2, 4, 6] if ahead == "drafts" else [1, 2, 3]
    assert [told for told in stages if told[0] == "graphs"] == [
        ("graphs", number, len(rows)) for number in range(len(rows) + 1)
    ]
    info: Any = engine.info
    assert info["device"] == "cuda" and info["graphs"]["rows"] == rows
    assert info["memory_plan"]["planned"]["weights: experts"] > 0
    printed = capsys.readouterr().err
    lines = printed.splitlines()
    assert lines[0].startswith("moeserve: memory plan: ")
    assert info["memory_plan"]["taken"]["workspace"] == 0  # of the fake one
    for kind in ("weights: experts", "graphs", "workspace", "kv cache"):
        assert any(line.startswith(f"moeserve:   {kind} ") for line in lines), kind
    assert "wire: rows travel in FP8" in printed and "device: cuda, one a rank (auto)" in printed
    assert f"graphs: decode steps captured at {', '.join(map(str, rows))} rows" in printed
    assert [
        line.removeprefix("moeserve: ahead: ")[:38] for line in lines if " ahead: " in line
    ] == {
        "auto": ["each step is planned while the one bef"],
        "off": [],
        "drafts": ["off; speculation drafts from the token"],
    }[ahead]


def test_a_plan_that_does_not_fit_ends_the_start_before_weights(
    folder: Path, gpu: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu["free"] = GIB
    monkeypatch.setattr(build, "load_model", lambda *_, **__: pytest.fail("weights were read"))
    with fake_cuda(), pytest.raises(ConfigError, match="memory: the plan needs .* graphs"):
        build.build_engine(settings(folder, engine={"quiet": True}), EPGroup.single())


def test_too_little_for_one_sequence_ends_the_start_before_weights(
    folder: Path,
    gpu: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All else fits. Said as it is said where the cache is sized at last."""
    monkeypatch.setattr(build, "load_model", lambda *_, **__: pytest.fail("weights were read"))
    with fake_cuda():
        gpu["free"] = 2 * GIB
        with pytest.raises(ConfigError, match=r"memory: the plan needs (\d+) bytes") as short:
            build.build_engine(settings(folder), EPGroup.single())
        others = int(str(short.value).partition("plan needs ")[2].split()[0])
        gpu["free"] = others + 20_000  # 19.000 of them: a block of 16, where 128 positions need 8
        with pytest.raises(ConfigError) as caught:
            build.build_engine(settings(folder), EPGroup.single())
    (problem,) = caught.value.problems
    assert problem.startswith("cache: auto: 95% of ") and "gives 1 blocks of 16" in problem
    assert "one sequence of max_model_len=128 needs 128 tokens" in problem
    assert "memory plan: " in capsys.readouterr().err


def test_what_drafts_is_in_the_plan(
    folder: Path, gpu: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights are not taken for workspace."""
    monkeypatch.setattr(SpeculatePlan, "memory_bytes", lambda *_: 5 * GIB)
    real_open = build.open_speculator

    def open_hungry(*args: Any) -> Any:
        gpu["free"] -= 5 * GIB
        return real_open(*args)

    monkeypatch.setattr(build, "open_speculator", open_hungry)
    drafts = settings(folder, speculate={"method": "ngram:1"}, engine={"quiet": True})
    with warnings.catch_warnings(), fake_cuda():
        warnings.simplefilter("ignore")
        engine = build.build_engine(drafts, EPGroup.single())
    told: Any = engine.info["memory_plan"]
    assert told["planned"]["drafter"] == told["taken"]["drafter"] == 5 * GIB


def test_who_takes_more_than_planned_ends_the_start(
    folder: Path, gpu: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def hungry(*args: Any, **kwargs: Any) -> None:
        gpu["free"] -= 5 * GIB

    monkeypatch.setattr(build, "warm_up_prefill", hungry)
    with warnings.catch_warnings(), fake_cuda():
        warnings.simplefilter("ignore")
        with pytest.raises(ConfigError, match="memory: workspace took 5368709120 bytes"):
            build.build_engine(settings(folder, engine={"quiet": True}), EPGroup.single())


def test_the_largest_step_that_was_given_back_counts(
    folder: Path, gpu: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the worst steps is measured by itself, rows on their way with the others."""
    given: list[int] = []

    def exchange(model: Any, slots: torch.Tensor) -> None:
        gpu["free"] -= 5 * GIB
        given.append(5 * GIB)

    def give_back(self: Any) -> None:
        gpu["free"] += sum(given)
        given.clear()

    monkeypatch.setattr(DeepSeekModel, "exchange", exchange)
    monkeypatch.setattr(api.ReplayedApi, "give_back", give_back)
    with warnings.catch_warnings(), fake_cuda():
        warnings.simplefilter("ignore")
        with pytest.raises(ConfigError, match="memory: workspace took 5368709120 bytes"):
            build.build_engine(settings(folder, engine={"quiet": True}), EPGroup.single())


def test_the_thin_class_over_torch_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its calls, beside stand-ins with the names and arguments that torch has."""
    names = inspect.signature(torch.cuda.graph.__init__).parameters
    assert {"pool", "stream", "capture_error_mode"} <= names.keys()
    calls: list[str] = []

    class Stream:
        def __init__(self, device: Any = None) -> None:
            calls.append("stream")

        def wait_stream(self, other: Any) -> None:
            calls.append("wait stream")

    class Event:
        def record(self) -> None:
            calls.append("record")

        def synchronize(self) -> None:
            calls.append("synchronize")

    class Graph:
        def replay(self) -> None:
            calls.append("replay")

    def graph(cuda_graph: Any, pool: Any, stream: Any, capture_error_mode: str) -> Any:
        assert pool == "pool" and capture_error_mode == "thread_local"
        calls.append("capture")
        return nullcontext()

    stand_ins = {
        "Stream": Stream, "Event": Event, "CUDAGraph": Graph, "graph": graph,
        "stream": lambda stream: nullcontext(), "current_stream": lambda device: Stream(),
        "graph_pool_handle": lambda: calls.append("pool") or "pool",
        "synchronize": lambda device: calls.append("sync"),
        "mem_get_info": lambda device: (7, 9),
        "empty_cache": lambda: calls.append("empty"),
    }  # fmt: skip
    for name, value in stand_ins.items():
        assert hasattr(torch.cuda, name), name
        monkeypatch.setattr(torch.cuda, name, value)
    on = api.CudaApi(CUDA)
    x = torch.zeros(2)
    on.warm_up(lambda: [x])
    made = on.capture(lambda: [x])
    on.capture(lambda: [x])
    made.replay()
    assert made.outputs[0] is x and on.free_bytes() == 7
    event = on.event()
    event.wait()  # of nothing: nobody is waited for
    event.record()
    event.wait()
    on.give_back()
    kept = [call for call in calls if call not in ("stream", "wait stream")]
    assert kept[-2:] == ["sync", "empty"]
    del kept[-2:]
    assert kept.pop(0) == "pool" and "pool" not in kept  # one for both
    del made
    on.capture(lambda: [x])
    assert calls.count("pool") == 2  # the first went with the last graph
    assert kept == ["sync", "capture", "sync", "capture", "replay", "record", "synchronize"]


def test_groups_have_nccl_where_ranks_have_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    env: Any = types.SimpleNamespace(rank=1, local_size=2)
    assert "rank" in RankEnv.__annotations__
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(groups.dist, "is_nccl_available", lambda: True)
    for cuda, asked, backend in (
        (Cuda("13.0", 2), "auto", "cpu:gloo,cuda:nccl"),
        (Cuda("13.0", 2), "cpu", "gloo"),
        (Cuda("13.0", 1), "auto", "gloo"),
        (Cuda("13.0", 1), "cuda", "gloo"),  # the problem is told later
    ):
        monkeypatch.setattr(groups, "look_for_cuda", lambda cuda=cuda: cuda)
        config = ServeConfig.load(None, {"engine": {"device": asked}})
        assert groups._backend(env, config) == backend
    assert chosen == [torch.device("cuda", 1)]
    assert groups._backend(env, None) == "gloo"
