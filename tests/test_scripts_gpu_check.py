"""`make gpu-check` on machines with and without a GPU, as far as a CPU can tell."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "gpu_check.py"
MARKED = (
    "import pytest\n\n\n@pytest.{}\n@pytest.mark.parametrize('device', ['cuda'])\n"
    "def test_x(device):\n    assert {}\n"
)


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The script as a module whose tests lie in tmp_path/tests."""
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "tests").mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: wants a GPU\n")
    monkeypatch.setattr(module, "HOME", tmp_path)
    return module


def add_check(check: ModuleType, outcome: str) -> None:
    (check.HOME / "tests" / "test_a.py").write_text(MARKED.format(check.MARKER, outcome))
    (check.HOME / "tests" / "test_b.py").write_text("def test_y():\n    assert False\n")


def test_without_a_gpu_one_line_says_so(check, monkeypatch, capsys):
    add_check(check, "True")
    monkeypatch.setattr(check, "describe_device", lambda: None)
    monkeypatch.setattr(check, "run", lambda *_: pytest.fail("ran"))
    assert check.main() == check.NOTHING_CHECKED == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("no GPU found: nothing was checked (torch ")
    assert err.splitlines()[1] == "on a GPU this runs the checks in tests/test_a.py"


def test_a_gpu_but_no_check(check, monkeypatch, capsys):
    monkeypatch.setattr(check, "describe_device", lambda: "some GPU")
    assert check.main() == check.NOTHING_CHECKED
    assert "no test carries the marker" in capsys.readouterr().err


@pytest.mark.parametrize("outcome, code, said", [("True", 0, "passed"), ("0", 1, "failed")])
def test_checks_are_run_and_shown(check, monkeypatch, capsys, outcome, code, said):
    add_check(check, outcome)
    monkeypatch.setattr(check, "describe_device", lambda: "some GPU")
    assert check.main() == code
    out = capsys.readouterr().out
    assert "test_x[cuda]" in out and said in out and "test_y" not in out
    failed = 1 - int(outcome == "True")
    assert f"a: {1 - failed} passed, {failed} failed, 0 not run" in out
    assert f"1 checks; 1 ran, {failed} failed, 0 not run." in out


def test_the_parts_of_what_is_checked_today():
    folder = Path(__file__).parent / "gpu"
    assert {p.name.split("_")[1] for p in folder.glob("test_*.py")} >= {"dispatch"}
    assert (folder / "test_dispatch_gpu.py").exists()
