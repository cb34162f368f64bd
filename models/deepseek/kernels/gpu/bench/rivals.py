"""DeepGEMM beside our products: the adapter that a runner uses, asked once for all of V3's shapes.

Timed through it, what it does around the library's call counts too. Knows nothing of timing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from models.deepseek.kernels.gpu import gemm_deep_gemm
from models.deepseek.kernels.gpu.gemm_adapters import FORMS, GemmProblem
from models.deepseek.kernels.gpu.gemm_deep_gemm import arch_of

__all__ = ["ROW_ALIGNMENT", "DeepGemm", "arch_of"]
ROW_ALIGNMENT = 128  # where segments begin in its contiguous layout, unless it says otherwise
BF16 = torch.bfloat16


class DeepGemm:
    """module: in place of the installed `deep_gemm`, for tests."""

    name = gemm_deep_gemm.DeepGemm.name

    def __init__(self, module: Any = None) -> None:
        self._adapter = gemm_deep_gemm.DeepGemm(module)

    def refusal(self, arch: int) -> str | None:
        """Why it cannot be used on this chip (90: sm_90), in one line."""
        if arch != 90:
            return f"timed with fp32 scales, which it takes on sm_90: this is sm_{arch}"
        for form in FORMS:
            problem = GemmProblem(form, 128, 128, arch, alignment=ROW_ALIGNMENT)
            why = self._adapter.refusal(problem)
            if why is not None:
                return why
        return None

    def dense(self, a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor) -> Tensor:
        """As fp8_gemm: a [M, K] with F32_COLUMN scales, b [N, K] -> [M, N] bf16."""
        return self._adapter.dense(a, a_scales, b, b_scales, BF16)

    def contiguous(
        self, a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, ends: Tensor
    ) -> Tensor:
        """a [M, K] in segments that begin at multiples of ROW_ALIGNMENT and end at ends [e]."""
        return self._adapter.contiguous(
            a, a_scales, b, b_scales, ends, BF16, alignment=ROW_ALIGNMENT
        )

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
        return self._adapter.masked(a, a_scales, b, b_scales, counts, BF16, expected_rows=expected)
