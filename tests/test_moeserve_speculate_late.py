"""Drafts behind verdicts that only the device knows: where their rows may lie, what a failure
costs, whose clock is believed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_steps import steps_until_idle
from speculate_world import pick_there

from ep.group import EPGroup
from models.crossing import brought
from moeserve import engine as engine_module
from moeserve.build import build_engine
from moeserve.config import ServeConfig
from moeserve.device.stopwatch import CudaStopwatch, HostStopwatch
from moeserve.engine import Engine
from moeserve.plan import StepPlan, StepResult
from moeserve.request import Request, SamplingParams
from moeserve.speculate.speculator import Agreed

TINY = Path(__file__).parents[1] / "checkpoints" / "tiny"
LENGTH = 90  # of a sequence; no multiple of a block
BLOCK = 16


@pytest.fixture(autouse=True)
def _one(one_thread: None) -> None:
    pass


def open_engine(method: str = "mtp:4", there: bool = True) -> Engine:
    config = ServeConfig.load(
        None,
        {
            "model": {"checkpoint": TINY},
            "cache": {"kv_tokens": 512, "block_size": BLOCK},
            "schedule": {"max_model_len": LENGTH, "max_num_sequences": 3, "token_budget": 64},
            "speculate": {"method": method},
            "engine": {"quiet": True},
        },
    )
    engine = build_engine(config, EPGroup.single())
    if there:
        assert engine.speculator is not None
        drafter: Any = engine.speculator.drafter
        drafter._picker.pick = pick_there
    return engine


def ask(engine: Engine, num: int = 2) -> None:
    for i in range(num):
        text = tuple(b"In the beginning God created the heaven and the earth. "[: 40 + i])
        sampling = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
        engine.add_request(Request(request_id=f"{i}", prompt_token_ids=text, sampling=sampling))


def run(engine: Engine) -> dict[str, tuple[int, ...]]:
    said: dict[str, tuple[int, ...]] = {}
    for outputs in steps_until_idle(engine, ()):
        for output in outputs:
            assert output.error is None
            said[output.request_id] = said.get(output.request_id, ()) + output.token_ids
    return said


def test_no_row_lies_behind_the_longest_sequence() -> None:
    """Were all drafts accepted, which the host does not know, they would go on from there: tables
    of positions end where sequences do."""
    engine = open_engine()
    drafter: Any = engine.speculator.drafter  # type: ignore[union-attr]
    longest, draft = [0], drafter._model.draft

    def seen(batch: Any, *args: Any) -> Any:
        longest.append(batch.max_context_len)
        return draft(batch, *args)

    drafter._model = type("Seen", (), {"draft": staticmethod(seen)})
    ask(engine)
    assert {len(tokens) for tokens in run(engine).values()} == {LENGTH - 40, LENGTH - 41}
    assert LENGTH - 4 < max(longest) <= LENGTH


def test_drafts_that_cannot_be_brought_cost_themselves_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = open_engine("off", there=False)
    ask(wanted)
    engine = open_engine()
    ask(engine)
    lost: list[int] = []

    def once(parts: Any) -> Any:
        if len(parts) > 2 and len(lost) < 2:
            lost.append(len(parts))
            raise RuntimeError("as asked")
        return brought(parts)

    monkeypatch.setattr(engine_module, "brought", once)
    assert run(engine) == run(wanted)
    assert engine.speculator is not None and engine.speculator.num_failures == len(lost) == 2
    assert engine.scheduler.counters.accepted_tokens > 0


def test_what_a_round_that_failed_did_not_write_is_known() -> None:
    engine = open_engine()
    drafter: Any = engine.speculator.drafter  # type: ignore[union-attr]
    ask(engine, 1)
    engine.step()
    (sequence,) = engine.scheduler.running
    blocks = set(sequence.lease.table.ids[: -(-sequence.num_computed_tokens // BLOCK)])  # type: ignore[union-attr]
    assert not drafter._missing & blocks
    draft = drafter._model.draft

    def broken(*args: Any) -> Any:
        raise RuntimeError("as asked")

    drafter._model = type("Broken", (), {"draft": staticmethod(broken)})
    engine.step()
    assert engine.speculator is not None and engine.speculator.num_failures == 1
    assert drafter._missing >= blocks
    drafter._model = type("Whole", (), {"draft": staticmethod(draft)})
    run(engine)
    assert engine.speculator.num_failures == 1


@pytest.mark.parametrize("on_device", [False, True])
def test_a_clock_that_sees_only_what_is_asked_is_not_believed(on_device: bool) -> None:
    """Rounds of a rank without rows are waited for by nobody there."""
    engine = open_engine("mtp:auto")
    speculator = engine.speculator
    assert speculator is not None
    speculator.stopwatch = CudaStopwatch() if on_device else HostStopwatch()
    added: list[Any] = []
    speculator.costs.add = lambda *args: added.append(args)  # type: ignore[method-assign]
    speculator._step, speculator.depth = Agreed(1, True), 1
    speculator.draft(StepPlan(), torch.zeros(0, 1), StepResult([]))
    speculator.timed(0.1)
    assert bool(added) is not on_device
