"""Parts of timing kernels on a device that need no kernel: clock, limits, rivals, winners."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import CUDA, fake_cuda

from models.deepseek.kernels.gpu.bench import attention
from models.deepseek.kernels.gpu.bench.case import BY_LOAD
from models.deepseek.kernels.gpu.bench.clock import CudaClock, HostClock
from models.deepseek.kernels.gpu.bench.limits import Limits, measure_limits
from models.deepseek.kernels.gpu.bench.rivals import DeepGemm
from models.deepseek.kernels.gpu.bench.run import OURS, Row, all_cases
from models.deepseek.kernels.gpu.bench.sizes import TINY, V3
from models.deepseek.kernels.gpu.bench.winners import (
    FastestMla,
    Winners,
    WinnersUnreadable,
)
from models.deepseek.kernels.gpu.cost import KernelCost
from models.deepseek.kernels.gpu.errors import ShapeRefused
from models.deepseek.kernels.gpu.launches import uncovered
from models.deepseek.kernels.gpu.mla_adapters import MlaProblem, MlaStep
from models.deepseek.kernels.gpu.mla_plan import DETERMINISTIC, DecodePlan
from models.deepseek.kernels.gpu.registry import all_cases as compiled_cases

CPU = torch.device("cpu")
# Compiled kernels timed under another name: with what they are part of, or as it is called.
TIMED_AS = {
    "dense_grouped": "dense_per_head",
    "greedy": "argmax",
    "grouped_gemm_contiguous": "grouped_contiguous",
    "grouped_gemm_masked": "grouped_masked",
    "mla_merge": "mla_decode",
    "quant": "quantise",
    "quant_silu_mul": "silu_quantise",
    "router": "gate",
    "row_peaks": "argmax",
    "sample_draw": "sample",
    "sample_probs": "sample",
    "sort_count": "sort_pairs",
    "sort_place": "sort_pairs",
    "sort_scan": "sort_pairs",
}


class FakeCuda:
    """torch.cuda as far as a clock needs it: each run takes 2 ms."""

    def __init__(self, captures: bool = True) -> None:
        self.captures = captures
        self.replays = self.emptied = 0
        self.now = 0.0
        fake = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                fake.now += 1.0
                self.at = fake.now

            def elapsed_time(self, end: Any) -> float:
                return 2.0 * (end.at - self.at)

        class CUDAGraph:
            def replay(self) -> None:
                fake.replays += 1

        self.Event, self.CUDAGraph = Event, CUDAGraph

    def synchronize(self) -> None:
        return None

    def empty_cache(self) -> None:
        self.emptied += 1

    def mem_get_info(self) -> tuple[int, int]:
        return 5 << 30, 8 << 30

    @contextmanager
    def graph(self, graph: Any) -> Any:
        if not self.captures:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        yield


@pytest.mark.parametrize("captures", [True, False])
def test_a_clock_of_events_captures_where_it_can(captures: bool) -> None:
    api, calls = FakeCuda(captures), []
    clock = CudaClock(CPU, api, flush=64)
    timing = clock.time(lambda: calls.append(1), cold=True, budget=0.0)
    assert timing.seconds == pytest.approx(2e-3) and timing.runs == 5
    assert timing.captured is captures
    if captures:
        assert api.replays == 6 and len(calls) == 3 and timing.note == ""
    else:
        assert len(calls) == 8
        assert timing.note == "not captured: operation not permitted when stream is capturing"
    clock.rest()
    assert api.emptied == 1 and clock.room() == 5 << 30 and HostClock().room() is None


def test_a_clock_stops_at_many_runs() -> None:
    timing = CudaClock(CPU, FakeCuda(), flush=64).time(lambda: None, False, budget=60.0)
    assert timing.runs >= 50


def test_the_host_clock_runs_at_least_once() -> None:
    calls: list[int] = []
    assert HostClock().time(lambda: calls.append(1), False, 0.0).runs == 1 and len(calls) == 2


def test_limits_are_measured_and_bind() -> None:
    limits = measure_limits(HostClock(), CPU, copy_bytes=1 << 16, side=32)
    assert min(limits.memory, limits.bf16, limits.fp8, limits.overhead) > 0 and limits.fp8_by
    plain = Limits(100.0, 10.0, 20.0, "twice bf16", 0.0)
    cost = KernelCost(1000, 400)
    assert plain.seconds(cost, "bf16") == 40 and plain.bound(cost, "bf16") == "compute"
    assert plain.seconds(cost, "fp8") == 20 and plain.seconds(cost, "none") == 10
    assert plain.bound(cost, "none") == "memory"


def test_deep_gemm_is_beside_on_the_chip_whose_scales_these_are() -> None:
    assert "sm_100" in str(DeepGemm().refusal(100))
    assert "sm_0" in str(DeepGemm().refusal(0))


# -- winners -------------------------------------------------------------------------------------


def row(rows: int, context: int, flash: float, difference: float = 0.001, fp8: int = 0) -> Row:
    key = {"rows": rows, "context": context, "heads": 128, "fp8": fp8}
    return Row(
        "mla_decode", f"{rows} x {context}", key, "memory", 1.0, 1, 1, ours=2.0,
        rivals={"flash_mla": flash, "torch": 0.1}, differences={"flash_mla": difference},
    )  # fmt: skip


def test_a_table_has_ours_as_fast_mode_runs_it() -> None:
    """Cut by load, where that was measured; nobody else did the same: no winner."""
    both = replace(row(8, 4096, 1.0), rivals={"flash_mla": 1.0, BY_LOAD: 0.5})
    both = replace(both, differences={"flash_mla": 0.001, BY_LOAD: 0.001})
    table = Winners.from_rows("chip", [both])
    assert table.of["mla_decode"][0].seconds == {OURS: 0.5, "flash_mla": 1.0}
    assert table.of["mla_decode"][0].name == OURS and both.winner == BY_LOAD
    alone = replace(both, rivals={BY_LOAD: 0.5}, differences={BY_LOAD: 0.001})
    assert Winners.from_rows("chip", [alone]).of == {}


@pytest.mark.parametrize(("context", "differs"), [(40, False), (4096, True)])
def test_decode_is_timed_both_ways_where_they_differ(context: int, differs: bool) -> None:
    case = attention._decode_case(TINY, 1, context, 1, False, CPU)
    assert (BY_LOAD in case.make().rivals) is differs


def test_winners_are_those_of_the_nearest_shape(tmp_path: Path) -> None:
    rows = [row(1, 1024, 1.0), row(256, 4096, 3.0), row(1, 131072, 1.0, difference=1.0)]
    table = Winners.from_rows("chip", [*rows, Row("x", "y", {}, "", 1, 1, 1, error="no")])
    assert [r.winner for r in rows] == ["flash_mla", OURS, OURS]
    file = tmp_path / "winners.json"
    table.save(file)
    loaded = Winners.load(file)
    assert loaded.as_json() == table.as_json() and loaded.device == "chip"
    among = ("flash_mla",)

    def pick(rows: int, context: int, names: Sequence[str] = among, fp8: int = 0) -> str | None:
        return loaded.pick("mla_decode", names, rows=rows, context=context, heads=128, fp8=fp8)

    assert pick(2, 900) == "flash_mla" and pick(200, 5000) == OURS and pick(1, 100000) == OURS
    assert pick(2, 900, names=()) == OURS  # it won, and is not here
    far = [pick(8, 1024), pick(1, 200), pick(1, 4097), pick(64, 16384), pick(63, 4096)]
    assert far == [None, None, None, OURS, None] and pick(4, 256) == "flash_mla"
    assert pick(2, 900, fp8=1) is None and loaded.pick("gate", among, rows=1) is None
    whole = tmp_path / "whole.json"
    whole.write_text(json.dumps({"winners_table": table.as_json()}))
    assert Winners.load(whole).as_json() == table.as_json()


@pytest.mark.parametrize("text", ["no json", "[]", '{"format": "other"}'])
def test_what_is_no_table_is_refused_in_words(tmp_path: Path, text: str) -> None:
    file = tmp_path / "x.json"
    file.write_text(text)
    with pytest.raises(WinnersUnreadable, match=r"x\.json: "):
        Winners.load(file)


class Flash:
    """An adapter that decodes nothing, or refuses."""

    name = "flash_mla"

    def __init__(self, step_refused: bool = False) -> None:
        self.step_refused = step_refused

    def refusal(self, problem: MlaProblem) -> str | None:
        return "no fp8" if problem.fp8 else None

    def step(self, problem: MlaProblem, step: MlaStep) -> Any:
        if self.step_refused:
            raise ShapeRefused("not this step")
        return lambda q, layer: (q, layer)


def step_of(rows: int, context: int, known: bool = True) -> MlaStep:
    positions = torch.full((rows,), context - 1)
    zeros = torch.zeros(rows, dtype=torch.int32)
    plan = DecodePlan(
        positions, zeros, zeros, zeros, zeros, None, DETERMINISTIC,
        DETERMINISTIC.count(context), context, ((0, rows),),
    )  # fmt: skip
    return MlaStep(
        plan, torch.zeros(1, 1, dtype=torch.int32), 1.0, [context] * rows if known else None
    )


def test_the_fastest_decodes_each_step() -> None:
    table = Winners.from_rows("chip", [row(1, 1024, 1.0), row(256, 4096, 3.0)])
    problem = MlaProblem(128, 512, 64, 64, 90)
    fastest = FastestMla(table, [Flash()])
    for known in (True, False):
        out = fastest.step(problem, step_of(1, 1000, known))(torch.ones(1), torch.ones(1))
        assert out == (torch.ones(1), torch.ones(1))
        assert callable(fastest.step(problem, step_of(256, 4000, known)))  # ours
    assert fastest.choices == (
        "mla decode by table, 1 rows, 1024 positions or fewer, measured at 1 rows, 1024 positions: "
        "flash_mla",
        "mla decode by table, 256 rows, 4096 positions or fewer, measured at 256 rows, 4096 "
        "positions: triton",
    )
    refused = FastestMla(table, [Flash(True)])
    assert callable(refused.step(problem, step_of(1, 1000)))
    assert refused.choices[0].endswith(": triton (no flash_mla: not this step)")
    assert callable(FastestMla(table, []).step(problem, step_of(1, 1000)))
    strict = MlaProblem(128, 512, 64, 64, 90, deterministic=True)
    assert "company" in str(fastest.refusal(strict))
    assert "nobody was measured" in str(FastestMla(Winners("chip", {}), []).refusal(problem))


def test_every_kernel_has_a_check_on_a_device() -> None:
    """By name, in tests/gpu: a new module of kernels wants one."""
    from models.deepseek.kernels.gpu.registry import HOME, MODULES

    folder = Path(__file__).parent / "gpu"
    text = "\n".join(p.read_text() for p in folder.glob("test_models_*.py"))
    named = [f"{HOME}.{name} import" for name in MODULES]
    parent = [f"from {HOME} import {name} " for name in MODULES]
    found = [a in text or b in text for a, b in zip(named, parent, strict=True)]
    assert [name for name, there in zip(MODULES, found, strict=True) if not there] == []


def test_every_kernel_is_timed() -> None:
    timed = {case.kernel for case in all_cases(V3, CPU)}
    compiled = {case.name for case in compiled_cases()}
    assert compiled - timed == TIMED_AS.keys() and timed >= set(TIMED_AS.values())


@pytest.mark.skipif(sys.platform != "linux", reason="triton is built for Linux only")
def test_every_shape_of_v3_is_walked_on_a_device_that_is_not_there() -> None:
    """Made, launched and beside torch, with fake tensors: no shape is refused, nothing waits for
    the device (so it can be captured), no launch has types that nobody compiles, and no kernel is
    never timed."""
    with warnings.catch_warnings(), fake_cuda() as fake, torch.inference_mode():
        warnings.simplefilter("ignore")  # the address of a fake tensor is asked for
        for case in all_cases(V3, CUDA):
            prepared = case.make()
            fake.waits.clear()
            prepared.ours()
            assert fake.waits == [], case.name
            for call in prepared.rivals.values():
                call()
        assert uncovered(fake.launches, compiled_cases()) == []
        timed = {launch.kernel for launch in fake.launches}
        assert {c.name for c in compiled_cases() if c.kernel not in timed} == set()
        assert {str(d) for launch in fake.launches for d in launch.devices} == {"cuda:0"}
