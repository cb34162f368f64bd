"""Which of our GPU kernels a step launches, and what each must move and compute: the one list.

Knows: a config, the order of kernels in a layer (triton_attention.py and triton_dense.py beside
this file; model.py, mla.py and moe.py, which call them), each kernel's own count of bytes and
FLOPs. Knows nothing of GPUs, seconds or all-to-alls. Plain tensor operations between kernels (a
sum, a cast, a join) are counted by their bytes, under own names.

What a step takes at least by them: step_limit.py; what it is predicted to take: the planner's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from models.deepseek.config import DeepSeekConfig
from models.deepseek.kernels.gpu import (
    dense,
    fp8_gemm,
    gate,
    grouped_gemm,
    mla_cache,
    mla_decode,
    mla_prefill,
    norm,
    norm_quant,
    permute,
    quant,
    rope,
    row_peaks,
    scatter_rows,
    sort_pairs,
)
from models.deepseek.kernels.gpu.cost import NOTHING, KernelCost
from models.deepseek.kernels.gpu.mla_plan import DETERMINISTIC, Cuts
from models.deepseek.mla import naive_from

# What bounds a kernel beside its bytes; "memory": nothing does.
Kind = Literal["product", "grouped", "decode_core", "prefill_core", "memory"]
# Of a layer, or of a step: whose work it is.
Part = Literal["projections", "core", "experts", "shared", "dense", "rest", "head"]


@dataclass(frozen=True)
class Use:
    """Of one kernel in a layer, or once in a step. fp8: its products are of e4m3 values. launches:
    of which this is made."""

    kernel: str
    part: Part
    kind: Kind
    cost: KernelCost
    fp8: bool = False
    launches: int = 1

    @property
    def unit(self) -> str:
        """Which matrix unit computes it: fp8, bf16 or none, as `Limits` calls them."""
        return "none" if self.kind == "memory" else "fp8" if self.fp8 else "bf16"


@dataclass(frozen=True)
class Experts:
    """Rows of each slot of the busiest GPU. routed: they come token by token and are sorted here
    (normal kernels), else slot by slot (low latency)."""

    rows: Sequence[int]
    routed: bool


def attention_absorbed(
    m: DeepSeekConfig,
    contexts: Sequence[int],
    new: Sequence[int],
    kv_fp8: bool,
    partitions: Cuts = DETERMINISTIC,
) -> list[Use]:
    """A layer over latents, with the norm before it: decode, and all of deterministic mode.
    contexts: positions of each sequence when its new ones are written."""
    rows, heads = sum(new), m.num_attention_heads
    turned = m.qk_rope_head_dim
    uses = [_added_norm(m, rows), *_qkv_a(m, rows)]
    uses += [_memory("mla_cache", mla_cache.cost(rows, m.kv_lora_rank, turned, kv_fp8))]
    if m.q_lora_rank is not None:
        fused = _fp8(m)
        uses += [
            _memory("norm_quant", norm_quant.cost(rows, m.q_lora_rank, residual=False))
            if fused
            else _memory("rms_norm", norm.rms_norm_cost(rows, m.q_lora_rank)),
            _product(m, "projections", rows, heads * m.qk_head_dim, m.q_lora_rank),
        ]
    uses += [
        _memory("rope", rope.rope_cost(rows, heads, turned)),
        *_over_latents(m, contexts, new, kv_fp8, partitions),
    ]
    return uses + _linear(m, "projections", rows, m.hidden_size, heads * m.v_head_dim)


def attention_fast(
    m: DeepSeekConfig,
    contexts: Sequence[int],
    new: Sequence[int],
    kv_fp8: bool,
    partitions: Cuts = DETERMINISTIC,
) -> list[Use]:
    """The same of prefill in fast mode: sequences with so many new tokens that it pays have keys
    and values expanded (`mla.naive_from`), the others attend over latents."""
    least = naive_from(m)
    many = [(c, n) for c, n in zip(contexts, new, strict=True) if n >= least]
    few = [(c, n) for c, n in zip(contexts, new, strict=True) if n < least]
    if not many:
        return attention_absorbed(m, contexts, new, kv_fp8, partitions)
    rows, heads = sum(new), m.num_attention_heads
    nope, turned, value = m.qk_nope_head_dim, m.qk_rope_head_dim, m.v_head_dim
    rank = m.kv_lora_rank
    uses = [_added_norm(m, rows), *_qkv_a(m, rows)]
    if m.q_lora_rank is not None:
        uses.append(_memory("rms_norm", norm.rms_norm_cost(rows, m.q_lora_rank)))
        uses += _linear(m, "projections", rows, heads * m.qk_head_dim, m.q_lora_rank)
    uses += [
        _memory("rms_norm", norm.rms_norm_cost(rows, rank)),
        _memory("rope", rope.rope_cost(rows, 1, turned)),
        _memory("scatter_rows", scatter_rows.scatter_cost(rows, rank, turned)),
        _memory("rope", rope.rope_cost(rows, heads, turned)),
    ]
    if few:
        apart = _copied(rows * heads * (m.qk_head_dim + value))  # each form's rows, and back
        uses.append(_memory("rows of each form", apart, launches=6))
        seen, own = (list(x) for x in zip(*few, strict=True))
        uses += _over_latents(m, seen, own, kv_fp8, partitions)
    positions, queries = (list(x) for x in zip(*many, strict=True))
    whole = mla_prefill.cost(
        positions, queries, heads, rank=rank, rope=turned, nope=nope, value=value, fp8=kv_fp8
    )
    expand = _product(m, "projections", sum(positions), heads * (nope + value), rank)
    return [
        *uses,
        _memory("join of queries", _copied(sum(queries) * heads * m.qk_head_dim)),
        # Its count has the expansion of keys in it, which is a product of its own.
        Use("mla_prefill", "core", "prefill_core", _less(whole, expand.cost)),
        expand,
        *_linear(m, "projections", rows, m.hidden_size, heads * value),
    ]


def gate_and_shared(m: DeepSeekConfig, rows: int, hosted: int) -> list[Use]:
    """Of a MoE layer what each GPU does for its own rows: the norm, the gate, the shared expert
    where it does not lie in slots."""
    hidden = m.hidden_size
    picking = gate.gate_cost(rows, hidden, m.n_routed_experts, m.num_experts_per_tok)
    uses = [_added_norm(m, rows), Use("gate", "rest", "product", picking, launches=2)]
    if not hosted and m.n_shared_experts:
        pieces = m.n_shared_experts
        uses += mlp(m, "shared", rows, m.moe_intermediate_size, pieces)
        # Sums come home in fp32, results of the shared expert in BF16.
        summed = KernelCost(10 * rows * hidden * pieces, 0)
        uses.append(_memory("sum with the shared", summed, launches=pieces))
    uses.append(_memory("cast of sums", KernelCost(6 * rows * hidden, 0)))
    return uses


def routed_experts(m: DeepSeekConfig, rows: int, experts: Experts, wire_fp8: bool) -> list[Use]:
    """Of a MoE layer the experts, for rows from anywhere. rows: of the GPU's own, which are sent
    away. What all-to-alls do, some quantise, is theirs."""
    hidden, total = m.hidden_size, sum(experts.rows)
    if not experts.routed:
        late = _fp8(m) and not wire_fp8  # as they lie, when they have come
        return [*([_memory("quant", quant.cost(total, hidden))] if late else []),
                *_experts(m, experts.rows)]  # fmt: skip
    uses = [_memory("quant", quant.cost(rows, hidden))] if wire_fp8 or _fp8(m) else []
    pairs = sort_pairs.sort_pairs_cost(total, 1, len(experts.rows))
    size = 1 if _fp8(m) else 2
    moved = permute.permute_cost(total, hidden, size, -(-hidden // 128) if size == 1 else 0)
    back = permute.unpermute_cost(rows, total, hidden)
    return [
        *uses,
        _memory("sort_pairs", pairs, launches=4),
        _memory("permute", moved),
        *_experts(m, experts.rows),
        _memory("unpermute", back),
    ]


def mlp(m: DeepSeekConfig, part: Part, rows: int, width: int, pieces: int = 1) -> list[Use]:
    hidden = m.hidden_size
    one = _linear(m, part, rows, 2 * width, hidden)
    if _fp8(m):
        one.append(_memory("quant_silu_mul", quant.cost(rows, width, silu=True)))
    else:
        one.append(_memory("silu_mul", norm.silu_mul_cost(rows, width)))
    one.append(_product(m, part, rows, hidden, width))
    return one * pieces


def dense_layer(m: DeepSeekConfig, rows: int) -> list[Use]:
    return [_added_norm(m, rows), *mlp(m, "dense", rows, m.intermediate_size)]


def ends(m: DeepSeekConfig, rows: int, sampled: int) -> list[Use]:
    """Of a step: the embedding, the last norm; the head and a greedy choice for `sampled` rows."""
    logits = dense.dense_cost(sampled, m.vocab_size, m.hidden_size, out_itemsize=4)
    return [
        _memory("embedding", _copied(rows * m.hidden_size)),
        _added_norm(m, rows),
        Use("dense", "head", "product", logits),
        Use("argmax", "head", "memory", row_peaks.argmax_cost(sampled, m.vocab_size), launches=2),
    ]


def spread_rows(pairs: float, slots: int) -> list[int]:
    """Rows of each slot: as many slots have any as are picked on average, each as many."""
    touched = slots * (1 - (1 - 1 / slots) ** pairs) if slots > 1 else 1.0
    used = max(1, round(touched))
    each, more = divmod(max(math.ceil(pairs), 1), used)
    return [each + (i < more) for i in range(used)] + [0] * (slots - used)


def _over_latents(
    m: DeepSeekConfig,
    contexts: Sequence[int],
    new: Sequence[int],
    kv_fp8: bool,
    partitions: Cuts,
) -> list[Use]:
    rows, heads, rank = sum(new), m.num_attention_heads, m.kv_lora_rank
    core, merged = NOTHING, False
    for each in sorted({*new}):  # rows of a sequence attend to fewer, the earlier they are
        means = [c - (each - 1) // 2 for c, n in zip(contexts, new, strict=True) if n == each]
        core += mla_decode.cost(
            means, heads, rank, m.qk_rope_head_dim,
            fp8=kv_fp8, rows_each=each, partitions=partitions,
        )  # fmt: skip
        merged |= max(partitions.parts(means, each)) > 1
    up = dense.dense_cost(rows, rank, m.qk_nope_head_dim, heads)
    back = dense.dense_cost(rows, m.v_head_dim, rank, heads)
    return [
        Use("dense_per_head", "projections", "product", up),
        Use("mla_decode", "core", "decode_core", core, launches=1 + merged),
        Use("dense_per_head", "projections", "product", back),
    ]


def _experts(m: DeepSeekConfig, rows: Sequence[int]) -> list[Use]:
    hidden, width, total = m.hidden_size, m.moe_intermediate_size, sum(rows)
    if _fp8(m):
        both, down = (
            Use("grouped_gemm", "experts", "grouped", grouped_gemm.cost(rows, *shape_), fp8=True)
            for shape_ in ((2 * width, hidden), (hidden, width))
        )
        between = Use("quant_silu_mul", "experts", "memory", quant.cost(total, width, silu=True))
    else:
        used = sum(1 for n in rows if n)
        each = -(-total // used)
        both, down = (
            Use("dense_grouped", "experts", "grouped", dense.dense_cost(each, *shape_, heads=used))
            for shape_ in ((2 * width, hidden), (hidden, width))
        )
        between = Use("silu_mul", "experts", "memory", norm.silu_mul_cost(total, width))
    return [both, between, down]


def _qkv_a(m: DeepSeekConfig, rows: int) -> list[Use]:
    query = m.num_attention_heads * m.qk_head_dim if m.q_lora_rank is None else m.q_lora_rank
    return _linear(m, "projections", rows, query + m.cache_width, m.hidden_size)


def _linear(m: DeepSeekConfig, part: Part, rows: int, columns: int, width: int) -> list[Use]:
    """With the quantisation of its rows, where weights are in e4m3."""
    product = _product(m, part, rows, columns, width)
    return [_memory("quant", quant.cost(rows, width)), product] if _fp8(m) else [product]


def _product(m: DeepSeekConfig, part: Part, rows: int, columns: int, width: int) -> Use:
    if _fp8(m):
        return Use("fp8_gemm", part, "product", fp8_gemm.cost(rows, columns, width), fp8=True)
    return Use("dense", part, "product", dense.dense_cost(rows, columns, width))


def _added_norm(m: DeepSeekConfig, rows: int) -> Use:
    return _memory("add_rms_norm", norm.rms_norm_cost(rows, m.hidden_size, residual=True))


def _memory(kernel: str, cost: KernelCost, launches: int = 1) -> Use:
    return Use(kernel, "rest", "memory", cost, launches=launches)


def _copied(values: int) -> KernelCost:
    """BF16, read and written."""
    return KernelCost(4 * values, 0)


def _less(whole: KernelCost, part: KernelCost) -> KernelCost:
    """Bytes stay: what a kernel writes for the next one is read there."""
    return KernelCost(whole.bytes, max(whole.flops - part.flops, 0))


def _fp8(m: DeepSeekConfig) -> bool:
    return m.quantization is not None
