"""DeepGEMM behind the calls of our FP8 products: choice, arguments, layouts, results."""

from __future__ import annotations

import inspect
import sys
from dataclasses import replace
from functools import wraps
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deep_gemm_double import LATER, SIGNATURES, Library
from torch import Tensor

from dispatch.base import ScaleFormat
from models.deepseek.kernels.gpu.errors import ShapeRefused
from models.deepseek.kernels.gpu.fp8_gemm import fp8_gemm
from models.deepseek.kernels.gpu.gemm_adapters import (
    AGREES,
    GemmProblem,
    TritonGemm,
    check_gemm_against_ours,
    choose_gemm,
    problem_of,
)
from models.deepseek.kernels.gpu.gemm_choice import Gemms
from models.deepseek.kernels.gpu.gemm_deep_gemm import DeepGemm, parameters
from models.deepseek.kernels.gpu.quant import quantise
from models.deepseek.kernels.gpu.row_owners import row_owners, row_owners_twin
from models.deepseek.kernels.gpu.weights import words_of

BF16 = torch.bfloat16
COLUMN = ScaleFormat.F32_COLUMN
PROBLEM = GemmProblem("dense", 128, 256, 90)


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
    assert row_owners(8, ends, 4).tolist() == [1, 1, 1, -1, 3, 3, -1, -1]
    starts = torch.tensor([0, 0, 4, 4, 8], dtype=torch.int32)
    ends = torch.tensor([0, 2, 4, 5, 8], dtype=torch.int32)
    assert row_owners(9, ends, 4, starts).tolist() == [1, 1, -1, -1, 3, -1, -1, -1, -1]
    assert row_owners(0, ends, 4, starts).tolist() == []
    with pytest.raises(ShapeRefused, match="int32"):
        row_owners(9, ends.long(), 4)


@pytest.mark.parametrize("rows_in_all", [511, 1100])
def test_owners_of_many(rows_in_all: int) -> None:
    """Random counts, none among them; rows beyond what there is room for belong to nobody."""
    counts = torch.randint(-60, 200, (9,), generator=torch.Generator().manual_seed(rows_in_all))
    counts.clamp_(min=0)
    rooms = (counts + 127) // 128 * 128
    starts = (rooms.cumsum(0) - rooms).to(torch.int32)
    ends = starts + counts.to(torch.int32)
    want = row_owners_twin(rows_in_all, ends, 128)
    assert torch.equal(row_owners(rows_in_all, ends, 128), want)
    assert torch.equal(row_owners(rows_in_all, ends, 128, starts), want)
    assert torch.equal(row_owners_twin(rows_in_all, ends, 128, starts), want)
    assert want.min() == -1 and want.max() >= 3


@pytest.mark.parametrize(("experts", "room", "arch"), [(3, 128, 90), (2, 16, 100), (1, 5, 90)])
@pytest.mark.parametrize("form", [COLUMN, ScaleFormat.F32_ROW])
def test_masked(experts: int, room: int, arch: int, form: ScaleFormat) -> None:
    """Room of whole tiles, or one expert; elsewhere a tile would be stored over the next rows."""
    adapter, double = library(arch, alignment=8)
    a, scales = rows(experts, room, 128, form=form, ue8m0=arch == 100)
    counts = torch.tensor([2, 0, min(room, 9)][-experts:], dtype=torch.int32)
    b = weight(experts, 64, 128, ue8m0=arch == 100)
    off = check_gemm_against_ours(adapter, "masked", a, scales, *b, counts)
    assert off < AGREES and double.calls == [f"masked {room}"]


def test_expected_rows_stay_in_bounds() -> None:
    adapter, double = library()
    a, scales = rows(1, 4, 128)
    counts = torch.tensor([4], dtype=torch.int32)
    for expected in (0, 3, 9):
        adapter.masked(a, scales, *weight(1, 64, 128), counts, BF16, expected_rows=expected)
    assert double.calls == ["masked 1", "masked 3", "masked 4"]


