"""What becomes of a library that raises on a device: who may go on, and what is never caught."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_cuda import CUDA, fake_cuda

from models.deepseek.kernels.gpu.choice import Failures, is_captured, nobody_goes_on
from models.deepseek.kernels.gpu.gemm_adapters import GemmProblem, TritonGemm
from models.deepseek.kernels.gpu.gemm_choice import Gemms
from models.deepseek.kernels.gpu.mla_adapters import MlaProblem, MlaStep, TritonMla
from models.deepseek.kernels.gpu.mla_guard import MlaGuard

CPU = torch.device("cpu")


class Broken(TritonGemm):
    name = "deep_gemm"

    def __init__(self, error: Exception) -> None:
        self.error, self.asked = error, 0

    def refusal(self, problem: GemmProblem) -> str | None:
        return None

    def dense(self, *args: Any) -> Any:  # type: ignore[override]
        self.asked += 1
        raise self.error


def product(gemms: Gemms) -> Any:
    a = torch.empty(4, 128, dtype=torch.float8_e4m3fn, device=CUDA)
    b = torch.empty(128, 128, dtype=torch.float8_e4m3fn, device=CUDA)
    scales = torch.empty(4, 1, device=CUDA), torch.empty(1, 1, device=CUDA)
    return gemms.dense(a, scales[0], b, scales[1])


def stream(monkeypatch: pytest.MonkeyPatch, fault: Exception | None) -> None:
    """How the device answers when it is asked whether it is done."""

    def query() -> bool:
        if fault is not None:
            raise fault
        return False  # it is at work: that is well

    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device=None: SimpleNamespace(query=query)
    )


def test_ours_goes_on_where_the_device_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    stream(monkeypatch, None)
    library, said = Broken(RuntimeError("no compiler")), list[str]()
    gemms = Gemms(90, [library])
    gemms.failures.say = said.append
    with fake_cuda() as cuda:
        assert product(gemms).shape == product(gemms).shape == (4, 128)
    assert [x.name for x in cuda.launches] == ["fp8_gemm_kernel"] * 2
    assert library.asked == 1 and said == list(gemms.choices)


def test_a_fault_of_the_device_is_not_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """An illegal address stays: no kernel can go on, and the error must end the engine."""
    stream(monkeypatch, RuntimeError("CUDA error: an illegal memory access was encountered"))
    gemms = Gemms(90, [Broken(RuntimeError("CUDA error: an illegal memory access"))])
    said = list[str]()
    gemms.failures.say = said.append
    with fake_cuda() as cuda, pytest.raises(RuntimeError, match="illegal memory access"):
        product(gemms)
    assert not cuda.launches and not said


def test_within_a_capture_an_error_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a library's kernels may be in the graph. The next capture is ours."""
    stream(monkeypatch, None)
    library = Broken(RuntimeError("operation not permitted when stream is capturing"))
    gemms = Gemms(90, [library])
    with fake_cuda(capturing=True) as cuda:
        with pytest.raises(RuntimeError, match="not permitted"):
            product(gemms)
        assert not cuda.launches
        product(gemms)
    assert library.asked == 1 and len(cuda.launches) == 1


def test_short_memory_in_a_capture_says_nothing_of_a_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream(monkeypatch, None)
    library = Broken(torch.OutOfMemoryError("no memory"))
    gemms = Gemms(90, [library])
    with fake_cuda(capturing=True):
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError):
                product(gemms)
    assert library.asked == 2


def test_who_is_asked_after_it_raised() -> None:
    failures = Failures()
    failures.did("lib", "problem")
    assert failures.take(RuntimeError("a"), "lib", "problem", 64, CPU)
    assert not failures.take(RuntimeError("b"), "lib", "other", 1, CPU)
    whys = [failures.why("lib", "problem", n) for n in (32, 64, 128)]
    assert whys == [None, "it raised RuntimeError: a at 33 to 64 rows", None]
    assert failures.why("lib", "other", 512) == "it raised RuntimeError: b"
    assert failures.why("beside", "problem", 64) is None
    failures.did("lib", 1)
    failures.take(RuntimeError("c"), "lib", 1, 1, CPU)
    assert failures.why("lib", 1, 1) == "it raised RuntimeError: c at 1 rows"
    assert not nobody_goes_on(CPU) and not is_captured(CPU)


class BrokenMla:
    """early: it raises while its step is made, else at its first call."""

    name = "flash_mla"

    def __init__(self, early: bool) -> None:
        self.early, self.asked = early, 0

    def refusal(self, problem: MlaProblem) -> str | None:
        return None

    def step(self, problem: MlaProblem, step: MlaStep) -> Any:
        def decode(q: Any, layer: Any) -> Any:
            self.asked += 1
            raise RuntimeError("as asked")

        return decode(None, None) if self.early else decode


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("capturing", [False, True])
def test_a_step_that_may_not_go_on_ends(
    early: bool, capturing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a capture, or on a device at fault. What is captured next is ours."""
    stream(monkeypatch, None if capturing else RuntimeError("CUDA error: illegal address"))
    problem, broken, guard = MlaProblem(4, 512, 64, 64, 90), BrokenMla(early), MlaGuard()
    said = list[str]()
    guard.failures.say = said.append
    with fake_cuda(capturing=capturing):
        q = torch.empty(4, 4, 576, dtype=torch.bfloat16, device=CUDA)
        plan: Any = SimpleNamespace(num_rows=4)
        step = MlaStep(plan, torch.empty(1, 1, dtype=torch.int32, device=CUDA), 1.0)
        with pytest.raises(RuntimeError, match="as asked"):
            guard.step(problem, step, [broken, TritonMla()])(q, q)
        assert not said and guard.choices == ()
        guard.step(problem, step, [broken, TritonMla()])
    assert broken.asked == 1
    assert guard.choices == ("mla decode: triton (no flash_mla: it raised RuntimeError: as asked)",)
