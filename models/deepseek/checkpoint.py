"""Preflight: does a checkpoint hold exactly what its config promises, and what will a rank read?

Knows: names, shapes, dtypes, scales, which experts a rank hosts. Looks at headers only and raises
one CheckpointError with every fault, the same one on each rank, before any payload is read.
Knows nothing of kernels or of how weights lie in memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from ep.placement import ExpertPlacement, PlacementError
from models.deepseek.config import DeepSeekConfig
from models.deepseek.errors import CheckpointError
from models.deepseek.fp8 import scale_shape
from models.deepseek.layout import SCALE_SUFFIX, Expected, expected_tensors, head_name, mtp_layers
from models.deepseek.safetensors_index import (
    DTYPES,
    INDEX_NAME,
    SafetensorsIndex,
    StoredTensor,
)
from models.deepseek.shared import piece_region

_FLOATS = ("BF16", "F16", "F32")
_SCALES = ("F32", "F16", "BF16", "F8_E8M0")
# Buffers that old exports stored though the config implies them.
_IGNORABLE = (".rotary_emb.inv_freq",)


@dataclass(frozen=True)
class LoadPlan:
    """What one rank will read. Bytes are payload bytes of the checkpoint.

    hosted: tensors of which this rank reads all or a part, by name (scales included); read_bytes by
    kind; total_bytes their sum; elements: parameters by kind, every slot for an expert counted, the
    empty ones too (none is read for them, but there is room for one), and those of the shared
    expert where it is hosted; notes: what is left out on purpose, to be printed once.
    """

    index: SafetensorsIndex
    config: DeepSeekConfig
    placement: ExpertPlacement
    rank: int
    with_mtp: bool
    expected: dict[str, Expected]
    hosted: frozenset[str]
    read_bytes: dict[str, int]
    elements: dict[str, int]
    notes: tuple[str, ...]

    @property
    def shared_in_slots(self) -> bool:
        """Whether the shared expert's pieces are logical experts E .. E + n - 1 (shared.py)."""
        return self.placement.num_logical_experts > self.config.n_routed_experts

    @property
    def picks_per_token(self) -> int:
        """Experts that compute a token, those of the shared expert in slots included."""
        shared = self.placement.num_logical_experts - self.config.n_routed_experts
        return self.config.num_experts_per_tok + shared

    @property
    def total_bytes(self) -> int:
        return sum(self.read_bytes.values())

    @property
    def has_fp8(self) -> bool:
        """Whether any tensor, of whichever rank, is stored as FP8 blocks."""
        return any(self.index.tensors[name].dtype == "F8_E4M3" for name in self.expected)

    def memory_bytes(self, itemsize: int) -> dict[str, int]:
        """Bytes in memory by kind when weights are held with this item size, FP8 dequantised.

        Gates and norms are fp32. A bound: MTP's copies of embedding and head are counted, though
        they share the main model's storage when they are equal.
        """
        fp32 = ("gate", "norm")
        return {k: n * (4 if k in fp32 else itemsize) for k, n in self.elements.items()}


def preflight(
    directory: str | Path,
    config: DeepSeekConfig,
    placement: ExpertPlacement,
    rank: int,
    *,
    with_mtp: bool = True,
) -> LoadPlan:
    """Check all headers; raises CheckpointError, or PlacementError if the placement does not fit.

    placement: rows are the MoE layers, then the MTP layers if they are loaded.
    """
    _check_placement(config, placement, rank, with_mtp)
    index = SafetensorsIndex.open(directory)
    problems = list(index.problems)
    if not index.tensors:
        raise CheckpointError(str(directory), problems)
    everything = expected_tensors(config)
    skipped = set() if with_mtp else set(mtp_layers(config))
    if with_mtp:
        _check_mtp_present(config, index, everything, problems)
    expected = {n: e for n, e in everything.items() if e.layer not in skipped}
    for item in expected.values():
        _check_tensor(item, index, problems)
    notes = _check_leftovers(config, index, everything, skipped, problems)
    if problems:
        raise CheckpointError(str(directory), problems)
    hosted, read_bytes, elements = _hosted(config, index, expected, placement, rank)
    return LoadPlan(
        index, config, placement, rank, with_mtp, expected, hosted, read_bytes, elements, notes
    )


