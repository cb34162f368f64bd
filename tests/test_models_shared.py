"""The shared expert in slots and beside them: the same bits, and only the bytes that are hosted."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from w8a8_kernels import W8A8

from dispatch.local import LocalDispatcher
from ep.group import EPGroup
from ep.placement import EMPTY, ExpertPlacement, PlacementError
from models.deepseek.checkpoint import preflight
from models.deepseek.config import DeepSeekConfig
from models.deepseek.errors import CheckpointError
from models.deepseek.fp8 import Fp8Rows, dequantise_weight, quantise_weight
from models.deepseek.kernels.base import Kernels
from models.deepseek.kernels.errors import KernelsUnavailable
from models.deepseek.kernels.select import create_kernels
from models.deepseek.kernels.torch_kernels import TorchKernels
from models.deepseek.layout import SCALE_SUFFIX
from models.deepseek.load import load_model
from models.deepseek.loader import WeightLoader
from models.deepseek.model import DeepSeekModel
from models.deepseek.moe import with_shared
from models.deepseek.random_checkpoint import write_random_checkpoint
from models.deepseek.random_families import family_config
from models.deepseek.reference import ReferenceModel
from models.deepseek.shared import Region, cut, dequantise_piece, piece_region
from models.deepseek.weights import ModelWeights
from models.offline import OfflineRunner

SINGLE = EPGroup.single()
TOKENS = torch.randint(0, 512, (24,), generator=torch.Generator().manual_seed(0)).tolist()
SMALL: dict[str, Any] = {"num_hidden_layers": 2, "n_routed_experts": 8}
PARTS = ("gate_proj", "up_proj", "down_proj")


def write(path: Path, family: str, fp8: str | None, **config: Any) -> Path:
    if family in ("v3", "v2"):
        config = {"n_group": 2, "topk_group": 1} | config
    made = family_config(family, **(SMALL | config))
    return write_random_checkpoint(path, made, fp8=fp8, num_shards=2, tokenizer=False)


def kernels_named(name: str) -> Kernels:
    try:
        return create_kernels(name).kernels
    except KernelsUnavailable as error:
        pytest.skip(str(error).splitlines()[0])


def placement_of(config: DeepSeekConfig, hosted: bool, redundant: int = 0) -> ExpertPlacement:
    experts = config.n_routed_experts + (config.n_shared_experts if hosted else 0)
    return ExpertPlacement.trivial(config.num_placement_layers(), experts, 1, redundant)


def load(path: Path, placement: ExpertPlacement, kernels: Kernels, **options: Any) -> DeepSeekModel:
    return load_model(
        path,
        dtype=options.pop("dtype", torch.float32),
        kernels=kernels,
        group=SINGLE,
        dispatcher_factory=lambda config: LocalDispatcher(
            SINGLE, config, combine_pairs=kernels.combine_pairs
        ),
        placement=placement,
        **options,
    )


def load_rank(
    path: Path,
    placement: ExpertPlacement,
    rank: int,
    keep_fp8: bool = False,
    kernels: Kernels | None = None,
) -> ModelWeights:
    plan = preflight(path, DeepSeekConfig.from_hf(path), placement, rank)
    kernels = kernels or TorchKernels()
    return WeightLoader(plan, kernels, torch.float32, keep_kv_b=False, keep_fp8=keep_fp8).load()


def logits(model: DeepSeekModel) -> torch.Tensor:
    """Of two chunks with company, then of drafts where there is an MTP layer."""
    runner = OfflineRunner(model, num_blocks=16)
    first = runner.step({0: TOKENS[:17]})
    second = runner.step({1: TOKENS[:5], 0: TOKENS[17:]})
    out = [first.logits[0], second.logits[0]]
    if model.num_mtp_layers:
        hidden = torch.cat([first.hidden[0], second.hidden[0]])
        out.append(runner.draft({0: hidden}, {0: [*TOKENS[1:], 3]}).logits[0])
    return torch.cat(out)


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        out |= load_file(file)
    return out


def rewrite(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    for file in [*path.glob("*.safetensors"), *path.glob("*.index.json")]:
        file.unlink()
    save_file({k: v.contiguous() for k, v in tensors.items()}, path / "model.safetensors")
    return path


# -- the same bits -------------------------------------------------------------------------------


# 96: pieces of FP8 begin within a block; 72: within a panel of the native kernels, too.
CASES = [
    ("v3", "fp32", {}), ("v3", None, {}), ("v3", "e8m0", {"moe_intermediate_size": 72}),
    ("v2-lite", "fp32", {}), ("v2-lite", "fp32", {"moe_intermediate_size": 96}),
    ("v2", None, {"moe_intermediate_size": 72}), ("moonlight", "pow2", {"n_shared_experts": 3}),
]  # fmt: skip


@pytest.mark.parametrize("name", ["native", "torch"])
@pytest.mark.parametrize(("family", "fp8", "more"), CASES)
def test_hosted_or_replicated_changes_no_bit(
    family: str, fp8: str | None, more: dict[str, Any], name: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "c", family, fp8, **more)
    config, kernels = DeepSeekConfig.from_hf(path), kernels_named(name)
    reference = ReferenceModel(path).forward(TOKENS).logits
    for dtype in (torch.float32, torch.bfloat16):
        plain = logits(load(path, placement_of(config, False), kernels, dtype=dtype))
        if dtype == torch.float32:
            assert float((plain[: len(TOKENS)] - reference).abs().max()) < 1e-4
        for weights, redundant in (("fp8", 0), ("dequantised", 3)):
            placement = placement_of(config, True, redundant)
            hosted = load(path, placement, kernels, dtype=dtype, weights=weights)
            assert not any(moe.shared for moe in hosted.weights.moe_layers())
            assert torch.equal(logits(hosted), plain), (dtype, weights)


def test_shared_picks_come_last_with_weight_one() -> None:
    ids, scores = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32), torch.rand(2, 2)
    wide, weights = with_shared(ids, scores, 4, 6)
    assert wide.tolist() == [[3, 1, 4, 5], [0, 2, 4, 5]] and wide.dtype == torch.int32
    assert torch.equal(weights, torch.cat((scores, torch.ones(2, 2)), 1))
    assert with_shared(ids, scores, 4, 4)[0] is ids
    empty, none = with_shared(ids[:0], scores[:0], 4, 5)
    assert empty.shape == none.shape == (0, 3)


# -- pieces ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [(0, 256), (128, 300), (72, 144), (200, 201)])
@pytest.mark.parametrize("columns", [(0, 384), (128, 256), (96, 192), (383, 384)])
def test_a_piece_dequantises_as_the_whole_does(
    rows: tuple[int, int], columns: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    values, scale = quantise_weight(torch.randn(300, 384))
    whole, region = dequantise_weight(values, scale, torch.bfloat16), Region(rows, columns)
    got = dequantise_piece(region.of(values), region.blocks().of(scale), region, torch.bfloat16)
    assert torch.equal(got, region.of(whole)) and got.numel() == region.size
    if columns[0] % 128 == 0:
        piece = cut(Fp8Rows.of(values, scale), region)
        assert isinstance(piece, Fp8Rows)
        assert torch.equal(piece.dequantise(torch.bfloat16), region.of(whole))


@pytest.mark.parametrize(("family", "fp8", "width"), [
    ("v3", "fp32", 128), ("v2-lite", "fp32", 128), ("v2-lite", "e8m0", 96), ("v2-lite", None, 72),
])  # fmt: skip
@pytest.mark.parametrize(("ranks", "redundant"), [(1, 0), (3, 0), (4, 5), (12, 2)])
def test_a_rank_reads_only_the_pieces_that_it_hosts(
    family: str, fp8: str | None, width: int, ranks: int, redundant: int, tmp_path: Path
) -> None:
    path = write(tmp_path / "c", family, fp8, moe_intermediate_size=width)
    config, stored = DeepSeekConfig.from_hf(path), tensors_of(path)
    rows, experts = config.num_placement_layers(), 8 + config.n_shared_experts
    placement = ExpertPlacement.trivial(rows, experts, ranks, redundant)
    without = 0
    for rank in range(ranks):
        plan = preflight(path, config, placement, rank)
        weights = load_rank(path, placement, rank)
        share = 0
        for name, tensor in stored.items():
            parts = name.split(".")
            if ".experts." in name:
                times = int(parts[5]) in placement.experts_of(rank, int(parts[2]) - 1)
                share += tensor.nbytes * times
            elif ".shared_experts." not in name:
                share += tensor.nbytes
        shared = 0
        for moe in weights.moe_layers():
            hosted = placement.experts_of(rank, moe.row)
            assert moe.shared == () and moe.experts.num_slots == placement.num_local_experts
            pieces = {expert - 8 for expert in hosted if expert >= 8}
            for j in pieces:
                p = f"model.layers.{moe.row + 1}.mlp.shared_experts."
                names = [f"{p}{n}.weight" for n in PARTS]
                regions = [piece_region(config, name, j) for name in names]
                for name, region in zip(names, regions, strict=True):
                    shared += region.of(stored[name]).nbytes
                    if name + "_scale_inv" in stored:
                        shared += region.blocks().of(stored[name + "_scale_inv"]).nbytes
                slot = hosted.index(8 + j)
                for got, name, region in zip(moe.experts.fetch(slot), names, regions, strict=True):
                    whole = stored[name]
                    if name + "_scale_inv" in stored:
                        whole = dequantise_weight(whole, stored[name + "_scale_inv"])
                    assert torch.equal(got, region.of(whole).float())
        without += shared == 0
        assert weights.bytes_read == plan.total_bytes == share + shared
        assert plan.read_bytes.get("shared_expert", 0) == shared
        memory = weights.memory_bytes()
        assert "shared_expert" not in memory and "shared_expert" not in plan.elements
        assert plan.memory_bytes(4)["experts"] == memory["experts"]
    assert (without > 0) == (ranks > 2)


def test_beside_the_slots_it_is_counted_as_before(tmp_path: Path) -> None:
    path = write(tmp_path / "c", "v2-lite", None)
    placement = placement_of(DeepSeekConfig.from_hf(path), False)
    plan = preflight(path, DeepSeekConfig.from_hf(path), placement, 0)
    stored = sum(t.nbytes for n, t in tensors_of(path).items() if ".shared_experts." in n)
    assert plan.read_bytes["shared_expert"] == stored
    weights = load_rank(path, placement, 0)
    assert weights.bytes_read == plan.total_bytes
    assert weights.memory_bytes()["shared_expert"] == plan.memory_bytes(4)["shared_expert"]


def test_nan_in_a_piece_is_found_by_the_rank_that_hosts_it(tmp_path: Path) -> None:
    path = write(tmp_path / "c", "v2-lite", None)
    tensors = tensors_of(path)
    name = "model.layers.1.mlp.shared_experts.down_proj.weight"
    tensors[name][5, 200] = math.nan  # of piece 1
    rewrite(path, tensors)
    placement = ExpertPlacement.trivial(1, 10, 5)
    with pytest.raises(CheckpointError, match=f"tensor {name} holds NaN"):
        load_rank(path, placement, 4)  # hosts both pieces
    load_rank(path, placement, 3)
    assert placement.experts_of(4, 0) == [8, 9]


# -- slots are alike on all ranks ----------------------------------------------------------------


def test_slots_of_a_layer_are_alike_on_all_ranks(tmp_path: Path) -> None:
    """Decided from all experts of the layer, wherever they live, and told where some are FP8."""
    path = write(tmp_path / "c", "v3", "fp32", num_nextn_predict_layers=0, num_hidden_layers=3)
    placement = ExpertPlacement.from_physical_to_logical(
        [[*range(9), EMPTY, EMPTY, EMPTY]] * 2, num_ranks=4, num_experts=9
    )
    ranks = [load_rank(path, placement, rank, keep_fp8=True) for rank in range(4)]
    layouts = [[moe.bundle_layout for moe in weights.moe_layers()] for weights in ranks]
    assert layouts == [layouts[0]] * 4 and "e4m3" in layouts[0][0]
    sizes = {moe.experts.bundle(0).nbytes for weights in ranks for moe in weights.moe_layers()}
    assert len(sizes) == 1
    # One expert of layer 1, on rank 2, is not FP8 (and then the shared one): plain everywhere.
    for odd in ("experts.7", "shared_experts"):
        tensors = tensors_of(path)
        name = f"model.layers.1.mlp.{odd}.up_proj.weight"
        tensors[name] = dequantise_weight(tensors[name], tensors.pop(name + "_scale_inv"))
        mixed = tmp_path / odd
        mixed.mkdir()
        (mixed / "config.json").write_text((path / "config.json").read_text())
        rewrite(mixed, tensors)
        ranks = [load_rank(mixed, placement, rank, keep_fp8=True) for rank in range(4)]
        layouts = [[moe.bundle_layout for moe in weights.moe_layers()] for weights in ranks]
        assert layouts == [layouts[0]] * 4
        assert "e4m3" not in layouts[0][0] and "e4m3" in layouts[0][1]
        for weights in ranks:
            assert any("experts of 1 layers are dequantised" in note for note in weights.notes)


@pytest.mark.parametrize(
    ("name", "fp8"),
    [("native", "fp32"), ("native", None), ("torch", "fp32"), ("torch", None), ("gpu", "fp32")],
)
def test_empty_slots_can_be_filled_later(name: str, fp8: str | None, tmp_path: Path) -> None:
    """By bundles as they are: the model then says what one loaded with that placement says. gpu:
    slots as they lie there, stacked matrix by matrix."""
    path = write(tmp_path / "c", "v2-lite", fp8)
    kernels = W8A8() if name == "gpu" else kernels_named(name)
    before = ExpertPlacement.from_physical_to_logical([[*range(10), EMPTY, EMPTY]], 1, 10)
    after = ExpertPlacement.from_physical_to_logical(
        [[9, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 8]], 1, 10, generation=1
    )
    model = load(path, before, kernels, weights="fp8")
    expected = logits(model)
    (experts,) = model.expert_weights()
    assert not bool(experts.bundle(11).cut().any())
    assert (len(experts.bundle(11).parts) > 1) is (name == "gpu")
    for target, source in ((10, 0), (11, 8), (0, 9)):
        experts.bundle(target).copy_from(experts.bundle(source).cut())
    model.adopt_placement(after)
    assert torch.equal(logits(model), expected)
    experts.bundle(10).copy_from(torch.zeros_like(experts.bundle(10).cut()))  # this must show
    assert not torch.equal(logits(model), expected)


def respoil(path: Path, *names: str) -> None:
    """Scales of these weights, powers of two, become others."""
    for file in path.glob("*.safetensors"):
        held = load_file(file)
        hit = [f"{name}.weight_scale_inv" for name in names]
        for name in [name for name in hit if name in held]:
            held[name] = held[name].float() * 1.25
        save_file(held, file)


def test_where_scales_are_powers_of_two_slots_say_so(tmp_path: Path) -> None:
    """Rows are then scaled so as well: among ranks that do not all, no expert may move. A rank of
    empty slots says what the others say."""
    layouts: dict[str, set[str]] = {}
    for scales in ("fp32", "pow2", "e8m0"):
        path = write(tmp_path / scales, "v3", scales, num_nextn_predict_layers=0)
        placement = ExpertPlacement.from_physical_to_logical([[*range(8), *[EMPTY] * 8]], 2, 8)
        for rank in (0, 1):
            (moe,) = load_rank(path, placement, rank, keep_fp8=True, kernels=W8A8()).moe_layers()
            layouts.setdefault(scales, set()).add(moe.bundle_layout)
            assert moe.experts.ue8m0 is (scales != "fp32")  # type: ignore[attr-defined]
    (plain,), (of_pow2,), (of_e8m0,) = layouts.values()
    assert of_pow2 == of_e8m0 == plain + ", scales are powers of two"


def test_a_look_at_scales_is_not_counted_and_ends_early(tmp_path: Path) -> None:
    for scales, most in (("fp32", 2), ("pow2", 99), ("e8m0", 0)):
        path = write(tmp_path / scales, "v3", scales, num_nextn_predict_layers=0)
        config = DeepSeekConfig.from_hf(path)
        plan = preflight(path, config, placement_of(config, True), 0)
        read = WeightLoader(plan, W8A8(), torch.bfloat16, keep_kv_b=False, keep_fp8=True).read
        names = [name for name, item in plan.expected.items() if item.kind == "experts"]
        looks: list[str] = []
        peek = plan.index.peek

        def counted(wanted: Any, peek: Any = peek, looks: list[str] = looks) -> Any:
            for tensor in peek(wanted):
                looks.append(str(tensor.shape))
                yield tensor

        plan.index.peek = counted  # type: ignore[method-assign]
        assert read.scales_are_powers(names) is (scales != "fp32")
        assert len(looks) <= most and (most < 99 or len(looks) == len(names))
        assert plan.index.bytes_read == 0
        seen = [tensor for name in names for tensor in peek([name + SCALE_SUFFIX])]
        assert all(
            torch.equal(t, plan.index.read(n + SCALE_SUFFIX))
            for t, n in zip(seen, names, strict=True)
        )


@pytest.mark.parametrize("spoiled", ["experts.5.up_proj", "shared_experts.down_proj"])
def test_an_experts_bits_depend_on_no_company(spoiled: str, tmp_path: Path) -> None:
    """One expert has scales that are no powers of two: alone on its rank, beside others, the shared
    one in slots or not, every expert gives the same bits."""
    path = write(tmp_path / "c", "v3", "pow2", num_nextn_predict_layers=0)
    layer = f"model.layers.{DeepSeekConfig.from_hf(path).first_k_dense_replace}.mlp."
    respoil(path, layer + spoiled)
    kernels = W8A8()
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(2)).bfloat16()
    given: dict[int, list[torch.Tensor]] = {}
    for experts, ranks in ((8, 1), (8, 2), (8, 4), (9, 1), (9, 3)):
        placement = ExpertPlacement.trivial(1, experts, ranks)
        for rank in range(ranks):
            weights = load_rank(path, placement, rank, keep_fp8=True, kernels=kernels)
            (moe,) = weights.moe_layers()
            x = x[:, : moe.gate.shape[1]]
            for slot, expert in enumerate(placement.experts_of(rank, 0)):
                bounds = [0] * (slot + 1) + [4] * (moe.experts.num_slots - slot)
                out = kernels.experts(
                    x, torch.arange(4), torch.tensor(bounds, dtype=torch.int32), moe.experts
                )
                given.setdefault(int(expert), []).append(out)
            for piece in moe.shared:
                given.setdefault(8, []).append(kernels.mlp(x, piece.gate_up, piece.down))
    assert sorted(given) == list(range(9))
    for results in given.values():
        assert len(results) >= 5 and all(torch.equal(results[0], other) for other in results)


def test_a_rank_of_empty_slots_takes_fp8(tmp_path: Path) -> None:
    path = write(tmp_path / "c", "v3", "fp32", num_nextn_predict_layers=0)
    placement = ExpertPlacement.from_physical_to_logical([[*range(9), *[EMPTY] * 9]], 2, 9)
    full, empty = (load_rank(path, placement, rank, keep_fp8=True) for rank in (0, 1))
    (source,), (target,) = full.moe_layers(), empty.moe_layers()
    assert source.bundle_layout == target.bundle_layout
    target.experts.bundle(4).copy_from(source.experts.bundle(8).cut())
    for got, wanted in zip(target.experts.fetch(4), source.experts.fetch(8), strict=True):
        assert torch.equal(got, wanted)


# -- refused ---------------------------------------------------------------------------------------


def test_placements_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "c", "v2-lite", None)
    config = DeepSeekConfig.from_hf(path)
    with pytest.raises(PlacementError, match="9 logical experts; this model has 8, or 10 with the"):
        preflight(path, config, ExpertPlacement.trivial(1, 9, 1), 0)
    model = load(path, placement_of(config, True), TorchKernels())
    with pytest.raises(PlacementError, match="has 8 logical experts, this model 10"):
        model.adopt_placement(placement_of(config, False))
    bare = write(tmp_path / "bare", "v2-lite", None, n_shared_experts=0)
    with pytest.raises(PlacementError, match="9 logical experts; this model has 8$"):
        preflight(bare, DeepSeekConfig.from_hf(bare), ExpertPlacement.trivial(1, 9, 1), 0)
