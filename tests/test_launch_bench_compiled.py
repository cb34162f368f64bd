"""`bench kernels --compile-only`: what it says and ends with, whatever comes of compiling."""

from __future__ import annotations

import json
import multiprocessing
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.text import Text

from launch.bench import kernels_compiled
from launch.bench.compile_pool import Failed, compile_all
from launch.bench.kernels_compiled import MARKS, KernelCompilation
from models.deepseek.kernels.gpu import compiled
from models.deepseek.kernels.gpu.compiled import Recorded, read_record, write_record
from models.deepseek.kernels.gpu.errors import CompileFailed
from models.deepseek.kernels.gpu.registry import all_cases
from moeserve.errors import ConfigError

triton = pytest.importorskip("triton", reason="triton is built for Linux only")
ONLY = "quant 32x128 w4 ue8m0"
BROKEN = "at 5:4:\n  x = tl.dot(a, b)\n      ^\nshapes do not fit"


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A record that a test may spoil; what is compiled is what the true one holds."""
    _, true = read_record()
    path = tmp_path / "compiled.json"
    write_record(triton.__version__, true.values(), path)
    monkeypatch.setattr(compiled.read_record, "__defaults__", (path,))
    monkeypatch.setattr(compiled.write_record, "__defaults__", (path,))
    monkeypatch.setattr(kernels_compiled, "HOME", tmp_path)
    by_name = {
        (row.report.kernel, row.report.config, row.report.arch): row for row in true.values()
    }

    plain = next(row.report for row in true.values() if not row.report.spills)

    def fake(tasks: list[tuple[int, int]], processes: int) -> Iterator[Any]:
        cases = all_cases()
        for index, arch in tasks:
            case = cases[index]
            key = case.name, case.config, f"sm_{arch}a"
            new = dict(zip(("kernel", "config", "arch"), key, strict=True))
            known = by_name.get(key)
            yield (index, arch), known.report if known else replace(plain, **new)

    monkeypatch.setattr(kernels_compiled, "compile_all", fake)
    return path


def run(capsys: pytest.CaptureFixture[str], code: int, renew: bool = False) -> dict[str, Any]:
    """With --json and without: the same exit code, one document, the same lines."""
    bench = KernelCompilation("" if renew else ONLY, renew)
    assert bench.run(as_json=False) == code
    shown = capsys.readouterr().out.splitlines()
    assert KernelCompilation(ONLY).run(as_json=True) == (0 if renew else code)
    said = capsys.readouterr()
    found: dict[str, Any] = json.loads(said.out)
    if not renew:
        lines = [line.removeprefix("moeserve: ") for line in said.err.splitlines()]
        assert lines == shown[-len(lines) :] and lines
    return found | {"lines": shown}


def test_compared_and_nothing_worse(record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(capsys, 0)
    assert (found["compared"], found["not_recorded"], found["worse"]) == (2, 0, [])
    assert found["lines"][-1] == (
        f"beside the record (triton {triton.__version__}): 2 compared, nothing worse"
    )


def test_without_a_record_nothing_is_compared(
    record: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record.unlink()
    found = run(capsys, 3)
    assert (found["compared"], found["not_recorded"], found["recorded_with"]) == (0, 2, "")
    assert found["lines"][-1] == "nothing compared: there is no record; --renew records them"


def test_beside_another_compilers_record_nothing_is_compared(
    record: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_record("3.0.0", read_record(record)[1].values(), record)
    found = run(capsys, 3)
    assert (found["compared"], found["not_recorded"], found["recorded_with"]) == (0, 2, "3.0.0")
    assert f"the record is of triton 3.0.0, this is {triton.__version__}" in found["lines"][-1]


def test_what_the_record_has_not_is_not_compared(
    record: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row for row in read_record(record)[1].values() if row.report.kernel != "quant"]
    write_record(triton.__version__, rows, record)
    assert "none of these 2 is in the record" in run(capsys, 3)["lines"][-1]


def test_a_record_that_is_none_is_refused_before_any_work(
    record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels_compiled, "compile_all", lambda *_: pytest.fail("compiled"))
    record.write_text("")
    for renew in (False, True):
        with pytest.raises(ConfigError) as caught:
            KernelCompilation("", renew).run(as_json=True)
        (problem,) = caught.value.problems
        assert problem.startswith(f"--compile-only: {record}: no record of compiled kernels: ")


def test_what_is_worse_ends_with_1(record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        Recorded(replace(row.report, registers=1), row.fingerprint)
        for row in read_record(record)[1].values()
    ]
    write_record(triton.__version__, rows, record)
    found = run(capsys, 1)
    assert len(found["worse"]) == 2 and "recorded 1" in found["worse"][0]
    assert found["lines"][-1].endswith("2 compared, 2 worse")


def test_a_kernel_that_does_not_compile_is_named(
    record: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 1, a line, and all that the compiler said as JSON; the others are compared."""
    works = kernels_compiled.compile_all

    def fails(tasks: list[tuple[int, int]], processes: int) -> Iterator[Any]:
        (first, _), *rest = works(tasks, processes)
        yield (
            first,
            CompileFailed(f"quant (32x128 w4 ue8m0) for sm_90a: CompilationError: {BROKEN}"),
        )
        yield from rest

    monkeypatch.setattr(kernels_compiled, "compile_all", fails)
    found = run(capsys, 1)
    (failed,) = found["failed"]
    assert (failed["kernel"], failed["arch"]) == ("quant", "sm_90a") and BROKEN in failed["error"]
    assert found["compared"] == len(found["kernels"]) == 1
    assert found["lines"][-2] == (
        "failed: quant (32x128 w4 ue8m0) for sm_90a: CompilationError: at 5:4: ... "
        "shapes do not fit"
    )
    record.unlink()
    assert KernelCompilation("", renew=True).run(as_json=False) == 1
    assert "not renewed: " in capsys.readouterr().err and not record.exists()