def _check_placement(
    config: DeepSeekConfig, placement: ExpertPlacement, rank: int, with_mtp: bool
) -> None:
    rows = config.num_placement_layers(with_mtp)
    if placement.num_layers != rows:
        raise PlacementError(
            f"placement has {placement.num_layers} layers; this model needs {rows} "
            f"({config.num_moe_layers} MoE layers"
            + (f" + {config.num_mtp_layers} MTP layers)" if with_mtp else ", MTP not loaded)")
        )
    routed, shared = config.n_routed_experts, config.n_shared_experts
    if placement.num_logical_experts not in (routed, routed + shared):
        hosted = f", or {routed + shared} with the shared expert in slots" if shared else ""
        raise PlacementError(
            f"placement has {placement.num_logical_experts} logical experts; "
            f"this model has {routed}{hosted}"
        )
    if not 0 <= rank < placement.num_ranks:
        raise PlacementError(f"rank {rank}: valid are 0..{placement.num_ranks - 1}")


def _check_mtp_present(
    config: DeepSeekConfig,
    index: SafetensorsIndex,
    expected: dict[str, Expected],
    problems: list[str],
) -> None:
    """A wholly absent MTP layer is one problem, not a thousand."""
    for layer in mtp_layers(config):
        names = [n for n, e in expected.items() if e.layer == layer]
        if not any(n in index.tensors or n in index.lost for n in names):
            problems.append(
                f"MTP layer model.layers.{layer} is absent, but the config has "
                f"num_nextn_predict_layers={config.num_mtp_layers} (load without MTP to serve it: "
                "--no-mtp)"
            )
            for name in names:
                del expected[name]


def _check_tensor(item: Expected, index: SafetensorsIndex, problems: list[str]) -> None:
    stored = index.tensors.get(item.name)
    scale = index.tensors.get(item.name + SCALE_SUFFIX)
    if item.name in index.lost or item.name + SCALE_SUFFIX in index.lost:
        return
    if stored is None:
        packed = [s for s in ("_packed", "_shape", "_scale") if item.name + s in index.tensors]
        hint = f" (there is {item.name}{packed[0]}: a quantisation not built)" if packed else ""
        problems.append(f"missing tensor {item.name}{hint}")
        if scale is not None:
            problems.append(f"scale without weight: {scale.name}")
        return
    where = f"tensor {item.name} in {stored.file}"
    if stored.shape != item.shape:
        problems.append(f"{where}: shape {list(stored.shape)}, expected {list(item.shape)}")
        return
    if stored.dtype == "F8_E4M3" and item.matrix:
        if scale is None:
            problems.append(f"missing scale {item.name}{SCALE_SUFFIX} for FP8 {where}")
        else:
            _check_scale(item, scale, problems)
        return
    if stored.dtype not in _FLOATS:
        valid = ", ".join(_FLOATS) + (" or F8_E4M3 with a scale" if item.matrix else "")
        problems.append(f"{where}: dtype {stored.dtype}; valid are {valid}")
    elif scale is not None:
        problems.append(f"scale {scale.name} beside {where}, which is {stored.dtype}, not FP8")


def _check_scale(item: Expected, scale: StoredTensor, problems: list[str]) -> None:
    wanted = scale_shape(item.shape)
    where = f"scale {scale.name} in {scale.file}"
    if scale.shape != wanted:
        problems.append(
            f"{where}: shape {list(scale.shape)}; a weight {list(item.shape)} in blocks of "
            f"128x128 needs {list(wanted)}"
        )
    if scale.dtype not in _SCALES:
        problems.append(f"{where}: dtype {scale.dtype}; valid are {', '.join(_SCALES)}")


