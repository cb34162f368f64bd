"""Every line of a GPU engine's step, walked without a GPU: tensors are fake, kernels are written
down, captured steps are run again by the double. What would first fail on a customer's GPU (a
shape, a dtype, a CPU tensor among the others, a wait in a captured step, a kernel with types that
nobody compiled) fails here."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deep_gemm_double import Library
from fake_cuda import CUDA, FakeCuda, UnlaunchedKernels, fake_cuda, move
from speculate_world import write_heads
from torch import Tensor

from ep.group import EPGroup
from models.deepseek.kernels.gpu.gemm_choice import Gemms
from models.deepseek.kernels.gpu.gemm_deep_gemm import DeepGemm
from models.deepseek.kernels.gpu.launches import Launch, recorded_launches, uncovered
from models.deepseek.kernels.gpu.norm import rms_norm
from models.deepseek.kernels.gpu.registry import all_cases
from models.deepseek.kernels.select import KernelChoice
from models.deepseek.random_checkpoint import write_random_checkpoint
from models.deepseek.random_families import family_config
from moeserve import startup
from moeserve.build import build_engine
from moeserve.config import ServeConfig
from moeserve.device.ahead import AheadEngine
from moeserve.device.api import ReplayedApi
from moeserve.device.opening import open_graphs, warm_up_prefill
from moeserve.device.staging import Staging
from moeserve.engine import Engine
from moeserve.request import Request, SamplingParams, ThinkingMarkers
from moeserve.speculate.draft_model import DraftModelDrafter
from moeserve.speculate.eagle_drafter import EagleDrafter
from moeserve.speculate.late import LateDrafts
from moeserve.speculate.medusa import MedusaDrafter
from moeserve.speculate.mtp import MtpDrafter
from moeserve.speculate.verify import Rule

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="triton is built for Linux only")
SINGLE = EPGroup.single()
MAX_LEN = 128
GREEDY: dict[str, Any] = {"temperature": 0.0}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, fp8 in (("bf16", None), ("fp8", "fp32"), ("pow2", "pow2")):
        config = family_config("v3", num_hidden_layers=2)
        folder = tmp_path_factory.mktemp(name)
        made[name] = write_random_checkpoint(folder, config, tokenizer=False, fp8=fp8)
    return made


@contextmanager
def engine_on_cuda(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    drafts: int = 0,
    trees: bool = False,
    **sections: Any,
) -> Iterator[tuple[Engine, FakeCuda]]:
    """Built on a CPU by kernels that are not launched, then moved. trees: nothing is captured."""
    kernels = UnlaunchedKernels(torch.device("cpu"))
    monkeypatch.setattr(
        startup, "create_kernels", lambda *_: KernelChoice(kernels, "kernels: triton")
    )
    base = {
        "model": {"checkpoint": folder, "dtype": "bfloat16"},
        "cache": {"kv_tokens": 1024},
        "schedule": {"max_model_len": MAX_LEN, "max_num_sequences": 6, "token_budget": 48},
        "engine": {"quiet": True},
    }
    config = ServeConfig.load(None, base | sections)
    with recorded_launches():
        engine = build_engine(config, SINGLE)
    with warnings.catch_warnings(), fake_cuda() as fake, torch.inference_mode():
        warnings.simplefilter("ignore")  # the address of a fake tensor is asked for
        runner = engine.runner
        runner.model._attention._whole.clear()  # what it has made of weights on the CPU
        move(runner.model)
        runner.cache = runner.model.cache_spec.allocate(64, 16, CUDA)
        api = ReplayedApi(CUDA)
        runner.staging = Staging(api)
        warm_up_prefill(runner, 48)
        notes: list[str] = []
        runner.graphs = open_graphs(
            config, SINGLE, runner, MAX_LEN, drafts, notes, api=api, trees=trees
        )
        assert (runner.graphs is None) is trees, notes
        assert runner.graphs is None or len(runner.graphs.notes) == 0
        assert fake.waits == [], "a captured step waits for the device"
        assert engine.recorder is not None
        engine.recorder.wants_rows = False
        engine.recorder.api = api
        yield engine, fake


def ask(engine: Engine, number: int, length: int, **sampling: Any) -> None:
    params = SamplingParams(**({"max_tokens": 6, "ignore_eos": True} | sampling))
    prompt = tuple(range(3, 3 + length))
    engine.add_request(
        Request(
            request_id=str(number), prompt_token_ids=prompt, sampling=params,
            thinking=None if params.max_thinking_tokens is None else ThinkingMarkers((3,), (9, 8)),
        )
    )  # fmt: skip


def steps(engine: Engine, fake: FakeCuda) -> Iterator[list[str]]:
    """The waits of each step until there is no more work."""
    for _ in range(40):
        if not engine.has_work:
            return
        fake.waits.clear()
        for output in engine.step():
            assert output.error is None, output.error
        assert engine.failure is None
        assert engine.speculator is None or engine.speculator.failure is None
        yield list(fake.waits)
    raise AssertionError("there is still work")


def draft_there(engine: Engine, depth: int, rule: Rule = Rule.SAME) -> None:
    """MTP's drafter on the cache that is fake."""
    speculator, cache = engine.speculator, engine.runner.cache
    assert speculator is not None
    speculator.drafter = MtpDrafter(
        engine.runner, cache, len(cache.layers) - 1, 256, depth, rule, speculator.begin_round
    )


