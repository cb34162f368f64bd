"""DeepGEMM behind the calls of our FP8 products: choice, arguments, layouts, results.

The library is a stand-in with the signatures of its 2.6, which checks shapes, strides and types as
it documents them, writes NaN where it writes nothing, and computes in float64.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dispatch.base import ScaleFormat
from models.deepseek.kernels.gpu.errors import ShapeRefused
from models.deepseek.kernels.gpu.fp8_gemm import fp8_gemm, fp8_gemm_twin
from models.deepseek.kernels.gpu.gemm_adapters import (
    AGREES,
    GemmProblem,
    TritonGemm,
    check_gemm_against_ours,
    choose_gemm,
    problem_of,
)
from models.deepseek.kernels.gpu.gemm_choice import Gemms
from models.deepseek.kernels.gpu.gemm_deep_gemm import DeepGemm, owners_of_rows, parameters
from models.deepseek.kernels.gpu.grouped_gemm import segments
from models.deepseek.kernels.gpu.quant import quantise

BF16 = torch.bfloat16
COLUMN = ScaleFormat.F32_COLUMN
PROBLEM = GemmProblem("dense", 128, 256, 90)

# What the reference names of each function, in order; the double below must have just these.
SIGNATURES = {
    "fp8_gemm_nt": ["a", "b", "d", "c"],
    "m_grouped_fp8_gemm_nt_contiguous": ["a", "b", "d", "grouped_layout", "recipe"],
    "m_grouped_fp8_gemm_nt_masked": ["a", "b", "d", "masked_m", "expected_m"],
}
LATER = ("use_psum_layout", "ensure_zero_padding", "expected_m_for_psum_layout")


class Library:
    """arch decides the scales that are taken; alignment where segments begin."""

    def __init__(self, arch: int = 90, alignment: int = 128) -> None:
        self._arch, self._alignment = arch, alignment
        self.calls: list[str] = []

    def get_mk_alignment_for_contiguous_layout(self) -> int:
        return self._alignment

    def fp8_gemm_nt(self, a: Any, b: Any, d: Tensor, c: Tensor | None = None, **more: Any) -> None:
        self.calls.append("dense")
        assert not more and c is None
        x, weight = self._operands(a, b, stacked=False)
        self._result(d, (x.shape[0], weight.shape[0]))
        d.copy_((x @ weight.T).to(d.dtype))

    def m_grouped_fp8_gemm_nt_contiguous(
        self, a: Any, b: Any, d: Tensor, grouped_layout: Tensor, recipe: Any = None,
        compiled_dims: str = "nk", disable_ue8m0_cast: bool = False,
        use_psum_layout: bool = False, ensure_zero_padding: bool = True,
        expected_m_for_psum_layout: int | None = None,
    ) -> None:  # fmt: skip
        self.calls.append("psum" if use_psum_layout else "owners")
        x, weight = self._operands(a, b, stacked=True)
        self._result(d, (x.shape[0], weight.shape[1]))
        assert grouped_layout.dtype == torch.int32 and grouped_layout.is_contiguous()
        d.fill_(torch.nan)
        if use_psum_layout:
            assert self._arch != 90 and grouped_layout.shape == (weight.shape[0],)
            held = segments(grouped_layout.tolist(), self._alignment)
            for i, (begin, end) in enumerate(held):
                d[begin:end] = (x[begin:end] @ weight[i].T).to(d.dtype)
            return
        assert grouped_layout.shape == (x.shape[0],)
        owners = grouped_layout.tolist()
        for row, owner in enumerate(owners):
            assert -1 <= owner < weight.shape[0]
            first = row - row % self._alignment  # a tile has one expert
            assert owner in (-1, owners[first]), "an expert begins inside of a tile"
            if owner >= 0:
                d[row] = (x[row] @ weight[owner].T).to(d.dtype)

    def m_grouped_fp8_gemm_nt_masked(
        self, a: Any, b: Any, d: Tensor, masked_m: Tensor, expected_m: int, **more: Any
    ) -> None:
        self.calls.append(f"masked {expected_m}")
        assert not more
        x, weight = self._operands(a, b, stacked=True)
        experts, room, _ = x.shape
        self._result(d, (experts, room, weight.shape[1]))
        assert masked_m.dtype == torch.int32 and masked_m.shape == (experts,)
        assert 1 <= expected_m <= room
        d.fill_(torch.nan)
        for i, n in enumerate(masked_m.tolist()):
            d[i, :n] = (x[i, :n] @ weight[i].T).to(d.dtype)

    def _operands(self, a: Any, b: Any, stacked: bool) -> tuple[Tensor, Tensor]:
        (codes, scales), (weight, blocks) = a, b
        for x in (codes, weight):
            assert x.dtype == torch.float8_e4m3fn and x.stride(-1) == 1
            if x.dim() == 3:
                assert x.stride(0) == x.shape[1] * x.shape[2], x.stride()
        assert weight.dim() == (3 if stacked else 2)
        columns, width = weight.shape[-2:]
        assert codes.shape[-1] == width and width % 128 == 0
        assert blocks.dtype == torch.float32 and blocks.is_contiguous()
        assert blocks.shape == (*weight.shape[:-2], -(-columns // 128), width // 128)
        if scales.dtype == torch.int32:
            assert self._arch == 100
            words = -(-width // 512)
            assert scales.shape == (*codes.shape[:-1], words) and scales.stride(-2) == 1
            assert scales.stride(-1) == -(-codes.shape[-2] // 4) * 4 or words == 1
        else:
            assert scales.dtype == torch.float32
            assert scales.shape == (*codes.shape[:-1], width // 128)
            if self._arch == 100:
                assert (torch.frexp(scales).mantissa == 0.5).all()
        if self._arch == 100:
            assert (torch.frexp(blocks).mantissa == 0.5).all()
        flat = codes.reshape(-1, width)
        ours = fp8_gemm_twin(  # times one: what the rows are
            flat, scales.reshape(-1, scales.shape[-1]),
            torch.eye(width).to(torch.float8_e4m3fn), torch.ones(width // 128, width // 128),
        )  # fmt: skip
        wide = blocks.repeat_interleave(128, -2).repeat_interleave(128, -1)
        return ours.view(codes.shape), weight.double() * wide[..., :columns, :].double()

    @staticmethod
    def _result(d: Tensor, shape: tuple[int, ...]) -> None:
        assert d.shape == shape and d.dtype == BF16 and d.is_contiguous()


def rows(*shape: int, form: ScaleFormat = COLUMN, ue8m0: bool = False) -> tuple[Tensor, Tensor]:
    """Quantised rows [.., M, K]; of stacked ones each expert's scales lie as a table of its own."""
    g = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(*shape, generator=g).bfloat16()
    if len(shape) == 2:
        return quantise(x, form, ue8m0=ue8m0)
    counts = torch.full((shape[0],), shape[1], dtype=torch.int32)
    return quantise(x, form, ue8m0=ue8m0, counts=counts)


