"""What users are told of speculation: usage, /health, /metrics; and what happens when it fails."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client.core import Metric
from thread_ranks import World, thread_world  # noqa: F401

from ep.group import EPGroup
from ep.load import DECODE, PREFILL, LoadWindow
from moeserve.cache import BlockCache
from moeserve.engine import Engine
from moeserve.errors import EngineFailed
from moeserve.llm import LLM
from moeserve.lockstep import Lockstep, Phase, Vote
from moeserve.plan import StepPlan
from moeserve.recorder import StepRecorder
from moeserve.request import FinishReason, Request, SamplingParams, TokenOutput
from moeserve.runner import ModelRunner
from moeserve.scheduler import ScheduleLimits, Scheduler
from moeserve.sequence import Sequence
from moeserve.server.answer import Choice
from moeserve.server.service import Job
from moeserve.speculate.adaptive import FixedDepth
from moeserve.speculate.drafter import DraftAsk
from moeserve.speculate.speculator import Speculator
from moeserve.speculate.tree import DraftTree, chain
from moeserve.speculation_metrics import speculation_series
from moeserve.speculation_report import report, sum_over_ranks
from moeserve.tokenizer import Tokenizer
from moeserve.toy_model import ToyModel
from moeserve.wire_speculation import SpeculationStats

BUNDLED = Path(__file__).parents[1] / "checkpoints" / "tiny"


# -- usage ----------------------------------------------------------------------------------------


def test_usage_counts_drafts_that_are_tokens_of_the_answer() -> None:
    tokenizer = Tokenizer(BUNDLED)
    ids = tokenizer.encode("the quick brown fox and the lazy dog", add_special_tokens=False)
    sampling = SamplingParams(stop=(" brown",), max_tokens=50)
    choices = [
        Choice(i, f"r{i}", s, tokenizer, None, skip_special_tokens=True, include_stop=False)
        for i, s in enumerate((sampling, SamplingParams(max_tokens=50)))
    ]
    first = TokenOutput(request_id="r", token_ids=tuple(ids[:1]), num_rejected=3)
    run = TokenOutput(
        request_id="r",
        token_ids=tuple(ids[1:]),
        num_accepted=len(ids) - 2,
        num_rejected=2,
        finish_reason=FinishReason.LENGTH,
    )
    for choice in choices:
        choice.push(first)
        choice.push(run)
    cut, whole = choices
    assert cut.finish_reason == "stop" and cut.num_tokens < len(ids)
    assert (whole.num_accepted, whole.num_rejected) == (len(ids) - 2, 5)
    assert cut.num_accepted == cut.num_tokens - 1
    assert cut.num_accepted + cut.num_rejected == whole.num_accepted + whole.num_rejected
    details: Any = Job("x", 0, [], choices, [[1, 2]], [None], 2).usage()
    assert details["completion_tokens"] == cut.num_tokens + len(ids)
    assert details["completion_tokens_details"] == {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": cut.num_accepted + whole.num_accepted,
        "rejected_prediction_tokens": cut.num_rejected + whole.num_rejected,
    }


def test_stop_strings_and_ends_inside_an_accepted_run_cut_at_the_right_token() -> None:
    prompts = ["And the king said unto the", "def get_name(self):\n", "Define a house."]
    asked = [
        SamplingParams(temperature=0, max_tokens=40),
        SamplingParams(temperature=0, max_tokens=40, stop=("\n", "the LORD", ".")),
        SamplingParams(temperature=0.7, seed=3, max_tokens=33, stop=("e",), min_tokens=5),
        SamplingParams(temperature=0, max_tokens=7, logprobs=1),
    ]
    shown = []
    told = (0, 0)
    for method in ("off", "mtp:4", "ngram:6", "auto"):
        with LLM(BUNDLED, speculate=method, quiet=True, kv_tokens=1024, threads=1) as llm:
            outputs = llm.generate(prompts * len(asked), [s for s in asked for _ in prompts])
        shown.append(
            [(o.text, o.token_ids, o.finish_reason, o.stop_reason, o.logprobs) for o in outputs]
        )
        assert shown[-1] == shown[0]
        if method == "mtp:4":
            told = (sum(o.num_accepted for o in outputs), sum(o.num_rejected for o in outputs))
        assert all(o.num_accepted <= len(o.token_ids) for o in outputs)
    assert min(told) > 20
    assert any(o[2] is FinishReason.STOP and isinstance(o[3], str) for o in shown[0])


# -- /health and /metrics -------------------------------------------------------------------------


def stats(**changes: Any) -> SpeculationStats:
    given: dict[str, Any] = {
        "drafter": "mtp",
        "rule": "same",
        "depth": 2,
        "adaptive": False,
        "drafted_tokens": 20,
        "accepted_tokens": 12,
        "runs": 10,
        "drafted": (10, 10),
        "accepted": (8, 4),
        "temperature": 0.5,
        "predicted": 1.4,
        "cost_ratio": 0.3,
        "rounds": 30,
        "seconds": 1.5,
        "depths": (3, 0, 7),
        "recent_steps": 7,
        "recent_depth": 2.0,
        "recent_predicted": 1.6,
    }
    return SpeculationStats(**given | changes)


def test_ranks_are_summed_and_the_temperature_stands_beside() -> None:
    other = stats(runs=30, drafted=(30, 20), accepted=(10, 2), temperature=0.9, failures=2,
                  failure="no room", predicted=9.0)  # fmt: skip
    both = sum_over_ranks([stats(), other])
    assert both is not None
    assert (both.drafted, both.accepted, both.runs) == ((40, 30), (18, 6), 40)
    assert both.temperature == pytest.approx(0.8) and both.predicted == 1.4
    assert both.mean_accepted == pytest.approx(24 / 40) and both.failure == "no room"
    told = report({"drafter": "mtp", "depth": 2}, [stats(), other])
    assert told is not None
    assert told["acceptance"] == [0.45, 0.2] and told["temperature"] == 0.8
    assert told["current_depth"] == 2 and told["failures"] == 2
    assert told["predicted_speedup"] == 1.6 and told["recent_depth"] == 2.0
    assert told["steps_by_depth"] == [3, 0, 7] and told["recent_steps"] == 7
    assert report(None, []) is None and sum_over_ranks([]) is None
    assert report({"drafter": "mtp"}, []) == {"drafter": "mtp"}


def test_series_by_rank_position_and_drafter() -> None:
    series: dict[str, Metric] = {
        m.name: m for m in speculation_series([("0", stats()), ("1", stats(drafted_tokens=7))])
    }
    values = {
        (s.name, *sorted(s.labels.items())): s.value for m in series.values() for s in m.samples
    }
    assert values["moeserve_drafted_tokens_total", ("rank", "1")] == 7
    assert values["moeserve_accepted_tokens_total", ("rank", "0")] == 12
    at = ("drafter", "mtp"), ("position", "2")
    assert values["moeserve_speculation_drafted_total", *at] == 20
    assert values["moeserve_speculation_accepted_total", *at] == 8
    of = ("drafter", "mtp"), ("rule", "same")
    assert values["moeserve_speculation_tokens_per_run", *of] == pytest.approx(2.2)
    assert values["moeserve_speculation_temperature", *of] == 0.5
    assert values["moeserve_speculation_predicted_speedup", *of] == 1.6
    assert values["moeserve_speculation_recent_depth", *of] == 2.0
    assert values["moeserve_speculation_steps_total", ("depth", "2"), ("drafter", "mtp")] == 7
    assert list(speculation_series([])) == []


# -- the vote, the recorder -----------------------------------------------------------------------


def test_columns_of_the_vote_reach_all_ranks(world: World) -> None:  # noqa: F811
    def body(group: EPGroup) -> list[list[int]]:
        lockstep = Lockstep(group, 3)
        vote = Vote(True, 1, 1, Phase.DECODE, drafting=(group.rank, 7, -group.rank))
        return lockstep.agree(vote).drafting.tolist()

    assert world(3, body) == [[[0, 7, 0], [1, 7, -1], [2, 7, -2]]] * 3
    alone = Lockstep(EPGroup.single(), 2).agree(Vote(True, drafting=(4, 5)))
    assert alone.drafting.tolist() == [[4, 5]]
    assert Lockstep(EPGroup.single()).agree(Vote(True)).drafting.size == 0


def test_picks_of_a_round_count_by_its_own_rows() -> None:
    recorder = StepRecorder(LoadWindow(2, 4, 8))
    plan = StepPlan(counts=[1, 3], num_tokens=4, decodes=[0], num_draft_tokens=0)
    plan.sequences = [None, None]  # type: ignore[list-item]
    recorder.begin_step(plan)
    recorder.expert_picks(0, torch.tensor([[0], [1], [2], [3]]))
    recorder.begin_round(3, 1)
    observer = recorder.round_observer
    observer.expert_picks(1, torch.tensor([[3], [0], [0]]))
    observer.part("attention", 5.0)
    recorder.begin_round(2, 2)
    observer.expert_picks(1, torch.tensor([[2], [2]]))
    recorder.begin_round(0, 0)
    observer.expert_picks(1, torch.zeros(0, 1, dtype=torch.int64))
    recorder.end_step(1)
    assert recorder.totals[PREFILL].tolist() == [[0, 1, 1, 1], [2, 0, 0, 0]]
    assert recorder.totals[DECODE].tolist() == [[1, 0, 0, 0], [0, 0, 2, 1]]
    assert recorder.tokens == [3, 1] and recorder.seconds == {}


# -- failures -------------------------------------------------------------------------------------


class Failing:
    """Drafts a while, then raises."""

    name = "failing"
    wants_hidden = runs_ahead = False
    max_depth = max_nodes = 2

    def __init__(self, collective: bool, bad: bool = True) -> None:
        self.collective, self.bad, self.calls = collective, bad, 0
        self.forgotten: set[str] = set()

    def propose(
        self, asks: Seq[DraftAsk], depth: int, max_tokens: int | None = None
    ) -> list[DraftTree]:
        self.calls += 1
        if self.bad and self.calls in (4, 6):
            raise RuntimeError("the drafter broke")
        return [chain([1] * min(ask.most, depth)) for ask in asks]

    def settle(self, sequence: Sequence, num_accepted: int, num_rejected: int) -> None:
        pass

    def forget(self, request_ids: Collection[str]) -> None:
        self.forgotten |= set(request_ids)

    def memory_bytes(self) -> int:
        return 0


def engine_with(drafter: Failing, group: EPGroup) -> Engine:
    model = ToyModel(group=group)
    cache = BlockCache(64, 4, 4)
    pages = model.cache_spec.allocate(64, 4, torch.device("cpu"))
    scheduler = Scheduler(cache, ScheduleLimits(4, 32, None, 64, 97))
    runner = ModelRunner(model, pages, cache.tables)
    speculator = Speculator(drafter, FixedDepth(2), runner, scheduler, group.rank)
    return Engine(runner, scheduler, group, speculator=speculator)


def request(name: str, num: int = 12) -> Request:
    sampling = SamplingParams(temperature=0, max_tokens=num)
    return Request(request_id=name, prompt_token_ids=(3, 1, 4), sampling=sampling)


def test_a_drafter_that_fails_where_nobody_waits_costs_its_drafts_alone() -> None:
    drafter = Failing(collective=False)
    engine = engine_with(drafter, EPGroup.single())
    engine.add_request(request("a"))
    got: list[int] = []
    while engine.has_work:
        for output in engine.step():
            got += output.token_ids
    assert got == ToyModel().continue_prompt([3, 1, 4], 12)
    told = engine.stats().speculation
    assert told is not None and told.failures == 2 and "drafter broke" in str(told.failure)
    assert told.drafted_tokens > 0 and drafter.forgotten == {"a"}


def test_means_outlast_the_requests() -> None:
    """Between requests the depth of the last step is 0: what is told of drafting is not."""
    engine = engine_with(Failing(collective=False, bad=False), EPGroup.single())
    for name in ("a", "b"):
        engine.add_request(request(name, 40))
    drafts = 0
    while engine.has_work:
        engine.step()
        drafts += bool(engine.speculator.depth)  # type: ignore[union-attr]
    speculator = engine.speculator
    assert speculator is not None
    speculator.depth = 0
    told = speculator.stats()
    assert told.depth == 0 and told.predicted == 1.0
    # At their ends there is room for one draft, then for none.
    assert 0 < told.depths[2] <= drafts and told.depths[:2] == (2, 1)
    assert 1.9 < told.recent_depth < 2.0 and told.recent_steps == min(sum(told.depths[1:]), 64)
    assert told.recent_predicted != 1.0


def test_one_that_fails_where_peers_wait_ends_the_job_on_that_rank(world: World) -> None:  # noqa: F811
    def body(group: EPGroup) -> int:
        engine = engine_with(Failing(True, bad=group.rank == 1), group)
        engine.add_request(request(f"r{group.rank}"))
        for _ in range(3):
            engine.step()
        if group.rank == 1:
            with pytest.raises(EngineFailed, match="the drafter broke"):
                engine.step()
            assert not engine.has_work
        else:
            engine.step()
        return engine.speculator.drafter.calls  # type: ignore[union-attr]

    assert world(2, body) == [4, 4]


def test_ranks_without_work_take_part_in_drafting(world: World) -> None:  # noqa: F811
    def body(group: EPGroup) -> tuple[int, int]:
        engine = engine_with(Failing(True, bad=False), group)
        if group.rank == 0:
            engine.add_request(request("a", 9))
        engine.request_stop()
        steps = 0
        while not engine.stopped:
            engine.step()
            steps += not engine.stopped
        return steps, engine.speculator.drafter.calls  # type: ignore[union-attr]

    found = world(3, body)
    assert len(set(found)) == 1
    steps, calls = found[0]
    assert calls == steps - 2 > 3  # the last two have no room for a draft
