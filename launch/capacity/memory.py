"""What lies in a GPU's memory, by kind, and how many sequences the rest holds.

Knows: bytes of weights, buffers of each way to dispatch, what captured graphs and workspace take.
Knows nothing of time. Bytes of one GPU throughout.

Shape letters: D hidden, M tokens that a GPU dispatches at most, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from dispatch import deepep_plan
from dispatch.base import DispatchConfig, WireFormat
from launch.capacity.deployment import Deployment

CONTEXT = 1.5e9  # CUDA context, NCCL, allocator slack: what nvidia-smi shows before any weight
GRAPH = 150e6  # of one captured batch size of 61 layers (vLLM and SGLang report 0.1-0.2 GB)
RESERVE = 0.05  # of the memory, left free: fragments, spikes
BLOCK_TOKENS = 64  # of a page: what FlashMLA takes


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
    """By kind. Attention is whole on each GPU, or a tp-th of it; experts are whole in their slots;
    kv_b is kept in BF16 (absorbed). Norms are too small to name."""
    s, m = d.shape, d.shape.config
    each = s.weight_bytes
    layers = s.layers + m.num_mtp_layers
    moe = s.moe_layers + m.num_mtp_layers
    slots = math.ceil(d.slots_per_gpu)
    own = math.ceil((m.n_routed_experts + (d.shared == "hosted")) / d.gpus)
    found = {
        "attention": layers * ((s.attention - s.up) * each + s.up * 2) / d.tp,
        "dense layers": (s.layers - s.moe_layers) * s.dense * each,
        "experts": moe * min(own, slots) * s.expert * each,
        "redundant experts": moe * max(slots - own, 0) * s.expert * each,
        "shared expert": moe * s.shared * each if d.shared == "replicated" else 0.0,
        "gates": moe * s.gate * 4.0,
        "embedding and head": (1 if m.tie_word_embeddings else 2) * s.embedding * 2.0,
        "MTP projections": m.num_mtp_layers * 2 * m.hidden_size**2 * 2.0,
    }
    return {kind: size for kind, size in found.items() if size}


def buffers(d: Deployment) -> float:
    """What the way to dispatch holds and allocates in passing, both phases' tokens counted."""
    if d.gpus == 1:
        return 0.0
    tokens = d.decode_tokens if d.phase == "decode" else d.tokens
    config = DispatchConfig(
        d.shape.config.hidden_size,
        d.picks,
        d.slots,
        tokens,
        torch.bfloat16,
        deterministic=False,
        wire=WireFormat.FP8 if d.wire_fp8 else WireFormat.MODEL,
    )
    group: Any = SimpleNamespace(size=d.gpus, rank=0, ranks_per_node=d.gpu.per_node)
    row = deepep_plan.row_bytes(config)
    back = config.hidden_size * 2
    if d.dispatch == "deepep_ll":
        return deepep_plan.ll_need(group, config).size + deepep_plan.ll_passing(group, config)
    halves = 2 if d.overlap else 1
    # Rows that arrive on the busiest GPU, once for each expert of it at most; results likewise.
    arriving = tokens / halves * min(d.picks, d.slots_per_gpu * d.gpus) * d.balance
    passing = halves * (arriving * (row + back) + tokens / halves * back)
    if d.dispatch == "deepep_normal":
        return 1e9 * (1 if d.gpus <= d.gpu.per_node else 2) + passing  # its queues
    return passing  # torch, allgather, nvshmem: made for a layer, freed when it is home


def workspace(d: Deployment) -> float:
    """Activations of a step: the residual stream, queries and outputs of all heads, both ways of a
    feed-forward part, logits in fp32 of the rows that are sampled."""
    m = d.shape.config
    tokens = d.decode_tokens if d.phase == "decode" else d.tokens
    sampled = d.decode_tokens if d.phase == "decode" else max(d.tokens // 1024, 1)
    heads = m.num_attention_heads * (m.cache_width + m.kv_lora_rank) / d.tp
    widest = 3 * max(m.intermediate_size, m.moe_intermediate_size * m.n_shared_experts)
    row = 2.0 * (4 * m.hidden_size + max(heads, widest))
    return tokens * row + sampled * m.vocab_size * 4.0


@dataclass(frozen=True)
class Concurrency:
    """Sequences of one length that a GPU's cache holds, under three ways to keep it (Kwon et al.,
    2023): reserved for the longest, paged, paged in FP8."""

    length: int
    reserved: int
    paged: int
    paged_fp8: int


def concurrency(d: Deployment, length: int, longest: int) -> Concurrency:
    """length: mean positions of a sequence; longest: what a reservation must hold."""
    free = max(memory(d).kv, 0.0)
    pages = math.ceil(length / BLOCK_TOKENS) * BLOCK_TOKENS
    plain = d.shape.kv_bytes(False, d.shape.config.num_mtp_layers)
    small = d.shape.kv_bytes(True, d.shape.config.num_mtp_layers)
    return Concurrency(
        length,
        int(free // (longest * plain)),
        int(free // (pages * plain)),
        int(free // (pages * small)),
    )


def sequences_that_fit(d: Deployment, length: float) -> int:
    """Of this mean length, in the format that is asked for."""
    kv = d.shape.kv_bytes(d.kv_fp8, d.shape.config.num_mtp_layers)
    pages = math.ceil(length / BLOCK_TOKENS) * BLOCK_TOKENS
    return int(max(memory(d).kv, 0.0) // (pages * kv))
