"""Rounds whose tokens stay where they were chosen draft what rounds on the host draft, in as many
rounds, with one look at what came of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from speculate_world import pick_there, requests
from torch import Tensor

from ep.group import EPGroup
from models import crossing
from models.deepseek.random_checkpoint import write_random_checkpoint
from models.deepseek.random_families import family_config
from moeserve.build import build_engine
from moeserve.config import ServeConfig
from moeserve.engine import Engine
from moeserve.row_draws import RowDraws
from moeserve.sequence import SamplingNeeds
from moeserve.sequence import _needs as needs_of
from moeserve.speculate import rounds_ahead
from moeserve.speculate.mtp import MtpDrafter

SINGLE = EPGroup.single()
LENGTH = 96


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
        found.append(len(parts))
        return brought(parts)

    monkeypatch.setattr(rounds_ahead, "brought", counted)
    return found


class Seen:
    """What is drafted after each sequence, and the rows of each round."""

    def __init__(self, drafter: MtpDrafter, monkeypatch: pytest.MonkeyPatch) -> None:
        self.drafts: dict[tuple[str, int], tuple[int, ...]] = {}
        self.steps: list[list[int]] = []
        propose, begin = drafter.propose, drafter._begin_round

        def noted(asks: Any, depth: int, max_tokens: int | None = None) -> Any:
            trees = propose(asks, depth, max_tokens)
            for ask, tree in zip(asks, trees, strict=True):
                self.drafts[ask.sequence.request_id, ask.sequence.num_tokens] = tree.tokens
            return trees

        def counted(number: int, rows: int) -> None:
            if not number:
                self.steps.append([])
            self.steps[-1].append(rows)
            begin(number, rows)

        monkeypatch.setattr(drafter, "propose", noted)
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
        seen = Seen(drafter, monkeypatch)
        for request in asked:
            engine.add_request(request)
        found.append((run(engine), seen))
        assert len(drafter._picker._said) == (there and (2 if rule == "rejection" else 1))
    assert len(looks) > (9 if rule == "same" else 0)  # steps whose drafts stayed where they were
    (want, host), (got, device) = found
    assert got == want and len(want) == len(asked)
    assert device.drafts == host.drafts
    lengths = {len(tokens) for tokens in host.drafts.values()}
    assert lengths == {0, 1, 2, 3}
    told = capsys.readouterr().err
    assert told.count("penalties, biases, min_tokens or a limit on thinking") == 1
    assert told.count("a temperature, and rule rejection") == (rule == "rejection")


def test_as_many_rounds_with_rows_of_those_that_may_draft_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, looks: list[int]
) -> None:
    engine = open_engine(folder, True)
    assert engine.speculator is not None
    drafter: Any = engine.speculator.drafter
    seen = Seen(drafter, monkeypatch)
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
    seen = Seen(drafter, monkeypatch)
    request = requests(64, 1, LENGTH)[0]
    engine.add_request(request)
    engine.step()
    assert seen.steps[-1][1:] == [1, 0] and calls == [1, 1]
    assert "as asked" in str(drafter.failure)
    assert set(seen.drafts.values()) == {()} and engine.failure is None
    assert engine.speculator.num_failures == 1
