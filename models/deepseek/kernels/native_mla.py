"""NativeMla: one attention layer whose steps run in a single call into the C library.

Knows: the record that native/mla.cpp reads. The parts' own checks are made once, when it is built;
each call checks what changes from step to step. Shape letters as in base.py.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from models.deepseek.kernels.base import LinearWeight, MlaShape, MlaWeights
from models.deepseek.kernels.errors import KernelArgumentError
from models.deepseek.kernels.mla_parts import mla_by_parts
from models.deepseek.kernels.native_weights import FP8_FORMAT, NativeLinearWeight
from models.interface import ForwardBatch

if TYPE_CHECKING:
    from models.deepseek.kernels.native_kernels import NativeKernels

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
        self, kernels: NativeKernels, weights: MlaWeights, shape: MlaShape, cos_sin: Tensor
    ) -> None:
        s, w = shape, weights
        self._kernels, self._weights, self._cos_sin = kernels, weights, cos_sin  # kept alive
        self._parts = mla_by_parts(kernels, weights, shape, cos_sin)
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
        if self.dtype == torch.bfloat16 and (cached % 2 or s.rope_dim % 2):
            raise KernelArgumentError(f"rank={s.rank}, rope_dim={s.rope_dim}: must be even in bf16")
        if cos_sin.dtype != torch.float32 or not cos_sin.is_contiguous():
            raise KernelArgumentError(f"cos_sin is {cos_sin.dtype}: must be contiguous float32")
        if cos_sin.shape[1] != s.rope_dim:
            raise KernelArgumentError(f"cos_sin has {cos_sin.shape[1]} columns: not {s.rope_dim}")
        o = _packed(w.o, "o", self.hidden, s.num_heads * s.value_dim)
        w_uk = _packed(w.w_uk, "w_uk", s.num_heads * s.rank, s.nope_dim)
        w_uv = _packed(w.w_uv, "w_uv", s.num_heads * s.value_dim, s.rank)
        for name, weight in (("w_uk", w_uk), ("w_uv", w_uv)):
            if weight.format & FP8_FORMAT:
                raise KernelArgumentError(f"{name} is in e4m3: must be dequantised")
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
        if not 0 < num_rows <= MAX_FUSED_ROWS:
            return self._parts(x, layer, batch)
        if x.shape[1] != self.hidden or x.dtype != self.dtype or x.stride(1) != 1:
            raise KernelArgumentError(
                f"x is {tuple(x.shape)} {x.dtype}: must be [T, {self.hidden}] {self.dtype}"
            )
        kernels = self._kernels
        kernels.check_cache(layer, self._width, self.dtype)
        out = x.new_empty((num_rows, self.hidden))
        kernels.check(
            kernels.library.mla(
                self._address,
                x.data_ptr(),
                x.stride(0),
                num_rows,
                layer.data_ptr(),
                layer.shape[0],
                layer.shape[1],
                *kernels.batch_pointers(batch, num_rows),
                out.data_ptr(),
                torch.get_num_threads(),
            )
        )
        return out


def _packed(
    weight: LinearWeight, name: str, out_features: int, in_features: int
) -> NativeLinearWeight:
    if not isinstance(weight, NativeLinearWeight):
        raise KernelArgumentError(f"{name} is a {type(weight).__name__}: must be of NativeKernels")
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
