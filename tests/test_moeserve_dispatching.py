"""The dispatcher at the start: problems in users' words, memory for buffers, masked ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from thread_ranks import World, thread_world  # noqa: F401

import dispatch
from dispatch.base import BufferPlan, DispatchConfig, PeerError, Probe
from dispatch.collective import CollectiveDispatcher
from dispatch.local import LocalDispatcher
from ep.group import EPGroup
from models.deepseek.random_checkpoint import write_random_checkpoint
from models.deepseek.random_families import family_config
from moeserve import build
from moeserve.build import build_engine
from moeserve.cache import BlockCache
from moeserve.config import ServeConfig
from moeserve.device import choose
from moeserve.dispatching import make_offer
from moeserve.engine import Engine
from moeserve.errors import ConfigError, EngineFailed
from moeserve.memory import CacheTooSmall, plan_cache, shortage
from moeserve.request import FinishReason, Request, SamplingParams
from moeserve.runner import ModelRunner
from moeserve.scheduler import ScheduleLimits, Scheduler
from moeserve.startup import prepare
from moeserve.toy_model import ToyModel

SINGLE = EPGroup.single()
MIB = 2**20


def config(checkpoint: Path, ep: int = 1, **parallel: Any) -> ServeConfig:
    engine = {"deterministic": parallel.pop("deterministic", True)}
    model = {"checkpoint": checkpoint, "dtype": parallel.pop("dtype", "auto")}
    schedule = {"max_model_len": 128, "token_budget": parallel.pop("token_budget", 64)}
    cache = parallel.pop("cache", {"kv_tokens": 512})
    sections = {
        "model": model,
        "parallel": {"ep": ep} | parallel,
        "engine": engine | {"quiet": True},
        "cache": cache,
        "schedule": schedule | {"max_num_sequences": 4},
    }
    return ServeConfig.load(None, sections)


@pytest.fixture(scope="module", name="wide")
def wide_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hidden size that DeepEP has kernels for; never loaded here."""
    made = family_config(
        "v3", hidden_size=2048, num_hidden_layers=2, num_nextn_predict_layers=0, vocab_size=64
    )
    return write_random_checkpoint(tmp_path_factory.mktemp("wide"), made, tokenizer=False)


@pytest.fixture(name="problem")
def only_problem(world: World) -> Callable[..., str]:
    """What `prepare` says on two ranks, the same on both and one line."""

    def ask(checkpoint: Path, **parallel: Any) -> str:
        def body(group: EPGroup) -> list[str]:
            with pytest.raises(ConfigError) as caught:
                prepare(config(checkpoint, group.size, **parallel), group)
            return caught.value.problems

        first, second = world(2, body)
        assert first == second and len(first) == 1 and "\n" not in first[0]
        return first[0]

    return ask


def test_what_cannot_run_says_which_flags_help(
    problem: Callable[..., str], random_checkpoint: Path, wide: Path
) -> None:
    said = problem(random_checkpoint, dispatch="deepep_ll", dtype="float32")
    assert said.startswith("parallel.dispatch='deepep_ll': cannot run here: ")
    if not torch.cuda.is_available():
        # Not flags that would not do, nor a reason that a flag takes away.
        assert "; its emulation on CPUs cannot run either: hidden_size=256: kernels exist" in said
        assert said.endswith("README, 'How tokens travel', writes a checkpoint that is wide enough")
        assert "give " not in said and "deterministic" not in said
        said = problem(wide, dispatch="deepep_ll", dtype="float32")
        flags = "--no-deterministic and --dtype bfloat16 and --emulate for its emulation on CPUs"
        assert said.endswith(f"; give {flags}") and "deterministic mode" not in said
    said = problem(random_checkpoint, dispatch="deepep_ll", emulate=True, deterministic=False)
    assert "hidden_size=256: kernels exist for 2048, 2560, 3072, 4096, 5120" in said
    assert "give" not in said  # no flag helps
    said = problem(wide, dispatch="decode=deepep_ll", emulate=True)
    assert "'prefill=auto,decode=deepep_ll': decode=deepep_ll cannot run here: deep_ep" in said
    assert said.endswith("; give --no-deterministic") and said.count("--no-deterministic") == 1
    said = problem(wide, dispatch="deepep_ll", emulate=True, deterministic=False, token_budget=3000)
    assert "prefill=deepep_ll cannot run here: " in said and "at most 1024" in said
    assert said.endswith("; decode=deepep_ll can, beside another for prefill")


