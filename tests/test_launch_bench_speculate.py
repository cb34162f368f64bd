"""`moeserve bench speculate`: its flags, what pairs come to, table, JSON, picture, a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from launch.bench.speculate_figures import Pair, Run, predicted, rate_of, row
from launch.bench.speculate_flags import Cell, SpeculateFlags, check
from launch.bench.speculate_prompts import read_prompts
from launch.bench.speculate_show import Result, as_json, short, show, told
from launch.cli import app
from moeserve.errors import ConfigError
from moeserve.speculate.acceptance import predicted_speedup
from moeserve.speculate.setting import read_speculate
from moeserve.speculation_report import shares

TINY = Path(__file__).resolve().parents[1] / "checkpoints" / "tiny"
MACHINE = {"cpu": "a CPU", "cores": 2, "torch": "2", "commit": "abc1234", "changed": True}


def texts_of(asked: SpeculateFlags) -> list[tuple[str, int]]:
    return [(cell.text, cell.batch) for cell in check(asked).cells()]


def test_each_drafter_at_each_depth_and_batch() -> None:
    asked = SpeculateFlags(
        speculate=("mtp", "eagle:some:dir", "ngram:3"), k="auto,2,1", batch="4,1"
    )
    one = [
        "mtp:1",
        "mtp:2",
        "mtp:auto",
        *(f"eagle:some:dir:{k}" for k in (1, 2, "auto")),
        "ngram:3",
    ]
    assert texts_of(asked) == [(text, batch) for batch in (1, 4) for text in one]
    assert texts_of(SpeculateFlags()) == [("mtp:auto", 1)]
    assert texts_of(SpeculateFlags(speculate=("auto", "mtp"))) == [("auto", 1), ("mtp:auto", 1)]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"speculate": ("mtq",)}, "nearest"),
        ({"speculate": ("mtp:9",)}, "1 to 8"),
        ({"speculate": ("off",)}, "measured beside every drafter"),
        ({"speculate": ("mtp:2",), "k": "3"}, "not both"),
        ({"speculate": ("mtp:auto",), "k": "3"}, "not both"),
        ({"k": "0"}, "--k 0: must be at least 1"),
        ({"k": "1,x"}, "--k x"),
        ({"batch": "0"}, "--batch 0"),
        ({"batch": "1,"}, "--batch"),
        ({"temperature": "hot"}, "--temperature hot"),
        ({"temperature": "nan"}, "--temperature nan"),
        ({"temperature": "-1"}, "from 0 to 2"),
        ({"repeat": "0"}, "--repeat 0"),
        ({"output_length": "1"}, "--output-length 1"),
        ({"prompts": Path("gone.txt")}, "gone.txt: no such file"),
        ({"plot": Path("x.gif")}, ".png"),
    ],
)
def test_wrong_flags_are_said(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check(SpeculateFlags(**flags))


def test_depths_alone_are_of_the_checkpoints_own_drafter() -> None:
    assert texts_of(SpeculateFlags(k="2,auto")) == [("mtp:2", 1), ("mtp:auto", 1)]
    with pytest.raises(ConfigError) as raised:
        check(SpeculateFlags(k="9"))
    assert len(raised.value.problems) == 1 and "at most 8" in raised.value.problems[0]


def test_all_problems_at_once() -> None:
    result = CliRunner().invoke(
        app, ["bench", "speculate", str(TINY), "--batch", "x", "--k", "99", "--token-budget", "no"]
    )
    assert isinstance(result.exception, ConfigError)
    problems = "\n".join(result.exception.problems)
    assert "--batch x" in problems and "--k 99" in problems and "--token-budget" in problems


def test_a_folder_without_heads_is_refused_before_ranks_start() -> None:
    words = ["bench", "speculate", str(TINY), "--speculate", f"eagle:{TINY.parent / 'gone'}"]
    error = CliRunner().invoke(app, [*words, "--ep", "2"]).exception
    assert isinstance(error, ConfigError)
    assert "--speculate 'eagle:" in error.problems[0] and "gone" in error.problems[0]


@pytest.mark.parametrize("asked", ["on", "auto", "off"])
def test_drafts_made_ahead_are_refused_before_ranks_start(asked: str) -> None:
    words = ["bench", "speculate", str(TINY), "--prompt-length", "99999", "--ep", "2"]
    words += ["--ahead", asked]
    error = CliRunner().invoke(app, words).exception
    assert isinstance(error, ConfigError)
    said = [problem for problem in error.problems if "ahead" in problem]
    refused = ["--ahead 'on': drafts are not made ahead; leave it out"]
    assert said == refused * (asked == "on")


# -- figures --------------------------------------------------------------------------------------


def a_run(tokens: int, seconds: float, steps: int, **more: Any) -> Run:
    texts = {"0": (1, 2, 3)}
    given: dict[str, Any] = {"drafting": 0.0, "rounds": 0, "depths": (0,) * 9, "to_end": seconds}
    given |= {"slots": steps, "drafted": (), "accepted": (), "runs": 0, "texts": texts}
    return Run(tokens=tokens, seconds=seconds, steps=steps, **{**given, **more})


def drafting(seconds: float, **more: Any) -> Run:
    """20 steps of 2 drafts: 12 of 20 first ones accepted, 6 second ones: 38 tokens."""
    told: dict[str, Any] = {"drafting": 0.4, "rounds": 40, "depths": (0, 0, 20, *(0,) * 6)}
    told |= {"drafted": (20, 20), "accepted": (12, 6), "runs": 20}
    return a_run(38, seconds, 20, **{**told, **more})


def test_a_row_is_made_of_pairs() -> None:
    cell = Cell(read_speculate("mtp:2"), 1)
    # A machine that gets three times slower in the second pair: both sides feel it.
    pairs = [Pair(a_run(38, s, 38), drafting(s * 0.5)) for s in (3.8, 11.4, 3.8)]
    found = row(cell, pairs)
    assert found["speedup"] == pytest.approx(2.0) and found["pairs"] == 3
    assert found["acceptance"] == [0.6, 0.3] and found["mean_accepted"] == pytest.approx(0.9)
    assert found["tokens_per_step"] == pytest.approx(1.9) and found["mean_depth"] == 2
    assert found["cost_ratio"] == pytest.approx(0.1)  # 10 ms a round, 100 ms a step
    # 1 + a + a^2 = 1.9: the rate that makes the measured tokens a step; then the theorem itself.
    assert found["rate"] == pytest.approx(0.57239, abs=1e-4)
    assert found["predicted"] == pytest.approx(1.9 / 1.2, abs=1e-6)
    assert found["verify_ratio"] == pytest.approx(0.75)  # (1.9 s - 0.4 s) / 20 over 0.1 s
    assert found["same_tokens"] is True
    # 100 ms a step of 1.9 tokens; 75 ms of one that verifies and two rounds of 10 ms.
    assert found["predicted_with_verify"] == pytest.approx(1.9 / 0.95, abs=1e-6)
    assert found["drafted"] == [60, 60] and found["accepted"] == [36, 18]
    assert found["speedup_quartiles"] == pytest.approx([2.0, 2.0])
    json.dumps(found)


def test_a_position_that_was_never_tried_has_no_acceptance() -> None:
    assert shares([9, 9, 4, 0], [6, 3, 0, 0]) == [0.6667, 0.3333, 0.0, None]
    assert shares([9, 9, 9], [0, 0, 0]) == [0.0, None, None]  # refused each time, or not reached
    assert shares([0, 0], [0, 0]) == [None, None] and shares([], []) == []


def test_other_tokens_are_seen() -> None:
    cell = Cell(read_speculate("ngram"), 1)
    pairs = [Pair(a_run(38, 1.0, 38), drafting(1.0, texts={"0": (1, 2, 4)}))]
    assert row(cell, pairs)["same_tokens"] is False
    assert row(cell, pairs, compared=False)["same_tokens"] is None
    nothing = [Pair(a_run(38, 1.0, 38, texts={}), drafting(1.0, texts={}))]
    assert row(cell, nothing)["same_tokens"] is False


def test_the_prediction_is_the_theorem_at_each_depth() -> None:
    assert predicted(0.8, 0.1, (0, 0, 0, 7)) == pytest.approx(predicted_speedup(0.8, 3, 0.1))
    assert predicted(0.8, 0.1, (5,)) == 1.0 and predicted(0.8, 0.1, ()) == 1.0
    # Half of the steps without drafts: tokens and time of both add up.
    tokens = 1 + (1 - 0.8**4) / (1 - 0.8)
    assert predicted(0.8, 0.1, (1, 0, 0, 1)) == pytest.approx(tokens / (1 + 1.3))
    assert predicted(1.0, 0.0, (0, 0, 1)) == pytest.approx(3.0)


def test_the_rate_is_of_all_steps() -> None:
    """Also of those for which nothing was found to draft; steps of depth 0 say nothing of it."""
    assert rate_of(1.6, (0, 10)) == pytest.approx(0.6)
    assert rate_of(1.3, (10, 10)) == pytest.approx(0.6)
    assert rate_of(3.0, (0, 0, 4)) == pytest.approx(1.0)
    assert rate_of(1.0, (0, 9)) == 0.0 and rate_of(1.2, (9,)) == 0.0 and rate_of(1.0, ()) == 0.0


def test_nothing_drafted_is_no_division_by_zero() -> None:
    idle = a_run(38, 3.8, 38, depths=(38, *(0,) * 8))
    found = row(Cell(read_speculate("ngram"), 32), [Pair(a_run(38, 3.8, 38), idle)])
    assert found["acceptance"] == [] and found["mean_accepted"] == 0 and found["predicted"] == 1


# -- shown ----------------------------------------------------------------------------------------


def a_result(texts: tuple[str, ...], batches: str) -> Result:
    asked = check(SpeculateFlags(speculate=texts, batch=batches, temperature="0.5"))
    pairs = [Pair(a_run(38, 3.8, 38), drafting(1.9))]
    rows = [row(cell, pairs) for cell in asked.cells()]
    return Result(asked, rows, "tiny", 2, "same", "from a file", {"dtype": "bfloat16"}, MACHINE, 1)


def test_json_has_what_was_promised() -> None:
    found = json.loads(json.dumps(as_json(a_result(("mtp:2", "ngram:2"), "1,32"))))
    assert found["speedup"] == pytest.approx(2.0) and found["acceptance"] == [0.6, 0.3]
    assert found["predicted"] == pytest.approx(1.9 / 1.2) and found["same_tokens"] is True
    assert (found["depth"], found["batch"], found["ep"]) == (2, 1, 2)
    assert found["temperature"] == 0.5 and found["commit"] == "abc1234" and found["machine"]
    assert len(found["rows"]) == 4
    for each in found["rows"]:
        assert each["temperature"] == 0.5 and each["ep"] == 2
    assert [r["batch"] for r in found["rows"]] == [1, 1, 32, 32]


def test_temperature_stands_beside_acceptance() -> None:
    lines = "\n".join(told(a_result(("mtp:2",), "1")))
    assert "at temperature 0.5" in lines and "(1 - a^(k+1))" in lines


def test_unsteady_pairs_are_told_with_the_load() -> None:
    result = a_result(("mtp:2",), "1")
    assert not any("pairs differ" in line for line in told(result))
    wild = [Pair(a_run(38, 3.8, 38), drafting(s)) for s in (1.9, 19.0)]
    rows = [row(result.asked.cells()[0], wild)]
    busy = replace(result, rows=rows, machine=MACHINE | {"load": 9.2})
    lines = told(busy)
    assert "pairs differ 10 x: the machine is busy (load 9.2, 2 cores)" in lines
    assert ", load 9.2, " in lines[-1]
    calm = told(replace(busy, machine=MACHINE | {"load": 0.3}))
    assert any(line.startswith("pairs differ 10 x: more of them") for line in calm)


def test_the_table_shows_both_predictions_and_what_was_tried(
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = a_result(("mtp:2",), "1")
    rows = [result.rows[0] | {"acceptance": [0.6, None], "speedup_quartiles": [1.8, 2.1]}]
    show(replace(result, rows=rows))
    out = capsys.readouterr().out
    assert "with verify" in out and "1.80-2.10" in out and " 0.60 " in out and "None" not in out


def test_a_drafter_is_not_called_by_its_name_twice() -> None:
    assert short("eagle:some/eagle") == "eagle" and short("eagle:some/v2") == "eagle:v2"
    assert short("mtp") == "mtp"


@pytest.mark.parametrize(
    ("texts", "batches"),
    [
        (("mtp:2", "eagle:a/eagle:2"), "1,32"),
        (("mtp:1", "mtp:2", "mtp:auto", "ngram:1", "ngram:4"), "1,32"),
        (("mtp:auto",), "1,4,32"),
        (("eagle:a/b:2",), "1"),
    ],
)
def test_the_picture_is_drawn(tmp_path: Path, texts: tuple[str, ...], batches: str) -> None:
    pytest.importorskip("matplotlib")
    from launch.bench.speculate_picture import draw

    draw(a_result(texts, batches), tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 10_000


# -- prompts and a run ----------------------------------------------------------------------------


def test_prompts_are_text_and_the_same_for_every_drafter(tmp_path: Path) -> None:
    prompts = read_prompts(TINY, None, 24, 0)
    first, again = prompts.take(3, 4), prompts.take(3, 4)
    assert first == again and prompts.take(4, 4) != first and "heldout" in prompts.source
    assert all(len(p) == 24 and p[0] == 0 for p in first) and len(set(first)) == 4
    file = tmp_path / "short.txt"
    file.write_text("too short")
    with pytest.raises(ConfigError, match="--prompts"):
        read_prompts(TINY, file, 24, 0)


def test_a_run_of_two_drafters() -> None:
    words = ["bench", "speculate", str(TINY), "--speculate", "mtp:2", "--speculate", "ngram"]
    size = ["--output-length", "12", "--prompt-length", "8", "--repeat", "2", "--warmup", "0"]
    found = CliRunner().invoke(app, [*words, *size, "--batch", "1,3", "--json", "-q"])
    assert found.exit_code == 0, found.output
    assert not found.stderr  # quiet
    result = json.loads(found.stdout)
    assert result["same_tokens"] is True and result["speedup"] > 0
    assert len(result["acceptance"]) == 2 and 1 <= result["tokens_per_step"] <= 3
    assert [(r["drafter"], r["batch"]) for r in result["rows"]] == [
        ("mtp", 1), ("ngram", 1), ("mtp", 3), ("ngram", 3),
    ]  # fmt: skip
    assert all(r["same_tokens"] and r["pairs"] == 2 for r in result["rows"])