def test_renewed_it_is_the_record(record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record.unlink()
    run(capsys, 0, renew=True)
    known = {(case.name, case.config) for case in all_cases()}
    assert {key[:2] for key in read_record(record)[1]} == known


@pytest.mark.parametrize("page", [None, f"a\n{MARKS[0]}\nold\n{MARKS[1]}\nb\n"])
def test_an_empty_record_renewed_says_so(
    record: Path, capsys: pytest.CaptureFixture[str], page: str | None
) -> None:
    """Not that --renew would do it; and last what became of record and table."""
    write_record(triton.__version__, [], record)
    benchmarks = record.parent / "BENCHMARKS.md"
    if page is not None:
        benchmarks.write_text(page)
    assert KernelCompilation("", renew=True).run(as_json=False) == 0
    said = capsys.readouterr()
    line = said.out.splitlines()[-1]
    assert line.startswith("nothing compared: none of these ") and "--renew" not in line
    assert line.endswith(" was in the record; they are recorded now")
    last = said.err.splitlines()[-1]
    if page is None:
        assert last.startswith("moeserve: renewed: compiled.json; without the table of BENCHMARKS")
    else:
        assert last == "moeserve: renewed: compiled.json, BENCHMARKS.md"
        text = benchmarks.read_text()
        assert "old" not in text and text.startswith("a\n<!--") and text.endswith("-->\nb\n")


@pytest.mark.parametrize("marks", [MARKS[:1], MARKS[1:], MARKS[::-1], (*MARKS, MARKS[1]), ()])
def test_a_page_without_the_tables_place_is_refused_before_any_work(
    record: Path, monkeypatch: pytest.MonkeyPatch, marks: tuple[str, ...]
) -> None:
    """Without the end mark all behind the table would be lost."""
    monkeypatch.setattr(kernels_compiled, "compile_all", None)
    page = record.parent / "BENCHMARKS.md"
    page.write_text("\n".join(["a", *marks, "b"]))
    before = page.read_text(), record.read_text()
    with pytest.raises(ConfigError, match="BENCHMARKS.md: the table's place must stand in it once"):
        KernelCompilation("", renew=True).run(as_json=False)
    assert (page.read_text(), record.read_text()) == before


@pytest.mark.parametrize("width", [40, 60, 200])
def test_the_table_folds_on_a_terminal(
    record: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    """Nothing of it is cut off; a pipe that nobody told its width gets all in one line."""
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    monkeypatch.setenv("COLUMNS", str(width))
    report = replace(next(iter(read_record(record)[1].values())).report, kernel="k" * 50)
    kernels_compiled._show("title", [report])
    shown = Text.from_ansi(capsys.readouterr().out).plain
    assert max(map(len, shown.splitlines())) <= width
    assert shown.count("k") == 51 and "…" not in shown  # one in the heading
    monkeypatch.delenv("FORCE_COLOR")
    kernels_compiled._show("title", [report])
    assert capsys.readouterr().out == shown
    monkeypatch.delenv("COLUMNS")
    kernels_compiled._show("title", [report])
    piped = capsys.readouterr().out
    assert max(map(len, piped.splitlines())) > 100 and "k" * 50 in piped


def test_a_line_of_a_failure_names_its_kernel() -> None:
    died = Failed("k", "c", "sm_90a", "a process died")
    assert died.line == "k (c) for sm_90a: a process died"


@pytest.mark.skipif(sys.platform != "linux", reason="killed by pid")
def test_a_compiler_that_dies_is_no_traceback() -> None:
    """Every kernel that was not done is a failure with its reason."""
    cases = all_cases()
    tasks = [(i, 90) for i, case in enumerate(cases) if case.name == "quant"][:2]
    others = set(multiprocessing.active_children())
    with closing(compile_all(tasks, processes=1)) as coming:
        threading.Thread(target=_kill_first_other_than, args=(others,), daemon=True).start()
        found = list(coming)
    assert sorted(task for task, _ in found) == tasks
    assert all("died before this was done" in str(error) for _, error in found)


def _kill_first_other_than(others: set[Any]) -> None:
    while not (new := set(multiprocessing.active_children()) - others):
        threading.Event().wait(0.01)
    for child in new:
        child.kill()


def test_nothing_to_compile_starts_no_process() -> None:
    assert list(compile_all([])) == []


@pytest.mark.skipif(sys.platform != "linux", reason="signals of Linux")
def test_sigterm_ends_the_pool_in_order(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "moeserve", "bench", "kernels", "--compile-only", "--json"]
    job = subprocess.Popen(
        [*command, "--only", "fp8_gemm"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={"PATH": "", "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        here = psutil.Process(job.pid)
        workers: list[psutil.Process] = []
        while job.poll() is None and not workers:
            workers = [x for x in here.children() if "spawn_main" in " ".join(x.cmdline())]
        job.send_signal(signal.SIGTERM)
        out, err = job.communicate(timeout=60)
    finally:
        job.kill()
    assert job.returncode == 128 + signal.SIGTERM, err
    assert out == "" and "leaked" not in err and "Traceback" not in err
    assert not any(x.is_running() for x in workers) and not list(tmp_path.iterdir())
