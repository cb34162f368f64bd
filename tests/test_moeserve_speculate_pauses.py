"""Steps that draft nothing, between those that do: what they leave out is never read as if it were
there, what they hold is told, and what has no room is not run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ep.group import EPGroup
from models.deepseek.random_checkpoint import write_random_checkpoint
from models.deepseek.random_families import family_config
from moeserve.build import build_engine
from moeserve.config import ServeConfig
from moeserve.engine import Engine
from moeserve.request import Request, SamplingParams
from moeserve.speculate.adaptive import AdaptiveDepth
from moeserve.speculate.mtp import MtpDrafter
from moeserve.speculate.speculator import MIXED, Speculator


class Scripted(AdaptiveDepth):
    """Depths by the step's number, over and over; holding or not where nothing is drafted."""

    looks = True
    holds = False

    def __init__(self, depths: tuple[int, ...], holding: tuple[bool, ...]) -> None:
        super().__init__(8)
        self._depths, self._holding, self._step = depths, holding, 0

    def agree_on(self, tokens: Any, rows: Any, costs: Any) -> int:
        self.depth = self._depths[self._step % len(self._depths)]
        self.holds = self._holding[self._step % len(self._holding)]
        self._step += 1
        return self.depth


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("v3")
    write_random_checkpoint(made, family_config("v3"), tokenizer=False)
    return made


def open_engine(folder: Path, method: str = "mtp") -> tuple[Engine, Speculator]:
    config = ServeConfig.load(
        None,
        {
            "model": {"checkpoint": folder},
            "cache": {"kv_tokens": 640, "block_size": 4},
            "schedule": {"max_model_len": 96, "max_num_sequences": 4, "token_budget": 24},
            "speculate": {"method": method},
            "engine": {"quiet": True},
        },
    )
    engine = build_engine(config, EPGroup.single())
    assert engine.speculator is not None
    return engine, engine.speculator


def ask(engine: Engine, name: str, prompt: list[int], max_tokens: int) -> None:
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)
    engine.add_request(Request(request_id=name, prompt_token_ids=tuple(prompt), sampling=sampling))


def run(engine: Engine) -> dict[str, tuple[int, ...]]:
    texts: dict[str, tuple[int, ...]] = {}
    while engine.has_work:
        for output in engine.step():
            texts[output.request_id] = texts.get(output.request_id, ()) + output.token_ids
    return texts


@pytest.mark.parametrize("holding", [(False,), (False, False, True), (True, False, False, True)])
@pytest.mark.parametrize("depths", [(0,) * 9 + (2,) * 7, (0, 0, 3, 0, 0, 0, 1, 2)])
def test_what_others_left_in_a_block_changes_no_draft(
    folder: Path, monkeypatch: pytest.MonkeyPatch, depths: tuple[int, ...], holding: Any
) -> None:
    """Sequences begin in pauses, take blocks from the prefix cache that pauses made, and pause
    themselves; blocks are used again and again. Whatever lay in them, drafts are the same."""
    found = []
    for fill in (0.0, float("nan"), 5.0):
        engine, speculator = open_engine(folder)
        speculator.policy = Scripted(depths, holding)
        drafter: Any = speculator.drafter
        drafter._pages.fill_(fill)
        drafts: dict[tuple[str, int], tuple[int, ...]] = {}
        propose = drafter.propose

        def noted(asks: Any, *rest: Any, propose: Any = propose, drafts: Any = drafts) -> Any:
            trees = propose(asks, *rest)
            for one, tree in zip(asks, trees, strict=True):
                drafts[one.sequence.request_id, one.sequence.num_tokens] = tree.tokens
            return trees

        monkeypatch.setattr(drafter, "propose", noted)
        rng = np.random.default_rng(3)
        common = rng.integers(3, 500, 60).tolist()
        for i in range(24):
            shared = int(rng.choice([0, 9, 24, 41]))
            own = rng.integers(3, 500, int(rng.integers(2, 20))).tolist()
            ask(engine, f"r{i}", common[:shared] + own, int(rng.integers(4, 24)))
        texts = run(engine)
        assert speculator.num_failures == 0 and engine.scheduler.counters.cached_tokens > 0
        assert drafter.memory_bytes() == 0 and not drafter._known
        found.append((texts, drafts))
    assert sum(len(tokens) for tokens in found[0][1].values()) > 100
    assert found[0] == found[1] == found[2]


