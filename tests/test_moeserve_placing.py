"""Settings of where experts live become a placement, or problems that name them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ep.group import EPGroup
from ep.placement import ExpertPlacement
from ep.presets import PRESETS
from launch.job import run_job
from launch.settings import SERVING, Given
from models.deepseek.config import DeepSeekConfig
from models.deepseek.random_checkpoint import write_random_checkpoint
from models.deepseek.random_families import family_config
from moeserve import build
from moeserve.build import build_engine
from moeserve.config import ServeConfig
from moeserve.errors import ConfigError
from moeserve.fleet import Fleet
from moeserve.llm import config_from
from moeserve.placing import describe, first_placement
from moeserve.rebalancing.build import planner_options
from moeserve.startup import prepare
from moeserve.wire import Ready

SINGLE = EPGroup.single()
V3_LIKE = family_config("v3", n_routed_experts=256, n_group=8, topk_group=4, num_experts_per_tok=8)


def group_of(size: int, per_node: int | None = None) -> EPGroup:
    """As far as placing looks at it: nobody to talk to."""
    stand_in: Any = object()
    return EPGroup(0, size, per_node or size, stand_in, stand_in)


def place(model: dict[str, Any], **parallel: Any) -> tuple[ExpertPlacement | None, list[str]]:
    config = ServeConfig.load(None, {"parallel": parallel})
    problems: list[str] = []
    size = config.parallel.ep
    group = SINGLE if size == 1 else group_of(size, 8 if size % 8 == 0 else None)
    parsed = DeepSeekConfig.from_hf(model)
    return first_placement(config, parsed, group, True, problems), problems


def problems_of(**parallel: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        ServeConfig.load(None, {"parallel": parallel})
    return caught.value.problems


def test_the_shared_expert_is_replicated_unless_hosted() -> None:
    model = family_config("v2-lite")
    for settings, experts, where, replicas in (
        ({}, 16, "replicated", []),
        ({"shared_expert": "replicated", "redundant_experts": 3}, 16, "replicated", []),
        ({"shared_expert": "hosted"}, 18, "hosted", [1, 1]),
        ({"shared_expert": "hosted", "redundant_experts": 3, "ep": 4}, 18, "hosted", [3, 2]),
    ):
        placement, problems = place(model, **settings)
        assert placement is not None and problems == []
        said = describe(placement, DeepSeekConfig.from_hf(model))
        assert said["num_logical_experts"] == experts and said["num_routed_experts"] == 16
        assert (said["shared_expert"], said["shared_replicas"]) == (where, replicas)
        assert said["num_redundant_experts"] == settings.get("redundant_experts", 0)


def test_hosted_without_a_shared_expert_is_refused_before_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "load_model", lambda *_, **__: pytest.fail("weights were read"))
    bare = family_config("v3", n_shared_experts=0)
    folder = write_random_checkpoint(tmp_path, bare, tokenizer=False)
    settings = {"model": {"checkpoint": folder}, "parallel": {"shared_expert": "hosted"}}
    with pytest.raises(ConfigError) as caught:
        build_engine(ServeConfig.load(None, settings), SINGLE)
    (problem,) = caught.value.problems
    assert "parallel.shared_expert='hosted': this model has no shared expert" in problem
    assert "valid is replicated" in problem
    placement, _ = place(bare)
    assert placement is not None
    said = describe(placement, DeepSeekConfig.from_hf(bare))
    assert said["shared_expert"] == "none"


def test_an_unknown_mode_names_the_valid_ones() -> None:
    (problem,) = problems_of(shared_expert="hostd")
    assert "parallel.shared_expert='hostd': must be one of replicated, hosted" in problem
    assert "nearest: hosted" in problem


def test_a_given_placement_must_be_of_the_same_mode(tmp_path: Path) -> None:
    model = family_config("v3")
    rows = DeepSeekConfig.from_hf(model).num_placement_layers()
    for experts, shared, other in ((16, "hosted", "replicated"), (17, "replicated", "hosted")):
        file = tmp_path / f"{experts}.json"
        ExpertPlacement.trivial(rows, experts, 1).save(file)
        placement, problems = place(model, placement=file, shared_expert=shared)
        assert placement is None
        assert f"has {experts} logical experts, needs {33 - experts}" in problems[0]
        assert f"shared_expert='{other}'" in problems[0]
        placement, problems = place(model, placement=file, shared_expert=other)
        assert placement is not None and problems == []


def test_what_a_hosting_engine_says_of_itself(
    random_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings: dict[str, dict[str, Any]] = {
        "model": {"checkpoint": random_checkpoint},
        "parallel": {"shared_expert": "hosted", "redundant_experts": 2},
        "cache": {"kv_tokens": 512},
        "schedule": {"max_model_len": 128},
    }
    start = prepare(ServeConfig.load(None, settings), SINGLE)
    assert start.dispatch.top_k == start.model.num_experts_per_tok + 1
    assert start.dispatch.num_physical_experts == 19
    engine = build_engine(ServeConfig.load(None, settings), SINGLE)
    placement = engine.info["placement"]
    assert isinstance(placement, dict) and placement["shared_replicas"] == [3]
    memory = engine.info["memory_bytes"]
    assert isinstance(memory, dict) and "shared_expert" not in memory
    assert "the shared expert lies in slots, 3 replicas" in capsys.readouterr().err
    assert engine.stats().expert_shape[1] == 17
    engine.close()


# -- named layouts --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "ranks", "redundant", "shared", "slots"),
    [
        ("decode-ep320", 320, 63, "hosted", 1),
        ("prefill-ep32", 32, 32, "replicated", 9),
        ("decode-ep144", 144, 32, "replicated", 2),
    ],
)
def test_a_layout_sets_what_it_stands_for(
    name: str, ranks: int, redundant: int, shared: str, slots: int
) -> None:
    config = ServeConfig.load(None, {"parallel": {"layout": name, "ep": f"{ranks}"}})
    p = config.parallel
    assert (p.ep, p.redundant_experts, p.shared_expert) == (ranks, redundant, shared)
    placement, problems = place(V3_LIKE, layout=name)
    assert placement is not None and problems == []
    assert placement.num_ranks == ranks and placement.num_local_experts == slots
    assert placement.num_redundant_experts == redundant and placement.num_empty_slots == 0
    if shared == "hosted":
        assert placement.replica_count[:, 256].min() >= 32
    for rank in range(ranks):
        local = placement.experts_of(rank, 0)
        assert len(set(local)) == len(local), "two copies on one GPU"


def test_the_prefill_layout_keeps_groups_on_nodes() -> None:
    placement, _ = place(V3_LIKE, layout="prefill-ep32")
    assert placement is not None
    for node in range(4):
        here = {
            e // 32 for rank in range(8 * node, 8 * node + 8) for e in placement.experts_of(rank, 0)
        }
        assert len(here) == 2  # of 8 groups


def test_a_contradicting_setting_is_named_with_the_layout(tmp_path: Path) -> None:
    first, second = problems_of(layout="decode-ep320", ep=8, shared_expert="replicated")
    assert "parallel.ep=8: parallel.layout='decode-ep320' means 320" in first
    assert "parallel.shared_expert='replicated'" in second and "means 'hosted'" in second
    toml = tmp_path / "settings.toml"
    toml.write_text('[parallel]\nlayout = "decode-ep144"\n')
    with pytest.raises(ConfigError, match="redundant_experts='16'.*decode-ep144.*means 32"):
        ServeConfig.load(toml, {"parallel": {"redundant_experts": "16"}})
    assert ServeConfig.load(toml, {}).parallel.ep == 144


def test_an_unknown_layout_names_the_known_ones() -> None:
    (problem,) = problems_of(layout="decode-ep32")
    assert "must be one of prefill-ep32, decode-ep144, decode-ep320; nearest: " in problem


@pytest.mark.parametrize("name", ["decode-ep320", "prefill-ep32", "decode-ep144"])
def test_a_model_that_does_not_fill_a_layout_is_refused(name: str) -> None:
    placement, (problem,) = place(family_config("v3"), layout=name)
    assert placement is None
    assert f"parallel.layout={name!r}: made for" in problem and "this model has 16" in problem


def test_what_cannot_fit_is_said_before_any_rank_starts(
    random_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the commands, from config.json alone; and so many ranks that memory cannot hold them."""
    flags = {"parallel": {"layout": "decode-ep320"}}
    with pytest.raises(ConfigError, match="parallel.layout='decode-ep320': made for 257"):
        Given(random_checkpoint, None, flags, SERVING).resolve()
    monkeypatch.setattr(
        "torch.distributed.launcher.api.elastic_launch", lambda *_: pytest.fail("ranks started")
    )
    with pytest.raises(ConfigError, match="parallel.ep=1000000: .*too little for more than"):
        run_job(1_000_000, [])
    monkeypatch.setattr("launch.job.RANK_BYTES", 0)
    monkeypatch.setattr("launch.job.usable_cores", lambda: 2)
    with pytest.raises(ConfigError, match="parallel.ep=33: .* 2 cores can run 32 at most; to use"):
        run_job(33, [])


