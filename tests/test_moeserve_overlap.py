"""When steps go in halves: by what all ranks agreed alone; an engine says and counts the same."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ep.group import EPGroup
from moeserve.build import build_engine
from moeserve.config import ServeConfig
from moeserve.engine import Engine
from moeserve.errors import ConfigError
from moeserve.overlap import CUDA_FROM, decide_overlap, goes_in_halves
from moeserve.request import Request, SamplingParams

TINY = Path(__file__).parents[1] / "checkpoints" / "tiny"


pytestmark = pytest.mark.usefixtures("one_thread")


# -- the decision -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "ranks", "device", "room", "tokens", "why"),
    [
        ("off", 8, "cuda", None, None, "off (asked for)"),
        (None, 1, "cuda", None, None, "one rank"),
        (None, 8, "cpu", None, None, "on CPUs"),
        (None, 8, "cuda", None, CUDA_FROM, "not measured"),
        (None, 8, "cuda", 2, CUDA_FROM, "auto"),
        (None, 8, "cuda", 1, None, "room for 1 layer"),
        (64, 8, "cpu", None, 64, "from 64 tokens a rank on (asked for)"),
        (512, 8, "cpu", None, 512, "from 512 tokens"),
        (513, 8, "cpu", None, None, "a step has at most 512"),
        (1, 1, "cpu", None, 1, "from 1 token a rank"),
        (64, 8, "cpu", 1, None, "two halves need 2"),
    ],
)
def test_what_is_decided_at_start(
    asked: Any, ranks: int, device: str, room: int | None, tokens: int | None, why: str
) -> None:
    choice = decide_overlap(asked, 512, ranks, device, "some", room)
    assert choice.tokens == tokens and why in choice.note and choice.note.startswith("overlap: ")


def test_a_step_is_decided_by_what_was_agreed() -> None:
    assert [goes_in_halves(n, 4) for n in (None, 0, 3, 4, 9)] == [False] * 3 + [True] * 2
    assert not goes_in_halves(9, None)


def test_the_setting() -> None:
    for given, kept in (("auto", None), ("off", "off"), ("64", 64), (7, 7), (" OFF ", "off")):
        config = ServeConfig.load(None, {"parallel": {"overlap": given}})
        assert config.parallel.overlap == kept
        again = ServeConfig.model_validate(config.model_dump())  # as ranks get it
        assert again.parallel.overlap == kept
    for given, why in (
        ("half", "auto, off or a number of tokens"),
        ("-3", "nearest valid: 1"),
        ("0", "at least 1 token; nearest valid: 1 (every step); for never: use off"),
        (0, "nearest valid: 1"),
    ):
        with pytest.raises(ConfigError) as caught:
            ServeConfig.load(None, {"parallel": {"overlap": given}})
        assert len(caught.value.problems) == 1
        assert "parallel.overlap" in caught.value.problems[0] and why in caught.value.problems[0]


# -- an engine ----------------------------------------------------------------------------------


def load(overlap: object, **schedule: Any) -> Engine:
    settings: dict[str, dict[str, Any]] = {
        "model": {"checkpoint": TINY, "dtype": "bfloat16"},
        "parallel": {"overlap": overlap, "shared_expert": "hosted", "redundant_experts": 5},
        "cache": {"kv_tokens": 1024, "block_size": 4},
        "schedule": {"max_model_len": 96, "max_num_sequences": 6, **schedule},
        "engine": {"quiet": True},
    }
    return build_engine(ServeConfig.load(None, settings), EPGroup.single())


def requests(vocab: int) -> list[Request]:
    """Prompts that share beginnings, in three waves."""
    rng = random.Random(4)
    base = [rng.randrange(3, vocab) for _ in range(40)]
    made = []
    for i in range(9):
        prompt = [*base[: 13 * (i % 4)], *(rng.randrange(3, vocab) for _ in range(1 + i))]
        sampling = SamplingParams(
            temperature=0, max_tokens=3 + i, ignore_eos=True, logprobs=2,
            prompt_logprobs=1 if i % 3 == 0 else None,
        )  # fmt: skip
        made.append(Request(request_id=f"{i}", prompt_token_ids=tuple(prompt), sampling=sampling))
    return made


def serve(engine: Engine) -> dict[str, list[Any]]:
    asked = requests(engine.runner.model.config.vocab_size)
    said: dict[str, list[Any]] = {}
    while asked or engine.has_work:
        if asked and engine.num_steps % 4 == 0:
            for request in asked[:3]:
                engine.add_request(request)
            del asked[:3]
        for output in engine.step():
            assert output.error is None
            said.setdefault(output.request_id, []).append(
                (output.token_ids, output.logprobs, output.prompt_logprobs)
            )
    return said


@pytest.mark.parametrize("schedule", [{}, {"chunk_size": 7, "token_budget": 16}])
def test_an_engine_says_and_counts_the_same(schedule: dict[str, int]) -> None:
    plain = load("off", **schedule)
    said = serve(plain)
    assert plain.recorder is not None and len(said) == 9
    for threshold in (1, 5):
        engine = load(threshold, **schedule)
        assert f"overlap: from {threshold} token" in str(engine.info["notes"])
        bounds: list[tuple[int | None, bool]] = []
        watch(engine, bounds)
        assert serve(engine) == said
        assert engine.num_steps == plain.num_steps
        recorder = engine.recorder
        assert recorder is not None
        assert np.array_equal(recorder.totals, plain.recorder.totals)
        assert np.array_equal(recorder.rows_total, plain.recorder.rows_total)
        assert recorder.tokens == plain.recorder.tokens
        assert recorder.window is not None and plain.recorder.window is not None
        for phase in ("prefill", "decode"):
            mine, its = (w.history(phase) for w in (recorder.window, plain.recorder.window))
            assert np.array_equal(mine, its)
        assert recorder.seconds.keys() == plain.recorder.seconds.keys()
        # Both kinds of steps came, but for the threshold of one.
        kinds = {halves for _, halves in bounds}
        assert kinds == ({True} if threshold == 1 else {True, False})
    assert "overlap: off" in str(plain.info["notes"])


def watch(engine: Engine, bounds: list[tuple[int | None, bool]]) -> None:
    """Notes each forward: the bound in force, and whether it was in halves; halves keep to it."""
    model, dispatcher = engine.runner.model, engine.runner.model.dispatcher  # type: ignore
    forward, set_bound, start = model.forward, dispatcher.set_step_bound, dispatcher.dispatch_start
    agreed: list[int | None] = [None]

    def watched(batch: Any, cache: Any, observer: Any = None, halves: bool = False) -> Any:
        bounds.append((agreed[0], halves))
        return forward(batch, cache, observer, halves)

    def bound(max_tokens: int | None, decode_only: bool = False) -> None:
        agreed[0] = max_tokens
        set_bound(max_tokens, decode_only)

    def bounded(x: Any, *more: Any) -> Any:
        assert agreed[0] is not None and x.shape[0] <= agreed[0]
        return start(x, *more)

    model.forward, dispatcher.set_step_bound = watched, bound  # type: ignore[method-assign]
    dispatcher.dispatch_start = bounded


def test_after_halves_the_bound_is_the_whole_again() -> None:
    """Drafts follow in the same step, as one batch."""
    engine = load(1)
    told: list[int | None] = []
    dispatcher = engine.runner.model.dispatcher  # type: ignore[attr-defined]
    set_bound = dispatcher.set_step_bound

    def noted(most: int | None, decode_only: bool = False) -> None:
        told.append(most)
        set_bound(most, decode_only)

    dispatcher.set_step_bound = noted
    engine.add_request(requests(100)[4])
    engine.step()
    tokens = told[-1]
    assert tokens is not None and told == [-(-tokens // 2), tokens] and tokens > 1
