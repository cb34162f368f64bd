"""mlp and experts are one computation: a row gets the same bits from both, on every kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_cases import kernels as kernels

from models.deepseek.fp8 import Fp8Rows, quantise_weight
from models.deepseek.kernels.base import Kernels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_mlp_and_experts_give_a_row_the_same_bits(kernels: Kernels, dtype: torch.dtype) -> None:
    """Kept in FP8 and plain, widths of whole panels and others, whatever rows come along."""
    for number, (hidden, inter) in enumerate([(256, 128), (192, 192), (72, 40), (136, 200)]):
        torch.manual_seed(number)
        weights = [
            torch.randn(shape) / 8 for shape in ((inter, hidden), (inter, hidden), (hidden, inter))
        ]
        for fp8 in (False, True):
            if fp8:
                rows = [Fp8Rows.of(*quantise_weight(w)) for w in weights]
                stacked: Any = kernels.allocate_fp8_experts(3, hidden, inter, dtype)
                stacked.store_fp8(1, *rows)
                joined = Fp8Rows.join((rows[0], rows[1]))
                gate_up = kernels.fp8_linear_weight(joined, dtype) or kernels.linear_weight(
                    joined.dequantise(dtype), dtype
                )
                down = kernels.fp8_linear_weight(rows[2], dtype)
                assert down is not None
            else:
                stacked = kernels.allocate_experts(3, hidden, inter, dtype)
                stacked.store(1, *weights)
                gate_up = kernels.linear_weight(torch.cat(weights[:2]), dtype)
                down = kernels.linear_weight(weights[2], dtype)
            for count in (1, 2, 5, 13, 67):
                x = torch.randn(count, hidden).to(dtype)
                order = torch.randperm(count).int()
                offsets = torch.tensor([0, 0, count, count], dtype=torch.int32)
                got = kernels.experts(x, order, offsets, stacked)
                expected = kernels.mlp(x, gate_up, down)[order.long()]
                assert torch.equal(got, expected), (hidden, inter, fp8, count)
