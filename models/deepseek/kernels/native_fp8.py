"""Weights kept in e4m3 in the layout of the native kernels (native/fp8.h): each panel of 64 output
features is its scales, then its bytes; it is turned into the model dtype a run at a time, in the
cache, where it is multiplied.

Knows: how rows and scales become panels. Knows nothing of checkpoints.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.deepseek.fp8 import Fp8Rows
from models.deepseek.kernels.errors import KernelArgumentError
from models.deepseek.kernels.native_library import NativeLibrary
from models.deepseek.kernels.native_weights import (
    FP8_FORMAT,
    NativeExpertWeights,
    NativeLinearWeight,
    is_bf16,
)

PANEL = 64  # rows that share one run of scales


class NativeFp8LinearWeight(NativeLinearWeight):
    """A weight [N, C] of e4m3, packed once; `scales` [ceil(N/64), ceil(C/128)] fp32."""

    def __init__(
        self, library: NativeLibrary, values: Tensor, scales: Tensor, dtype: torch.dtype
    ) -> None:
        self._lib = library
        self.out_features, self.in_features = values.shape
        self.dtype = dtype
        self.is_bf16 = is_bf16(dtype)
        self.format = int(self.is_bf16) | FP8_FORMAT
        shape = (self.out_features, self.in_features, self.format)
        self.nbytes: int = library.fp8_packed_bytes(*shape)
        self.data = torch.empty(self.nbytes, dtype=torch.uint8)
        self.pointer = self.data.data_ptr()
        library.advise_large_pages(self.pointer, self.nbytes)
        values, scales = values.contiguous(), scales.contiguous()
        threads = torch.get_num_threads()
        library.fp8_pack(values.data_ptr(), scales.data_ptr(), *shape, self.pointer, threads)

    @classmethod
    def of(
        cls, library: NativeLibrary, rows: Fp8Rows, dtype: torch.dtype
    ) -> NativeFp8LinearWeight | None:
        """None where rows of one panel have different scales."""
        scales = rows.scales_of_groups(PANEL)
        return None if scales is None else cls(library, rows.values, scales, dtype)


class NativeFp8ExpertWeights(NativeExpertWeights):
    """[e, bundle bytes], panels as in NativeExpertWeights, their scales among them."""

    fp8 = True

    def store(self, slot: int, gate: Tensor, up: Tensor, down: Tensor) -> None:
        raise KernelArgumentError("these experts are kept in e4m3: use store_fp8")

    def store_fp8(self, slot: int, gate: Fp8Rows, up: Fp8Rows, down: Fp8Rows) -> None:
        wide, tall = (self.intermediate, self.hidden), (self.hidden, self.intermediate)
        parts: list[Tensor] = []
        for name, rows, shape in (("gate", gate, wide), ("up", up, wide), ("down", down, tall)):
            if tuple(rows.values.shape) != shape:
                raise KernelArgumentError(f"{name} is {tuple(rows.values.shape)}: must be {shape}")
            scales = rows.scales_of_groups(PANEL)
            if scales is None:
                raise KernelArgumentError(f"{name}: scales differ among rows of one {PANEL}")
            parts += [rows.values.contiguous(), scales]
        self._lib.fp8_store_expert(
            *(x.data_ptr() for x in parts),
            self.hidden,
            self.intermediate,
            self.format,
            self._slot(slot).data_ptr(),
        )
