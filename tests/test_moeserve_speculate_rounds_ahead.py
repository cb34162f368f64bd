"""Rounds whose tokens stay where they were chosen draft what rounds on the host draft, in as many
rounds, with one look at what came of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from speculate_world import pick_there, requests
from torch import Tensor

from ep.group import EPGroup
from models import crossing
from models.deepseek.random_checkpoint import write_random_checkpoint
from models.deepseek.random_families import family_config
from moeserve import engine as engine_module
from moeserve.build import build_engine
from moeserve.config import ServeConfig
from moeserve.engine import Engine
from moeserve.row_draws import RowDraws
from moeserve.sequence import SamplingNeeds
from moeserve.sequence import _needs as needs_of
from moeserve.speculate import rounds_ahead

SINGLE = EPGroup.single()
LENGTH = 96
TINY = Path(__file__).parents[1] / "checkpoints" / "tiny"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = family_config("v3", num_hidden_layers=2, vocab_size=64)
    return write_random_checkpoint(tmp_path_factory.mktemp("v3"), config, tokenizer=False)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Each time that what was drafted is brought over."""
    found: list[int] = []
    brought = crossing.brought

    def counted(parts: Any) -> Any:
        if parts:
            found.append(len(parts))
        return brought(parts)

    for module in (rounds_ahead, engine_module):
        monkeypatch.setattr(module, "brought", counted)
    return found


