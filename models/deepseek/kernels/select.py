"""Which implementation of the kernels runs here: chosen by name, with the reason in words.

Knows the names; each implementation is imported inside its own factory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from models.deepseek.kernels.base import Kernels, MlaShape
from models.deepseek.kernels.errors import KernelsUnavailable

NAMES = ("auto", "native", "torch")


class KernelChoice(NamedTuple):
    """kernels and one line that says which they are and why: the caller prints it once."""

    kernels: Kernels
    reason: str

    @property
    def numerics(self) -> str:
        """What decides the bits of results: ranks with the same give the same tokens (law 5)."""
        return f"{self.kernels.name} {getattr(self.kernels, 'build', '')}".strip()


def create_kernels(name: str = "auto") -> KernelChoice:
    """auto: native when it builds on this machine, else torch.

    Raises ValueError for an unknown name, KernelsUnavailable when "native" is asked for and cannot
    be had.
    """
    if name not in NAMES:
        raise ValueError(f"kernels={name!r}: must be one of {', '.join(NAMES)}")
    if name == "torch":
        return KernelChoice(_torch(), "kernels: torch (asked for; slow, for comparison)")
    try:
        return _native()
    except KernelsUnavailable as error:
        if name == "native":
            raise
        first_line = str(error).splitlines()[0]
        return KernelChoice(_torch(), f"kernels: torch, slow (no native: {first_line})")


def fitting(
    choice: KernelChoice, name: str, shape: MlaShape, dtype: torch.dtype, deterministic: bool
) -> KernelChoice:
    """The choice made for `name`, or torch where "auto" chose what cannot compute this model.

    Raises KernelsUnavailable when "native" is asked for and cannot.
    """
    misfit = choice.kernels.misfit(shape, dtype, deterministic)
    if misfit is None:
        return choice
    if name != "auto":
        raise KernelsUnavailable(f"{misfit}; kernels=torch or dtype=float32 can")
    return KernelChoice(_torch(), f"kernels: torch, slow (native cannot: {misfit})")


def _torch() -> Kernels:
    from models.deepseek.kernels.torch_kernels import TorchKernels

    return TorchKernels()


def _native() -> KernelChoice:
    try:
        from models.deepseek.kernels.native_kernels import NativeKernels
    except ImportError as error:
        raise KernelsUnavailable(f"native kernels cannot be imported: {error}") from error
    kernels = NativeKernels()
    return KernelChoice(kernels, f"kernels: native ({kernels.description})")
