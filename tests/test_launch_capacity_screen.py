"""What `moeserve plan` shows first, what it does not show where nothing fits, and how it reads at
80 columns."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from launch.capacity.deployment import from_preset
from launch.capacity.memory import weights
from launch.capacity.predict import Workload
from launch.capacity.report import named_otherwise, report
from launch.capacity.shape import ModelShape
from launch.capacity.times import Calibration
from launch.capacity.validate import FITTED, validate
from launch.cli import app
from moeserve.errors import ConfigError

TINY = Path(__file__).parents[1] / "checkpoints" / "tiny"
UNFIT = ["deepseek-v3", "--gpus", "8", "--gpu", "h100"]


def shown(*arguments: str, columns: int = 80) -> str:
    done = CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": str(columns)})
    assert done.exit_code == 0, done.output
    return done.stdout


def told(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(shown(*arguments, "--json").splitlines()[-1])
    return found


def problems(*arguments: str) -> list[str]:
    done = CliRunner().invoke(app, ["plan", *arguments])
    assert isinstance(done.exception, ConfigError), done.output
    return done.exception.problems


def numbers(of: Any) -> list[float]:
    if isinstance(of, dict):
        return [x for value in of.values() for x in numbers(value)]
    return [of] if isinstance(of, int | float) else []


def test_the_verdict_is_the_second_line() -> None:
    lines = shown(*UNFIT).splitlines()
    assert lines[0] == "deepseek-v3 on 8 x H100 SXM 80 GB (1 node)"
    assert lines[1] == (
        "does NOT fit: GPU memory: prefill 27.8 GB missing, decode 29.4 GB missing; "
        "nearest: --gpus 16"
    )
    fits = shown("deepseek-v3", "--gpus", "16", "--gpu", "h100").splitlines()
    assert fits[1] == "fits"
    late = shown("deepseek-v3", "--gpus", "16", "--gpu", "h100", "--tpot", "1ms").splitlines()
    assert late[1] == "fits; but 1 rule is violated: TPOT limit"


def test_nothing_is_predicted_where_memory_does_not_hold_it() -> None:
    screen = shown(*UNFIT)
    assert "27.8 GB missing" in screen and "29.4 GB missing" in screen
    assert "Times are predicted" not in screen
    assert not re.search(r"-\d", screen.replace("deepseek-v3", "").replace("--gpus", ""))
    for word in ("tokens/s", "TTFT,", "TPOT", "$", "a step of"):
        assert word not in screen, word
    plan = told(*UNFIT)
    assert plan["fits"] is False and plan["verdict"].startswith("does NOT fit: GPU memory")
    assert numbers(plan["prediction"]) == [] and "fit" in plan["prediction"]["not_predicted"]
    fine = told("deepseek-v3", "--gpus", "16", "--gpu", "h100")
    assert fine["fits"] is True and fine["prediction"]["not_predicted"] is None

    def keys(of: Any) -> Any:
        return {k: keys(v) for k, v in of.items()} if isinstance(of, dict) else None

    for phase in ("prefill", "decode"):
        here, there = (p["phases"][phase] for p in (plan, fine))
        assert keys(here["prediction"]) == keys(there["prediction"]), "stable keys"
        traffic = here["prediction"].pop("traffic_bytes_per_token_per_layer")
        assert numbers(here["prediction"]) == [] and sum(numbers(traffic)) > 0
        held = here["memory_per_gpu"]
        assert held["missing_bytes"] == -held["kv_bytes"] > 27e9
        assert there["memory_per_gpu"]["missing_bytes"] == 0
    assert keys(plan["prediction"]) == keys(fine["prediction"])


def test_a_cache_that_is_too_small_does_not_fit_either() -> None:
    flags = ["--preset", "v3-decode-144", "--sequences", "300"]
    lines = shown(*flags).splitlines()
    most = told(*flags)["violations"][0]["nearest"]["sequences"][0]
    assert lines[1].startswith("does NOT fit: KV cache: 300 sequences of 4989 positions")
    assert lines[1].endswith(f"; nearest: --sequences {most}")
    assert "sequences in the cache" in "\n".join(lines) and "tokens/s" not in "\n".join(lines)
    assert shown("--preset", "v3-decode-144", "--sequences", str(most)).splitlines()[1] == "fits"


def test_one_phase_that_fits_is_predicted_beside_one_that_does_not() -> None:
    flags = ["deepseek-v3", "--gpus", "144", "--gpu", "h800", "--sequences", "300"]
    plan = told(*flags)
    assert plan["verdict"].endswith("; prefill fits") and plan["fits"] is False
    assert plan["prediction"]["ttft_s"] > 0 and plan["prediction"]["tpot_s"] is None
    assert plan["prediction"]["cost_per_million"]["output"] is None
    assert plan["prediction"]["cost_per_million"]["input"] > 0


@pytest.mark.parametrize("columns", [80, 60])
def test_titles_and_points_are_not_folded(columns: int) -> None:
    plan = shown("deepseek-v3", "--gpus", "144", "--gpu", "h800", "--drafts", "1", columns=columns)
    for title in ("a million tokens, $2 a GPU-hour", "memory of a GPU", "a step of prefill"):
        assert any(line.startswith(title) for line in plan.splitlines()), title


def test_a_validation_reads_at_80_columns() -> None:
    screen = shown("--validate")
    lines = screen.splitlines()
    assert max(map(len, lines)) <= 80
    found = validate()
    words = {word for p in found.points if p.error is not None for word in p.what.split()}
    cut = [w for w in words if len(w) > 8 and w not in screen]
    assert not cut, "words are whole"
    first = next(i for i, line in enumerate(lines) if line.strip().startswith("1: H800, prefill"))
    reasons = " ".join(" ".join(lines[first:]).split())
    for p in found.points:
        if p.predicted is None:
            assert p.reason in reasons, p.id
    ends = [line.split()[-1] for line in lines if line.split()]
    assert (ends.count("fitted"), ends.count("out")) == (15, 25), "a line a point"


def test_constants_are_told_with_values_and_points() -> None:
    told_ = told("--validate")
    by_name = {c["name"]: c for c in told_["constants"]}
    assert set(FITTED) < set(by_name) and set(told_["fitted_constants"]) == set(FITTED)
    assert by_name["young"]["points"] == ["11"]
    assert by_name["lmsys_balance"]["points"] == ["5a", "5c"]
    assert by_name["prefill_core"]["points"] == ["3", "5a", "5c"]
    assert by_name["nic"]["points"] == ["20"] and by_name["nic"]["start"] is None
    fitted = {p["id"] for p in told_["points"] if p["fitted"]}
    screen = " ".join(shown("--validate").split())
    fields = {f.name for f in dataclasses.fields(Calibration)}
    assert set(by_name) == fields | {"cache_read", "launches", "of_experts"}, "every one"
    for c in by_name.values():
        assert c["value"] == getattr(Calibration(), c["name"], c["value"]) and c["means"]
        assert set(c["points"]) <= fitted and (c["name"] in FITTED) == (c["start"] is not None)
        assert c["points"] or c["source"].split()[0] in ("assumed:", "counted:", "AIConfigurator's",
                                                         "as")  # fmt: skip
        assert f"{c['name']} {c['value']:.3g} " in screen
    assert "assumed: no table" in screen and by_name["ceiling"]["value"] == 0.9
    assert told_["fitted_constants"]["skew"] == by_name["skew"]["value"] == 1.36


@pytest.mark.parametrize(("preset", "copies", "others"), [("v3-decode-320", 63, 257),
                                                          ("v3-decode-144", 32, 256)])  # fmt: skip
def test_copies_are_apart_from_experts(preset: str, copies: int, others: int) -> None:
    d = from_preset(preset)
    held = weights(d)
    slots = d.slots_per_gpu * d.shape.moe_layers * d.shape.expert * d.shape.weight_bytes
    assert held["redundant experts"] == pytest.approx(slots * copies / (copies + others))
    assert held["experts"] + held["redundant experts"] == pytest.approx(slots)
    notes = report(d, Workload(4489, 1000)).notes
    assert any(x.startswith("experts, redundant experts: means over GPUs") for x in notes)
    assert "means over GPUs" in shown("--preset", preset)
    plain = replace(d, redundant=0, gpus=32)
    assert "redundant experts" not in weights(plain)
    odd = weights(replace(d, redundant=1, gpus=32))
    assert odd["empty slots"] > odd["redundant experts"] > 0


def test_plurals() -> None:
    one = shown(str(TINY), "--gpus", "1", "--gpu", "h100", "--sequences", "1", "--drafts", "1")
    many = shown(str(TINY), "--gpus", "16", "--gpu", "h100", "--sequences", "2", "--drafts", "2")
    assert "(1 node)" in one and "1 sequence " in one and "MTP, 1 draft at" in one
    assert "(2 nodes)" in many and "2 sequences" in many and "MTP, 2 drafts at" in many
    assert not re.search(r"\b1 (nodes|sequences|drafts|slots|GPUs|layouts)\b", one + many)


def test_a_check_says_how_many_rules() -> None:
    late = ["deepseek-v3", "--gpus", "144", "--gpu", "h800", "--tpot", "1ms", "--check"]
    done = CliRunner().invoke(app, ["plan", *late])
    assert str(done.exception) == "--check: 1 rule is violated"
    found = ["plan", str(TINY), "--search", "--gpu", "h100", "--max-gpus", "1"]
    found += ["--tpot", "0.000001"]
    done = CliRunner().invoke(app, [*found, "--check"])
    assert str(done.exception) == "--check: 1 phase has no layout within the limits"


def test_a_wrong_preset_is_the_only_thing_that_is_wrong() -> None:
    (only,) = problems("--preset", "v3-decode-321")
    assert only.endswith("nearest: v3-decode-320")
    assert len(problems("--preset", "v3-decode-321", "--gpus", "x")) == 2
    (only,) = problems("--preset", "v3-decode-144", "--drafts", "x", "--acceptance", "0.5")
    assert only.startswith("--drafts=x")


def test_help_is_wrapped_once() -> None:
    done = CliRunner().invoke(app, ["plan", "--help"], env={"COLUMNS": "100", "TERM": "dumb"})
    told_ = done.output.split("[MODEL]")[1].split("Arguments")[0]
    text = [line.strip() for line in told_.splitlines() if line.strip(" ╭─")]
    assert len(text) > 3
    for line, following in zip(text, text[1:], strict=False):
        full = len(line) + 1 + len(following.split()[0]) > 94
        assert full or line.endswith("."), (line, following)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvidia--DeepSeek-V3.1-NVFP4.json", "NVFP4"),
        ("R1-FP4", "FP4"),
        ("DeepSeek-R1-AWQ", "AWQ"),
        ("v3_gptq_int4", "GPTQ"),
        ("DeepSeek-V3-W4AFP8", "W4AFP8"),
        ("r1-4bit", "4BIT"),
        ("GLM-5-FP8", "FP8"),
    ],
)
def test_names_that_speak_of_a_quantisation_are_warned_of(name: str, kind: str) -> None:
    d = from_preset("v3-decode-144")
    bf16 = ModelShape(replace(d.shape.config, quantization=None))
    (found,) = named_otherwise(replace(d, model=name, shape=bf16))
    assert f"named after {kind}" in found.text and "BF16 is planned" in found.text
    assert found.severity == "warning"
    others = named_otherwise(replace(d, model=name))
    assert [("FP8 is planned" in v.text) for v in others] == ([] if kind == "FP8" else [True])
    assert not named_otherwise(replace(d, model="folder/awqua/DeepSeek-R1", shape=bf16))


def test_an_unquantised_config_is_said_to_be_assumed(tmp_path: Path) -> None:
    config = json.loads((TINY / "config.json").read_text())
    config.pop("quantization_config", None)
    file = tmp_path / "Some-NVFP4.json"
    file.write_text(json.dumps(config))
    flags = ["--gpus", "8", "--gpu", "b200", "--phase", "decode"]
    assumed = "config.json names no quantisation: BF16 assumed"
    screen = shown(str(file), *flags, columns=200)
    assert "in BF16 (assumed: config.json names no quantisation)" in screen
    assert assumed in screen and "named after NVFP4" in screen
    assert any(x.startswith(assumed) for x in told(str(file), *flags)["phases"]["decode"]["notes"])
    looked = ["--search", "--gpu", "b200", "--max-gpus", "1"]
    assert assumed in shown(str(file), *looked, columns=200)
    notes = told(str(file), *looked)["notes"]
    assert notes[0].startswith(assumed) and "named after NVFP4" in notes[1]
    side = tmp_path / "hf_quant_config.json"
    side.write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    assert "NVFP4" in problems(str(file), *flags)[0], "what is beside it is read, and not served"
    file.write_text(json.dumps(config | {"quantization_config": {
        "quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    }))  # fmt: skip
    assert told(str(file), *flags)["parameters"]["weights"] == "fp8", "the config itself counts"
