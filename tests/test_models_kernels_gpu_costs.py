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
)
from models.deepseek.kernels.gpu.step_kernels import Experts, Use
from models.deepseek.kernels.gpu.step_limit import (
    H200,
    StepLoad,
    even_experts,
    least_seconds,
    num_launches,
    step_uses,
    table,
)

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


def decode(sequences: int, context: int) -> list[tuple[Use, int]]:
    """A rank's step of EP144."""
    experts = even_experts(V3, sequences, 144, 288, routed=False)
    return list(step_uses(V3, StepLoad(sequences, 1, context, True, experts)))


def test_kernels_of_a_decode_step() -> None:
    assert even_experts(V3, 128, 144, 288, False) == Experts((512, 512), False)  # 128 * 8 / 2
    uses = decode(128, 4096)
    both, between, down = [(use, n) for use, n in uses if use.part == "experts"]
    assert both[1] == between[1] == down[1] == 58 and both[0].unit == "fp8"
    assert both[0].cost.flops == 2 * 1024 * 4096 * 7168
    core = next(use for use, _ in uses if use.kernel == "mla_decode")
    latents = 128 * 4096 * 576 * 2
    assert latents < core.cost.bytes < 2 * latents and core.unit == "bf16"  # and parts, queries
    weights = sum(use.cost.bytes * n for use, n in uses if use.part == "projections")
    assert weights > 61 * (2112 * 7168 + 24576 * 1536 + 7168 * 16384 + 2 * 2 * 128 * 128 * 512)
    assert {n for use, n in uses if use.part == "dense"} == {3}
    head = next(use for use, _ in uses if use.part == "head")
    assert head.cost.bytes > 129280 * 7168 * 2
    assert num_launches(uses) > sum(n for _, n in uses) > 61 * 20


def test_what_a_step_takes_grows_with_what_it_does() -> None:
    def seconds(sequences: int, context: int) -> float:
        return least_seconds(decode(sequences, context), H200)

    assert seconds(64, 4096) < seconds(128, 4096) < seconds(128, 32768)
    experts = even_experts(V3, 4 * 4096, 32, 288, routed=True)
    prompts = list(step_uses(V3, StepLoad(4, 4096, 4096, False, experts)))
    assert least_seconds(prompts, H200) > 10 * seconds(128, 4096)
    parts = {use.part for use, _ in prompts}
    assert sum(least_seconds(prompts, H200, part) for part in parts) == pytest.approx(
        least_seconds(prompts, H200)
    )
    absorbed = list(step_uses(V3, StepLoad(4, 4096, 4096, True, experts)))
    assert least_seconds(absorbed, H200) > least_seconds(prompts, H200)


def test_no_step_is_quicker_than_its_limit() -> None:
    """One row bound by its weight, rows bound by arithmetic, kernels whose FLOPs do not count."""
    one = Use("x", "dense", "product", dense.dense_cost(1, 1000, 1000), fp8=True)
    assert least_seconds([(one, 3)], H200) == 3 * one.cost.bytes / H200.memory
    many = Use("x", "dense", "product", dense.dense_cost(1 << 20, 1000, 1000))
    assert least_seconds([(many, 1)], H200) == many.cost.flops / H200.bf16
    moved = Use("x", "rest", "memory", many.cost)
    assert least_seconds([(moved, 1)], H200) == many.cost.bytes / H200.memory
    # A lone row visits 8 of 256 experts, and reads no others.
    experts = even_experts(V3, 1, 1, 256, routed=True)
    assert sum(n > 0 for n in experts.rows) == 8
    alone = list(step_uses(V3, StepLoad(1, 1, 1024, True, experts)))
    read = sum(use.cost.bytes for use, _ in alone if use.kernel == "grouped_gemm")
    assert 8 * 44e6 < read < 8 * 45e6


def test_the_table_in_benchmarks() -> None:
    assert table(V3) in (ROOT / "BENCHMARKS.md").read_text()
