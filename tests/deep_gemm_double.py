"""DeepGEMM's products on a CPU, for tests: the signatures of its 2.6, and what its host code and
its kernels ask of shapes, strides and types. NaN where a real one writes nothing; float64 sums.

On fake tensors it checks the same and computes nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from models.deepseek.kernels.gpu.fp8_gemm import widen_rows
from models.deepseek.kernels.gpu.grouped_gemm import segments

# What the reference names of each function, in order; the double must have just these.
SIGNATURES = {
    "fp8_gemm_nt": ["a", "b", "d", "c"],
    "m_grouped_fp8_gemm_nt_contiguous": ["a", "b", "d", "grouped_layout", "recipe"],
    "m_grouped_fp8_gemm_nt_masked": ["a", "b", "d", "masked_m", "expected_m"],
}
LATER = ("use_psum_layout", "ensure_zero_padding", "expected_m_for_psum_layout")
TILE = 128  # rows of the tallest of the masked form on sm_90; elsewhere the alignment


class Library:
    """arch decides the scales that are taken; alignment where segments begin."""

    def __init__(self, arch: int = 90, alignment: int = 128) -> None:
        self._arch, self._alignment = arch, alignment
        self.calls: list[str] = []
        self.words = 0  # products whose weight came with packed scales

    def get_mk_alignment_for_contiguous_layout(self) -> int:
        return self._alignment

    def fp8_gemm_nt(self, a: Any, b: Any, d: Tensor, c: Tensor | None = None, **more: Any) -> None:
        self.calls.append("dense")
        assert not more and c is None
        self._check(a, b, d, stacked=False)
        if not isinstance(d, FakeTensor):
            d.copy_((self._rows(*a) @ self._weight(*b).T).to(d.dtype))

    def m_grouped_fp8_gemm_nt_contiguous(
        self, a: Any, b: Any, d: Tensor, grouped_layout: Tensor, recipe: Any = None,
        compiled_dims: str = "nk", disable_ue8m0_cast: bool = False,
        use_psum_layout: bool = False, ensure_zero_padding: bool = True,
        expected_m_for_psum_layout: int | None = None,
    ) -> None:  # fmt: skip
        self.calls.append("psum" if use_psum_layout else "owners")
        assert recipe is None and compiled_dims == "nk" and not disable_ue8m0_cast
        self._check(a, b, d, stacked=True)
        rows, experts = a[0].shape[0], b[0].shape[0]
        assert grouped_layout.dtype == torch.int32 and grouped_layout.is_contiguous()
        if use_psum_layout:
            assert self._arch != 90 and grouped_layout.shape == (experts,)
            assert a[1].dtype == torch.int32 or a[1].is_contiguous(), "packed by rows alone"
        else:
            assert expected_m_for_psum_layout is None and grouped_layout.shape == (rows,)
        if isinstance(d, FakeTensor):
            return
        x, weight = self._rows(*a), self._weight(*b)
        d.fill_(torch.nan)
        if use_psum_layout:
            held = segments(grouped_layout.tolist(), self._alignment)
            for i, (begin, end) in enumerate(held):
                d[begin:end] = (x[begin:end] @ weight[i].T).to(d.dtype)
            return
        owners = grouped_layout.tolist()
        for row, owner in enumerate(owners):
            assert -1 <= owner < weight.shape[0]
            first = row - row % self._alignment  # a tile has one expert
            assert owner in (-1, owners[first]), "an expert begins inside of a tile"
            if owner >= 0:
                d[row] = (x[row] @ weight[owner].T).to(d.dtype)

    def m_grouped_fp8_gemm_nt_masked(
        self, a: Any, b: Any, d: Tensor, masked_m: Tensor, expected_m: int, **more: Any
    ) -> None:
        self.calls.append(f"masked {expected_m}")
        assert not more
        self._check(a, b, d, stacked=True)
        experts, room, _ = a[0].shape
        assert masked_m.dtype == torch.int32 and masked_m.shape == (experts,)
        assert masked_m.is_contiguous() and expected_m > 0
        tile = TILE if self._arch == 90 else self._alignment
        assert experts == 1 or room % tile == 0, "a tile would reach into the next expert's room"
        if isinstance(d, FakeTensor):
            return
        x, weight = self._rows(*a), self._weight(*b)
        d.fill_(torch.nan)
        for i, n in enumerate(masked_m.tolist()):
            d[i, :n] = (x[i, :n] @ weight[i].T).to(d.dtype)

    def _check(self, a: Any, b: Any, d: Tensor, stacked: bool) -> None:
        (codes, scales), (weight, blocks) = a, b
        for x in (codes, weight, d):
            assert x.stride(-1) == 1 and x.stride(-2) * x.element_size() % 16 == 0
            if x.dim() == 3:
                assert x.stride(0) == x.shape[1] * x.shape[2], x.stride()
        assert codes.dtype == weight.dtype == torch.float8_e4m3fn and d.dtype == torch.bfloat16
        assert weight.dim() == (3 if stacked else 2)
        columns, width = weight.shape[-2:]
        assert codes.shape[-1] == width and width % 128 == 0
        assert d.shape == (*codes.shape[:-1], columns)
        self._check_scales(codes, scales, stacked)
        if blocks.dtype == torch.int32:  # as if rows had scales of their own
            self.words += 1
            return self._check_scales(weight, blocks, stacked)
        assert blocks.shape == (*weight.shape[:-2], -(-columns // 128), width // 128)
        assert blocks.dtype == torch.float32 and blocks.is_contiguous()
        if stacked:
            assert blocks.stride(0) == blocks.shape[1] * blocks.shape[2]
        return self._powers(blocks)

    def _check_scales(self, codes: Tensor, scales: Tensor, stacked: bool) -> None:
        blocks = codes.shape[-1] // 128
        if scales.dtype == torch.float32:
            assert scales.shape == (*codes.shape[:-1], blocks)
            return None if stacked else self._powers(scales)  # else some are nobody's
        assert scales.dtype == torch.int32 and self._arch == 100
        words = -(-blocks // 4)
        assert scales.shape == (*codes.shape[:-1], words)
        assert scales.stride(-2) == 1 or codes.shape[-2] == 1
        assert scales.stride(-1) == -(-codes.shape[-2] // 4) * 4
        if scales.dim() == 3:
            assert scales.stride(0) == scales.stride(-1) * words
        return None

    def _powers(self, scales: Tensor) -> None:
        """What is no power of two loses its lower bits without a word on sm_100."""
        if self._arch == 100 and not isinstance(scales, FakeTensor):
            assert (torch.frexp(scales).mantissa == 0.5).all()

    @staticmethod
    def _rows(codes: Tensor, scales: Tensor) -> Tensor:
        flat = scales.reshape(-1, scales.shape[-1])
        return widen_rows(codes.reshape(-1, codes.shape[-1]), flat).view(codes.shape)

    @classmethod
    def _weight(cls, codes: Tensor, blocks: Tensor) -> Tensor:
        if blocks.dtype == torch.int32:
            return cls._rows(codes, blocks)
        wide = blocks.repeat_interleave(128, -2).repeat_interleave(128, -1)
        return codes.double() * wide[..., : codes.shape[-2], :].double()
