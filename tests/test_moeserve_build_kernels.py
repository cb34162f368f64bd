"""What an engine tells of its kernels while it runs: who serves now, and a library that failed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gated_toy import make

from models.deepseek.kernels.gpu.bench.winners import FastestMla, Winners
from models.deepseek.kernels.gpu.choice import Failures
from models.deepseek.kernels.gpu.gemm_choice import Gemms
from models.deepseek.kernels.gpu.triton_attention import TritonAttention
from moeserve.build import _tell_kernels


def config(quiet: bool = False) -> Any:
    return SimpleNamespace(engine=SimpleNamespace(quiet=quiet))


class Chooses:
    def __init__(self) -> None:
        self.choices: tuple[str, ...] = ("dense: deep_gemm",)
        self.say: Any = None

    def tell_failures(self, say: Any) -> None:
        self.say = say


def test_choices_are_asked_anew_and_failures_are_said_with_the_rank(
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine, kernels = make(), Chooses()
    _tell_kernels(config(), engine, kernels)
    assert engine.info["kernel_choices"] == ["dense: deep_gemm"]
    kernels.choices = ("dense: triton (no deep_gemm: why)",)
    assert engine.info["kernel_choices"] == list(kernels.choices)
    assert engine.stats().kernel_choices == kernels.choices
    kernels.say(kernels.choices[0])
    line = "moeserve: rank 0: kernels: dense: triton (no deep_gemm: why)\n"
    assert capsys.readouterr().err == line


def test_quiet_engines_and_kernels_that_choose_nothing_say_nothing() -> None:
    engine, kernels = make(), Chooses()
    assert engine.stats().kernel_choices == () and "kernel_choices" not in engine.info
    _tell_kernels(config(quiet=True), engine, kernels)
    assert kernels.say is None
    _tell_kernels(config(), engine, object())
    assert engine.info["kernel_choices"] == [] and engine.stats().kernel_choices == ()


def test_every_part_that_chooses_is_told() -> None:
    fastest, gemms, said = FastestMla(Winners("chip", {}), []), Gemms(), list[str]()
    kernels = TritonAttention(torch.device("cpu"), decode_backends=[fastest], gemms=gemms)
    kernels.tell_failures(said.append)
    held: list[Failures] = [kernels._guard.failures, fastest.failures, gemms.failures]
    for number, failures in enumerate(held):
        failures.say(str(number))
    assert said == ["0", "1", "2"]
