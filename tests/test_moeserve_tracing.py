"""Traces: steps that ranks agree on, spans with halves and layers, clocks, skew, the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gated_toy import ask as gated_ask
from gated_toy import make
from thread_ranks import World, thread_world  # noqa: F401  (a fixture)

from ep.group import EPGroup
from launch.trace import save_trace, start_trace
from models.deepseek.overlap import drain, interleave
from moeserve.build import build_engine
from moeserve.config import ServeConfig
from moeserve.engine import Engine
from moeserve.request import Request, SamplingParams
from moeserve.tracing import MAX_SPANS, StepTracer, place_parts
from moeserve.tracing_chrome import chrome_json
from moeserve.tracing_clocks import Offset, offsets
from moeserve.tracing_job import JobTrace, RankTrace, TraceCollector, TraceDamaged
from moeserve.tracing_skew import skew_of
from moeserve.wire_trace import NAMES, SPAN, STEP, TraceEnded, TraceSteps

TINY = Path(__file__).parents[1] / "checkpoints" / "tiny"
MS = 1_000_000


pytestmark = pytest.mark.usefixtures("one_thread")


def problems_of(text: str) -> list[str]:
    """What Perfetto would stumble over: fields, and spans of a thread that cross."""
    found, open_until = [], dict[tuple[int, int], list[float]]()
    last = dict[tuple[int, int], float]()
    for event in json.loads(text)["traceEvents"]:
        where = (event["pid"], event["tid"])
        if event["ph"] == "M":
            if not isinstance(event["args"], dict) or not event["name"]:
                found.append(f"{event}: empty")
            continue
        start, end = event["ts"], event["ts"] + event["dur"]
        if event["ph"] != "X" or event["dur"] < 0 or start < last.get(where, 0.0):
            found.append(f"{event}: no complete event, or before the last one")
        last[where] = start
        around = open_until.setdefault(where, [])
        while around and around[-1] <= start + 1e-3:
            around.pop()
        if around and end > around[-1] + 1e-3:
            found.append(f"{event}: ends behind what contains it")
        around.append(end)
    return found


# -- one engine -----------------------------------------------------------------------------------


def load(overlap: object = "off") -> Engine:
    settings: dict[str, dict[str, Any]] = {
        "model": {"checkpoint": TINY, "dtype": "float32"},
        "parallel": {"overlap": overlap},
        "cache": {"kv_tokens": 512},
        "schedule": {"max_model_len": 64, "max_num_sequences": 4},
        "engine": {"quiet": True},
    }
    return build_engine(ServeConfig.load(None, settings), EPGroup.single())


def ask(engine: Engine, name: str, tokens: int) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    engine.add_request(Request(request_id=name, prompt_token_ids=(5, 6, 7, 8), sampling=sampling))


def traced(engine: Engine, steps: int) -> JobTrace:
    collector = TraceCollector(1, 1, steps)
    engine.tracer.start(1, steps)
    engine.step()  # idle: it begins, nothing is kept
    ask(engine, "a", steps + 3)
    while engine.has_work:
        engine.step()
    for message in engine.tracer.take_reports():
        collector.heard(message)
    assert collector.ended and not engine.tracer.on and engine.tracer.wanted == 0
    return collector.result()


@pytest.mark.parametrize("overlap", ["off", 1])
def test_an_engine_tells_every_part_of_every_layer(overlap: object) -> None:
    engine = load(overlap)
    trace = traced(engine, 10)
    (rank,) = trace.ranks
    assert rank.steps["tokens"].tolist() == [4] + [1] * 9
    assert np.diff(rank.steps["step"]).tolist() == [1] * 9
    layers = engine.runner.model.config.num_hidden_layers
    dense = engine.runner.model.config.first_k_dense_replace
    halves = 2 if overlap == 1 else 1
    of_step = rank.step_of_span
    for step in (0, 9):
        spans = rank.spans[of_step == step]
        for half in range(halves):
            mine = spans[spans["thread"] == 1 + half]
            said = [(NAMES[n], layer) for n, layer in zip(mine["name"], mine["layer"], strict=True)]
            assert [x for x in said if x[0] == "attention"] == [
                ("attention", i) for i in range(layers)
            ]
            for layer in range(layers):
                parts = [name for name, of in said if of == layer and name != "attention"]
                moe = ["gate", "dispatch", "experts", "dispatch", "experts", "combine", "combine"]
                assert parts == ([] if layer < dense else moe)
        host = [NAMES[n] for n in spans[spans["thread"] == 0]["name"]]
        assert host == ["schedule", "lockstep", "forward", "sampling", "commit", "step"]
        whole = spans[spans["name"] == NAMES.index("step")][0]
        assert (spans["start"] >= whole["start"]).all()
        assert (spans["start"] + spans["ns"] <= whole["start"] + whole["ns"] + 1000).all()
    text = chrome_json(trace, offsets(trace), {"some": "word"})
    assert problems_of(text) == []
    events = json.loads(text)["traceEvents"]
    assert {e["args"]["layer"] for e in events if e["name"] == "gate"} == set(range(dense, layers))
    gates = sum(e["name"] == "gate" for e in events)
    for name in ("dispatch", "combine"):
        for side in ("send", "receive"):
            found = [e for e in events if e["name"] == name and e["args"]["side"] == side]
            assert len(found) == gates, "one of each a layer"
    host = [e for e in events if e["name"] == "host" and e["ph"] == "X"]
    parts = [e for e in events if e["name"] in ("schedule", "commit")]
    assert [(e["ts"], e["dur"]) for e in host] == [(e["ts"], e["dur"]) for e in parts]
    assert len(host) == 2 * sum(e["name"] == "step" for e in events)
    assert skew_of(trace, offsets(trace)) is None  # nobody to wait for


def test_off_is_free_and_changes_nothing() -> None:
    engine = load()
    recorder = engine.recorder
    assert engine.tracer.observe(recorder) is recorder and not engine.tracer.on
    ask(engine, "a", 3)
    while engine.has_work:
        engine.step()
    assert engine.tracer.take_reports() == [] and engine.tracer._host == []


def test_the_places_of_parts_are_those_of_the_generators_in_turn() -> None:
    """Against `interleave` itself, for dense layers before, and any number of layers."""

    def half(number: int, dense: int, moe: int, said: list[tuple[str, int, int]]) -> Any:
        for layer in range(dense + moe):
            said.append(("attention", number, layer))
            if layer < dense:
                continue
            said += [("gate", number, layer), ("dispatch", number, layer)]
            yield
            for name in ("experts", "dispatch", "experts", "combine"):
                said.append((name, number, layer))
            yield
            said.append(("combine", number, layer))
        return torch.zeros(0)

    for dense, moe in ((0, 1), (1, 1), (3, 4), (1, 7)):
        said: list[tuple[str, int, int]] = []
        interleave(half(0, dense, moe, said), half(1, dense, moe, said))
        assert place_parts([x[0] for x in said]) == [x[1:] for x in said]
        said = []
        drain(half(0, dense, moe, said))
        assert place_parts([x[0] for x in said]) == [x[1:] for x in said]
        drafts = [("other", 0, -1)]  # the end of the forward; then a draft, always one batch
        drain(half(0, 0, 1, drafts))
        wanted = [x[1:] for x in said] + [
            (0, layer + dense + moe if name != "other" else -1) for name, _, layer in drafts
        ]
        assert place_parts([x[0] for x in (*said, *drafts)]) == wanted


def test_ranks_begin_and_end_at_the_same_step(world: World, tmp_path: Path) -> None:
    """However late one of them hears of it, and whoever is told to stop first."""
    out = tmp_path / "t.json"

    def body(group: EPGroup) -> list[Any]:
        engine = make(group=group)
        if group.rank == 0:
            engine.add_request(gated_ask("a", [1, 2, 3], 30))
        start_trace(engine, 5) if group.rank == 0 else None
        for _ in range(3):
            engine.step()
        start_trace(engine, 5) if group.rank == 1 else None
        while engine.step() or not engine.idle:
            pass
        first = [type(x).__name__ for x in engine.tracer._outbox]
        start_trace(engine, 900)
        if group.rank == 1:
            engine.add_request(gated_ask("b", [4, 5, 6], 9))
        while engine.step() or not engine.idle:
            pass
        kept, engine.tracer._outbox = engine.tracer._outbox, []
        engine.tracer._outbox = kept[len(first) :]
        save_trace(engine, out, "test")
        return [first, [np.frombuffer(kept[0].steps, STEP)["step"].tolist(), kept[1].num_steps]]

    found = world(2, body)
    assert found[0] == found[1]
    assert found[0] == [["TraceSteps", "TraceEnded"], [[4, 5, 6, 7, 8], 5]]
    assert problems_of(out.read_text()) == []
    steps = [e for e in json.loads(out.read_text())["traceEvents"] if e["name"] == "step"]
    assert [sum(e["pid"] == rank for e in steps) for rank in (0, 1)] == [9, 9]
    assert {e["args"]["tokens"] for e in steps if e["pid"] == 0} == {0}  # idle, but in step


# -- one tracer -----------------------------------------------------------------------------------


def step(tracer: StepTracer, number: int, agreed: int, runs: bool = True, spans: int = 1) -> None:
    tracer.agreed(agreed, runs)
    for _ in range(spans):
        tracer.span("schedule", 1.0, 2.0)
    tracer.end_step(number, 3, 2, 1.0)


def test_it_ends_where_others_do_and_when_it_is_told() -> None:
    tracer = StepTracer(7)
    tracer.start(4, 100)
    step(tracer, 1, 0)  # not all are ready
    assert tracer.wanted == 4 and tracer.take_reports() == []
    step(tracer, 2, 4)
    step(tracer, 3, 4, runs=False)
    step(tracer, 4, 0)  # another was told to stop first
    steps, ended = tracer.take_reports()
    assert isinstance(steps, TraceSteps) and isinstance(ended, TraceEnded)
    assert np.frombuffer(steps.steps, STEP)["step"].tolist() == [2]
    assert (ended.rank, ended.trace, ended.num_steps, ended.full) == (7, 4, 1, False)
    assert tracer.wanted == 0
    tracer.start(5, 9)
    tracer.stop(3)
    tracer.stop(5)
    assert tracer.take_reports() == [TraceEnded(7, 5, 0)]
    tracer.start(6, 9)
    step(tracer, 5, 6)
    tracer.start(7, 9)  # the front end has given the last one up
    step(tracer, 6, 7)
    kinds = [(type(x).__name__, x.trace) for x in tracer.take_reports()]
    assert kinds == [("TraceSteps", 6), ("TraceEnded", 6)]


def test_it_ends_for_want_of_room_and_forgets_a_step_that_broke() -> None:
    tracer = StepTracer()
    tracer.start(1, 100)
    step(tracer, 1, 1, spans=MAX_SPANS // 2)
    tracer.agreed(1, True)
    tracer.span("forward", 1.0, 2.0)  # and no end
    step(tracer, 3, 1, spans=MAX_SPANS // 2)
    *chunks, ended = tracer.take_reports()
    assert isinstance(ended, TraceEnded) and ended.full and ended.num_steps == 2
    for chunk in chunks:
        assert isinstance(chunk, TraceSteps)
        spans = np.frombuffer(chunk.spans, SPAN)
        assert np.frombuffer(chunk.steps, STEP)["spans"].sum() == len(spans)
        assert NAMES.index("forward") not in spans["name"]


# -- many ranks, made up --------------------------------------------------------------------------


def rank_trace(
    rank: int, steps: list[int], work: dict[str, int], *, clock: str = "one", shift: int = 0,
    latency: int = 0, slowest: dict[str, int] | None = None,
) -> RankTrace:  # fmt: skip
    """A layer a step: attention, gate, dispatch, experts, combine, with work [ns] of this rank and
    of the slowest, for which all wait. shift: of its clock."""
    slowest = slowest or work
    now, spans, rows = shift, [], []

    def add(name: str, thread: int, length: int) -> None:
        nonlocal now
        spans.append((NAMES.index(name), thread, 0 if thread else -1, now, length))
        now += length

    for number in steps:
        before = len(spans)
        start = now
        add("schedule", 0, work["schedule"])
        add("lockstep", 0, slowest["schedule"] - work["schedule"] + MS + latency)
        add("attention", 1, work["attention"])
        add("gate", 1, MS)
        add("dispatch", 1, 0)
        add("experts", 1, 0)
        add("dispatch", 1, slowest["attention"] - work["attention"] + MS - latency)
        add("experts", 1, work["experts"])
        add("combine", 1, slowest["experts"] - work["experts"] + MS)
        add("combine", 1, 0)
        spans.append((0, 0, -1, start, now - start))
        rows.append((number, 1, 2, len(spans) - before))
    return RankTrace(rank, f"host{clock}", clock, np.array(rows, STEP), np.array(spans, SPAN))


USUAL = {"schedule": MS, "attention": 2 * MS, "experts": 2 * MS}
SLOW = {"schedule": MS, "attention": 9 * MS, "experts": 2 * MS}


def test_the_slowest_rank_and_its_part_are_named() -> None:
    steps = [3, 4, 5]
    ranks = [rank_trace(r, steps, SLOW if r == 2 else USUAL, slowest=SLOW) for r in range(4)]
    trace = JobTrace(tuple(ranks))
    skew = skew_of(trace, offsets(trace))
    assert skew is not None
    by_kind = {s.kind: s for s in skew.spreads}
    assert by_kind.keys() == {"lockstep", "dispatch", "combine"}
    assert by_kind["dispatch"].mean == pytest.approx(7e-3) and by_kind["dispatch"].last == 2
    assert by_kind["dispatch"].last_share == 1 and by_kind["dispatch"].count == 3
    assert by_kind["lockstep"].p99 == 0 and by_kind["combine"].mean == 0
    assert (skew.blames[0].rank, skew.blames[0].part) == (2, "attention")
    assert skew.blames[0].seconds == pytest.approx(7e-3) and skew.blames[0].share > 0.9
    waits = [r.within for r in skew.ranks]
    assert waits[2] == min(waits) and waits[0] == pytest.approx(waits[2] + 7e-3)
    assert problems_of(chrome_json(trace, offsets(trace), {})) == []


def test_ranks_that_did_not_do_the_same_are_not_compared() -> None:
    ranks = [rank_trace(0, [1, 2], USUAL), rank_trace(1, [1, 2], USUAL)]
    short = RankTrace(1, "h", "one", ranks[1].steps[:1], ranks[1].spans[: len(ranks[1].spans) // 2])
    assert skew_of(JobTrace((ranks[0], short)), [Offset(), Offset()]) is None


def test_clocks_of_other_machines_are_found_within_their_bounds() -> None:
    """Rank 1 hears of the collectives' end 40 us late: that cannot be told from its clock."""
    shift, late = 123_456_789_000, 40_000
    steps = list(range(20))
    ranks = (
        rank_trace(0, steps, USUAL),
        rank_trace(1, steps, USUAL, clock="two", shift=shift, latency=late),
        rank_trace(2, steps, USUAL, clock="two", shift=shift),
        rank_trace(3, steps, USUAL),
    )
    found = offsets(JobTrace(ranks))
    assert found[0] == found[3] == Offset(0, 0)
    assert found[1] == found[2]  # one machine, one clock
    assert abs(found[1].ns - shift) <= late and found[1].error <= MS + late
    text = chrome_json(JobTrace(ranks), found, {})
    assert problems_of(text) == []
    events = json.loads(text)["traceEvents"]
    assert max(e["ts"] for e in events if e["ph"] == "X") < 1e6  # side by side, not minutes apart
    assert any("+-" in e["args"].get("labels", "") for e in events)


# -- what comes together --------------------------------------------------------------------------


def test_a_job_keeps_the_steps_that_all_ranks_have() -> None:
    collector = TraceCollector(1, 2, 5)
    for rank, steps in ((0, [4, 5, 6]), (1, [4, 5])):
        made = rank_trace(rank, steps, USUAL)
        collector.heard(TraceSteps(rank, 1, "h", "c", made.steps.tobytes(), made.spans.tobytes()))
    assert not collector.ended and collector.num_steps == 2 and collector.silent == [0, 1]
    trace = collector.result("rank 1 died")
    assert [r.steps["step"].tolist() for r in trace.ranks] == [[4, 5]] * 2
    assert len(trace.ranks[0].spans) == len(trace.ranks[1].spans)
    again = JobTrace.from_bytes(trace.to_bytes())
    assert again.cut_short == "rank 1 died" and again.num_steps == 2
    assert (again.ranks[1].spans == trace.ranks[1].spans).all()
    for content in (b"", b"\x81", b'{"no": 1}', trace.to_bytes()[:-5]):
        with pytest.raises(TraceDamaged):
            JobTrace.from_bytes(content)
