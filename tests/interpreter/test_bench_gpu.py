"""What times the GPU kernels on a device, walked in the interpreter: each kind of case once."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from models.deepseek.kernels.gpu.bench.case import Case, Prepared
from models.deepseek.kernels.gpu.bench.clock import Timing
from models.deepseek.kernels.gpu.bench.limits import Limits
from models.deepseek.kernels.gpu.bench.run import OURS, all_cases, measure, measure_all
from models.deepseek.kernels.gpu.bench.sizes import TINY, V3
from models.deepseek.kernels.gpu.cost import KernelCost

CPU = torch.device("cpu")
LIMITS = Limits(1e9, 1e9, 1e9, "none", 1e-6)
SMALL = replace(
    TINY, heads=2, prefill=5, prompts=(((2, 9),), ((5, 0),)), contexts=(20,), decode=(1, 2)
)


class Once:
    """Runs each call once."""

    def time(self, call: Callable[[], object], cold: bool, budget: float) -> Timing:
        began = time.perf_counter()
        call()
        return Timing(time.perf_counter() - began, 1)

    def rest(self) -> None:
        return None

    def room(self) -> int | None:
        return 1 << 20


def families() -> list[Case]:
    """The first case of each kernel, and both forms of a cache."""
    chosen: dict[str, Case] = {}
    for case in all_cases(SMALL, CPU):
        chosen.setdefault(f"{case.kernel} {case.key.get('fp8', '')}", case)
    return list(chosen.values())


@pytest.mark.parametrize("case", families(), ids=lambda case: case.name.replace(" ", "_"))
def test_a_case_of_each_kind(case: Case) -> None:
    row = measure(case, Once(), LIMITS)
    assert row.error == "" and row.ours > 0
    assert row.limit > 0 and row.bytes > 0
    assert not row.wrong, row.differences
    assert {"name", "winner"} & row.as_json().keys() == {"winner"}
    absent = {name for name, why in row.absent.items() if why}
    if case.kernel.startswith(("fp8_gemm", "grouped")):
        assert absent == {"deep_gemm"} and set(row.rivals) == {"torch bf16"}
    if case.kernel == "mla_decode":
        assert absent == {"flash_mla", "flashinfer"}


def test_v3_shapes_are_those_that_were_asked_for() -> None:
    cases = all_cases(V3, CPU)
    names = [case.name for case in cases]
    assert len(set(names)) == len(names)
    kernels = {case.kernel for case in cases}
    assert {case.kernel for case in cases[: len(kernels)]} == kernels, "one of each is first"
    behind = [case.first for case in cases[len(kernels) :]]
    assert behind == sorted(behind, reverse=True)
    decode = [c.key for c in cases if c.kernel == "mla_decode"]
    assert {(k["rows"], k["context"], k["fp8"]) for k in decode} >= {
        (rows, context, fp8)
        for rows in (1, 128, 256)
        for context in (1024, 4096, 32768, 131072)
        for fp8 in (0, 1)
    }
    for form in ("masked", "contiguous"):
        of_form = [c for c in cases if c.kernel == f"grouped_{form}"]
        assert {c.key["experts"] for c in of_form} == {1, 2, 8, 32}
    prefill = [c for c in cases if c.kernel == "mla_prefill"]
    assert {c.key["rows"] for c in prefill} >= {16384}
    assert max(c.key["rows"] for c in cases if c.kernel == "fp8_gemm") == 16384
    assert {c.unit for c in cases} == {"fp8", "bf16", "none"}


def fake_case(name: str, prepared: Prepared | Exception) -> Case:
    def make() -> Prepared:
        if isinstance(prepared, Exception):
            raise prepared
        return prepared

    return Case("fake", name, {"rows": 1}, KernelCost(1000, 10), "bf16", make)


def test_what_raises_is_a_row_and_what_differs_does_not_win() -> None:
    good, other = torch.ones(3), torch.tensor([1.0, 1.0, 2.0])
    from models.deepseek.kernels.gpu.bench.case import largest_difference

    def broken() -> torch.Tensor:
        raise ValueError("no such chip\nmore")

    cases = [
        fake_case("a", RuntimeError("out of memory\nmore")),
        fake_case(
            "b",
            Prepared(
                lambda: good,
                {"same": lambda: good, "wrong": lambda: other, "broken": broken},
                {"gone": "not installed"},
                largest_difference,
            ),
        ),
    ]
    done = measure_all(cases, Once(), LIMITS, 60)
    first, second = done.rows
    assert first.error == "RuntimeError: out of memory" and done.failed == [first]
    assert first.as_json()["winner"] == ""
    assert second.wrong == ("wrong",) and second.winner in (OURS, "same")
    assert second.absent == {"gone": "not installed", "broken": "ValueError: no such chip"}
    assert second.bound == "memory" and second.limit == 1e-6


def test_a_budget_ends_it_and_names_what_is_left() -> None:
    cases = [fake_case(name, Prepared(lambda: time.sleep(0.02))) for name in "abc"]
    done = measure_all(cases, Once(), LIMITS, 0.01)
    assert [row.shape for row in done.rows] == ["a"] and done.left == ["fake b", "fake c"]


def test_the_first_ones_are_measured_whatever_the_time_and_all_is_kept_as_it_comes() -> None:
    cases = [fake_case(name, Prepared(lambda: time.sleep(0.02))) for name in "abcd"]
    seen = []
    done = measure_all(cases, Once(), LIMITS, 0.0, least=2, keep=seen.append)
    assert [row.shape for row in done.rows] == ["a", "b"] and len(done.left) == 2
    assert [(len(m.rows), m.left) for m in seen] == [
        (1, ["fake b", "fake c", "fake d"]),
        (2, ["fake c", "fake d"]),
    ]


def test_what_a_device_has_no_room_for_is_left_out_with_a_reason() -> None:
    large = replace(fake_case("large", RuntimeError("out of memory")), memory=3 << 30)
    small = replace(fake_case("small", Prepared(lambda: None)), memory=1 << 20)
    done = measure_all([large, small], Once(), LIMITS, 60)
    assert [row.shape for row in done.rows] == ["small"] and not done.left and not done.failed
    assert done.too_large == {"fake large": "takes 3.0 GiB, 0.0 GiB are free"}


def test_a_cache_is_counted_whole() -> None:
    """256 sequences of 128K positions: 2048 blocks each, 1152 bytes a position in bf16."""
    found = {c.shape: c.memory for c in all_cases(V3, CPU) if c.kernel == "mla_decode"}
    assert 0 <= found["256 x 131072 bf16"] - 256 * 131072 * 1152 <= 4 << 30
    assert 0 <= found["256 x 131072 fp8"] - 256 * 131072 * 656 <= 4 << 30
