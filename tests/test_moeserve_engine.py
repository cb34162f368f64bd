"""The engine on the toy model, whose next token hashes what lies in the cache: batches, runner,
step, failures, stopping."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from ep.group import EPGroup
from ep.load import DECODE, LoadWindow
from moeserve.batch import build_batch
from moeserve.cache import BlockCache
from moeserve.engine import Engine
from moeserve.errors import EngineFailed, NotReady
from moeserve.plan import StepPlan
from moeserve.recorder import StepRecorder
from moeserve.request import FinishReason, Request, SamplingParams
from moeserve.runner import ModelRunner
from moeserve.scheduler import ScheduleLimits, Scheduler
from moeserve.toy_model import ToyConfig, ToyModel


def make(
    *,
    model: ToyModel | None = None,
    blocks: int = 64,
    size: int = 4,
    rows: int = 8,
    budget: int = 32,
    chunk: int | None = None,
    length: int = 128,
    prefix: bool = True,
) -> Engine:
    model = model or ToyModel()
    cache = BlockCache(blocks, size, rows, prefix)
    pages = model.cache_spec.allocate(blocks, size, torch.device("cpu"))
    pages.layers[0].fill_(float("nan"))  # what was never written must not be read
    limits = ScheduleLimits(
        rows, budget, chunk, length, model.config.vocab_size, frozenset(model.config.eos_token_ids)
    )
    runner = ModelRunner(model, pages, cache.tables)
    return Engine(runner, Scheduler(cache, limits), EPGroup.single())


def ask(name: str, prompt: list[int], num: int = 5, **fields: object) -> Request:
    fields = {"temperature": 0.0} | fields
    sampling = SamplingParams(max_tokens=num, **fields)  # type: ignore[arg-type]
    return Request(request_id=name, prompt_token_ids=tuple(prompt), sampling=sampling)


def finish(engine: Engine) -> dict[str, list[int]]:
    got: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            got.setdefault(output.request_id, []).extend(output.token_ids)
    return got


# -- batches ------------------------------------------------------------------------------------


def slow_batch(plan: StepPlan, tables: np.ndarray, size: int) -> dict[str, list[int]]:
    """The twin of build_batch: one row after the other."""
    out: dict[str, list[int]] = {"token_ids": [], "positions": [], "slots": [], "starts": [0]}
    for s, start, count, row in zip(
        plan.sequences, plan.starts, plan.counts, plan.rows, strict=True
    ):
        for p in range(start, start + count):
            out["token_ids"].append(s.tokens[p])
            out["positions"].append(p)
            out["slots"].append(int(tables[row, p // size]) * size + p % size)
        out["starts"].append(out["starts"][-1] + count)
    return out


@pytest.mark.parametrize("size", [1, 3, 4, 16])
@pytest.mark.parametrize("chunk", [1, 3, None])
def test_batches_are_the_slow_twin(size: int, chunk: int | None) -> None:
    engine = make(size=size, chunk=chunk, budget=17, blocks=200)
    rng = random.Random(size)
    for i in range(6):
        prompt = [rng.randrange(97) for _ in range(rng.randrange(1, 40))]
        engine.add_request(ask(str(i), prompt, 8))
    scheduler = engine.scheduler
    while scheduler.has_work:
        plan = scheduler.schedule()
        tables = scheduler.cache.tables.matrix
        batch = build_batch(plan, tables, size).forward
        want = slow_batch(plan, tables, size)
        assert batch.token_ids.tolist() == want["token_ids"]
        assert batch.positions.tolist() == want["positions"]
        assert batch.slot_mapping.tolist() == want["slots"]
        assert batch.query_start.tolist() == want["starts"]
        contexts = [a + b for a, b in zip(plan.starts, plan.counts, strict=True)]
        assert batch.context_len.tolist() == contexts
        assert batch.max_context_len == max(contexts)
        assert batch.total_context == sum(p + 1 for p in want["positions"])
        assert batch.max_query_len == max(plan.counts)
        assert batch.block_tables.shape == (len(contexts), -(-max(contexts) // size))
        assert batch.logits_rows.tolist() == [want["starts"][i + 1] - 1 for i in plan.sampled]
        dtypes = (batch.token_ids, batch.positions, batch.slot_mapping, batch.logits_rows)
        assert {x.dtype for x in dtypes} == {torch.int64}
        small = (batch.query_start, batch.context_len, batch.block_tables)
        assert {x.dtype for x in small} == {torch.int32}
        built = engine.runner.build(plan)
        logits = engine.runner.forward(built).logits
        scheduler.commit(plan, engine.runner.choose(plan, built, logits))


def test_an_empty_batch_is_a_batch() -> None:
    engine = make()
    batch = engine.runner.build(StepPlan()).forward
    assert (batch.num_tokens, batch.num_sequences) == (0, 0)
    assert batch.query_start.tolist() == [0] and batch.logits_rows.dtype == torch.int64
    assert (batch.max_query_len, batch.max_context_len, batch.total_context) == (0, 0, 0)
    assert engine.runner.forward(engine.runner.build(StepPlan())).logits.shape == (0, 97)


# -- steps --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_any_mix_gives_what_each_request_gives_alone(seed: int) -> None:
    rng = random.Random(seed)
    engine = make(
        blocks=rng.choice([32, 40, 200]),
        size=rng.choice([4, 5]),
        chunk=rng.choice([None, 1, 3, 5]),
        prefix=seed % 2 == 0,
    )
    base = [rng.randrange(97) for _ in range(40)]
    want = {}
    for i in range(24):
        prompt = base[: rng.randrange(41)] + [rng.randrange(97) for _ in range(rng.randrange(1, 9))]
        num = rng.randrange(1, 50)
        model = engine.runner.model
        assert isinstance(model, ToyModel)
        want[str(i)] = model.continue_prompt(prompt, num)
        engine.add_request(ask(str(i), prompt, num))
    assert finish(engine) == want
    stats = engine.stats()
    assert stats.num_free_blocks == engine.scheduler.cache.pool.num_blocks
    assert (stats.finished, stats.num_running, stats.num_used_blocks) == (24, 0, 0)
    assert stats.output_tokens == sum(map(len, want.values()))


def test_random_sampling_does_not_depend_on_company_or_preemption() -> None:
    def run(engine: Engine, names: list[int]) -> dict[str, list[int]]:
        for i in names:
            params = {"temperature": 0.8 + i / 10, "top_p": 0.9, "seed": i if i % 2 else None}
            engine.add_request(ask(str(i), [i] * (3 + i), 30, **params))
        return finish(engine)

    together = run(make(blocks=32, rows=8), list(range(8)))
    for i in range(8):
        assert run(make(blocks=200), [i]) == {str(i): together[str(i)]}
    pressed = make(blocks=32, rows=8)
    run(pressed, list(range(8)))
    assert pressed.stats().preemptions > 0


def test_logprobs_and_prompt_logprobs_do_not_depend_on_chunks_or_preemption() -> None:
    prompt = [(5 * i) % 97 for i in range(30)]

    def run(engine: Engine, company: int) -> list[object]:
        for i in range(company):
            engine.add_request(ask(f"c{i}", prompt[: 20 + i], 40))
        engine.add_request(ask("x", prompt, 12, logprobs=2, prompt_logprobs=3))
        found: list[object] = []
        while engine.has_work:
            for output in engine.step():
                if output.request_id == "x":
                    found.extend(output.logprobs)
                    if output.prompt_logprobs is not None:
                        found.append(output.prompt_logprobs)
        return found

    plain = run(make(), 0)
    assert len(plain) == 13
    told = plain[0] if isinstance(plain[0], tuple) else plain[1]
    assert isinstance(told, tuple) and told[0] is None and len(told) == 30
    assert [entry.token_id for entry in told[1:]] == prompt[1:]
    for chunk in (1, 3, 7):
        assert run(make(chunk=chunk), 0) == plain
    assert run(make(chunk=5, blocks=33, rows=8), 6) == plain
    cached = make()
    finish_with = ask("warm", prompt, 2)
    cached.add_request(finish_with)
    finish(cached)
    assert run(cached, 0) == plain


def test_eos_and_min_tokens() -> None:
    model = ToyModel(ToyConfig(vocab_size=5, eos_token_ids=(0, 2)))
    engine = make(model=model)
    engine.add_request(ask("a", [1, 3], 40))
    engine.add_request(ask("b", [1, 3], 40, min_tokens=12))
    got = finish(engine)
    assert got["a"] == model.continue_prompt([1, 3], 40) and got["a"][-1] in (0, 2)
    assert len(got["b"]) >= 12 and not {0, 2} & set(got["b"][:12])


# -- failures -----------------------------------------------------------------------------------


class Brittle(ToyModel):
    """Fails in the forwards whose numbers are in `fails`, gives NaN rows in those in `nans`."""

    fails: set[int] = set()
    nans: set[int] = set()

    def forward(self, batch, cache, observer=None):  # type: ignore[no-untyped-def]
        out = super().forward(batch, cache, observer)
        if self.num_forwards in self.fails:
            raise RuntimeError("the chip is on fire\nwith details")
        if self.num_forwards in self.nans:
            out.logits[0] = float("nan")
        return out


def test_a_failed_forward_ends_its_requests_and_alone_the_engine_goes_on() -> None:
    model = Brittle()
    model.fails = {2}
    engine = make(model=model, rows=2)
    for name in "abc":
        engine.add_request(ask(name, [1, 2, 3], 4))
    ends = {}
    got: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            got.setdefault(output.request_id, []).extend(output.token_ids)
            ends[output.request_id] = (output.finish_reason, output.error)
    reason = "the forward pass failed: RuntimeError: the chip is on fire"
    assert ends["a"] == ends["b"] == (FinishReason.ERROR, reason)
    assert ends["c"] == (FinishReason.LENGTH, None)
    assert got["c"] == model.continue_prompt([1, 2, 3], 4)
    assert engine.stats().num_free_blocks == 64
    model.fails = set(range(1000))
    for i in range(5):
        engine.add_request(ask(str(i), [1], 4))
    with pytest.raises(EngineFailed, match="on fire"):
        finish(engine)
    assert not engine.has_work


def test_logits_that_are_not_finite_end_one_request() -> None:
    model = Brittle()
    model.nans = {2}
    engine = make(model=model)
    engine.add_request(ask("a", [1, 2, 3], 4))
    engine.add_request(ask("b", [1, 2, 4], 4))
    ends = {}
    while engine.has_work:
        for output in engine.step():
            ends[output.request_id] = (output.finish_reason, output.error)
    assert ends["a"] == (FinishReason.ERROR, "the model's logits are not finite")
    assert ends["b"][0] is FinishReason.LENGTH


def test_a_failed_sampling_ends_only_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()
    engine.add_request(ask("a", [1], 4))
    with monkeypatch.context() as patch:
        patch.setattr("moeserve.sampler.sample", lambda *_: 1 / 0)
        (output,) = [*engine.step(), *engine.step()]
    assert output.finish_reason is FinishReason.ERROR and "ZeroDivisionError" in str(output.error)
    engine.add_request(ask("b", [1], 4))
    assert len(finish(engine)["b"]) == 4


def test_a_broken_invariant_is_said_in_the_next_vote(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()
    engine.add_request(ask("a", [1], 4))
    monkeypatch.setattr(engine.scheduler, "commit", lambda *_: [][0])
    engine.step()
    assert engine.failure is not None
    with pytest.raises(EngineFailed, match="commit failed: IndexError"):
        engine.step()


# -- stopping, stats, events --------------------------------------------------------------------


def test_stopping_waits_for_work_or_drops_it() -> None:
    engine = make()
    assert engine.step() == [] and engine.idle and not engine.stopped
    engine.add_request(ask("a", [1], 3))
    engine.request_stop()
    with pytest.raises(NotReady):
        engine.add_request(ask("b", [1], 3))
    assert sum(len(o.token_ids) for _ in range(3) for o in engine.step()) == 3
    assert not engine.stopped
    engine.step()
    assert engine.stopped
    engine = make()
    engine.add_request(ask("a", [1], 3))
    engine.step()
    engine.request_stop(drain=False)
    (output,) = engine.step()
    assert output.finish_reason is FinishReason.ABORT and engine.stopped


def test_cache_events_and_reset() -> None:
    engine = make()
    assert engine.take_cache_events() is None
    engine.add_request(ask("a", [1] * 9, 1))
    finish(engine)
    events = engine.take_cache_events()
    assert events is not None and len(events.added) == 2 and not events.removed
    assert engine.reset_prefix_cache() == 2
    events2 = engine.take_cache_events()
    assert events2 is not None and set(events2.removed) == set(events.added)


def test_expert_load_counts_real_tokens_only() -> None:
    class Routed(ToyModel):
        def forward(self, batch, cache, observer=None):  # type: ignore[no-untyped-def]
            observer.expert_picks(0, torch.ones(batch.num_tokens, 1, dtype=torch.int32))
            observer.rows_sent(0, [batch.num_tokens])
            observer.part("experts", 0.5)
            return super().forward(batch, cache, observer)

    engine = make(model=Routed())
    recorder = StepRecorder(LoadWindow(2, 3, 8))
    engine.recorder = engine.runner.recorder = recorder
    recorder.enabled = False
    engine.runner.forward(engine.runner.build(StepPlan()))
    recorder.enabled = True
    engine.add_request(ask("a", [1, 2, 3], 3))
    finish(engine)
    stats = engine.stats()
    assert stats.expert_shape == (2, 3) and stats.expert_load == (0, 5, 0, 0, 0, 0)
    assert recorder.window is not None and recorder.window.totals().sum() == 5
    assert recorder.window.totals("decode").sum() == recorder.tokens[DECODE] == 2
    assert recorder.rows_total.tolist() == [5]
    assert recorder.seconds["experts"] == 1.5 and engine.stats(with_load=False).expert_load == ()
    assert stats.part_seconds == recorder.seconds
    assert {*recorder.seconds} == {"experts", "host", "lockstep", "sampling"}


def test_a_row_that_edits_its_logits_edits_no_neighbours() -> None:
    engine = make()
    engine.add_request(ask("a", [1, 2], 6, logit_bias={5: 100.0}))
    engine.add_request(ask("b", [1, 2], 6, repetition_penalty=1.5))
    engine.add_request(ask("c", [1, 2], 6))
    got = finish(engine)
    model = engine.runner.model
    assert isinstance(model, ToyModel)
    assert got["a"] == [5] * 6
    assert got["c"] == model.continue_prompt([1, 2], 6)
