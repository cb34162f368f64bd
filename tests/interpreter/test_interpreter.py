"""Triton's interpreter itself against torch, in each dtype that kernels use.

What it does right, kernels and their tests lean on; what it does wrong (bf16 and fp8 arithmetic by
bit patterns, without a word), they step around by widening. Should a new triton mend it, the tests
of the faults say so.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from models.deepseek.kernels.gpu.language import INTERPRET, INTERPRETED
from models.deepseek.kernels.gpu.rounding import to_bf16, to_e4m3

N = 32


@triton.jit
def _dot(a, b, out, widen: tl.constexpr, n: tl.constexpr):
    at = tl.arange(0, n)[:, None] * n + tl.arange(0, n)[None, :]
    x, y = tl.load(a + at), tl.load(b + at)
    if widen:
        x, y = x.to(tl.float32), y.to(tl.float32)
    tl.store(out + at, tl.dot(x, y, out_dtype=tl.float32, input_precision="ieee"))


@triton.jit
def _add(a, b, out, widen: tl.constexpr, n: tl.constexpr):
    at = tl.arange(0, n)
    x, y = tl.load(a + at), tl.load(b + at)
    if widen:
        x, y = x.to(tl.float32), y.to(tl.float32)
    if widen and out.dtype.element_ty == tl.bfloat16:
        tl.store(out + at, to_bf16(x + y))
    elif widen and out.dtype.element_ty == tl.float8e4nv:
        tl.store(out + at, to_e4m3(x + y))
    else:
        tl.store(out + at, x + y)


@triton.jit
def _cast(a, out, n: tl.constexpr):
    at = tl.arange(0, n)
    tl.store(out + at, tl.load(a + at).to(tl.float32).to(out.dtype.element_ty))


@triton.jit
def _round(a, out, n: tl.constexpr):
    at = tl.arange(0, n)
    x = tl.load(a + at).to(tl.float32)
    if out.dtype.element_ty == tl.bfloat16:
        tl.store(out + at, to_bf16(x))
    else:
        tl.store(out + at, to_e4m3(x))


def random(dtype: torch.dtype, *shape: int) -> Tensor:
    torch.manual_seed(5)
    return torch.randn(*shape).to(dtype)


def dot_error(dtype: torch.dtype, widen: bool) -> float:
    a, b = random(dtype, N, N), random(dtype, N, N).t().contiguous()
    out = torch.empty(N, N)
    _dot[(1,)](a, b, out, widen, N)
    expected = a.double() @ b.double()
    return float((out - expected).abs().max() / expected.abs().max())


def add_error(dtype: torch.dtype, widen: bool) -> float:
    a, b = random(dtype, 2, N)
    out = torch.empty(N, dtype=dtype)
    _add[(1,)](a, b, out, widen, N)
    expected = (a.float() + b.float()).to(dtype).double()
    return float((out.double() - expected).abs().max().nan_to_num(nan=torch.inf))


FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("dtype", "widen"),
    [
        (torch.float32, False),
        (torch.float16, False),
        (FP8, False),
        (torch.bfloat16, True),
        (FP8, True),
    ],
)
def test_a_product_is_right(dtype: torch.dtype, widen: bool) -> None:
    assert dot_error(dtype, widen) < 1e-6  # fp32 sums of 32 exact products


@pytest.mark.parametrize(
    ("dtype", "widen"),
    [(torch.float32, False), (torch.float16, False), (torch.bfloat16, True), (FP8, True)],
)
def test_a_sum_is_right(dtype: torch.dtype, widen: bool) -> None:
    assert add_error(dtype, widen) == 0


def test_the_faults_are_still_there() -> None:
    """If this fails, triton has mended its interpreter: kernels need not step around it then."""
    assert dot_error(torch.bfloat16, False) > 1
    assert add_error(torch.bfloat16, False) > 1
    assert add_error(FP8, False) > 1
    assert cast(_cast, torch.tensor([1.0 + 2**-8 + 2**-9]), torch.bfloat16) == [1.0]
    assert cast(_cast, torch.tensor([124.0]), FP8) == [64.0]


def cast(kernel: object, x: Tensor, dtype: torch.dtype) -> list[float]:
    padded = torch.zeros(2048, dtype=x.dtype)
    padded[: len(x)] = x
    out = torch.empty(2048, dtype=dtype)
    kernel[(1,)](padded, out, 2048)
    return out[: len(x)].float().tolist()


def hard_values() -> Tensor:
    """fp32: every e4m3 value, the middles between neighbours, what lies just beside those, and what
    e4m3 cannot hold."""
    codes = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    codes = codes[codes.isfinite()].sort().values
    middle = (codes[1:] + codes[:-1]) / 2
    beside = [middle.nextafter(codes[1:]), middle.nextafter(codes[:-1])]
    far = torch.tensor([449.0, 464.0, 465.0, 480.0, 1e9, -1e9, torch.inf, -torch.inf, 1e-30])
    return torch.cat((codes, middle, *beside, far, torch.randn(500) * 50))


@pytest.mark.parametrize("dtype", [FP8, torch.bfloat16])
def test_rounding_to_nearest_even_as_torch_does(dtype: torch.dtype) -> None:
    x = hard_values()
    assert cast(_round, x, dtype) == x.to(dtype).float().tolist()
    assert cast(_round, torch.tensor([torch.nan]), dtype)[0] != 0.0
    assert torch.tensor(cast(_round, torch.tensor([torch.nan]), dtype)).isnan().all()


def test_fp16_and_widening_casts_are_right() -> None:
    x = hard_values()
    assert cast(_cast, x, torch.float16) == x.half().float().tolist()
    codes = torch.arange(0, 127, dtype=torch.uint8).view(FP8)
    for narrow in (codes, x.bfloat16()):
        assert cast(_cast, narrow, torch.float32) == narrow.float().tolist()


def test_kernels_are_told_that_they_are_interpreted() -> None:
    assert INTERPRETED and INTERPRET.value is True
