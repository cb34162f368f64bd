"""Which implementation multiplies e4m3 rows by e4m3 weights: chosen by probe, behind one call.

A backend is asked whether it fits a problem (a reason in words when it does not); its three calls
are those of our kernels (fp8_gemm.py, grouped_gemm.py). Ours takes every problem: it is the
fallback, and what the others are checked against (`check_gemm_against_ours`). Nothing is imported
but by the backend that is asked. Whose turn it is at a shape: gemm_choice.py.

Shape letters as in those files: M rows, N columns, K width, e experts, G = ceil(K / 128).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from models.deepseek.kernels.gpu.choice import Choice, first_that_fits
from models.deepseek.kernels.gpu.fp8_gemm import fp8_gemm
from models.deepseek.kernels.gpu.grouped_gemm import (
    ALIGNMENT,
    grouped_gemm_contiguous,
    grouped_gemm_masked,
    segments,
)
from models.deepseek.kernels.gpu.language import HAVE_TRITON, HOW_TO_GET_IT

FORMS = ("dense", "contiguous", "masked")
AGREES = 2.0**-6  # of the largest value: what two right kernels differ by in bf16


@dataclass(frozen=True)
class GemmProblem:
    """What a host knows of a product but for its rows. form: one of FORMS. arch: 90 for sm_90, 0
    without a GPU. apart: rows of K from one expert's weight to the next one's (N: back to back).
    alignment: segments begin at its multiples (contiguous). packed: scales of rows are UE8M0 words.
    ue8m0: all scales, of rows and weight, are powers of two. deterministic: bits may depend on no
    company (law 5). room: rows that each expert has memory for (masked)."""

    form: str
    columns: int
    width: int
    arch: int
    experts: int = 1
    apart: int = 0
    alignment: int = 1
    dtype: torch.dtype = torch.bfloat16
    packed: bool = False
    ue8m0: bool = False
    deterministic: bool = False
    room: int = 0


class GemmBackend(Protocol):
    """The calls may raise ShapeRefused, in words, for operands that they cannot take."""

    name: str

    def refusal(self, problem: GemmProblem) -> str | None:
        """Why it cannot, in one line; None: it can. Never raises, needs no GPU."""
        ...

    def alignment(self) -> int:
        """At multiples of what it wants segments of rows to begin; 1: anywhere. Never raises."""
        ...

    def dense(
        self, a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """As fp8_gemm: a [M, K], b [N, K] -> [M, N]."""
        ...

    def contiguous(
        self,
        a: Tensor,
        a_scales: Tensor,
        b: Tensor,
        b_scales: Tensor,
        ends: Tensor,
        dtype: torch.dtype,
        *,
        alignment: int = ALIGNMENT,
        starts: Tensor | None = None,
        expected_rows: int | None = None,
    ) -> Tensor:
        """As grouped_gemm_contiguous: a [M, K], b [e, N, K], ends [e] -> [M, N]. starts, where they
        are given, are multiples of the alignment too."""
        ...

    def masked(
        self,
        a: Tensor,
        a_scales: Tensor,
        b: Tensor,
        b_scales: Tensor,
        counts: Tensor,
        dtype: torch.dtype,
        *,
        expected_rows: int | None = None,
    ) -> Tensor:
        """As grouped_gemm_masked: a [e, M, K], b [e, N, K], counts [e] -> [e, M, N]."""
        ...


class TritonGemm:
    """Ours."""

    name = "triton"
    dense = staticmethod(fp8_gemm)
    contiguous = staticmethod(grouped_gemm_contiguous)
    masked = staticmethod(grouped_gemm_masked)

    def refusal(self, problem: GemmProblem) -> str | None:
        return None if HAVE_TRITON else HOW_TO_GET_IT

    def alignment(self) -> int:
        return 1


def choose_gemm(problem: GemmProblem, backends: Sequence[GemmBackend]) -> Choice[GemmBackend]:
    """The first that does not refuse. ShapeRefused with all reasons when every one does."""
    what = f"fp8 gemm, {problem.form} {problem.columns} x {problem.width}"
    return first_that_fits(what, problem, backends)


def problem_of(
    form: str,
    a_scales: Tensor,
    b: Tensor,
    arch: int,
    dtype: torch.dtype,
    *,
    alignment: int = 1,
    ue8m0: bool = False,
    deterministic: bool = False,
    room: int = 0,
) -> GemmProblem:
    """b [N, K] (dense) or [e, N, K]. Nothing is asked of the device."""
    experts = 1 if b.dim() == 2 else b.shape[0]
    columns, width = b.shape[-2:]
    apart = columns if experts == 1 else b.stride(0) // max(1, width)
    packed = a_scales.dtype == torch.int32
    return GemmProblem(
        form, columns, width, arch, experts, apart, alignment, dtype, packed, ue8m0,
        deterministic, room,
    )  # fmt: skip


def check_gemm_against_ours(
    backend: GemmBackend,
    form: str,
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    bounds: Tensor | None = None,
    *,
    alignment: int = ALIGNMENT,
    starts: Tensor | None = None,
) -> float:
    """Largest difference to ours over the largest value, of the rows that belong to somebody.
    bounds: ends or counts. Two right kernels stay within AGREES of each other."""
    bf16 = torch.bfloat16
    results = []
    for one in (TritonGemm(), backend):
        if form == "dense":
            results.append(one.dense(a, a_scales, b, b_scales, bf16))
            continue
        assert bounds is not None, form
        if form == "masked":
            out = one.masked(a, a_scales, b, b_scales, bounds, bf16)
            results.append(torch.cat([out[i, :n] for i, n in enumerate(bounds.tolist())]))
            continue
        out = one.contiguous(
            a, a_scales, b, b_scales, bounds, bf16, alignment=alignment, starts=starts
        )
        held = segments(bounds.tolist(), alignment)
        if starts is not None:
            held = list(zip(starts.tolist(), bounds.tolist(), strict=True))
        results.append(torch.cat([out[begin : max(begin, end)] for begin, end in held]))
    mine, theirs = (x.float() for x in results)
    if not mine.numel():
        return 0.0
    return float((mine - theirs).abs().max() / mine.abs().max().clamp(min=1e-6))
