"""Recordings begin and end at agreed steps and lose nothing; sums over ranks."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest
from gated_toy import (
    EXPERTS,
    LAYERS,
    TOP,
    Twin,
    ask,
    collect,
    make,
    recorder_of,
    run,
    some_work,
)
from thread_ranks import World, thread_world  # noqa: F401

from ep.group import EPGroup
from ep.placement import ExpertPlacement
from ep.recording import ExpertRecording, RecordingInfo
from moeserve import recorder as recorder_module
from moeserve import wire
from moeserve.collector import JobLoad, RecordingCollector
from moeserve.device.api import ReplayedApi
from moeserve.engine import Engine
from moeserve.errors import EngineFailed
from moeserve.lockstep import Lockstep, Vote
from moeserve.wire_experts import Counts, LoadInterval, RecordingEnded

# -- recording ----------------------------------------------------------------------------------

INFO = RecordingInfo(num_ranks=1, interval_steps=4, layers=(1, 2, 3), picks_per_token=TOP)


@pytest.mark.parametrize("interval", [1, 3, 64])
@pytest.mark.parametrize("seed", range(3))
def test_a_recording_is_the_steps_between_its_ends(
    interval: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    engine = make()
    if seed == 2:  # as on a GPU, where picks are counted a step later
        recorder_of(engine).api = ReplayedApi()
        monkeypatch.setattr(recorder_module, "MAX_STEPS", 2)
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
