"""Parts of a softmax put together, in the interpreter, against float64."""

from __future__ import annotations

import math

import pytest
import torch

from models.deepseek.kernels.gpu.mla_merge import merge_twin, merge_units

HEADS, WIDTH = 3, 64


@pytest.mark.parametrize("empty", [(), (0,), (1, 2), (0, 1, 2, 3)])
def test_parts_are_weighed_and_empty_ones_count_for_nothing(empty: tuple[int, ...]) -> None:
    g = torch.Generator().manual_seed(1)
    counts = [4, 1, 2]  # the row of one part is not this kernel's
    start = torch.tensor([0, 4, 5, 7], dtype=torch.int32)
    part_out = torch.randn(sum(counts), HEADS, WIDTH, generator=g)
    part_lse = torch.randn(sum(counts), HEADS, generator=g) * 20
    for part in empty:
        part_lse[part] = -math.inf
        part_out[part] = torch.nan
    out = torch.full((3, HEADS, WIDTH), 7.0).bfloat16()
    lse = torch.full((3, HEADS), 7.0)
    merge_units(part_out, part_lse, start, out, lse)
    assert (out[1] == 7).all() and (lse[1] == 7).all()
    for row, (first, last) in {0: (0, 4), 2: (5, 7)}.items():
        want, want_lse = merge_twin(part_out[first:last], part_lse[first:last])
        # One rounding to bf16, fp32 sums.
        assert ((out[row].double() - want).abs() <= 2**-8 * want.abs() + 1e-6).all()
        torch.testing.assert_close(lse[row].double(), want_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_what_is_no_number_in_a_part_is_none_in_the_row(bad: int) -> None:
    """And in no other row."""
    g = torch.Generator().manual_seed(4)
    part_out = torch.randn(5, HEADS, WIDTH, generator=g)
    part_lse = torch.randn(5, HEADS, generator=g)
    part_out[bad, 0], part_lse[bad, 0] = torch.nan, torch.nan
    part_lse[(bad + 1) % 3] = -math.inf
    out, lse = torch.zeros(2, HEADS, WIDTH).bfloat16(), torch.zeros(2, HEADS)
    merge_units(part_out, part_lse, torch.tensor([0, 3, 5], dtype=torch.int32), out, lse)
    assert out[0, 0].isnan().all() and lse[0, 0].isnan()
    assert merge_twin(part_out[:3], part_lse[:3])[0][0].isnan().all()
    assert out[0, 1:].isfinite().all() and out[1].isfinite().all() and lse[1].isfinite().all()


def test_one_part_among_empty_ones_comes_back_bit_for_bit() -> None:
    part_out = torch.randn(3, HEADS, WIDTH, generator=torch.Generator().manual_seed(2))
    part_lse = torch.full((3, HEADS), -math.inf)
    part_lse[1] = 5.5
    out, lse = torch.zeros(1, HEADS, WIDTH).bfloat16(), torch.zeros(1, HEADS)
    merge_units(part_out, part_lse, torch.tensor([0, 3], dtype=torch.int32), out, lse)
    assert torch.equal(out[0], part_out[1].bfloat16()) and (lse == 5.5).all()
