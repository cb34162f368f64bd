"""Weights kept in FP8: bit for bit what dequantising them beforehand gives, in half the memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_cases import DTYPES, VARIANTS, normal
from kernel_cases import kernels as kernels
from safetensors.torch import load_file, save_file

from dispatch.local import LocalDispatcher
from ep.group import EPGroup
from models.deepseek.errors import CheckpointError
from models.deepseek.fp8 import Fp8Rows, dequantise_weight, quantise_weight
from models.deepseek.kernels.base import Kernels
from models.deepseek.kernels.errors import KernelArgumentError
from models.deepseek.kernels.native_kernels import NativeKernels
from models.deepseek.kernels.torch_kernels import TorchKernels
from models.deepseek.load import load_model
from models.deepseek.model import DeepSeekModel
from models.deepseek.random_checkpoint import FP8_KINDS, write_random_checkpoint
from models.deepseek.random_families import family_config
from models.offline import OfflineRunner

SINGLE = EPGroup.single()
TINY = Path(__file__).parent.parent / "checkpoints" / "tiny"
ROWS = (1, 2, 4, 5, 7, 10, 11, 13, 24, 27, 250)  # of each way to cut rows into tiles


def quantised(rows: int, columns: int, kind: str = "fp32") -> Fp8Rows:
    """Every code but NaN occurs; scales of one block differ from the next by much."""
    codes = torch.randint(0, 256, (rows, columns)).to(torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x80  # -0 instead of NaN
    grid = (-(-rows // 128), -(-columns // 128))
    scale = torch.exp2(torch.randint(-14, -5, grid).float())
    if kind == "fp32":
        scale *= 1 + torch.rand(grid)
    if kind == "e8m0":
        scale = scale.to(torch.float8_e8m0fnu)
    return Fp8Rows.of(codes.view(torch.float8_e4m3fn), scale)


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Bits, so that -0 is not 0."""
    kind = torch.int16 if want.dtype == torch.bfloat16 else torch.int32
    return torch.equal(got.view(kind), want.view(kind))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", FP8_KINDS)
def test_linear(kernels: Kernels, kind: str, dtype: torch.dtype) -> None:
    """576 rows have 5 rows of scales; the other shapes end amid a panel, a block, a pair."""
    for n, k in ((576, 256), (96, 384), (130, 1100), (48, 257), (16, 7)):
        rows = quantised(n, k, kind)
        plain = rows.dequantise(dtype)
        kept = kernels.fp8_linear_weight(rows, dtype)
        assert kept is not None and same(kept.unpack(), plain)
        weight = kernels.linear_weight(plain, dtype)
        for num_rows in ROWS[:4] if isinstance(kernels, TorchKernels) else ROWS:
            x = normal(num_rows, k, dtype=dtype)
            want = kernels.linear(x, weight)
            assert same(kernels.linear(x, kept), want), (n, k, num_rows)
        assert same(
            kernels.linear(x, kept, torch.float32), kernels.linear(x, weight, torch.float32)
        )


