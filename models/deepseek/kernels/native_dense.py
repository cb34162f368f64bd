"""Dense layers and norms in C++ (native/linear.cpp, native/pointwise.cpp), called on torch tensors.

Knows: what the C side of each call relies on. Shape letters as in base.py.
"""

from __future__ import annotations

import torch
from torch import Tensor, get_num_threads

from models.deepseek.kernels.base import LinearWeight
from models.deepseek.kernels.errors import KernelArgumentError
from models.deepseek.kernels.native_checks import float32, packed, rows
from models.deepseek.kernels.native_library import NativePart
from models.deepseek.kernels.native_weights import is_bf16


class NativeDense(NativePart):
    """The dense part of Kernels."""

    def linear(
        self, x: Tensor, weight: LinearWeight, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        weight = packed(weight, "weight")
        x = rows(x, "x", weight.in_features, weight.dtype)
        num_rows = x.shape[0]
        out = x.new_empty(num_rows, weight.out_features, dtype=out_dtype)
        if num_rows:
            self.library.linear(
                x.data_ptr(),
                x.stride(0),
                num_rows,
                weight.pointer,
                weight.out_features,
                weight.in_features,
                weight.format,
                out.data_ptr(),
                weight.out_features,
                is_bf16(out.dtype),
                get_num_threads(),
            )
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = rows(x, "x", weight.shape[0], x.dtype)
        out = x.new_empty(*x.shape)
        if x.shape[0]:
            self.library.rms_norm(
                x.data_ptr(),
                x.stride(0),
                x.shape[0],
                x.shape[1],
                is_bf16(x.dtype),
                float32(weight, "weight").data_ptr(),
                eps,
                out.data_ptr(),
                get_num_threads(),
            )
        return out

    def add_rms_norm(self, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = rows(x, "x", weight.shape[0], residual.dtype)
        if residual.shape != x.shape or (residual.shape[0] and residual.stride(-1) != 1):
            raise KernelArgumentError(
                f"residual {tuple(residual.shape)}: must be x's shape {tuple(x.shape)}, unit stride"
            )
        out = x.new_empty(*x.shape)
        if x.shape[0]:
            self.library.add_rms_norm(
                residual.data_ptr(),
                residual.stride(0),
                x.data_ptr(),
                x.stride(0),
                x.shape[0],
                x.shape[1],
                is_bf16(x.dtype),
                float32(weight, "weight").data_ptr(),
                eps,
                out.data_ptr(),
                get_num_threads(),
            )
        return out

    def mlp(self, x: Tensor, gate_up: LinearWeight, down: LinearWeight) -> Tensor:
        gate_up, down = packed(gate_up, "gate_up"), packed(down, "down")
        x = rows(x, "x", gate_up.in_features, gate_up.dtype)
        inter = down.in_features
        if gate_up.out_features != 2 * inter or down.dtype != gate_up.dtype:
            raise KernelArgumentError(
                f"gate_up has {gate_up.out_features} rows ({gate_up.dtype}): must be twice "
                f"down's {inter} columns ({down.dtype})"
            )
        out = x.new_empty(x.shape[0], down.out_features)
        if x.shape[0]:
            self.library.mlp(
                x.data_ptr(),
                x.stride(0),
                x.shape[0],
                gate_up.pointer,
                gate_up.in_features,
                inter,
                gate_up.format,
                down.pointer,
                down.out_features,
                down.format,
                out.data_ptr(),
                get_num_threads(),
            )
        return out
