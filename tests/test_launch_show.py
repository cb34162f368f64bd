"""What a person sees: progress lines, the heat table, the bench's table and last line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.bench.offline import PARTS, Bench, Row, show
from launch.demo import ASKS
from launch.heat import CELLS, heat_rows, level
from launch.progress import BarProgress, LineProgress, NoProgress, open_progress
from moeserve.config import ServeConfig
from moeserve.errors import ConfigError

TINY = Path(__file__).parents[1] / "checkpoints" / "tiny"


def test_lines_for_a_stage_that_counts(capsys):
    lines = LineProgress()
    for done in (0, 1, 2_000_000, 2_000_000):
        lines.update("weights", done, 2_000_000)
    lines.update("cache", 0, 0)
    lines.close()
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and said[0].startswith("moeserve: weights: 2.0 of 2.0 MB (")


def test_only_rank_0_shows_progress(monkeypatch, capsys):
    assert isinstance(open_progress(False), NoProgress)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    bar = open_progress(True)
    assert isinstance(bar, BarProgress)
    bar.update("weights", 5, 10)
    bar.update("weights", 10, 10)
    bar.update("warmup", 0, 0)
    bar.close()


def test_the_readme_shows_the_rows_of_the_demo():
    readme = (TINY.parents[1] / "README.md").read_text()
    rows = [line.split("|")[0].strip() for line in readme.splitlines() if line.endswith("x")]
    assert rows == [ask.kind for ask in ASKS]


def test_levels():
    assert [level(c, 10.0) for c in (0, 1, 30, 1000)] == [0, 1, len(CELLS) - 1, len(CELLS) - 1]
    assert level(5, 0.0) == 0
    assert [level(c, 10.0) for c in range(0, 40)] == sorted(level(c, 10.0) for c in range(0, 40))


def test_heat_rows():
    text = heat_rows([("layer 1", [0, 4, 0, 0]), ("2", [1, 1, 1, 1])], 2).plain.splitlines()
    assert text[0] == "  layer 1 |  ██|    | 4.0x"
    assert text[1].startswith("  2       |") and text[1].endswith("| 1.0x")
    uneven = heat_rows([("x", [1] * 7)], 3).plain
    assert [len(part) // 2 for part in uneven.split("|")[1:-1]] == [3, 2, 2]
    assert "0.0x" in heat_rows([("none", [0, 0])], 1).plain


def test_heat_rows_fit_the_terminal():
    rows = [("dictionary", [1] * 32)]
    assert len(heat_rows(rows, 2, 100).plain) > 80
    for columns in (80, 60):
        assert len(heat_rows(rows, 2, columns).plain) <= columns


def test_bench_shows_a_table_and_ends_with_json(capsys, tmp_path):
    row = Row("decode", 8, 16, 4, 123.4, 8.1, 3, dict.fromkeys(PARTS, 1.0), [123.4])
    info = {"dtype": "bfloat16", "dispatcher": "local", "notes": ["x"], "kv_plan": "y"}
    config = ServeConfig.load(None, {"model": {"checkpoint": "/some/tiny"}})
    show([row], config, info, threads=1)
    assert "1 thread a rank" in capsys.readouterr().out
    config = ServeConfig.load(None, {"model": {"checkpoint": "/some/tiny"}})
    file = tmp_path / "result.json"
    show([row], config, info | {"ranks_per_node": 1}, threads=2, file=file)
    assert json.loads(file.read_text())["rows"][0]["tokens_per_second_per_gpu"] == 123.4
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    assert result["rows"][0]["tokens_per_second"] == 123.4
    assert result["checkpoint"] == "tiny" and "notes" not in result["info"]
    assert any("123.4" in line and "16+4" in line for line in lines[:-1])


def bench(batch: str = "1", prompt: int = 100, output: int = 20, prefill: int = 0) -> Bench:
    return Bench(batch, prompt, output, prefill, 1)


@pytest.mark.parametrize("batch", ["", "0", "1,x", "-1", "1,,2"])
def test_bench_refuses_odd_batches(batch):
    problems: list[str] = []
    bench(batch)._batches(problems)
    assert [f"--batch {batch!r}" in line for line in problems] == [True]


def test_bench_refuses_what_the_model_cannot_hold_before_loading():
    config = ServeConfig.load(None, {"model": {"checkpoint": TINY}})
    bench()._check_lengths(config)
    for too_long in (bench(prompt=2040), bench(prefill=2048)):
        with pytest.raises(ConfigError, match="this model has 2048 positions"):
            too_long._check_lengths(config)


def test_bench_makes_room_for_the_largest_batch():
    config = ServeConfig.load(None, {"parallel": {"ep": 2}})
    roomy = bench()._with_room(config, 1000)
    assert roomy.schedule.max_num_sequences == 500 and roomy.schedule.token_budget == 512
    assert roomy.cache.kv_tokens is not None and roomy.cache.kv_tokens >= 500 * 120
    small = ServeConfig.load(
        None, {"schedule": {"max_num_sequences": 4}, "cache": {"kv_tokens": 9}}
    )
    with pytest.raises(ConfigError) as caught:
        bench()._with_room(small, 8)
    assert len(caught.value.problems) == 2