def covered(launches: list[Launch]) -> None:
    assert uncovered(launches, all_cases()) == []
    assert {str(d) for launch in launches for d in launch.devices} == {"cuda:0"}


@pytest.mark.parametrize("weights", ["bf16", "fp8", "pow2"])
def test_prefill_mixed_and_captured_decode(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, weights: str
) -> None:
    wire = "model" if weights == "bf16" else "fp8"  # what auto is on a GPU
    with engine_on_cuda(
        folders[weights], monkeypatch, parallel={"wire": wire}
    ) as (engine, fake):  # fmt: skip
        graphs = engine.runner.graphs
        assert graphs is not None and graphs.rungs == (1, 2, 4, 6)
        for number, length in enumerate((30, 40, 1, 20)):  # chunks, mixed steps
            ask(engine, number, length, **GREEDY)
        waits = list(steps(engine, fake))
        assert max(map(len, waits)) == 1, [w for w in waits if len(w) > 1]
        assert all("crossing.py" in wait for of_step in waits for wait in of_step)
        assert graphs.num_replays >= 3
        covered(fake.launches)
        names = {launch.name for launch in fake.launches}
        assert {"mla_decode_kernel", "mla_cache_kernel", "unpermute_kernel"} <= names
        assert ("fp8_gemm_kernel" in names) is (weights != "bf16")
        assert engine.recorder is not None and engine.recorder.totals.shape[0] == 2


