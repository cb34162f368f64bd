"""Loading: formats, what a rank reads, what lands in memory, special cases of real checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dispatch.local import LocalDispatcher
from ep.group import EPGroup
from ep.placement import EMPTY, ExpertPlacement
from models.deepseek.checkpoint import preflight
from models.deepseek.config import DeepSeekConfig
from models.deepseek.errors import CheckpointError
from models.deepseek.fp8 import dequantise_weight
from models.deepseek.kernels.torch_kernels import TorchKernels
from models.deepseek.load import load_model
from models.deepseek.loader import WeightLoader
from models.deepseek.model import DeepSeekModel
from models.deepseek.random_checkpoint import FP8_KINDS, write_random_checkpoint
from models.deepseek.random_families import family_config
from models.deepseek.reference import ReferenceModel
from models.offline import OfflineRunner

SINGLE = EPGroup.single()
TOKENS = torch.randint(0, 512, (24,), generator=torch.Generator().manual_seed(0)).tolist()
SMALL: dict[str, Any] = {"num_hidden_layers": 2, "n_routed_experts": 8, "n_group": 2,
                         "topk_group": 1}  # fmt: skip


def write(path: Path, **options: Any) -> Path:
    config = family_config(options.pop("family", "v3"), **(SMALL | options.pop("config", {})))
    return write_random_checkpoint(path, config, tokenizer=False, **options)


def load(path: Path, **options: Any) -> DeepSeekModel:
    return load_model(
        path,
        dtype=options.pop("dtype", torch.float32),
        kernels=TorchKernels(),
        group=SINGLE,
        dispatcher_factory=lambda config: LocalDispatcher(SINGLE, config),
        **options,
    )


def logits(model: DeepSeekModel) -> torch.Tensor:
    return OfflineRunner(model, num_blocks=8).step({0: TOKENS}).logits[0]


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        out |= load_file(file)
    return out


def rewrite(path: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    """The checkpoint in one file again, with other tensors and config keys."""
    for file in [*path.glob("*.safetensors"), *path.glob("*.index.json")]:
        file.unlink()
    save_file({k: v.contiguous() for k, v in tensors.items()}, path / "model.safetensors")
    old = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(old | config))
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shards", [1, 3])
def test_plain_formats(dtype: torch.dtype, shards: int, tmp_path: Path) -> None:
    path = write(tmp_path / "c", dtype=dtype, num_shards=shards)
    got = logits(load(path))
    assert float((got - ReferenceModel(path).forward(TOKENS).logits).abs().max()) < 1e-4


@pytest.mark.parametrize("fp8", FP8_KINDS)
def test_fp8_equals_its_dequantised_twin(fp8: str, tmp_path: Path) -> None:
    """Scales apart from weights; 144 rows of kv_a (128 + 16) are ragged as the released 576."""
    path = write(tmp_path / "c", fp8=fp8, num_shards=4)
    stored = tensors_of(path)
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    assert stored[name].shape == (144, 256) and stored[name + "_scale_inv"].shape == (2, 2)
    index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    assert index[name] != index[name + "_scale_inv"]
    quantised = logits(load(path))
    reference = ReferenceModel(path).forward(TOKENS).logits
    assert float((quantised - reference).abs().max()) < 1e-4
    plain = {k: v for k, v in stored.items() if not k.endswith("_scale_inv")}
    for key in plain:
        if key + "_scale_inv" in stored:
            plain[key] = dequantise_weight(plain[key], stored[key + "_scale_inv"])
    twin = rewrite(path, plain, quantization_config=None)
    assert torch.equal(quantised, logits(load(twin)))


def test_scale_presence_decides_not_the_config(tmp_path: Path) -> None:
    path = write(tmp_path / "c", fp8="fp32")
    before = logits(load(path))
    assert torch.equal(
        before, logits(load(rewrite(path, tensors_of(path), quantization_config=None)))
    )


def test_any_shard_naming(tmp_path: Path) -> None:
    path = write(tmp_path / "c", num_shards=2)
    before = logits(load(path))
    index = path / "model.safetensors.index.json"
    text = index.read_text()
    for number, file in enumerate(sorted(path.glob("*.safetensors"))):
        new = f"part_{number}-of-61.safetensors"
        text = text.replace(file.name, new)
        file.rename(path / new)
    content = json.loads(text)
    content["metadata"]["total_size"] = 0  # third parties write anything here
    index.write_text(json.dumps(content))
    assert torch.equal(before, logits(load(path)))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 12])
@pytest.mark.parametrize("redundant", [0, 3, 8, 16])
def test_a_rank_reads_only_what_it_hosts(ranks: int, redundant: int, tmp_path: Path) -> None:
    path = write(tmp_path / "c", fp8="fp32", num_shards=3)
    config, stored = DeepSeekConfig.from_hf(path), tensors_of(path)
    placement = ExpertPlacement.trivial(2, 8, ranks, redundant)
    for rank in range(ranks):
        seen: list[tuple[int, int, float]] = []
        plan = preflight(path, config, placement, rank)
        weights = WeightLoader(
            plan, TorchKernels(), torch.float32, keep_kv_b=False,
            progress=lambda *now, seen=seen: seen.append(now),
        ).load()  # fmt: skip
        share = 0
        for name, tensor in stored.items():
            parts = name.split(".")
            if ".experts." in name:
                row = int(parts[2]) - 1
                if int(parts[5]) not in placement.experts_of(rank, row):
                    continue
            share += tensor.numel() * tensor.element_size()
        assert weights.bytes_read == plan.total_bytes <= 1.02 * share
        assert weights.bytes_read == share  # a copy of an expert costs nothing to read again
        assert seen[-1][:2] == (share, share) and seen[-1][2] > 0
        assert [s[0] for s in seen] == sorted(s[0] for s in seen)
        memory = plan.memory_bytes(4)
        assert memory["experts"] == weights.memory_bytes()["experts"]
        for moe in weights.moe_layers():
            assert moe.experts.num_slots == placement.num_local_experts
            for slot, expert in enumerate(placement.experts_of(rank, moe.row)):
                if expert == EMPTY:
                    continue
                p = f"model.layers.{moe.row + 1}.mlp.experts.{expert}."
                for got, n in zip(moe.experts.fetch(slot), ("gate", "up", "down"), strict=True):
                    raw = stored[f"{p}{n}_proj.weight"]
                    scale = stored[f"{p}{n}_proj.weight_scale_inv"]
                    assert torch.equal(got, dequantise_weight(raw, scale))


def test_a_placement_of_ones_own(tmp_path: Path) -> None:
    """Any order, copies on one rank, empty slots between: the logits do not change by a bit."""
    path = write(tmp_path / "c")
    table = [[7, 6, 5, 4, 3, 2, 1, 0, 3, 3], [0, 2, -1, 4, 6, 1, 3, -1, 5, 7]]
    placement = ExpertPlacement.from_physical_to_logical(table, num_ranks=1)
    assert torch.equal(logits(load(path)), logits(load(path, placement=placement)))
    with pytest.raises(ValueError, match="placement has 1 layers; this model needs 2"):
        load(path, placement=ExpertPlacement.trivial(1, 8, 1))
    with pytest.raises(ValueError, match="for 2 ranks"):
        load(path, placement=ExpertPlacement.trivial(2, 8, 2))


def test_mtp_skipped_on_purpose_is_told(tmp_path: Path) -> None:
    path = write(tmp_path / "c")
    whole, without = load(path), load(path, with_mtp=False)
    assert without.num_mtp_layers == 0 and without.cache_spec.num_layers == 2
    assert whole.cache_spec.num_layers == 3
    assert any("skipped on purpose" in note for note in without.weights.notes)
    assert without.weights.bytes_read < whole.weights.bytes_read
    assert torch.equal(logits(whole), logits(without))


def test_mtp_copies_share_storage_only_when_equal(tmp_path: Path) -> None:
    path = write(tmp_path / "c")
    model = load(path)
    assert model.weights.mtp[0].embed is model.weights.embed
    assert model.weights.mtp[0].head is model.weights.head
    tensors = tensors_of(path)
    tensors["model.layers.2.embed_tokens.weight"][3] *= 2
    model = load(rewrite(path, tensors))
    assert model.weights.mtp[0].embed is not model.weights.embed
    assert model.weights.mtp[0].head is model.weights.head
    assert any("differs from the main embedding" in note for note in model.weights.notes)


def test_tied_embeddings_are_honoured_or_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "c", config={"num_nextn_predict_layers": 0})
    tensors = tensors_of(path)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs"):
        load(rewrite(path, tensors, tie_word_embeddings=True))
    del tensors["lm_head.weight"]
    model = load(rewrite(path, tensors, tie_word_embeddings=True))
    reference = ReferenceModel(path).forward(TOKENS)
    assert float((logits(model) - reference.logits).abs().max()) < 1e-4
    assert any("tied" in note for note in model.weights.notes)
    with pytest.raises(CheckpointError, match=r"missing tensor lm_head\.weight"):
        load(rewrite(path, tensors, tie_word_embeddings=None))  # a missing key never ties


def test_the_text_model_of_a_wrapper(tmp_path: Path) -> None:
    path = write(tmp_path / "c", family="kimi", config={"n_group": 1})
    before = logits(load(path))
    tensors = {f"language_model.{k}": v for k, v in tensors_of(path).items()}
    tensors["vision_tower.patch_embed.weight"] = torch.zeros(4, 4)
    tensors["mm_projector.linear_1.weight"] = torch.zeros(4, 4)
    rewrite(path, tensors)
    inner = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({"model_type": "kimi_k25", "text_config": inner}))
    model = load(path)
    assert torch.equal(before, logits(model))
    assert any("ignored 2 tensors of vision_tower." in note for note in model.weights.notes)


def test_buffers_of_old_exports_are_ignored_by_name(tmp_path: Path) -> None:
    path = write(tmp_path / "c")
    tensors = tensors_of(path)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    assert any("inv_freq" in note for note in load(rewrite(path, tensors)).weights.notes)


def test_coarse_gate_biases_are_told(tmp_path: Path) -> None:
    path = write(tmp_path / "c")
    tensors = tensors_of(path)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    tensors[name] = tensors[name].bfloat16()
    notes = load(rewrite(path, tensors)).weights.notes
    assert any(f"{name} (BF16)" in note for note in notes)


def test_memory_by_kind(tmp_path: Path) -> None:
    path = write(tmp_path / "c")
    for dtype in (torch.float32, torch.bfloat16):
        model = load(path, dtype=dtype)
        config, memory = model.config, model.memory_bytes()
        planned = preflight(path, config, model.placement, 0).memory_bytes(dtype.itemsize)
        for kind in ("experts", "attention", "shared_expert", "dense_mlp", "norm", "gate", "embed"):
            assert memory[kind] == planned[kind], kind
        assert sum(memory.values()) <= sum(planned.values())
