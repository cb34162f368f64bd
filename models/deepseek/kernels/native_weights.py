"""Weights in the layout of the native kernels: panels of 64 output features (native/gemm.h)."""

from __future__ import annotations

import torch
from torch import Tensor

from ep.bundle import Bundle
from models.deepseek.kernels.errors import KernelArgumentError
from models.deepseek.kernels.native_library import NativeLibrary

FP8_FORMAT = 2  # native/api.h; the lowest bit of a format says whether rows are bfloat16


def is_bf16(dtype: torch.dtype) -> bool:
    """Raises KernelArgumentError for what is neither bfloat16 nor float32."""
    if dtype == torch.bfloat16:
        return True
    if dtype == torch.float32:
        return False
    raise KernelArgumentError(f"dtype {dtype}: must be torch.float32 or torch.bfloat16")


class NativeLinearWeight:
    """A weight [N, C], packed once."""

    def __init__(self, library: NativeLibrary, weight: Tensor, dtype: torch.dtype) -> None:
        self._lib = library
        self.out_features, self.in_features = weight.shape
        self.dtype = dtype
        self.is_bf16 = is_bf16(dtype)
        self.format = int(self.is_bf16)
        shape = (self.out_features, self.in_features, self.format)
        self.nbytes: int = library.packed_bytes(*shape)
        self.data = torch.empty(self.nbytes, dtype=torch.uint8)
        self.pointer = self.data.data_ptr()
        library.advise_large_pages(self.pointer, self.nbytes)
        source = weight.detach().to(dtype).contiguous()
        library.pack(source.data_ptr(), *shape, self.pointer, torch.get_num_threads())

    def unpack(self) -> Tensor:
        out = torch.empty(self.out_features, self.in_features, dtype=self.dtype)
        self._lib.unpack(
            self.pointer, self.out_features, self.in_features, self.format, out.data_ptr()
        )
        return out


class NativeExpertWeights:
    """[e, bundle bytes]; a bundle holds the panels of gate and up, interleaved, then of down."""

    fp8 = False

    def __init__(
        self,
        library: NativeLibrary,
        num_slots: int,
        hidden: int,
        intermediate: int,
        dtype: torch.dtype,
    ) -> None:
        self._lib = library
        self.num_slots, self.hidden, self.intermediate = num_slots, hidden, intermediate
        self.dtype = dtype
        self.is_bf16 = is_bf16(dtype)
        self.format = int(self.is_bf16) | (FP8_FORMAT if self.fp8 else 0)
        bundle: int = library.bundle_bytes(hidden, intermediate, self.format)
        self.data = torch.zeros(num_slots, bundle, dtype=torch.uint8)
        self.nbytes = num_slots * bundle
        self.pointer = self.data.data_ptr()
        library.advise_large_pages(self.pointer, self.nbytes)

    def store(self, slot: int, gate: Tensor, up: Tensor, down: Tensor) -> None:
        wide, tall = (self.intermediate, self.hidden), (self.hidden, self.intermediate)
        for name, tensor, shape in (("gate", gate, wide), ("up", up, wide), ("down", down, tall)):
            if tuple(tensor.shape) != shape:
                raise KernelArgumentError(f"{name} is {tuple(tensor.shape)}: must be {shape}")
        parts = [x.detach().to(self.dtype).contiguous() for x in (gate, up, down)]
        self._lib.store_expert(
            *(x.data_ptr() for x in parts),
            self.hidden,
            self.intermediate,
            self.is_bf16,
            self._slot(slot).data_ptr(),
        )

    def fetch(self, slot: int) -> tuple[Tensor, Tensor, Tensor]:
        gate = torch.empty(self.intermediate, self.hidden, dtype=self.dtype)
        up, down = torch.empty_like(gate), gate.new_empty(self.hidden, self.intermediate)
        self._lib.fetch_expert(
            self._slot(slot).data_ptr(),
            self.hidden,
            self.intermediate,
            self.format,
            gate.data_ptr(),
            up.data_ptr(),
            down.data_ptr(),
        )
        return gate, up, down

    def bundle(self, slot: int) -> Bundle:
        return Bundle(self._slot(slot))

    def _slot(self, slot: int) -> Tensor:
        """Its bytes."""
        if not 0 <= slot < self.num_slots:
            raise KernelArgumentError(f"slot={slot}: must be 0..{self.num_slots - 1}")
        return self.data[slot]