def _check_leftovers(
    config: DeepSeekConfig,
    index: SafetensorsIndex,
    everything: dict[str, Expected],
    skipped: set[int],
    problems: list[str],
) -> tuple[str, ...]:
    """Tensors that nothing expects: ignorable by name, skipped on purpose, or refused."""
    ignored, towers, unexpected = 0, 0, []
    tied = head_name(config) if config.tie_word_embeddings else None
    skip_prefixes = tuple(f"{config.tensor_prefix}model.layers.{n}." for n in sorted(skipped))
    mtp_tensors = 0
    for name in index.tensors:
        base = name.removesuffix(SCALE_SUFFIX)
        if skip_prefixes and name.startswith(skip_prefixes):
            mtp_tensors += 1
        elif name in everything or base in everything or name == tied:
            continue
        elif name.endswith(_IGNORABLE):
            ignored += 1
        elif config.ignored_prefixes and name.startswith(config.ignored_prefixes):
            towers += 1
        else:
            unexpected.append(name)
    _tell_extra_layers(config, unexpected, problems)
    problems += [f"unexpected tensor {n} in {index.tensors[n].file}" for n in unexpected]
    if any(n.endswith((".weight_packed", ".weight_scale_2", ".input_scale")) for n in unexpected):
        problems.append("these names are of an int4 or NVFP4 quantisation, which is not built")
    if any(".experts.gate_up_proj" in n for n in unexpected):
        problems.append("experts fused in one tensor a layer are not read: one tensor an expert is")
    notes = []
    if index.unlisted:
        notes.append(
            f"ignored {', '.join(index.unlisted)}: {INDEX_NAME} does not name "
            f"{'it' if len(index.unlisted) == 1 else 'them'}"
        )
    if ignored:
        notes.append(f"ignored {ignored} rotary_emb.inv_freq buffers: the config implies them")
    if towers:
        notes.append(f"ignored {towers} tensors of {', '.join(config.ignored_prefixes)} towers")
    if skipped:
        notes.append(
            f"MTP layers {sorted(skipped)} skipped on purpose ({mtp_tensors} tensors not read)"
        )
    if tied:
        notes.append("lm_head is tied to the embedding, as the config says")
    return tuple(notes)


def _tell_extra_layers(config: DeepSeekConfig, unexpected: list[str], problems: list[str]) -> None:
    """A whole layer too many is one problem (and leaves `unexpected`), with the likely reason."""
    first = config.num_hidden_layers + config.num_mtp_layers
    prefix = f"{config.tensor_prefix}model.layers."
    layers: dict[int, list[str]] = {}
    for name in unexpected:
        number = name.removeprefix(prefix).split(".")[0]
        if name.startswith(prefix) and number.isdigit() and int(number) >= first:
            layers.setdefault(int(number), []).append(name)
    for layer, names in sorted(layers.items()):
        if f"{prefix}{layer}.eh_proj.weight" not in names:
            continue
        problems.append(
            f"unexpected MTP layer {prefix}{layer} ({len(names)} tensors): the config has "
            f"num_nextn_predict_layers={config.num_mtp_layers}; with "
            f"{layer - config.num_hidden_layers + 1} it would be loaded"
        )
        unexpected[:] = [name for name in unexpected if name not in set(names)]


def _hosted(
    config: DeepSeekConfig,
    index: SafetensorsIndex,
    expected: dict[str, Expected],
    placement: ExpertPlacement,
    rank: int,
) -> tuple[frozenset[str], dict[str, int], dict[str, int]]:
    local = [set(placement.experts_of(rank, row)) for row in range(placement.num_layers)]
    shared_in_slots = placement.num_logical_experts > config.n_routed_experts
    hosted: list[str] = []
    read_bytes: dict[str, int] = {}
    elements: dict[str, int] = {}
    for item in expected.values():
        size = math.prod(item.shape)
        if item.expert == 0:  # one tensor of every slot, whatever lies in it
            elements[item.kind] = elements.get(item.kind, 0) + placement.num_local_experts * size
        elif item.expert < 0 and not (shared_in_slots and item.kind == "shared_expert"):
            elements[item.kind] = elements.get(item.kind, 0) + size
        names = [item.name]
        if item.name + SCALE_SUFFIX in index.tensors:
            names.append(item.name + SCALE_SUFFIX)
        if shared_in_slots and item.kind == "shared_expert":
            experts = range(config.n_routed_experts, placement.num_logical_experts)
            pieces = [j for j, expert in enumerate(experts) if expert in local[item.row]]
            nbytes = sum(_piece_bytes(config, index, names, j) for j in pieces)
        elif item.expert < 0 or item.expert in local[item.row]:
            nbytes = sum(index.tensors[n].nbytes for n in names)
        else:
            continue
        if nbytes:
            hosted += names
            read_bytes[item.kind] = read_bytes.get(item.kind, 0) + nbytes
    return frozenset(hosted), read_bytes, elements


def _piece_bytes(
    config: DeepSeekConfig, index: SafetensorsIndex, names: list[str], piece: int
) -> int:
    """Of a weight of the shared expert, and of its scale where names has one."""
    region = piece_region(config, names[0], piece)
    regions = (region, region.blocks())
    return sum(
        part.size * DTYPES[index.tensors[name].dtype].itemsize
        for name, part in zip(names, regions, strict=False)
    )
