"""Which format rows travel in: what is asked, what the checkpoint wants, and that it gets there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dispatch.base import WireFormat
from ep.group import EPGroup
from models.deepseek.config import BlockFP8
from models.deepseek.random_checkpoint import write_random_checkpoint
from models.deepseek.random_families import family_config
from moeserve.build import build_engine
from moeserve.config import ServeConfig
from moeserve.dispatch_wire import decide_wire
from moeserve.errors import ConfigError
from moeserve.startup import prepare

SINGLE = EPGroup.single()
V3, V32 = BlockFP8(), BlockFP8(ue8m0=True)


@pytest.mark.parametrize(
    ("asked", "quantization", "device", "wire"),
    [
        ("auto", None, "cuda", WireFormat.MODEL),
        ("auto", V3, "cpu", WireFormat.MODEL),
        ("auto", V3, "cuda", WireFormat.FP8),
        ("auto", V32, "cuda", WireFormat.FP8_UE8M0),
        ("model", V32, "cuda", WireFormat.MODEL),
        ("fp8", None, "cpu", WireFormat.FP8),
        ("fp8", V3, "cpu", WireFormat.FP8),
        ("fp8", V32, "cpu", WireFormat.FP8_UE8M0),
    ],
)
def test_the_choice(
    asked: str, quantization: BlockFP8 | None, device: str, wire: WireFormat
) -> None:
    choice = decide_wire(asked, quantization, device)
    assert choice.wire is wire
    assert choice.note.startswith("wire: rows travel in ")
    assert ("FP8, scales" in choice.note) == (wire is not WireFormat.MODEL)
    assert ("powers of two" in choice.note) == (wire is WireFormat.FP8_UE8M0)
    assert ("(asked for" in choice.note) == (asked != "auto")
    assert ("not trained" in choice.note) == (asked == "fp8" and quantization is None)


def settings(folder: Path, wire: str) -> ServeConfig:
    return ServeConfig.load(
        None,
        {
            "model": {"checkpoint": folder},
            "parallel": {"wire": wire},
            "cache": {"kv_tokens": 256},
            "schedule": {"max_model_len": 64},
        },
    )


@pytest.mark.parametrize(("fp8", "wire"), [("fp32", "fp8"), ("pow2", "fp8_ue8m0")])
def test_scales_follow_the_checkpoint(fp8: str, wire: str, tmp_path: Path) -> None:
    shape = family_config("v3", "tiny", num_hidden_layers=3)
    folder = write_random_checkpoint(tmp_path / "v3", shape, fp8=fp8, tokenizer=False)
    start = prepare(settings(folder, "fp8"), SINGLE)
    assert start.dispatch.wire.value == wire
    assert sum(note.startswith("wire: rows travel in FP8") for note in start.notes) == 1
    engine = build_engine(settings(folder, "fp8"), SINGLE)
    dispatcher = engine.runner.model.dispatcher
    assert dispatcher.config.wire.value == wire and dispatcher.config.dtype == torch.bfloat16
    assert sum("wire: rows" in note for note in engine.info["notes"]) == 1
    plain = build_engine(settings(folder, "auto"), SINGLE)
    assert plain.runner.model.dispatcher.config.wire is WireFormat.MODEL
    assert plain.settings != engine.settings, "ranks that differ in it must not step together"
    engine.close()
    plain.close()


def test_another_word_is_refused(random_checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=r"parallel.wire='fp9': must be one of auto, model, fp8"):
        settings(random_checkpoint, "fp9")
