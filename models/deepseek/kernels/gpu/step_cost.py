"""What a step of a model must move and compute on one GPU, kernel by kernel, from their own counts.

The limit that a measured step stands beside: each launch at the speed of memory or of the matrix
units, whichever is slower, weights in e4m3, absorbed attention for decode, naive for prefill.
Communication is not in it, nor what a host or a launch takes (`launch_seconds` may say that).

    python -m models.deepseek.kernels.gpu.step_cost CONFIG_JSON

Knows configs and costs. Needs neither a GPU nor triton. Shape letters as in kernels/base.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from models.deepseek.config import DeepSeekConfig
from models.deepseek.kernels.gpu import (
    fp8_gemm,
    grouped_gemm,
    mla_cache,
    mla_decode,
    mla_prefill,
    norm_quant,
    quant,
)
from models.deepseek.kernels.gpu.cost import KernelCost
from models.deepseek.kernels.gpu.dense import dense_cost
from models.deepseek.kernels.gpu.gate import gate_cost
from models.deepseek.kernels.gpu.norm import rms_norm_cost
from models.deepseek.kernels.gpu.permute import permute_cost, unpermute_cost
from models.deepseek.kernels.gpu.rope import rope_cost


@dataclass(frozen=True)
class Rates:
    """Of a GPU, as measured: bytes and FLOPs a second, and what a launch takes beside its work."""

    memory: float
    fp8: float
    bf16: float
    launch_seconds: float = 0.0


H200 = Rates(memory=4.3e12, fp8=1.4e15, bf16=0.7e15)  # about what copies and GEMMs reach


@dataclass(frozen=True)
class Part:
    """One launch in each of `times` layers. fp8: its products are of e4m3."""

    name: str
    cost: KernelCost
    times: int = 1
    fp8: bool = False

    def seconds(self, rates: Rates) -> float:
        peak = rates.fp8 if self.fp8 else rates.bf16
        return self.times * (self.cost.seconds(rates.memory, peak) + rates.launch_seconds)


@dataclass(frozen=True)
class StepLoad:
    """One rank's step. contexts: positions each sequence attends to once the step is written; new:
    its rows. expert_rows: pairs that come to each expert here. logits: rows that want them."""

    contexts: Sequence[int]
    new: Sequence[int]
    expert_rows: Sequence[int]
    logits: int
    decode: bool

    @property
    def tokens(self) -> int:
        return sum(self.new)


def even_expert_rows(tokens: int, ranks: int, top_k: int, physical: int) -> list[int]:
    """Pairs at each expert of a rank, of `tokens` a rank, where loads are balanced."""
    return [-(-tokens * ranks * top_k // physical)] * max(1, physical // ranks)


def decode_load(
    c: DeepSeekConfig, sequences: int, context: int, ranks: int, physical: int
) -> StepLoad:
    rows = even_expert_rows(sequences, ranks, c.num_experts_per_tok, physical)
    return StepLoad([context] * sequences, [1] * sequences, rows, sequences, True)


def prefill_load(
    c: DeepSeekConfig, prompts: int, length: int, ranks: int, physical: int
) -> StepLoad:
    rows = even_expert_rows(prompts * length, ranks, c.num_experts_per_tok, physical)
    return StepLoad([length] * prompts, [length] * prompts, rows, prompts, False)


def step_parts(c: DeepSeekConfig, load: StepLoad) -> list[Part]:
    """All launches of a step, in order of a layer; the shared expert beside the routed ones."""
    layers, dense_layers = c.num_hidden_layers, c.first_k_dense_replace
    t, d = load.tokens, c.hidden_size
    parts = [Part("norm and add", rms_norm_cost(t, d, residual=True), 2 * layers)]
    parts += _attention(c, load)
    if dense_layers:
        parts += _mlp("dense mlp", t, d, c.intermediate_size, dense_layers)
    if c.num_moe_layers:
        parts += _moe(c, load)
    parts.append(Part("logits", dense_cost(load.logits, c.vocab_size, d, out_itemsize=4)))
    return parts


def _attention(c: DeepSeekConfig, load: StepLoad) -> Iterator[Part]:
    t, d, heads, layers = load.tokens, c.hidden_size, c.num_attention_heads, c.num_hidden_layers
    rank, r, n, v = c.kv_lora_rank, c.qk_rope_head_dim, c.qk_nope_head_dim, c.v_head_dim
    queries = heads * (n + r)
    first = queries if c.q_lora_rank is None else c.q_lora_rank
    yield from _linear("qkv_a", t, first + rank + r, d, layers)
    yield Part("latents to cache", mla_cache.cost(t, rank, r), layers)
    if c.q_lora_rank is not None:
        yield Part("q norm", norm_quant.cost(t, c.q_lora_rank, residual=False), layers)
        gemm = fp8_gemm.cost(t, queries, c.q_lora_rank)
        yield Part("q_b", gemm, layers, fp8=True)
    yield Part("rope of queries", rope_cost(t, heads, r), layers)
    if load.decode:
        yield Part("W_UK", dense_cost(t, rank, n, heads), layers)
        each = load.new[0] if load.new else 1
        core = mla_decode.cost(list(load.contexts), heads, rank, r, rows_each=each)
        yield Part("attention", core, layers)
        yield Part("W_UV", dense_cost(t, v, rank, heads), layers)
    else:
        core = mla_prefill.cost(
            list(load.contexts), list(load.new), heads, rank=rank, rope=r, nope=n, value=v
        )
        yield Part("attention", core, layers)
    yield from _linear("o", t, d, heads * v, layers)


def _moe(c: DeepSeekConfig, load: StepLoad) -> Iterator[Part]:
    t, d, wide, layers = load.tokens, c.hidden_size, c.moe_intermediate_size, c.num_moe_layers
    rows, k = list(load.expert_rows), c.num_experts_per_tok
    pairs = sum(rows)
    yield Part("gate", gate_cost(t, d, c.n_routed_experts, k), layers)
    yield Part("quantise", quant.cost(t, d), layers)
    yield Part("permute", permute_cost(pairs, d, 1, -(-d // 128)), layers)
    yield Part("experts gate up", grouped_gemm.cost(rows, 2 * wide, d), layers, fp8=True)
    yield Part("experts silu", quant.cost(pairs, wide, silu=True), layers)
    yield Part("experts down", grouped_gemm.cost(rows, d, wide), layers, fp8=True)
    yield Part("unpermute", unpermute_cost(t, t * k, d), layers)
    if c.n_shared_experts:
        yield from _mlp("shared", t, d, wide * c.n_shared_experts, layers)


def _linear(name: str, rows: int, columns: int, width: int, times: int) -> Iterator[Part]:
    yield Part(f"{name} quantise", quant.cost(rows, width), times)
    yield Part(name, fp8_gemm.cost(rows, columns, width), times, fp8=True)


def _mlp(name: str, rows: int, hidden: int, wide: int, times: int) -> Iterator[Part]:
    yield from _linear(f"{name} gate up", rows, 2 * wide, hidden, times)
    yield Part(f"{name} silu", quant.cost(rows, wide, silu=True), times)
    yield Part(f"{name} down", fp8_gemm.cost(rows, hidden, wide), times, fp8=True)


def step_seconds(parts: Sequence[Part], rates: Rates) -> float:
    return sum(part.seconds(rates) for part in parts)


def num_launches(parts: Sequence[Part]) -> int:
    return sum(part.times for part in parts)


# -- the table that stands in BENCHMARKS.md --------------------------------------------------------

# name, ranks, physical experts, sequences (or prompts) a rank, positions each, decode
DEPLOYMENTS = (
    ("EP32 prefill", 32, 288, 4, 4096, False),
    ("EP72 decode", 72, 288, 128, 4096, True),
    ("EP144 decode", 144, 288, 128, 4096, True),
    ("EP320 decode", 320, 320, 128, 4096, True),
)


def table(c: DeepSeekConfig, rates: Rates = H200) -> str:
    lines = [
        "| deployment | tokens a GPU | compute of a step, ms | attention | experts | rest |",
        "|---|---|---|---|---|---|",
    ]
    for name, ranks, physical, sequences, length, decode in DEPLOYMENTS:
        make = decode_load if decode else prefill_load
        load = make(c, sequences, length, ranks, physical)
        parts = step_parts(c, load)
        whole = step_seconds(parts, rates)
        core = step_seconds([p for p in parts if p.name == "attention"], rates)
        experts = step_seconds([p for p in parts if p.name.startswith("experts")], rates)
        cells = (1e3 * x for x in (whole, core, experts, whole - core - experts))
        figures = " | ".join(f"{cell:.1f}" for cell in cells)
        lines.append(f"| {name} | {load.tokens} | {figures} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", help="config.json, or a folder with one")
    print(table(DeepSeekConfig.from_hf(parser.parse_args().config)))


if __name__ == "__main__":
    main()
