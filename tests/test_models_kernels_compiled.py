"""GPU kernels compile for both architectures as recorded: what is worse fails here, without a GPU.

Compiled are the cases that have changed since the record, and a few that have not, so that a
compiler that works is part of the proof.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch.bench.kernels_compiled import BENCHMARKS, MARKS, KernelCompilation, with_table
from launch.version import HOME
from models.deepseek.kernels.gpu import aot
from models.deepseek.kernels.gpu.aot import (
    ARCHS,
    CompileCase,
    CompileReport,
    compile_case,
    count_words,
    missing_words,
    read_assembler_log,
)
from models.deepseek.kernels.gpu.compiled import (
    Recorded,
    changed,
    faults,
    gone,
    key_of,
    markdown,
    outdated,
    read_record,
    write_record,
)
from models.deepseek.kernels.gpu.cost import KernelCost
from models.deepseek.kernels.gpu.errors import CompileFailed, RecordUnreadable
from models.deepseek.kernels.gpu.fingerprint import counted, fingerprint, plain
from models.deepseek.kernels.gpu.language import tl
from models.deepseek.kernels.gpu.language import triton as jit
from models.deepseek.kernels.gpu.registry import MODULES, all_cases
from moeserve.errors import ConfigError

triton = pytest.importorskip("triton", reason="triton is built for Linux only")
VERSION, RECORD = read_record()
SHARED_LIMIT = 227 * 1024  # of a program, on both architectures
ALWAYS = ("fp8_gemm 128x256x128 w8 s4 tma fp32", "quant 32x128 w4 ue8m0")


def named(text: str) -> CompileCase:
    return next(case for case in all_cases() if text in f"{case.name} {case.config}")


def test_every_configuration_is_recorded_for_both_architectures() -> None:
    of = f"there is no record of the installed triton {triton.__version__}, but of {VERSION!r}"
    assert triton.__version__ == VERSION, f"{of}: nothing would be compared"
    here = {(c.name, c.config, ARCHS[arch]) for c in all_cases() for arch in c.archs}
    renew = "moeserve bench kernels --compile-only --renew"
    assert set(RECORD) == here, f"not as recorded; if that is meant: {renew}"
    assert gone(all_cases(), RECORD) == []
    otherwise = [
        (c.name, c.config)
        for c in all_cases()
        for arch in c.archs
        if RECORD[c.name, c.config, ARCHS[arch]].counted != counted(c, arch)
    ]
    assert not otherwise, f"instructions are counted otherwise than in the record (aot.py): {renew}"


def test_no_module_of_kernels_is_forgotten() -> None:
    folder = Path(aot.__file__).parent
    found = {p.stem for p in folder.glob("*.py") if "def compile_cases(" in p.read_text()}
    assert set(MODULES) == found


def test_nothing_recorded_spills_every_unit_is_used_and_all_fits() -> None:
    spilled = [key for key, row in RECORD.items() if row.report.spills]
    assert spilled == []
    large = [key for key, row in RECORD.items() if row.report.shared_bytes > SHARED_LIMIT]
    assert large == []
    arch_of = {name: arch for arch, name in ARCHS.items()}
    missing = {
        (case.name, case.config, name): words
        for case in all_cases()
        for name, arch in arch_of.items()
        if arch in case.archs
        and (words := missing_words(case, arch, RECORD[case.name, case.config, name].report))
    }
    assert missing == {}


def test_what_changed_since_the_record_is_not_worse() -> None:
    cases = all_cases()
    found = [
        line
        for index, arch in changed(cases, VERSION, RECORD)
        for line in faults(cases[index], arch, compile_case(cases[index], arch), RECORD)
    ]
    assert found == []


@pytest.mark.parametrize("name", ALWAYS)
@pytest.mark.parametrize("arch", ARCHS)
def test_compiled_again_it_is_as_recorded(name: str, arch: int) -> None:
    case = named(name)
    report = compile_case(case, arch)
    assert faults(case, arch, report, RECORD) == []
    row = RECORD[key_of(report)]
    if (row.fingerprint, row.counted) == (fingerprint(case, arch, VERSION), counted(case, arch)):
        assert report == row.report


def test_the_table_in_benchmarks_is_the_record() -> None:
    page = (HOME / BENCHMARKS).read_text()
    assert with_table(page, markdown([row.report for row in RECORD.values()])) == page
    assert page.count(MARKS[0]) == page.count(MARKS[1]) == 1


REPORT = CompileReport(
    "k", "c", "sm_90a", 100, 0, 4096, {"wgmma.mma_async": 4, "cp.async.cg": 8, "ld.global.v4": 2}
)
CASE = CompileCase(None, "k", "c", {}, {})
BEFORE = {key_of(REPORT): Recorded(REPORT, "")}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"spills": 8}, "spills 8 bytes, recorded 0"),
        ({"registers": 117}, "117 registers, recorded 100"),
        ({"shared_bytes": 6000}, "6000 bytes shared, recorded 4096"),
        (
            {"instructions": {"cp.async.cg": 8, "ld.global.v4": 2}},
            "0 x wgmma.mma_async, recorded 4",
        ),
        (
            {"instructions": {"wgmma.mma_async": 3, "cp.async.cg": 8, "ld.global.v4": 2}},
            "3 x wgmma.mma_async, recorded 4",
        ),
        (
            {"instructions": REPORT.instructions | {"mma.sync": 1}},
            "1 x mma.sync, recorded 0",
        ),
        (
            {"instructions": {"wgmma.mma_async": 4, "ld.global.v4": 4}},
            "4 wide loads, recorded 10 (cp.async.cg 8 -> 0, ld.global.v4 2 -> 4)",
        ),
        (
            {"instructions": REPORT.instructions | {"ld.global.v4": 1, "loads of less": 8}},
            "9 wide loads, recorded 10 (ld.global.v4 2 -> 1, loads of less 0 -> 8)",
        ),
        (
            {"instructions": REPORT.instructions | {"cp.async.cg": 4, "ld.global.v4": 6}},
            "4 x cp.async.cg, recorded 8 (cp.async.cg 8 -> 4, ld.global.v4 2 -> 6)",
        ),
        (
            {
                "instructions": REPORT.instructions
                | {"cp.async.cg": 7, "cp.async.bulk.tensor": 4, "loads of less": 4}
            },
            "9 wide loads, recorded 10 (cp.async.cg 8 -> 7, loads of less 0 -> 4)",
        ),
    ],
)
def test_what_is_worse_is_said(change: dict[str, Any], said: str) -> None:
    (line,) = faults(CASE, 90, replace(REPORT, **change), BEFORE)
    assert line == f"k (c) for sm_90a: {said}"


def test_a_few_registers_and_another_way_to_load_widely_are_no_fault() -> None:
    by_tma = {"wgmma.mma_async": 8, "cp.async.bulk.tensor": 10}
    assert faults(CASE, 90, replace(REPORT, registers=116, instructions=by_tma), BEFORE) == []
    assert faults(CASE, 90, replace(REPORT, registers=20, shared_bytes=0), BEFORE) == []


STORES = replace(
    REPORT,
    instructions={
        "cp.async.bulk.tensor": 2, "st.global.v4": 2, "ld.global.v4": 1, "loads of 8 bytes": 2,
        "loads of less": 1, "stores of less": 1,
    },
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"st.global.v4": 0, "stores of less": 9},
            "0 wide stores, recorded 2 (st.global.v4 2 -> 0, stores of less 1 -> 9)",
        ),
        ({"st.global.v4": 1}, "1 wide stores, recorded 2 (st.global.v4 2 -> 1)"),
        ({"cp.async.bulk.tensor": 1}, "1 x cp.async.bulk.tensor, recorded 2"),
        (
            {"loads of 8 bytes": 1, "loads of less": 3},
            "1 loads of 8 bytes, recorded 2 (loads of 8 bytes 2 -> 1, loads of less 1 -> 3)",
        ),
        ({"st.global.v4": 0, "st.global.v8": 1}, None),
        ({"st.global.v4": 1, "st.global.v2.b64": 1}, None),
        ({"ld.global.v4": 0, "cp.async.bulk.tensor": 3}, None),
        ({"loads of 8 bytes": 1}, None),  # a number that is read no more
        ({"loads of 8 bytes": 0, "ld.global.v4": 2}, None),
        ({"loads of less": 9, "stores of less": 9}, None),
    ],
)
def test_no_wide_access_is_lost_without_a_word(change: dict[str, int], said: str | None) -> None:
    now = replace(STORES, instructions=STORES.instructions | change)
    found = faults(CASE, 90, now, {key_of(STORES): Recorded(STORES, "")})
    assert found == ([] if said is None else [f"k (c) for sm_90a: {said}"])


@pytest.mark.parametrize(
    ("name", "word", "lost", "said"),
    [
        ("quant 32x128 w4 fp32", "st.global.v4", 2, "0 wide stores, recorded 2"),
        ("silu_mul bf16 1024 w4", "ld.global.v4", 1, "1 wide loads, recorded 2"),
    ],
)
@pytest.mark.parametrize("arch", ARCHS)
def test_the_record_knows_what_a_kernel_of_little_arithmetic_lives_by(
    name: str, word: str, lost: int, said: str, arch: int
) -> None:
    """One access made narrow, as a mask of single columns or a stride that is not known to be one
    makes it: told, whatever else the kernel does."""
    kernel, _, config = name.partition(" ")
    was = RECORD[kernel, config, ARCHS[arch]].report
    narrow = "loads of less" if word.startswith("ld") else "stores of less"
    counts = was.instructions | {narrow: was.instructions.get(narrow, 0) + 8 * lost}
    counts[word] -= lost
    (line,) = faults(named(name), arch, replace(was, instructions=counts), RECORD)
    assert line.startswith(f"{kernel} ({config}) for {ARCHS[arch]}: {said}")


def test_mma_sync_may_shrink_or_make_way_but_not_vanish() -> None:
    old = replace(REPORT, instructions={"mma.sync": 8})
    before = {key_of(old): Recorded(old, "")}
    for fine in ({"mma.sync": 4}, {"wgmma.mma_async": 1}):
        assert faults(CASE, 90, replace(old, instructions=fine), before) == []
    (line,) = faults(CASE, 90, replace(old, instructions={}), before)
    assert "no mma.sync, and nothing in its place" in line


def test_without_a_record_only_spills_and_wants_count() -> None:
    assert faults(CASE, 90, replace(REPORT, registers=255), {}) == []
    assert faults(CASE, 90, replace(REPORT, spills=4), {}) == ["k (c) for sm_90a: spills 4 bytes"]
    wanting = replace(CASE, wants={90: ("tcgen05.mma",)})
    assert faults(wanting, 90, REPORT, {}) == ["k (c) for sm_90a: no tcgen05.mma any more"]


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "compiled.json"
    assert read_record(path) == ("", {})
    write_record("3.8.0", [Recorded(REPORT, "abc", "de")], path)
    assert read_record(path) == ("3.8.0", {key_of(REPORT): Recorded(REPORT, "abc", "de")})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "Expecting value"),
        ("{", "Expecting property name"),
        ("[]", "list indices"),
        ("[" * 100_000, "brackets within brackets"),
        ("{}", "'triton' is missing"),
        ('{"triton": 3, "kernels": []}', "triton=3: must be the compiler's version"),
        ('{"triton": "3.8.0"}', "'kernels' is missing"),
        ('{"triton": "3.8.0", "kernels": [3]}', "a kernel is 3: must be an object"),
        ('{"triton": "3.8.0", "kernels": [{}]}', "'kernel' is missing"),
        ("bad registers", "registers='many': must be of type int"),
        ("bad instructions", "instructions={'mma.sync': 'x'}: must be counts"),
        ("no fingerprint", "'fingerprint' is missing"),
        ("\0\xff", "codec can't decode"),
    ],
)
def test_a_file_that_is_no_record_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "compiled.json"
    changes: dict[str, dict[str, Any]] = {
        "bad registers": {"registers": "many"},
        "bad instructions": {"instructions": {"mma.sync": "x"}},
        "no fingerprint": {},
    }
    if text in changes:
        row = {"fingerprint": "a"} if changes[text] else {}
        rows = [vars(REPORT) | row | changes[text]]
        text = json.dumps({"triton": "3.8.0", "kernels": rows})
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(RecordUnreadable) as caught:
        read_record(path)
    assert str(caught.value).startswith(f"{path}: no record of compiled kernels: ")
    assert said in str(caught.value) and "\n" not in str(caught.value)
    path.unlink()
    path.mkdir()
    with pytest.raises(RecordUnreadable, match="Is a directory"):
        read_record(path)


def test_a_fingerprint_is_of_all_that_the_compiler_reads() -> None:
    case = named("fp8_gemm 128x256x128")
    one = fingerprint(case, 90, "3.8.0")
    assert one == fingerprint(case, 90, "3.8.0")
    others = {
        fingerprint(case, 100, "3.8.0"),
        fingerprint(case, 90, "3.9.0"),
        fingerprint(replace(case, num_stages=2), 90, "3.8.0"),
        fingerprint(replace(case, constexprs={**case.constexprs, "GROUP": 4}), 90, "3.8.0"),
        fingerprint(named("grouped_gemm_masked 128x256x128"), 90, "3.8.0"),
    }
    assert one not in others and len(others) == 5


_FACTOR = tl.constexpr(2)
_SHIFT = tl.constexpr(1)


@jit.jit
def _twice(x, factor: tl.constexpr = _FACTOR):
    return x * factor


@jit.jit
def _kernel(x):
    """Doubles."""
    tl.store(x, _twice(tl.load(x)) + _SHIFT)  # in place


def test_what_a_kernel_calls_and_names_is_in_its_fingerprint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = CompileCase(_kernel, "k", "c", {"x": "*fp32"}, {})
    found = {fingerprint(case, 90, "3.8.0")}
    for place, name, value in (
        (_twice.fn, "__defaults__", (tl.constexpr(3),)),
        (sys.modules[__name__], "_SHIFT", tl.constexpr(2)),
        (sys.modules[__name__], "_twice", named("silu_mul bf16").kernel),
        (_kernel, "noinline", True),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, value)
            found.add(fingerprint(case, 90, "3.8.0"))
    assert len(found) == 5


def test_comments_and_docstrings_are_not() -> None:
    text = 'def f(x):\n    """Of x."""\n    return x + 1  # more\n'
    bare = "def f(x):\n    pass\n    return (x +\n            1)\n"
    assert plain(text) == plain(bare) != plain(bare.replace("1", "2"))


def test_what_is_counted_otherwise_is_to_renew() -> None:
    """A row whose instructions were counted by other words is made anew, if nothing changed too."""
    cases = all_cases("quant 32x128 w4 fp32")
    case, arch = cases[0], cases[0].archs[0]
    key = case.name, case.config, ARCHS[arch]
    made = fingerprint(case, arch, VERSION)
    rows = {key: replace(RECORD[key], fingerprint=made, counted=counted(case, arch))}
    only = [replace(case, archs=(arch,))]
    assert outdated(only, VERSION, rows) == changed(only, VERSION, rows) == []
    rows[key] = replace(rows[key], counted="")
    assert outdated(only, VERSION, rows) == [(0, arch)] and changed(only, VERSION, rows) == []
    wanting = [replace(only[0], wants={arch: ("wide stores",)})]
    assert counted(wanting[0], arch) != counted(only[0], arch)


def test_words_are_found_with_what_stands_between_their_parts() -> None:
    ptx = """
    @%p1 ld.global.L1::evict_last.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
    ld.global.b32 { %r1 }, [ %rd1 ];
    cp.async.cg.shared.global [ %r1 ], [ %rd1 ], 0x10;
    { wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {%f1}, %rd1, %rd2; }
    st.global.v4.b32 [ %rd1 ], {%r1};
    """
    words = ("ld.global.v4", "wgmma", "wgmma.mma_async", "cp.async.cg", "tcgen05.mma", "wide loads")
    assert count_words(ptx, words) == dict(zip(words, (1, 1, 1, 1, 0, 2), strict=True))


def test_narrow_access_is_counted_by_its_bytes() -> None:
    ptx = """
    ld.global.L1::evict_last.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
    ld.global.v2.b64 { %rd1, %rd2 }, [ %rd3 ];
    ld.global.v2.b32 { %r1, %r2 }, [ %rd1 ];
    @%p1 ld.global.b64 { %rd1 }, [ %rd1 ];
    ld.global.b16 { %rs1 }, [ %rd1 ];
    ld.shared.b32 %r1, [ %r2 ];
    ld.param.b64 %rd1, [x];
    cp.async.ca.shared.global [ %r1 ], [ %rd1 ], 0x4;
    st.global.v8.b32 [ %rd1 ], {%r1};
    st.global.b32 [ %rd1 ], {%r1};
    st.global.v2.b32 [ %rd1 ], {%r1};
    st.shared::cta.b32 [ %r1 ], %r2;
    """
    words = ("loads of 8 bytes", "loads of less", "stores of 8 bytes", "stores of less")
    assert count_words(ptx, words) == dict(zip(words, (2, 2, 1, 1), strict=True))
    assert count_words(ptx, ("wide loads", "ld.global.v2.b64")) == {
        "wide loads": 2,
        "ld.global.v2.b64": 1,
    }


def test_the_assemblers_log() -> None:
    log = "0 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads\nUsed 90 registers, x"
    assert read_assembler_log(log) == (90, 20)
    with pytest.raises(CompileFailed, match="nothing of registers"):
        read_assembler_log("fatal: no")


def test_a_kernel_that_does_not_compile_is_named() -> None:
    case = named("quant 32x128 w4 fp32")
    broken = replace(case, constexprs={**case.constexprs, "BLOCKS": 33})
    with pytest.raises(CompileFailed, match="quant \\(32x128 w4 fp32\\) for sm_90a: "):
        compile_case(broken, 90)


@pytest.mark.parametrize(
    ("name", "ones"),
    [
        ("grouped_gemm_masked 16x64x128", ("experts", "scale_row", "b_scale_row", "scale_expert")),
        ("grouped_gemm_contiguous 128x256x128", ("experts", "alignment", "scale_word")),
        ("fp8_gemm 64x64x128", ("N", "scale_row", "b_scale_row")),
        ("quant_silu_mul 32x128 w4 fp32", ("blocks", "scale_word", "scale_expert")),
        ("norm_quant 7168 w8 residual ue8m0", ("scale_row",)),
    ],
)
def test_arguments_of_one_are_constants_to_the_compiler(name: str, ones: tuple[str, ...]) -> None:
    """A launch makes a constant of each argument that is 1: one expert a GPU, scales by columns."""
    case = named(name)
    types = {key: value for key, value in case.signature.items() if key not in ones}
    constants = {**case.constexprs, **dict.fromkeys(ones, 1)}
    report = compile_case(replace(case, signature=types, constexprs=constants), 90)
    assert report.spills == 0


def test_the_command_compiles_and_compares(capsys: pytest.CaptureFixture[str]) -> None:
    assert KernelCompilation("quant 32x128 w4 ue8m0", processes=1).run(as_json=True) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)  # one document and nothing else
    assert [row["arch"] for row in found["kernels"]] == ["sm_90a", "sm_100a"]
    for row in found["kernels"]:
        assert row["kernel"] == "quant" and row["config"] == "32x128 w4 ue8m0"
        assert row["registers"] > 0 and row["spills"] == 0 and row["shared_bytes"] >= 0
        assert row["instructions"]["ld.global.v4"] > 0
    assert found["worse"] == found["failed"] == []
    assert (found["compared"], found["not_recorded"]) == (2, 0)
    assert "2 compared, nothing worse" in said.err


def test_a_name_that_is_in_no_kernel() -> None:
    with pytest.raises(ConfigError, match="in no kernel's name: .*fp8_gemm"):
        KernelCompilation("fp9").run(as_json=False)
    with pytest.raises(ConfigError, match="not with --only"):
        KernelCompilation("quant", renew=True).run(as_json=False)


def test_without_triton_modules_import_costs_are_told_and_kernels_say_what_is_missing() -> None:
    code = f"""
