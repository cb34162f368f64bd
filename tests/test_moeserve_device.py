"""Which device, and what its memory is for: decided from numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dispatch.base import CombineForm
from ep.group import EPGroup
from models.deepseek.config import DeepSeekConfig
from moeserve import startup
from moeserve.config import ServeConfig
from moeserve.device.choose import Cuda, DeviceUnavailable, choose_device, look, no_cuda, refused
from moeserve.device.ledger import SLACK_BYTES, MemoryLedger, workspace_bytes
from moeserve.device.opening import (
    decode_rows,
    graph_memory,
    in_fp8,
    open_ledger,
    plan_kv,
    worst_picks,
)
from moeserve.errors import ConfigError
from moeserve.startup import prepare

GIB = 1 << 30
SINGLE = EPGroup.single()
EIGHT = Cuda("13.0", 8)
ROOT = Path(__file__).parents[1]


def test_auto_takes_cuda_where_each_rank_has_one() -> None:
    for rank in range(16):
        choice = choose_device("auto", EIGHT, rank, 8)
        assert choice.device == torch.device("cuda", rank % 8) and not choice.on_cpu
    assert choose_device("cuda", EIGHT, 3, 4).note == "device: cuda, one a rank (asked for)"
    assert choose_device("cpu", EIGHT, 3, 4).on_cpu
    few = choose_device("auto", Cuda("13.0", 1), 0, 2)
    assert few.on_cpu and "2 ranks here and 1 CUDA device is seen" in few.note
    assert "torch is built without CUDA" in choose_device("auto", Cuda(None, 0), 0, 1).note


@pytest.mark.parametrize(
    ("cuda", "said"),
    [
        (Cuda(None, 0), "torch is built without CUDA; moeserve doctor --device cuda says what"),
        (Cuda("13.0", 0, "an old driver"), r"finds no CUDA device \(an old driver\); moeserve"),
        (Cuda("13.0", 0), "torch finds no CUDA device; moeserve doctor"),
        (Cuda("13.0", 2), "8 ranks here and 2 CUDA devices are seen, each rank has one; at most 2"),
    ],
)
def test_a_device_that_is_asked_for_and_not_there_is_refused(cuda: Cuda, said: str) -> None:
    with pytest.raises(DeviceUnavailable, match=said) as caught:
        choose_device("cuda", cuda, 0, 8)
    assert "--device cpu" in str(caught.value)
    why = no_cuda(cuda, 8)
    assert why is not None and str(caught.value) == refused(why)
    assert no_cuda(EIGHT, 8) is None and no_cuda(EIGHT) is None


def test_what_cuda_says_as_it_starts_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("Error 802: system not yet initialized\nand more")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", broken)
    why = no_cuda(look())
    assert why == "torch finds no CUDA device (Error 802: system not yet initialized)"
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    assert no_cuda(look()) == "torch finds no CUDA device"
    monkeypatch.setattr(torch.version, "cuda", None)
    assert no_cuda(look()) == "torch is built without CUDA"


def settings(folder: Path, **sections: dict[str, Any]) -> ServeConfig:
    sections["model"] = {"checkpoint": folder} | sections.get("model", {})
    sections.setdefault("schedule", {"max_model_len": 128})
    return ServeConfig.load(None, sections)


def test_cuda_is_refused_with_all_else_before_weights(
    random_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "look", lambda: Cuda(None, 0))
    wrong = settings(
        random_checkpoint, engine={"device": "cuda"}, schedule={"max_model_len": 10**7}
    )
    with pytest.raises(ConfigError) as caught:
        prepare(wrong, SINGLE)
    first, second = caught.value.problems
    assert first.startswith("engine.device='cuda': torch is built without CUDA")
    assert "max_model_len=10000000" in second
    asked = prepare(settings(random_checkpoint, engine={"device": "cpu"}), SINGLE)
    assert "device: cpu (asked for)" in asked.notes
    plain = prepare(settings(random_checkpoint), SINGLE)
    assert plain.device.on_cpu and not any(note.startswith("device:") for note in plain.notes)


def test_kernels_for_gpus_are_refused_on_cpus(random_checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="model.kernels='triton': triton kernels need CUDA"):
        prepare(settings(random_checkpoint, model={"kernels": "triton"}), SINGLE)


def test_block_sizes_that_kernels_lack_are_refused(
    random_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = prepare(settings(random_checkpoint), SINGLE)
    choice = start.kernels
    monkeypatch.setattr(choice.kernels, "block_sizes", (16, 32, 64), raising=False)
    monkeypatch.setattr(startup, "create_kernels", lambda *_: choice)
    with pytest.raises(ConfigError) as caught:
        prepare(settings(random_checkpoint, cache={"block_size": 50}), SINGLE)
    assert caught.value.problems == [
        "cache.block_size=50: triton kernels take 16, 32, 64; nearest valid: 64"
    ]


class Memory:
    def __init__(self, free: int) -> None:
        self.free = free

    def __call__(self) -> int:
        return self.free


def test_a_plan_is_told_and_held() -> None:
    memory = Memory(100 * GIB)
    ledger = MemoryLedger(memory, 140 * GIB)
    ledger.plan({"weights: experts": 40 * GIB, "weights: attention": 10 * GIB, "graphs": GIB})
    ledger.plan({"workspace": 0})
    plan_kv(ledger, 0)
    assert ledger.planned["kv_cache"] == int(49 * GIB * 0.95)
    plan_kv(ledger, 0, 7 * GIB)
    assert ledger.planned["kv_cache"] == 7 * GIB
    plan_kv(ledger, 30 * GIB)
    assert ledger.describe().splitlines() == [
        "memory plan: 81.00 GiB of 100.00 free (140.00 in all)",
        "  weights: experts      40.000 GiB",
        "  weights: attention    10.000 GiB",
        "  graphs                 1.000 GiB",
        "  kv cache              30.000 GiB",
    ]
    assert ledger.shortage() is None
    memory.free -= 51 * GIB
    assert ledger.took("weights") == 51 * GIB
    memory.free -= 30 * GIB
    ledger.took("kv_cache")
    memory.free += GIB  # given back
    assert ledger.took("workspace") == 0
    assert ledger.exceeded() == []  # 1 GiB of 50 is within the slack
    memory.free -= 2 * GIB
    ledger.took("graphs")
    (line,) = ledger.exceeded()
    assert line.startswith("memory: graphs took 2147483648 bytes (2.00 GiB), 1073741824")
    memory.free -= SLACK_BYTES + 1
    ledger.took("libraries")
    assert [line.split()[1] for line in ledger.exceeded()] == ["graphs", "libraries"]
    assert ledger.report()["taken"]["kv_cache"] == 30 * GIB


def test_what_was_taken_and_given_back_counts_for_its_kind_alone() -> None:
    memory = Memory(100 * GIB)
    ledger = MemoryLedger(memory, 140 * GIB)
    ledger.plan({"workspace": 2 * GIB, "workspace: rows on their way": 3 * GIB, "graphs": GIB})
    for taken in (2, 6, 1):
        memory.free -= taken * GIB
        ledger.peak("workspace")
        memory.free += taken * GIB
    assert ledger.took("workspace") == 6 * GIB
    (line,) = ledger.exceeded()
    assert "workspace took 6442450944 bytes (6.00 GiB), 5368709120 (5.00 GiB) were" in line
    ledger.plan({"workspace": 3 * GIB})
    assert ledger.took("graphs") == ledger.took("workspace") == 0
    assert ledger.exceeded() == [] and ledger.taken["workspace"] == 6 * GIB


@pytest.mark.parametrize("form", list(CombineForm))
def test_the_worst_that_can_be_sent(form: CombineForm) -> None:
    cpu = torch.device("cpu")
    even, *turns = worst_picks(12, 3, 4, 2, form, cpu)
    for picks in (even, *turns):
        assert picks.dtype == torch.int32 and picks.shape == (12, 3)
        for row in picks.tolist():
            slots = [slot for slot in row if slot >= 0]
            assert len(slots) == len(set(slots)) > 0 and max(slots) < 8
    counts = torch.bincount(even.flatten().long(), minlength=8)
    assert int(counts.max() - counts.min()) <= 1 and int(counts.sum()) == 36
    assert len(turns) == 4
    for rank, picks in enumerate(turns):
        there = picks[picks >= 0]
        assert set((there // 2).tolist()) == {rank}
        assert there.numel() == 12 * (2 if form is CombineForm.PAIRS else 1)
    (alone,) = worst_picks(5, 3, 1, 2, form, cpu)  # fewer slots than picks
    assert (alone >= 0).sum(1).tolist() == [2] * 5


def test_a_plan_that_does_not_fit_names_the_largest() -> None:
    ledger = MemoryLedger(Memory(10 * GIB), 140 * GIB)
    ledger.plan({"weights: experts": 9 * GIB, "dispatch_buffers": 2 * GIB})
    said = ledger.shortage()
    assert said is not None and "most is for weights: experts (9.00 GiB)" in said
    plan_kv(ledger, 0)
    assert ledger.planned["kv_cache"] == 0


def test_what_is_planned_follows_the_settings() -> None:
    model = DeepSeekConfig.from_hf(ROOT / "checkpoints" / "tiny")
    config = ServeConfig.load(None, {"schedule": {"max_num_sequences": 10, "token_budget": 64}})
    assert decode_rows(config, 0) == 10 and decode_rows(config, 3) == 40
    assert decode_rows(config, 9) == 64
    assert graph_memory(config) == 2 * GIB
    off = ServeConfig.load(None, {"engine": {"graphs": "off"}})
    assert graph_memory(off) == 0
    given = ServeConfig.load(None, {"engine": {"graph_memory": "512MiB"}})
    assert graph_memory(given) == 512 << 20
    small, large = (workspace_bytes(model, n, 8, 2) for n in (64, 512))
    assert large - small == (512 - 64) * ((large - small) // 448) > 0
    few, many = (workspace_bytes(model, 64, 8, 2, n) for n in (64, 4096))
    assert few == small < many  # of a layout that has so many rows
    whole = {"experts": 2048, "attention": 2048, "embed": 100, "norm": 8}
    kept = in_fp8(whole, model, 2)
    assert (kept["experts"], kept["embed"], kept["norm"]) == (1025, 100, 8)
    assert kept["attention"] > 1025  # kv_b is in the model's dtype
    cpu = choose_device("cpu", EIGHT, 0, 1)
    assert open_ledger(config, cpu, model, whole, False, 0, 0, 2) is None
