"""The steps of latent attention in C++ (native/attention.cpp), called on torch tensors.

Knows: what the C side of each call relies on; indices are checked there. Knows nothing of a layer
as a whole (native_mla.py). Shape letters as in base.py.
"""

from __future__ import annotations

import torch
from torch import Tensor, get_num_threads

from models.deepseek.kernels.base import LinearWeight
from models.deepseek.kernels.errors import KernelArgumentError
from models.deepseek.kernels.fp8_latents import is_fp8, pack_rows
from models.deepseek.kernels.native_checks import (
    check_cache,
    check_even,
    check_latents,
    dequantised,
    positions_of,
    rope_table,
    rows,
    step_pointers,
    typed,
    unit_stride,
)
from models.deepseek.kernels.native_library import NativeLibrary, NativePart, check
from models.deepseek.kernels.native_weights import is_bf16
from models.interface import ForwardBatch


class NativeAttention(NativePart):
    """The attention part of Kernels, but for the fused layer."""

    def __init__(self, library: NativeLibrary) -> None:
        super().__init__(library)
        self._last_batch: tuple[ForwardBatch, int, tuple[int | None, ...]] | None = None

    def rope(self, x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
        x = unit_stride(x)
        num_rows, num_heads, dim = x.shape
        cos_sin = rope_table(cos_sin, dim)
        positions = positions_of(positions, num_rows)
        out = x.new_empty(*x.shape)
        check(
            self.library.rope(
                x.data_ptr(),
                x.stride(0),
                x.stride(1),
                num_rows,
                num_heads,
                dim,
                is_bf16(x.dtype),
                positions.data_ptr(),
                cos_sin.data_ptr(),
                cos_sin.shape[0],
                out.data_ptr(),
                get_num_threads(),
            )
        )
        return out

    def write_cache(
        self, layer: Tensor, latent: Tensor, k_rope: Tensor, slot_mapping: Tensor
    ) -> None:
        if is_fp8(layer):  # bytes are copied: where they are cut in two is all the same
            packed = pack_rows(latent, k_rope)
            latent, k_rope = packed[:, : latent.shape[1]], packed[:, latent.shape[1] :]
        rank, rope = latent.shape[1], k_rope.shape[1]
        check_cache(layer, rank + rope, layer.dtype)
        latent = rows(latent, "latent", rank, layer.dtype)
        k_rope = rows(k_rope, "k_rope", rope, layer.dtype)
        slot_mapping = typed(slot_mapping, "slot_mapping", torch.int64)
        if not latent.shape[0] == k_rope.shape[0] == slot_mapping.shape[0]:
            raise KernelArgumentError(
                f"latent, k_rope, slot_mapping have {latent.shape[0]}, {k_rope.shape[0]}, "
                f"{slot_mapping.shape[0]} rows: must be equal"
            )
        size = layer.element_size()
        check(
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
        weight = dequantised(weight, "weight")
        x = unit_stride(x)
        num_rows, heads, width = x.shape
        if heads != num_heads or weight.out_features % num_heads or width != weight.in_features:
            raise KernelArgumentError(
                f"x {tuple(x.shape)} with weight [{weight.out_features}, {weight.in_features}]: "
                f"must be [T, {num_heads}, {weight.in_features}], rows divisible by the heads"
            )
        if x.dtype != weight.dtype:
            raise KernelArgumentError(f"x is {x.dtype}: must be the weight's {weight.dtype}")
        out = x.new_empty(num_rows, num_heads, weight.out_features // num_heads)
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
                get_num_threads(),
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
        row_bytes = check_latents(layer, rank, rope, q_latent.dtype)
        check_even("kv_lora_rank + qk_rope_head_dim", rank + rope, q_latent.dtype)
        out = q_latent.new_empty(*q_latent.shape)
        check(
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
                row_bytes,
                layer.shape[0],
                layer.shape[1],
                *self.batch_pointers(batch, num_rows)[1:],
                scale,
                is_bf16(q_latent.dtype),
                out.data_ptr(),
                get_num_threads(),
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
        kv_b = dequantised(kv_b, "kv_b")
        q = unit_stride(q)
        num_rows, num_heads, width = q.shape
        rank = kv_b.in_features
        nope = kv_b.out_features // num_heads - value_dim
        rope = width - nope if is_fp8(layer) else layer.shape[2] - rank
        if nope + rope != width or kv_b.out_features != num_heads * (nope + value_dim):
            raise KernelArgumentError(
                f"q {tuple(q.shape)} with kv_b [{kv_b.out_features}, {rank}], cache width "
                f"{layer.shape[2]}, value_dim {value_dim}: must be q [T, H, n + r], kv_b "
                f"[H * (n + v), c], cache c + r"
            )
        row_bytes = check_latents(layer, rank, rope, q.dtype)
        if kv_b.dtype != q.dtype:
            raise KernelArgumentError(f"kv_b is {kv_b.dtype}: must be q's {q.dtype}")
        for name, size in (("rank", rank), ("nope", nope), ("rope", rope), ("value", value_dim)):
            check_even(name, size, q.dtype)
        out = q.new_empty(num_rows, num_heads, value_dim)
        check(
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
                row_bytes,
                layer.shape[0],
                layer.shape[1],
                kv_b.pointer,
                *self.batch_pointers(batch, num_rows)[1:],
                scale,
                kv_b.is_bf16,
                out.data_ptr(),
                get_num_threads(),
            )
        )
        return out

    def batch_pointers(self, batch: ForwardBatch, num_rows: int) -> tuple[int | None, ...]:
        """step_pointers(): every layer of a step asks for the same batch, so the last answer is
        kept, with the batch, so that its tensors live."""
        last = self._last_batch
        if last is None or last[0] is not batch or last[1] != num_rows:
            last = self._last_batch = (batch, num_rows, step_pointers(batch, num_rows))
        return last[2]
