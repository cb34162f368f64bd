"""`make gpu-check` on machines with and without a GPU, as far as a CPU can tell."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from types import ModuleType

import pytest
import torch

from launch.bench import gpu_needs, gpu_tests
from models.deepseek.kernels.gpu.bench.run import all_cases
from models.deepseek.kernels.gpu.bench.sizes import TINY

SCRIPT = Path(__file__).parents[1] / "scripts" / "gpu_check.py"
MARKED = (
    "import pytest\n\n\n@pytest.{}\n@pytest.mark.parametrize('device', ['cuda'])\n"
    "def test_x(device):\n    assert {}\n"
)
ONLY_CHECKS = ["--only", "checks"]


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The script as a module whose tests lie in tmp_path/tests."""
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_check", module)  # its dataclasses look there
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec.loader.exec_module(module)
    (tmp_path / "tests").mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: wants a GPU\n")
    monkeypatch.setattr(module, "HOME", tmp_path)
    monkeypatch.setattr(module, "describe_device", lambda: "some GPU")
    return module


def add_check(check: ModuleType, outcome: str, name: str = "a") -> None:
    (check.HOME / "tests" / f"test_{name}.py").write_text(MARKED.format(check.MARKER, outcome))
    (check.HOME / "tests" / "test_plain.py").write_text("def test_y():\n    assert False\n")


def test_without_a_gpu_one_line_says_so(check, monkeypatch, capsys):
    add_check(check, "True")
    monkeypatch.setattr(check, "describe_device", lambda: None)
    monkeypatch.setattr(check, "run_all", lambda *_: pytest.fail("ran"))
    assert check.main() == check.NOTHING_CHECKED == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("no GPU found: nothing was checked (torch ")
    assert err.splitlines()[1:] == [
        "on a GPU this runs",
        "  checks: 1 of tests: test_a.py",
        *(f"  {part}: {check.WHAT[part]}" for part in ("kernels", "engine")),
        "what to bring to a machine that has one: --list, --help",
    ]


def test_what_would_be_run_is_told_part_by_part_in_short_lines(check):
    files = [check.HOME / "tests" / f"test_{n}_and_a_long_name_gpu.py" for n in range(20)]
    for asked in (["kernels"], ["engine", "checks"]):
        lines = check.what_is_run(asked, files)
        assert {line.split(":")[0] for line in lines if line[0] != " "} == set(asked)
        assert max(map(len, lines)) <= 96
    assert check.what_is_run(["checks"], []) == ["checks: no test carries the marker gpu so far"]


def test_a_gpu_but_no_check(check, capsys):
    assert check.main() == check.NOTHING_CHECKED
    assert "no test carries the marker" in capsys.readouterr().err


@pytest.mark.parametrize("outcome, code, said", [("True", 0, "passed"), ("0", 1, "failed")])
def test_checks_are_run_and_shown(check, capsys, tmp_path, outcome, code, said):
    add_check(check, outcome)
    add_check(check, "True", "b")
    file = tmp_path / "out.json"
    assert check.main([*ONLY_CHECKS, "--json", str(file)]) == code
    out = capsys.readouterr().out
    assert "test_x[cuda]" in out and said in out and "test_y" not in out
    failed = 1 - int(outcome == "True")
    assert f"a: {1 - failed} passed, {failed} failed, 0 not run" in out
    assert f"2 checks; 2 ran, {failed} failed, 0 not run." in out
    held = json.loads(file.read_text())
    assert not (check.HOME / check.FILE).exists()
    assert held["exit_code"] == code and held["kernels"] is None
    assert [c["result"] for c in held["checks"]] == ["failed" if failed else "passed", "passed"]


def test_a_check_that_hangs_is_a_failure(check, monkeypatch, capsys):
    (check.HOME / "tests" / "test_a.py").write_text(
        f"import pytest, threading\n\n\n@pytest.{check.MARKER}\ndef test_x():\n"
        "    threading.Event().wait()\n"
    )
    monkeypatch.setattr(check, "LIMIT_SECONDS", 13.0)
    monkeypatch.setattr(gpu_tests, "GRACE", 10.0)
    assert check.main(ONLY_CHECKS) == check.FAILED
    assert re.search(r"test_a\.py: not done after \d+ s", capsys.readouterr().out)


