"""Captured decode steps on CPUs: the double runs again what was captured, so tokens are real."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from ep.group import EPGroup
from models.deepseek.random_checkpoint import write_random_checkpoint
from models.deepseek.random_families import family_config
from models.interface import ForwardBatch
from moeserve.build import build_engine
from moeserve.config import ServeConfig
from moeserve.device.api import ReplayedApi
from moeserve.device.graphs import Budget, StepGraphs
from moeserve.device.ladder import MOST_CONTEXT, ladder, padded_share, rung
from moeserve.device.ledger import MemoryLedger
from moeserve.device.opening import no_graphs, open_graphs
from moeserve.device.staging import Staging
from moeserve.engine import Engine
from moeserve.errors import EngineFailed
from moeserve.plan import StepPlan
from moeserve.request import Request, SamplingParams

SINGLE = EPGroup.single()
PROMPTS = ([3, 120, 17, 99, 4], [7, 8, 9], [11] * 20, [5, 6])
MAX_LEN = 96
GIB = 1 << 30


def settings(folder: Path, **sections: dict[str, Any]) -> ServeConfig:
    base: dict[str, dict[str, Any]] = {
        "model": {"checkpoint": folder, "kernels": "torch"},
        "cache": {"kv_tokens": 1024},
        "schedule": {"max_model_len": MAX_LEN, "max_num_sequences": 6, "token_budget": 24},
        "engine": {"quiet": True},
    }
    return ServeConfig.load(None, base | sections)


def open_engine(config: ServeConfig, api: ReplayedApi | None, drafts: int = 0) -> Engine:
    engine = build_engine(config, SINGLE)
    if api is not None:
        # torch's kernels index by slot: one of -1 is the last, which nobody here has.
        assert engine.scheduler.cache.pool.num_free * 16 >= 8 * MAX_LEN
        engine.runner.staging = Staging(api)
        engine.runner.graphs = open_graphs(
            config, SINGLE, engine.runner, MAX_LEN, drafts, [], api=api
        )
    return engine


def tokens(engine: Engine, **sampling: Any) -> list[list[int]]:
    said: dict[str, list[int]] = {}
    for number, prompt in enumerate(PROMPTS):
        params = SamplingParams(
            max_tokens=6 + number, ignore_eos=True, **({"temperature": 0.0} | sampling)
        )
        engine.add_request(
            Request(request_id=str(number), prompt_token_ids=tuple(prompt), sampling=params)
        )
        said[str(number)] = []
    for _ in range(60):
        for output in engine.step():
            said[output.request_id] += output.token_ids
        if not engine.has_work:
            break
    assert not engine.has_work
    return list(said.values())


def test_the_ladder_and_its_rungs() -> None:
    assert ladder(64) == (1, 2, 4, 8, 16, 24, 32, 48, 64)
    assert ladder(1) == (1,) and ladder(0) == () and ladder(5) == (1, 2, 4, 5)
    assert ladder(100)[-3:] == (64, 96, 100)
    for most in (7, 33, 256, 700):
        rungs = ladder(most)
        assert list(rungs) == sorted(set(rungs)) and rungs[-1] == most
        for rows in range(most + 1):
            chosen = rung(rows, True, rungs)
            assert chosen is not None and chosen >= rows
            assert all(size < rows for size in rungs if size < chosen)
        assert rung(most + 1, True, rungs) is None
        assert padded_share(rungs) < 0.5
    assert rung(1, False, ladder(8)) is None and rung(None, True, ladder(8)) is None
    assert rung(1, True, ()) is None
    assert rung(3, True, (1, 4), MOST_CONTEXT) == 4 and rung(3, True, (1, 4), 9, 9) == 4
    assert rung(3, True, (1, 4), MOST_CONTEXT + 1) is rung(3, True, (1, 4), 10, 9) is None


def test_tokens_are_those_of_steps_that_are_not_captured(random_checkpoint: Path) -> None:
    config = settings(random_checkpoint)
    want = tokens(open_engine(config, None))
    api = ReplayedApi()
    engine = open_engine(config, api)
    graphs = engine.runner.graphs
    assert graphs is not None and graphs.rungs == (1, 2, 4, 6)
    assert tokens(engine) == want
    assert graphs.num_replays > 4 and graphs.num_padding_rows > 0
    assert api.calls.count("replay") == graphs.num_replays


def test_steps_whose_rows_attend_to_too_much_go_as_they_are(random_checkpoint: Path) -> None:
    """The sum of all rows counts, and only it; said once."""
    config = settings(random_checkpoint)
    want = tokens(open_engine(config, None))
    engine = open_engine(config, ReplayedApi())
    graphs, said = engine.runner.graphs, []
    assert graphs is not None
    graphs.say = said.append
    graphs.most_context = 40  # the longest alone is 26, all of them 44 and more
    assert tokens(engine) == want
    assert graphs.num_replays > 1 and graphs.num_too_long > 1
    assert graphs.report()["too_long"] == graphs.num_too_long
    (line,) = said
    assert line == graphs.notes[-1] and "attend to more than 40 positions on a rank" in line
    # Nor does one with more get into a captured step by mistake.
    batch = engine.runner.build(StepPlan())
    assert batch.host is not None and batch.host.total_context == 0
    over = replace(batch.host, total_context=41)
    with pytest.raises(AssertionError):
        graphs.run(1, over, batch.forward)


def test_ranks_agree_on_the_most_that_any_attends_to(folder: Path) -> None:
    """The rank whose contexts they are says so; another goes along."""
    for own, speaks in ((10, False), (90, True)):
        graphs, said = small_graphs(folder, ReplayedApi()), []
        graphs.capture_all()
        graphs.say, graphs.most_context = said.append, 50
        assert graphs.ready(2, True, 50, own) == 2
        assert graphs.ready(5, True, 90, own) is None and graphs.num_too_long == 0  # no such rung
        assert graphs.ready(2, False, 90, own) is None and graphs.num_too_long == 0
        assert [graphs.ready(2, True, 90, own) for _ in range(3)] == [None] * 3
        assert graphs.num_too_long == 3 and len(graphs.notes) == 1
        assert said == (graphs.notes if speaks else [])


def test_random_tokens_log_probabilities_and_load_are_the_same(random_checkpoint: Path) -> None:
    config = settings(random_checkpoint)
    plain, captured = open_engine(config, None), open_engine(config, ReplayedApi())
    asked = {"temperature": 0.9, "top_p": 0.8, "seed": 5, "logprobs": 2}
    assert tokens(captured, **asked) == tokens(plain, **asked)
    one, other = plain.recorder, captured.recorder
    assert one is not None and other is not None
    assert other.totals.tolist() == one.totals.tolist()  # padding is nobody's load
    assert other.tokens == one.tokens


def test_drafts_go_through_the_same_captured_steps(random_checkpoint: Path) -> None:
    config = settings(random_checkpoint, speculate={"method": "mtp:3"})
    want = tokens(open_engine(settings(random_checkpoint), None))
    engine = open_engine(config, ReplayedApi(), drafts=3)
    assert engine.runner.graphs is not None and engine.runner.graphs.rungs[-1] == 24
    assert tokens(engine) == want
    assert engine.scheduler.counters.drafted_tokens > 0
    assert engine.runner.graphs.num_replays > 0


def test_another_placement_captures_again(random_checkpoint: Path) -> None:
    config = settings(random_checkpoint)
    engine = open_engine(config, ReplayedApi())
    graphs, model = engine.runner.graphs, engine.runner.model
    want = tokens(engine)
    assert graphs is not None and graphs.num_recaptures == 0
    # The same table under another generation: what was captured may point at old ones.
    model.adopt_placement(replace(model.placement, generation=model.placement.generation + 1))
    engine.reset_prefix_cache()
    assert tokens(engine) == want
    assert graphs.num_recaptures > 0


def test_what_cannot_be_captured_again_is_out_of_use_on_all_ranks(folder: Path) -> None:
    """Two ranks; the second cannot capture 2 rows again. Both dispatch as often in each step."""
    steps: list[list[tuple[int | None, int]]] = []
    for refuse in (frozenset[int](), frozenset({3})):  # behind the 3 of the start
        graphs = small_graphs(folder, ReplayedApi(refuse=refuse))
        count = counted(graphs._model.dispatcher)
        said: list[str] = []
        graphs.say = said.append
        answers: list[bool] = []
        graphs.capture_all(agree=lambda ok, answers=answers: answers.append(ok) or ok)
        graphs._agree = lambda ok, answers=answers: answers.append(ok) or False
        graphs._model.adopt_placement(replace(graphs._model.placement, generation=7))
        count.clear()
        took = []
        for rows in (2, 3):
            took.append((graphs.ready(rows, True), len(count)))
            graphs._agree = lambda ok, answers=answers: answers.append(ok) or ok
        took.append((graphs.ready(4, True), len(count)))  # as it is
        steps.append(took)
        assert answers == [True, True, True, not refuse, True] and graphs.rungs == (1, 4)
        assert graphs.num_recaptures == 1
        why = "not permitted when stream" if refuse else "another rank cannot"
        (note,) = graphs.notes
        assert said == ([note] if refuse else [])  # by the rank that knows why
        assert "of 2 rows are no longer captured since experts moved: " in note and why in note
    assert steps[0] == steps[1]
    assert [size for size, _ in steps[0]] == [None, 4, 4]
    assert steps[0][1][1] == steps[0][2][1] > 0


def test_captured_again_within_the_budget(folder: Path) -> None:
    api = ReplayedApi(each=100)
    graphs = small_graphs(folder, api)
    graphs.capture_all(Budget(memory=350))
    assert graphs.rungs == (1, 2, 4)
    api.free -= 1000  # steps that are not captured took it meanwhile
    graphs._model.adopt_placement(replace(graphs._model.placement, generation=7))
    assert graphs.ready(1, True) is None
    assert graphs.rungs == (2, 4) and "400 bytes would be taken" in graphs.notes[0]


def counted(dispatcher: Any) -> list[int]:
    """Grows by one a dispatch."""
    seen: list[int] = []
    start = dispatcher.dispatch_start

    def dispatch_start(*args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        return start(*args, **kwargs)

    dispatcher.dispatch_start = dispatch_start
    return seen


def small_graphs(random_checkpoint: Path, api: ReplayedApi) -> StepGraphs:
    runner = build_engine(settings(random_checkpoint), SINGLE).runner
    bound = runner.model.dispatcher.set_step_bound
    return StepGraphs(runner.model, runner.cache, api, (1, 2, 4), MAX_LEN, bound)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("small")
    yield write_random_checkpoint(path, family_config("v3", num_hidden_layers=2), tokenizer=False)


def test_what_cannot_be_captured_is_named_and_the_rest_is_used(folder: Path) -> None:
    api = ReplayedApi(refuse=frozenset({0}))
    graphs = small_graphs(folder, api)
    shown: list[tuple[int, int, int]] = []
    graphs.capture_all(progress=lambda *told: shown.append(told))
    assert graphs.rungs == (1, 2)
    (note,) = graphs.notes
    assert "of 4 rows are not captured" in note and "not permitted when stream is capturing" in note
    assert shown == [(4, 0, 3), (2, 1, 3), (1, 2, 3), (0, 3, 3)]
    assert graphs.rung(3, True) is None and graphs.rung(2, True) == 2


def test_a_warm_up_that_fails_among_ranks_ends_the_start(folder: Path) -> None:
    graphs = small_graphs(folder, ReplayedApi())
    graphs._set_bound = lambda rows: 1 // 0
    graphs.capture_all()
    assert graphs.rungs == () and "ZeroDivisionError" in graphs.notes[0]
    graphs._collective = True
    with pytest.raises(EngineFailed, match="warming up a step of 4 rows: ZeroDivisionError"):
        graphs.capture_all()


def test_the_budget_is_held(folder: Path) -> None:
    graphs = small_graphs(folder, ReplayedApi(each=100))
    graphs.capture_all(Budget(memory=250))
    assert graphs.rungs == (2, 4)
    assert (
        "of 1 rows are not captured: 300 bytes would be taken, --graph-memory is 250"
        in (graphs.notes[0])
    )
    graphs = small_graphs(folder, ReplayedApi())
    clock = count(0, 10)
    graphs.capture_all(Budget(seconds=15), clock=lambda: float(next(clock)))
    assert graphs.rungs == (4,) and "of 1, 2 rows" in graphs.notes[0]
    assert "15 s have gone" in graphs.notes[0]


def test_a_refused_rung_gives_its_memory_back_for_smaller_ones(folder: Path) -> None:
    """Nor does what warming up took count; the ledger finds no more than was planned."""
    api = ReplayedApi(row=GIB, warm=8 * GIB)
    ledger = MemoryLedger(api.free_bytes, api.free)
    ledger.plan({"graphs": 2 * GIB})
    graphs = small_graphs(folder, api)
    graphs.capture_all(Budget(memory=2 * GIB))
    assert graphs.rungs == (1, 2) and "of 4 rows" in graphs.notes[0]
    assert "4294967296 bytes would be taken" in graphs.notes[0]
    assert ledger.took("graphs") == 2 * GIB and ledger.exceeded() == []
    graphs = small_graphs(folder, api := ReplayedApi(row=GIB, warm=GIB))
    graphs.capture_all(Budget(memory=GIB // 2))
    assert graphs.rungs == () and api.free == ReplayedApi().free


def test_a_rung_counts_where_all_ranks_have_it(folder: Path) -> None:
    graphs = small_graphs(folder, ReplayedApi())
    answers = iter([True, False, True])
    graphs.capture_all(agree=lambda ok: ok and next(answers))
    assert graphs.rungs == (1, 4) and "another rank cannot" in graphs.notes[0]


def test_dispatchers_that_wait_are_not_captured(folder: Path) -> None:
    config = settings(folder)
    runner = build_engine(config, SINGLE).runner
    assert no_graphs(config, runner, 4) is None
    runner.model.dispatcher.graph_safe = False
    notes: list[str] = []
    assert open_graphs(config, SINGLE, runner, MAX_LEN, 0, notes, api=ReplayedApi()) is None
    assert notes == [
        "graphs: none; dispatcher 'local' cannot be captured: the host waits for what ranks send"
    ]
    runner.model.dispatcher.graph_safe = True
    notes = []
    assert (
        open_graphs(config, SINGLE, runner, MAX_LEN, 5, notes, api=ReplayedApi(), trees=True)
        is None
    )
    assert notes == ["graphs: none; drafts are trees, and captured steps take chains only"]
    off = settings(folder, engine={"graphs": "off", "quiet": True})
    assert no_graphs(off, runner, 4) == "off (asked for)"


def test_staging_reuses_buffers_only_behind_their_copies() -> None:
    api = ReplayedApi()
    staging = Staging(api, depth=2)

    def batch(n: int) -> ForwardBatch:
        long = torch.arange(n)
        return ForwardBatch(
            long, long + 1, long + 2, torch.arange(n + 1, dtype=torch.int32),
            torch.ones(n, dtype=torch.int32), torch.full((n, 3), n, dtype=torch.int32), long, 1, 1,
            ancestors=torch.full((n, 2), -1, dtype=torch.int32) if n == 3 else None,
        )  # fmt: skip

    sent = [(staging.send(batch(n)), batch(n)) for n in (1, 0, 3, 400)]
    for got, want in sent:
        host = got.host
        assert host is not None and torch.equal(host.positions, want.positions)
        for name in vars(want).keys() - {"host"}:
            value = getattr(want, name)
            if isinstance(value, torch.Tensor):
                assert torch.equal(getattr(got, name), value), name
                assert getattr(got, name).dtype == value.dtype
            else:
                assert getattr(got, name) == value
    assert api.calls.count("record") == 4 and api.calls.count("wait") == 2
    assert staging.num_copies == 4
