"""The dense and the expert half of TritonKernels: which kernel serves which weight.

Weights in the model dtype: GEMMs of dense.py. Weights in e4m3: W8A8, rows quantised in blocks of
128 channels as the models were trained; so results are not bit for bit those of dequantised
weights, but within the rounding of rows to e4m3. Each kernel keeps law 5.

Knows the kernels and the weights' layouts. Shape letters as in kernels/base.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dispatch.base import ScaleFormat
from models.deepseek.fp8 import Fp8Rows
from models.deepseek.kernels.base import ExpertWeights, GateSpec, LinearWeight
from models.deepseek.kernels.errors import KernelArgumentError
from models.deepseek.kernels.gpu.dense import dense, dense_grouped, dense_per_head
from models.deepseek.kernels.gpu.fp8_gemm import fp8_gemm
from models.deepseek.kernels.gpu.gate import gate
from models.deepseek.kernels.gpu.grouped_gemm import grouped_gemm_contiguous
from models.deepseek.kernels.gpu.norm import add_rms_norm, rms_norm, silu_mul
from models.deepseek.kernels.gpu.permute import permute, unpermute
from models.deepseek.kernels.gpu.quant import quantise, quantise_silu_mul
from models.deepseek.kernels.gpu.sort_pairs import sort_pairs
from models.deepseek.kernels.gpu.weights import (
    TritonExpertWeights,
    TritonFp8ExpertWeights,
    TritonFp8LinearWeight,
    TritonLinearWeight,
)


def foreign(weight: object) -> KernelArgumentError:
    return KernelArgumentError(
        f"a {type(weight).__name__} cannot be used here: weights must come from TritonKernels"
    )


class TritonDense:
    """device: where weights are kept."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    # -- weights ---------------------------------------------------------------------------

    def linear_weight(self, weight: Tensor, dtype: torch.dtype) -> TritonLinearWeight:
        return TritonLinearWeight(weight.detach().to(self.device, dtype).contiguous())

    def fp8_linear_weight(self, rows: Fp8Rows, dtype: torch.dtype) -> TritonFp8LinearWeight | None:
        return TritonFp8LinearWeight.of(rows.move(lambda x: x.to(self.device)), dtype)

    def allocate_experts(
        self, num_slots: int, hidden: int, intermediate: int, dtype: torch.dtype
    ) -> TritonExpertWeights:
        return TritonExpertWeights(num_slots, hidden, intermediate, dtype, self.device)

    def allocate_fp8_experts(
        self, num_slots: int, hidden: int, intermediate: int, dtype: torch.dtype
    ) -> TritonFp8ExpertWeights:
        return TritonFp8ExpertWeights(num_slots, hidden, intermediate, dtype, self.device)

    # -- dense -----------------------------------------------------------------------------

    def linear(
        self, x: Tensor, weight: LinearWeight, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        if isinstance(weight, TritonLinearWeight):
            return dense(x, weight.weight, out_dtype)
        if isinstance(weight, TritonFp8LinearWeight):
            rows = x if x.stride(1) == 1 else x.contiguous()
            codes, scales = quantise(rows, ScaleFormat.F32_COLUMN, ue8m0=weight.ue8m0)
            return fp8_gemm(codes, scales, weight.codes, weight.scales, out_dtype or x.dtype)
        raise foreign(weight)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def add_rms_norm(self, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return add_rms_norm(residual, x, weight, eps)

    def mlp(self, x: Tensor, gate_up: LinearWeight, down: LinearWeight) -> Tensor:
        both = self.linear(x, gate_up)
        if isinstance(down, TritonFp8LinearWeight):
            codes, scales = quantise_silu_mul(both, ScaleFormat.F32_COLUMN, ue8m0=down.ue8m0)
            return fp8_gemm(codes, scales, down.codes, down.scales, x.dtype)
        return self.linear(silu_mul(both), down)

    def per_head(self, x: Tensor, weight: LinearWeight, num_heads: int) -> Tensor:
        return dense_per_head(x, heads_of(weight, num_heads))

    # -- experts ---------------------------------------------------------------------------

    def gate(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, spec: GateSpec
    ) -> tuple[Tensor, Tensor]:
        return gate(x, weight, bias, spec)

    def sort_pairs(self, slots: Tensor, num_slots: int) -> tuple[Tensor, Tensor, Tensor]:
        """pair_rows has a place for each of the T * K picks, since how many are valid is known on
        the device only: places from offsets[e] on hold -1."""
        layout = sort_pairs(slots, num_slots)
        return layout.pair_rows, layout.starts, layout.index

    def experts(
        self, x: Tensor, pair_rows: Tensor, offsets: Tensor, weights: ExpertWeights
    ) -> Tensor:
        """Rows of the result from offsets[e] on hold anything: no index points there."""
        if pair_rows.shape[0] == 0 or weights.num_slots == 0:
            return x.new_zeros(pair_rows.shape[0], x.shape[1])
        starts, ends = offsets[:-1], offsets[1:]
        expected = -(-pair_rows.shape[0] // weights.num_slots)
        if isinstance(weights, TritonExpertWeights):
            both = dense_grouped(x, weights.gate_up, pair_rows, starts, ends, expected)
            own = torch.arange(pair_rows.shape[0], dtype=torch.int32, device=x.device)
            hidden = silu_mul(both, limit=offsets[-1:])
            return dense_grouped(hidden, weights.down, own, starts, ends, expected)
        if not isinstance(weights, TritonFp8ExpertWeights):
            raise foreign(weights)
        codes, scales = quantise(x, ScaleFormat.F32_ROW, ue8m0=weights.ue8m0)
        codes, scales_of_pairs = permute(codes, pair_rows, scales)
        assert scales_of_pairs is not None
        both = grouped_gemm_contiguous(
            codes, scales_of_pairs, weights.gate_up, weights.gate_up_scales, ends, x.dtype,
            alignment=1, expected_rows=expected,
        )  # fmt: skip
        codes, scales = quantise_silu_mul(
            both, ScaleFormat.F32_ROW, ue8m0=weights.ue8m0, counts=offsets[-1:]
        )
        return grouped_gemm_contiguous(
            codes, scales, weights.down, weights.down_scales, ends, x.dtype,
            alignment=1, expected_rows=expected,
        )  # fmt: skip

    def combine_pairs(self, y: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return unpermute(y, index, weights)


def heads_of(weight: LinearWeight, num_heads: int) -> Tensor:
    """[H * b, a] -> [H, b, a]; of rows as they are only (the loader dequantises these)."""
    if not isinstance(weight, TritonLinearWeight):
        raise foreign(weight)
    return weight.weight.view(num_heads, -1, weight.in_features)
