"""`moeserve plan --predict`: which model of a step decides batches, verdicts, layouts, prices."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from launch.capacity.asked import Typed, read
from launch.capacity.deployment import PRESETS, from_preset
from launch.capacity.kernel_presets import MADE_OF, STEPS, markdown, preset_steps
from launch.capacity.kernel_step import kernel_step
from launch.capacity.parts import step_parts
from launch.capacity.predict import MODELS, By, Workload, predict
from launch.capacity.search import Found, search
from launch.capacity.validate import validate
from launch.cli import app

BENCHMARKS = (Path(__file__).parents[1] / "BENCHMARKS.md").read_text()
V3 = ["plan", "deepseek-v3", "--gpu", "h800"]
KERNELS = ["--predict", "kernels"]


def told(*flags: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, [*flags, "--json"])
    assert done.exit_code == 0, done.exception
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def shown(*flags: str) -> str:
    done = CliRunner().invoke(app, list(flags), env={"COLUMNS": "120"})
    assert done.exit_code == 0, done.exception
    return done.stdout


# -- one prediction --------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["v3-prefill-32", "v3-decode-144", "v3-decode-320"])
def test_a_prediction_by_kernels_is_that_of_the_kernels(preset: str) -> None:
    d, work = from_preset(preset), Workload(4096, 1024)
    d = replace(d, drafts=2) if d.phase == "decode" else d
    p, step = predict(d, work, 2.0, by="kernels"), kernel_step(d, work)
    assert step is not None and p.by == "kernels"
    assert p.step.seconds == step.seconds
    assert sum(x for _, x in step_parts(p.step)) == pytest.approx(step.seconds)
    assert dict(step_parts(p.step)).get("MTP drafts", 0.0) == pytest.approx(step.drafts)
    load = d.sequences * p.tokens_a_step if d.phase == "decode" else d.tokens
    assert p.per_gpu == pytest.approx(load / step.seconds)
    kind = "output" if d.phase == "decode" else "input"
    assert p.cost[kind] == pytest.approx(2.0 / 3600 / p.per_gpu * 1e6)
    if d.phase == "decode":
        plain = predict(replace(d, drafts=0), work, by="kernels")
        assert p.mtp_gain == pytest.approx(p.per_gpu / plain.per_gpu)
    else:  # a prompt that finds its GPU idle is a step of its own
        alone = kernel_step(replace(d, tokens=4096), work)
        assert alone is not None and p.ttft_alone == pytest.approx(alone.seconds)
        assert p.ttft == pytest.approx(1.5 * step.seconds)


def test_shared_attention_is_predicted_by_the_fitted_model_and_says_so() -> None:
    d = replace(from_preset("v3-decode-144"), tp=2)
    assert predict(d, Workload(), by="kernels") == predict(d, Workload())
    flags = [*V3, "--gpus", "144", "--phase", "decode", "--tp", "2"]
    report = told(*flags, *KERNELS)["phases"]["decode"]
    assert report["prediction"]["predicted_by"] == "fitted"
    assert report["step_s_by"]["kernels"] is None and report["kernels"] is None
    note = "decode: attention that GPUs share (tp) has no kernels here: predicted by the fitted"
    assert any(x.startswith(note) for x in report["notes"])
    assert not any(x.startswith(note) for x in told(*flags)["phases"]["decode"]["notes"])
    said = told(*flags, *KERNELS)
    assert (said["predict"], said["predict_asked"]) == ("fitted", "kernels")
    heading = shown(*flags, *KERNELS).split("decode ──")[0]
    assert "predicted by the fitted model: attention that GPUs share (tp) has no" in heading
    assert "own counts" not in heading


@pytest.mark.parametrize("phase", ["prefill", "decode", "both"])
def test_a_prediction_by_kernels_says_its_mode_and_the_other_s_step(phase: str) -> None:
    """In one line, above all figures, which are those of serve's default if nothing is said."""
    flags = [*V3, "--gpus", "32", "--phase", phase, *KERNELS]
    flags += ["--sequences", "64"] if phase != "prefill" else []
    sure, fast = told(*flags), told(*flags, "--no-deterministic")
    assert (sure["deterministic"], fast["deterministic"]) == (True, False)
    assert told(*flags, "--deterministic") == sure
    lines = {}
    for said, more in ((sure, []), (fast, ["--no-deterministic"])):
        screen = shown(*flags, *more)
        (lines[said["deterministic"]],) = (
            x for x in screen.splitlines() if x.startswith("predicted by our kernels' own counts")
        )
        assert ("TTFT, busy pool at least" in " ".join(screen.split())) == (
            phase != "decode" and said["deterministic"]
        )
        for name, r in said["phases"].items():
            kernels, seconds = r["kernels"], r["prediction"]["step_s"]["seconds"]
            mode = "deterministic" if said["deterministic"] else "fast"
            assert kernels["mode"] == mode and seconds == kernels[f"{mode}_step_s"]
            least = "at least " if name == "prefill" else ""
            for line in lines.values():
                assert f"{name} {least}{1e3 * kernels['deterministic_step_s']:,.1f} ms" in line
                assert f"{name} {1e3 * kernels['fast_step_s']:,.1f} ms" in line
    start = "predicted by our kernels' own counts, "
    assert lines[True].startswith(f"{start}deterministic mode (the default of serve): a step of ")
    assert "; in fast mode (--no-deterministic): a step of " in lines[True]
    assert lines[False].startswith(f"{start}fast mode (--no-deterministic): a step of ")
    assert "; in deterministic mode (the default of serve): a step of " in lines[False]


