"""NativeMla: one attention layer whose steps run in a single call into the C library.

Knows: the record that native/mla.cpp reads. The parts' own checks are made once, when it is built;
each call checks what changes from step to step. Shape letters as in base.py.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor, get_num_threads

from models.deepseek.kernels.base import AbsorbedMla, LinearWeight, MlaShape, MlaWeights
from models.deepseek.kernels.errors import KernelArgumentError
from models.deepseek.kernels.fp8_latents import is_fp8
from models.deepseek.kernels.native_attention import NativeAttention
from models.deepseek.kernels.native_checks import (
    check_cache,
    check_even,
    dequantised,
    packed,
    rope_table,
    rows,
)
from models.deepseek.kernels.native_library import check
from models.deepseek.kernels.native_weights import NativeLinearWeight
from models.interface import ForwardBatch

# More rows than this go by parts: there the calls cost nothing beside the arithmetic, and the
# memory between the steps is given back.
MAX_FUSED_ROWS = 256

_L, _P = ctypes.c_int64, ctypes.c_void_p


class _Record(ctypes.Structure):
    _fields_ = [
        *((name, _L) for name in ("hidden", "heads", "nope", "rope", "rank", "value")),
        *((name, _L) for name in ("query_rank", "max_position")),
        *((name, _P) for name in ("qkv_a", "q_b", "w_uk", "w_uv", "o")),
        *((name, _P) for name in ("q_a_norm", "kv_a_norm", "cos_sin")),
        ("scale", ctypes.c_float),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("is_bf16", "qkv_a_format", "q_b_format", "o_format")),
    ]


class NativeMla:
    """Callable: x [T, D] normed, layer [blocks, block, c + r], batch -> [T, D]."""

    def __init__(
        self,
        calls: NativeAttention,
        by_parts: AbsorbedMla,
        weights: MlaWeights,
        shape: MlaShape,
        cos_sin: Tensor,
    ) -> None:
        """by_parts: the same layer as a chain of kernels, for many rows at once."""
        s, w = shape, weights
        cos_sin = rope_table(cos_sin, s.rope_dim)
        self._calls, self._by_parts = calls, by_parts
        self._weights, self._cos_sin = weights, cos_sin  # kept alive
        query_rank = 0 if w.q_b is None else w.q_b.in_features
        queries, cached = s.num_heads * (s.nope_dim + s.rope_dim), s.rank + s.rope_dim
        first = query_rank or queries
        qkv_a = _packed(w.qkv_a, "qkv_a", first + cached, w.qkv_a.in_features)
        self.hidden, self.dtype = qkv_a.in_features, qkv_a.dtype
        self._width = cached
        norm = q_b = None
        if w.q_b is not None:
            q_b = _packed(w.q_b, "q_b", queries, query_rank)
            norm = _vector(w.q_a_norm, "q_a_norm", query_rank).data_ptr()
        check_even("kv_lora_rank + qk_rope_head_dim", cached, self.dtype)
        o = _packed(w.o, "o", self.hidden, s.num_heads * s.value_dim)
        w_uk = dequantised(_packed(w.w_uk, "w_uk", s.num_heads * s.rank, s.nope_dim), "w_uk")
        w_uv = dequantised(_packed(w.w_uv, "w_uv", s.num_heads * s.value_dim, s.rank), "w_uv")
        self._record = _Record(
            hidden=self.hidden,
            heads=s.num_heads,
            nope=s.nope_dim,
            rope=s.rope_dim,
            rank=s.rank,
            value=s.value_dim,
            query_rank=query_rank,
            max_position=cos_sin.shape[0],
            qkv_a=qkv_a.pointer,
            q_b=None if q_b is None else q_b.pointer,
            w_uk=w_uk.pointer,
            w_uv=w_uv.pointer,
            o=o.pointer,
            q_a_norm=norm,
            kv_a_norm=_vector(w.kv_a_norm, "kv_a_norm", s.rank).data_ptr(),
            cos_sin=cos_sin.data_ptr(),
            scale=s.scale,
            eps=s.norm_eps,
            is_bf16=qkv_a.is_bf16,
            qkv_a_format=qkv_a.format,
            q_b_format=0 if q_b is None else q_b.format,
            o_format=o.format,
        )
        self._address = ctypes.addressof(self._record)

    def __call__(self, x: Tensor, layer: Tensor, batch: ForwardBatch) -> Tensor:
        num_rows = x.shape[0]
        if num_rows > MAX_FUSED_ROWS or is_fp8(layer):
            return self._by_parts(x, layer, batch)
        if not num_rows:  # a rank without work, which others wait for
            return x.new_empty(0, self.hidden)
        x = rows(x, "x", self.hidden, self.dtype)
        check_cache(layer, self._width, self.dtype)
        out = x.new_empty(num_rows, self.hidden)
        check(
            self._calls.library.mla(
                self._address,
                x.data_ptr(),
                x.stride(0),
                num_rows,
                layer.data_ptr(),
                layer.shape[0],
                layer.shape[1],
                *self._calls.batch_pointers(batch, num_rows),
                out.data_ptr(),
                get_num_threads(),
            )
        )
        return out


def _packed(
    weight: LinearWeight, name: str, out_features: int, in_features: int
) -> NativeLinearWeight:
    weight = packed(weight, name)
    if (weight.out_features, weight.in_features) != (out_features, in_features):
        raise KernelArgumentError(
            f"{name} is [{weight.out_features}, {weight.in_features}]: "
            f"must be [{out_features}, {in_features}]"
        )
    return weight


def _vector(x: Tensor | None, name: str, size: int) -> Tensor:
    if x is None or x.dtype != torch.float32 or tuple(x.shape) != (size,) or x.stride(0) != 1:
        found = "absent" if x is None else f"{tuple(x.shape)} {x.dtype}"
        raise KernelArgumentError(f"{name} is {found}: must be [{size}] float32")
    return x
