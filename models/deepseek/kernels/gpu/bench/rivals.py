"""DeepGEMM's products behind the call of ours: chosen by probe, None where it cannot.

The only file that imports `deep_gemm`. Hopper's form of scales (fp32, rows of columns); its names
are those of the releases of 2025 and 2026. Knows nothing of timing.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

ROW_ALIGNMENT = 128  # where segments begin in its contiguous layout, unless it says otherwise


class DeepGemm:
    """module: in place of the installed `deep_gemm`, for tests."""

    name = "deep_gemm"

    def __init__(self, module: Any = None) -> None:
        self._module = module

    def refusal(self, arch: int) -> str | None:
        """Why it cannot be used on this chip (90: sm_90), in one line."""
        if arch != 90:
            return f"used on sm_90 only (its scales are packed elsewhere), this is sm_{arch}"
        module, why = self._load()
        if why is not None:
            return why
        wanted = (
            "fp8_gemm_nt",
            "m_grouped_fp8_gemm_nt_contiguous",
            "m_grouped_fp8_gemm_nt_masked",
        )
        missing = [name for name in wanted if not hasattr(module, name)]
        return f"this deep_gemm has no {', '.join(missing)}" if missing else None

    def dense(self, a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor) -> Tensor:
        """As fp8_gemm: a [M, K] with F32_COLUMN scales, b [N, K] -> [M, N] bf16."""
        module, _ = self._load()
        out = torch.empty(a.shape[0], b.shape[0], dtype=torch.bfloat16, device=a.device)
        module.fp8_gemm_nt((a, a_scales), (b, b_scales), out)
        return out

    def contiguous(
        self, a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, owners: Tensor
    ) -> Tensor:
        """a [M, K] in segments that begin at multiples of ROW_ALIGNMENT; owners [M] int32: the
        expert of each row, -1 for padding."""
        module, _ = self._load()
        out = torch.empty(a.shape[0], b.shape[1], dtype=torch.bfloat16, device=a.device)
        module.m_grouped_fp8_gemm_nt_contiguous((a, a_scales), (b, b_scales), out, owners)
        return out

    def masked(
        self,
        a: Tensor,
        a_scales: Tensor,
        b: Tensor,
        b_scales: Tensor,
        counts: Tensor,
        expected: int,
    ) -> Tensor:
        """a [e, M, K], counts [e] int32 -> [e, M, N]."""
        module, _ = self._load()
        shape = (*a.shape[:2], b.shape[1])
        out = torch.empty(shape, dtype=torch.bfloat16, device=a.device)
        module.m_grouped_fp8_gemm_nt_masked((a, a_scales), (b, b_scales), out, counts, expected)
        return out

    def _load(self) -> tuple[Any, str | None]:
        if self._module is not None:
            return self._module, None
        try:
            return importlib.import_module("deep_gemm"), None
        except Exception as error:  # a wheel for CUDA fails in many ways without it
            first = (str(error).splitlines() or [""])[0]
            return None, f"deep_gemm cannot be imported: {type(error).__name__}: {first}"


def arch_of(device: torch.device) -> int:
    """90 for sm_90, 0 without a GPU."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
