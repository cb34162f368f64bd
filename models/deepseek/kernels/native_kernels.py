"""The kernels in C++ (native/*.cpp), called through ctypes on the memory of torch tensors.

Each method checks what the C side relies on (dtype, layout, sizes; indices are checked there),
allocates the result and makes one call. Threads: at most torch.get_num_threads() at the call, from
a pool of the library's own, which never waits for a helper that has not begun (native/pool.cpp).
One instance may be used from several threads at once: scratch memory belongs to the calling
thread, and whoever finds the pool taken works alone.

Knows nothing of how the library is compiled (build.py). Shape letters as in base.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.deepseek.fp8 import Fp8Rows
from models.deepseek.kernels.base import (
    AbsorbedMla,
    ExpertWeights,
    GateSpec,
    LinearWeight,
    MlaShape,
    MlaWeights,
)
from models.deepseek.kernels.build import build
from models.deepseek.kernels.errors import KernelArgumentError
from models.deepseek.kernels.native_checks import (
    MAX_ROPE_DIM,
    attention_misfit,
    check_even,
    check_gate,
    contiguous,
    float32,
    foreign_weight,
    positions_of,
    rows,
    step_pointers,
    typed,
    unit_stride,
)
from models.deepseek.kernels.native_fp8 import NativeFp8ExpertWeights, NativeFp8LinearWeight
from models.deepseek.kernels.native_library import FAILURES, NativeLibrary, load_library
from models.deepseek.kernels.native_mla import NativeMla
from models.deepseek.kernels.native_weights import (
    FP8_FORMAT,
    NativeExpertWeights,
    NativeLinearWeight,
    is_bf16,
)
from models.interface import ForwardBatch

_threads = torch.get_num_threads


class NativeKernels:
    name = "native"

    def __init__(self, defines: tuple[str, ...] = ()) -> None:
        """Raises KernelsUnavailable. `defines` (native/simd.h) leave out instruction sets."""
        self.library: NativeLibrary = load_library(build(defines))
        self.description = self.library.description
        self.fp8_is_fast = bool(self.library.fp8_is_fast())
        self._last_batch: tuple[ForwardBatch, int, tuple[int, ...]] | None = None

    def misfit(self, shape: MlaShape, dtype: torch.dtype, deterministic: bool) -> str | None:
        return attention_misfit(shape, dtype, deterministic)

    # -- weights ---------------------------------------------------------------------------
    def linear_weight(self, weight: Tensor, dtype: torch.dtype) -> NativeLinearWeight:
        return NativeLinearWeight(self.library, weight, dtype)

    def allocate_experts(
        self, num_slots: int, hidden: int, intermediate: int, dtype: torch.dtype
    ) -> NativeExpertWeights:
        return NativeExpertWeights(self.library, num_slots, hidden, intermediate, dtype)

    def fp8_linear_weight(self, rows: Fp8Rows, dtype: torch.dtype) -> NativeFp8LinearWeight | None:
        return NativeFp8LinearWeight.of(self.library, rows, dtype)

    def allocate_fp8_experts(
        self, num_slots: int, hidden: int, intermediate: int, dtype: torch.dtype
    ) -> NativeFp8ExpertWeights:
        return NativeFp8ExpertWeights(self.library, num_slots, hidden, intermediate, dtype)

    # -- dense -----------------------------------------------------------------------------
    def linear(
        self, x: Tensor, weight: LinearWeight, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        if not isinstance(weight, NativeLinearWeight):
            raise foreign_weight(weight)
        x = rows(x, "x", weight.in_features, weight.dtype)
        num_rows = x.shape[0]
        out = x.new_empty((num_rows, weight.out_features), dtype=out_dtype)
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
                _threads(),
            )
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = rows(x, "x", weight.shape[0], x.dtype)
        out = x.new_empty(x.shape)
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
                _threads(),
            )
        return out

    def add_rms_norm(self, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = rows(x, "x", weight.shape[0], residual.dtype)
        if residual.shape != x.shape or (residual.shape[0] and residual.stride(-1) != 1):
            raise KernelArgumentError(
                f"residual {tuple(residual.shape)}: must be x's shape {tuple(x.shape)}, unit stride"
            )
        out = x.new_empty(x.shape)
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
                _threads(),
            )
        return out

    def mlp(self, x: Tensor, gate_up: LinearWeight, down: LinearWeight) -> Tensor:
        if not isinstance(gate_up, NativeLinearWeight):
            raise foreign_weight(gate_up)
        if not isinstance(down, NativeLinearWeight):
            raise foreign_weight(down)
        x = rows(x, "x", gate_up.in_features, gate_up.dtype)
        inter = down.in_features
        if gate_up.out_features != 2 * inter or down.dtype != gate_up.dtype:
            raise KernelArgumentError(
                f"gate_up has {gate_up.out_features} rows ({gate_up.dtype}): must be twice "
                f"down's {inter} columns ({down.dtype})"
            )
        out = x.new_empty((x.shape[0], down.out_features))
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
                _threads(),
            )
        return out

    # -- experts ---------------------------------------------------------------------------
    def gate(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, spec: GateSpec
    ) -> tuple[Tensor, Tensor]:
        num_experts, hidden = weight.shape
        x = rows(x, "x", hidden, x.dtype)
        check_gate(spec, num_experts)
        ids = x.new_empty((x.shape[0], spec.top_k), dtype=torch.int32)
        weights = x.new_empty((x.shape[0], spec.top_k), dtype=torch.float32)
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
                _threads(),
            )
        return ids, weights

    def experts(
        self, x: Tensor, pair_rows: Tensor, offsets: Tensor, weights: ExpertWeights
    ) -> Tensor:
        if not isinstance(weights, NativeExpertWeights):
            raise foreign_weight(weights)
        x = rows(x, "x", weights.hidden, weights.dtype)
        pair_rows = typed(pair_rows, "pair_rows", torch.int32)
        offsets = typed(offsets, "offsets", torch.int32)
        if offsets.shape[0] != weights.num_slots + 1:
            raise KernelArgumentError(
                f"offsets has {offsets.shape[0]} entries: must be slots + 1 = "
                f"{weights.num_slots + 1}"
            )
        out = x.new_empty((pair_rows.shape[0], weights.hidden))
        self.check(
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
                _threads(),
            )
        )
        return out

    def sort_pairs(self, slots: Tensor, num_slots: int) -> tuple[Tensor, Tensor, Tensor]:
        slots = typed(slots, "slots", torch.int32)
        pairs = slots.numel()
        pair_rows = slots.new_empty(pairs)
        offsets = slots.new_empty(num_slots + 1)
        index = slots.new_empty(slots.shape, dtype=torch.int64)
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
        out = y.new_empty((index.shape[0], y.shape[1]), dtype=torch.float32)
        self.check(
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
                _threads(),
            )
        )
        return out

    # -- attention -------------------------------------------------------------------------
    def rope(self, x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
        x = unit_stride(x)
        num_rows, num_heads, dim = x.shape
        if dim % 2 or dim > MAX_ROPE_DIM or cos_sin.shape[1] != dim:
            raise KernelArgumentError(
                f"x has rope dim {dim}, cos_sin {cos_sin.shape[1]}: must be equal, even, at most "
                f"{MAX_ROPE_DIM}"
            )
        positions = positions_of(positions, num_rows)
        out = x.new_empty(x.shape)
        self.check(
            self.library.rope(
                x.data_ptr(),
                x.stride(0),
                x.stride(1),
                num_rows,
                num_heads,
                dim,
                is_bf16(x.dtype),
                positions.data_ptr(),
                float32(cos_sin, "cos_sin").data_ptr(),
                cos_sin.shape[0],
                out.data_ptr(),
                _threads(),
            )
        )
        return out

    def write_cache(
        self, layer: Tensor, latent: Tensor, k_rope: Tensor, slot_mapping: Tensor
    ) -> None:
        rank, rope = latent.shape[1], k_rope.shape[1]
        self.check_cache(layer, rank + rope, layer.dtype)
        latent = rows(latent, "latent", rank, layer.dtype)
        k_rope = rows(k_rope, "k_rope", rope, layer.dtype)
        slot_mapping = typed(slot_mapping, "slot_mapping", torch.int64)
        if not latent.shape[0] == k_rope.shape[0] == slot_mapping.shape[0]:
            raise KernelArgumentError(
                f"latent, k_rope, slot_mapping have {latent.shape[0]}, {k_rope.shape[0]}, "
                f"{slot_mapping.shape[0]} rows: must be equal"
            )
        size = layer.element_size()
        self.check(
            self.library.write_cache(
                layer.data_ptr(),
                layer.shape[0] * layer.shape[1],
                latent.data_ptr(),
                latent.stride(0) * size,
                k_rope.data_ptr(),
                k_rope.stride(0) * size,
                latent.shape[0],
                rank * size,
                rope * size,
                slot_mapping.data_ptr(),
            )
        )

    def per_head(self, x: Tensor, weight: LinearWeight, num_heads: int) -> Tensor:
        if not isinstance(weight, NativeLinearWeight) or weight.format & FP8_FORMAT:
            raise foreign_weight(weight)
        x = unit_stride(x)
        num_rows, heads, width = x.shape
        if heads != num_heads or weight.out_features % num_heads or width != weight.in_features:
            raise KernelArgumentError(
                f"x {tuple(x.shape)} with weight [{weight.out_features}, {weight.in_features}]: "
                f"must be [T, {num_heads}, {weight.in_features}], rows divisible by the heads"
            )
        if x.dtype != weight.dtype:
            raise KernelArgumentError(f"x is {x.dtype}: must be the weight's {weight.dtype}")
        out = x.new_empty((num_rows, num_heads, weight.out_features // num_heads))
        if num_rows:
            self.library.per_head(
                x.data_ptr(),
                x.stride(0),
                x.stride(1),
                num_rows,
                num_heads,
                weight.pointer,
                weight.out_features,
                weight.in_features,
                weight.is_bf16,
                out.data_ptr(),
                _threads(),
            )
        return out

    def latent_attention(
        self, q_latent: Tensor, q_rope: Tensor, layer: Tensor, batch: ForwardBatch, scale: float
    ) -> Tensor:
        q_latent, q_rope = unit_stride(q_latent), unit_stride(q_rope)
        num_rows, num_heads, rank = q_latent.shape
        rope = q_rope.shape[2]
        if q_rope.shape[:2] != q_latent.shape[:2] or q_rope.dtype != q_latent.dtype:
            raise KernelArgumentError(
                f"q_rope {tuple(q_rope.shape)} {q_rope.dtype}: must have q_latent's rows, heads "
                f"and dtype ({tuple(q_latent.shape)} {q_latent.dtype})"
            )
        self.check_cache(layer, rank + rope, q_latent.dtype)
        check_even("kv_lora_rank + qk_rope_head_dim", rank + rope, layer.dtype)
        out = q_latent.new_empty(q_latent.shape)
        self.check(
            self.library.latent_attention(
                q_latent.data_ptr(),
                q_latent.stride(0),
                q_latent.stride(1),
                q_rope.data_ptr(),
                q_rope.stride(0),
                q_rope.stride(1),
                num_rows,
                num_heads,
                rank,
                rope,
                layer.data_ptr(),
                layer.shape[0],
                layer.shape[1],
                *self.batch_pointers(batch, num_rows)[1:],
                scale,
                is_bf16(layer.dtype),
                out.data_ptr(),
                _threads(),
            )
        )
        return out

    def naive_attention(
        self,
        q: Tensor,
        layer: Tensor,
        kv_b: LinearWeight,
        batch: ForwardBatch,
        scale: float,
        value_dim: int,
    ) -> Tensor:
        if not isinstance(kv_b, NativeLinearWeight) or kv_b.format & FP8_FORMAT:
            raise foreign_weight(kv_b)
        q = unit_stride(q)
        num_rows, num_heads, width = q.shape
        rank = kv_b.in_features
        nope = kv_b.out_features // num_heads - value_dim
        rope = layer.shape[2] - rank
        if nope + rope != width or kv_b.out_features != num_heads * (nope + value_dim):
            raise KernelArgumentError(
                f"q {tuple(q.shape)} with kv_b [{kv_b.out_features}, {rank}], cache width "
                f"{layer.shape[2]}, value_dim {value_dim}: must be q [T, H, n + r], kv_b "
                f"[H * (n + v), c], cache c + r"
            )
        self.check_cache(layer, rank + rope, q.dtype)
        if kv_b.dtype != q.dtype:
            raise KernelArgumentError(f"kv_b is {kv_b.dtype}: must be q's {q.dtype}")
        for name, size in (("rank", rank), ("nope", nope), ("rope", rope), ("value", value_dim)):
            check_even(name, size, q.dtype)
        out = q.new_empty((num_rows, num_heads, value_dim))
        self.check(
            self.library.naive_attention(
                q.data_ptr(),
                q.stride(0),
                q.stride(1),
                num_rows,
                num_heads,
                rank,
                nope,
                rope,
                value_dim,
                layer.data_ptr(),
                layer.shape[0],
                layer.shape[1],
                kv_b.pointer,
                *self.batch_pointers(batch, num_rows)[1:],
                scale,
                kv_b.is_bf16,
                out.data_ptr(),
                _threads(),
            )
        )
        return out

    def absorbed_mla(self, weights: MlaWeights, shape: MlaShape, cos_sin: Tensor) -> AbsorbedMla:
        return NativeMla(self, weights, shape, cos_sin)

    # -- for the fused layer ---------------------------------------------------------------
    @staticmethod
    def check(code: int) -> None:
        if code:
            raise KernelArgumentError(FAILURES[code])

    @staticmethod
    def check_cache(layer: Tensor, width: int, dtype: torch.dtype) -> None:
        if layer.shape[2] != width or layer.dtype != dtype or not layer.is_contiguous():
            raise KernelArgumentError(
                f"layer is {tuple(layer.shape)} {layer.dtype}: must be contiguous "
                f"[blocks, block, {width}] {dtype}"
            )

    def batch_pointers(self, batch: ForwardBatch, num_rows: int) -> tuple[int, ...]:
        """slot_mapping, positions, query_start, tables, sequences, table width.

        Every layer of a step asks for the same batch: the last answer is kept, with the batch, so
        that its tensors live.
        """
        last = self._last_batch
        if last is None or last[0] is not batch or last[1] != num_rows:
            last = self._last_batch = (batch, num_rows, step_pointers(batch, num_rows))
        return last[2]
