"""Which implementation of the kernels runs here: chosen by name, with the reason in words.

Knows the names; each implementation is imported inside its own factory.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from models.deepseek.kernels.base import Kernels, MlaShape
from models.deepseek.kernels.errors import KernelsUnavailable, KernelTableError

NAMES = ("auto", "native", "torch", "triton")


class KernelChoice(NamedTuple):
    """kernels and one line that says which they are and why: the caller prints it once."""

    kernels: Kernels
    reason: str

    @property
    def numerics(self) -> str:
        """What decides the bits of results: ranks with the same give the same tokens (law 5)."""
        return f"{self.kernels.name} {getattr(self.kernels, 'build', '')}".strip()


def create_kernels(
    name: str = "auto",
    device: torch.device | str = "cpu",
    table: Path | None = None,
    graphs: bool = True,
    fast: bool = False,
) -> KernelChoice:
    """auto: on a CPU native when it builds on this machine, else torch; on CUDA triton.

    device: where the model will be. table: which implementation won at which shape, for triton in
    fast mode; graphs: its steps may be captured; fast: bits may depend on the batch (triton cuts
    attention by its load; a table is for fast mode anyway). Raises ValueError for an unknown name,
    KernelTableError, KernelsUnavailable when what is asked for cannot be had, or not there.
    """
    if name not in NAMES:
        raise ValueError(f"kernels={name!r}: must be one of {', '.join(NAMES)}")
    on_cpu = torch.device(device).type == "cpu"
    if name == "triton" or (name == "auto" and not on_cpu):
        return _triton(None if on_cpu else device, table, graphs, fast)
    if table is not None:
        raise KernelTableError(
            f"{_table_fault(table)}a table of kernels is for triton kernels, on GPUs"
        )
    if not on_cpu:
        raise KernelsUnavailable(f"kernels={name} runs on cpu, not on {device}; kernels=triton can")
    if name == "torch":
        return KernelChoice(_torch(), "kernels: torch (asked for; slow, for comparison)")
    try:
        return _native()
    except KernelsUnavailable as error:
        if name == "native":
            raise
        first_line = str(error).splitlines()[0]
        return KernelChoice(_torch(), f"kernels: torch, slow (no native: {first_line})")


def _table_fault(table: Path) -> str:
    """What is wrong with the file itself comes first: on a GPU it would be refused as well."""
    from models.deepseek.kernels.gpu.bench.winners import Winners, WinnersUnreadable

    try:
        Winners.load(table)
    except WinnersUnreadable as error:
        return f"{error}; beside that, "
    return f"{table}: "


def fitting(
    choice: KernelChoice, name: str, shape: MlaShape, dtype: torch.dtype, deterministic: bool
) -> KernelChoice:
    """The choice made for `name`, or torch where "auto" chose what cannot compute this model.

    Raises KernelsUnavailable when what is asked for cannot, and on CUDA, where there is no other.
    """
    misfit = choice.kernels.misfit(shape, dtype, deterministic)
    if misfit is None:
        return choice
    if choice.kernels.name == "triton":
        raise KernelsUnavailable(f"{misfit}; on a CPU kernels=native or kernels=torch may")
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


def _triton(
    device: torch.device | str | None, table: Path | None, graphs: bool, fast: bool
) -> KernelChoice:
    """device None: the current CUDA device (in triton's interpreter: cpu)."""
    try:
        from models.deepseek.kernels.gpu.triton_kernels import TritonKernels
    except ImportError as error:
        raise KernelsUnavailable(f"triton kernels cannot be imported: {error}") from error
    if table is not None:
        from models.deepseek.kernels.gpu.kernel_table import kernels_by_table

        kernels = kernels_by_table(table, device, graphs)
        words = f"{kernels.description}; libraries where {table.name} has them as winners"
        return KernelChoice(kernels, f"kernels: triton ({words})")
    kernels = TritonKernels(device, fast=fast)
    return KernelChoice(kernels, f"kernels: triton ({kernels.description})")