def test_packed_scales_on_sm_100() -> None:
    adapter, _ = library(100)
    a, scales = rows(5, 256, form=ScaleFormat.UE8M0_COLUMN, ue8m0=True)
    b = weight(128, 256, ue8m0=True)
    assert check_gemm_against_ours(adapter, "dense", a, scales, *b) < AGREES
    b = weight(128, 1024, ue8m0=True)
    for form in (ScaleFormat.UE8M0_ROW, ScaleFormat.UE8M0_COLUMN):
        a, scales = rows(5, 1024, form=form, ue8m0=True)
        assert check_gemm_against_ours(adapter, "dense", a, scales, *b) < AGREES
        a, scales = rows(1, 6, 1024, form=form, ue8m0=True)
        stacked, counts = (b[0][None], b[1][None]), torch.tensor([5], dtype=torch.int32)
        assert check_gemm_against_ours(adapter, "masked", a, scales, *stacked, counts) < AGREES


def test_words_of_weights_on_sm_100() -> None:
    """The same product, and nothing is packed at each call; on sm_90 nobody has made any."""
    adapter, double = library(100, alignment=8)
    ends = torch.tensor([3, 13], dtype=torch.int32)
    a, scales = rows(16, 640, form=ScaleFormat.UE8M0_COLUMN, ue8m0=True)
    b, blocks = weight(2, 192, 640, ue8m0=True)
    words = words_of(blocks, 192)
    want = adapter.contiguous(a, scales, b, blocks, ends, BF16, alignment=8)
    got = adapter.contiguous(a, scales, b, words, ends, BF16, alignment=8)
    assert torch.equal(got[:3], want[:3]) and torch.equal(got[8:13], want[8:13])
    flat = adapter.dense(a, scales, b[1], words_of(blocks[1], 192), BF16)
    assert torch.equal(flat, adapter.dense(a, scales, b[1], blocks[1], BF16))
    counts = torch.tensor([13], dtype=torch.int32)
    masked = adapter.masked(a[None], scales[None], b[1:], words[1:], counts, BF16)
    assert torch.equal(masked[0, 8:13], got[8:13]) and double.words == 3
    with pytest.raises(ShapeRefused, match="on sm_100 int32"):
        adapter.dense(a, scales, b[1], words[1].contiguous(), BF16)
    with pytest.raises(ShapeRefused, match="on sm_100 int32"):
        library(90)[0].dense(*rows(16, 640), b[1], words[1], BF16)
    gemms = Gemms(100, [adapter])
    assert gemms.packs_weights and not Gemms(90, [adapter]).packs_weights
    got = gemms.dense(a, scales, b[0], blocks[0], ue8m0=True, b_words=words[0])
    assert double.words == 4 and not Gemms(100).packs_weights
    off = (got.float() - fp8_gemm(a, scales, b[0], blocks[0]).float()).abs().max()
    assert off <= AGREES * got.float().abs().max()


def test_what_psum_reads_by_rows_goes_by_owners() -> None:
    adapter, double = library(100, alignment=8)
    ends = torch.tensor([3, 13], dtype=torch.int32)
    for form, call in ((COLUMN, "owners"), (ScaleFormat.F32_ROW, "psum")):
        a, scales = rows(16, 256, form=form, ue8m0=True)
        b = weight(2, 64, 256, ue8m0=True)
        off = check_gemm_against_ours(adapter, "contiguous", a, scales, *b, ends, alignment=8)
        assert off < AGREES and double.calls[-1] == call


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
        ({"form": "masked", "experts": 2, "apart": 128, "room": 192}, "room for 128 rows"),
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
    wide = torch.zeros(4, 520, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, :256]
    with pytest.raises(ShapeRefused, match="multiples of 16 bytes apart, not 520"):
        adapter.dense(wide, scales, b, blocks, BF16)
    wide = torch.zeros(2, 256, 256, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, :128]
    stacked = torch.ones(2, 128, 2), *weight(2, 128, 256)
    with pytest.raises(ShapeRefused, match="back to back"):
        adapter.masked(wide, *stacked, torch.ones(2, dtype=torch.int32), BF16)
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

    def measured_at(self, kernel: str, **shape: int) -> str:
        return f"{shape['rows']} rows"


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
        "fp8 gemm, dense 64 x 128, 1 rows or fewer: triton won at 1 rows",
        "fp8 gemm, dense 64 x 128, 8 rows or fewer: deep_gemm won at 8 rows",
        "fp8 gemm, dense 64 x 128, 4 rows or fewer: triton; nothing like it was measured",
    )


