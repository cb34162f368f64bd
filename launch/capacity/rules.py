"""What a deployment breaks, all of it at once, each with the nearest valid values.

Knows: divisibility, limits of the ways to dispatch, memory of GPUs and nodes. Knows nothing of
time. A rule is a function from a deployment to what it finds wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from dispatch import deepep
from ep.planning.shapes import near_divisors, near_multiples
from launch.capacity.deployment import Deployment
from launch.capacity.memory import memory, sequences_that_fit

BLOCK = 128  # of FP8 scales
STAGING = 16e9  # host memory of a rank: pinned buffers, the process, pages of the file being read
SHARED_MEMORY = 1e9  # /dev/shm of a rank: NCCL within a node, queues between its processes


@dataclass(frozen=True)
class Violation:
    """rule: its short name; text: value, what would be valid."""

    rule: str
    text: str


def violations(d: Deployment, length: float, shared_memory: float | None = None) -> list[Violation]:
    """length: mean positions of a sequence. shared_memory: of a node, /dev/shm, if it is known."""
    found = [*_layout(d), *_attention(d), *_dispatch(d), *_memory(d, length)]
    return found + list(_host(d, shared_memory))


def _layout(d: Deployment) -> Iterator[Violation]:
    m = d.shape.config
    if d.slots % d.gpus:
        low = d.slots // d.gpus * d.gpus - m.n_routed_experts
        near = [str(r) for r in (low, low + d.gpus) if r >= 0]
        yield Violation(
            "slots divide",
            f"{d.slots} slots ({m.n_routed_experts} experts + {d.redundant} redundant) over "
            f"{d.gpus} GPUs: some GPUs would have an empty slot; redundant: {' or '.join(near)}",
        )
    least = m.n_routed_experts + (m.n_shared_experts if d.shared == "hosted" else 0)
    if d.slots < least:
        yield Violation(
            "every expert has a slot",
            f"{d.slots} slots for {least} experts; redundant: {least - m.n_routed_experts} or more",
        )
    if d.gpus > d.slots:
        yield Violation(
            "every GPU has an expert",
            f"{d.gpus} GPUs for {d.slots} slots: at most {d.slots} GPUs, or redundant: "
            f"{d.gpus - m.n_routed_experts}",
        )
    if d.gpus > d.gpu.per_node and d.gpus % d.gpu.per_node:
        yield Violation(
            "whole nodes",
            f"{d.gpus} GPUs with {d.gpu.per_node} a node: {near_multiples(d.gpus, d.gpu.per_node)}",
        )


def _attention(d: Deployment) -> Iterator[Violation]:
    m = d.shape.config
    if d.tp == 1:
        return
    if m.num_attention_heads % d.tp:
        near = near_divisors(m.num_attention_heads, d.tp)
        yield Violation("heads divide", f"{m.num_attention_heads} heads over tp={d.tp}: {near}")
    if d.gpus % d.tp:
        near = near_divisors(d.gpus, d.tp)
        yield Violation("GPUs divide", f"{d.gpus} GPUs in groups of tp={d.tp}: {near}")
    if d.tp > d.gpu.domain:
        yield Violation("one NVLink domain", f"tp={d.tp}: at most {d.gpu.domain} share NVLink")
    if m.quantization is None:
        return
    sharded = {
        "heads x value dim (o_proj)": m.num_attention_heads * m.v_head_dim,
        "heads x query dim (q_b_proj)": m.num_attention_heads * m.qk_head_dim,
        "intermediate_size (dense layers)": m.intermediate_size,
        "shared expert's width": m.moe_intermediate_size * m.n_shared_experts,
    }
    for name, width in sharded.items():
        if width % (d.tp * BLOCK):
            fits = [t for t in range(1, d.gpu.domain + 1) if width % (t * BLOCK) == 0]
            yield Violation(
                "FP8 blocks",
                f"{name}: {width} over tp={d.tp} cuts blocks of {BLOCK}; tp: "
                f"{', '.join(map(str, fits))}",
            )


def _dispatch(d: Deployment) -> Iterator[Violation]:
    if d.gpus == 1:
        return
    hidden = d.shape.config.hidden_size
    tokens = d.decode_tokens if d.phase == "decode" else d.tokens
    if d.dispatch == "deepep_ll":
        for text in deepep.ll_problems(
            num_ranks=d.gpus,
            hidden=hidden,
            top_k=d.picks,
            num_experts=d.slots,
            max_tokens=tokens,
            qp_depth=None,
        ):
            drafts = f" ({d.sequences} sequences x {1 + d.drafts})" if d.drafts else ""
            yield Violation("deepep_ll", f"{text}{drafts}")
    elif d.dispatch == "deepep_normal":
        if d.gpus not in deepep.NORMAL_RANKS:
            near = sorted(sorted(deepep.NORMAL_RANKS, key=lambda r: abs(r - d.gpus))[:2])
            text = f"{d.gpus} ranks: nearest valid {' or '.join(map(str, near))}"
            yield Violation("deepep_normal", text)
        if d.picks > deepep.NORMAL_MAX_TOP_K:
            yield Violation("deepep_normal", f"{d.picks} picks: at most {deepep.NORMAL_MAX_TOP_K}")
    elif d.dispatch == "nvshmem" and d.gpus > 32:
        yield Violation("nvshmem", f"{d.gpus} ranks: at most 32")


def _memory(d: Deployment, length: float) -> Iterator[Violation]:
    held = memory(d)
    if held.kv <= 0:
        more = _gpus_that_hold(d)
        remedy = f"; {more} GPUs would hold it" if more else "; no number of GPUs would"
        yield Violation(
            "GPU memory",
            f"{held.used / 1e9:.1f} of {held.total / 1e9:.0f} GB are used before any cache{remedy}",
        )
    elif d.phase == "decode" and (fit := sequences_that_fit(d, length)) < d.sequences:
        yield Violation(
            "KV cache",
            f"{d.sequences} sequences of {length:.0f} positions do not fit into "
            f"{held.kv / 1e9:.1f} GB: at most {fit}"
            + ("" if d.kv_fp8 else f", or {_fp8_fit(d, length)} with an FP8 cache"),
        )


def _host(d: Deployment, shared_memory: float | None) -> Iterator[Violation]:
    here = min(d.gpus, d.gpu.per_node)
    if here * STAGING > d.gpu.host_memory:
        yield Violation(
            "host memory",
            f"{here} ranks need {here * STAGING / 1e9:.0f} GB of a node's "
            f"{d.gpu.host_memory / 1e9:.0f}: at most {int(d.gpu.host_memory // STAGING)} ranks",
        )
    if shared_memory is not None and here * SHARED_MEMORY > shared_memory:
        yield Violation(
            "shared memory",
            f"/dev/shm has {shared_memory / 1e9:.1f} GB for {here} ranks: needs "
            f"{here * SHARED_MEMORY / 1e9:.0f} GB",
        )


def _gpus_that_hold(d: Deployment) -> int | None:
    """The fewest, in steps of whole nodes, that the same layout would fit on."""
    slots = d.slots
    for gpus in range(d.gpu.per_node, slots + 1, d.gpu.per_node):
        if gpus > d.gpus and memory(replace(d, gpus=gpus)).kv > 0:
            return gpus
    return None


def _fp8_fit(d: Deployment, length: float) -> int:
    return sequences_that_fit(replace(d, kv_fp8=True), length)
