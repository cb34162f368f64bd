"""One look a kind in every picture, and pictures that say what their numbers are."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from launch.capacity.deployment import PRESETS, from_preset
from launch.capacity.looks import LOOKS, look
from launch.capacity.parts import memory_parts, step_parts
from launch.capacity.predict import Workload
from launch.capacity.report import report
from launch.capacity.validate import validate
from launch.cli import app


def rgb(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))


def drawn(tmp_path: Path, *arguments: str) -> str:
    pytest.importorskip("matplotlib")
    file = tmp_path / "drawn.svg"
    done = CliRunner().invoke(app, ["plan", *arguments, "--plot", str(file), "--json"])
    assert done.exit_code == 0, done.output
    return file.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PRESETS)
def test_every_kind_has_a_look(name: str) -> None:
    for drafts, extra in ((0, 0), (1, 1)):
        d = from_preset(name)
        r = report(replace(d, drafts=drafts, redundant=d.redundant + extra), Workload())
        for kind, _ in (*memory_parts(r), *step_parts(r.prediction.step)):
            assert look(kind).fill


def test_kinds_are_told_apart() -> None:
    looks = list(dict.fromkeys(LOOKS.values()))
    assert len(looks) >= 17, "only a kind and the part of a step that it serves look alike"
    for one, other in itertools.combinations(looks, 2):
        apart = sum((a - b) ** 2 for a, b in zip(rgb(one.fill), rgb(other.fill), strict=True))
        assert apart**0.5 > 32 or one.hatch != other.hatch, (one, other)
    assert look("left free").hatch and look("left free").fill == "#ffffff"
    assert look("dispatch (deepep_ll)") == look("all-to-alls, not hidden")
    assert {look("experts"), look("left free"), look("KV cache"), look("redundant experts")} <= {
        *looks
    }


def test_legends_have_units_and_plurals(tmp_path: Path) -> None:
    text = drawn(tmp_path, "--preset", "v3-decode-144", "--gpus", "288", "--redundant", "32")
    assert "attention 12.4 GB" in text and "36 nodes" in text
    assert "routed experts" in text and " ms</text>" in text
    one = drawn(tmp_path, "deepseek-v3", "--gpus", "8", "--gpu", "b200", "--drafts", "1",
                "--sequences", "1", "--phase", "decode")  # fmt: skip
    assert "1 node " in one and "1 sequence " in one and "MTP, 1 draft<" in one
    assert not any(wrong in one for wrong in ("1 nodes", "1 sequences", "1 drafts"))


def test_a_picture_of_what_does_not_fit_says_so_and_predicts_nothing(tmp_path: Path) -> None:
    text = drawn(tmp_path, "deepseek-v3", "--gpus", "8", "--gpu", "h100", "--phase", "decode")
    assert "does NOT fit: GPU memory: 29.4 GB missing; nearest: --gpus 16" in text
    assert "80 GB, 29.4 GB missing" in text and "not predicted" in text
    for word in ("tokens/s a node", "TPOT", "$", "routed experts"):
        assert word not in text, word


def test_numbers_of_points_are_explained_in_the_picture(tmp_path: Path) -> None:
    text = drawn(tmp_path, "--validate")
    errors = {p.id: p.error for p in validate().points}
    assert f"8b: as 8a, overlap off ({errors['8b']:+.1%}, held out)" in text
    k2 = "10a: Kimi K2, H200, prefill EP32 (4 nodes), 2K"
    assert f"{k2} ({errors['10a']:+.1%}, held out)" in text
    assert "20: DeepEP low latency, H100, EP8 combine" in text


def test_the_best_is_told_below_the_axis(tmp_path: Path) -> None:
    text = drawn(tmp_path, "deepseek-v3", "--search", "--gpu", "h800", "--max-gpus", "24",
                 "--phase", "decode", "--tpot", "60ms")  # fmt: skip
    said = next(line for line in text.splitlines() if ">best: " in line)
    axis = next(line for line in text.splitlines() if ">TPOT, ms" in line)

    here = float(said.split("translate(")[1].split(")")[0].split()[1])
    there = float(axis.split(' y="')[1].split('"')[0])
    assert here > there, "SVG counts downward"
