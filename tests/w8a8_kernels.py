"""The torch kernels, but weights in e4m3 are multiplied as TritonKernels does: a twin for tests."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from models.deepseek.fp8 import Fp8Rows, linear_w8a8
from models.deepseek.kernels.gpu.weights import TritonFp8ExpertWeights, TritonFp8LinearWeight
from models.deepseek.kernels.torch_kernels import TorchKernels


class W8A8(TorchKernels):
    """Rows are quantised too: a scale for 128 channels, a power of two where the weight's is."""

    def fp8_linear_weight(self, rows: Fp8Rows, dtype: torch.dtype) -> Any:
        return TritonFp8LinearWeight.of(rows, dtype)

    def allocate_fp8_experts(self, *shape: Any) -> Any:
        return TritonFp8ExpertWeights(*shape, torch.device("cpu"))

    def linear(self, x: Tensor, weight: Any, out_dtype: torch.dtype | None = None) -> Tensor:
        if not isinstance(weight, TritonFp8LinearWeight):
            return super().linear(x, weight, out_dtype)
        return linear_w8a8(
            x, weight.codes, weight.scales, ue8m0=weight.ue8m0, out_dtype=out_dtype or x.dtype
        )

    def mlp(self, x: Tensor, gate_up: Any, down: Any) -> Tensor:
        gate, up = self.linear(x, gate_up).float().chunk(2, dim=1)
        return self.linear((torch.nn.functional.silu(gate) * up).to(x.dtype), down)

    def experts(self, x: Tensor, pair_rows: Tensor, offsets: Tensor, weights: Any) -> Tensor:
        if not isinstance(weights, TritonFp8ExpertWeights):
            return super().experts(x, pair_rows, offsets, weights)
        out = x.new_zeros(pair_rows.shape[0], x.shape[1])
        w, dtype = weights, x.dtype
        for slot, (a, b) in enumerate(itertools.pairwise(offsets.tolist())):
            gate_up = TritonFp8LinearWeight(w.gate_up[slot], w.gate_up_scales[slot], dtype)
            down = TritonFp8LinearWeight(w.down[slot], w.down_scales[slot], dtype)
            gate_up.ue8m0 = down.ue8m0 = w.ue8m0
            if a < b:
                out[a:b] = self.mlp(x[pair_rows[a:b].long()], gate_up, down)
        return out