def test_rows_held_are_told_in_every_vote(folder: Path) -> None:
    """A trial may begin in any step that looks: its round 0 has them, above the step's own."""
    engine, speculator = open_engine(folder)
    drafter = speculator.drafter
    assert isinstance(drafter, MtpDrafter)
    speculator.policy = Scripted((0,), (False,))
    drafter._held["r"] = 5, torch.zeros(7, 8)
    sequence: Any = SimpleNamespace(request_id="r", max_output_tokens=9, num_output_tokens=1)
    plan: Any = SimpleNamespace(sequences=[sequence], sampled=[0], num_tokens=1)
    for looks in (True, False):
        speculator.policy.looks = looks
        offered = speculator.offer(plan)
        assert len(offered) == speculator.num_columns
        assert list(offered[:3]) == [1, 6, 7]


@pytest.mark.parametrize("method", ["mtp:3", "mtp"])
def test_answers_without_room_for_a_draft_run_no_round_of_their_own(
    folder: Path, method: str
) -> None:
    engine, speculator = open_engine(folder, method)
    if method == "mtp":
        speculator.policy = Scripted((3,), (True,))
    for i in range(12):
        ask(engine, f"r{i}", [3 + i, 5, 7], 2)
    run(engine)
    stats = speculator.stats()
    assert stats.drafted_tokens == 0
    # One round each in steps with prompts, to keep up with them; none is told as deeper.
    assert sum(stats.depths[2:]) == 0 and stats.depths[0] > 0
    assert stats.rounds == stats.depths[1]
    ask(engine, "longer", [3, 5, 7], 3)
    run(engine)
    assert speculator.stats().drafted_tokens == 1


def test_short_answers_make_depth_worth_less(folder: Path) -> None:
    """Room for one draft: what three would give is not offered for long."""
    _, speculator = open_engine(folder)
    policy = speculator.policy
    assert isinstance(policy, AdaptiveDepth)
    endless = speculator._offer(["a", "b"], np.array([8, 8]))
    assert endless.expected[3] > endless.expected[1] > endless.expected[0]
    for _ in range(60):
        offer = speculator._offer(["a", "b"], np.array([1, 1]))
    assert offer.expected[:2] == endless.expected[:2] and offer.rows == endless.rows
    assert offer.expected[3] < 1.01 * offer.expected[1]
    for _ in range(60):  # nobody has room: nothing is run then, nothing is learned
        again = speculator._offer(["a", "b"], np.array([0, 0]))
    assert again == offer


def test_where_some_rank_always_has_a_prompt_costs_are_those_of_such_steps(folder: Path) -> None:
    _, speculator = open_engine(folder)
    speculator.policy = Scripted((1, 0), (True,))
    columns = np.zeros((2, speculator.num_columns), np.int64)
    columns[:, :2] = 4, 9
    for step in range(MIXED + 12):
        assert step > MIXED or not speculator.costs.is_known
        speculator.agreed(columns, 100, False)
        speculator.last_seconds = 0.001 * speculator.depth
        speculator.timed(0.030 + 0.002 * speculator._verified + speculator.last_seconds)
    costs = speculator.costs.costs()
    assert costs.step(4, 0) == pytest.approx(30e6, rel=0.02)
    assert costs.step(8, 0) == pytest.approx(32e6, rel=0.02)
    speculator.agreed(columns, 9, True)  # a step of decodes alone: from here on these count
    speculator.timed(0.030)
    before = speculator.costs.costs()
    speculator.agreed(columns, 100, False)
    speculator.timed(0.5)
    assert speculator.costs.costs() == before
