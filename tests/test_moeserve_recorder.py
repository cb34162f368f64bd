"""StepRecorder counts what a brute-force count of all rows does: phases, padding, failed steps."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from gated_toy import (
    LAYERS,
    TOP,
    Gated,
    Twin,
    ask,
    make,
    recorder_of,
    run,
    some_work,
)
from torch import Tensor

from ep.load import DECODE, PREFILL, LoadWindow
from moeserve import recorder as recorder_module
from moeserve.device.api import ReplayedApi
from moeserve.plan import StepPlan
from moeserve.recorder import StepRecorder

# -- counting -----------------------------------------------------------------------------------


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_counts_are_the_brute_force_twin(seed: int, padded: bool, monkeypatch: Any) -> None:
    """Chunks, prefix hits and preemption make every kind of mixed step."""
    rng = random.Random(seed)
    monkeypatch.setattr(recorder_module, "MAX_STEPS", rng.choice([1, 3, 16]))
    monkeypatch.setattr(recorder_module, "MAX_ROWS", rng.choice([1, 40, 1 << 16]))
    engine = make(
        Gated(padded=padded), chunk=rng.choice([None, 1, 3]), blocks=rng.choice([33, 200])
    )
    twin = Twin(engine)
    recorder = recorder_of(engine)
    recorder.api = ReplayedApi() if seed % 2 else None  # then picks are counted a step later
    some_work(engine, rng)
    for _ in range(400):
        if not engine.has_work:
            break
        engine.step()
        if rng.random() < 0.2:  # looking changes nothing
            assert (recorder.totals == twin.total()).all()
    assert not engine.has_work
    window = recorder.window
    assert window is not None and window.bucket_steps == 1
    assert (recorder.totals == twin.total()).all()
    assert (window.history("decode") == np.array([s[DECODE] for s in twin.steps])).all()
    assert (window.history("prefill") == np.array([s[PREFILL] for s in twin.steps])).all()
    assert recorder.tokens == np.sum(twin.tokens, axis=0).tolist()
    mixed = [t for t in twin.tokens if t[0] and t[1]]
    assert mixed, "no step was mixed"
    steps = len(twin.steps)
    rows = sum(map(sum, twin.tokens)) * LAYERS + steps * sum(range(LAYERS))
    assert recorder.rows_total.tolist() == [rows]
    assert engine.stats().expert_load == tuple(twin.total().sum(axis=0).ravel().tolist())


def test_a_last_prompt_token_between_decodes_is_prefill() -> None:
    """A chunked prompt whose last chunk is one token stands among the decodes of the plan."""
    engine = make(chunk=3)
    twin = Twin(engine)
    engine.add_request(ask("a", [5, 6, 7, 8], 6))  # 3 + 1
    engine.add_request(ask("b", [9], 6))
    run(engine)
    assert [1, 1] in twin.tokens
    assert (recorder_of(engine).totals == twin.total()).all()


def test_warm_up_is_not_counted_and_a_failed_step_is_forgotten() -> None:
    engine = make(Gated(fail_at=3))
    recorder = recorder_of(engine)
    recorder.enabled = False
    engine.runner.forward(engine.runner.build(StepPlan()))
    recorder.enabled = True
    twin = Twin(engine)
    some_work(engine, random.Random(5))
    run(engine)
    assert engine.runner.model.num_forwards > 3  # type: ignore[attr-defined]
    failed = 2  # forward 0 was the warm-up
    del twin.steps[failed], twin.tokens[failed]
    assert (recorder.totals == twin.total()).all()
    assert recorder.window is not None and recorder.window.steps == len(twin.steps)
    assert recorder.tokens == np.sum(twin.tokens, axis=0).tolist()


def test_masked_picks_count_nowhere() -> None:
    recorder = StepRecorder(LoadWindow(2, 3, 4))
    plan = StepPlan(num_tokens=2, sequences=[None] * 2, counts=[1, 1], decodes=[1])  # type: ignore[list-item]
    recorder.begin_step(plan)
    recorder.expert_picks(1, torch.tensor([[-1, 0], [2, -1]]))
    recorder.end_step(1)
    expected = np.zeros((2, 2, 3), int)
    expected[PREFILL, 1, 0] = expected[DECODE, 1, 2] = 1
    assert (recorder.totals == expected).all()


def test_what_is_kept_uncounted_is_bounded() -> None:
    recorder = StepRecorder(LoadWindow(1, 4, 4))
    ids = torch.zeros(1000, 2, dtype=torch.int32)
    plan = StepPlan(num_tokens=1000)
    for step in range(300):
        recorder.begin_step(plan)
        recorder.expert_picks(0, ids)
        recorder.end_step(step + 1)
        assert len(recorder._picks) < recorder_module.MAX_STEPS
        assert recorder._num_rows < recorder_module.MAX_ROWS
    for step in range(300, 400):
        recorder.begin_step(StepPlan(num_tokens=50_000))
        recorder.expert_picks(0, torch.zeros(50_000, 2, dtype=torch.int32))
        recorder.end_step(step + 1)
    assert recorder.totals[PREFILL, 0].tolist() == [2 * (300_000 + 5_000_000), 0, 0, 0]


def test_steps_of_no_tokens_push_nothing_out() -> None:
    engine = make(steps=4)
    engine.add_request(ask("a", [1, 2, 3], 3))
    run(engine)
    window = recorder_of(engine).window
    assert window is not None
    before = window.totals()
    assert before.sum() == 5 * TOP * LAYERS
    for _ in range(20):
        engine.step()  # idle: lockstep goes on, nothing runs
    assert (recorder_of(engine).window.totals() == before).all()  # type: ignore[union-attr]


def test_picks_are_kept_not_copied() -> None:
    """What a step costs: the gate's own tensor is held, nothing is computed until later."""
    recorder = StepRecorder(LoadWindow(1, 4, 4))
    ids: Tensor = torch.zeros(3, 2, dtype=torch.int32)
    recorder.begin_step(StepPlan(num_tokens=3))
    recorder.expert_picks(0, ids)
    assert recorder._picks[0] is ids
    recorder.end_step(1)
    assert recorder._picks[0] is ids
