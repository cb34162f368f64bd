"""StepRecorder and the collector behind it: against a brute-force count of all rows, phases,
padding, failed steps; recordings that begin and end at agreed steps and lose nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from thread_ranks import World, thread_world  # noqa: F401
from torch import Tensor

from ep.group import EPGroup
from ep.load import DECODE, PREFILL, LoadWindow
from ep.placement import ExpertPlacement
from ep.recording import ExpertRecording, RecordingInfo
from moeserve import recorder as recorder_module
from moeserve import wire
from moeserve.cache import BlockCache
from moeserve.collector import JobLoad, RecordingCollector
from moeserve.engine import Engine
from moeserve.errors import EngineFailed
from moeserve.lockstep import Lockstep, Vote
from moeserve.plan import StepPlan
from moeserve.recorder import StepRecorder
from moeserve.request import Request, SamplingParams
from moeserve.runner import ModelRunner
from moeserve.scheduler import ScheduleLimits, Scheduler
from moeserve.toy_model import ToyModel
from moeserve.wire_experts import Counts, LoadInterval, RecordingEnded

LAYERS, EXPERTS, TOP = 3, 7, 2


def gate(token: int, position: int, layer: int) -> list[int]:
    """The picks of one row: some function of what the row is."""
    first = (token * 31 + position * 7 + layer) % EXPERTS
    return [first, (first + 1 + token % (EXPERTS - 1)) % EXPERTS]


class Gated(ToyModel):
    """A toy with a gate. padded: rows of ids are filled up to a multiple of 8, as for a captured
    graph. fail_at: the forward that raises, after two layers."""

    def __init__(self, group: EPGroup | None = None, padded: bool = False, fail_at: int = -1):
        super().__init__(group=group)
        self.padded, self.fail_at = padded, fail_at

    def forward(self, batch, cache, observer=None):  # type: ignore[no-untyped-def]
        rows = list(zip(batch.token_ids.tolist(), batch.positions.tolist(), strict=True))
        for layer in range(LAYERS):
            ids = torch.tensor([gate(t, p, layer) for t, p in rows], dtype=torch.int32)
            ids = ids.reshape(-1, TOP)
            if self.padded:
                ids = torch.cat([ids, torch.full((-len(ids) % 8, TOP), 3, dtype=torch.int32)])
            observer.expert_picks(layer, ids)
            observer.rows_sent(layer, [len(rows) + layer] * (self.group.size if self.group else 1))
            if layer == 1 and self.num_forwards == self.fail_at:
                self.num_forwards += 1
                raise RuntimeError("as asked")
        return super().forward(batch, cache, observer)


def make(
    model: Gated | None = None,
    group: EPGroup | None = None,
    steps: int = 1000,
    blocks: int = 60,
    chunk: int | None = None,
) -> Engine:
    model = model or Gated(group)
    cache = BlockCache(blocks, 4, 8, True)
    pages = model.cache_spec.allocate(blocks, 4, torch.device("cpu"))
    limits = ScheduleLimits(8, 24, chunk, 128, model.config.vocab_size)
    rank = 0 if group is None else group.rank
    recorder = StepRecorder(LoadWindow(LAYERS, EXPERTS, steps), rank)
    placement = ExpertPlacement.trivial(LAYERS, EXPERTS, 1 if group is None else group.size)
    runner = ModelRunner(model, pages, cache.tables, recorder)
    return Engine(runner, Scheduler(cache, limits), group or EPGroup.single(), recorder, placement)


class Twin:
    """Counts each step's rows one by one, from plans as the scheduler made them."""

    def __init__(self, engine: Engine) -> None:
        self.steps: list[np.ndarray] = []  # [2, L, E] each
        self.tokens: list[list[int]] = []
        schedule = engine.scheduler.schedule

        def watched() -> StepPlan:
            plan = schedule()
            if plan.num_tokens or engine.group.size > 1:
                self._count(plan)
            return plan

        engine.scheduler.schedule = watched  # type: ignore[method-assign]

    def _count(self, plan: StepPlan) -> None:
        counts, tokens = np.zeros((2, LAYERS, EXPERTS), np.int64), [0, 0]
        for sequence, start, count in zip(plan.sequences, plan.starts, plan.counts, strict=True):
            known = len(sequence.tokens)
            for position in range(start, start + count):
                last = position == known - 1 and count == 1
                is_decode = last and position >= sequence.num_prompt_tokens
                tokens[is_decode] += 1
                for layer in range(LAYERS):
                    for expert in gate(sequence.tokens[position], position, layer):
                        counts[DECODE if is_decode else PREFILL, layer, expert] += 1
        self.steps.append(counts)
        self.tokens.append(tokens)

    def total(self) -> np.ndarray:
        total: np.ndarray = np.sum(self.steps, axis=0)
        return total