def weight(*shape: int, ue8m0: bool = False) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(sum(shape) + 1)
    codes = torch.randn(*shape, generator=g).to(torch.float8_e4m3fn)
    grid = (*shape[:-2], -(-shape[-2] // 128), shape[-1] // 128)
    scales = torch.rand(grid, generator=g) + 0.5
    return codes, 2.0 ** torch.round(scales * 3) if ue8m0 else scales


def library(arch: int = 90, alignment: int = 128) -> tuple[DeepGemm, Library]:
    double = Library(arch, alignment)
    return DeepGemm(double, arch), double


def test_the_double_is_the_reference() -> None:
    double = Library()
    for name, first in SIGNATURES.items():
        names = list(inspect.signature(getattr(double, name)).parameters)
        assert names[: len(first)] == first, name
    psum = parameters(double.m_grouped_fp8_gemm_nt_contiguous)
    assert set(LATER) <= set(psum)


@pytest.mark.parametrize("form", [COLUMN, ScaleFormat.F32_ROW])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_dense(form: ScaleFormat, count: int) -> None:
    adapter, double = library()
    a, scales = rows(count, 256, form=form)
    off = check_gemm_against_ours(adapter, "dense", a, scales, *weight(192, 256))
    assert off < AGREES and double.calls == (["dense"] if count else [])


@pytest.mark.parametrize("arch", [90, 100])
def test_segments(arch: int) -> None:
    """Empty experts at the front, inside and at the end; -1 between segments and behind them."""
    adapter, double = library(arch, alignment=8)
    a, scales = rows(40, 128, ue8m0=arch == 100)
    b = weight(5, 64, 128, ue8m0=arch == 100)
    ends = torch.tensor([0, 7, 8, 17, 17], dtype=torch.int32)
    off = check_gemm_against_ours(adapter, "contiguous", a, scales, *b, ends, alignment=8)
    assert off < AGREES and double.calls == ["owners" if arch == 90 else "psum"]
    starts = torch.tensor([0, 0, 8, 16, 32], dtype=torch.int32)
    ends = torch.tensor([0, 5, 8, 19, 33], dtype=torch.int32)
    off = check_gemm_against_ours(
        adapter, "contiguous", a, scales, *b, ends, alignment=16, starts=starts
    )
    assert off < AGREES and double.calls[1] == "owners"


def test_psum_segments_of_another_alignment_go_by_owners() -> None:
    adapter, double = library(100, alignment=8)
    a, scales = rows(32, 128, ue8m0=True)
    ends = torch.tensor([3, 20], dtype=torch.int32)
    b = weight(2, 64, 128, ue8m0=True)
    off = check_gemm_against_ours(adapter, "contiguous", a, scales, *b, ends, alignment=16)
    assert off < AGREES and double.calls == ["owners"]


def test_owners() -> None:
    ends = torch.tensor([0, 3, 3, 6, 6], dtype=torch.int32)
    assert owners_of_rows(8, ends, 4, None).tolist() == [1, 1, 1, -1, 3, 3, -1, -1]
    starts = torch.tensor([0, 0, 4, 4, 8], dtype=torch.int32)
    ends = torch.tensor([0, 2, 4, 5, 8], dtype=torch.int32)
    assert owners_of_rows(9, ends, 4, starts).tolist() == [1, 1, -1, -1, 3, -1, -1, -1, -1]
    assert owners_of_rows(0, ends, 4, starts).tolist() == []


@pytest.mark.parametrize(("experts", "room"), [(3, 4), (2, 6), (1, 5)])
def test_masked(experts: int, room: int) -> None:
    adapter, double = library()
    a, scales = rows(experts, room, 128)
    counts = torch.tensor([2, 0, room][-experts:], dtype=torch.int32)
    off = check_gemm_against_ours(adapter, "masked", a, scales, *weight(experts, 64, 128), counts)
    assert off < AGREES and double.calls == [f"masked {room}"]


def test_expected_rows_stay_in_bounds() -> None:
    adapter, double = library()
    a, scales = rows(2, 4, 128)
    counts = torch.tensor([1, 4], dtype=torch.int32)
    for expected in (0, 3, 9):
        adapter.masked(a, scales, *weight(2, 64, 128), counts, BF16, expected_rows=expected)
    assert double.calls == ["masked 1", "masked 3", "masked 4"]


def test_packed_scales_on_sm_100() -> None:
    adapter, _ = library(100)
    a, scales = rows(5, 256, form=ScaleFormat.UE8M0_COLUMN, ue8m0=True)
    b = weight(128, 256, ue8m0=True)
    assert check_gemm_against_ours(adapter, "dense", a, scales, *b) < AGREES
    a, scales = rows(5, 1024, form=ScaleFormat.UE8M0_ROW, ue8m0=True)
    with pytest.raises(ShapeRefused, match="by columns"):
        adapter.dense(a, scales, *weight(128, 1024, ue8m0=True), BF16)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"arch": 0}, "sm_0"),
        ({"arch": 89}, "sm_89"),
        ({"width": 200}, "K in multiples of 128"),
        ({"columns": 96}, "N of 64"),
        ({"dtype": torch.float32}, "bf16"),
        ({"packed": True}, "packed exponents"),
        ({"arch": 100}, "powers of two"),
        ({"form": "masked", "experts": 2, "apart": 300}, "300 rows apart"),
        ({"form": "contiguous"}, "multiples of 128, these at multiples of 1"),
        ({"deterministic": True}, "deterministic"),
    ],
)
def test_refusals_in_words(change: dict[str, Any], word: str) -> None:
    adapter = library()[0]
    assert adapter.refusal(PROBLEM) is None
    problem = replace(PROBLEM, **change)
    assert word in str(adapter.refusal(problem))
    choice = choose_gemm(problem, [adapter, TritonGemm()])
    assert choice.backend.name == "triton" and "(no deep_gemm: " in choice.reason
    with pytest.raises(ShapeRefused, match="nothing fits"):
        choose_gemm(problem, [adapter])