def test_without_a_table_the_first_that_fits() -> None:
    adapter, double = library()
    gemms = Gemms(90, [adapter])
    a, scales = rows(2, 128, 128)
    counts = torch.tensor([2, 3], dtype=torch.int32)
    gemms.masked(a, scales, *weight(2, 64, 128), counts, expected_rows=2)
    flat, of_rows = rows(16, 128)
    ends = torch.tensor([3, 9], dtype=torch.int32)
    gemms.contiguous(flat, of_rows, *weight(2, 64, 128), ends, alignment=1)
    assert double.calls == ["masked 2"]
    assert gemms.choices[0] == "fp8 gemm, masked 64 x 128: deep_gemm"
    assert gemms.choices[1].startswith("fp8 gemm, contiguous 64 x 128: triton (no deep_gemm: ")


def test_where_segments_begin_is_for_who_multiplies_them() -> None:
    table = Wins({4: "triton", 32: "deep_gemm", 16: None})
    scales, (b, _) = torch.ones(8, 1), weight(2, 64, 128)
    for rows_of_each, wanted in ((4, 1), (30, 128), (16, 1)):
        gemms = Gemms(90, [library()[0]], table)
        assert gemms.alignment(scales, b, BF16, rows_of_each) == wanted
    assert Gemms(90, [library(alignment=64)[0]]).alignment(scales, b, BF16, 1) == 64
    assert Gemms(90, [DeepGemm(SimpleNamespace())]).alignment(scales, b, BF16, 1) == 1
    assert Gemms().alignment(scales, b, BF16, 1) == 1
    forms = [Gemms(arch, [library()[0]]).scale_format(True) for arch in (90, 100)]
    assert forms == [COLUMN, ScaleFormat.UE8M0_COLUMN]
    assert Gemms().scale_format(True) is ScaleFormat.F32_ROW


def test_without_backends_nothing_is_chosen() -> None:
    gemms = Gemms()
    a, scales = rows(3, 128)
    b = weight(64, 128)
    assert torch.equal(gemms.dense(a, scales, *b), fp8_gemm(a, scales, *b))
    assert gemms.choices == ()


class Breaks(TritonGemm):
    """A library that raises at some numbers of rows. asked: with how many it was called."""

    name = "deep_gemm"

    def __init__(self, at: set[int]) -> None:
        self.at, self.asked = at, list[int]()

    def dense(self, a: Tensor, *more: Any) -> Tensor:  # type: ignore[override]
        self.asked.append(a.shape[0])
        if a.shape[0] in self.at:
            raise RuntimeError(f"no compiler for {a.shape[0]}\nmore")
        return fp8_gemm(a, *more)

    contiguous = masked = dense  # type: ignore[assignment]


def test_who_never_did_a_product_is_not_asked_again() -> None:
    library, said = Breaks({3, 40}), list[str]()
    gemms = Gemms(90, [library])
    gemms.failures.say = said.append
    for count in (3, 3, 40):
        a, scales = rows(count, 128)
        b = weight(64, 128)
        assert torch.equal(gemms.dense(a, scales, *b), fp8_gemm(a, scales, *b))
    assert library.asked == [3]
    line = (
        "fp8 gemm, dense 64 x 128: triton (no deep_gemm: it raised RuntimeError: no compiler for 3)"
    )
    assert gemms.choices == (line,) and said == [line]


def test_who_raises_at_a_later_size_keeps_the_others() -> None:
    """Libraries compile for each size as it comes."""
    library, said = Breaks({40, 200}), list[str]()
    gemms = Gemms(90, [library])
    gemms.failures.say = said.append
    for count in (3, 40, 40, 33, 3, 200, 200):
        a, scales = rows(count, 128)
        b = weight(64, 128)
        assert torch.equal(gemms.dense(a, scales, *b), fp8_gemm(a, scales, *b))
    assert library.asked == [3, 40, 3, 200]
    what = "fp8 gemm, dense 64 x 128: "
    assert said == [
        f"{what}triton (no deep_gemm: it raised RuntimeError: no compiler for 40 at 33 to 64 rows)",
        f"{what}triton (no deep_gemm: it raised RuntimeError: no compiler for 200 at 129 to 256 "
        "rows)",
    ]
    assert gemms.choices == (f"{what}deep_gemm", *said)  # what is so now