def test_tests_that_are_told_to_end_write_down_what_was_done(check, tmp_path):
    file, began = check.HOME / "tests" / "test_a.py", tmp_path / "began"
    file.write_text(
        f"import pathlib, pytest, threading\npytestmark = pytest.{check.MARKER}\n\n\n"
        "def test_x():\n    pass\n\n\ndef test_y():\n"
        f"    pathlib.Path({str(began)!r}).touch()\n    threading.Event().wait()\n"
    )
    tests = gpu_tests.Tests(check.HOME, check.environment(), tmp_path, time.monotonic() + 100)
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(tests.run, file)
        until = time.monotonic() + 60
        while not began.exists() and time.monotonic() < until:
            wait([run], timeout=0.05)
        tests.end()
        done = run.result()
    assert done.code is None and [c.get("name") for c in done.cases][0] == "test_x"
    assert gpu_tests.sum_up([done], 1.0).held[0]["result"] == "passed"
    assert tests.run(file).cases == [], "nothing begins any more"


def test_checks_that_are_interrupted_keep_what_ran(check, monkeypatch, tmp_path, capsys):
    add_check(check, "True")

    def interrupt(runs):
        wait(runs)
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu_tests, "wait", interrupt)
    file = tmp_path / "out.json"
    assert check.main(["--json", str(file)]) == 130
    held = json.loads(file.read_text())
    assert held["exit_code"] == 130 and held["checks"][0]["result"] == "passed"
    assert [p["result"] for p in held["parts"]] == ["failed", "not run", "not run"]
    out = capsys.readouterr().out
    assert "interrupted" in out and "not begun" in out and "written: " in out


def test_checks_that_all_skip_check_nothing(check, capsys):
    (check.HOME / "tests" / "test_a.py").write_text(
        f"import pytest\n\n\n@pytest.{check.MARKER}\ndef test_x():\n    pytest.skip('no chip')\n"
    )
    assert check.main(ONLY_CHECKS) == check.NOTHING_CHECKED
    assert "1 checks; 0 ran, 0 failed, 1 not run." in capsys.readouterr().out


def test_what_is_missing_is_named_with_what_brings_it(check, monkeypatch, capsys):
    add_check(check, "True")
    monkeypatch.setattr(gpu_needs, "NEEDED", {"no_such_module": "rich mdurl"})
    assert check.main() == check.NOTHING_CHECKED
    assert capsys.readouterr().err.splitlines() == [
        "missing: no_such_module",
        "  no_such_module: No module named 'no_such_module'",
        "bring along, in a folder carried in the root: " + gpu_needs.pinned(["rich", "mdurl"]),
        "some GPU: nothing was checked; all that may be wanted: --list",
    ]


