"""Router GEMM and fused gate in the interpreter, against float64 twins and the torch kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from models.deepseek.kernels.base import GateSpec
from models.deepseek.kernels.gpu.errors import ShapeRefused
from models.deepseek.kernels.gpu.gate import choose, choose_twin, gate
from models.deepseek.kernels.gpu.router import PART, router_logits, router_twin
from models.deepseek.kernels.torch_kernels import TorchKernels

V3 = GateSpec(8, 8, 4, "sigmoid", "top2", True, 2.5)
K2 = GateSpec(8, 1, 1, "sigmoid", "top2", True, 2.827)
V2 = GateSpec(6, 8, 3, "softmax", "max", False, 16.0)
LITE = GateSpec(6, 1, 1, "softmax", "max", False, 1.0)
TOLERANCE = 2e-6  # a few roundings of fp32: exp, a division, a sum of at most 8, a product


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("spec", "experts"),
    [
        (V3, 256),
        (K2, 384),
        (V2, 160),
        (LITE, 64),
        (replace(V3, num_groups=3, topk_groups=2), 39),
        (replace(V3, num_groups=7, topk_groups=3, top_k=5), 7 * 6),
        (replace(V2, num_groups=4, topk_groups=1, top_k=4), 12),  # more picks than a group has
        (replace(V3, num_groups=8, topk_groups=8, top_k=3), 8),  # groups of one
        (replace(V3, renormalise=False, top_k=1), 256),
        (replace(K2, top_k=5), 5),
    ],
)
@pytest.mark.parametrize("biased", [True, False])
def test_choice(spec: GateSpec, experts: int, biased: bool) -> None:
    logits = normal(4, experts)
    bias = normal(experts, seed=1) if biased else None
    ids, weights = choose(logits.unsqueeze(0), bias, spec)
    want_ids, want = choose_twin(logits, bias, spec)
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    assert torch.equal(ids, want_ids)
    assert ((weights.double() - want).abs() <= TOLERANCE * want.abs() + 1e-30).all()


@pytest.mark.parametrize("spec", [V3, K2, V2, LITE])
@pytest.mark.parametrize("levels", [1, 2, 3])
def test_ties_go_to_the_lowest_id(spec: GateSpec, levels: int) -> None:
    """Logits of few values: nearly all choices, and choices of groups, are ties."""
    random = torch.Generator().manual_seed(levels)
    logits = torch.randint(0, levels, (6, 64), generator=random).float()
    bias = torch.randint(0, levels, (64,), generator=random).float()
    for some in (None, bias):
        ids = choose(logits.unsqueeze(0), some, spec)[0]
        assert torch.equal(ids, choose_twin(logits, some, spec)[0])
        if some is None:
            weight = torch.eye(64)
            assert torch.equal(ids, TorchKernels().gate(logits, weight, None, spec)[0])


def test_parts_are_added_in_order() -> None:
    parts = normal(5, 3, 64)
    total = torch.zeros(3, 64)
    for part in parts:
        total = total + part
    for got, want in zip(
        choose(parts, None, V2), choose(total.unsqueeze(0), None, V2), strict=True
    ):
        assert torch.equal(got, want)


def test_numbers_that_are_none_still_give_experts_that_exist() -> None:
    logits = normal(3, 64)
    logits[0, 5], logits[1, :] = float("nan"), float("nan")
    logits[2, 9] = float("inf")
    for spec in (V3, K2, V2, LITE):
        ids = choose(logits.unsqueeze(0), None, spec)[0]
        assert ((ids >= 0) & (ids < 64)).all()
        assert all(len(set(row)) == spec.top_k for row in ids.tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("tokens", "experts", "hidden"),
    [(1, 8, 16), (5, 70, PART + 40), (17, 64, 2 * PART), (35, 33, 100), (0, 8, 16)],
)
def test_router(dtype: torch.dtype, tokens: int, experts: int, hidden: int) -> None:
    x = torch.full((tokens + 2, hidden + 3), float("nan"), dtype=dtype)[:tokens, :hidden]
    x.copy_(normal(tokens, hidden).to(dtype))
    padded = torch.full((experts + 1, hidden + 2), float("nan"))
    padded[:experts, :hidden] = normal(experts, hidden, seed=1)
    weight = padded[:experts, :hidden]
    want = router_twin(x, weight)
    whole = router_logits(x, weight, (1, -(-hidden // PART)))
    split = router_logits(x, weight, (-(-hidden // PART), 1))
    total = torch.zeros(tokens, experts)
    for part in split:
        total = total + part
    assert torch.equal(whole[0], total)
    # fp32 sums of `hidden` products of size one: 2**-24 of some tens each.
    assert ((whole[0] - want).abs() <= 1e-6 * hidden**0.5 * 4).all()


def test_a_weight_keeps_all_its_bits_beside_bf16_rows() -> None:
    """One-hot rows give the weight back: 24 bits, where one bf16 product would leave 8."""
    weight = normal(16, 64) * 10 ** normal(16, 64, seed=1)
    got = router_logits(torch.eye(64, dtype=torch.bfloat16), weight)
    assert torch.equal(got[0].T, weight)


def test_gate_is_that_of_the_torch_kernels() -> None:
    x, weight, bias = normal(3, 96), normal(64, 96, seed=1), normal(64, seed=2)
    for dtype in (torch.float32, torch.bfloat16):
        for spec, some in ((V3, bias), (V2, None), (LITE, None)):
            ids, weights = gate(x.to(dtype), weight, some, spec)
            want_ids, want = TorchKernels().gate(x.to(dtype), weight, some, spec)
            assert torch.equal(ids, want_ids)
            # Logits of size 10 from sums in another order: 1e-5 before exp, which keeps it.
            assert torch.allclose(weights, want, rtol=3e-5, atol=0)


def test_a_row_alone_is_the_row_in_company() -> None:
    x, weight = normal(18, PART + 8).bfloat16(), normal(64, PART + 8, seed=1)
    ids, weights = gate(x, weight, None, V3)
    for row in (0, 17):
        alone = gate(x[row : row + 1], weight, None, V3)
        assert torch.equal(alone[0][0], ids[row]) and torch.equal(alone[1][0], weights[row])


def test_what_cannot_be_is_refused() -> None:
    logits = normal(1, 2, 30)
    for spec, words in (
        (replace(K2, scoring="relu"), "scoring"),
        (replace(K2, group_score="mean"), "group_score"),
        (V3, "groups of equal size"),
        (replace(K2, top_k=31), "top_k"),
    ):
        with pytest.raises(ShapeRefused, match=words):
            choose(logits, None, spec)
    with pytest.raises(ShapeRefused, match="weight"):
        router_logits(normal(2, 8), normal(4, 9))