def ask(name: str, prompt: list[int], num: int = 5) -> Request:
    sampling = SamplingParams(max_tokens=num, temperature=0.0, ignore_eos=True)
    return Request(request_id=name, prompt_token_ids=tuple(prompt), sampling=sampling)


def some_work(engine: Engine, rng: random.Random, count: int = 10, name: str = "") -> None:
    base = [rng.randrange(97) for _ in range(30)]
    for i in range(count):
        prompt = base[: rng.randrange(31)] + [rng.randrange(97) for _ in range(rng.randrange(1, 9))]
        engine.add_request(ask(f"{name}{i}", prompt, rng.randrange(1, 20)))


def run(engine: Engine, each: Callable[[], None] = lambda: None) -> None:
    while engine.has_work:
        engine.step()
        each()


def recorder_of(engine: Engine) -> StepRecorder:
    assert engine.recorder is not None
    return engine.recorder


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


# -- recording ----------------------------------------------------------------------------------

INFO = RecordingInfo(num_ranks=1, interval_steps=4, layers=(1, 2, 3), picks_per_token=TOP)


def collect(engine: Engine, collector: RecordingCollector) -> None:
    for report in engine.take_load_reports():
        message = wire.decode_to_front_end(wire.encode(report))
        assert isinstance(message, type(report))
        collector.heard(message)  # type: ignore[arg-type]


