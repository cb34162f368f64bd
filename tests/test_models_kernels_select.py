"""Choosing kernels by name and device where there is no CUDA: what is refused, and in which words.

The device itself is faked only where torch is asked about it; no kernel runs here.
"""

from __future__ import annotations

import pytest
import torch

from models.deepseek.kernels.base import MlaShape
from models.deepseek.kernels.errors import KernelsUnavailable
from models.deepseek.kernels.gpu import triton_kernels
from models.deepseek.kernels.select import KernelChoice, create_kernels, fitting
from models.deepseek.kernels.torch_kernels import TorchKernels


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(triton_kernels, "HAVE_TRITON", True)


@pytest.mark.parametrize(
    ("name", "device"), [("triton", "cpu"), ("auto", "cuda"), ("triton", "cuda:1")]
)
def test_triton_without_a_device(no_cuda: None, name: str, device: str) -> None:
    with pytest.raises(KernelsUnavailable, match="torch finds no CUDA device"):
        create_kernels(name, device)


@pytest.mark.parametrize("name", ["native", "torch"])
def test_kernels_of_the_cpu_are_refused_elsewhere(name: str) -> None:
    with pytest.raises(KernelsUnavailable, match="runs on cpu, not on cuda; kernels=triton can"):
        create_kernels(name, "cuda")


def test_triton_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernels, "HAVE_TRITON", False)
    with pytest.raises(KernelsUnavailable, match="triton is not installed"):
        create_kernels("triton")


def test_too_old_a_device(no_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    with pytest.raises(KernelsUnavailable, match="A100 has compute capability 8.0"):
        create_kernels("auto", "cuda")


def test_triton_on_a_device(no_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H200")
    for name in ("auto", "triton"):
        choice = create_kernels(name, "cuda")
        assert choice.kernels.name == "triton" and choice.reason.startswith("kernels: triton (")
        assert "H200" in choice.reason and "H200" in choice.numerics


def test_what_triton_cannot_compute_has_no_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = TorchKernels()
    kernels.name = "triton"
    monkeypatch.setattr(kernels, "misfit", lambda *shape: "rope_dim=9 is odd")
    shape = MlaShape(1, 8, 9, 16, 8, 1.0, 1e-6)
    for name in ("auto", "triton"):
        with pytest.raises(KernelsUnavailable, match="rope_dim=9 is odd; on a CPU"):
            fitting(KernelChoice(kernels, ""), name, shape, torch.bfloat16, True)
