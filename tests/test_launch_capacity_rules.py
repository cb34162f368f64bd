"""Rules of a deployment and its memory: parts add up, more work takes longer, remedies help."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dispatch import choice
from launch.capacity.deployment import PRESETS, Deployment, Phase, from_preset
from launch.capacity.hardware import profile, profiles
from launch.capacity.known import MODELS, load_shape
from launch.capacity.memory import buffers, concurrency, memory, sequences_that_fit, weights
from launch.capacity.node import Node
from launch.capacity.parts import memory_parts, step_parts
from launch.capacity.predict import Workload, mean_accepted, predict
from launch.capacity.remedies import WARNING, errors
from launch.capacity.report import report
from launch.capacity.rules import ORDER, broken, largest_batch, violations
from models.deepseek.config import DeepSeekConfig

V3 = from_preset("v3-decode-144")
WAYS = ("deepep_ll", "deepep_normal", "deepep_v2", "nvshmem", "torch", "allgather")
QUICK = settings(
    max_examples=60, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)

PHASES: tuple[Phase, ...] = ("prefill", "decode")


@st.composite
def deployments(draw: st.DrawFn) -> Deployment:
    phase = draw(st.sampled_from(PHASES))
    return Deployment(
        load_shape(draw(st.sampled_from(MODELS))),
        "a model",
        profile(draw(st.sampled_from(sorted(profiles())))),
        draw(st.sampled_from((1, 2, 7, 8, 12, 16, 32, 72, 96, 144, 200, 320, 500))),
        phase,
        redundant=draw(st.integers(0, 400)),
        shared=draw(st.sampled_from(("replicated", "hosted"))),
        tp=draw(st.sampled_from((1, 1, 1, 2, 3, 4, 8, 16))),
        dispatch=draw(st.sampled_from(WAYS)),
        sequences=draw(st.integers(1, 700)),
        tokens=draw(st.integers(1, 40000)),
        kv_fp8=draw(st.booleans()),
        wire_fp8=draw(st.booleans()),
        overlap=draw(st.booleans()),
        drafts=draw(st.integers(0, 3)),
    )


@QUICK
@given(deployments())
def test_parts_add_up_and_are_no_less_than_nothing(d: Deployment) -> None:
    r = report(d, Workload())
    assert sum(size for _, size in memory_parts(r)) == pytest.approx(r.memory.total)
    assert all(size >= 0 for name, size in memory_parts(r) if name != "KV cache")
    step = r.prediction.step
    assert sum(x for _, x in step_parts(step)) == pytest.approx(step.seconds, rel=1e-6)
    assert 0 <= step.exposed <= step.comm * (1 + 1e-9) or d.phase == "prefill"
    assert r.prediction.per_gpu > 0 and r.balance.mean >= 1 - 1e-9 and r.balance.worst >= 1 - 1e-9


@settings(QUICK, max_examples=20)
@given(deployments(), st.sampled_from((512.0, 4608.0, 30000.0)))
def test_what_is_called_valid_is_valid(d: Deployment, length: float) -> None:
    found = violations(d, length)
    wrong = {v.rule for v in errors(found)}
    for v in found:
        for field, value in v.nearest:
            change: Any = {field: value}
            left = errors(broken(replace(d, **change), length))
            assert not left or "beside what the other rules ask for" in v.text, (v, value, left)
            assert {x.rule for x in left} <= wrong, (v, value, left)
            assert all(x.by != (field,) for x in left), (v, value, left)
            assert all(x.rule != v.rule or not {*x.by} & {*v.by} for x in left), (v, left)
        assert v.nearest or not v.by or "alone would do" in v.text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"gpus": 36, "redundant": 32, "tp": 7}, {"tp": {1, 2, 4}}),  # 8 does not divide 36
        ({"gpus": 128, "redundant": 0, "tp": 100}, {"tp": {1, 2, 4, 8}}),
        ({"gpus": 128, "redundant": 0, "tp": 24}, {"tp": {1, 2, 4, 8}}),
        ({"dispatch": "local"}, {"gpus": set()}),  # 1 would not hold it
        ({"gpus": 8, "redundant": 0}, {"gpus": {40}, "sequences": set()}),
        ({"sequences": 2000}, {"sequences": set(range(1, 1025))}),
    ],
)
def test_what_is_nearest_breaks_nothing_else(
    change: dict[str, Any], said: dict[str, set[int]]
) -> None:
    for v in violations(replace(V3, **change), 4989):
        assert all(value in said.get(field, {value}) for field, value in v.nearest), v
        assert not v.text.startswith("decode needs")


def test_none_is_said_where_there_is_none() -> None:
    (said,) = [v for v in violations(replace(V3, dispatch="local"), 4989) if v.rule == "local"]
    assert said.nearest == () and "no other GPUs alone would do" in said.text


@QUICK
@given(deployments(), st.integers(2, 4))
def test_more_work_takes_longer_and_more_gpus_hold_more(d: Deployment, times: int) -> None:
    work = Workload()
    small = predict(d, work).step.seconds
    more = replace(d, sequences=d.sequences * times, tokens=d.tokens * times)
    assert predict(more, work).step.seconds >= small
    assert predict(d, replace(work, input_tokens=4096 * times)).step.seconds >= small * 0.999
    assert memory(more).kv <= memory(d).kv
    wide = replace(d, gpus=d.gpus * times)
    assert sum(weights(wide).values()) <= sum(weights(d).values())
    assert sequences_that_fit(d, 4096) >= sequences_that_fit(d, 4096 * times)
    assert sequences_that_fit(replace(d, kv_fp8=True), 4096) >= sequences_that_fit(
        replace(d, kv_fp8=False), 4096
    )


@pytest.mark.parametrize("name", PRESETS)
def test_presets_break_no_rule(name: str) -> None:
    preset = PRESETS[name]
    r = report(from_preset(name), Workload(preset.input_tokens, preset.output_tokens))
    assert r.violations == []
    d = r.deployment
    assert (d.gpus, d.slots) == {
        "v3-prefill-32": (32, 288),
        "v3-decode-72": (72, 288),
        "v3-decode-144": (144, 288),
        "v3-decode-320": (320, 320),
        "k2-decode-96": (96, 480),
    }[name]


def test_every_broken_rule_is_named_at_once() -> None:
    d = replace(
        V3, gpus=100, redundant=1, tp=3, sequences=900, drafts=2, shape=load_shape("kimi-k2")
    )
    small = Node(host_memory=10e9, shared_memory=1e9)
    found = {v.rule: v for v in violations(d, 4096, small)}
    assert set(found) >= {
        "slots divide",
        "whole nodes",
        "heads divide",
        "GPUs divide",
        "FP8 blocks",
        "MTP layers",
        "deepep_ll",
        "host memory",
        "shared memory",
    }
    assert "96 or 104" in found["whole nodes"].text
    assert found["slots divide"].severity == WARNING and "stay empty" in found["slots divide"].text
    assert "data-parallel" in found["data-parallel attention"].rule


@pytest.mark.parametrize(
    ("change", "rule", "said"),
    [
        ({"gpus": 300}, "every GPU has an expert", "GPUs: 288"),
        ({"dispatch": "nvshmem"}, "nvshmem", "at most 16"),
        ({"dispatch": "deepep_normal", "gpus": 40}, "deepep_normal", "GPUs: 48"),
        ({"dispatch": "deepep_v2", "gpus": 1600, "redundant": 1344}, "deepep_v2", "at most 1024"),
        ({"dispatch": "local"}, "local", "one GPU alone"),
        ({"sequences": 2000}, "deepep_ll", "at most"),
        ({"sequences": 300}, "KV cache", "at most"),
        ({"gpus": 8, "redundant": 0}, "GPU memory", "GPUs: 40"),
    ],
)
def test_limits(change: dict[str, Any], rule: str, said: str) -> None:
    found = [v for v in violations(replace(V3, **change), 4989) if v.rule == rule]
    assert found and any(said in v.text for v in found), found


def test_hosting_moves_the_shared_expert_into_slots() -> None:
    one = replace(V3, gpus=320, redundant=64, balance=1.0)
    hosted = replace(one, shared="hosted", redundant=63)
    assert (one.slots, hosted.slots, one.picks, hosted.picks) == (320, 320, 8, 9)
    assert "shared expert" in weights(one) and "shared expert" not in weights(hosted)
    here, there = (predict(d, Workload()) for d in (one, hosted))
    assert here.step.shared > 0 == there.step.shared
    assert there.traffic.across == pytest.approx(here.traffic.across * 9 / 8, rel=0.01)


@pytest.mark.parametrize("way", WAYS)
def test_buffers_are_those_that_the_backend_plans(way: str) -> None:
    d = replace(V3, gpus=8, redundant=0, dispatch=way)
    assert buffers(d) > 0 and buffers(replace(d, gpus=1)) == 0
    assert buffers(replace(d, sequences=256)) > buffers(d)


def test_the_largest_batch_is_the_largest() -> None:
    most = largest_batch(V3, 4989)
    assert not errors(violations(replace(V3, sequences=most), 4989))
    assert errors(violations(replace(V3, sequences=most + 1), 4989))
    odd = replace(V3, gpus=7, gpu=profile("h200"), redundant=3)
    most = largest_batch(odd, 4989)
    assert most % 4 == 0 and not errors(violations(replace(odd, sequences=most), 4989))


def test_three_ways_to_keep_the_cache() -> None:
    """The seed's table: a reservation, pages, pages in FP8."""
    found = concurrency(V3, 8192, 163840)
    assert found.reserved < found.paged < found.paged_fp8
    assert found.paged_fp8 / found.paged == pytest.approx(1152 / 656, rel=0.05)
    node = found.times(8)
    assert (node.reserved, node.paged) == (8 * found.reserved, 8 * found.paged)
    full = concurrency(V3, 163840, 163840)
    assert full.reserved == full.paged


