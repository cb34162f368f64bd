"""`moeserve bench` as a group, and what its commands share: figures, steps told, the machine."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from launch.bench.app import bench_app
from launch.bench.figures import Spread, paired_ratio, percentile
from launch.bench.json_flag import with_file_flag
from launch.bench.machine import describe_machine
from launch.bench.steps import StepProgress
from launch.cli import app
from moeserve.errors import ConfigError


def test_the_group_names_its_commands() -> None:
    said = CliRunner().invoke(app, ["bench", "--help"]).output
    assert "offline" in said and "dispatch" in said
    assert CliRunner().invoke(app, ["bench", "dispach"]).exit_code == 2


@pytest.mark.parametrize("words", [["bench", "/gone"], ["bench", "offline", "/gone"]])
def test_a_checkpoint_in_place_of_a_command_is_offline(words: list[str]) -> None:
    error = CliRunner().invoke(app, words).exception
    assert isinstance(error, ConfigError)
    assert any("'/gone': no such folder" in problem for problem in error.problems)


def test_a_result_that_cannot_be_written_is_named_before_anything_is_measured(
    tmp_path: Path,
) -> None:
    for words in (
        ["bench", "offline", "/gone", "--out=/nowhere/a.json"],
        ["bench", "serve", "http://127.0.0.1:1", "--json=/nowhere/a.json"],
        ["bench", "sweep", "http://127.0.0.1:1", "--plot=/nowhere/a.png"],
    ):
        error = CliRunner().invoke(app, words).exception
        assert isinstance(error, ConfigError) and "no such folder: '/nowhere'" in str(error), error
    error = CliRunner().invoke(app, ["bench", "serve", "x", f"--out={tmp_path}"]).exception
    assert isinstance(error, ConfigError) and "is a folder" in str(error)


@pytest.mark.parametrize("terminal", [False, True])
def test_a_table_of_offline_ends_in_json_where_a_program_reads_it(
    terminal: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from launch.bench.offline import PARTS, Row, show

    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    config: Any = SimpleNamespace(
        model=SimpleNamespace(checkpoint=Path("tiny")), parallel=SimpleNamespace(ep=1)
    )
    row = Row("decode", 1, 8, 4, 10.0, 100.0, 3, dict.fromkeys(PARTS, 1.0), [10.0])
    show([row], config, {"dtype": "float32"}, 1, tmp_path / "a.json", {})
    said = capsys.readouterr()
    assert "decode" in said.out and "written: " in said.err
    last = said.out.splitlines()[-1]
    assert last.startswith('{"format"') is not terminal
    assert json.loads((tmp_path / "a.json").read_text())["rows"][0]["tokens_per_second"] == 10.0


def test_offline_with_json_says_nothing_else_on_stdout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from launch.bench.offline import PARTS, Row, show

    config: Any = SimpleNamespace(
        model=SimpleNamespace(checkpoint=Path("tiny")), parallel=SimpleNamespace(ep=1)
    )
    row = Row("decode", 1, 8, 4, 10.0, 100.0, 3, dict.fromkeys(PARTS, 1.0), [10.0])
    show([row], config, {"dtype": "float32"}, 1, tmp_path / "a.json", {}, as_json=True)
    said = json.loads(capsys.readouterr().out)
    assert said == json.loads((tmp_path / "a.json").read_text()) and said["rows"][0]["batch"] == 1


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["x", "--json"], ["x", "--json"]),
        (["--json", "x"], ["--json", "x"]),
        (["--json", "a.json", "x"], ["--out", "a.json", "x"]),
        (["--json=a", "x"], ["--out=a", "x"]),
        (["--json", "--json=a.json"], ["--json", "--out=a.json"]),
        (["--json", "--out", "a.json"], ["--json", "--out", "a.json"]),
        (["--", "--json", "a.json"], ["--", "--json", "a.json"]),
    ],
)
def test_json_with_a_file_means_out(words: list[str], meant: list[str]) -> None:
    assert list(with_file_flag(words)) == meant


def test_json_is_a_flag_of_every_benchmark() -> None:
    """One JSON document on stdout; those whose results are kept have --out for a file."""
    from typer.main import get_command

    commands = get_command(bench_app).commands  # type: ignore[attr-defined]
    for name, command in commands.items():
        (flag,) = (p for p in command.params if "--json" in p.opts)
        files = [p for p in command.params if "--out" in p.opts]
        assert flag.is_flag and len(files) == (name in ("offline", "serve", "sweep")), name


def test_spread_and_percentiles_are_measured_values() -> None:
    assert Spread.of([3.0, 1.0, 2.0, 10.0]) == Spread(2.5, 10.0, 10.0, 1.0, 10.0)
    hundred = [float(n) for n in range(1, 101)]
    assert [percentile(hundred, p) for p in (0, 50, 90, 99, 100)] == [1, 50, 90, 99, 100]
    assert percentile([7.0], 99) == 7.0


def test_a_ratio_is_of_pairs() -> None:
    # A machine three times slower in the second step: the ratio does not see it.
    assert paired_ratio([2.0, 6.0, 2.2], [1.0, 3.0, 1.0]) == 2.0


def test_steps_are_told_by_lines_where_no_terminal_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line every few seconds; what is over before says nothing."""
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    for shown in (True, False):
        now = 0.0
        tell = StepProgress(shown)
        for step in range(4):
            tell("2 ranks", step, 10)
            now += 3
        tell.close()
    assert capsys.readouterr().err == "moeserve: 2 ranks: 2 of 10 steps, 6 s\n"
    now = 0.0
    tell = StepProgress(True, stages=True)
    for stage in ("drawn", "planned"):
        tell(stage, 0, 2)
        tell(stage, 1, 2)
    assert capsys.readouterr().err == "moeserve: drawn\nmoeserve: planned\n"


def test_the_machine_is_told() -> None:
    found = describe_machine()
    assert found["cores"] >= 1 and found["torch"].startswith("2.") and found["cpu"]
