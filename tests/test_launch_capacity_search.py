"""`moeserve plan --search`: few layouts are priced, the answer is that of all; limits show."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from launch.capacity.asked import Typed, read
from launch.capacity.balance import balance, hoped
from launch.capacity.candidates import Candidate, Pools, leaders, pareto
from launch.capacity.deployment import from_preset
from launch.capacity.groups import policies
from launch.capacity.screen_search import front_rows
from launch.capacity.search import _pools, search
from launch.cli import app

TINY = Path(__file__).parents[1] / "checkpoints" / "tiny"
K2 = Typed("kimi-k2", gpu="h200", ttft="2", tpot="60ms", max_gpus="64")


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_leaving_pools_out_changes_nothing(phase: str) -> None:
    asked = read(replace(K2, phase=phase, ttft=None if phase == "decode" else "2",
                         tpot=None if phase == "prefill" else "60ms"), search=True)  # fmt: skip
    steps: list[tuple[int, int]] = []
    whole, few = (
        search(asked.bases[0], asked.work, asked.limits, 64, every=every,
               progress=lambda done, total: steps.append((done, total)))
        for every in (True, False)
    )  # fmt: skip
    assert few.best == whole.best and few.pareto == whole.pareto and few.best is not None
    assert (few.tried, few.num_allowed) == (whole.tried, whole.num_allowed)
    assert len(few.allowed) < len(whole.allowed) == whole.num_allowed
    total = steps[0][1]
    assert total > 10 and steps.count((total, total)) >= 2 and all(n == total for _, n in steps)


def test_leaving_pools_out_changes_nothing_on_loads_of_an_operator() -> None:
    rng = np.random.default_rng(3)
    loads = rng.lognormal(0, 1.2, (4, 256))
    base = replace(from_preset("v3-decode-144"), gpus=1)
    asked = read(Typed("deepseek-v3", gpu="h800", phase="decode", tpot="45ms"), search=True)
    whole, few = (
        search(base, asked.work, asked.limits, 40, loads=loads, every=e) for e in (True, False)
    )
    assert few.best == whole.best and few.pareto == whole.pareto
    assert few.num_allowed == whole.num_allowed


@pytest.mark.parametrize("kind", ["even", "skewed"])
def test_leaving_pools_out_changes_nothing_where_groups_may_stay_on_nodes(kind: str) -> None:
    """With even loads they do, with skewed ones a hot group's node would wait."""
    loads = np.random.default_rng(11).lognormal(0, 1.2, (3, 256))
    loads = np.ones((2, 256)) if kind == "even" else loads
    asked = read(Typed("deepseek-v3", gpu="h800", phase="prefill", ttft="2"), search=True)
    whole, few = (
        search(asked.bases[0], asked.work, asked.limits, 40, loads=loads, every=e)
        for e in (True, False)
    )
    assert few.best == whole.best and few.pareto == whole.pareto and few.best is not None
    assert few.num_allowed == whole.num_allowed and len(few.allowed) <= len(whole.allowed)
    assert few.best.deployment.groups == ("node" if kind == "even" else "free")
    assert few.best.as_json()["placement"]["nodes_per_token"] > 1


@pytest.mark.parametrize("preset", ["v3-prefill-32", "k2-decode-96"])
def test_no_placement_is_better_than_what_is_hoped(preset: str) -> None:
    base = replace(from_preset(preset), gpus=1)
    for pool in list(_pools(base, 48, None))[::5]:
        assert pool == hoped(replace(pool, balance=1.0, reach=None))
        for groups in policies(replace(pool, dispatch="deepep_normal")):
            found = balance(replace(pool, groups=groups))
            assert pool.balance <= found.mean and pool.reach is not None
            assert pool.reach.nodes <= found.reach.nodes and pool.reach.ranks <= found.reach.ranks


def test_only_pools_that_matter_are_priced() -> None:
    """A pool whose best hope another beats is never asked for."""
    d = from_preset("v3-decode-144")
    asked = read(Typed("deepseek-v3", gpu="h800", phase="decode"), search=True)
    found = search(replace(d, gpus=1), asked.work, asked.limits, 24)
    top = max(found.allowed, key=lambda x: x.prediction.per_gpu)
    poor = replace(
        top, prediction=replace(top.prediction, per_gpu=1.0, tpot=9 * (top.prediction.tpot or 1))
    )
    priced: list[list[Candidate]] = []

    def price(pool: list[Candidate]) -> list[Candidate]:
        priced.append(pool)
        return pool

    pools = Pools([[poor], [top]], price, lambda done, total: None)
    pools.price_front([])
    assert priced == [[top]] and pools.priced() == [top] == pareto([poor, top])
    assert leaders([poor, top]) == [top]


def test_rows_beyond_the_limit_are_marked() -> None:
    asked = read(replace(K2, max_gpus="32", phase="prefill", tpot=None), search=True)
    found = search(asked.bases[0], asked.work, asked.limits, 32, every=False)
    marks = {row[-1] for row in front_rows(found)}
    assert marks == {"best", "over", ""}
    for x, row in zip(found.pareto, front_rows(found), strict=False):
        assert (row[-1] == "over") == (x.latency > 2.0)


def test_a_search_tells_how_far_it_is_and_what_is_over() -> None:
    flags = ["plan", str(TINY), "--search", "--gpu", "h100", "--max-gpus", "2", "--tpot", "1ms"]
    done = CliRunner().invoke(app, [*flags, "--phase", "decode"])
    assert "moeserve: search, decode: 0 of " in done.stderr
    pools = done.stderr.split("decode: 0 of ")[1].split()[0]
    assert done.stderr.count(f"{pools} of {pools} pools") == 1
    assert "over" in done.stdout and "over: beyond the limit, TPOT 1 ms" in done.stdout
    told = json.loads(CliRunner().invoke(app, [*flags, "--json"]).stdout.splitlines()[-1])
    kept = [x["within_limit"] for x in told["phases"]["decode"]["pareto"]]
    waits = [x["prediction"]["tpot_s"] for x in told["phases"]["decode"]["pareto"]]
    assert kept == [x <= 1e-3 for x in waits] and False in kept
