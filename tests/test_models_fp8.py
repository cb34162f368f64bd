"""Block FP8 in both directions, and the W8A8 product."""

from __future__ import annotations

import pytest
import torch

from dispatch.fp8 import dequantise_rows, power_of_two_scale, quantise_rows
from models.deepseek.fp8 import (
    dequantise_weight,
    linear_w8a8,
    quantise_weight,
    scale_shape,
    scale_to_float,
)


def matrix(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize("shape", [(128, 256), (576, 300), (5, 7), (144, 128), (1, 129)])
def test_weights_come_back_within_the_format(shape: tuple[int, int], ue8m0: bool) -> None:
    weight = matrix(*shape)
    stored, scale = quantise_weight(weight, ue8m0=ue8m0)
    assert stored.dtype == torch.float8_e4m3fn and stored.shape == shape
    assert scale.shape == scale_shape(shape)
    back = dequantise_weight(stored, scale)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            block = slice(i * 128, (i + 1) * 128), slice(j * 128, (j + 1) * 128)
            assert torch.equal(back[block], stored[block].float() * scale[i, j])
            # 3 mantissa bits: half a step is 1/16 of the value, or of the smallest normal
            bound = weight[block].abs() / 16 + scale[i, j] * 2.0**-10
            assert bool(((back[block] - weight[block]).abs() <= bound).all())
    if ue8m0:
        assert torch.equal(torch.log2(scale), torch.log2(scale).round())


def test_the_largest_value_of_a_block_maps_to_the_largest_code() -> None:
    stored, scale = quantise_weight(matrix(130, 128))
    assert stored[:128].float().abs().max() == 448
    assert stored[128:].float().abs().max() == 448  # a ragged block has a scale of its own
    zero, floor = quantise_weight(torch.zeros(4, 4))
    assert torch.equal(zero.float(), torch.zeros(4, 4)) and float(floor) == pytest.approx(
        1e-4 / 448
    )


def test_powers_of_two_are_exact() -> None:
    exact = torch.tensor([2.0**-20, 0.5, 1.0, 2.0, 64.0])
    assert torch.equal(power_of_two_scale(exact), exact)
    assert power_of_two_scale(torch.tensor([0.51, 1.0001, 3.0])).tolist() == [1.0, 2.0, 4.0]
    edges = torch.tensor([0.0, 1e-45, 2.0**-126, 2.0**127, 3e38, torch.inf, torch.nan])
    wanted = [2.0**-126] * 3 + [2.0**127] + [float("inf")] * 3
    assert power_of_two_scale(edges).tolist() == wanted


def test_e8m0_bytes_are_exponents() -> None:
    stored = torch.tensor([120, 127, 130], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    assert scale_to_float(stored).tolist() == [2.0**-7, 1.0, 8.0]


def test_activations_have_a_scale_a_token_a_group() -> None:
    x = matrix(3, 200) * torch.tensor([[1.0], [100.0], [1e-3]])
    stored, scale = quantise_rows(x)
    assert scale.shape == (3, 2)
    assert float((dequantise_rows(stored, scale) - x).norm() / x.norm()) < 0.03
    alone = quantise_rows(x[1:2])
    assert torch.equal(alone[0].float(), stored[1:2].float()) and torch.equal(alone[1], scale[1:2])
    tiny = torch.full((1, 128), 1e-7)
    assert quantise_rows(tiny)[0].float().max() == 0.4375  # DeepSeek's floor of 1e-4
    assert quantise_rows(tiny, floor=1e-10)[0].float().max() == 448


@pytest.mark.parametrize("ue8m0", [False, True])
def test_w8a8_equals_the_product_of_dequantised_sides(ue8m0: bool) -> None:
    x, weight = matrix(5, 300), matrix(200, 300, seed=1) / 17
    stored, scale = quantise_weight(weight, ue8m0=ue8m0)
    got = linear_w8a8(x, stored, scale, ue8m0=ue8m0)
    x8, x_scale = quantise_rows(x, ue8m0=ue8m0)
    exact = dequantise_rows(x8, x_scale).double() @ dequantise_weight(stored, scale).T.double()
    assert float((got - exact).abs().max()) < 1e-5
    assert float((got - x @ weight.T).norm() / (x @ weight.T).norm()) < 0.06