def test_no_expert_at_all() -> None:
    adapter, double = library()
    gemms, (b, b_scales) = Gemms(90, [adapter]), weight(2, 64, 128)
    none, bounds = (b[:0], b_scales[:0]), torch.zeros(0, dtype=torch.int32)
    assert gemms.contiguous(*rows(128, 128), *none, bounds).shape == (128, 64)
    stacked = rows(2, 128, 128)
    assert gemms.masked(stacked[0][:0], stacked[1][:0], *none, bounds).shape == (0, 128, 64)
    assert not double.calls and all(x.endswith(": deep_gemm") for x in gemms.choices)


def test_grouped_products_that_raise_later_are_ours_too() -> None:
    adapter, double = library()
    gemms = Gemms(90, [adapter])
    b, ends = weight(2, 64, 128), torch.tensor([5, 128], dtype=torch.int32)
    flat, stacked = rows(128, 128), rows(2, 128, 128)

    def both(expected: int) -> tuple[Tensor, Tensor]:
        out = gemms.contiguous(*flat, *b, ends, expected_rows=expected)
        held = gemms.masked(*stacked, *b, ends, expected_rows=expected)
        return out[:5], torch.cat((held[0, :5], held[1]))

    want = both(4)
    assert double.calls == ["owners", "masked 4"]

    for name in ("m_grouped_fp8_gemm_nt_contiguous", "m_grouped_fp8_gemm_nt_masked"):

        @wraps(getattr(double, name))
        def broken(*args: Any, **more: Any) -> None:
            raise RuntimeError("no compiler")

        setattr(double, name, broken)
    for mine, theirs in zip(both(100), want, strict=True):
        assert (mine.float() - theirs.float()).abs().max() <= AGREES * theirs.float().abs().max()
    assert [x.count("no compiler at 65 to 128 rows") for x in gemms.choices] == [0, 0, 1, 1]


@pytest.mark.parametrize("told", [0, None, "x", -128, 1 << 20, RuntimeError("driver too old")])
def test_an_alignment_that_is_none_is_a_refusal(told: Any) -> None:
    def alignment() -> Any:
        if isinstance(told, Exception):
            raise told
        return told

    adapter, double = library()
    double.get_mk_alignment_for_contiguous_layout = alignment  # type: ignore[method-assign]
    refusals = [adapter.refusal(replace(PROBLEM, form="contiguous", experts=2, apart=128))]
    there = DeepGemm(double, 100)
    of_100 = replace(PROBLEM, form="masked", experts=2, apart=128, arch=100, ue8m0=True, room=128)
    refusals += [there.refusal(of_100)]
    for why in refusals:
        assert str(why).startswith("get_mk_alignment_for_contiguous_layout ")
    assert adapter.alignment() == 1
    a, scales = rows(128, 128)
    b, ends = weight(2, 64, 128), torch.tensor([5, 128], dtype=torch.int32)
    gemms = Gemms(90, [adapter])
    assert gemms.alignment(scales, b[0], BF16, 64) == 1
    gemms.contiguous(a, scales, *b, ends)
    assert "triton (no deep_gemm: get_mk" in gemms.choices[-1]


def test_a_probe_that_raises_is_a_refusal() -> None:
    class Odd(TritonGemm):
        name = "odd"

        def refusal(self, problem: GemmProblem) -> str | None:
            raise OSError("libcuda.so.1: cannot open")

        alignment = refusal  # type: ignore[assignment]

    gemms = Gemms(90, [Odd()], Wins({4: "odd"}))
    a, scales = rows(3, 128)
    b = weight(64, 128)
    assert torch.equal(gemms.dense(a, scales, *b), fp8_gemm(a, scales, *b))
    why = "its probe raised OSError: libcuda.so.1: cannot open"
    assert gemms.choices == (f"fp8 gemm, dense 64 x 128: triton (no odd: {why})",)
    assert gemms.alignment(scales, weight(2, 64, 128)[0], BF16, 4) == 1

    class Lazy:
        """A module that fails when a name is looked up."""

        def __getattr__(self, name: str) -> Any:
            raise ImportError("undefined symbol")

    assert "undefined symbol" in str(DeepGemm(Lazy()).refusal(PROBLEM))
    assert DeepGemm(Lazy()).alignment() == 1
