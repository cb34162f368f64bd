"""The dense and the expert half of TritonKernels: which kernel serves which weight.

Weights in the model dtype: GEMMs of dense.py. Weights in e4m3: W8A8, rows quantised in blocks of
128 channels as the models were trained; so results are not bit for bit those of dequantised
weights, but within the rounding of rows to e4m3. Each kernel keeps law 5.

Knows the kernels and the weights' layouts. Shape letters as in kernels/base.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dispatch.base import ScaleFormat
from models.deepseek.fp8 import Fp8Rows
from models.deepseek.kernels.base import ExpertWeights, GateSpec, LinearWeight
from models.deepseek.kernels.errors import KernelArgumentError
from models.deepseek.kernels.gpu.dense import dense, dense_grouped, dense_per_head
from models.deepseek.kernels.gpu.gate import gate
from models.deepseek.kernels.gpu.gemm_choice import Gemms
from models.deepseek.kernels.gpu.norm import add_rms_norm, rms_norm, silu_mul
from models.deepseek.kernels.gpu.norm_quant import rms_norm_quantise
from models.deepseek.kernels.gpu.permute import permute, unpermute
from models.deepseek.kernels.gpu.quant import quantise, quantise_silu_mul
from models.deepseek.kernels.gpu.sort_pairs import sort_pairs
from models.deepseek.kernels.gpu.weights import (
    TritonExpertWeights,
    TritonFp8ExpertWeights,
    TritonFp8LinearWeight,
    TritonLinearWeight,
)


@dataclass(frozen=True)
class CodedRows:
    """Rows [T, D] in e4m3 as `reader` alone wants them, with scales; dtype: what they were."""

    codes: Tensor
    scales: Tensor
    dtype: torch.dtype
    reader: TritonFp8LinearWeight

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def device(self) -> torch.device:
        return self.codes.device


@dataclass(frozen=True)
class _Segments:
    """Where rows of slots lie: as gemm_choice's `contiguous` is told. limit [1] int32: rows from
    there on belong to nobody."""

    ends: Tensor
    limit: Tensor | None = None
    starts: Tensor | None = None
    alignment: int = 1


def foreign(weight: object) -> KernelArgumentError:
    return KernelArgumentError(
        f"a {type(weight).__name__} cannot be used here: weights must come from TritonKernels"
    )


class TritonDense:
    """device: where weights are kept. gemms: who makes products of e4m3 (None: our kernels)."""

    def __init__(self, device: torch.device, gemms: Gemms | None = None) -> None:
        self.device = device
        self.gemms = gemms or Gemms()

    # -- weights ---------------------------------------------------------------------------

    def linear_weight(self, weight: Tensor, dtype: torch.dtype) -> TritonLinearWeight:
        return TritonLinearWeight(weight.detach().to(self.device, dtype).contiguous())

    def fp8_linear_weight(self, rows: Fp8Rows, dtype: torch.dtype) -> TritonFp8LinearWeight | None:
        packed = self.gemms.packs_weights
        return TritonFp8LinearWeight.of(rows.move(lambda x: x.to(self.device)), dtype, packed)

    def allocate_experts(
        self, num_slots: int, hidden: int, intermediate: int, dtype: torch.dtype
    ) -> TritonExpertWeights:
        return TritonExpertWeights(num_slots, hidden, intermediate, dtype, self.device)

    def allocate_fp8_experts(
        self, num_slots: int, hidden: int, intermediate: int, dtype: torch.dtype
    ) -> TritonFp8ExpertWeights:
        return TritonFp8ExpertWeights(
            num_slots, hidden, intermediate, dtype, self.device, self.gemms.packs_weights
        )

    # -- dense -----------------------------------------------------------------------------

    def linear(
        self, x: Tensor | CodedRows, weight: LinearWeight, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        if isinstance(x, CodedRows):
            if x.reader is not weight:
                raise KernelArgumentError("these rows were quantised for another weight")
            return self.linear_of_codes(x.codes, x.scales, x.reader, out_dtype or x.dtype)
        if isinstance(weight, TritonLinearWeight):
            return dense(x, weight.weight, out_dtype)
        if isinstance(weight, TritonFp8LinearWeight):
            rows = x if x.stride(1) == 1 else x.contiguous()
            codes, scales = quantise(rows, ScaleFormat.F32_COLUMN, ue8m0=weight.ue8m0)
            return self.linear_of_codes(codes, scales, weight, out_dtype or x.dtype)
        raise foreign(weight)

    def linear_of_codes(
        self, codes: Tensor, scales: Tensor, weight: TritonFp8LinearWeight, dtype: torch.dtype
    ) -> Tensor:
        """`linear` of rows in e4m3, whose scales are powers of two where the weight's are."""
        return self.gemms.dense(
            codes, scales, weight.codes, weight.scales, dtype, ue8m0=weight.ue8m0,
            b_words=weight.words,
        )  # fmt: skip

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def add_rms_norm(self, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return add_rms_norm(residual, x, weight, eps)

    def add_rms_norm_for(
        self, residual: Tensor, x: Tensor, weight: Tensor, eps: float, reader: LinearWeight
    ) -> Tensor | CodedRows:
        """See base.NormsFor: of a reader in e4m3 the norm is quantised as it is computed. The sum
        of squares has an order of its own, so a norm may differ from add_rms_norm's by a last
        bit."""
        if not isinstance(reader, TritonFp8LinearWeight):
            return self.add_rms_norm(residual, x, weight, eps)
        rows = rms_norm_quantise(
            x if x.stride(1) == 1 else x.contiguous(), weight, eps, ScaleFormat.F32_COLUMN,
            residual=residual, ue8m0=reader.ue8m0,
        )  # fmt: skip
        return CodedRows(rows.values, rows.scales, x.dtype, reader)

    def mlp(self, x: Tensor | CodedRows, gate_up: LinearWeight, down: LinearWeight) -> Tensor:
        both = self.linear(x, gate_up)
        if isinstance(down, TritonFp8LinearWeight):
            codes, scales = quantise_silu_mul(both, ScaleFormat.F32_COLUMN, ue8m0=down.ue8m0)
            return self.linear_of_codes(codes, scales, down, x.dtype)
        return self.linear(silu_mul(both), down)

    def per_head(self, x: Tensor, weight: LinearWeight, num_heads: int) -> Tensor:
        return dense_per_head(x, heads_of(weight, num_heads))

    # -- experts ---------------------------------------------------------------------------

    def gate(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, spec: GateSpec
    ) -> tuple[Tensor, Tensor]:
        return gate(x, weight, bias, spec)

    def sort_pairs(self, slots: Tensor, num_slots: int) -> tuple[Tensor, Tensor, Tensor]:
        """pair_rows has a place for each of the T * K picks, since how many are valid is known on
        the device only: places from offsets[e] on hold -1."""
        layout = sort_pairs(slots, num_slots)
        return layout.pair_rows, layout.starts, layout.index

    def experts(
        self,
        x: Tensor,
        pair_rows: Tensor,
        offsets: Tensor,
        weights: ExpertWeights,
        expected_rows: int | None = None,
    ) -> Tensor:
        """Rows of the result from offsets[e] on hold anything: no index points there.
        expected_rows, here and below: what a slot is likely to have; it chooses the tile only."""
        if pair_rows.shape[0] == 0 or weights.num_slots == 0:
            return x.new_zeros(pair_rows.shape[0], x.shape[1])
        starts, ends, limit = offsets[:-1], offsets[1:], offsets[-1:]
        if isinstance(weights, TritonExpertWeights):
            return _in_model_dtype(x, weights, pair_rows, starts, ends, limit, expected_rows)
        if not isinstance(weights, TritonFp8ExpertWeights):
            raise foreign(weights)
        codes, scales = quantise(x, ScaleFormat.F32_ROW, ue8m0=weights.ue8m0)
        rows, scales = _permuted(codes, scales, pair_rows)
        expected = expected_rows or -(-pair_rows.shape[0] // weights.num_slots)
        return self._in_e4m3(rows, scales, weights, x.dtype, _Segments(ends, limit), expected)

    def experts_routed(
        self,
        x: Tensor,
        scales: Tensor | None,
        slots: Tensor,
        weights: ExpertWeights,
        dtype: torch.dtype,
        expected_rows: int | None = None,
        num_pairs: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Rows as they arrived (dispatch.base.Received, ROUTED): x [N, D] in dtype, or e4m3 with
        scales in any format; slots [N, K] -> [Q, D] unweighted and index [N, K] for combine_pairs;
        rows of no pair hold anything. Segments of slots lie as who multiplies them wants it.
        num_pairs: how many picks are valid, where the host knows: Q is what they need, else what
        N * K would."""
        if not isinstance(weights, TritonFp8ExpertWeights):
            if scales is not None:
                raise foreign(weights)
            layout = sort_pairs(slots, weights.num_slots, num_pairs=num_pairs)
            rows, offsets = layout.pair_rows, layout.starts
            return self.experts(x, rows, offsets, weights, expected_rows), layout.index
        ue8m0 = weights.ue8m0
        powers = ue8m0 and (scales is None or scales.dtype == torch.int32)
        if scales is None:
            x, scales = quantise(x, ScaleFormat.F32_ROW, ue8m0=ue8m0)
        expected = expected_rows or -(-slots.numel() // max(1, weights.num_slots))
        alignment = self.gemms.alignment(scales, weights.gate_up, dtype, expected, ue8m0=powers)
        layout = sort_pairs(slots, weights.num_slots, alignment, num_pairs=num_pairs)
        if layout.pair_rows.shape[0] == 0:
            return torch.zeros(0, x.shape[1], dtype=dtype, device=x.device), layout.index
        rows, scales = _permuted(x, scales, layout.pair_rows)
        segments = _Segments(layout.ends, layout.starts[-1:], alignment=alignment)
        y = self._in_e4m3(rows, scales, weights, dtype, segments, expected, powers)
        return y, layout.index

    def experts_in_segments(
        self,
        x: Tensor,
        scales: Tensor | None,
        starts: Tensor | None,
        counts: Tensor,
        weights: ExpertWeights,
        dtype: torch.dtype,
        expected_rows: int | None = None,
        alignment: int = 1,
    ) -> Tensor:
        """Rows as they arrived (EXPANDED): x [N, D] in dtype, or e4m3 with scales; counts [e], of
        rows from starts [e] on, multiples of the alignment (None: one segment behind the other) ->
        [N, D] unweighted; rows of no slot hold anything. Nothing is copied, no host is told."""
        ends = counts.cumsum(0) if starts is None else starts + counts
        ends = ends.to(torch.int32)
        begins = None if starts is None else starts.to(torch.int32)
        if x.shape[0] == 0 or weights.num_slots == 0:
            return torch.zeros(x.shape, dtype=dtype, device=x.device)
        if isinstance(weights, TritonFp8ExpertWeights):
            powers = weights.ue8m0 and (scales is None or scales.dtype == torch.int32)
            if scales is None:
                form = self.gemms.scale_format(weights.ue8m0)
                x, scales = quantise(x, form, ue8m0=weights.ue8m0)
            expected = expected_rows or -(-x.shape[0] // weights.num_slots)
            limit = ends[-1:] if starts is None else None
            segments = _Segments(ends, limit, begins, alignment)
            return self._in_e4m3(x, scales, weights, dtype, segments, expected, powers)
        if not isinstance(weights, TritonExpertWeights) or scales is not None:
            raise foreign(weights)
        if begins is None:
            begins = torch.nn.functional.pad(ends[:-1], (1, 0))
        own = torch.arange(x.shape[0], dtype=torch.int32, device=x.device)
        return _in_model_dtype(x, weights, own, begins, ends, None, expected_rows)

    def experts_masked(
        self,
        x: Tensor,
        scales: Tensor | None,
        counts: Tensor,
        weights: ExpertWeights,
        dtype: torch.dtype,
        expected_rows: int | None = None,
    ) -> Tensor:
        """Rows as they arrived (MASKED): x [e, M, D] in dtype, or e4m3 with scales; the first
        counts[s] rows of slot s -> [e, M, D], of which only those are written."""
        slots, room, hidden = x.shape
        counts = counts.to(torch.int32)
        if x.numel() == 0:
            return torch.zeros(x.shape, dtype=dtype, device=x.device)
        if isinstance(weights, TritonFp8ExpertWeights):
            ue8m0 = weights.ue8m0
            powers = ue8m0 and (scales is None or scales.dtype == torch.int32)
            form = self.gemms.scale_format(ue8m0)
            if scales is None:
                x, scales = quantise(x, form, ue8m0=ue8m0, counts=counts)
            both = self.gemms.masked(
                x, scales, weights.gate_up, weights.gate_up_scales, counts, dtype,
                expected_rows=expected_rows, ue8m0=powers, b_words=weights.gate_up_words,
            )  # fmt: skip
            x, scales = quantise_silu_mul(both, form, ue8m0=ue8m0, counts=counts)
            return self.gemms.masked(
                x, scales, weights.down, weights.down_scales, counts, dtype,
                expected_rows=expected_rows, ue8m0=ue8m0, b_words=weights.down_words,
            )  # fmt: skip
        if not isinstance(weights, TritonExpertWeights) or scales is not None:
            raise foreign(weights)
        starts = torch.arange(0, slots * room, room, dtype=torch.int32, device=x.device)
        own = torch.arange(slots * room, dtype=torch.int32, device=x.device)
        rows = x.reshape(slots * room, hidden)
        y = _in_model_dtype(rows, weights, own, starts, starts + counts, None, expected_rows)
        return y.view(slots, room, hidden)

    def _in_e4m3(
        self,
        codes: Tensor,
        scales: Tensor,
        weights: TritonFp8ExpertWeights,
        dtype: torch.dtype,
        at: _Segments,
        expected_rows: int,
        powers: bool = False,
    ) -> Tensor:
        """codes [Q, D] e4m3 and their scales in any format -> [Q, D]. powers: all scales are powers
        of two."""
        w, ue8m0 = weights, weights.ue8m0
        alike: dict[str, Any] = {
            "alignment": at.alignment, "starts": at.starts, "expected_rows": expected_rows
        }  # fmt: skip
        both = self.gemms.contiguous(
            codes, scales, w.gate_up, w.gate_up_scales, at.ends, dtype,
            ue8m0=powers, b_words=w.gate_up_words, **alike,
        )  # fmt: skip
        form = self.gemms.scale_format(ue8m0)
        codes, scales = quantise_silu_mul(both, form, ue8m0=ue8m0, counts=at.limit)
        return self.gemms.contiguous(
            codes, scales, w.down, w.down_scales, at.ends, dtype,
            ue8m0=ue8m0, b_words=w.down_words, **alike,
        )  # fmt: skip

    def combine_pairs(self, y: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return unpermute(y, index, weights)


def _permuted(codes: Tensor, scales: Tensor, pair_rows: Tensor) -> tuple[Tensor, Tensor]:
    rows, of_rows = permute(codes, pair_rows, scales)
    assert of_rows is not None
    return rows, of_rows


def _in_model_dtype(
    x: Tensor,
    weights: TritonExpertWeights,
    rows: Tensor,
    starts: Tensor,
    ends: Tensor,
    limit: Tensor | None,
    expected_rows: int | None,
) -> Tensor:
    """x [N, D], rows [Q] int32 of x, slot s has the places starts[s] .. ends[s] - 1 -> [Q, D].
    limit [1] int32: the places from there on belong to nobody."""
    places = rows.shape[0]
    expected = expected_rows or -(-places // weights.num_slots)
    both = dense_grouped(x, weights.gate_up, rows, starts, ends, expected)
    own = torch.arange(places, dtype=torch.int32, device=x.device)
    return dense_grouped(silu_mul(both, limit), weights.down, own, starts, ends, expected)


def heads_of(weight: LinearWeight, num_heads: int) -> Tensor:
    """[H * b, a] -> [H, b, a]; of rows as they are only (the loader dequantises these)."""
    if not isinstance(weight, TritonLinearWeight):
        raise foreign(weight)
    return weight.weight.view(num_heads, -1, weight.in_features)