def test_layouts_are_refused_in_words() -> None:
    adapter = library()[0]
    a, scales = rows(4, 256)
    b, blocks = weight(128, 256)
    wide = torch.zeros(4, 512, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, :256]
    with pytest.raises(ShapeRefused, match="back to back"):
        adapter.dense(wide, scales, b, blocks, BF16)
    apart = torch.ones(1, 4)[:, :2]
    assert adapter.dense(a, scales, b, apart, BF16).shape == (4, 128)  # one row of blocks
    apart = torch.ones(2, 4)[:, :2]
    with pytest.raises(ShapeRefused, match="scales of weights packed"):
        adapter.dense(a, scales, *weight(256, 256)[:1], apart, BF16)
    with pytest.raises(ShapeRefused, match="the same K"):
        adapter.dense(a, scales, *weight(128, 384), BF16)
    bundle = torch.zeros(2, 3, 64, 128, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, 0]
    problem = problem_of("masked", scales, bundle, 90, BF16)
    assert (problem.apart, problem.columns, problem.experts) == (192, 64, 2)
    assert "192 rows apart for 64" in str(adapter.refusal(problem))


def test_what_is_lacking_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    assert "cannot be imported" in str(DeepGemm().refusal(PROBLEM))
    assert "has no fp8_gemm_nt" in str(DeepGemm(SimpleNamespace()).refusal(PROBLEM))

    class Bound:
        """As functions of C++ are: no signature, a first line that tells names."""

        __signature__ = "none"

        def __init__(self, doc: str) -> None:
            self.__doc__ = doc

        def __call__(self) -> None: ...

    told = "f(a: tuple[torch.Tensor, torch.Tensor], b: tuple, d: Tensor, {}: Tensor = None) -> None"
    masked = replace(PROBLEM, form="masked")
    for name, word in (("masked_m", "no expected_m"), ("counts", "no masked_m")):
        module = SimpleNamespace(m_grouped_fp8_gemm_nt_masked=Bound(told.format(name)))
        assert word in str(DeepGemm(module).refusal(masked))
    assert parameters(Bound(told.format("masked_m, expected_m"))) == ("a", "b", "d", "expected_m")
    silent = SimpleNamespace(m_grouped_fp8_gemm_nt_masked=Bound(""))
    assert DeepGemm(silent).refusal(masked) is None  # nothing is told: places are what all share


