"""Figures of kernels and engine on a device: how they are made, predicted and shown, on CPUs."""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_cuda import CUDA, UnlaunchedKernels, fake_cuda, move
from typer.testing import CliRunner

from launch.bench import kernels_gpu
from launch.bench.device_trace import Span, busy_seconds, by_kernel, device_spans, spans_of
from launch.bench.engine_gpu import (
    FP8_CACHE,
    MODES,
    EngineReport,
    capture_steps,
    cut_config,
    measure_engine,
    open_engine,
    tiny_config,
    with_prediction,
)
from launch.bench.engine_gpu_show import show_engine
from launch.bench.engine_gpu_steps import EngineRow, EngineSizes, TimedSteps
from launch.bench.kernels_gpu import KernelReport, measure_kernels, show, summary
from models.deepseek.fp8 import dequantise_weight
from models.deepseek.kernels.gpu.bench.limits import Limits
from models.deepseek.kernels.gpu.bench.run import Measured, Row
from models.deepseek.kernels.gpu.bench.sizes import TINY
from models.deepseek.kernels.gpu.bench.winners import Winners
from models.deepseek.kernels.gpu.launches import uncovered
from models.deepseek.kernels.gpu.registry import all_cases
from models.deepseek.kernels.select import create_kernels
from models.deepseek.random_weights import RandomWeights
from moeserve.device import choose
from moeserve.device.api import ReplayedApi
from moeserve.device.choose import Cuda
from moeserve.errors import ConfigError

CPU = torch.device("cpu")
LIMITS = Limits(4e12, 7e14, 1.4e15, "twice bf16", 5e-6)
SPANS = [Span("a<b>", 0, 1), Span("void at::x<f(int)>(c)", 0.5, 2), Span("a<c>", 3, 4)]


# -- spans ---------------------------------------------------------------------------------------


def test_spans_overlap_and_have_short_names() -> None:
    assert busy_seconds(SPANS) == 3 and busy_seconds([]) == 0
    assert by_kernel(SPANS) == {"a": 2, "x": 1.5}
    assert by_kernel(SPANS, most=1) == {"a": 2, "other": 1.5}


def test_spans_are_the_events_of_a_device() -> None:
    def event(kind: str, start: float, end: float) -> Any:
        times = SimpleNamespace(start=start, end=end)
        return SimpleNamespace(name="k", device_type=kind, time_range=times)

    events = [event("DeviceType.CPU", 0, 9), event("DeviceType.CUDA", 1e6, 3e6)]
    assert spans_of([*events, event("DeviceType.CUDA", 5, 5)]) == [Span("k", 1.0, 3.0)]


