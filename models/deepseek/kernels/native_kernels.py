"""The kernels in C++ (native/*.cpp), called through ctypes on the memory of torch tensors.

Each method checks what the C side relies on (dtype, layout, sizes; indices are checked there),
allocates the result and makes one call. Threads: at most torch.get_num_threads() at the call, from
a pool of the library's own, which never waits for a helper that has not begun (native/pool.cpp).
One instance may be used from several threads at once: scratch memory belongs to the calling
thread, and whoever finds the pool taken works alone.

Knows: which parts make up Kernels. Knows nothing of how the library is found or compiled
(native_open.py, build.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.deepseek.fp8 import Fp8Rows
from models.deepseek.kernels.base import AbsorbedMla, MlaShape, MlaWeights
from models.deepseek.kernels.mla_parts import latents_by_parts, mla_by_parts
from models.deepseek.kernels.native_attention import NativeAttention
from models.deepseek.kernels.native_checks import attention_misfit
from models.deepseek.kernels.native_dense import NativeDense
from models.deepseek.kernels.native_experts import NativeExperts
from models.deepseek.kernels.native_fp8 import NativeFp8ExpertWeights, NativeFp8LinearWeight
from models.deepseek.kernels.native_mla import NativeMla
from models.deepseek.kernels.native_open import open_library
from models.deepseek.kernels.native_weights import NativeExpertWeights, NativeLinearWeight
from models.interface import ForwardBatch


class NativeKernels(NativeDense, NativeExperts, NativeAttention):
    name = "native"

    def __init__(self, defines: tuple[str, ...] = ()) -> None:
        """Raises KernelsUnavailable. `defines` (native/simd.h) leave out instruction sets."""
        super().__init__(open_library(defines))
        self.description, self.build = self.library.description, self.library.build
        self.fp8_is_fast = bool(self.library.fp8_is_fast())

    def misfit(self, shape: MlaShape, dtype: torch.dtype, deterministic: bool) -> str | None:
        return attention_misfit(shape, dtype, deterministic)

    def fp8_cache_misfit(self, shape: MlaShape) -> str | None:
        return None

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

    def write_latents(
        self, layer: Tensor, latent: Tensor, k_rope: Tensor, batch: ForwardBatch, norm: Tensor,
        eps: float, cos_sin: Tensor,
    ) -> None:  # fmt: skip
        latents_by_parts(self, layer, latent, k_rope, batch, norm, eps, cos_sin)

    def absorbed_mla(self, weights: MlaWeights, shape: MlaShape, cos_sin: Tensor) -> AbsorbedMla:
        by_parts = mla_by_parts(self, weights, shape, cos_sin)
        return NativeMla(self, by_parts, weights, shape, cos_sin)
