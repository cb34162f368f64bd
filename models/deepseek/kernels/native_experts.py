"""Routing and grouped experts in C++ (native/experts.cpp), called on torch tensors.

Knows: what the C side of each call relies on; indices are checked there. Shape letters as in
base.py.
"""

from __future__ import annotations

import torch
from torch import Tensor, get_num_threads

from models.deepseek.kernels.base import ExpertWeights, GateSpec
from models.deepseek.kernels.errors import KernelArgumentError
from models.deepseek.kernels.native_checks import (
    check_gate,
    contiguous,
    float32,
    foreign_weight,
    rows,
    typed,
)
from models.deepseek.kernels.native_library import NativePart, check
from models.deepseek.kernels.native_weights import NativeExpertWeights, is_bf16


class NativeExperts(NativePart):
    """The part of Kernels between the gate and the combined result."""

    def gate(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, spec: GateSpec
    ) -> tuple[Tensor, Tensor]:
        num_experts, hidden = weight.shape
        x = rows(x, "x", hidden, x.dtype)
        check_gate(spec, num_experts)
        ids = x.new_empty(x.shape[0], spec.top_k, dtype=torch.int32)
        weights = x.new_empty(x.shape[0], spec.top_k, dtype=torch.float32)
        if x.shape[0]:
            self.library.gate(
                x.data_ptr(),
                x.stride(0),
                x.shape[0],
                is_bf16(x.dtype),
                float32(weight, "weight").data_ptr(),
                None if bias is None else float32(bias, "bias").data_ptr(),
                num_experts,
                hidden,
                spec.top_k,
                spec.num_groups,
                spec.topk_groups,
                spec.scoring == "sigmoid",
                spec.group_score == "top2",
                spec.renormalise,
                spec.scale,
                ids.data_ptr(),
                weights.data_ptr(),
                get_num_threads(),
            )
        return ids, weights

    def experts(
        self, x: Tensor, pair_rows: Tensor, offsets: Tensor, weights: ExpertWeights
    ) -> Tensor:
        if not isinstance(weights, NativeExpertWeights):
            raise foreign_weight(weights, "weights")
        x = rows(x, "x", weights.hidden, weights.dtype)
        pair_rows = typed(pair_rows, "pair_rows", torch.int32)
        offsets = typed(offsets, "offsets", torch.int32)
        if offsets.shape[0] != weights.num_slots + 1:
            raise KernelArgumentError(
                f"offsets has {offsets.shape[0]} entries: must be slots + 1 = "
                f"{weights.num_slots + 1}"
            )
        out = x.new_empty(pair_rows.shape[0], weights.hidden)
        check(
            self.library.experts(
                x.data_ptr(),
                x.shape[0],
                x.stride(0),
                pair_rows.data_ptr(),
                pair_rows.shape[0],
                offsets.data_ptr(),
                weights.pointer,
                weights.num_slots,
                weights.hidden,
                weights.intermediate,
                weights.format,
                out.data_ptr(),
                get_num_threads(),
            )
        )
        return out

    def sort_pairs(self, slots: Tensor, num_slots: int) -> tuple[Tensor, Tensor, Tensor]:
        slots = typed(slots, "slots", torch.int32)
        pairs = slots.numel()
        pair_rows = slots.new_empty(pairs)
        offsets = slots.new_empty(num_slots + 1)
        index = slots.new_empty(*slots.shape, dtype=torch.int64)
        valid = self.library.sort_pairs(
            slots.data_ptr(),
            slots.shape[0],
            slots.shape[1],
            num_slots,
            pair_rows.data_ptr(),
            offsets.data_ptr(),
            index.data_ptr(),
        )
        if valid < 0:
            raise KernelArgumentError(f"slots: an entry is not in -1..{num_slots - 1}")
        return (pair_rows if valid == pairs else pair_rows[:valid]), offsets, index

    def combine_pairs(self, y: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        y = contiguous(y)
        index = typed(index, "index", torch.int64)
        weights = typed(weights, "weights", torch.float32)
        if weights.shape != index.shape:
            raise KernelArgumentError(
                f"weights {tuple(weights.shape)}: must be index's shape {tuple(index.shape)}"
            )
        out = y.new_empty(index.shape[0], y.shape[1], dtype=torch.float32)
        check(
            self.library.combine(
                y.data_ptr(),
                y.shape[0],
                y.shape[1],
                is_bf16(y.dtype),
                index.data_ptr(),
                weights.data_ptr(),
                index.shape[0],
                index.shape[1],
                out.data_ptr(),
                get_num_threads(),
            )
        )
        return out
