"""Programs beside `moeserve`: a wrong path or argument is one line, with exit code 2."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from models.arguments import Parser, at_least, between, checkpoint, file, several, told_in_a_line

ROOT = Path(__file__).parents[1]
TINY = str(ROOT / "checkpoints" / "tiny")
MODELS = "models.deepseek"
STEP_LIMIT = f"{MODELS}.kernels.gpu.step_limit"

CASES: list[tuple[str, list[str], str]] = [
    (STEP_LIMIT, ["/gone"], "/gone: 1 problem(s) - file not found"),
    (STEP_LIMIT, ["README"], "README: 1 problem(s) - not readable as JSON"),
    (STEP_LIMIT, ["other.json"], "model_type 'llama' cannot be served"),
    (STEP_LIMIT, [], "the following arguments are required: config"),
    (f"{MODELS}.random_checkpoint", ["README"], "README: File exists"),
    (f"{MODELS}.random_checkpoint", ["x", "--layers", "1"], "first_k_dense_replace"),
    (f"{MODELS}.random_checkpoint", ["x", "--shards", "0"], "--shards: 0: must be at least 1"),
    (f"{MODELS}.kernels.bench_fp8", ["--threads", "0"], "--threads: 0: must be at least 1"),
    (f"{MODELS}.kernels.bench_tree", ["--seconds", "x"], "--seconds: 'x': must be a number"),
    (f"{MODELS}.tiny.__main__", ["README", "out"], "README: File exists"),
    (f"{MODELS}.tiny.evaluate", ["/gone"], "folder: '/gone': no such folder"),
    (f"{MODELS}.tiny.release", [".", "out"], "run.pt: No such file"),
    (f"{MODELS}.tiny.train", ["README"], "folder: 'README': no folder"),
    (f"{MODELS}.tiny.heads.__main__", ["work", "."], "checkpoint: '.': no checkpoint"),
    (f"{MODELS}.tiny.heads.__main__", ["work", TINY, "--only", "x"], "--only: x: valid are"),
    ("scripts/bench_ep_scaling.py", ["/gone"], "checkpoint: '/gone': no such folder"),
    ("scripts/bench_ep_scaling.py", [TINY, "--ep", "2,4"], "--ep: 2,4: 1 must be among them"),
    ("scripts/bench_host_step.py", ["--sequences", "1,x"], "--sequences: 'x': must be a whole"),
    ("scripts/bench_overlap.py", ["/gone"], "checkpoint: '/gone': no such folder"),
    ("scripts/bench_overlap.py", ["broken"], "config.json"),
    ("scripts/bench_placement.py", ["/gone"], "trace: '/gone': no such file"),
    ("scripts/bench_placement.py", ["other.json"], "other.json: "),
    ("scripts/bench_placement.py", ["README", "--drift", "2"], "--drift: 2: must be 0 to 1"),
    ("scripts/bench_recording.py", ["/gone"], "checkpoint: '/gone': no such folder"),
    ("scripts/bench_versus_transformers.py", ["/gone"], "checkpoint: '/gone': no such folder"),
    ("scripts/compare_load_tools.py", ["http://x", "--tokenizer", "/gone"], "--tokenizer: '/gone'"),
    ("scripts/compare_load_tools.py", ["nowhere", "--tokenizer", TINY], "must be http://HOST:PORT"),
    ("scripts/soak_rebalance.py", ["--checkpoint", "/gone"], "--checkpoint: '/gone': no such"),
    ("scripts/soak_rebalance.py", ["--topics", "bible", "tea"], "--topics: tea: not in "),
    ("scripts/soak_rebalance.py", ["--resume"], "--resume: what was put beside --json"),
]


def load(program: str) -> Any:
    if not program.endswith(".py"):
        return importlib.import_module(program)
    spec = importlib.util.spec_from_file_location(Path(program).stem, ROOT / program)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
    return module


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "README").write_text("no JSON")
    (tmp_path / "other.json").write_text('{"model_type": "llama"}')
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)  # of this process
    monkeypatch.setattr(sys, "path", [*sys.path])  # scripts put their folder in front
    return tmp_path


@pytest.mark.parametrize(
    ("program", "arguments", "says"), CASES, ids=[f"{p} {' '.join(a)}"[-60:] for p, a, _ in CASES]
)
def test_what_is_wrong_is_one_line(
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    program: str,
    arguments: list[str],
    says: str,
) -> None:
    module = load(program)
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 2
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert says in line and not said.out


def test_every_program_is_tried() -> None:
    """gpu_check has tests of its own: it runs where nothing is installed."""
    scripts = {f"scripts/{x.name}" for x in (ROOT / "scripts").glob("*.py")}
    assert scripts - {"scripts/gpu_check.py"} <= {program for program, _, _ in CASES}


def test_bugs_keep_their_tracebacks() -> None:
    with pytest.raises(ValueError, match="a bug"), told_in_a_line(KeyError):
        raise ValueError("a bug")
    with pytest.raises(SystemExit), told_in_a_line(ValueError):
        raise ValueError("told")


def test_what_is_right_is_read(tmp_path: Path) -> None:
    assert checkpoint(TINY) == Path(TINY) and file(__file__) == Path(__file__)
    assert at_least(1)("3") == 3 and between(0, 1)("0.5") == 0.5
    assert several(at_least(1))("1,2") == "1,2"
    for read, wrong in ((file, str(tmp_path)), (between(0), "nan"), (at_least(1), "1.5")):
        with pytest.raises(argparse.ArgumentTypeError):
            read(wrong)
    assert Parser().parse_args([]) == argparse.Namespace()