def test_a_mode_is_told_or_refused_wherever_kernels_predict() -> None:
    flags = [*V3, "--gpus", "32", "--phase", "prefill"]
    assert "a step by our kernels' own counts, deterministic" in shown(*flags)
    assert "a step by our kernels' own counts, fast" in shown(*flags, "--no-deterministic")
    flags = [*V3, "--search", "--max-gpus", "16", "--phase", "decode"]
    assert "deterministic mode (the default of serve)" in shown(*flags, *KERNELS)
    fast = told(*flags, *KERNELS, "--no-deterministic")
    assert fast["deterministic"] is False
    best = fast["phases"]["decode"]["best"]["prediction"]["tokens_per_s_per_gpu"]
    slow = told(*flags, *KERNELS)["phases"]["decode"]["best"]["prediction"]["tokens_per_s_per_gpu"]
    assert best > slow
    assert fast["prefill_is_least"] is False and told(*flags, *KERNELS)["prefill_is_least"]
    least = "; prefill takes at least so long"
    flags = [*V3, "--search", "--max-gpus", "16", *KERNELS, "--phase"]
    for phase, more, said in (("prefill", [], True), ("decode", [], False),
                              ("prefill", ["--no-deterministic"], False)):  # fmt: skip
        assert (least in shown(*flags, phase, *more)) == said
    flags = [*V3, "--search", "--max-gpus", "16", "--phase", "decode"]
    for asked, words in (
        (flags, "--no-deterministic: the fitted model has no modes; give --predict kernels too"),
        (["plan", "--validate"], "--no-deterministic: has no meaning with --validate"),
        (["plan", "--rehearse", "v3-decode-144"], "--no-deterministic"),
    ):
        wrong = CliRunner().invoke(app, [*asked, "--no-deterministic"])
        assert wrong.exit_code != 0 and words in str(wrong.exception)


# -- a plan ----------------------------------------------------------------------------------------


def test_a_plan_is_by_the_model_that_was_asked_for() -> None:
    flags = [*V3, "--gpus", "32", "--sequences", "64", "--tokens", "8192", "--price", "2"]
    fitted, kernels = told(*flags), told(*flags, *KERNELS)
    assert fitted == told(*flags, "--predict", "fitted")
    assert (fitted["predict"], kernels["predict"]) == ("fitted", "kernels")
    for phase in ("prefill", "decode"):
        a, b = fitted["phases"][phase], kernels["phases"][phase]
        assert a["prediction"]["predicted_by"] == "fitted"
        assert b["prediction"]["predicted_by"] == "kernels"
        assert a["step_s_by"] == b["step_s_by"] and a["kernels"] == b["kernels"]
        for report, by in ((a, "fitted"), (b, "kernels")):
            assert report["prediction"]["step_s"]["seconds"] == report["step_s_by"][by]
        assert b["prediction"]["step_s"]["seconds"] == b["kernels"]["step_s"]
    decode = kernels["phases"]["decode"]["step_s_by"]
    assert kernels["prediction"]["tpot_s"] == decode["kernels"]
    ratio = decode["kernels"] / decode["fitted"]
    assert abs(ratio - 1) > 0.02  # else nothing of this could fail
    a, b = (x["prediction"]["cost_per_million"] for x in (fitted, kernels))
    assert b["output"] / a["output"] == pytest.approx(ratio)
    assert b["input"] != a["input"] and b["cached"] == a["cached"]
    screen = CliRunner().invoke(app, [*flags, *KERNELS]).stdout
    assert "predicted by our kernels' own counts" in screen
    assert "a step by the fitted model" in screen
    screen = CliRunner().invoke(app, flags).stdout
    assert "predicted by our" not in screen and "a step by our kernels' own counts" in screen


