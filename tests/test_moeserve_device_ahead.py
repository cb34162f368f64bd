"""Planning ahead changes when tokens are read, and no token."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from ep.group import EPGroup
from models.deepseek.random_checkpoint import write_random_checkpoint
from models.deepseek.random_families import family_config
from moeserve.build import build_engine
from moeserve.config import ServeConfig
from moeserve.device.ahead import AheadEngine, AheadScheduler, known_on_device, stand_in
from moeserve.device.api import ReplayedApi
from moeserve.device.opening import goes_ahead, open_graphs
from moeserve.device.staging import Staging
from moeserve.engine import Engine
from moeserve.errors import ConfigError
from moeserve.request import FinishReason, Request, SamplingParams, TokenOutput
from moeserve.startup import prepare

SINGLE = EPGroup.single()
GREEDY: dict[str, Any] = {"temperature": 0.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = family_config("v3", num_hidden_layers=2, vocab_size=64, num_nextn_predict_layers=0)
    return write_random_checkpoint(tmp_path_factory.mktemp("v3"), config, tokenizer=False)


def settings(folder: Path, ahead: bool, **sections: dict[str, Any]) -> ServeConfig:
    base: dict[str, dict[str, Any]] = {
        "model": {"checkpoint": folder},
        "cache": {"kv_tokens": 112},
        "schedule": {"max_model_len": 96, "max_num_sequences": 4, "token_budget": 24},
    }
    merged = base | sections
    merged["engine"] = {"quiet": True, "ahead": ahead} | merged.get("engine", {})
    return ServeConfig.load(None, merged)


def open_engine(folder: Path, ahead: bool, **sections: dict[str, Any]) -> Engine:
    engine = build_engine(settings(folder, ahead, **sections), SINGLE)
    assert isinstance(engine, AheadEngine) is ahead
    assert isinstance(engine.scheduler, AheadScheduler) is ahead
    return engine


def ask(engine: Engine, name: str, prompt: list[int], **sampling: Any) -> None:
    params = SamplingParams(**({"ignore_eos": True, "max_tokens": 8} | sampling))
    engine.add_request(Request(request_id=name, prompt_token_ids=tuple(prompt), sampling=params))


def run(engine: Engine, most: int = 400) -> dict[str, list[TokenOutput]]:
    said: dict[str, list[TokenOutput]] = {}
    for _ in range(most):
        if not engine.has_work:
            return said
        for output in engine.step():
            said.setdefault(output.request_id, []).append(output)
        assert engine.failure is None
    raise AssertionError("there is still work")


def plain(said: dict[str, list[TokenOutput]]) -> dict[str, Any]:
    """What a client sees of each: tokens, log-probabilities, how it ended."""
    return {
        name: (
            [t for o in outputs for t in o.token_ids],
            [x for o in outputs for x in o.logprobs],
            outputs[-1].finish_reason,
            outputs[-1].stop_token_id,
            [x for o in outputs for x in (o.prompt_logprobs or ())],
        )
        for name, outputs in said.items()
    }


def mixture(engine: Engine, seed: int = 3) -> None:
    """Long and short prompts with shared beginnings, every kind of sampling, stops."""
    rng = random.Random(seed)
    shared = [rng.randrange(64) for _ in range(33)]
    kinds: list[dict[str, Any]] = [
        GREEDY,
        GREEDY | {"stop_token_ids": tuple(range(0, 64, 5))},
        {"temperature": 1.0, "seed": 3, "top_k": 9, "top_p": 0.9},
        GREEDY | {"repetition_penalty": 1.3, "presence_penalty": 0.4},
        GREEDY | {"logprobs": 2},
        GREEDY | {"prompt_logprobs": 1},
        {"temperature": 0.8, "seed": 9, "min_tokens": 3, "stop_token_ids": tuple(range(32))},
        GREEDY | {"max_tokens": 1},
    ]
    for number in range(16):
        own = [rng.randrange(64) for _ in range(rng.randrange(1, 20))]
        prompt = (shared if number % 3 == 0 else []) + own
        sampling = {"max_tokens": rng.randrange(2, 30)} | kinds[number % len(kinds)]
        ask(engine, str(number), prompt, **sampling)


@pytest.mark.parametrize("seed", [3, 4, 5])
def test_every_kind_of_request_gets_the_same(folder: Path, seed: int) -> None:
    one, other = open_engine(folder, False), open_engine(folder, True)
    mixture(one, seed)
    mixture(other, seed)
    want, got = plain(run(one)), plain(run(other))
    assert len(want) == 16 and got == want
    ends = {told[2] for told in want.values()}
    assert ends == {FinishReason.STOP, FinishReason.LENGTH}
    a, b = one.scheduler.counters, other.scheduler.counters
    assert (a.output_tokens, a.prompt_tokens, a.finished) == (
        b.output_tokens, b.prompt_tokens, b.finished
    )  # fmt: skip
    assert isinstance(other.scheduler, AheadScheduler)
    if seed == 3:  # so that the others may go otherwise
        assert a.preemptions > 0 and b.preemptions > 0  # the pool is small
        assert other.scheduler.num_wasted_rows > 0
    pool, tree = other.scheduler.cache.pool, other.scheduler.cache.tree
    assert pool.num_used == tree.num_idle  # nobody holds a block any more


def test_a_step_is_read_when_the_next_one_is_under_way(folder: Path) -> None:
    engine = open_engine(folder, True)
    ask(engine, "a", [1, 2, 3], **GREEDY, max_tokens=3)
    assert engine.step() == [] and engine.has_work  # nothing is read yet
    sequence = engine.scheduler.running[0]
    assert sequence.tokens[-1] == stand_in(0)
    first = engine.step()
    assert [len(o.token_ids) for o in first] == [1] and sequence.tokens[-2] >= 0
    assert [len(o.token_ids) for o in engine.step()] == [1]
    # The last token is under way and nothing else is to be computed: now it is waited for.
    (last,) = engine.step()
    assert last.finish_reason is FinishReason.LENGTH and not engine.has_work
    assert engine.num_steps == 3


def test_aborts_between_steps(folder: Path) -> None:
    engine = open_engine(folder, True)
    for name in "abc":
        ask(engine, name, [4, 5, ord(name) % 64], **GREEDY, max_tokens=20)
    said: list[TokenOutput] = []
    for number in range(6):
        said += engine.step()
        if number == 2:
            engine.abort(["b", "nobody"])
        if number == 4:
            engine.abort(["a"], FinishReason.STOP)
    rest = run(engine)
    ends = {o.request_id: o.finish_reason for o in said if o.finish_reason}
    ends |= {name: outputs[-1].finish_reason for name, outputs in rest.items()}
    assert ends == {
        "a": FinishReason.STOP, "b": FinishReason.ABORT, "c": FinishReason.LENGTH
    }  # fmt: skip
    tokens = [t for o in said + rest["c"] if o.request_id == "c" for t in o.token_ids]
    alone = open_engine(folder, False)
    ask(alone, "c", [4, 5, ord("c") % 64], **GREEDY, max_tokens=20)
    assert tokens == plain(run(alone))["c"][0]
    assert engine.scheduler.cache.pool.num_used == engine.scheduler.cache.tree.num_idle


def test_a_failed_forward_ends_its_requests_only(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(folder, True)
    ask(engine, "a", [1, 2, 3], **GREEDY)
    said = [*engine.step(), *engine.step()]
    forward = engine.runner.model.forward

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("as asked")

    monkeypatch.setattr(engine.runner.model, "forward", broken)
    said += engine.step()
    monkeypatch.setattr(engine.runner.model, "forward", forward)
    said += engine.step()
    assert [len(o.token_ids) for o in said] == [1, 1, 0]
    assert said[-1].finish_reason is FinishReason.ERROR and "as asked" in str(said[-1].error)
    ask(engine, "b", [1, 2, 3], **GREEDY)
    assert len(plain(run(engine))["b"][0]) == 8


def test_with_captured_steps(folder: Path) -> None:
    config = settings(folder, True, model={"checkpoint": folder, "kernels": "torch"})
    engine = build_engine(config, SINGLE)
    api = ReplayedApi()
    engine.runner.staging = Staging(api)
    engine.runner.graphs = open_graphs(config, SINGLE, engine.runner, 96, 0, [], api=api)
    plainly = build_engine(
        settings(folder, False, model={"checkpoint": folder, "kernels": "torch"}), SINGLE
    )
    for each in (engine, plainly):
        for name, prompt in (("a", [1, 2, 3]), ("b", [9] * 20)):
            ask(each, name, prompt, **GREEDY, max_tokens=12)
    assert plain(run(engine)) == plain(run(plainly))
    assert engine.runner.graphs is not None and engine.runner.graphs.num_replays > 5


def test_stand_ins_become_tokens_on_the_device() -> None:
    chosen = torch.tensor([40, 41, 42])
    ids = torch.tensor([7, stand_in(2), 0, stand_in(0)])
    assert known_on_device(ids, chosen).tolist() == [7, 42, 0, 40]


def test_it_is_refused_beside_speculation(folder: Path) -> None:
    with pytest.raises(ConfigError, match="engine.ahead='on': speculation drafts from"):
        prepare(settings(folder, True, speculate={"method": "ngram:2"}), SINGLE)


class Named:
    """A dispatcher. mask: of ranks, where it can leave some out."""

    name = "some"

    def __init__(self, mask: list[bool] | None) -> None:
        self.active_mask = lambda: mask


@pytest.mark.parametrize(
    ("asked", "on_cpu", "speculates", "mask", "note"),
    [
        ("auto", True, False, None, None),
        ("auto", False, False, None, "each step is planned while the one before it runs (auto:"),
        ("on", True, False, None, "each step is planned while the one before it runs (asked"),
        ("off", False, False, None, None),
        ("auto", False, True, None, "off; speculation drafts from the tokens of the step before"),
        ("auto", False, False, [True], "off; dispatcher 'some' is asked after each step"),
        ("on", False, False, [True], "off; dispatcher 'some' is asked after each step"),
    ],
)
def test_what_auto_becomes(
    asked: str, on_cpu: bool, speculates: bool, mask: Any, note: str | None
) -> None:
    notes: list[str] = []
    dispatcher: Any = Named(mask)
    found = goes_ahead(asked, on_cpu, speculates, dispatcher, notes)
    assert found is (note is not None and note.startswith("each"))
    assert len(notes) == (note is not None) and notes[:1] == [
        n for n in notes if n.startswith(f"ahead: {note}")
    ]


@pytest.mark.parametrize("seed", range(4))
def test_whatever_clients_do_tokens_are_those_of_plain_steps(folder: Path, seed: int) -> None:
    """Requests come and are given up at any step, in a pool too small for all: who is not given up
    gets what it gets without planning ahead, who is, a beginning of it; nothing is left behind."""
    rng = random.Random(seed)
    asked: list[tuple[str, list[int], dict[str, Any]]] = []
    shared = [rng.randrange(64) for _ in range(33)]
    for number in range(14):
        prompt = shared[: rng.choice((0, 16, 33))] + [rng.randrange(64)] * rng.randrange(1, 9)
        kind: dict[str, Any] = rng.choice(
            (
                GREEDY,
                GREEDY | {"logprobs": 1},
                {"temperature": 0.9, "seed": number},
                GREEDY | {"stop_token_ids": tuple(range(0, 64, 7)), "logprobs": 2},
                GREEDY | {"frequency_penalty": 0.5},
            )  # fmt: skip
        )
        asked.append((str(number), prompt, {"max_tokens": rng.randrange(1, 24)} | kind))
    plainly = open_engine(folder, False)
    for name, prompt, sampling in asked:
        ask(plainly, name, prompt, **sampling)
    want = plain(run(plainly))
    engine = open_engine(folder, True)
    said: dict[str, list[TokenOutput]] = {}
    given_up: set[str] = set()
    coming = list(asked)
    for _ in range(400):
        for _ in range(min(rng.randrange(3), len(coming))):
            name, prompt, sampling = coming.pop(0)
            ask(engine, name, prompt, **sampling)
        if rng.random() < 0.2:
            known = [s.request_id for s in (*engine.scheduler.running, *engine.scheduler.waiting)]
            given_up |= set(leaving := rng.sample(known, min(1, len(known))))
            engine.abort(leaving)
        for output in engine.step():
            said.setdefault(output.request_id, []).append(output)
        assert engine.failure is None
        if not coming and not engine.has_work:
            break
    got = plain(said)
    assert got.keys() == want.keys() and given_up
    for name, told in got.items():
        if told[2] is not FinishReason.ABORT:
            assert told == want[name]
            continue
        assert name in given_up
        assert told[0] == want[name][0][: len(told[0])]
        assert told[1] == want[name][1][: len(told[1])]
    assert any(told[2] is FinishReason.ABORT for told in got.values())
    assert engine.scheduler.cache.pool.num_used == engine.scheduler.cache.tree.num_idle
