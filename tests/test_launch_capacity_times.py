"""The model of times against published points, and what must hold of it whatever its constants."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launch.capacity.hardware import profile, profiles
from launch.capacity.known import MODELS, load_shape
from launch.capacity.picks import Reach
from launch.capacity.times import Calibration, Pool, decode_step, prefill_step
from launch.capacity.traffic import low_latency, node_aware, once_a_rank, reach
from launch.capacity.validate import FITTED, fit, validate
from moeserve.errors import ConfigError

V3 = load_shape("deepseek-v3")
DECODE = Pool(profile("h800"), 144, redundant=32)
C = Calibration()


def test_published_points_are_met() -> None:
    found = validate()
    assert found.median_error() < 0.10
    assert found.median_error(unit="tok/s/node") < 0.10
    assert found.median_error(fitted=False) < 0.10
    assert found.worst_error(fitted=True) < 0.25
    assert found.held_out_share > 1 / 3
    assert all(p.source and (p.predicted is None) == bool(p.reason) for p in found.points)


def test_the_constants_are_what_the_fit_gives() -> None:
    again = fit()
    for name in FITTED:
        assert getattr(again, name) == pytest.approx(getattr(C, name), rel=0.03), name


def test_what_was_believed_before_is_told_apart() -> None:
    """More constants than points: the report says so, and what they give unfitted."""
    found = validate()
    said = found.as_json()
    assert len(FITTED) == 9 and said["fitted_on_points"] == 7
    before = said["before_fitting"]
    assert 0.04 < before["median_error"] < 0.06 < before["median_error_throughput"] < 0.10
    assert before["worst_error"] > said["worst_error_fitted"]
    assert "9 constants were fitted on 7 throughputs" in found.told() and "4.9%" in found.told()


def test_a_broken_constant_shows() -> None:
    broken = validate(replace(C, prefill_core=0.1, intensity=100.0))
    assert broken.median_error(unit="tok/s/node") > 0.25


@pytest.mark.parametrize("model", MODELS)
def test_shapes_are_those_of_the_reports(model: str) -> None:
    shape = load_shape(model)
    total, active = {"deepseek-v3": (671e9, 37e9), "kimi-k2": (1.03e12, 32e9)}[model]
    assert shape.total == pytest.approx(total, rel=0.01)
    assert shape.active == pytest.approx(active, rel=0.05)
    assert shape.kv_bytes() == 70272  # 61 layers of 576 values in BF16
    assert shape.kv_bytes(fp8=True) == 61 * 656


def test_low_latency_bytes_are_those_of_the_library() -> None:
    sent = low_latency(V3, 1 << 20, 1 << 20)  # so many ranks that none is home
    assert sent.dispatch_across == pytest.approx(8 * (7168 + 224), rel=1e-4)
    assert sent.combine_across == pytest.approx(8 * 14336, rel=1e-4)


@pytest.mark.parametrize("nodes", [2, 4, 8, 18])
def test_fewer_rows_cross_where_nodes_are_known(nodes: int) -> None:
    ranks = 8 * nodes
    seen = reach(V3.config, ranks, nodes)
    assert 1 <= seen.nodes <= min(nodes, 4 if nodes <= 8 else 8) + 1e-9  # four of eight groups
    assert seen.nodes <= seen.ranks <= 8
    by_pick = low_latency(V3, ranks, nodes)
    by_rank, by_node = (f(V3, ranks, nodes, seen) for f in (once_a_rank, node_aware))
    assert by_node.across <= by_rank.across <= by_pick.across
    more = node_aware(V3, ranks, nodes, Reach(seen.ranks, 1.1 * seen.nodes))
    assert more.across == pytest.approx(1.1 * by_node.across)
    assert more.within == pytest.approx(by_node.within)


def test_steps_grow_with_work_and_shrink_with_gpus() -> None:
    def decode(**change: float) -> float:
        asked = {"tokens": 128.0, "context": 4096.0} | change
        return decode_step(V3, DECODE, asked["tokens"], asked["context"], C).seconds

    assert decode() < decode(tokens=256) < 2 * decode() + 1e-3
    assert decode() < decode(context=8192)
    worse = decode_step(V3, replace(DECODE, balance=1.5), 128, 4096, C)
    assert decode() < worse.seconds
    small = prefill_step(V3, Pool(profile("h800"), 32, redundant=32), 4096, 4096, C)
    large = prefill_step(V3, Pool(profile("h800"), 32, redundant=32), 16384, 4096, C)
    assert small.seconds < large.seconds < 4 * small.seconds
    assert small.seconds > small.projections + small.core + small.experts


def test_overlap_hides_and_never_gains_more_than_all_of_it() -> None:
    with_it = decode_step(V3, DECODE, 128, 4096, C)
    without = decode_step(V3, replace(DECODE, overlap=False), 128, 4096, C)
    assert with_it.exposed < with_it.comm and without.exposed == without.comm
    assert with_it.seconds > without.seconds - without.comm


def test_an_unknown_gpu_or_model_is_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="nearest: h200"):
        profile("h2000")
    with pytest.raises(ConfigError, match="nearest: kimi-k2"):
        load_shape("kimi-k3")
    assert all(gpu.source for gpu in profiles().values())
