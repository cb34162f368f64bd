"""DeepGEMM as installed beside our FP8 products on a device, at DeepSeek-V3's shapes.

What the stand-in of tests/interpreter cannot prove: that the real library takes what the adapter
hands it, and computes the same. Skipped, with its own words, where the library is not here.
"""

from __future__ import annotations

import pytest
import torch

from dispatch.base import ScaleFormat
from models.deepseek.kernels.gpu.gemm_adapters import (
    AGREES,
    GemmProblem,
    check_gemm_against_ours,
)
from models.deepseek.kernels.gpu.gemm_deep_gemm import DeepGemm, arch_of
from models.deepseek.kernels.gpu.scales import empty_scales

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device"),
]


@pytest.fixture
def library() -> DeepGemm:
    adapter = DeepGemm()
    powers = arch_of(DEVICE) == 100
    why = adapter.refusal(GemmProblem("dense", 128, 128, arch_of(DEVICE), ue8m0=powers))
    if why is not None:
        pytest.skip(why)
    return adapter


def codes(*shape: int) -> torch.Tensor:
    raw = torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE)
    return raw.bitwise_and_(0xBF).view(torch.float8_e4m3fn)  # below 2 in size: no NaN


def scales(*shape: int) -> torch.Tensor:
    """Powers of two: both chips take them."""
    return 2.0 ** torch.randint(-3, 3, shape, device=DEVICE).float()


def rows(count: int, width: int, experts: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    held = empty_scales(count, width, ScaleFormat.F32_COLUMN, DEVICE, experts)
    held.copy_(scales(*held.shape))
    return codes(*held.shape[:-1], width), held


@pytest.mark.parametrize("count", [1, 3, 128, 300])
@pytest.mark.parametrize(("columns", "width"), [(2112, 7168), (24576, 1536), (7168, 2048)])
def test_dense(library: DeepGemm, count: int, columns: int, width: int) -> None:
    b, blocks = codes(columns, width), scales(-(-columns // 128), width // 128)
    assert check_gemm_against_ours(library, "dense", *rows(count, width), b, blocks) < AGREES


def test_masked(library: DeepGemm) -> None:
    counts = torch.tensor([0, 5, 128, 1], dtype=torch.int32, device=DEVICE)
    b, blocks = codes(4, 4096, 7168), scales(4, 32, 56)
    held = rows(128, 7168, 4)
    assert check_gemm_against_ours(library, "masked", *held, b, blocks, counts) < AGREES


def test_segments(library: DeepGemm) -> None:
    ends = torch.tensor([100, 128, 300, 500], dtype=torch.int32, device=DEVICE)
    b, blocks = codes(4, 7168, 2048), scales(4, 56, 16)
    held = rows(512, 2048)
    off = check_gemm_against_ours(library, "contiguous", *held, b, blocks, ends, alignment=128)
    assert off < AGREES