@pytest.mark.parametrize("scale", [0.0, 2.0**-120, 2.0**-135, 2.0**100, 1.7e-38, 3.3e35])
def test_extreme_scales(kernels: Kernels, scale: float) -> None:
    """Products that round to subnormals, to zero, or close below infinity."""
    codes = torch.arange(256, dtype=torch.uint8).view(1, 256).repeat(20, 1)
    codes[(codes & 0x7F) == 0x7F] = 0
    for dtype in DTYPES:
        rows = Fp8Rows.of(codes.view(torch.float8_e4m3fn), torch.full((1, 2), scale))
        kept = kernels.fp8_linear_weight(rows, dtype)
        assert kept is not None and same(kept.unpack(), rows.dequantise(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inter", [128, 96, 40])
def test_mlp_with_either_half_kept(kernels: Kernels, inter: int, dtype: torch.dtype) -> None:
    """gate and up joined: columns are cut out of shared panels unless 64 divides them."""
    hidden = 200
    gate_up, down = quantised(2 * inter, hidden), quantised(hidden, inter)
    plain = [kernels.linear_weight(w.dequantise(dtype), dtype) for w in (gate_up, down)]
    kept = [kernels.fp8_linear_weight(w, dtype) for w in (gate_up, down)]
    for rows in (1, 9, 30):
        x = normal(rows, hidden, dtype=dtype)
        want = kernels.mlp(x, plain[0], plain[1])
        for first, second in ((kept[0], kept[1]), (kept[0], plain[1]), (plain[0], kept[1])):
            assert first is not None and second is not None
            assert same(kernels.mlp(x, first, second), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden, inter", [(256, 192), (130, 70)])
def test_experts_and_their_bundles(
    kernels: Kernels, hidden: int, inter: int, dtype: torch.dtype
) -> None:
    slots = 4
    plain = kernels.allocate_experts(slots, hidden, inter, dtype)
    kept = kernels.allocate_fp8_experts(slots, hidden, inter, dtype)
    for slot in range(slots):
        parts = [quantised(inter, hidden), quantised(inter, hidden), quantised(hidden, inter)]
        plain.store(slot, *(p.dequantise(dtype) for p in parts))
        kept.store_fp8(slot, *parts)
        for got, part in zip(kept.fetch(slot), parts, strict=True):
            assert same(got, part.dequantise(dtype))
    counts = torch.tensor([1, 0, 5, 30])
    offsets = torch.cat((torch.zeros(1), counts.cumsum(0))).int()
    x = normal(40, hidden, dtype=dtype)
    pair_rows = torch.randint(0, 40, (int(counts.sum()),)).int()
    want = kernels.experts(x, pair_rows, offsets, plain)
    assert same(kernels.experts(x, pair_rows, offsets, kept), want)
    # An expert moves as one bundle, its scales in it.
    moved = kernels.allocate_fp8_experts(slots, hidden, inter, dtype)
    for slot in range(slots):
        assert kept.bundle(slot).cut().is_contiguous()
        moved.bundle(slot).copy_from(kept.bundle(slot).cut())
    assert same(kernels.experts(x, pair_rows, offsets, moved), want)
    assert kept.nbytes == slots * kept.bundle(0).nbytes
    if inter == 192:
        assert kept.nbytes < plain.nbytes * (0.53 if dtype == torch.bfloat16 else 0.27)
    with pytest.raises(KernelArgumentError, match="store_fp8"):
        kept.store(0, *plain.fetch(0))
    shifted = Fp8Rows.of(parts[0].values, torch.rand(-(-inter // 128), -(-hidden // 128)))
    if inter > 128:
        shifted = shifted.move(lambda rows: rows.roll(3, 0))
        with pytest.raises(KernelArgumentError, match="scales differ"):
            kept.store_fp8(0, shifted, *parts[1:])


def test_bundles_are_the_same_on_every_instruction_set() -> None:
    parts = [quantised(70, 130), quantised(70, 130), quantised(130, 70)]
    bundles = []
    for defines in VARIANTS.values():
        experts = NativeKernels(defines).allocate_fp8_experts(1, 130, 70, torch.bfloat16)
        experts.store_fp8(0, *parts)
        bundles.append(experts.bundle(0).cut())
    assert all(torch.equal(bundle, bundles[0]) for bundle in bundles)


def test_what_native_kernels_cannot_hold() -> None:
    native = NativeKernels()
    uneven = Fp8Rows.join((quantised(40, 64), quantised(100, 64)))
    assert native.fp8_linear_weight(uneven, torch.bfloat16) is None
    even = Fp8Rows.join((quantised(192, 64), quantised(100, 64)))
    kept = native.fp8_linear_weight(even, torch.bfloat16)
    assert kept is not None and same(kept.unpack(), even.dequantise(torch.bfloat16))
    weight = native.fp8_linear_weight(quantised(64, 32), torch.bfloat16)
    assert weight is not None
    with pytest.raises(KernelArgumentError, match="weight is"):
        native.per_head(normal(2, 4, 32, dtype=torch.bfloat16), weight, 4)
    torch_kept = TorchKernels().fp8_linear_weight(uneven, torch.bfloat16)
    assert same(torch_kept.unpack(), uneven.dequantise(torch.bfloat16))


def test_rows_of_fp8() -> None:
    weight, scale = quantise_weight(torch.randn(150, 200))
    rows = Fp8Rows.of(weight, scale)
    for dtype in DTYPES:
        assert same(rows.dequantise(dtype), dequantise_weight(weight, scale, dtype))
    order = torch.randperm(150)
    moved = rows.move(lambda x: x[order])
    assert same(moved.dequantise(torch.float32), rows.dequantise(torch.float32)[order])
    assert moved.scales_of_groups(64) is None
    found = rows.scales_of_groups(128)
    assert found is not None and torch.equal(found, scale)
    assert rows.is_finite(torch.bfloat16)
    nan = weight.view(torch.uint8).clone()
    nan[3, 5] = 0xFF
    assert not Fp8Rows.of(nan.view(torch.float8_e4m3fn), scale).is_finite(torch.bfloat16)
    assert not Fp8Rows.of(weight, torch.full_like(scale, 3e38)).is_finite(torch.bfloat16)
    few = torch.full((150, 200), 1.0).to(torch.float8_e4m3fn)
    assert Fp8Rows.of(few, torch.full_like(scale, 1e38)).is_finite(torch.float32)
    assert not Fp8Rows.of(weight, torch.full_like(scale, torch.nan)).is_finite(torch.float32)


# -- whole models ---------------------------------------------------------------------------


def load(path: Path, weights: str, kernels: Kernels, **options: Any) -> DeepSeekModel:
    return load_model(
        path,
        dtype=options.pop("dtype", torch.bfloat16),
        weights=weights,
        kernels=kernels,
        group=SINGLE,
        dispatcher_factory=lambda config: LocalDispatcher(SINGLE, config),
        **options,
    )


def logits(model: DeepSeekModel) -> torch.Tensor:
    tokens = torch.randint(0, 500, (20,), generator=torch.Generator().manual_seed(0)).tolist()
    runner = OfflineRunner(model, num_blocks=8)
    first = runner.step({0: tokens}).logits[0]
    return torch.cat((first.flatten(), runner.step({0: [7]}).logits[0].flatten()))


@pytest.fixture(params=["torch", "native"])
def either(request: pytest.FixtureRequest) -> Kernels:
    return TorchKernels() if request.param == "torch" else NativeKernels()


@pytest.mark.parametrize("kind", FP8_KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_whole_model(kind: str, dtype: torch.dtype, either: Kernels, tmp_path: Path) -> None:
    config = family_config("v3", num_hidden_layers=2, n_routed_experts=8, n_group=2, topk_group=1)
    path = write_random_checkpoint(tmp_path, config, fp8=kind, num_shards=2, tokenizer=False)
    kept, plain = (load(path, w, either, dtype=dtype) for w in ("fp8", "dequantised"))
    assert torch.equal(logits(kept), logits(plain))
    held, before = kept.memory_bytes(), plain.memory_bytes()
    for kind_of in ("experts", "dense_mlp"):
        assert held[kind_of] < before[kind_of] * (0.55 if dtype == torch.bfloat16 else 0.28)
    assert held["attention"] < before["attention"]  # kv_b, taken apart, is as it was
    assert all(held[k] == before[k] for k in ("embed", "head", "norm", "gate"))
    assert kept.weights.keeps_fp8 and not plain.weights.keeps_fp8
    assert "weights: FP8 blocks kept in memory (asked for)" in kept.weights.notes
    assert "weights: FP8 blocks dequantised at load (asked for)" in plain.weights.notes


def test_half_split_rope_moves_rows_and_scales_alike(either: Kernels, tmp_path: Path) -> None:
    config = family_config("v3", num_hidden_layers=2, n_routed_experts=8, n_group=2, topk_group=1)
    config["rope_interleave"] = False
    path = write_random_checkpoint(tmp_path, config, fp8="fp32", tokenizer=False)
    kept, plain = (logits(load(path, w, either)) for w in ("fp8", "dequantised"))
    assert torch.equal(kept, plain)


def test_the_bundled_model(either: Kernels) -> None:
    kept, plain = (load(TINY, w, either) for w in ("fp8", "dequantised"))
    assert torch.equal(logits(kept), logits(plain))
    assert kept.memory_bytes()["experts"] < 0.51 * plain.memory_bytes()["experts"]


def test_choice(tmp_path: Path) -> None:
    config = family_config("v3", num_hidden_layers=2, n_routed_experts=8, n_group=2, topk_group=1)
    path = write_random_checkpoint(tmp_path / "fp8", config, fp8="fp32", tokenizer=False)
    slow, native = TorchKernels(), NativeKernels()
    assert "weights: FP8 blocks dequantised at load (auto: these kernels are slower with them)" in (
        load(path, "auto", slow).weights.notes
    )
    word = "kept in memory" if native.fp8_is_fast else "dequantised at load"
    assert any(word in note for note in load(path, "auto", native).weights.notes)
    with pytest.raises(ValueError, match="weights='int4': valid are auto, fp8, dequantised"):
        load(path, "int4", slow)
    plain = write_random_checkpoint(tmp_path / "plain", config, tokenizer=False)
    assert not any("FP8" in note for note in load(plain, "fp8", slow).weights.notes)


@pytest.mark.parametrize("part", ["mlp.experts.1.up_proj", "self_attn.o_proj"])
def test_a_nan_is_found_in_what_is_kept(part: str, tmp_path: Path) -> None:
    config = family_config("v3", num_hidden_layers=2, n_routed_experts=8, n_group=2, topk_group=1)
    path = write_random_checkpoint(tmp_path, config, fp8="fp32", num_shards=1, tokenizer=False)
    (file,) = path.glob("*.safetensors")
    tensors = load_file(file)
    name = f"model.layers.1.{part}.weight"
    tensors[name].view(torch.uint8)[1, 2] = 0x7F
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=f"tensor {name} holds NaN"):
        load(path, "fp8", TorchKernels())


def test_experts_of_mixed_formats_are_dequantised(tmp_path: Path) -> None:
    """Whether a scale is there decides, tensor by tensor."""
    config = family_config("v3", num_hidden_layers=2, n_routed_experts=8, n_group=2, topk_group=1)
    path = write_random_checkpoint(tmp_path, config, fp8="fp32", num_shards=1, tokenizer=False)
    before = logits(load(path, "dequantised", TorchKernels()))
    (file,) = path.glob("*.safetensors")
    tensors = load_file(file)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    scale = tensors.pop(name + "_scale_inv")
    tensors[name] = dequantise_weight(tensors[name], scale, torch.bfloat16)
    save_file(tensors, file)
    assert torch.equal(logits(load(path, "fp8", TorchKernels())), before)
