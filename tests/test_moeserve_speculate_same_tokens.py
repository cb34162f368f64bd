"""Law 5 with speculation, on one rank: tokens, log-probabilities and ends of requests are bitwise
those of the plain run, for every drafter, depth and schedule, whatever a request asks of sampling.

The plain run: one request at a time, whole prompt at once, no drafts. `Oracle` knows what it gave,
so that runs of every length are accepted also where a random checkpoint's drafts never are. Over
several ranks: tests/dist/test_speculate_dist.py.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from speculate_world import LateOracle, Oracle, requests, write_heads
from torch import Tensor

from ep.group import EPGroup
from models.deepseek.random_checkpoint import write_random_checkpoint
from models.deepseek.random_families import family_config
from moeserve.build import build_engine
from moeserve.cache import BlockCache
from moeserve.config import ServeConfig
from moeserve.engine import Engine
from moeserve.recorder import StepRecorder
from moeserve.request import FinishReason, Request
from moeserve.runner import ModelRunner
from moeserve.scheduler import ScheduleLimits, Scheduler
from moeserve.speculate.adaptive import AdaptiveDepth, FixedDepth
from moeserve.speculate.build import open_speculator, plan_speculation
from moeserve.speculate.speculator import Speculator
from moeserve.speculate.verify import Rule

BUNDLED = Path(__file__).parents[1] / "checkpoints" / "tiny"
LENGTH = 96


pytestmark = pytest.mark.usefixtures("one_thread")


# -- runs -----------------------------------------------------------------------------------------


@dataclass
class Ran:
    """By request: all that came out. And what the run is known to have gone through."""

    outputs: dict[str, list[Any]] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    preemptions: int = 0
    drafted: int = 0
    accepted: int = 0
    told: tuple[int, int] = (0, 0)  # of outputs: accepted, rejected
    cached: int = 0
    depths: set[int] = field(default_factory=set)
    hidden: dict[tuple[str, int], Tensor] = field(default_factory=dict)  # as an oracle saw it
    walked: int = 0  # steps whose trees were judged late


def load(checkpoint: Path, dtype: str = "float32", redundant: int = 0) -> Engine:
    settings: dict[str, dict[str, Any]] = {
        "model": {"checkpoint": checkpoint, "dtype": dtype},
        "parallel": {"redundant_experts": redundant},
        "cache": {"kv_tokens": 256},
        "schedule": {"max_model_len": LENGTH},
        "engine": {"quiet": True},
    }
    return build_engine(ServeConfig.load(None, settings), EPGroup.single())


def serve(
    loaded: Engine,
    asked: list[Request],
    *,
    drafter: str | None = None,
    depth: int | None = 3,
    nodes: int | None = None,
    rule: str = "same",
    checkpoint: Path = BUNDLED,
    plain: Ran | None = None,
    size: int = 16,
    tokens: int = 4096,
    rows: int = 8,
    budget: int = 512,
    chunk: int | None = None,
    prefix: bool = False,
    together: bool = True,
    overlap: int | None = None,
    aborts: dict[int, str] | None = None,
) -> Ran:
    """drafter: oracle, late (one that is asked late), or as `--speculate` has it, without K; depth
    None: adaptive. checkpoint: where the target's tokenizer lies. aborts: of a request before a
    step."""
    model: Any = loaded.runner.model
    cache = BlockCache(tokens // size, size, rows, prefix)
    pages = model.cache_spec.allocate(tokens // size, size, torch.device("cpu"))
    for layer in pages.layers:
        layer.fill_(float("nan"))  # what was never written must not be read
    limits = ScheduleLimits(
        rows, budget, chunk, LENGTH, eos_ids=frozenset(model.config.eos_token_ids)
    )
    runner = ModelRunner(model, pages, cache.tables, StepRecorder(), overlap, Rule(rule))
    scheduler = Scheduler(cache, limits)
    speculator: Speculator | None = None
    if drafter in ("oracle", "late"):
        assert plain is not None
        kind = Oracle if drafter == "oracle" else LateOracle
        made = kind(plain.tokens, depth or 4, model.config.vocab_size, nodes)
        policy = FixedDepth(depth) if depth else AdaptiveDepth(4)
        speculator = Speculator(made, policy, runner, scheduler)
    elif drafter is not None:
        method = drafter if depth is None else f"{drafter}:{depth}"
        section = {"method": method, "nodes": nodes, "rule": rule}
        config = ServeConfig.load(None, {"model": {"checkpoint": checkpoint}, "speculate": section})
        problems: list[str] = []
        planned = plan_speculation(config, model.config, problems)
        assert planned is not None, problems
        speculator = open_speculator(planned, runner, scheduler, 0)
    engine = Engine(runner, scheduler, EPGroup.single(), speculator=speculator)
    ran = Ran()
    waiting, step = list(asked), 0
    accepted = rejected = 0
    while waiting or engine.has_work:
        while waiting and (together or not engine.has_work):
            engine.add_request(waiting.pop(0))
        if aborts and step in aborts:
            engine.abort([aborts[step]])
        for output in engine.step():
            assert output.error is None, output.error
            name = output.request_id
            kept = ran.outputs.setdefault(name, [])
            kept += [*output.logprobs]
            if output.prompt_logprobs is not None:
                kept.append(output.prompt_logprobs)
            if output.finish_reason is not None:
                kept.append((output.finish_reason, output.stop_token_id))
            ran.tokens.setdefault(name, []).extend(output.token_ids)
            ran.cached = max(ran.cached, output.num_cached_tokens)
            accepted += output.num_accepted
            rejected += output.num_rejected
        step += 1
        cache.check()
        if speculator is not None:
            ran.depths.add(speculator.depth)
            assert speculator.failure is None, speculator.failure
        for sequence in scheduler.running:  # drafts are held for one step and nobody's tokens
            assert sequence.lease is not None
            assert sequence.lease.num_committed * size <= sequence.num_computed_tokens
    assert cache.num_available == cache.pool.num_blocks
    ran.preemptions = scheduler.counters.preemptions
    ran.drafted = scheduler.counters.drafted_tokens
    ran.accepted = scheduler.counters.accepted_tokens
    ran.told = accepted, rejected
    if speculator is not None and isinstance(speculator.drafter, Oracle):
        assert not speculator.drafter.known
        ran.hidden = speculator.drafter.hidden
        ran.walked = getattr(speculator.drafter, "num_walked", 0)
    assert scheduler.counters.output_tokens == sum(map(len, ran.tokens.values()))
    if not aborts:
        assert sum(ran.told) == ran.drafted
    return ran


def must_match(got: Ran, plain: Ran, names: Collection[str] | None = None) -> None:
    for name in names if names is not None else got.tokens:
        assert got.tokens[name] == plain.tokens[name], f"request {name}"
        assert got.outputs[name] == plain.outputs[name], f"request {name}: some bit differs"


# -- what the tests share -------------------------------------------------------------------------


@dataclass
class Case:
    loaded: Engine
    asked: list[Request]
    plain: Ran


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("speculate") / "v3"
    config = family_config("v3", num_hidden_layers=2, max_position_embeddings=256)
    return write_random_checkpoint(made, config)


def case_of(loaded: Engine, num: int) -> Case:
    asked = requests(loaded.runner.model.config.vocab_size, num, LENGTH)
    return Case(loaded, asked, serve(loaded, asked, together=False))


@pytest.fixture(scope="module")
def case(folder: Path) -> Case:
    return case_of(load(folder), 33)


@pytest.fixture(scope="module")
def bundled() -> Case:
    return case_of(load(BUNDLED, "bfloat16"), 16)


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunk-1": {"chunk": 1, "size": 4, "prefix": True},
    "chunk-3": {"chunk": 3, "size": 4},
    "prefix": {"chunk": 5, "prefix": True, "size": 4},
    "blocks-of-1": {"size": 1, "prefix": True},
    "blocks-of-5": {"size": 5, "tokens": 2000, "prefix": True},
    "budget-9": {"budget": 9, "prefix": True, "size": 4},
    "company-33": {"rows": 33},
    "alone": {"together": False, "size": 4, "prefix": True},
    "preempted": {"size": 4, "tokens": 128, "rows": 12, "chunk": 9, "prefix": True},
    "preempted-no-prefix": {"size": 2, "tokens": 110, "rows": 12},
    "halves": {"overlap": 5, "rows": 6},
}


NGRAM = ("prefix", "budget-9", "company-33", "preempted")  # it plans as an oracle does


@pytest.mark.parametrize(
    ("drafter", "name"),
    [(d, n) for d in ("oracle", "mtp", "ngram") for n in (NGRAM if d == "ngram" else VARIANTS)],
)
def test_schedules_change_no_bit(case: Case, drafter: str, name: str) -> None:
    variant = VARIANTS[name]
    asked = case.asked[: {"chunk-1": 8, "company-33": 33, "alone": 12}.get(name, 20)]
    depth = 5 if drafter == "oracle" else 3
    ran = serve(case.loaded, asked, drafter=drafter, depth=depth, plain=case.plain, **variant)
    must_match(ran, case.plain)
    assert ran.drafted > {"ngram": 3, "oracle": 15, "mtp": 15}[drafter]
    if drafter == "oracle":
        assert 0.2 < ran.accepted / ran.drafted < 0.9
    if name.startswith("preempted"):
        assert ran.preemptions > 0
    if variant.get("prefix") and name not in ("budget-9", "preempted", "chunk-1"):
        assert ran.cached >= 12


@pytest.mark.parametrize("name", VARIANTS)
def test_trees_change_no_bit(case: Case, name: str) -> None:
    """Rows of one sequence at one position, accepted nodes anywhere among them."""
    variant = VARIANTS[name]
    asked = case.asked[: {"chunk-1": 8, "company-33": 33, "alone": 12}.get(name, 20)]
    ran = serve(
        case.loaded, asked, drafter="oracle", depth=4, nodes=16, plain=case.plain, **variant
    )
    must_match(ran, case.plain)
    assert ran.drafted > 60 and ran.accepted > 10


@pytest.fixture(scope="module")
def seen(case: Case) -> dict[tuple[str, int], Tensor]:
    """Hidden states of positions, where the host says which were accepted."""
    return serve(case.loaded, case.asked, drafter="oracle", plain=case.plain).hidden


@pytest.mark.parametrize("name", ["prefix", "budget-9", "preempted", "halves"])
def test_drafts_judged_late_change_no_bit(
    case: Case, seen: dict[tuple[str, int], Tensor], name: str
) -> None:
    """Nor does what a drafter sees of the steps, which for trees are the rows of the path alone."""
    for nodes in (None, 16):
        ran = serve(
            case.loaded, case.asked[:20], drafter="late", depth=4, nodes=nodes, plain=case.plain,
            **VARIANTS[name],
        )  # fmt: skip
        must_match(ran, case.plain)
        assert ran.drafted > 60 and ran.accepted > 10 and (ran.walked > 8) is (nodes is not None)
        common = ran.hidden.keys() & seen.keys()
        assert len(common) > 300
        assert [at for at in common if not torch.equal(ran.hidden[at], seen[at])] == []


@pytest.mark.parametrize("nodes", [None, 9, 24])
@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_heads_change_no_bit(case: Case, tmp_path: Path, kind: str, nodes: int | None) -> None:
    config: Any = case.loaded.runner.model.config
    heads = write_heads(tmp_path / kind, kind, config.hidden_size, config.vocab_size)
    variants: list[dict[str, Any]] = [
        {"size": 4, "prefix": True, "chunk": 7},
        {"tokens": 128, "size": 4, "rows": 12},
    ]
    for depth, variant in zip((4, None) if nodes is None else (4, 3), variants, strict=True):
        name = f"{kind}:{heads}"
        ran = serve(case.loaded, case.asked[:16], drafter=name, depth=depth, nodes=nodes, **variant)
        must_match(ran, case.plain)
        assert ran.drafted > (10 if depth else 0)  # adaptive depth goes by the time that it takes


def test_a_draft_model_changes_no_bit_and_one_that_is_the_target_is_always_right(
    case: Case, folder: Path
) -> None:
    asked = case.asked[:16]
    ran = serve(case.loaded, asked, drafter=f"draft:{folder}", depth=3, checkpoint=folder, size=4)
    must_match(ran, case.plain)
    assert ran.accepted > 0.8 * ran.drafted  # the rest lay behind an end
    assert ran.told[0] == ran.accepted
    other = serve(
        case.loaded, asked, drafter=f"draft:{folder}", depth=None, checkpoint=folder,
        size=4, tokens=128, rows=12, chunk=5, prefix=True,
    )  # fmt: skip
    must_match(other, case.plain)


def test_by_rejection_greedy_tokens_are_the_same_and_a_copy_of_the_target_is_always_right(
    case: Case, folder: Path
) -> None:
    asked = case.asked[:16]
    greedy = [r.request_id for r in asked if not r.sampling.temperature]
    for drafter in (f"draft:{folder}", "mtp"):
        ran = serve(
            case.loaded, asked, drafter=drafter, rule="rejection", checkpoint=folder, size=4
        )
        must_match(ran, case.plain, greedy)
        assert ran.tokens.keys() == {r.request_id for r in asked}
        if drafter != "mtp":
            assert ran.accepted > 0.8 * ran.drafted  # the rest lay behind an end


@pytest.mark.parametrize("depth", [1, 2, 4, 6, 7, 8, None])
def test_no_depth_changes_a_bit(case: Case, depth: int | None) -> None:
    for drafter in ("oracle", "mtp"):
        asked = case.asked[:14]
        ran = serve(case.loaded, asked, drafter=drafter, depth=depth, plain=case.plain, size=4)
        must_match(ran, case.plain)
        assert ran.drafted > 0 and max(ran.depths) == (depth or max(ran.depths))


@pytest.mark.parametrize("drafter", ["mtp", "ngram"])
def test_a_trained_checkpoints_drafts_are_accepted_and_change_no_bit(
    bundled: Case, drafter: str
) -> None:
    for depth, variant in ((3, {"size": 4, "prefix": True, "chunk": 7}), (None, {})):
        ran = serve(bundled.loaded, bundled.asked, drafter=drafter, depth=depth, **variant)
        must_match(ran, bundled.plain)
        assert ran.accepted > 0


def test_redundant_experts_change_no_bit(case: Case, folder: Path) -> None:
    loaded = load(folder, redundant=3)
    must_match(serve(loaded, case.asked[:12], drafter="mtp", size=4, prefix=True), case.plain)


def test_aborts_amid_verification_leave_no_trace(case: Case) -> None:
    """Between the step that drafts and the one that verifies, and while it runs."""
    asked = case.asked[:12]
    aborts = {3: "0", 4: "4", 5: "9", 6: "7"}
    for drafter in ("oracle", "mtp"):
        ran = serve(case.loaded, asked, drafter=drafter, plain=case.plain, size=4, aborts=aborts)
        rest = [r.request_id for r in asked if r.request_id not in aborts.values()]
        must_match(ran, case.plain, rest)
        ends = [ran.outputs[name][-1][0] for name in aborts.values()]
        assert FinishReason.ABORT in ends


def test_an_abort_while_the_step_runs_drops_the_run(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = ModelRunner.choose
    victims: list[str] = []

    def aborting(self: ModelRunner, plan: Any, batch: Any, logits: Any) -> Any:
        if plan.trees and not victims:
            victims.append(plan.sequences[min(plan.trees)].request_id)
            plan.sequences[min(plan.trees)].aborted = FinishReason.ABORT
        return choose(self, plan, batch, logits)

    monkeypatch.setattr(ModelRunner, "choose", aborting)
    asked = case.asked[:8]
    ran = serve(case.loaded, asked, drafter="oracle", plain=case.plain, aborts={10**9: ""})
    (victim,) = victims
    must_match(ran, case.plain, [r.request_id for r in asked if r.request_id != victim])
    got = ran.tokens[victim]
    assert got == case.plain.tokens[victim][: len(got)] and len(got) < len(
        case.plain.tokens[victim]
    )


def test_the_comparison_can_fail(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that enters the prefix tree with a rejected draft in its key must show, and so must
    a row that is judged one place off."""
    import moeserve.runner as runner_module

    verify = runner_module.verify

    def off_by_one(logits: torch.Tensor, *rest: Any) -> Any:
        return verify(logits.roll(1, 0), *rest)

    monkeypatch.setattr(runner_module, "verify", off_by_one)
    with pytest.raises(AssertionError):
        must_match(
            serve(case.loaded, case.asked[:6], drafter="oracle", plain=case.plain), case.plain
        )


def test_off_plans_nothing(folder: Path) -> None:
    config = ServeConfig.load(None, {"model": {"checkpoint": folder}})
    problems: list[str] = []
    assert plan_speculation(config, load(folder).runner.model.config, problems) is None
    assert problems == []