import sys
sys.modules["triton"] = None
from importlib import import_module
import torch
from models.deepseek.kernels.gpu.errors import TritonMissing
for name in {MODULES!r}:
    import_module("models.deepseek.kernels.gpu." + name)
from models.deepseek.kernels.gpu import fp8_gemm, grouped_gemm, norm_quant, quant
print(fp8_gemm.cost(1, 256, 128).bytes, grouped_gemm.cost([1, 0], 256, 128).flops)
try:
    quant.quantise(torch.zeros(2, 128))
except TritonMissing as error:
    print(error)
"""
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=HOME, capture_output=True, text=True, timeout=120
    )
    first, second = run.stdout.splitlines()
    # 1 row and 256 columns of 128, scales of 1 row and 2 column blocks, 256 results in bf16.
    assert first == f"{257 * 128 + 4 * 3 + 512} {2 * 256 * 128}", run.stderr
    assert second.startswith("quant_kernel: triton is not installed") and "pip install" in second


def test_costs_add_and_tell_the_limit() -> None:
    both = KernelCost(100, 10) + KernelCost(20, 5) * 2
    assert both == KernelCost(140, 20)
    assert both.seconds(70, 4) == 5 and both.bound(70, 4) == "compute"
    assert both.seconds(7, 4) == 20 and both.bound(7, 4) == "memory"
