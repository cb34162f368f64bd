"""A step by our kernels' own counts: the same work as the planner's, so that neither drifts."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from launch.capacity.asked import Typed, read
from launch.capacity.deployment import Deployment, from_preset
from launch.capacity.kernel_step import LAUNCHES, KernelStep, chunks, kernel_step
from launch.capacity.known import load_shape
from launch.capacity.parts import scaled
from launch.capacity.predict import Workload, predict
from launch.capacity.times import Calibration, Step
from launch.capacity.validate import validate
from launch.cli import app
from models.deepseek.kernels.gpu.mla_plan import Partitions
from models.deepseek.kernels.gpu.step_kernels import (
    Experts,
    attention_absorbed,
    attention_fast,
    gate_and_shared,
    routed_experts,
    spread_rows,
)
from models.deepseek.kernels.gpu.step_limit import H200, even_experts, table

TINY = str(Path(__file__).parents[1] / "checkpoints" / "tiny")
PARTS = ("projections", "core", "experts", "shared", "dense", "head")
# One partition a row: what leaves parts to merge is a choice of kernels, not work of the model.
WHOLE = Partitions(1 << 20, 1 << 20, 1 << 20)
C = Calibration()
_SURE = {"ceiling": 1.0, "grouped": 1.0, "prefill_core": 1.0, "decode_core": 1.0, "memory": 1.0}
IDEAL = replace(C, **_SURE, intensity=1e60, launch=0.0, expert_launch=0.0, comm_sms=0)
TYPED = {
    "prefill 32": Typed(preset="v3-prefill-32", no_deterministic=True),
    "decode 72": Typed("deepseek-v3", gpu="h100", gpus="72", phase="decode", sequences="240",
                       input_tokens="1998", output_tokens="100"),
    "decode 144": Typed(preset="v3-decode-144"),
    "decode 320": Typed(preset="v3-decode-320"),
    "K2 decode 96": Typed(preset="k2-decode-96"),
    "FP8 cache, drafts": Typed("deepseek-v3", gpu="h200", gpus="32", phase="decode", drafts="1",
                               sequences="64", kv_fp8=True, no_overlap=True),
}  # fmt: skip
# Attention in the mode that the planner does not count.
TURNED = {
    "prefill 32, latents": Typed(preset="v3-prefill-32"),
    "decode 144, fast": Typed(preset="v3-decode-144", no_deterministic=True),
}


def both(
    name: str, c: Calibration, *, hbm: float, fp8: float, bf16: float
) -> tuple[Step, KernelStep]:
    asked = read(TYPED[name])
    d = asked.plan().reports[0].deployment
    d = replace(d, gpu=replace(d.gpu, hbm=hbm, fp8=fp8, bf16=bf16), drafts=0)
    found = kernel_step(d, asked.work, c, partitions=WHOLE)
    assert found is not None
    return predict(d, asked.work, c=c).step, found


@pytest.mark.parametrize("name", TYPED)
def test_kernels_compute_what_the_planner_counts(name: str) -> None:
    """On a chip where a FLOP is a second and bytes are free, each part of a step within 1 %."""
    step, found = both(name, replace(IDEAL, passes=0.0), hbm=1e30, fp8=1.0, bf16=1.0)
    for part in PARTS:
        assert found.part(part) == pytest.approx(getattr(step, part), rel=0.01), part
    gate = found.part("rest")  # three products for one, in the kernel alone
    assert gate < 0.03 * found.seconds


@pytest.mark.parametrize("name", [n for n in TYPED if n != "prefill 32"])
def test_kernels_move_what_the_planner_counts(name: str) -> None:
    """Where a byte is a second, decode: no part less than its weights and cache, which is what the
    planner counts (rows are in its `passes`); all of it within 25 %."""
    step, found = both(name, IDEAL, hbm=1.0, fp8=1e40, bf16=1e40)
    for part in PARTS:
        assert found.part(part) >= 0.999 * getattr(step, part), part
    planned = sum(getattr(step, part) for part in (*PARTS, "rest"))
    assert 0.95 * planned < sum(k.seconds for k in found.kernels) < 1.25 * planned


@pytest.mark.parametrize("name", TYPED)
def test_steps_agree_with_the_fitted_model(name: str) -> None:
    asked = read(TYPED[name])
    r = asked.plan().reports[0]
    assert r.kernels is not None
    step = r.kernels.step
    assert step.seconds == pytest.approx(r.prediction.step.seconds, rel=0.15)
    parts = sum(k.seconds for k in step.kernels) + step.exposed + step.drafts
    assert parts == pytest.approx(step.seconds)
    assert {k.bound for k in step.kernels} <= {*r.kernels.bounds} == {"memory", "compute", "gaps"}


@pytest.mark.parametrize("name", TYPED | TURNED)
def test_differences_of_the_two_models_are_told(name: str) -> None:
    """By part, together the whole; the words name what the figures show."""
    both = read((TYPED | TURNED)[name]).plan().reports[0].kernels
    assert both is not None
    more = both.step.seconds - both.fitted.seconds
    assert sum(both.differences.values()) == pytest.approx(more, abs=1e-9)
    sizes = [abs(x) for x in both.differences.values()]
    assert sizes == sorted(sizes, reverse=True)
    first = both.why[0]
    word = "more" if more > 0 else "less"
    assert first.startswith(
        f"{1e3 * abs(more):,.1f} ms {word} than the {1e3 * both.fitted.seconds:,.1f} of the fitted"
    )
    part, most = next(iter(both.differences.items()))
    assert f"{part} {1e3 * most:+,.1f}" in first
    assert any("has no modes" in line for line in both.why)
    assert (both.mode == "fast") == (TYPED | TURNED)[name].no_deterministic
    assert {both.fast.seconds, both.deterministic.seconds} == {
        both.step.seconds,
        both.other.seconds,
    }
    fast, sure = both.fast.part("core"), both.deterministic.part("core")
    if both.phase == "decode":
        assert both.one_part is not None
        assert 0 < both.merging < both.step.part("core") / 2
        assert (f"{1e3 * both.merging:,.1f} are results of pieces" in first) == (
            f"attention core {1e3 * both.differences['attention core']:+,.1f}" in first
        )
        assert f"in one piece {1e3 * both.one_part.part('core'):,.1f}" in both.why[1]
        assert "every 1,024 up to 16,384, then every 2,048" in both.why[1]
        other = fast if both.mode == "deterministic" else sure
        assert f": {1e3 * other:,.1f} ms, the whole step" in both.why[1]
        assert both.one_part.seconds <= both.fast.seconds < both.deterministic.seconds
    else:
        assert both.one_part is None and both.merging == 0
        assert both.deterministic.seconds > 1.2 * both.fast.seconds and sure > 1.5 * fast
        least = "at least so long" if both.mode == "deterministic" else "at least"
        assert least in both.why[1] and f"{1e3 * both.other.seconds:,.1f} ms a step" in both.why[1]


def test_prefill_over_latents_is_decode_s_attention() -> None:
    d, work = from_preset("v3-prefill-32"), Workload()
    fast, latents = kernel_step(replace(d, deterministic=False), work), kernel_step(d, work)
    assert fast is not None and latents is not None
    names = [{k.kernel for k in step.kernels} for step in (fast, latents)]
    assert "mla_prefill" in names[0] - names[1] and "mla_decode" in names[1] - names[0]
    assert latents.part("experts") == fast.part("experts")
    few = [kernel_step(replace(d, deterministic=x), Workload(4096, 1, 0.99)) for x in (True, False)]
    assert few[0] is not None and few[1] is not None
    names = [{k.kernel for k in step.kernels} for step in few if step is not None]
    assert names[0] == names[1], "40 new tokens attend over latents in both modes"
    assert few[1].seconds <= few[0].seconds


def test_launches_of_a_layer_are_counted() -> None:
    """`launch` was fitted on whole layers of V3: gaps of one come to it."""
    m = load_shape("deepseek-v3").config
    layer = attention_absorbed(m, [4096] * 64, [1] * 64, False) + gate_and_shared(m, 64, 0)
    layer += routed_experts(m, 64, Experts([512, 512], routed=False), True)
    assert sum(u.launches for u in layer if u.part != "experts") == LAUNCHES
    assert sum(1 for u in layer if u.part == "experts") == 3


def test_rows_go_to_slots_as_they_are_picked() -> None:
    assert spread_rows(1000, 2) == [500, 500] and spread_rows(7, 1) == [7]
    few = spread_rows(3, 64)
    assert len(few) == 64 and sum(few) == 3 and max(few) == 1


def test_steps_of_prefill_are_whole_prompts_and_a_piece() -> None:
    work = Workload(4096, 1, cached_share=0.5)
    contexts, new = chunks(16384, work)
    assert new == [2048] * 8 and contexts == [4096] * 8
    contexts, new = chunks(3000, work)
    assert new == [2048, 952] and contexts == [4096, (4096 + 2048 + 952) // 2]


def test_few_new_tokens_of_a_prompt_attend_over_latents() -> None:
    """As mla.py has it: from 171 new tokens on of DeepSeek-V3 it pays to expand keys."""
    m = load_shape("deepseek-v3").config

    def found(*new: int) -> set[str]:
        return {u.kernel for u in attention_fast(m, [4096] * len(new), new, False)}

    assert found(171) >= {"mla_prefill"} and "mla_decode" not in found(171)
    assert found(170) >= {"mla_decode"} and "mla_prefill" not in found(170)
    assert found(170, 171) >= {"mla_decode", "mla_prefill", "rows of each form"}
    both = attention_fast(m, [4096, 4096], [170, 171], False)
    core = sum(u.cost.flops for u in both if u.part == "core")
    few = 170 * (4096 - 84) * 2 * 128 * (2 * 512 + 64)
    many = (171 * 3925 + 171 * 172 // 2) * 2 * 128 * 320
    assert core == few + many
    # A prompt all but found in the cache takes no longer than one that is computed.
    d = replace(from_preset("v3-prefill-32"), deterministic=False)
    steps = [kernel_step(d, Workload(4096, 1, share)) for share in (0.0, 0.9, 1.0)]
    seconds = [s.seconds for s in steps if s is not None]
    assert len(seconds) == 3 and max(seconds) < 2.5 * seconds[0]


def test_partitions_of_deterministic_mode_cost_bytes() -> None:
    d, work = from_preset("v3-decode-144"), Workload(4489, 1000)
    kept, whole = kernel_step(d, work), kernel_step(d, work, partitions=WHOLE)
    assert kept is not None and whole is not None and kept.seconds > whole.seconds
    assert kept.part("core") > 1.2 * whole.part("core")


def test_models_in_bf16_and_shared_attention() -> None:
    d = from_preset("v3-decode-144")
    plain = replace(d.shape, config=replace(d.shape.config, quantization=None))
    wide = Deployment(plain, "", d.gpu, 144, "decode", redundant=32, sequences=64)
    step = kernel_step(wide, Workload())
    assert step is not None
    assert not any("quant" in k.kernel or "fp8" in k.kernel for k in step.kernels)
    assert step.seconds == pytest.approx(predict(wide, Workload()).step.seconds, rel=0.2)
    assert kernel_step(replace(d, tp=4), Workload()) is None


def test_plans_tell_kernels() -> None:
    flags = ["plan", "deepseek-v3", "--gpus", "144", "--gpu", "h800", "--drafts", "1"]
    done = CliRunner().invoke(app, [*flags, "--json"])
    said = json.loads(done.stdout.splitlines()[-1])["phases"]
    for phase in ("prefill", "decode"):
        kernels = said[phase]["kernels"]
        assert kernels["step_s"] > 0 < kernels["launches"]
        assert {"kernel", "part", "launches", "bytes", "flops", "seconds", "bound", "peak",
                "of_peak", "factor"} == set(kernels["of"][0])  # fmt: skip
    assert said["decode"]["kernels"]["drafts_s"] > 0
    for phase in ("prefill", "decode"):
        kernels, by = said[phase]["kernels"], said[phase]["step_s_by"]
        assert kernels["mode"] == "deterministic" and set(kernels["bounds"]) == {
            "memory",
            "compute",
            "gaps",
        }
        assert (kernels["step_s"], kernels["fitted_step_s"]) == (by["kernels"], by["fitted"])
        told = sum(kernels["differences_s"].values())
        assert told == pytest.approx(kernels["step_s"] - kernels["fitted_step_s"])
        assert (kernels["one_part_step_s"] is None) == (phase == "prefill")
        assert kernels["fast_step_s"] < kernels["deterministic_step_s"] == kernels["step_s"]
        assert kernels["deterministic_is_least"] == (phase == "prefill")
    screen = CliRunner().invoke(app, [*flags, "--kernels", "--phase", "decode"]).stdout
    assert "mla_decode" in screen and "grouped_gemm" in screen and "MTP drafts" in screen
    assert "attention of deterministic mode" in screen and "of the fitted model" in screen
    words = " ".join(screen.split())
    assert all(line in words for line in said["decode"]["kernels"]["why"]) and "gaps: what" in words
    assert "mla_decode" not in CliRunner().invoke(app, flags).stdout
    unfit = CliRunner().invoke(
        app, ["plan", "deepseek-v3", "--gpus", "8", "--gpu", "h100", "--json"]
    )
    assert json.loads(unfit.stdout.splitlines()[-1])["phases"]["decode"]["kernels"] is None
    tiny = CliRunner().invoke(app, ["plan", TINY, "--gpus", "1", "--gpu", "h100", "--json"])
    assert json.loads(tiny.stdout.splitlines()[-1])["phases"]["decode"]["kernels"]["step_s"] > 0
    wrong = CliRunner().invoke(app, ["plan", "--validate", "--kernels"])
    assert "--kernels: has no meaning with --validate" in str(wrong.exception)


@pytest.mark.parametrize("amount, told", [
    (0, "0 "), (3, "3 "), (999.6, "1.00 k"), (2_072_576, "2.07 M"), (999_400, "999 k"),
    (67.6e9, "67.6 G"), (374e12, "374 T"), (1.2e15, "1.20 P"),
])  # fmt: skip
def test_small_amounts_are_not_told_as_nothing(amount: float, told: str) -> None:
    assert scaled(amount) == told


def test_no_kernel_moves_nothing() -> None:
    flags = ["plan", "--preset", "v3-decode-72", "--kernels"]
    screen = CliRunner().invoke(app, flags, env={"COLUMNS": "80"}).stdout
    lines = screen.splitlines()
    first = next(i for i, line in enumerate(lines) if "a step of decode by our" in line)
    cells_of = [line.split() for line in lines[first + 3 :]]
    rows = cells_of[: next(i for i, cells in enumerate(cells_of) if not cells)]
    assert len(rows) > 15 and rows[-1][0] == "argmax" and max(map(len, lines)) <= 80
    for cells in rows:
        moved = next(float(a) for a, b in pairwise(cells) if b.endswith("B"))
        assert moved > 0 and float(cells[-2].replace(",", "")) > 0, cells


@pytest.mark.parametrize("name", [*TYPED, *TURNED])
def test_seconds_of_kernels_can_be_reckoned_from_what_is_told(name: str) -> None:
    """From peaks, shares of them, gaps and factors alone, as a reader would."""
    both = read((TYPED | TURNED)[name]).plan().reports[0].kernels
    assert both is not None
    said, checked = both.as_json(), 0.0
    f = said["factors"]
    for k in said["of"]:
        if k["bound"] == "gaps":
            assert k["peak"] is k["of_peak"] is None
            continue
        gap = f["expert_gap_s" if k["part"] == "experts" else "gap_s"] * k["launches"]
        amount = k["bytes" if k["bound"] == "memory" else "flops"]
        seconds = (amount / (k["peak"] * k["of_peak"]) + gap) * k["factor"]
        # Not quite where a few launches are bound otherwise.
        assert seconds == pytest.approx(k["seconds"], rel=0.03), k
        assert f["young"] <= k["factor"] <= f["young"] * f["slower"] * (1 + 1e-9)
        checked += k["seconds"]
    assert checked > 0.85 * sum(k["seconds"] for k in said["of"])
    peaks = {f["hbm_bytes_per_s"], f["fp8_flops_per_s"], f["bf16_flops_per_s"]}
    shares = {f[x] for x in ("memory", "product", "grouped", "prefill_core", "decode_core")}
    bound = [k for k in said["of"] if k["bound"] != "gaps"]
    assert {k["peak"] for k in bound} <= peaks and {k["of_peak"] for k in bound} <= shares


def test_factors_are_shown() -> None:
    flags = ["plan", "--preset", "v3-prefill-32", "--kernels", "--no-deterministic"]
    screen = CliRunner().invoke(app, flags).stdout
    row = next(x.split() for x in screen.splitlines() if x.startswith("fp8_gemm             proj"))
    # 374 TFLOP over 1,979 are 189 ms: what makes 408 of them.
    assert row[-5:] == ["374", "T", "57%", "408.13", "compute"]
    words = " ".join(screen.split())
    for told in (
        "peaks 1,979 (fp8_, grouped_gemm) and 989 TFLOP/s", "HBM 3.35 TB/s", "HBM 0.82",
        "products 0.567 = 1 / (1/0.9 + 591/904)", "grouped 0.456 = 1 / (1/0.65 + 591/904)",
        "attention 0.493 over keys, 0.659 over latents",
        "x 1.222 in every layer (not dense ones and head): all-to-alls beside them take 24 of 132",
    ):  # fmt: skip
        assert told in words, told
    assert pytest.approx(0.408, rel=0.01) == (374e12 / (1979e12 * 0.567) + 244 * 1.84e-6) * 1.222
    long = ["plan", "deepseek-v3", "--gpus", "64", "--gpu", "h200", "--phase", "prefill",
            "--input-tokens", "131072", "--tokens", "16384", "--kernels"]  # fmt: skip
    screen = CliRunner().invoke(app, long, env={"COLUMNS": "80"}).stdout
    assert "sum with the shared " in screen and "…" not in screen, "nothing is cut"
    assert max(map(len, screen.splitlines())) <= 80
    young = CliRunner().invoke(app, ["plan", "deepseek-v3", "--gpus", "64", "--gpu", "gb200",
                                     "--phase", "decode", "--kernels"]).stdout  # fmt: skip
    assert "x 1.62 of all" in " ".join(young.split()) and "in every layer" not in young


def test_benchmarks_say_why_ep72_and_ep144_are_the_same() -> None:
    """The limit of a step: experts are bound by arithmetic, of as many rows a GPU."""
    m = load_shape("deepseek-v3").config
    text = (Path(__file__).parents[1] / "BENCHMARKS.md").read_text(encoding="utf-8")
    assert all(line in text for line in table(m).splitlines()), "the table is as it was made"
    found = []
    for ranks in (72, 144):
        uses = routed_experts(m, 128, even_experts(m, 128, ranks, 288, False), True)
        products = [u for u in uses if u.kind == "grouped"]
        by_flops = sum(u.cost.flops / H200.fp8 for u in products)
        by_bytes = sum(u.cost.bytes / H200.memory for u in products)
        assert by_flops > by_bytes
        found.append(f"{1e6 * by_bytes:.0f}")
    told = f"({1e6 * by_flops:.0f} us a layer) takes longer than their bytes ({' or '.join(found)}"
    assert told in text


def test_published_points_by_kernels() -> None:
    """The same setups; deterministic attention and rows counted one by one take somewhat longer."""
    said = validate().as_json()
    assert said["median_error_by_kernels"] < 0.15
    found = {p["id"]: p["by_kernels"] for p in said["points"] if p["unit"] == "tok/s/node"}
    assert sum(x is not None for x in found.values()) == 15 and found["13a"] is None
    decode = next(p for p in said["points"] if p["id"] == "7")
    assert decode["by_kernels"] == pytest.approx(decode["measured"], rel=0.1)