class Wins:
    """A table by rows of dense products."""

    def __init__(self, names: dict[int, str | None]) -> None:
        self.names = names
        self.asked: list[tuple[Any, ...]] = []

    def pick(self, kernel: str, among: Any, **shape: int) -> str | None:
        self.asked.append((kernel, tuple(among), shape))
        return self.names[shape["rows"]]


def test_the_table_decides_by_shape_and_says_so() -> None:
    adapter, double = library()
    table = Wins({1: "triton", 8: "deep_gemm", 4: None})
    gemms = Gemms(90, [adapter], table)
    for count in (1, 7, 8, 3):
        a, scales = rows(count, 128)
        b = weight(64, 128)
        got = gemms.dense(a, scales, *b)
        want = fp8_gemm(a, scales, *b)
        assert (got.float() - want.float()).abs().max() <= AGREES * want.float().abs().max()
    assert double.calls == ["dense", "dense"] and len(table.asked) == 3
    size = {"rows": 8, "columns": 64, "width": 128}
    assert table.asked[1] == ("fp8_gemm", ("deep_gemm",), size)
    assert gemms.choices == (
        "fp8 gemm, dense 64 x 128, 1 rows or fewer: triton won",
        "fp8 gemm, dense 64 x 128, 8 rows or fewer: deep_gemm won",
        "fp8 gemm, dense 64 x 128, 4 rows or fewer: triton; nothing like it was measured",
    )


def test_without_a_table_the_first_that_fits() -> None:
    adapter, double = library()
    gemms = Gemms(90, [adapter])
    a, scales = rows(2, 4, 128)
    counts = torch.tensor([2, 3], dtype=torch.int32)
    gemms.masked(a, scales, *weight(2, 64, 128), counts, expected_rows=2)
    flat, of_rows = rows(16, 128)
    ends = torch.tensor([3, 9], dtype=torch.int32)
    gemms.contiguous(flat, of_rows, *weight(2, 64, 128), ends, alignment=1)
    assert double.calls == ["masked 2"]
    assert gemms.choices[0] == "fp8 gemm, masked 64 x 128: deep_gemm"
    assert gemms.choices[1].startswith("fp8 gemm, contiguous 64 x 128: triton (no deep_gemm: ")


def test_without_backends_nothing_is_chosen() -> None:
    gemms = Gemms()
    a, scales = rows(3, 128)
    b = weight(64, 128)
    assert torch.equal(gemms.dense(a, scales, *b), fp8_gemm(a, scales, *b))
    assert gemms.choices == ()


def test_who_raises_at_first_is_not_asked_again() -> None:
    adapter, double = library()
    calls = []

    def broken(*args: Any) -> None:
        calls.append(1)
        raise RuntimeError("no compiler\nmore")

    double.fp8_gemm_nt = broken  # type: ignore[method-assign]
    gemms = Gemms(90, [adapter])
    a, scales = rows(3, 128)
    b = weight(64, 128)
    for _ in range(2):
        assert torch.equal(gemms.dense(a, scales, *b), fp8_gemm(a, scales, *b))
    assert len(calls) == 1
    assert "triton (no deep_gemm: it raised RuntimeError: no compiler)" in gemms.choices[-1]