class Seen:
    """What is drafted after each sequence, the rows of each round, and the steps that were judged
    on the device."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.drafts: dict[tuple[str, int], tuple[int, ...]] = {}
        self.steps: list[list[int]] = []
        self.late = 0
        assert engine.speculator is not None
        drafter: Any = engine.speculator.drafter
        begin, ask, step = drafter._begin_round, drafter.ask_late, engine.step

        def noted() -> Any:
            outputs = step()
            for sequence in engine.scheduler.running:
                drafts = () if sequence.drafts is None else sequence.drafts.tokens
                self.drafts[sequence.request_id, sequence.num_tokens] = drafts
            return outputs

        def asked(*args: Any) -> Any:
            self.late += 1
            return ask(*args)

        def counted(number: int, rows: int) -> None:
            if not number:
                self.steps.append([])
            self.steps[-1].append(rows)
            begin(number, rows)

        monkeypatch.setattr(engine, "step", noted)
        monkeypatch.setattr(drafter, "ask_late", asked)
        monkeypatch.setattr(drafter, "_begin_round", counted)


def open_engine(folder: Path, there: bool, rule: str = "same", kv_tokens: int = 224) -> Engine:
    config = ServeConfig.load(
        None,
        {
            "model": {"checkpoint": folder, "kernels": "torch"},
            "cache": {"kv_tokens": kv_tokens},
            "schedule": {"max_model_len": LENGTH, "max_num_sequences": 5, "token_budget": 40},
            "speculate": {"method": "mtp:3", "rule": rule},
            "engine": {"quiet": True},
        },
    )
    engine = build_engine(config, SINGLE)
    assert engine.speculator is not None
    drafter: Any = engine.speculator.drafter
    assert drafter._picker.pick is None  # on CPUs the host chooses
    drafter._picker.pick = pick_there if there else None
    return engine


def run(engine: Engine) -> dict[str, Any]:
    said: dict[str, Any] = {}
    for _ in range(400):
        if not engine.has_work:
            return said
        for output in engine.step():
            tokens, logprobs, _ = said.get(output.request_id, ((), (), None))
            said[output.request_id] = (
                tokens + output.token_ids, logprobs + output.logprobs, output.finish_reason
            )  # fmt: skip
        assert engine.failure is None
        assert engine.speculator is not None and engine.speculator.failure is None
    raise AssertionError("there is still work")


def same_drafts(device: Seen, host: Seen) -> None:
    """Before the host knows what was accepted it may give a sequence more or fewer drafts than
    behind it; of both the first ones are the same."""
    assert device.drafts.keys() == host.drafts.keys()
    pairs = [(device.drafts[at], drafts) for at, drafts in host.drafts.items()]
    for mine, theirs in pairs:
        least = min(len(mine), len(theirs))
        assert mine[:least] == theirs[:least]
    assert sum(len(mine) != len(theirs) for mine, theirs in pairs) <= len(pairs) // 20


@pytest.mark.parametrize("rule", ["same", "rejection"])
def test_drafts_are_those_of_rounds_on_the_host(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    rule: str,
    capsys: pytest.CaptureFixture[str],
    looks: list[int],
) -> None:
    """Requests of every kind, chunks, preemption, tokens that end an output amid its drafts. Those
    that ask for more than the device can do go round by round, and are named once."""
    asked = requests(64, 12 if rule == "same" else 8, LENGTH, 12)
    edited = [bool(needs_of(request.sampling) & SamplingNeeds.EDITED) for request in asked]
    last = rule == "same"  # of these all but the first steps are the host's
    asked = [
        r for turn in (not last, last) for r, e in zip(asked, edited, strict=True) if e is turn
    ]
    found = []
    for there in (False, True):
        engine = open_engine(folder, there, rule)
        assert engine.speculator is not None
        looks.clear()
        drafter: Any = engine.speculator.drafter
        seen = Seen(engine, monkeypatch)
        for request in asked:
            engine.add_request(request)
        found.append((run(engine), seen))
        assert len(drafter._picker._said) == (there and (2 if rule == "rejection" else 1))
    assert len(looks) > (9 if rule == "same" else 0)  # steps whose drafts stayed where they were
    (want, host), (got, device) = found
    assert got == want and len(want) == len(asked)
    assert (device.late > 5 or not last) and device.late <= len(looks) and not host.late
    same_drafts(device, host)
    lengths = {len(tokens) for tokens in host.drafts.values()}
    assert lengths == {0, 1, 2, 3}
    told = capsys.readouterr().err
    assert told.count("penalties, biases, min_tokens or a limit on thinking") == 1
    assert told.count("a temperature, and rule rejection") == (rule == "rejection")


@pytest.mark.usefixtures("one_thread")
def test_what_is_accepted_there_is_what_the_host_accepts(
    monkeypatch: pytest.MonkeyPatch, looks: list[int]
) -> None:
    """A trained layer, whose drafts are accepted in part. The device is looked at once a step."""
    found = []
    for there in (False, True):
        engine = open_engine(TINY, there, kv_tokens=1024)
        seen = Seen(engine, monkeypatch)
        for number, request in enumerate(requests(300, 6, LENGTH, 40)):
            if not needs_of(request.sampling) & SamplingNeeds.EDITED:
                text = "The engine serves experts on every rank. " * (1 + number % 3)
                tokens = tuple(text.encode())[: LENGTH - 20]
                engine.add_request(msgspec.structs.replace(request, prompt_token_ids=tokens))
        looks.clear()
        said = run(engine)
        counters = engine.scheduler.counters
        found.append((said, seen, counters.drafted_tokens, counters.accepted_tokens))
    (want, host, drafted, accepted), (got, device, drafted_there, accepted_there) = found
    assert got == want
    same_drafts(device, host)
    assert device.late == len(looks) > 5
    assert drafted > accepted > 10 and 0 < accepted_there <= drafted_there
    assert abs(accepted - accepted_there) <= accepted // 10


def test_as_many_rounds_with_rows_of_those_that_may_draft_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, looks: list[int]
) -> None:
    engine = open_engine(folder, True)
    assert engine.speculator is not None
    drafter: Any = engine.speculator.drafter
    seen = Seen(engine, monkeypatch)
    assert drafter.propose([], 3) == [] and seen.steps == [[0, 0, 0]]
    for request in requests(64, 5, LENGTH):  # none of them wants the host
        engine.add_request(request)
    looks.clear()
    seen.steps.clear()
    run(engine)
    # Fewer than 3 where nobody has room for more; the first one keeps up with prompts.
    assert {len(rows) for rows in seen.steps} == {1, 2, 3}
    assert all(rows == sorted(rows, reverse=True) for rows in seen.steps)
    assert max(rows[-1] for rows in seen.steps if len(rows) == 3) > 0
    assert len(looks) == len(seen.steps)


def test_a_round_that_cannot_be_chosen_from_costs_this_ranks_drafts_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(folder, True)
    assert engine.speculator is not None
    drafter: Any = engine.speculator.drafter
    calls: list[int] = []

    def broken(logits: Tensor, draws: RowDraws | None) -> tuple[Tensor, Tensor]:
        calls.append(len(logits))
        if len(calls) % 2 == 0:
            raise RuntimeError("as asked")
        return pick_there(logits, draws)

    drafter._picker.pick = broken
    seen = Seen(engine, monkeypatch)
    request = requests(64, 1, LENGTH)[0]
    engine.add_request(request)
    engine.step()
    assert seen.steps[-1][1:] == [1, 0] and calls == [1, 1]
    assert "as asked" in str(drafter.failure)
    assert set(seen.drafts.values()) == {()} and engine.failure is None
    assert engine.speculator.num_failures == 1
