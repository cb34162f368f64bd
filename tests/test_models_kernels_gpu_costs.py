"""Bytes and FLOPs of GPU kernels, against tensors counted by hand, and the sum of a step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from models.deepseek.config import DeepSeekConfig
from models.deepseek.kernels.gpu import (
    dense,
    gate,
    norm,
    permute,
    rope,
    router,
    row_peaks,
    sampling,
    scatter_rows,
    sort_pairs,
    step_cost,
)
from models.deepseek.kernels.gpu.step_cost import H200, Part, Rates, decode_load, prefill_load

ROOT = Path(__file__).parents[1]
V3 = DeepSeekConfig.from_hf(ROOT / "launch/capacity/models/deepseek-v3.json")


def nbytes(*tensors: tuple[tuple[int, ...], torch.dtype]) -> int:
    return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in tensors)


BF16, FP32, I32, I64 = torch.bfloat16, torch.float32, torch.int32, torch.int64


def test_costs_are_those_of_the_tensors() -> None:
    t, d, e, k, h = 5, 256, 16, 4, 3
    rows = ((t, d), BF16)
    assert norm.rms_norm_cost(t, d).bytes == nbytes(rows, rows, ((d,), FP32))
    assert norm.rms_norm_cost(t, d, residual=True).bytes == nbytes(*[rows] * 4, ((d,), FP32))
    assert norm.silu_mul_cost(t, d).bytes == nbytes(((t, 2 * d), BF16), rows)
    assert rope.rope_cost(t, h, 8).bytes == nbytes(*[((t, h, 8), BF16)] * 2, ((t, 8), FP32))
    logits = ((t, e), FP32)  # one part: 256 channels
    assert router.router_cost(t, d, e).bytes == nbytes(rows, ((e, d), FP32), logits)
    assert router.router_cost(t, d, e).flops == 3 * 2 * t * d * e
    picked = ((t, k), I32), ((t, k), FP32)
    assert gate.gate_cost(t, d, e, k).bytes == nbytes(rows, ((e, d), FP32), logits, logits, *picked)
    pairs = t * k
    assert permute.permute_cost(pairs, d, 1, 2).bytes == nbytes(
        *[((pairs, d), torch.uint8)] * 2, *[((pairs, 2), FP32)] * 2, ((pairs,), I32)
    )
    assert permute.unpermute_cost(t, pairs, d).bytes == nbytes(
        ((pairs, d), BF16), ((t, d), FP32), ((t, k), I64), ((t, k), FP32)
    )
    weight, out = ((h, 32, 16), BF16), ((t, h, 32), BF16)
    assert dense.dense_cost(t, 32, 16, h).bytes == nbytes(weight, out, ((t, h, 16), BF16))
    assert dense.dense_cost(t, 32, 16, h).flops == 2 * t * h * 32 * 16
    assert scatter_rows.scatter_cost(t, 32, 8).bytes == nbytes(*[((t, 40), BF16)] * 2, ((t,), I64))
    assert row_peaks.argmax_cost(t, d).bytes == nbytes(((t, d), FP32))
    assert sampling.sample_cost(t, d, passes=2).bytes == nbytes(*[((t, d), FP32)] * 5)
    assert sort_pairs.sort_pairs_cost(t, k, 4).bytes > nbytes(((t, k), I32), ((t, k), I64))


def test_parts_of_a_decode_step() -> None:
    load = decode_load(V3, sequences=128, context=4096, ranks=144, physical=288)
    parts = {part.name: part for part in step_cost.step_parts(V3, load)}
    assert load.expert_rows == [512, 512]  # 128 * 144 * 8 / 288
    experts = parts["experts gate up"]
    assert experts.times == 58 and experts.fp8
    assert experts.cost.flops == 2 * 1024 * 4096 * 7168
    latents = 128 * 4096 * 576 * 2
    assert latents < parts["attention"].cost.bytes < 2 * latents  # and parts, queries
    weights = sum(
        part.cost.bytes * part.times
        for name, part in parts.items()
        if name in ("qkv_a", "q_b", "o", "W_UK", "W_UV")
    )
    assert weights > 61 * (2112 * 7168 + 24576 * 1536 + 7168 * 16384 + 2 * 2 * 128 * 128 * 512)
    assert "dense mlp down" in parts and parts["dense mlp down"].times == 3
    assert parts["logits"].cost.bytes > 129280 * 7168 * 2


def test_what_a_step_takes_grows_with_what_it_does() -> None:
    def seconds(sequences: int, context: int) -> float:
        load = decode_load(V3, sequences, context, 144, 288)
        return step_cost.step_seconds(step_cost.step_parts(V3, load), H200)

    assert seconds(64, 4096) < seconds(128, 4096) < seconds(128, 32768)
    prefill = step_cost.step_parts(V3, prefill_load(V3, 4, 4096, 32, 288))
    assert step_cost.step_seconds(prefill, H200) > 10 * seconds(128, 4096)
    slow = Rates(H200.memory, H200.fp8, H200.bf16, launch_seconds=1e-6)
    more = step_cost.step_seconds(prefill, slow) - step_cost.step_seconds(prefill, H200)
    assert more == pytest.approx(1e-6 * step_cost.num_launches(prefill))
    one = Part("x", dense.dense_cost(1, 1000, 1000), fp8=True)
    assert one.seconds(H200) == one.cost.bytes / H200.memory  # one row: bound by the weight


def test_the_table_in_benchmarks() -> None:
    assert step_cost.table(V3) in (ROOT / "BENCHMARKS.md").read_text()
