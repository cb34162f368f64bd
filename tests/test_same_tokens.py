"""Law 5 on one rank: greedy tokens and log-probabilities are bitwise those of the plain run, for
each chunk size, batch company, block size, prefix hit, preemption and redundancy.

The plain run: one request at a time, whole prompt at once, blocks of 16, no prefix cache, no
redundant experts. The same over several ranks: tests/dist/test_same_tokens_dist.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from engine_steps import steps_until_idle

from ep.group import EPGroup
from models.deepseek.random_checkpoint import write_random_checkpoint
from models.deepseek.random_families import family_config
from moeserve.build import build_engine
from moeserve.cache import BlockCache
from moeserve.config import ServeConfig
from moeserve.engine import Engine
from moeserve.request import Request, SamplingParams
from moeserve.runner import ModelRunner
from moeserve.scheduler import ScheduleLimits, Scheduler

BUNDLED = Path(__file__).parents[1] / "checkpoints" / "tiny"
DTYPES = ("float32", "bfloat16")
LENGTH = 128


pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass
class Ran:
    """Per request id: tokens and raw logprobs; and what the run is known to have gone through."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[Any]] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)
    preemptions: int = 0
    most_running: int = 0


def requests(vocab: int, num: int, seed: int = 0) -> list[Request]:
    """Prompts of 1 to about 70 tokens that share beginnings of many lengths."""
    rng = random.Random(seed)
    base = [rng.randrange(3, vocab) for _ in range(60)]
    made = []
    for i in range(num):
        prompt = base[: rng.choice([0, 3, 17, 33, 48, 60])]
        prompt = [*prompt, *(rng.randrange(3, vocab) for _ in range(rng.randrange(1, 10)))]
        sampling = SamplingParams(
            temperature=0, max_tokens=rng.randrange(4, 11), ignore_eos=True, logprobs=2
        )
        made.append(Request(request_id=f"{i}", prompt_token_ids=tuple(prompt), sampling=sampling))
    return made


def load(checkpoint: Path, dtype: str, redundant: int = 0) -> Engine:
    settings: dict[str, dict[str, Any]] = {
        "model": {"checkpoint": checkpoint, "dtype": dtype},
        "parallel": {"redundant_experts": redundant},
        "cache": {"kv_tokens": 256},
        "schedule": {"max_model_len": LENGTH},
    }
    return build_engine(ServeConfig.load(None, settings), EPGroup.single())


