"""`moeserve plan MODEL` as it is typed: reports, searches, validation, pictures, all errors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from launch.capacity.asked import Typed, read
from launch.capacity.balance import balance, typical
from launch.capacity.candidates import pareto
from launch.capacity.deployment import from_preset
from launch.capacity.picture_search import draw_search
from launch.capacity.predict import Workload, predict
from launch.capacity.remedies import errors
from launch.capacity.report import Limits
from launch.capacity.rules import violations
from launch.capacity.run import RulesViolated
from launch.capacity.search import STEP_TOKENS, _pools, _step_of, ratio, search
from launch.cli import app
from moeserve.errors import ConfigError

ROOT = Path(__file__).parents[1]
TINY = str(ROOT / "checkpoints" / "tiny")
V3 = ["deepseek-v3", "--gpus", "144", "--gpu", "h800"]


def told(*arguments: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["plan", *arguments, "--json"])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def problems(*arguments: str) -> list[str]:
    done = CliRunner().invoke(app, ["plan", *arguments])
    assert isinstance(done.exception, ConfigError), done.output
    return done.exception.problems


def test_a_plan_has_both_phases_and_says_everything() -> None:
    plan = told(*V3, "--drafts", "1", "--price", "4", "--cached-share", "0.5")
    said = plan["prediction"]
    assert said["decode_tokens_per_s_per_node"] > 10_000 < said["prefill_tokens_per_s_per_node"]
    assert said["ttft_s"] > 0 < said["tpot_s"] and 1 < said["mtp_gain"] < 1.85
    assert 0 < said["cost_per_million"]["cached"] < said["cost_per_million"]["input"]
    assert plan["violations"] == [] and plan["price_per_gpu_hour"] == 4
    for phase in ("prefill", "decode"):
        r = plan["phases"][phase]
        m = r["memory_per_gpu"]
        parts = [m[k] for k in m if k not in ("total_bytes", "weights_bytes")]
        assert sum(parts) + sum(m["weights_bytes"].values()) == pytest.approx(m["total_bytes"])
        assert r["layout"]["redundant"] == 32 and r["layout"]["balance"]["mean"] > 1
        assert r["kv_bytes_per_token"] == {"bf16": 70272, "fp8": 61 * 656}
        assert r["kv_bytes_per_token_mtp"] == {"bf16": 1152, "fp8": 656}
    sequences = plan["phases"]["decode"]["concurrent_sequences"]
    assert all(c["per_node"]["paged"] == 8 * c["per_gpu"]["paged"] for c in sequences)
    twice = told(*V3, "--drafts", "1", "--price", "8", "--cached-share", "0.5")["prediction"]
    for kind, dollars in said["cost_per_million"].items():
        assert twice["cost_per_million"][kind] == pytest.approx(2 * dollars)


def test_a_preset_may_be_changed() -> None:
    plain = told("--preset", "v3-decode-320")
    assert (plain["gpus"], plain["gpu"], plain["model"]) == (320, "h800", "deepseek-v3")
    assert plain["phases"]["decode"]["layout"]["shared_expert"] == "hosted"
    other = told("--preset", "v3-decode-320", "--gpu", "h200", "--sequences", "64", "--kv-fp8")
    load = other["phases"]["decode"]["load"]
    assert (other["gpu"], load["sequences_per_gpu"], load["kv_fp8"]) == ("h200", 64, True)
    assert other["prediction"]["tpot_s"] < plain["prediction"]["tpot_s"]


def test_auto_takes_what_is_allowed() -> None:
    free = told(*V3)["phases"]["decode"]["load"]["sequences_per_gpu"]
    kept = told(*V3, "--tpot", "30ms")
    assert kept["phases"]["decode"]["load"]["sequences_per_gpu"] < free
    assert kept["prediction"]["tpot_s"] <= 0.03 and kept["violations"] == []
    both = told(*V3, "--dispatch", "deepep_ll")
    assert both["phases"]["prefill"]["load"]["tokens_per_step_per_gpu"] <= 1024
    assert both["violations"] == []
    (late,) = told(*V3, "--tpot", "1ms")["violations"]
    assert late["rule"] == "TPOT limit" and late["phase"] == "decode"


def test_broken_rules_are_in_the_report_and_end_a_check() -> None:
    flags = ["kimi-k2", "--gpus", "100", "--gpu", "h200", "--redundant", "0", "--drafts", "1"]
    found = told(*flags)["violations"]
    assert {"MTP layers", "whole nodes", "slots divide"} <= {v["rule"] for v in found}
    assert [96, 104] in [v["nearest"].get("gpus") for v in found]
    done = CliRunner().invoke(app, ["plan", *flags, "--check"])
    assert isinstance(done.exception, RulesViolated) and "MTP layers" in done.output


@pytest.mark.parametrize(
    "model", [TINY, f"{TINY}/config.json", "DeepSeek-R1", "moonshotai/Kimi-K2-Instruct"]
)
def test_models_by_folder_file_and_name(model: str) -> None:
    plan = told(model, "--gpus", "8", "--gpu", "b200", "--phase", "decode")
    assert plan["parameters"]["routed_experts"] in (32, 256, 384)
    assert list(plan["phases"]) == ["decode"] and plan["parameters"]["weights"] == "fp8"
    assert plan["prediction"]["cost_per_million"]["input"] is None


def test_everything_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v3", "hidden_size": "x"}')
    np.savez(tmp_path / "few.npz", loads=np.ones((2, 7)))
    assert len(problems()) == 3
    found = "\n".join(
        problems(
            str(tmp_path), "--gpus", "0", "--gpu", "h2000", "--price", "-1", "--sequences", "0",
            "--phase", "decod", "--dispatch", "deep_ll", "--wire", "fp7", "--tpot", "never",
            "--cached-share", "2", "--acceptance", "0.5", "--plot", "x.gif", "--max-gpus", "8",
            "--seed", "3", "--longest", "0", "--shared-memory", "much",
        )
    )  # fmt: skip
    for part in (
        "hidden_size='x'", "--gpus=0", "nearest: h200", "--price=-1", "--sequences=0",
        "nearest: decode", "nearest: deepep_ll", "--wire=fp7", "--tpot=never", "--cached-share=2",
        "--acceptance=0.5: nothing to accept", "x.gif", "--max-gpus: has no meaning",
        "--seed: goes with --rehearse", "--longest=0", "--shared-memory",
    ):  # fmt: skip
        assert part in found, part
    (wrong,) = problems(*V3, "--trace", str(tmp_path / "few.npz"))
    assert "7 experts; the model has 256" in wrong
    (gone,) = problems(*V3, "--trace", str(tmp_path / "gone.npz"))
    assert "gone.npz" in gone
    assert "nearest: deepseek-v3" in problems("deepsek-v3", "--gpus", "8", "--gpu", "h100")[0]


def test_the_trace_decides_the_balance(tmp_path: Path) -> None:
    even, hot = np.ones((3, 256)), np.ones((3, 256))
    hot[:, 0] = 400
    np.savez(tmp_path / "even.npz", loads=even)
    np.savez(tmp_path / "two.npz", even=even, hot=hot)
    flags = ["--phase", "decode", "--sequences", "64", "--redundant", "0", "--gpus", "64"]
    plans = [
        told("deepseek-v3", "--gpu", "h800", *flags, "--trace", str(tmp_path / name), *array)
        for name, array in (("even.npz", []), ("two.npz", ["--array", "hot"]))
    ]
    spreads = [p["phases"]["decode"]["layout"]["balance"] for p in plans]
    assert spreads[0]["mean"] == pytest.approx(1) and spreads[1]["mean"] > 5
    assert spreads[0]["loads"] == "even.npz"
    assert plans[0]["prediction"]["tpot_s"] < plans[1]["prediction"]["tpot_s"]


def test_redundancy_is_priced_by_balance() -> None:
    """One expert a GPU leaves hot ones alone; two slots a GPU even them out."""
    wide, narrow = (balance(from_preset(n)) for n in ("v3-decode-320", "v3-decode-144"))
    assert wide.mean > narrow.mean > 1 and wide.worst > wide.mean
    assert typical(384).shape == (8, 384)


def test_typical_loads_are_those_of_the_phase() -> None:
    """Prompts leave more uneven experts than answers: hot pairs stay together without copies."""
    one = replace(from_preset("v3-prefill-32"), redundant=0)
    prefill, decode = balance(one), balance(replace(one, phase="decode"))
    assert prefill.mean == pytest.approx(1.178, abs=0.01) and decode.mean < 1.05 < prefill.mean
    assert prefill.source.endswith("prefill") and decode.source.endswith("decode")
    assert balance(from_preset("v3-prefill-32")).mean < 1.01, "32 copies even it out"


def test_search_keeps_limits_and_finds_the_front() -> None:
    base = replace(from_preset("v3-decode-144"), gpus=1)
    found = search(base, Workload(), Limits(tpot=0.05), 48)
    assert found.best is not None and found.best.latency <= 0.05
    assert found.tried >= len(found.allowed) > len(found.pareto) > 1
    inside = [x for x in found.allowed if x.latency <= 0.05]
    assert found.best.prediction.per_gpu == max(x.prediction.per_gpu for x in inside)
    for x in found.pareto:
        assert not any(
            y.latency < x.latency and y.prediction.per_gpu > x.prediction.per_gpu
            for y in found.allowed
        )
    more = replace(found.best.deployment, sequences=found.best.deployment.sequences + 4)
    tpot = predict(more, Workload()).tpot
    assert tpot is not None and (tpot > 0.05 or errors(violations(more, Workload().context)))
    assert pareto(found.pareto) == found.pareto
    assert {x.deployment.shared for x in found.allowed} == {"replicated", "hosted"}
    assert search(base, Workload(), Limits(tpot=1e-4), 16).best is None
    prefill = search(from_preset("v3-prefill-32"), Workload(), Limits(ttft=3.0), 32)
    assert prefill.best is not None and prefill.best.latency <= 3
    grid = [x for x in prefill.allowed if x.deployment.tokens in STEP_TOKENS and x.latency <= 3]
    assert prefill.best.prediction.per_gpu >= max(x.prediction.per_gpu for x in grid)
    shares = ratio(prefill.best, found.best, Workload())
    ready = shares.prefill * prefill.best.prediction.tokens_per_s / 4096
    done = shares.decode * found.best.prediction.tokens_per_s / 1024
    assert shares.requests_per_s == pytest.approx(min(ready, done))
    assert shares.requests_per_s > 0.9 * max(ready, done)


def test_search_tries_every_number_of_nodes_or_says_so() -> None:
    base = replace(from_preset("v3-decode-144"), gpus=1)
    counts = {pool.gpus for pool in _pools(base, 320, None)}
    assert counts == {1, 2, 4, *range(8, 321, 8)}
    assert {pool.gpus for pool in _pools(base, 6, None)} == {1, 2, 4, 6}
    found = search(base, Workload(), Limits(tpot=0.05), 56)
    assert found.gpus_step == 8 and found.best is not None
    assert found.best.deployment.gpus == 56, "the best of all, between 48 and 64"
    assert (_step_of(base, 512), _step_of(base, 1 << 14)) == (16, 16)


def test_pictures_of_a_search(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    flags = ["--gpu", "h100", "--max-gpus", "1", "--ttft", "1", "--tpot", "1"]
    found = told(TINY, "--search", *flags, "--plot", str(tmp_path / "search.html"))
    assert found["phases"]["decode"]["best"] is not None and found["ratio"]["gpus"] >= 2
    page = (tmp_path / "search.html").read_bytes()
    assert page.startswith(b"<!doctype html>") and b"<table>" in page and b"TPOT" in page
    assert b"src=" not in page and b'href="http' not in page, "it needs nothing else"
    asked = read(Typed(TINY, gpu="h100", phase="decode", max_gpus="1"), search=True)
    front = [search(asked.bases[0], asked.work, asked.limits, 1)]
    for ending, begin in (("png", b"\x89PNG"), ("svg", b"<?xml")):
        files = [tmp_path / f"{i}.{ending}" for i in range(2)]
        for file in files:
            draw_search(front, None, asked, file)
        first, again = (file.read_bytes() for file in files)
        assert first.startswith(begin) and first == again, "the same front, the same picture"


def test_pictures_of_a_plan_and_of_the_validation(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    told(*V3, "--drafts", "2", "--plot", str(tmp_path / "plan.svg"))
    drawn = (tmp_path / "plan.svg").read_text()
    assert all(word in drawn for word in ("prefill", "decode", "KV cache", "MTP drafts"))
    told("--validate", "--plot", str(tmp_path / "points.png"))
    assert (tmp_path / "points.png").stat().st_size > 10_000


def test_validation_as_json() -> None:
    found = told("--validate")
    assert found["median_error"] < 0.1 and found["held_out_share"] > 1 / 3
    point = next(p for p in found["points"] if p["id"] == "3")
    assert point["error"] == pytest.approx(point["predicted"] / point["measured"] - 1)
    assert point["fitted"] and not point["held_out"]


def test_screens_show_what_json_says() -> None:
    run = CliRunner().invoke
    plan = run(app, ["plan", *V3, "--drafts", "1"], env={"COLUMNS": "140"}).output
    for words in ("memory of a GPU", "KV cache", "static", "TPOT", "MTP, 1 draft at", "no rule is"):
        assert words in plan
    found = run(app, ["plan", TINY, "--search", "--gpu", "h100", "--max-gpus", "2"]).output
    assert "best" in found and "keep up with each other" in " ".join(found.split())
    points = run(app, ["plan", "--validate"], env={"COLUMNS": "140"}).output
    assert "held out" in points and "median error" in points


def test_flags_of_a_rehearsal_and_of_a_plan_do_not_mix() -> None:
    found = problems("--rehearse", "v3-prefill-32", "--gpus", "3", "--check", "--seed", "x")
    assert len(found) == 3
    assert problems("--validate", "deepseek-v3")[0].startswith("MODEL")
    found = problems("--preset", "v3-decode-144", "--tokens", "9", "--ttft", "1")
    assert [x.split(":")[0] for x in found] == ["--tokens", "--ttft"]
    assert read(Typed("deepseek-v3", gpus="8", gpu="h100")).work == Workload()


def test_a_config_without_quantisation_is_planned_in_bf16_and_that_is_said(tmp_path: Path) -> None:
    config = json.loads(Path(TINY, "config.json").read_text())
    config.pop("quantization_config", None)
    folder = tmp_path / "DeepSeek-R1-NVFP4"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    flags = ["--gpus", "8", "--gpu", "b200", "--phase", "decode"]
    plan = told(str(folder), *flags)
    assert plan["parameters"]["weights"] == "bf16"
    notes = plan["phases"]["decode"]["notes"]
    assert any("names no quantisation: BF16 assumed" in note for note in notes)
    (warned,) = [v for v in plan["violations"] if v["rule"] == "quantisation"]
    assert "NVFP4" in warned["text"] and warned["severity"] == "warning"
    fp8 = told(TINY, *flags)
    assert not any("quantisation" in note for note in fp8["phases"]["decode"]["notes"])
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    assert "NVFP4" in problems(str(folder), *flags)[0]


def test_why_a_cache_makes_a_busy_pool_wait_longer_is_said() -> None:
    flags = [*V3, "--phase", "prefill", "--tokens", "4096"]
    plain, cached = (told(*flags, "--cached-share", share) for share in ("0", "0.5"))
    before, after = (p["phases"]["prefill"] for p in (plain, cached))
    longer = after["prediction"]["ttft_s"] - before["prediction"]["ttft_s"]
    said = [note for note in after["notes"] if "longer than with nothing cached" in note]
    assert longer > 0 and f"{1e3 * longer:,.0f} ms" in said[0]
    assert after["prediction"]["ttft_alone_s"] < before["prediction"]["ttft_alone_s"]
    assert not any("nothing cached" in note for note in before["notes"])


@pytest.mark.parametrize(("gpus", "tp", "valid"), [("128", "100", [8]), ("36", "7", [6, 4])])
def test_what_is_nearest_is_so_with_what_is_left_to_us(
    gpus: str, tp: str, valid: list[int]
) -> None:
    flags = ["deepseek-v3", "--gpu", "h800", "--phase", "decode", "--gpus", gpus]
    found = told(*flags, "--tp", tp)["violations"]
    near = [v["nearest"].get("tp") for v in found if v["rule"] == "heads divide"]
    assert near and set(near[0]) <= set(valid)
    for value in near[0] if gpus == "128" else []:
        left = told(*flags, "--tp", str(value))["violations"]
        assert {v["severity"] for v in left} <= {"warning"}


def test_groups_are_placed_by_what_is_predicted() -> None:
    """The quicker policy is taken and the other told; either may be asked for; balance and traffic
    are of the same placement."""
    auto = told("--preset", "v3-prefill-32")["phases"]["prefill"]
    placed = auto["layout"]["placement"]
    (other,) = placed["others"]
    assert (placed["groups"], other["groups"]) == ("free", "node")
    assert placed["nodes_per_token"] == pytest.approx(3.6, abs=0.03)
    assert other["nodes_per_token"] < 3.2
    assert auto["prediction"]["tokens_per_s_per_gpu"] > other["tokens_per_s_per_gpu"]
    asked = told("--preset", "v3-prefill-32", "--groups", "node")["phases"]["prefill"]
    assert asked["layout"]["placement"]["others"] == []
    assert asked["layout"]["placement"]["nodes_per_token"] == other["nodes_per_token"]
    assert asked["layout"]["balance"]["mean"] == pytest.approx(other["balance"])
    assert other["balance"] > 1.3
    assert asked["prediction"]["tokens_per_s_per_gpu"] == other["tokens_per_s_per_gpu"]
    sent = [
        x["prediction"]["traffic_bytes_per_token_per_layer"]["dispatch_across"]
        for x in (auto, asked)
    ]
    rows = [x["layout"]["placement"]["nodes_per_token"] * 3 / 4 for x in (auto, asked)]
    assert sent == pytest.approx([n * (7168 + 224) for n in rows])
    screen = CliRunner().invoke(app, ["plan", "--preset", "v3-prefill-32"]).stdout
    assert "3.62 of 4 nodes; groups of experts lie anywhere" in " ".join(screen.split())


def test_even_groups_stay_on_nodes(tmp_path: Path) -> None:
    """Where keeping them costs no balance, fewer rows cross."""
    np.savez(tmp_path / "even.npz", loads=np.ones((4, 256)))
    flags = ["--gpu", "h800", "--gpus", "32", "--phase", "prefill", "--redundant", "0"]
    plan = told("deepseek-v3", *flags, "--trace", str(tmp_path / "even.npz"))
    placed = plan["phases"]["prefill"]["layout"]["placement"]
    assert placed["groups"] == "node" and placed["nodes_per_token"] < 3.2


def test_groups_that_cannot_stay_on_nodes_are_refused_with_reasons() -> None:
    for flags, reason in (
        ([*V3], "8 groups of experts do not divide among 18 nodes; valid are free, auto"),
        (["deepseek-v3", "--gpus", "8", "--gpu", "h800"], "not two or more whole nodes of 8"),
        (["kimi-k2", "--gpus", "32", "--gpu", "h200"], "knows no groups of experts"),
    ):
        (found,) = problems(*flags, "--groups", "node")
        assert reason in found
    assert "nearest: node" in problems(*V3, "--groups", "nodes")[0]
    assert problems("deepseek-v3", "--gpu", "h800", "--search", "--groups", "node") == [
        "--groups: has no meaning with --search"
    ]


def test_parameters_of_a_token_count_the_head() -> None:
    said = told(*V3)["parameters"]
    assert said["active"] == pytest.approx(36.6e9, rel=0.002)
    assert "with the head" in CliRunner().invoke(app, ["plan", *V3]).stdout


@pytest.mark.parametrize(
    ("flag", "value", "meant"),
    [
        ("--wire", "bf16", "model"),
        ("--kv-cache-dtype", "auto", "model"),
        ("--kv-cache-dtype", "fp8_e4m3", "fp8"),
        ("--shared", "slots", "hosted"),
    ],
)
def test_words_of_others_are_known_as_in_serve(flag: str, value: str, meant: str) -> None:
    (line,) = problems(*V3, flag, value)
    assert line.startswith(f"{flag}={value}: ") and f"; nearest: {meant}" in line
