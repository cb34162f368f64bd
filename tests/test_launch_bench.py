"""`moeserve bench` as a group, and what its commands share: figures, steps told, the machine."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from launch.bench.figures import Spread, paired_ratio, percentile
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
