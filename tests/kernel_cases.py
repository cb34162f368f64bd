"""What the kernel tests share: the builds under test, tolerances, random inputs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from models.deepseek.kernels.base import GateSpec, Kernels
from models.deepseek.kernels.errors import KernelsUnavailable
from models.deepseek.kernels.native_kernels import NativeKernels
from models.deepseek.kernels.torch_kernels import TorchKernels

VARIANTS = {
    "native": (),
    "native-no-bf16": ("MOESERVE_NO_BF16",),
    "native-avx2": ("MOESERVE_NO_AVX512",),
    "native-portable": ("MOESERVE_NO_SIMD",),
}
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module", params=["torch", *VARIANTS])
def kernels(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    before = torch.get_num_threads()
    torch.set_num_threads(1 if request.param == "torch" else 2)
    try:
        yield TorchKernels() if request.param == "torch" else NativeKernels(VARIANTS[request.param])
    except KernelsUnavailable as error:
        pytest.skip(str(error).splitlines()[0])
    finally:
        torch.set_num_threads(before)


def normal(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape) * scale).to(dtype)


def close(got: Tensor, want: Tensor, dtype: torch.dtype, scale: float = 1.0) -> None:
    """want is float64. float32: 2e-5 of the typical size; bfloat16: its rounding, twice."""
    assert got.shape == want.shape
    if want.numel() == 0:
        return
    size = max(want.abs().max().item(), 1e-6) * scale
    limit = (2e-5 if dtype == torch.float32 else 1.2e-2) * size
    error = (got.double() - want).abs().max().item()
    assert error <= limit, f"error {error}, limit {limit}"


def spec(
    top_k: int = 4,
    num_groups: int = 1,
    topk_groups: int = 1,
    scoring: str = "sigmoid",
    group_score: str = "top2",
    renormalise: bool = True,
    scale: float = 2.5,
) -> GateSpec:
    return GateSpec(top_k, num_groups, topk_groups, scoring, group_score, renormalise, scale)