def test_each_phase_is_sized_by_its_steps(world: World, wide: Path) -> None:
    def body(group: EPGroup) -> list[Any]:
        asked = config(wide, group.size, emulate=True, deterministic=False, token_budget=63,
                       dispatch="decode=deepep_ll")  # fmt: skip
        start = prepare(asked, group)
        chosen = start.dispatchers
        report = json.loads(json.dumps(chosen.report()))
        return [
            [(x.backend, x.config.max_tokens_per_rank) for x in chosen.parts],
            report["decode"]["emulated"],
            start.known_bytes["dispatch_buffers"] == chosen.plan(group).total > 1 << 20,
        ]

    first, second = world(2, body)
    assert first == second == [[("torch", 64), ("deepep_ll", 4)], True, True]


def test_a_rank_that_refuses_is_named_to_all_before_weights_load(
    world: World, random_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = CollectiveDispatcher.probe

    def by_rank(group: EPGroup, made: DispatchConfig) -> Probe:
        return probe(group, made) if group.rank else Probe(False, "no such network")

    def body(group: EPGroup) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            prepare(config(random_checkpoint, 2, dispatch="torch"), group)
        return caught.value.problems

    monkeypatch.setattr(CollectiveDispatcher, "probe", staticmethod(by_rank))
    first, second = world(2, body)
    assert (
        first == second == ["parallel.dispatch='torch': cannot run here: rank 0: no such network"]
    )


# -- memory -------------------------------------------------------------------------------------


def planned(**fields: Any) -> Any:
    base: dict[str, Any] = {
        "bytes_per_token": 1024, "block_size": 16, "model_max_len": 4096, "max_model_len": 64,
        "max_num_sequences": 1000, "available_bytes": 100 * MIB,
    }  # fmt: skip
    return plan_cache(**(base | fields))


def test_buffers_are_left_room_beside_an_automatic_cache() -> None:
    assert planned().num_bytes == 50 * MIB
    beside = {"dispatch_buffers": 30 * MIB, "rebalance_staging": 10 * MIB, "nothing": 0}
    plan = planned(beside=beside)
    assert plan.num_bytes == 30 * MIB and plan.beside == beside
    assert "less dispatch buffers 30.0 MiB, rebalance staging 10.0 MiB a rank," in plan.reason
    assert plan.describe().endswith(
        "; left to others: dispatch buffers 30.0 MiB, rebalance staging 10.0 MiB"
    )
    assert planned(beside=beside, ranks_here=2).num_bytes == 5 * MIB
    given = planned(beside=beside, kv_memory=MIB)
    assert given.num_bytes == MIB and "left to others: dispatch buffers" in given.describe()
    with pytest.raises(CacheTooSmall, match="less dispatch buffers 200.0 MiB a rank"):
        planned(beside={"dispatch_buffers": 200 * MIB})


def test_a_shortage_names_every_part_and_what_would_fit() -> None:
    parts = {"weights": 30 * MIB, "kv_cache": 60 * MIB, "dispatch_buffers": 10 * MIB}
    assert shortage(parts, 200 * MIB, 2) is None
    said = shortage(parts, 200 * MIB - 1, 2)
    assert said is not None and "2 ranks here need 209715200 bytes" in said
    assert "weights 30.0 MiB, kv cache 60.0 MiB, dispatch buffers 10.0 MiB" in said
    assert f"at most --kv-memory {60 * MIB - 1} fits" in said
    said = shortage(parts | {"kv_cache": 0}, 20 * MIB, 1)
    assert said is not None and "the rank here needs" in said and "--token-budget" in said


class Hungry(LocalDispatcher):
    """Wants more bytes than any machine has."""

    need = 1 << 60

    @classmethod
    def plan(cls, group: Any, config: DispatchConfig) -> BufferPlan:  # type: ignore[override]
        return BufferPlan(cls.need, 1)


def test_what_cannot_fit_is_said_before_weights_load(
    random_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_load", lambda name: Hungry)
    with pytest.raises(ConfigError) as caught:
        prepare(config(random_checkpoint), SINGLE)
    (said,) = caught.value.problems
    assert (
        said.startswith("memory: the rank here needs ") and "dispatch buffers 1099511627776" in said
    )
    monkeypatch.setattr(Hungry, "need", 0)
    prepare(config(random_checkpoint), SINGLE)
    memory = type("Memory", (), {"available": 1 << 20})
    monkeypatch.setattr(choose.psutil, "virtual_memory", lambda: memory)
    with pytest.raises(ConfigError, match="memory: .*weights"):
        prepare(config(random_checkpoint), SINGLE)


def test_too_little_for_one_sequence_is_said_before_weights_load(
    random_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All else fits; in the words in which it is said once they are there."""
    asked = config(random_checkpoint, cache={})
    weights = prepare(asked, SINGLE).known_bytes["weights"]
    memory = type("Memory", (), {"available": weights + 20_000})
    monkeypatch.setattr(choose.psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(build, "load_model", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(ConfigError) as caught:
        build_engine(asked, SINGLE)
    (said,) = caught.value.problems
    assert said.startswith("cache: auto: 50% of 0 MiB available over 1 ranks here: gives 0 blocks")


def test_an_engine_tells_its_buffers_and_its_choice(
    random_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Hungry, "need", 5 * MIB)
    monkeypatch.setattr(dispatch, "_load", lambda name: Hungry)
    engine = build_engine(config(random_checkpoint, cache={}), SINGLE)
    monkeypatch.undo()
    info: Any = json.loads(json.dumps(engine.info))
    assert info["memory_bytes"]["dispatch_buffers"] == 5 * MIB + 1
    assert info["memory_bytes"]["rebalance_staging"] == 0
    assert "left to others: dispatch buffers 5.0 MiB" in info["kv_plan"]
    told = info["dispatch"]
    assert told["prefill"] == told["decode"] == {"backend": "local",
                                                 "reason": told["prefill"]["reason"]}  # fmt: skip
    assert told["asked"] == "auto" and told["deterministic"] is True
    assert told["wire"]["format"] == "model" and told["wire"]["reason"].startswith("rows travel in")
    assert told["overlap"]["from_tokens"] is None and "one rank" in told["overlap"]["reason"]
    assert told["buffers_bytes"] == 5 * MIB + 1
    assert told["buffers"] == {"held_bytes": 5 * MIB, "passing_bytes": 1}
    (note,) = (x for x in info["notes"] if x.startswith("dispatcher "))
    assert "\n  buffers: 5.0 MiB: 5.0 MiB held and 0.0 MiB passing, while layers are" in note
    engine.close()


# -- ranks that do not answer -------------------------------------------------------------------


class Masking(LocalDispatcher):
    """Loses rank 1 when it is told to."""

    lost = False

    def active_mask(self) -> list[int]:
        return [1, int(not self.lost)]

    def check_peers(self) -> None:
        if self.lost:
            raise PeerError("dispatcher 'masking': ranks [1] did not answer, are masked")


def test_a_masked_rank_ends_the_job_by_vote_and_is_named() -> None:
    model = ToyModel()
    made = DispatchConfig(4, 2, 6, 8, torch.float32, deterministic=False)
    model.dispatcher = Masking(SINGLE, made)  # type: ignore[attr-defined]
    cache = BlockCache(64, 4, 4, True)
    pages = model.cache_spec.allocate(64, 4, torch.device("cpu"))
    limits = ScheduleLimits(4, 64, None, 64, model.config.vocab_size, frozenset())
    engine = Engine(ModelRunner(model, pages, cache.tables), Scheduler(cache, limits), SINGLE)
    engine.add_request(
        Request(
            request_id="a",
            prompt_token_ids=(1, 2, 3),
            sampling=SamplingParams(max_tokens=9, temperature=0.0),
        )
    )
    assert [x.token_ids for x in engine.step()] == [(model.continue_prompt([1, 2, 3], 1)[0],)]
    assert engine.stats().masked_ranks == ()
    model.dispatcher.lost = True  # type: ignore[attr-defined]
    (end,) = engine.step()  # no token of a step that lacks experts
    assert end.finish_reason is FinishReason.ERROR and end.token_ids == ()
    assert "ranks [1] did not answer" in str(end.error) and end.error == engine.failure
    assert engine.stats().masked_ranks == (1,)
    with pytest.raises(EngineFailed, match=r"ranks \[1\] did not answer"):
        engine.step()


@pytest.mark.parametrize("asked", [False, True])
def test_room_is_whole_tiles_where_a_library_may_multiply(wide: Path, asked: bool) -> None:
    """DeepGEMM stores whole tiles of an expert's rows; without a table nobody asks it."""
    given = config(wide, deterministic=False)
    if asked:
        table = given.model.model_copy(update={"kernel_table": Path("won.json")})
        given = given.model_copy(update={"model": table})
    size = DispatchConfig(2048, 2, 8, 1, torch.bfloat16, deterministic=False)
    offer = make_offer(given, SINGLE, size, None)
    rooms = {phase: found.max_tokens_per_rank for phase, found in offer.configs.items()}
    assert rooms == ({"prefill": 128, "decode": 128} if asked else {"prefill": 64, "decode": 4})