def test_a_module_that_lacks_what_it_needs_itself_is_missing(monkeypatch, tmp_path):
    (tmp_path / "half_there.py").write_text("import not_there_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.util.find_spec("half_there") is not None
    assert gpu_needs.broken(["json", "half_there"]) == {
        "half_there": "No module named 'not_there_at_all'"
    }


def bare(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The script with a Python that has no package at all."""
    return subprocess.run(
        [sys.executable, "-I", "-S", str(SCRIPT), *arguments],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def test_without_torch_it_says_so_and_ends_with_2():
    for arguments in ((), ("--walk",)):
        done = bare(*arguments)
        assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr
        first, *_, last = done.stderr.splitlines()
        assert first.startswith("missing: torch, triton, numpy, ")
        assert "the machine itself must have torch (2.11 or later, for CUDA) and" in done.stderr
        assert last == (
            "no device was looked for: nothing was checked; all that may be wanted: --list"
        )


def test_the_list_needs_nothing_and_is_for_pip():
    done = bare("--list")
    assert done.returncode == 0 and done.stdout == gpu_needs.pinned() + "\n"
    assert all("==" in word for word in done.stdout.split())
    assert "pip install --target carried --python-version 3.12" in done.stderr


def test_what_is_listed_is_all_that_it_needs_itself():
    """As the installed packages tell their needs; torch's are the machine's own."""
    from packaging.requirements import Requirement

    named = {p for text in (gpu_needs.NEEDED | gpu_needs.WANTED).values() for p in text.split()}
    assert named == set(gpu_needs.PINS)
    here = {"python_version": "3.12", "platform_system": "Linux", "sys_platform": "linux"}
    for package in gpu_needs.PINS:
        for text in importlib.metadata.requires(package) or []:
            wanted = Requirement(text)
            if wanted.marker is None or wanted.marker.evaluate({**here, "extra": ""}):
                known = gpu_needs.PINS.keys() | gpu_needs.NOT_WANTED
                assert wanted.name.lower().replace("_", "-") in known, (package, text)


def test_the_help_says_what_to_carry_and_how_it_ends():
    said = bare("--help").stdout
    for text in (
        gpu_needs.how_to_carry("$(python3 scripts/gpu_check.py --list)").splitlines()[0],
        "torch 2.11 or later", "3.6 or later", "Python 3.12", "a folder `carried`",
        f"These are {len(gpu_needs.PINS)} packages", "Exit codes: 0 ", "Under eight minutes",
    ):  # fmt: skip
        assert text in said, text
    for line in gpu_needs.how_to_carry("$(python3 scripts/gpu_check.py --list)").splitlines():
        assert line.strip() in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", ""], "--only '': must be one or more of checks, kernels, engine"),
        (["--only", "check"], "--only 'check': must be one or more of"),
        (["--json", "/nowhere/a.json"], "--json '/nowhere/a.json': no such folder"),
        (["--json", "/"], "--json '/': names no file"),
    ],
)
def test_wrong_arguments_are_named_before_any_work(check, monkeypatch, capsys, arguments, said):
    add_check(check, "True")
    monkeypatch.setattr(check, "run_all", lambda *_: pytest.fail("ran"))
    with pytest.raises(SystemExit) as end:
        check.main(arguments)
    assert end.value.code == 2 and said in capsys.readouterr().err


def test_what_was_carried_along_is_found_behind_all_else(check):
    assert check.CARRY == gpu_needs.FOLDER
    (check.HOME / check.CARRY).mkdir()
    check.add_carried()
    assert sys.path[-1] == str(check.HOME / check.CARRY)
    assert check.environment()["PYTHONPATH"].split(":")[:2] == [
        str(check.HOME),
        str(check.HOME / check.CARRY),
    ]


def test_a_part_that_dies_or_takes_too_long_is_a_failure(check, tmp_path):
    (check.HOME / "scripts").mkdir()
    script = check.HOME / "scripts" / "gpu_check.py"
    script.write_text("raise SystemExit(3)\n")
    part = check.measure("kernels", tmp_path, 30.0, False)
    assert (part.result, part.lines) == ("failed", ["ended with exit code 3, see above"])
    script.write_text("import threading\nthreading.Event().wait()\n")
    part = check.measure("engine", tmp_path, 1.0, False)
    assert (part.result, part.lines) == ("failed", ["not done after 1 s"])
    script.write_text(LEAVES_A_FILE + "import threading\nthreading.Event().wait()\n")
    part = check.measure("engine", tmp_path, 5.0, False)
    assert (part.result, part.lines) == ("failed", ["not done after 5 s", "1 of 2"])
    assert part.held == {"rows": [1], "not_measured": ["x"]}
    assert check.exit_code([check.Part("checks", "passed"), part]) == check.FAILED


LEAVES_A_FILE = """import json, pathlib, sys
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
out.write_text(json.dumps({"lines": ["1 of 2"], "rows": [1], "not_measured": ["x"]}))
"""


def test_what_is_measured_in_part_is_called_so_and_is_no_success(check, tmp_path):
    (check.HOME / "scripts").mkdir()
    script = check.HOME / "scripts" / "gpu_check.py"
    for text, result in (
        (LEAVES_A_FILE, "measured in part"),
        (LEAVES_A_FILE.replace('["x"]', "[]"), "measured"),
        (LEAVES_A_FILE + "raise SystemExit(3)\n", "failed"),
    ):
        script.write_text(text)
        part = check.measure("kernels", tmp_path, 30.0, False)
        assert (part.result, part.lines) == (result, ["1 of 2"])
        code = check.exit_code([check.Part("checks", "passed"), part])
        assert code == (0 if result == "measured" else 1)


def test_a_part_that_is_interrupted_keeps_what_it_had(check, monkeypatch):
    def interrupted(command, **_):
        Path(command[command.index("--out") + 1]).write_text(
            json.dumps({"lines": ["1 of 2"], "rows": [1], "not_measured": ["x"]})
        )
        raise KeyboardInterrupt(signal.SIGTERM)

    monkeypatch.setattr(check.subprocess, "run", interrupted)
    assert check.main(["--only", "engine"]) == 143
    held = json.loads((check.HOME / "gpu-check.json").read_text())
    assert held["engine"]["rows"] == [1] and held["exit_code"] == 143
    assert held["parts"][2]["lines"] == ["interrupted", "1 of 2"]


@pytest.mark.skipif(sys.platform != "linux", reason="a device of Linux")
def test_a_disk_that_is_full_is_one_line(check, capsys):
    add_check(check, "True")
    assert check.main([*ONLY_CHECKS, "--json", "/dev/full"]) == check.FAILED
    out, err = capsys.readouterr()
    assert err == "--json /dev/full: cannot be written: No space left on device\n"
    assert "1 checks; 1 ran, 0 failed" in out and "written" not in out


def test_what_a_part_leaves_is_the_next_ones(check):
    every = check.PARTS
    assert sum(check.SECONDS.values()) <= check.LIMIT_SECONDS < 480
    assert check.limit_of("checks", every, 470) == 225 and check.limit_of("engine", every, 90) == 90
    assert check.limit_of("kernels", every, 400) == 275
    assert check.limit_of("kernels", ["kernels"], 470) == 470


@pytest.mark.skipif(sys.platform != "linux", reason="signals of a terminal")
def test_control_c_is_one_line_and_130(tmp_path):
    """As a terminal sends it: to all processes at once."""
    file = tmp_path / "out.json"
    with subprocess.Popen(
        [sys.executable, str(SCRIPT), "--walk", "--only", "engine", "--json", str(file)],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            assert process.stderr is not None
            first = process.stderr.readline()
            os.killpg(process.pid, signal.SIGINT)
            err = process.stderr.read()
            assert process.wait(60) == 130
        finally:
            process.kill()
    assert first == "moeserve: weights\n"
    lines = [line for line in err.splitlines() if not line.startswith("moeserve: ")]
    assert lines == ["gpu-check: interrupted (SIGINT) before it was done"]
    assert json.loads(file.read_text())["exit_code"] == 130


def test_the_exit_code_is_that_of_checks(check):
    measured = check.Part("kernels", "measured")
    assert check.exit_code([check.Part("checks", "passed"), measured]) == 0
    assert check.exit_code([check.Part("checks"), measured]) == 2


def test_a_walk_goes_through_kernels_and_engine(check, monkeypatch, tmp_path, capfd):
    pytest.importorskip("triton")
    monkeypatch.setattr(check, "HOME", SCRIPT.parents[1])
    monkeypatch.setattr(check, "WALKING", 1.0)
    file = tmp_path / "out.json"
    assert check.main(["--walk", "--json", str(file)]) == check.NOTHING_CHECKED
    held = json.loads(file.read_text())
    assert [p["result"] for p in held["parts"]] == ["not run", "walked", "walked"]
    shapes = held["kernels"]["kernels"]
    assert all(row["ours"] > 0 and not row["error"] for row in shapes)
    kernels = [case.kernel for case in all_cases(TINY, torch.device("cpu"))]
    assert [row["kernel"] for row in shapes][: len(set(kernels))] == list(dict.fromkeys(kernels))
    assert held["kernels"]["not_measured"], "the budget of a walk ends it"
    rows = held["engine"]["rows"]
    assert {(r["mode"], r["what"]) for r in rows} == {
        (mode, what)
        for mode in ("fast", "ahead", "deterministic")
        for what in ("decode", "prefill")
    } | {("fp8 cache", "decode")}
    assert all(r["tokens_per_second"] > 0 and not r["error"] for r in rows)
    out = capfd.readouterr().out
    assert "kernels on CPU" in out and "engine on CPU: a walk, a tiny model" in out
    assert "DeepSeek-V3's dimensions" not in out and "walked in part: " in out
    assert not list(tmp_path.glob(".*")), "nothing lies beside"


def test_the_parts_of_what_is_checked_today():
    folder = Path(__file__).parent / "gpu"
    assert {p.name.split("_")[1] for p in folder.glob("test_*.py")} >= {"dispatch"}
    assert (folder / "test_dispatch_gpu.py").exists()