def test_limits_are_held_by_the_model_that_was_asked_for() -> None:
    """auto batches and steps, and what a limit says of given ones."""
    flags = [*V3, "--gpus", "144", "--tpot", "50ms", "--ttft", "2"]
    fitted, kernels = told(*flags), told(*flags, *KERNELS)
    for said in (fitted, kernels):
        assert said["prediction"]["tpot_s"] <= 0.05 and said["prediction"]["ttft_s"] <= 2
        assert said["prediction"]["tpot_s"] > 0.048  # the largest batch that keeps it
    sizes = [x["phases"]["decode"]["load"]["sequences_per_gpu"] for x in (fitted, kernels)]
    assert sizes[1] < sizes[0]
    flags = [*V3, "--gpus", "144", "--tpot", "50ms", "--phase", "decode"]
    flags += ["--sequences", str(sizes[0])]
    rules = [[v["rule"] for v in told(*flags, *more)["violations"]] for more in ([], KERNELS)]
    assert "TPOT limit" not in rules[0] and "TPOT limit" in rules[1]


def test_only_models_that_there_are() -> None:
    for more in ([], ["--search"], ["--validate"]):
        asked = ["plan", *([] if more == ["--validate"] else ["deepseek-v3", "--gpu", "h100"])]
        asked += [] if more else ["--gpus", "32"]
        wrong = CliRunner().invoke(app, [*asked, *more, "--predict", "kernel"])
        assert wrong.exit_code != 0
        said = "--predict=kernel: must be one of fitted, kernels; nearest: kernels"
        assert said in str(wrong.exception)
    rehearsed = CliRunner().invoke(app, ["plan", "--rehearse", "v3-decode-144", *KERNELS])
    assert "--predict" in str(rehearsed.exception)


# -- a search --------------------------------------------------------------------------------------


def found(phase: str, by: By, every: bool = False) -> Found:
    typed = Typed("deepseek-v3", gpu="h800", phase=phase, max_gpus="48", predict=by)
    typed = replace(typed, tpot="50ms") if phase == "decode" else replace(typed, ttft="3")
    asked = read(typed, search=True)
    base = asked.bases[0]
    return search(base, asked.work, asked.limits, 48, by=asked.by, every=every)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_search_prices_layouts_by_kernels(phase: str) -> None:
    """Each is what its kernels say, none of the others' steps is; leaving pools out still changes
    nothing, for a placement that is more even makes no step longer here either."""
    few, whole, other = (
        found(phase, "kernels"),
        found(phase, "kernels", True),
        found(phase, "fitted"),
    )
    assert few.best == whole.best and few.pareto == whole.pareto and few.best is not None
    assert few.num_allowed == whole.num_allowed and len(few.allowed) <= len(whole.allowed)
    work = Workload()
    for x in few.pareto:
        step = kernel_step(x.deployment, work)
        assert step is not None and x.prediction.by == "kernels"
        assert x.prediction.step.seconds == pytest.approx(step.seconds, rel=1e-12)
    assert {x.prediction.by for x in other.allowed} == {"fitted"}
    assert other.best is not None and few.best.deployment != other.best.deployment
    # The choice is explained by the steps: by kernels the other's best gives less, or is over.
    d = other.best.deployment
    again = predict(d, work, by="kernels")
    late = max(again.tpot or 0.0, again.ttft or 0.0) > (few.limit or 0.0)
    assert late or again.per_gpu <= few.best.prediction.per_gpu


def test_a_search_tells_by_which_model() -> None:
    flags = [*V3, "--search", "--max-gpus", "16", "--tpot", "60ms", "--phase", "decode"]
    fitted, kernels = told(*flags), told(*flags, *KERNELS)
    assert (fitted["predict"], kernels["predict"]) == ("fitted", "kernels")
    best = kernels["phases"]["decode"]["best"]["prediction"]
    assert best["predicted_by"] == "kernels"
    assert kernels["cost_per_million"]["output"] == best["cost_per_million"]["output"]
    assert kernels["cost_per_million"]["output"] != fitted["cost_per_million"]["output"]
    screen = CliRunner().invoke(app, [*flags, *KERNELS]).stdout
    assert "predicted by our kernels' own counts" in screen


