"""Kernels by a table of who won: `moeserve bench kernels --device cuda --winners FILE` made it.

Puts the table before FlashMLA and FlashInfer (MLA decode) and DeepGEMM (products of e4m3); what no
library fits, and what was never measured, is ours. A table holds for the device and the versions
that it was measured with. In deterministic mode there is none: bits may not depend on who is
faster.
"""

from __future__ import annotations

from pathlib import Path

import torch

from models.deepseek.kernels.gpu.bench.versions import differences, versions_here
from models.deepseek.kernels.gpu.bench.winners import FastestMla, Winners, WinnersUnreadable
from models.deepseek.kernels.gpu.gemm_choice import Gemms
from models.deepseek.kernels.gpu.gemm_deep_gemm import DeepGemm, arch_of
from models.deepseek.kernels.gpu.mla_flash_mla import FlashMla
from models.deepseek.kernels.gpu.mla_flashinfer import FlashInferMla
from models.deepseek.kernels.gpu.triton_kernels import TritonKernels


def kernels_by_table(
    path: Path, device: torch.device | str | None = None, graphs: bool = True
) -> TritonKernels:
    """TritonKernels that ask the table first. graphs: steps may be captured. WinnersUnreadable for
    a file that holds none, or one of another device or other versions; KernelsUnavailable as
    TritonKernels says."""
    winners = Winners.load(path)
    plain = TritonKernels(device)
    here = "CPU"
    if plain.device.type == "cuda":
        here = torch.cuda.get_device_name(plain.device)
    if winners.device != here:
        raise WinnersUnreadable(
            f"{path}: measured on {winners.device}, this is {here}; `moeserve bench kernels "
            "--device cuda --winners FILE` measures here"
        )
    stale = differences(winners.versions, versions_here())
    if stale:
        raise WinnersUnreadable(
            f"{path}: measured with {stale}: who was faster then need not be now; `moeserve bench "
            "kernels --device cuda --winners FILE` measures again"
        )
    return TritonKernels(
        device,
        decode_backends=[FastestMla(winners, [FlashMla(), FlashInferMla()])],
        graphs=graphs,
        gemms=Gemms(arch_of(plain.device), [DeepGemm()], winners),
        fast=True,
    )
