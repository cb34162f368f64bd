"""Start-up problems: all of them at once, before any weight is read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ep.group import EPGroup
from ep.placement import ExpertPlacement
from models.deepseek.random_checkpoint import write_random_checkpoint
from models.deepseek.random_families import family_config
from models.deepseek.safetensors_index import SafetensorsIndex
from moeserve import build
from moeserve.build import build_engine
from moeserve.config import ServeConfig
from moeserve.errors import ConfigError
from moeserve.startup import checkpoint_fingerprint, prepare

SINGLE = EPGroup.single()


def config(checkpoint: Path, **sections: dict[str, Any]) -> ServeConfig:
    sections.setdefault("cache", {"kv_tokens": 512})
    sections.setdefault("schedule", {"max_model_len": 128})
    sections["model"] = {"checkpoint": checkpoint} | sections.get("model", {})
    return ServeConfig.load(None, sections)


def problems(checkpoint: Path, **sections: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        prepare(config(checkpoint, **sections), SINGLE)
    return caught.value.problems


def test_all_problems_come_at_once_and_no_weight_is_read(
    random_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "load_model", lambda *_, **__: pytest.fail("weights were read"))
    broken = config(
        random_checkpoint,
        parallel={"ep": 3, "dispatch": "torch"},
        schedule={"max_model_len": 10**7},
    )
    with pytest.raises(ConfigError) as caught:
        build_engine(broken, SINGLE)
    text = "\n".join(caught.value.problems)
    assert "parallel.ep=3: this job has 1 rank;" in text
    assert "schedule.max_model_len=10000000" in text and "at most 2048" in text
    assert "parallel.dispatch='torch': cannot run here" in text
    assert len(caught.value.problems) == 3


def test_the_architecture_is_the_first_problem(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v4"}')
    first, *more = problems(tmp_path, parallel={"ep": 3})
    assert "deepseek_v4" in first and len(more) == 1


def test_each_kind_of_problem_names_its_setting(random_checkpoint: Path, tmp_path: Path) -> None:
    folder = random_checkpoint
    (found,) = problems(folder, parallel={"dispatch": "pigeon"})
    assert "parallel.dispatch='pigeon': must be one of auto, local, torch" in found
    (found,) = problems(folder, parallel={"dispatch": "torch"})
    assert "parallel.dispatch='torch': cannot run here" in found
    (found,) = problems(folder, model={"weights": "fp8"})
    assert "model.weights='fp8': this checkpoint has no FP8 blocks" in found
    (found,) = problems(folder, cache={"kv_tokens": 64})
    assert "kv_tokens=64" in found and "max_model_len=128" in found
    (found,) = problems(folder, parallel={"placement": tmp_path / "none.json"})
    assert "parallel.placement" in found
    for name in ("bad.json", "bad.npz"):
        (tmp_path / name).write_text("[]")
        (found,) = problems(folder, parallel={"placement": tmp_path / name})
        assert found.count(name) == 1 and "not a placement file" in found
    (found,) = problems(tmp_path)
    assert "config.json" in found
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v4"}')
    (found,) = problems(tmp_path)
    assert "deepseek_v4" in found and "Supported" in found


def test_odd_dims_fall_back_or_are_refused_before_loading(tmp_path: Path) -> None:
    odd = family_config("v3", kv_lora_rank=33, v_head_dim=13)
    folder = write_random_checkpoint(tmp_path, odd, tokenizer=False)
    start = prepare(config(folder, model={"dtype": "bfloat16"}), SINGLE)
    assert start.kernels.kernels.name == "torch"
    assert any("slow" in note and "kernels: torch" in note for note in start.notes)
    (found,) = problems(folder, model={"dtype": "bfloat16", "kernels": "native"})
    assert "model.kernels='native'" in found
    assert prepare(config(folder, model={"dtype": "float32"}), SINGLE).notes


def test_a_truncated_shard_is_found_before_loading(random_checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(random_checkpoint, folder)
    shard = next(folder.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-100])
    assert any(shard.name in p for p in problems(folder))


def test_a_given_placement_must_fit_the_model(random_checkpoint: Path, tmp_path: Path) -> None:
    start = prepare(config(random_checkpoint), SINGLE)
    layers, experts = start.placement.num_layers, start.placement.num_logical_experts
    wrong = ExpertPlacement.trivial(layers + 1, experts + 1, 1)
    wrong.save(tmp_path / "wrong.json")
    found = problems(random_checkpoint, parallel={"placement": tmp_path / "wrong.json"})
    assert [f"has {layers + 1} layers" in found[0], "logical experts" in found[1]] == [True] * 2
    table = np.tile(np.roll(np.arange(experts + 2) % experts, 5), (layers, 1))
    ExpertPlacement.from_physical_to_logical(table, 1, experts).save(tmp_path / "right.npz")
    settings = {"placement": tmp_path / "right.npz", "redundant_experts": 3}
    (found2,) = problems(random_checkpoint, parallel=settings)
    assert "redundant_experts=3: the given placement has 2" in found2
    settings = {"placement": tmp_path / "right.npz"}
    made = prepare(config(random_checkpoint, parallel=settings), SINGLE)
    assert made.placement.num_redundant_experts == 2


def test_empty_slots_are_noted(random_checkpoint: Path, tmp_path: Path) -> None:
    start = prepare(config(random_checkpoint), SINGLE)
    assert not any("empty" in note for note in start.notes)
    layers, experts = start.placement.num_layers, start.placement.num_logical_experts
    table = np.tile([*range(experts), -1, 0, -1, 1], (layers, 1))
    ExpertPlacement.from_physical_to_logical(table, 1, experts).save(tmp_path / "p.json")
    settings = {"placement": tmp_path / "p.json", "redundant_experts": 2}
    made = prepare(config(random_checkpoint, parallel=settings), SINGLE)
    assert made.dispatch.num_physical_experts == experts + 4
    assert any(f"leave 2 of {experts + 4} slots empty" in note for note in made.notes)


def test_auto_becomes_a_value_and_is_noted(random_checkpoint: Path) -> None:
    made = prepare(config(random_checkpoint), SINGLE)
    named = json.loads((random_checkpoint / "config.json").read_text())["torch_dtype"]
    assert made.dtype is getattr(torch, named)
    assert any(note.startswith("dtype: ") for note in made.notes)
    assert any(note.startswith("kernels: ") for note in made.notes)
    given = prepare(config(random_checkpoint, model={"dtype": "float32", "mtp": False}), SINGLE)
    assert given.dtype is torch.float32 and not given.with_mtp
    assert given.placement.num_layers == made.placement.num_layers - 1


@pytest.mark.parametrize(
    "change",
    [
        {"text_config": None, "torch_dtype": "float32"},
        {"text_config": None, "torch_dtype": None, "dtype": "float32"},
    ],
)
def test_dtype_is_found_wherever_it_stands(
    random_checkpoint: Path, tmp_path: Path, change: dict[str, object]
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(random_checkpoint, folder)
    named = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(named))
    assert prepare(config(folder), SINGLE).dtype is torch.float32


def fingerprint(folder: Path) -> str:
    return checkpoint_fingerprint(folder, SafetensorsIndex.open(folder).files)


def test_fingerprints_tell_checkpoints_apart(random_checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(random_checkpoint, folder)
    assert fingerprint(folder) == fingerprint(random_checkpoint)
    (folder / "zz.safetensors").symlink_to("nowhere")  # beside an index: not read
    if (folder / "model.safetensors.index.json").exists():
        assert fingerprint(folder) == fingerprint(random_checkpoint)
        assert prepare(config(folder), SINGLE).fingerprint == fingerprint(folder)
    (folder / "zz.safetensors").unlink()
    other = json.loads((folder / "config.json").read_text()) | {"rope_theta": 123}
    (folder / "config.json").write_text(json.dumps(other))
    assert fingerprint(folder) != fingerprint(random_checkpoint)


def test_what_a_built_engine_says_of_itself(
    random_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stages: list[str] = []
    engine = build_engine(
        config(random_checkpoint, parallel={"redundant_experts": 3}),
        SINGLE,
        lambda stage, done, total: stages.append(stage),
    )
    assert list(dict.fromkeys(stages)) == ["rendezvous", "weights", "cache", "warmup"]
    said = capsys.readouterr().err
    assert said.count("kernels: ") == 1 and "KV cache: 32 blocks of 16" in said
    info = engine.info
    placement = info["placement"]
    assert isinstance(placement, dict) and placement["num_physical_experts"] == 19
    memory = info["memory_bytes"]
    assert str(info["kernels"]).startswith(("native", "torch")), "a name, not a line"
    assert isinstance(memory, dict) and memory["kv_cache"] > 0 and memory["experts"] > 0
    json.dumps(info)
    stats = engine.stats()
    assert sum(stats.expert_load) == 0, "the warm-up was counted"
    engine.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="auto is a GPU here")
def test_memory_of_captured_steps_is_no_setting_of_a_cpu(random_checkpoint: Path) -> None:
    (problem,) = problems(random_checkpoint, engine={"graph_memory": "1GiB"})
    assert problem.startswith(f"engine.graph_memory={1 << 30}: not used on a CPU")