# -- published points ------------------------------------------------------------------------------


def test_published_points_by_both_models() -> None:
    fitted, kernels = validate(), validate(by="kernels")
    assert (fitted.by, kernels.by) == MODELS and fitted.models() == kernels.models()
    assert fitted.constants == kernels.constants
    one, two = ({p.id + p.what: p for p in v.points} for v in (fitted, kernels))
    assert one.keys() == two.keys()
    for key, p in one.items():
        if p.unit != "tok/s/node":
            assert two[key] == p  # all-to-alls are the same in both
        elif p.by_kernels is not None:
            assert two[key].predicted == p.by_kernels == two[key].by_kernels != p.predicted
    tp = next(p for p in kernels.points if p.id == "13a")
    assert tp.predicted is None and "tp" in tp.reason
    # Why the fitted one is the default: where both predict, it is nearer in the median, held out or
    # not.
    a, b = fitted.models()["fitted"], fitted.models()["kernels"]
    assert len(fitted.throughputs["kernels"]) == len(fitted.throughputs["fitted"]) == 15
    assert all(a[name] < b[name] for name in a if name != "worst_error")
    assert len(a) == 3 and b["worst_error"] < 0.2
    said = told("plan", "--validate", *KERNELS)
    assert said["predict"] == "kernels" and said["throughputs_by"] == fitted.models()
    assert said["median_error_throughput"] == b["median_error"] < 0.12
    assert said["median_error_by_kernels"] == b["median_error"]


def cells(start: str) -> list[list[str]]:
    """Of lines of tables in BENCHMARKS.md that begin so."""
    lines = (x for x in BENCHMARKS.splitlines() if x.startswith(start))
    return [[cell.strip() for cell in x.strip("|").split("|")] for x in lines]


def test_benchmarks_tell_what_both_models_say() -> None:
    found = validate()
    for p in found.points:
        if p.unit != "tok/s/node" or p.predicted is None or p.error is None:
            continue
        error = f"{100 * p.error:+.1f} %"
        by_kernels = "no TP" if p.by_kernels is None else f"{p.by_kernels:,.0f}"
        want = [f"{p.measured:,.0f}", f"{p.predicted:,.0f}", error, by_kernels]
        assert want in [row[2:6] for row in cells(f"| {p.id} | ")], p.id
    starts: dict[By, str] = {"fitted": "| fitted (default)", "kernels": "| kernels, same constants"}
    for by, start in starts.items():
        errors = found.models()[by]
        told_ = [f"{100 * errors[k]:.1f} %" for k in ("median_error", "median_error_held_out")]
        assert cells(start)[0][1:] == [*told_, f"{100 * errors['worst_error']:.0f} %"]


def test_benchmarks_tell_the_steps_that_the_command_tells() -> None:
    """Row by row; and each is what a plan of the preset says."""
    steps = preset_steps()
    assert (
        markdown(steps) in BENCHMARKS
        and "`moeserve plan --validate --predict kernels`"
        in (BENCHMARKS.split("**A step by our kernels**")[1].split("\n\n")[0])
    )
    assert [x.preset for x in steps] == list(PRESETS)
    command = ["plan", "--validate", *KERNELS]
    assert told(*command)["presets"] == [x.as_json() for x in steps]
    assert told("plan", "--validate")["presets"] is None
    wide = [x.split() for x in shown(*command).splitlines()]
    for x in steps:
        parts = x.core + x.experts + x.products + x.rest + x.exposed
        assert parts == pytest.approx(x.deterministic)
        for columns in (STEPS, MADE_OF):
            assert " ".join(cell(x) for cell in columns.values()).split() in wide
    for x in (steps[0], steps[2]):
        plan = told("plan", "--preset", x.preset, *KERNELS)
        (r,) = plan["phases"].values()
        assert r["prediction"]["step_s"]["seconds"] == x.deterministic
        assert r["prediction"]["tokens_per_s_per_node"] == x.per_node
        assert (r["kernels"]["fast_step_s"], r["step_s_by"]["fitted"]) == (x.fast, x.fitted)
        assert (r["kernels"]["one_part_step_s"], r["kernels"]["launches"]) == (
            x.one_part, x.launches)  # fmt: skip