def test_drafts() -> None:
    assert mean_accepted(0.85, 1) == pytest.approx(1.85) and mean_accepted(1.0, 3) == 4
    assert mean_accepted(0.0, 3) == 1
    drafts = replace(V3, drafts=1)
    gained = predict(drafts, Workload())
    assert 1 < gained.mtp_gain < 1.85 and gained.tokens_a_step == pytest.approx(1.85)
    assert dict(step_parts(gained.step))["MTP drafts"] > 0.01 * gained.step.seconds
    assert predict(replace(drafts, acceptance=0.0), Workload()).mtp_gain < 1


def test_auto_has_the_order_of_the_server() -> None:
    # The first is `local`, for one GPU alone; the last for where torch's all-to-all cannot run.
    assert all(names[-2:] == ("torch", "allgather") for names in choice._ORDER.values())
    assert {phase: names[1:-1] for phase, names in choice._ORDER.items()} == ORDER


def test_a_model_without_fp8_or_query_latent() -> None:
    small = load_shape("deepseek-v3").config
    plain = replace(small, q_lora_rank=None, quantization=None, num_mtp_layers=0)
    assert isinstance(plain, DeepSeekConfig)
    d = replace(V3, shape=replace(V3.shape, config=plain))
    assert sum(weights(d).values()) > 1.5 * sum(weights(V3).values())
    assert predict(d, Workload()).step.seconds > predict(V3, Workload()).step.seconds


def test_the_mtp_layer_counts_where_tokens_are_drafted() -> None:
    drafted = replace(V3, drafts=1)
    assert (V3.kv_bytes(), drafted.kv_bytes(), drafted.kv_bytes(True)) == (70272, 71424, 62 * 656)
    extra = sum(weights(drafted).values()) - sum(weights(V3).values())
    assert extra > V3.slots_per_gpu * V3.shape.expert and "MTP projections" not in weights(V3)
    both = [predict(replace(d, phase="prefill"), Workload()).cost for d in (V3, drafted)]
    assert both[1]["cached"] / both[0]["cached"] == pytest.approx(62 / 61)
    one, other = (report(d, Workload()) for d in (V3, drafted))
    assert one.kv_bytes == other.kv_bytes and one.mtp_kv_bytes == (0, 0)