@pytest.mark.parametrize(
    ("events", "fault", "note"),
    [
        ([SimpleNamespace(name="k", device_type="CUDA",
                          time_range=SimpleNamespace(start=0, end=1))], "", ""),
        ([], "", "not traced: the profiler saw no kernel"),
        ([], "no counters\nmore", "not traced: no counters"),
    ],
)  # fmt: skip
def test_a_device_is_traced(monkeypatch, events: list[Any], fault: str, note: str) -> None:
    class Profile:
        def __init__(self, activities: Any) -> None: ...

        def __enter__(self) -> Profile:
            if fault:
                raise RuntimeError(fault)
            return self

        def __exit__(self, *_: object) -> None: ...

        def events(self) -> list[Any]:
            return events

    monkeypatch.setattr(torch.profiler, "profile", Profile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    spans, why = device_spans(torch.device("cuda"), lambda: None)
    assert len(spans) == len(events) and why == note


# -- the engine ----------------------------------------------------------------------------------


def test_the_cut_model_has_all_dimensions_of_v3() -> None:
    c = cut_config(5, 1)
    assert (c.hidden_size, c.n_routed_experts, c.num_attention_heads) == (7168, 256, 128)
    assert (c.num_hidden_layers, c.first_k_dense_replace, c.num_mtp_layers) == (5, 1, 0)


def test_random_weights_keep_their_size() -> None:
    config = tiny_config()
    kernels = create_kernels("torch").kernels
    for fp8 in (True, False):
        weights = RandomWeights(config, kernels, CPU, fp8=fp8, dtype=torch.float32).make()
        moe = weights.moe_layers()[0]
        gate, up, down = moe.experts.fetch(3)
        for piece in (gate, up, down, weights.layers[0].attention.o.unpack()):
            assert piece.isfinite().all()
            # 1 but for the few scales, which are between 1/2 and 3/2
            assert 0.2 < float(piece.square().mean() * piece.shape[1]) < 2.4
        assert not torch.equal(gate, moe.experts.fetch(4)[0])
        assert weights.keeps_fp8 is fp8 and len(weights.layers) == config.num_hidden_layers


def test_sizes_have_room_for_those_that_wait() -> None:
    s = EngineSizes()
    assert s.outputs(256, 1024) >= s.steps + s.traced + 256 * 1024 // s.token_budget
    assert s.num_blocks * s.block >= 128 * (4096 + s.outputs(128, 4096))
    assert s.longest >= 16384 + s.outputs(1, 16384) and s.most_sequences == 256


@pytest.fixture(scope="module")
def report() -> EngineReport:
    sizes = replace(EngineSizes.tiny(), batches=((3, 10),), prompts=((2, 12),))
    kernels = create_kernels("torch").kernels

    def trace(device: torch.device, call: Any) -> tuple[list[Span], str]:
        call()
        return SPANS, ""

    return measure_engine(
        tiny_config(), kernels, CPU, LIMITS, sizes, 600, graphs=ReplayedApi, trace=trace
    )


def test_an_engine_is_measured_in_all_modes(report: EngineReport) -> None:
    assert not report.failed and not report.left
    found = {(r.mode, r.what): r for r in report.rows}
    assert len(found) == len(report.rows) == 7
    assert [what for mode, what in found if mode == FP8_CACHE] == ["decode"]
    for (_, what), r in found.items():
        assert r.tokens_per_second > 0 and r.predicted > 0 and r.launches > 50
        assert r.replayed is (what == "decode")
        assert r.idle == pytest.approx(0.25) and {"host", "sampling"} <= r.engine.keys()
    decode = found["fast", "decode"]
    assert decode.parts == {"a": 1.0, "x": 0.75}  # of one of two steps
    assert any(note.startswith("captured decode steps, rows: 3, in") for note in report.notes)


def test_an_engine_is_shown(report: EngineReport, capsys) -> None:
    failed = EngineRow("fast", "decode", 1, 1, 0, 0, 0, 0, False, error="[x] no memory")
    show_engine(replace(report, rows=[*report.rows, failed], left=["a", "b"]), "chip", 4)
    out = capsys.readouterr().out
    assert "engine on chip" in out and "25%" in out and "[x] no memory" in out
    assert "measured in part: 7 of 10 phases" in out and "not measured: a, b" in out
    assert "a 1000.00, x 750.00" in out and "DeepSeek-V3's dimensions, 4 layers" in out
    show_engine(report, "chip", 4, "a tiny model")
    out = capsys.readouterr().out
    assert "engine on chip: a tiny model, 4 layers" in out and "in part" not in out


def test_what_fails_or_comes_late_is_told() -> None:
    kernels = create_kernels("torch").kernels
    late = measure_engine(tiny_config(), kernels, CPU, LIMITS, EngineSizes.tiny(), -1.0)
    assert late.rows == [] and len(late.left) == 8

    def broken(device: torch.device, call: Any) -> tuple[list[Span], str]:
        raise RuntimeError("device lost\nmore")

    sizes = replace(EngineSizes.tiny(), batches=((1, 8),), prompts=())
    done = measure_engine(tiny_config(), kernels, CPU, LIMITS, sizes, 600, trace=broken)
    assert [r.error for r in done.failed] == ["RuntimeError: device lost"] * 4
    assert done.rows == done.failed

    def no_graphs() -> ReplayedApi:
        raise RuntimeError("no driver")

    done = measure_engine(tiny_config(), kernels, CPU, LIMITS, sizes, 600, graphs=no_graphs)
    assert [(r.what, r.error) for r in done.rows] == [("open", "RuntimeError: no driver")] * 4


@pytest.mark.skipif(sys.platform != "linux", reason="triton is built for Linux only")
@pytest.mark.parametrize("mode", list(MODES))
def test_an_engine_is_walked_on_a_device_that_is_not_there(mode: str) -> None:
    """Built on a CPU and moved: tensors are fake, kernels are written down, not launched. (Prompts
    are so short that attention never goes by heads: that asks the device for lengths.)"""
    config = replace(
        cut_config(2, 1), hidden_size=512, intermediate_size=512, moe_intermediate_size=256,
        num_attention_heads=16, q_lora_rank=256, n_routed_experts=16, vocab_size=512,
    )  # fmt: skip
    sizes = EngineSizes(((1, 40), (3, 50)), ((1, 100),), token_budget=100, steps=2, traced=1)
    kernels = UnlaunchedKernels(CPU, fast=mode != "deterministic")
    weights = RandomWeights(config, kernels, CPU).make()
    notes: list[str] = []

    def trace(device: torch.device, call: Any) -> tuple[list[Span], str]:
        call()
        return [], "no"

    engine = open_engine(config, weights, kernels, sizes, mode, notes)
    with warnings.catch_warnings(), fake_cuda() as fake, torch.inference_mode():
        warnings.simplefilter("ignore")  # the address of a fake tensor is asked for
        runner = engine.runner
        move(runner.model)
        runner.cache = runner.model.cache_spec.allocate(sizes.num_blocks, sizes.block, CUDA)
        capture_steps(engine, sizes, ReplayedApi(CUDA), notes)
        assert notes[0].startswith("captured decode steps, rows: 1, 3, in") and len(notes) == 1
        timed = TimedSteps(engine, CUDA, trace)
        row = timed.decode(3, 50, sizes)
        assert row.replayed and row.note == "no"
        assert timed.prefill(1, 100, sizes).tokens_per_second > 0
        assert runner.cache.layers[0].dtype == (
            torch.uint8 if mode == FP8_CACHE else torch.bfloat16
        )
        assert uncovered(fake.launches, all_cases()) == []
        assert {str(d) for launch in fake.launches for d in launch.devices} == {"cuda:0"}
        names = {launch.name for launch in fake.launches}
    assert {"mla_decode_kernel", "grouped_gemm_kernel", "fp8_gemm_kernel"} <= names


def test_a_prediction_grows_with_the_load() -> None:
    config = cut_config()

    def predicted(what: str, n: int, length: int, mode: str = "fast") -> float:
        bare = EngineRow(mode, what, n, length, 0, 1.0, 0, 0, False)
        return with_prediction(bare, config, LIMITS).predicted

    # One sequence reads the weights of 8 experts of 256, not of all.
    assert predicted("decode", 1, 1024) < 0.2 * predicted("decode", 256, 1024)
    assert predicted("decode", 128, 1024) < predicted("decode", 128, 65536)
    fast, strict = (predicted("prefill", 1, 16384, mode) for mode in ("fast", "deterministic"))
    assert fast < strict < 10 * fast


# -- kernels -------------------------------------------------------------------------------------


def kernel_report() -> KernelReport:
    key, whole = {"rows": 1}, {"rows": 1, "context": 1024, "heads": 128, "fp8": 0}
    rows = [
        Row("mla_decode", "1 x 1K", whole, "memory", 8e-6, 32_000_000, 10**9, 9e-6, 20, True, "",
            {"flash_mla": 8.5e-6, "bad [x]": 1e-6}, {"flash_mla": 0.001, "bad [x]": 2.0},
            {"flashinfer": "not installed"}),
        Row("fp8_gemm", "o", key, "compute", 7e-6, 10**6, 10**10, 10e-6, 20, False, "not captured"),
        Row("gate", "x", key, "memory", 1e-6, 10, 10, error="RuntimeError: [lost]"),
    ]  # fmt: skip
    large = {"big": "takes 9.0 GiB, 1.0 GiB are free"}
    measured = Measured(rows, [f"late {n}" for n in range(9)], 3.0, large)
    return KernelReport("chip", LIMITS, measured, Winners.from_rows("chip", rows))


def test_kernels_are_shown_with_what_is_missing(capsys) -> None:
    report = kernel_report()
    show(report)
    out = capsys.readouterr().out
    assert "bad [x] 1.0 (differs)" in out and "RuntimeError: [lost]" in out
    assert summary(report) == [
        "bound by memory: 1 of 1 shapes at 80% of their limit or more",
        "block-FP8 GEMM: 70% of the measured rate (fp8_gemm o)",
        "not beside ours: flashinfer (not installed)",
        "other results than ours: bad [x] at mla_decode 1 x 1K",
        "*: not captured, the host's launches are in the time",
        "failed: gate x",
        "left out for want of memory: big (takes 9.0 GiB, 1.0 GiB are free)",
        "measured in part: 2 of 12 shapes",
        "not measured: late 0, late 1, late 2, late 3, late 4, late 5, and 3 more (in the JSON)",
        "2 shapes in 3 s",
    ]
    held = json.loads(json.dumps(report.as_json()))
    assert held["kernels"][0]["winner"] == "flash_mla" and held["kernels"][2]["winner"] == ""
    assert held["winners_table"]["winners"]["mla_decode"][0]["name"] == "flash_mla"
    assert len(held["not_measured"]) == 9 and list(held["too_large"]) == ["big"]


def test_an_unknown_kernel_is_refused() -> None:
    with pytest.raises(ConfigError, match="--only 'nothing': in no kernel's name: mla_decode"):
        measure_kernels(CPU, TINY, only="nothing")


def test_the_command_needs_a_device(monkeypatch, tmp_path: Path) -> None:
    from launch.bench.app import bench_app

    monkeypatch.setattr(choose, "look", lambda: Cuda("13.0", 0, "an old driver"))
    run = CliRunner()
    for flags, said in (
        (["--device", "cuda"], "--device cuda: torch finds no CUDA device (an old driver); moes"),
        (["--device", "cuda"], "--compile-only needs none"),
        (["--device", "tpu"], "--device tpu"),
        (["--winners", "x.json"], "--winners: only with --device cuda"),
    ):
        got = run.invoke(bench_app, ["kernels", *flags])
        assert got.exit_code and said in f"{got.exception}{got.output}"


def test_the_command_shows_and_saves(monkeypatch, tmp_path: Path, capsys) -> None:
    monkeypatch.setattr(choose, "look", lambda: Cuda("13.0", 1))
    monkeypatch.setattr(kernels_gpu, "measure_kernels", lambda *_, **__: kernel_report())
    file = tmp_path / "winners.json"
    pytest.importorskip("triton")
    assert kernels_gpu.GpuKernelBench("", 1.0, file).run(as_json=True) == 1
    assert Winners.load(file).device == "chip"
    last = json.loads(capsys.readouterr().out)  # one document and nothing else
    assert last["format"] == kernels_gpu.FORMAT and last["machine"]["torch"]


def test_the_exit_code_says_whether_all_was_measured(monkeypatch, capsys) -> None:
    monkeypatch.setattr(choose, "look", lambda: Cuda("13.0", 1))
    pytest.importorskip("triton")
    whole = kernel_report()
    whole = replace(whole, measured=replace(whole.measured, rows=whole.measured.rows[:2]))
    for left, code in (([], 0), (["late"], 1)):
        report = replace(whole, measured=replace(whole.measured, left=left))
        monkeypatch.setattr(kernels_gpu, "measure_kernels", lambda *_, r=report, **__: r)
        assert kernels_gpu.GpuKernelBench("", 1.0).run(as_json=False) == code
        assert ("measured in part: 2 of 3 shapes" in capsys.readouterr().out) is bool(left)


def test_what_was_measured_before_it_is_interrupted_is_shown(monkeypatch, capsys) -> None:
    monkeypatch.setattr(choose, "look", lambda: Cuda("13.0", 1))
    pytest.importorskip("triton")

    def interrupted(*_: object, keep: Any, **__: object) -> KernelReport:
        keep(kernel_report())
        raise KeyboardInterrupt

    monkeypatch.setattr(kernels_gpu, "measure_kernels", interrupted)
    with pytest.raises(KeyboardInterrupt):
        kernels_gpu.GpuKernelBench("", 1.0).run(as_json=True)
    assert len(json.loads(capsys.readouterr().out)["kernels"]) == 3


def test_what_is_measured_is_kept_as_it_comes() -> None:
    sizes = replace(EngineSizes.tiny(), batches=((1, 8),), prompts=())
    kernels, kept = create_kernels("torch").kernels, []
    done = measure_engine(
        tiny_config(), kernels, CPU, LIMITS, sizes, 600, trace=lambda d, call: ([], "no"),
        keep=kept.append,
    )  # fmt: skip
    assert [len(r.rows) for r in kept] == [1, 2, 3, 4] and len(done.rows) == 4 and not done.left
    assert kept[0].left == [f"{mode} decode 1 x 8" for mode in list(MODES)[1:]]
    assert all(r.rows[-1].predicted > 0 for r in kept)


def test_codes_dequantise_to_numbers() -> None:
    from models.deepseek.kernels.gpu.bench.gemms import random_codes, scales_of_weight

    codes = random_codes((200, 300), CPU)
    wide = dequantise_weight(codes, scales_of_weight(200, 300, CPU)[0])
    assert wide.isfinite().all() and float(wide.std()) > 0