def test_the_fleet_counts_replicas_of_the_placement_in_use() -> None:
    fleet = Fleet(1)
    ready = Ready(0, 16, 8, 128, 4, info={"placement": {"num_routed_experts": 16}})
    fleet.heard(0, ready, 0.0)
    assert fleet.shared_replicas() == 0  # nothing told yet
    for settings, expected in (({}, 0), ({"shared_expert": "hosted", "redundant_experts": 3}, 4)):
        placement, _ = place(family_config("v3"), **settings, ep=4)
        fleet.placement = placement
        assert fleet.shared_replicas() == expected


def test_from_python_a_layout_sets_the_ranks_too() -> None:
    assert config_from("folder", 1, {"layout": "decode-ep144"}).parallel.ep == 144
    assert config_from("folder", 2, {"shared_expert": "hosted"}).parallel.ep == 2
    with pytest.raises(ConfigError, match="parallel.ep=4: parallel.layout='decode-ep144' means"):
        config_from("folder", 4, {"layout": "decode-ep144"})


def test_rebalancing_keeps_to_the_layouts_group_policy_unless_told() -> None:
    parallel = {"layout": "prefill-ep32"}
    for rebalance, expected in (({}, PRESETS["prefill-ep32"].group_policy),
                                ({"group_policy": "free"}, "free")):  # fmt: skip
        config = ServeConfig.load(None, {"parallel": parallel, "rebalance": rebalance})
        assert planner_options(config)["group_policy"] == expected
    assert planner_options(ServeConfig())["group_policy"] == "free"