def serve(
    loaded: Engine,
    asked: list[Request],
    *,
    size: int = 16,
    tokens: int = 4096,
    rows: int = 8,
    budget: int = 512,
    chunk: int | None = None,
    prefix: bool = False,
    together: bool = True,
) -> Ran:
    """All requests at once, or (together False) one after the other."""
    model = loaded.runner.model
    cache = BlockCache(tokens // size, size, rows, prefix)
    pages = model.cache_spec.allocate(tokens // size, size, torch.device("cpu"))
    for layer in pages.layers:
        layer.fill_(float("nan"))  # what was never written must not be read
    limits = ScheduleLimits(rows, budget, chunk, LENGTH)
    engine = Engine(
        ModelRunner(model, pages, cache.tables), Scheduler(cache, limits), EPGroup.single()
    )
    ran = Ran()
    for outputs in steps_until_idle(engine, asked, together):
        for output in outputs:
            assert output.error is None
            name = output.request_id
            ran.tokens.setdefault(name, []).extend(output.token_ids)
            ran.logprobs.setdefault(name, []).extend(output.logprobs)
            ran.cached[name] = output.num_cached_tokens
        ran.most_running = max(ran.most_running, len(engine.scheduler.running))
    assert cache.num_available == cache.pool.num_blocks
    ran.preemptions = engine.stats().preemptions
    return ran


def must_match(got: Ran, plain: Ran) -> None:
    assert got.tokens == {name: plain.tokens[name] for name in got.tokens}
    for name, entries in got.logprobs.items():
        assert entries == plain.logprobs[name], f"request {name}: logprobs differ in some bit"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("same-tokens")
    small = {"num_hidden_layers": 3, "max_position_embeddings": 512}
    v3 = write_random_checkpoint(folder / "v3", family_config("v3", **small), tokenizer=False)
    v2 = write_random_checkpoint(folder / "v2", family_config("v2", **small), tokenizer=False)
    return {"v3": v3, "v2": v2, "bundled": BUNDLED}


@pytest.fixture(
    scope="module",
    params=[(c, d) for c in ("v3", "v2", "bundled") for d in DTYPES],
    ids=lambda p: f"{p[0]}-{p[1]}",
)
def case(
    request: pytest.FixtureRequest, checkpoints: dict[str, Path]
) -> tuple[Engine, list[Request], Ran, Path, str]:
    name, dtype = request.param
    folder = checkpoints[name]
    loaded = load(folder, dtype)
    asked = requests(loaded.runner.model.config.vocab_size, 40)
    return loaded, asked, serve(loaded, asked, together=False), folder, dtype


VARIANTS: dict[str, dict[str, Any]] = {
    "chunk-1": {"chunk": 1},
    "chunk-3": {"chunk": 3, "size": 4},
    "chunk-5": {"chunk": 5, "prefix": True},
    "chunk-64": {"chunk": 64, "budget": 70},
    "prefix-without-chunking": {"prefix": True, "budget": 4096},
    "blocks-of-4": {"size": 4, "prefix": True},
    "budget-7": {"budget": 7, "prefix": True, "size": 4},
    "company-40": {"rows": 40},
    "company-2": {"rows": 2, "prefix": True, "size": 4, "chunk": 3},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_schedules_change_no_bit(case: Any, name: str) -> None:
    loaded, asked, plain, *_ = case
    variant = VARIANTS[name]
    # One token a step is slow, and long prompts show no more than short ones.
    asked = asked[:8] if variant.get("chunk") == 1 else asked[: 40 if name == "company-40" else 16]
    ran = serve(loaded, asked, **variant)
    must_match(ran, plain)
    if name == "company-40":
        assert ran.most_running == 40
    if variant.get("prefix"):
        assert max(ran.cached.values()) >= 3 * variant.get("size", 16)
        assert len(set(ran.cached.values())) > 2, "hits of several lengths"


def test_hits_on_what_another_run_computed_change_no_bit(case: Any) -> None:
    """One after the other, so that nearly all of each prompt is hit, with rests of every length."""
    loaded, asked, plain, *_ = case
    ran = serve(loaded, asked[:16], size=4, prefix=True, together=False, chunk=5)
    must_match(ran, plain)
    assert sum(ran.cached.values()) > 100


def test_preemption_changes_no_bit(case: Any) -> None:
    loaded, asked, *_ = case
    long = [
        msgspec.structs.replace(r, sampling=msgspec.structs.replace(r.sampling, max_tokens=26))
        for r in asked[:8]
    ]
    plain = serve(loaded, long, together=False)
    for prefix in (True, False):
        ran = serve(loaded, long, size=4, tokens=128, rows=16, prefix=prefix, chunk=9)
        must_match(ran, plain)
        assert ran.preemptions > 0


def test_redundant_experts_change_no_bit(case: Any) -> None:
    _, asked, plain, folder, dtype = case
    experts = case[0].runner.model.config.n_routed_experts
    for redundant in (3, experts):
        loaded = load(folder, dtype, redundant)
        must_match(serve(loaded, asked[:12], chunk=5, prefix=True, size=4), plain)


def test_the_comparison_can_fail(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot that is wrong by one must show."""
    loaded, asked, plain, *_ = case
    build: Callable[..., Any] = ModelRunner.build

    def wrong(self: ModelRunner, plan: Any) -> Any:
        batch = build(self, plan)
        if batch.forward.num_tokens > 3:
            slots = batch.forward.slot_mapping
            slots[1:3] = slots[1:3].flip(0)
        return batch

    monkeypatch.setattr(ModelRunner, "build", wrong)
    with pytest.raises(AssertionError):
        must_match(serve(loaded, asked[:6]), plain)