EDITS: dict[str, Any] = {
    "logit_bias": {7: 2.0}, "presence_penalty": 0.5, "repetition_penalty": 1.2, "min_tokens": 2,
    "stop_token_ids": (5, 6),
}  # fmt: skip
RANDOM: dict[str, Any] = {"temperature": 0.7, "top_k": 4, "top_p": 0.9, "min_p": 0.1, "seed": 3}
KINDS: dict[str, list[dict[str, Any]]] = {
    "sampled": [RANDOM, GREEDY],
    "edited": [GREEDY | EDITS, RANDOM | EDITS, GREEDY | {"max_thinking_tokens": 1}],
    "logprobs": [GREEDY | {"logprobs": 3}, RANDOM | EDITS | {"logprobs": 0}, GREEDY],
    "prompt logprobs": [GREEDY | {"prompt_logprobs": 2}, RANDOM | {"prompt_logprobs": 0}],
    "counted load": [GREEDY | {"max_tokens": 35}],  # picks are counted every 16 steps
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_waits_once(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    with engine_on_cuda(folders["bf16"], monkeypatch) as (engine, fake):
        for number, sampling in enumerate(KINDS[kind]):
            ask(engine, number, 7 + 30 * number, **sampling)
        waits = list(steps(engine, fake))
        assert max(map(len, waits)) == 1, [w for w in waits if len(w) > 1]
        covered(fake.launches)
        names = {launch.name for launch in fake.launches}
        assert ({"probs_kernel", "draw_kernel"} <= names) is (kind != "counted load")


@pytest.mark.parametrize("halves", ["whole", "halves"])
def test_fast_prefill_waits_for_no_lengths(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, halves: str
) -> None:
    sections: dict[str, Any] = {
        "engine": {"quiet": True, "deterministic": False},
        "schedule": {"max_model_len": MAX_LEN, "max_num_sequences": 6, "token_budget": 100},
    }
    with engine_on_cuda(folders["bf16"], monkeypatch, **sections) as (engine, fake):
        engine.runner.overlap_from = 20 if halves == "halves" else None
        ask(engine, 0, 92, **GREEDY)  # the naive form alone
        ask(engine, 1, 5, **GREEDY)  # both
        waits = list(steps(engine, fake))
        ask(engine, 2, 3, **GREEDY)
        waits.append(next(steps(engine, fake)))
        for number, length in ((3, 70), (4, 20)):
            ask(engine, number, length, **GREEDY)  # beside a decode
        waits += steps(engine, fake)
        assert max(map(len, waits)) == 1, [w for w in waits if len(w) > 1]
        covered(fake.launches)
        assert "mla_prefill_kernel" in {launch.name for launch in fake.launches}


# Of one step at most: for its tokens and all that was drafted behind them; or for the tokens
# and each round, where the host chooses.
DRAFTS: dict[str, tuple[str, list[dict[str, Any]], int]] = {
    "greedy": ("same", [GREEDY, GREEDY], 1),
    "sampled": ("same", [RANDOM, GREEDY | {"logprobs": 2}], 1),
    "edited": ("same", [RANDOM, GREEDY | EDITS], 1 + 3),
    "rejection, greedy": ("rejection", [GREEDY, GREEDY], 1),
    "rejection": ("rejection", [RANDOM, RANDOM | {"logprobs": 2}], 1 + 3),
}


@pytest.mark.parametrize("kind", DRAFTS)
def test_drafts(
    folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rule, samplings, most = DRAFTS[kind]
    speculate = {"method": "mtp:3", "rule": rule}
    with engine_on_cuda(folders["fp8"], monkeypatch, 3, speculate=speculate) as (engine, fake):
        draft_there(engine, 3, Rule(rule))
        for number, sampling in enumerate(samplings):
            ask(engine, number, 30 if number == 0 else 4, **sampling)
        waits = list(steps(engine, fake))
        assert max(map(len, waits)) == most, [w for w in waits if len(w) > most]
        assert engine.scheduler.counters.drafted_tokens > 0
        assert engine.runner.graphs is not None and engine.runner.graphs.num_replays > 0
        covered(fake.launches)
    assert capsys.readouterr().err.count("which waits for each round") == (most > 1)


@pytest.mark.parametrize("nodes", [None, 8])
@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_heads_draft_before_the_host_knows(
    folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    nodes: int | None,
    tmp_path: Path,
) -> None:
    """nodes: of trees that branch, whose steps are not captured."""
    heads = write_heads(tmp_path / kind, kind, 256, 512)
    speculate = {"method": f"{kind}:{heads}:3", "nodes": nodes}
    with engine_on_cuda(
        folders["bf16"], monkeypatch, 3, nodes is not None, speculate=speculate
    ) as (engine, fake):  # fmt: skip
        model: Any = engine.runner.model
        assert engine.speculator is not None
        drafter: Any = engine.speculator.drafter  # of weights on the CPU
        if kind == "medusa":
            drafter = MedusaDrafter(drafter._heads, nodes, device=CUDA)
        else:
            drafter = EagleDrafter(
                drafter._head, model.weights.embed,
                lambda x: model.kernels.linear(
                    x.bfloat16(), model.weights.head, out_dtype=torch.float32
                ), 3, nodes,
            )  # fmt: skip
        engine.speculator.drafter = drafter
        if nodes is not None:
            told_of_zeros(drafter)
        ask(engine, 0, 30, **GREEDY, max_tokens=20)
        ask(engine, 1, 4, **RANDOM, max_tokens=20)
        if nodes is not None:
            ask(engine, 2, 9, **GREEDY | EDITS | {"logprobs": 1})
        branched, waits = 0, []
        for of_step in steps(engine, fake):
            waits.append(of_step)
            trees = [s.drafts for s in engine.scheduler.running if s.drafts is not None]
            branched += any(not tree.is_chain for tree in trees)
        assert max(map(len, waits)) == 1, [w for w in waits if len(w) > 1]
        assert engine.scheduler.counters.accepted_tokens > 0
        assert (branched > 1) is (nodes is not None)
        covered(fake.launches)


def told_of_zeros(drafter: Any) -> None:
    """What was brought are zeros, which no tree has as siblings: it is told of levels of tokens 1,
    0, 2, ..., of which the second one is accepted."""
    ask_late = drafter.ask_late

    def asked(*args: Any) -> LateDrafts:
        drafts = ask_late(*args)
        return LateDrafts(
            drafts.tensors, lambda host, num: drafts.told([_levels(x) for x in host], num)
        )

    drafter.ask_late = asked


def _levels(zeros: Tensor) -> Tensor:
    if zeros.is_floating_point():  # Medusa's chances, then ids
        return 0.5 ** torch.arange(1.0, zeros.shape[1] + 1).expand_as(zeros)
    made = torch.arange(zeros.shape[-1]).expand_as(zeros).clone()
    if made.dim() == 2:
        made[:, :2] = torch.tensor([1, 0])
    else:  # EAGLE's numbers, tokens, parents
        made[1] = torch.tensor([1, 0, 2])[made[0] % 3]
        made[2] = torch.where(made[0] < 3, -1, made[0] // 3 * 3 - 2)
    return made


def test_drafts_of_a_draft_model(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The target is its own draft model, but that no other rank hears of its rows."""
    speculate = {"method": "mtp:3"}
    with engine_on_cuda(folders["fp8"], monkeypatch, 3, speculate=speculate) as (engine, fake):
        assert engine.speculator is not None
        model: Any = engine.runner.model
        forward = model.forward

        def unbounded(*args: Any) -> Any:
            model.dispatcher.set_step_bound(None)
            return forward(*args)

        alone = SimpleNamespace(device=CUDA, cache_spec=model.cache_spec, forward=unbounded)
        drafter = DraftModelDrafter(alone, 64, 16, 6, max_depth=3)  # type: ignore[arg-type]
        engine.speculator.drafter = drafter
        for number, sampling in enumerate((GREEDY, RANDOM, GREEDY | {"logprobs": 2})):
            ask(engine, number, 30 if number == 0 else 4, **sampling)
        waits = list(steps(engine, fake))
        assert max(map(len, waits)) == 1, [w for w in waits if len(w) > 1]
        assert engine.scheduler.counters.drafted_tokens > 0
        covered(fake.launches)


@pytest.mark.parametrize("kind", ["on", "edited"])
def test_planned_ahead_nothing_is_asked_and_one_event_waited_for(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    with engine_on_cuda(
        folders["bf16"], monkeypatch, engine={"quiet": True, "ahead": "on"}
    ) as (engine, fake):  # fmt: skip
        assert isinstance(engine, AheadEngine)
        engine.api = api = ReplayedApi(CUDA)
        ask(engine, 0, 30, **GREEDY, logprobs=1)
        ask(engine, 1, 3, temperature=0.7, top_p=0.9, seed=3)
        waits: list[int] = []
        for number, of_step in enumerate(steps(engine, fake)):
            assert of_step == [] or (kind == "edited" and len(of_step) == 1)
            waits.append(api.calls.count("wait") + len(of_step))
            api.calls.clear()
            if number == 2 and kind == "edited":
                ask(engine, 2, 3, **GREEDY | EDITS)
        assert waits[0] == 0 and max(waits) == (2 if kind == "edited" else 1)
        assert waits.count(2) <= 1  # where such a row joins those that were not read
        assert engine.runner.graphs is not None and engine.runner.graphs.num_replays > 0
        covered(fake.launches)


def test_experts_by_a_library(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepGEMM makes the products of routed experts, eager and captured; no host waits for it."""
    double = Library(90)

    class WithLibrary(UnlaunchedKernels):
        def __init__(self, device: torch.device) -> None:
            super().__init__(device)
            self.gemms = Gemms(90, [DeepGemm(double, 90)])

    monkeypatch.setattr(sys.modules[__name__], "UnlaunchedKernels", WithLibrary)
    fast = {"quiet": True, "deterministic": False}
    with engine_on_cuda(folders["fp8"], monkeypatch, engine=fast) as (engine, fake):
        graphs = engine.runner.graphs
        captured = double.calls.count("owners")
        assert graphs is not None and captured >= 2 * len(graphs.rungs)
        for number, length in enumerate((30, 1, 20)):
            ask(engine, number, length, **GREEDY)
        waits = list(steps(engine, fake))
        assert max(map(len, waits)) == 1, [w for w in waits if len(w) > 1]
        assert graphs.num_replays >= 3 and double.calls.count("owners") > captured
        assert "grouped_gemm_kernel" not in {launch.name for launch in fake.launches}
        covered(fake.launches)


def test_a_wait_a_stray_tensor_and_unknown_types_are_seen() -> None:
    with fake_cuda() as fake, torch.inference_mode():
        x = torch.zeros(3, device=CUDA)
        assert x[1:].sum().item() == 0 and len(fake.waits) == 1 and "item" in fake.waits[0]
        with pytest.raises(AssertionError, match="nonzero: the host would wait"):
            x.nonzero()
        with pytest.raises(RuntimeError, match="device"):
            x + torch.zeros(3)
        rms_norm(torch.zeros(2, 128, dtype=torch.float16, device=CUDA), torch.zeros(128), 1e-6)
        (line,) = uncovered(fake.launches, all_cases())
        assert "rms_norm_kernel: no compile case has x *fp16" in line
        with pytest.raises(AssertionError):
            covered(fake.launches)
