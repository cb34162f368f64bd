"""What lies in a GPU's memory, by kind, and how many sequences the rest holds.

Knows: bytes of weights, buffers of each way to dispatch, what captured graphs and workspace take.
Knows nothing of time. Bytes of one GPU throughout.

Shape letters: D hidden, M tokens that a GPU dispatches at most, V vocabulary.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from dispatch.base import DispatchConfig, WireFormat
from dispatch.deepep import NORMAL_RANKS
from launch.capacity.deployment import Deployment

CONTEXT = 1.5e9  # CUDA context, NCCL, allocator slack: what nvidia-smi shows before any weight
GRAPH = 150e6  # of one captured batch size of 61 layers (vLLM and SGLang report 0.1-0.2 GB)
RESERVE = 0.05  # of the memory, left free: fragments, spikes
BLOCK_TOKENS = 64  # of a page: what FlashMLA takes

_PLANNERS = {
    "deepep_ll": ("dispatch.deepep_ll", "LowLatencyDispatcher"),
    "deepep_normal": ("dispatch.deepep_normal", "EmulatedNormalDispatcher"),
    "deepep_v2": ("dispatch.deepep_v2", "EmulatedElasticDispatcher"),
    "nvshmem": ("dispatch.nvshmem", "SymmetricDispatcher"),
    "allgather": ("dispatch.allgather", "AllGatherDispatcher"),
}


@dataclass(frozen=True)
class Memory:
    """weights: bytes by kind. buffers: of dispatch, held and passing. kv: what is left for it."""

    total: float
    weights: dict[str, float]
    buffers: float
    graphs: float
    workspace: float
    context: float
    reserve: float

    @property
    def used(self) -> float:
        parts = (self.buffers, self.graphs, self.workspace, self.context, self.reserve)
        return sum(self.weights.values()) + sum(parts)

    @property
    def kv(self) -> float:
        """Below zero where it does not fit."""
        return self.total - self.used

    @property
    def missing(self) -> float:
        """What would have to be freed before any cache; 0 where it fits."""
        return max(-self.kv, 0.0)

    def as_json(self) -> dict[str, Any]:
        return {
            "total_bytes": self.total,
            "weights_bytes": self.weights,
            "dispatch_buffers_bytes": self.buffers,
            "graphs_bytes": self.graphs,
            "workspace_bytes": self.workspace,
            "context_bytes": self.context,
            "reserve_bytes": self.reserve,
            "kv_bytes": self.kv,
            "missing_bytes": self.missing,
        }


def memory(d: Deployment) -> Memory:
    """Of one GPU of the pool."""
    graphs = GRAPH * d.graph_batches if d.phase == "decode" else 0.0
    return Memory(
        total=d.gpu.memory,
        weights=weights(d),
        buffers=buffers(d),
        graphs=graphs,
        workspace=workspace(d),
        context=CONTEXT,
        reserve=RESERVE * d.gpu.memory,
    )


def weights(d: Deployment) -> dict[str, float]:
    """By kind. Attention is whole on each GPU, or a tp-th of it; experts are whole in their slots,
    as many on every GPU: which of them are copies, or empty, differs, so those kinds are means over
    GPUs. kv_b is kept in BF16 (absorbed). MTP layers count where tokens are drafted. Norms are too
    small to name."""
    s, m = d.shape, d.shape.config
    each = s.weight_bytes
    layers = s.layers + d.mtp_layers
    moe = s.moe_layers + d.mtp_layers
    slot = moe * s.expert * each / d.gpus  # in all MoE layers, a GPU's share of it
    found = {
        "attention": layers * ((s.attention - s.up) * each + s.up * 2) / d.tp,
        "dense layers": (s.layers - s.moe_layers) * s.dense * each,
        "experts": slot * (m.n_routed_experts + d.hosted),
        "redundant experts": slot * d.redundant,
        "empty slots": slot * (d.physical - d.slots),
        "shared expert": moe * s.shared * each if d.shared == "replicated" else 0.0,
        "gates": moe * s.gate * 4.0,
        "embedding and head": (1 if m.tie_word_embeddings else 2) * s.embedding * 2.0,
        "MTP projections": d.mtp_layers * 2 * m.hidden_size**2 * 2.0,
    }
    return {kind: size for kind, size in found.items() if size}


def buffers(d: Deployment) -> float:
    """What the way to dispatch holds and allocates in passing, as its backend itself reckons before
    it is opened: the worst case that a step may be. `torch` reckons nothing, for it frees what it
    makes: rows of the busiest GPU, and their results."""
    if d.gpus == 1 or d.step_tokens < 1 or d.dispatch == "local":
        return 0.0
    if d.dispatch == "torch":
        halves = 2 if d.overlap else 1
        row = dispatch_config(d).hidden_size * 2 + d.shape.dispatch_bytes(d.wire_fp8)
        rows = d.step_tokens / halves * min(d.picks, d.slots_per_gpu * d.gpus) * d.balance
        return halves * rows * row
    return float(_planner(d.dispatch).plan(group_of(d), dispatch_config(d)).total)


def dispatch_config(d: Deployment) -> DispatchConfig:
    """What a backend is told of the phase."""
    return DispatchConfig(
        d.shape.config.hidden_size,
        d.picks,
        d.physical,
        d.step_tokens,
        torch.bfloat16,
        deterministic=False,
        wire=WireFormat.FP8 if d.wire_fp8 else WireFormat.MODEL,
    )


def group_of(d: Deployment) -> Any:
    """Ranks and nodes as backends see them: an EPGroup without process groups. A normal-mode number
    of ranks stands for one that the library does not have (`rules` names it)."""
    size = d.gpus
    if d.dispatch == "deepep_normal" and size not in NORMAL_RANKS:
        size = min(NORMAL_RANKS, key=lambda ranks: abs(ranks - size))
    node = d.gpu.per_node
    domain = node if size % node == 0 else size
    return SimpleNamespace(size=size, rank=0, ranks_per_node=domain, num_nodes=size // domain)


def _planner(name: str) -> Any:
    """The backend's class; that of its emulation, which knows the same sizes, where the library is
    needed to ask."""
    module, attribute = _PLANNERS[name]
    return getattr(importlib.import_module(module), attribute)


def workspace(d: Deployment) -> float:
    """Activations of a step: the residual stream, queries and outputs of all heads, both ways of a
    feed-forward part, logits in fp32 of the rows that are sampled."""
    m = d.shape.config
    tokens = d.step_tokens
    sampled = d.decode_tokens if d.phase == "decode" else max(d.tokens // 1024, 1)
    heads = m.num_attention_heads * (m.cache_width + m.kv_lora_rank) / d.tp
    widest = 3 * max(m.intermediate_size, m.moe_intermediate_size * m.n_shared_experts)
    row = 2.0 * (4 * m.hidden_size + max(heads, widest))
    return tokens * row + sampled * m.vocab_size * 4.0


@dataclass(frozen=True)
class Concurrency:
    """Sequences of one length that a cache holds, under three ways to keep it (Kwon et al., 2023):
    reserved for the longest, paged, paged in FP8."""

    length: int
    reserved: int
    paged: int
    paged_fp8: int

    def times(self, groups: int) -> Concurrency:
        """Of so many caches."""
        return Concurrency(
            self.length, self.reserved * groups, self.paged * groups, self.paged_fp8 * groups
        )


def concurrency(d: Deployment, length: int, longest: int) -> Concurrency:
    """Of one GPU (of a group of tp). length: positions of a sequence; longest: what a reservation
    must hold."""
    free = max(memory(d).kv, 0.0)
    plain, small = (d.kv_bytes(fp8) for fp8 in (False, True))
    return Concurrency(
        length,
        int(free // (_paged(longest) * plain)),
        int(free // (_paged(length) * plain)),
        int(free // (_paged(length) * small)),
    )


def sequences_that_fit(d: Deployment, length: float) -> int:
    """Of this mean length, in the format that is asked for."""
    return int(max(memory(d).kv, 0.0) // (_paged(length) * d.kv_bytes()))


def _paged(length: float) -> int:
    """Positions of whole pages."""
    return max(math.ceil(length / BLOCK_TOKENS), 1) * BLOCK_TOKENS