@pytest.mark.parametrize("interval", [1, 3, 64])
@pytest.mark.parametrize("seed", range(3))
def test_a_recording_is_the_steps_between_its_ends(interval: int, seed: int) -> None:
    rng = random.Random(seed)
    engine = make()
    twin = Twin(engine)
    info = RecordingInfo(
        num_ranks=1, interval_steps=interval, layers=(1, 2, 3), picks_per_token=TOP
    )
    collector = RecordingCollector(1, info)
    some_work(engine, rng, name="x")
    for _ in range(5):
        engine.step()
    begin = len(twin.steps)
    engine.start_recording(1, interval)
    for _ in range(11):
        engine.step()
        collect(engine, collector)
    end = len(twin.steps)
    engine.stop_recording(1)
    assert not collector.ended
    run(engine, lambda: collect(engine, collector))
    assert collector.ended
    recording = collector.result()
    assert (recording.counts.sum(axis=0) == np.sum(twin.steps[begin:end], axis=0)).all()
    assert recording.num_steps.sum() == end - begin == 11
    assert recording.num_intervals == -(-11 // interval)
    assert (recording.tokens.sum(axis=0) == np.sum(twin.tokens[begin:end], axis=0)).all()
    assert not recording.missing_picks.any()
    for i in range(recording.num_intervals):
        of = twin.steps[begin + i * interval : min(begin + (i + 1) * interval, end)]
        assert (recording.counts[i] == np.sum(of, axis=0)).all()
    assert recording.steps[0, 0] == 6 and recording.steps[-1, 1] == 16
    assert recording.placement_of(0) == engine.placement
    assert (recording.seconds > 0).all()
    traffic = sum(map(sum, twin.tokens[begin:end])) * LAYERS + 11 * sum(range(LAYERS))
    assert recording.traffic.sum() == traffic
    # The window and the totals saw all of it, before and after too.
    assert (recorder_of(engine).totals == twin.total()).all()


def test_max_steps_ends_it_and_stopping_later_is_harmless() -> None:
    engine = make()
    twin = Twin(engine)
    collector = RecordingCollector(7, INFO)
    engine.start_recording(7, 4, max_steps=6)
    some_work(engine, random.Random(1))
    run(engine, lambda: collect(engine, collector))
    assert collector.ended and collector.num_steps == 6
    assert (collector.result().counts.sum(axis=0) == np.sum(twin.steps[:6], axis=0)).all()
    engine.stop_recording(7)
    engine.step()
    assert engine.take_load_reports() == []


def test_a_recording_that_never_began_ends_empty() -> None:
    engine = make()
    collector = RecordingCollector(1, INFO)
    engine.start_recording(1, 4)
    engine.stop_recording(1)
    collect(engine, collector)
    assert collector.ended and collector.result().num_intervals == 0
    engine.start_recording(2, 4)
    engine.step()  # agreed, but idle
    engine.stop_recording(2)
    engine.step()
    collector = RecordingCollector(2, INFO)
    collect(engine, collector)
    assert collector.ended and collector.result().totals().sum() == 0


def test_a_stop_of_the_job_ends_the_recording() -> None:
    engine = make()
    collector = RecordingCollector(1, INFO)
    engine.start_recording(1, 4)
    engine.add_request(ask("a", [1, 2], 3))
    run(engine)
    engine.request_stop()
    engine.step()
    assert engine.stopped
    collect(engine, collector)
    assert collector.ended and collector.num_tokens == 4


def test_a_new_placement_begins_a_new_interval() -> None:
    engine = make()
    twin = Twin(engine)
    collector = RecordingCollector(1, INFO)
    engine.start_recording(1, 100)
    some_work(engine, random.Random(2))
    for _ in range(5):
        engine.step()
    assert engine.placement is not None
    engine.placement = ExpertPlacement.trivial(LAYERS, EXPERTS, 1, 2, generation=4)
    for _ in range(3):
        engine.step()
    engine.stop_recording(1)
    run(engine, lambda: collect(engine, collector))
    recording = collector.result()
    assert recording.num_steps.tolist() == [5, 3] and recording.generations == [0, 4]
    assert recording.placement_of(1) == engine.placement
    assert (recording.counts[1] == np.sum(twin.steps[5:8], axis=0)).all()


# -- several ranks ------------------------------------------------------------------------------


def test_lockstep_records_only_what_every_rank_is_ready_for(world: World) -> None:
    votes = [(0, 0, 0), (3, 0, 3), (3, 3, 3), (3, 3, 3), (3, 0, 3), (0, 0, 4), (4, 4, 4)]

    def body(group: EPGroup) -> list[int]:
        lockstep = Lockstep(group)
        return [lockstep.agree(Vote(True, recording=v[group.rank])).recording for v in votes]

    assert world(3, body) == [[0, 0, 3, 3, 0, 0, 4]] * 3


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_begin_and_end_together_whenever_they_hear_of_it(world: World, ranks: int) -> None:
    """Each hears of start and stop at another step; one has no requests at all."""

    def body(group: EPGroup) -> tuple[list[Any], list[Any], list[Any]]:
        engine = make(group=group)
        twin = Twin(engine)
        if group.rank != 1:
            some_work(engine, random.Random(group.rank), name=f"r{group.rank}-")
        reports: list[Any] = []
        for step in range(40):
            if step == 2 + 2 * group.rank:
                engine.start_recording(5, 3)
            if step == 20 - 2 * group.rank:
                engine.stop_recording(5)
            engine.step()
            reports += engine.take_load_reports()
        return reports, twin.steps, twin.tokens

    results = world(ranks, body)
    info = RecordingInfo(num_ranks=ranks, interval_steps=3, layers=(1, 2, 3), picks_per_token=TOP)
    collector = RecordingCollector(5, info)
    pending = [list(r[0]) for r in results]
    rng = random.Random(3)
    while any(pending):  # messages of different ranks come in any order
        rank = rng.choice([r for r in range(ranks) if pending[r]])
        collector.heard(pending[rank].pop(0))
    assert collector.ended
    recording = collector.result()
    # Begun when the last rank had heard (its vote at step 2 ), ended when the first had.
    first, last = 2 + 2 * (ranks - 1), 20 - 2 * (ranks - 1)
    wanted = sum(np.sum(steps[first:last], axis=0) for _, steps, _ in results)
    assert (recording.counts.sum(axis=0) == wanted).all() and wanted.sum() > 0
    assert not recording.missing_picks.any()
    assert recording.steps[0, 0] == first + 1
    assert recording.traffic[:, 0].sum() > 0 and (recording.traffic[1] > 0).all()
    assert recording.placements[0].num_ranks == ranks


# -- the collector ------------------------------------------------------------------------------


def interval(rank: int, index: int, counts: np.ndarray, generation: int = 0) -> LoadInterval:
    return LoadInterval(
        rank=rank,
        recording=1,
        index=index,
        first_step=index * 10,
        last_step=index * 10 + 9,
        num_steps=4,
        seconds=0.5 + rank,
        tokens=(rank, 2),
        generation=generation,
        counts=Counts.pack(counts),
        rows=Counts.pack(np.array([rank, 1])),
    )


def test_a_long_recording_stays_within_its_memory() -> None:
    info = RecordingInfo(num_ranks=1, interval_steps=4, layers=(1, 2, 3))
    size = 2 * LAYERS * EXPERTS * 4 + 8
    collector = RecordingCollector(1, info, max_bytes=10 * size)
    total = np.zeros((2, LAYERS, EXPERTS), np.int64)
    rng = np.random.default_rng(0)
    for i in range(1000):
        counts = rng.integers(0, 300, total.shape)
        total += counts
        message = interval(0, i, counts)
        collector.heard(
            LoadInterval(
                **{f: getattr(message, f) for f in message.__struct_fields__}
                | {"rows": Counts.pack(np.array([1]))}
            )
        )
        assert collector.nbytes <= 10 * size and collector.num_intervals <= 10
    collector.heard(RecordingEnded(0, 1, 1000))
    recording = collector.result()
    assert (recording.counts.sum(axis=0) == total).all() and recording.num_steps.sum() == 4000
    assert recording.info.interval_steps == recording.num_steps.max() > 4
    assert (recording.steps[1:, 0] == recording.steps[:-1, 1] + 1).all()


def test_ranks_that_differ_are_a_fault() -> None:
    info = RecordingInfo(num_ranks=2, interval_steps=4, layers=(1, 2, 3))
    counts = np.ones((2, LAYERS, EXPERTS), np.int64)
    collector = RecordingCollector(1, info)
    collector.heard(interval(0, 0, counts))
    assert collector.num_intervals == 0, "half of an interval is none"
    with pytest.raises(EngineFailed, match="interval 0 of rank 1"):
        collector.heard(interval(1, 0, counts, generation=2))
    collector = RecordingCollector(1, info)
    for rank in (1, 0):
        collector.heard(interval(rank, 0, counts))
    with pytest.raises(EngineFailed, match="twice"):
        collector.heard(interval(0, 0, counts))
    result = collector.result()
    assert result.seconds.tolist() == [1.5] and result.traffic.tolist() == [[[0, 1], [1, 1]]]
    assert (result.counts[0] == 2).all() and result.tokens.tolist() == [[1, 4]]


def test_reports_of_ranks_are_summed() -> None:
    engines = [make() for _ in range(2)]
    twins = [Twin(e) for e in engines]
    for i, engine in enumerate(engines):
        some_work(engine, random.Random(i))
        run(engine)
    reports = [engine.load_report(3) for engine in engines]
    reports = [wire.decode_to_front_end(wire.encode(r)) for r in reports]  # type: ignore[misc]
    reports[1] = msgspec.structs.replace(reports[1], rank=1)
    load = JobLoad.of(reports, 2)
    assert (load.totals == twins[0].total() + twins[1].total()).all()
    assert (load.window == load.totals).all()
    assert (load.tokens == np.sum([np.sum(t.tokens, axis=0) for t in twins], axis=0)).all()
    assert Engine.load_report(Bare()).totals.unpack().shape == (2, 0, 0)  # type: ignore[arg-type]


class Bare:
    """An engine that counts nothing."""

    recorder, placement, num_steps = None, None, 0
    group = EPGroup.single()


@pytest.mark.parametrize("top", [0, 255, 256, 70_000, 1 << 40])
def test_counts_travel_in_the_smallest_type(top: int) -> None:
    array = np.array([[0, top], [1, 2]], np.int64)
    packed = Counts.pack(array)
    assert (packed.unpack() == array).all()
    assert len(packed.data) == 4 * {0: 1, 255: 1, 256: 2, 70_000: 4, 1 << 40: 8}[top]
    assert Counts.pack(np.zeros((2, 0, 0), np.int64)).unpack().shape == (2, 0, 0)


def test_a_recording_survives_its_file() -> None:
    engine = make()
    collector = RecordingCollector(1, INFO)
    engine.start_recording(1, 4)
    some_work(engine, random.Random(8))
    run(engine, lambda: collect(engine, collector))
    engine.stop_recording(1)
    engine.step()
    collect(engine, collector)
    recording = collector.result()
    again = ExpertRecording.from_bytes(recording.to_bytes())
    assert (again.counts == recording.counts).all() and again.info == recording.info


def test_picks_are_kept_not_copied() -> None:
    """What a step costs: the gate's own tensor is held, nothing is computed until later."""
    recorder = StepRecorder(LoadWindow(1, 4, 4))
    ids: Tensor = torch.zeros(3, 2, dtype=torch.int32)
    recorder.begin_step(StepPlan(num_tokens=3))
    recorder.expert_picks(0, ids)
    assert recorder._picks[0] is ids
    recorder.end_step(1)
    assert recorder._picks[0] is ids
