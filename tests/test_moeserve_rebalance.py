"""What rank 0 decides, how a rebalancer is put together, what is said of it; ranks as threads."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from thread_ranks import World, thread_world
from torch import Tensor

from ep.bundle import Bundle
from ep.group import EPGroup
from ep.migrate import StagingTooSmall
from ep.placement import EMPTY, ExpertPlacement
from ep.planning.plan_loads import PlanError
from ep.rebalance import Cause, RebalancePolicy
from ep.transfer import staging_buffer
from moeserve import metrics, wire
from moeserve.config import ServeConfig
from moeserve.errors import ConfigError, NotReady
from moeserve.llm import config_from
from moeserve.lockstep import Lockstep, StepAgreement, Vote
from moeserve.rebalancing.build import open_rebalancer, our_planner, rebalance_problems
from moeserve.rebalancing.desk import RebalanceDesk
from moeserve.rebalancing.plan import Answer, PlanMaker, Question, TableError
from moeserve.rebalancing.rebalancer import Rebalancer
from moeserve.wire_rebalance import Rebalance, RebalanceReport, RebalanceStats

world = thread_world  # the fixture

LAYERS, EXPERTS, RANKS = 3, 8, 2
OLD = ExpertPlacement.trivial(LAYERS, EXPERTS, RANKS, 2)
SKEWED = np.tile(np.array([90, 80, 70, 60, 1, 1, 1, 1]), (LAYERS, 1))
SKEWED[2] = 0  # an MTP layer that does not run


def maker(planner: Any = None, **more: Any) -> PlanMaker:
    group = EPGroup(0, RANKS, RANKS, object(), object())  # type: ignore[arg-type]
    fields: dict[str, Any] = {
        "planner": planner or our_planner(group, 1, EXPERTS),
        "policy": RebalancePolicy(0.95, 0.01, 4),
        "layer_bytes": [100] * LAYERS,
        "max_staging_bytes": 500,
        "ranks_per_node": RANKS,
        "rate": 1000.0,
    }
    return PlanMaker(**(fields | more))


def ask(loads: Any = SKEWED, made: PlanMaker | None = None, **more: Any) -> Answer:
    return (made or maker()).answer(Question(np.array(loads)[None], OLD, **more))


# -- what rank 0 decides ------------------------------------------------------------------------


def test_a_skewed_window_gives_a_plan_and_its_price() -> None:
    answer = ask()
    assert answer.cause is Cause.NONE and answer.placement is not None
    said = answer.explanation
    assert said["utilisation_after"] > said["utilisation_before"] == answer.utilisation
    assert said["balance_after"]["mean"] < said["balance_before"]["mean"]
    assert said["moved_slots"] > 0 and said["layers"] == 2
    assert said["seconds_at_rate"] == said["most_bytes_into_a_rank"] / 1000
    # the layer without load stays as it is
    new = answer.placement.physical_to_logical
    assert (new[2] == OLD.physical_to_logical[2]).all() and (new != OLD.physical_to_logical).any()
    assert said["planner"]["policy"] == "ours"


@pytest.mark.parametrize(
    ("loads", "cause"),
    [
        (SKEWED // 60, Cause.TOO_FEW_TOKENS),
        (np.full((LAYERS, EXPERTS), 50) + (np.arange(EXPERTS) < 2), Cause.BALANCED),
        (np.zeros((LAYERS, EXPERTS), int), Cause.TOO_FEW_TOKENS),
    ],
)
def test_why_nothing_is_planned(loads: Any, cause: Cause) -> None:
    def planner(*_: Any) -> Any:
        raise AssertionError("not asked")

    even = ExpertPlacement.trivial(LAYERS, EXPERTS, RANKS)
    answer = maker(planner).answer(Question(np.array(loads)[None], even))
    assert answer.cause is cause and answer.placement is None


def test_a_plan_that_gains_little_or_changes_nothing_is_not_taken() -> None:
    answer = ask(made=maker(lambda loads, old, options: (old, {})))
    assert answer.cause is Cause.SAME and answer.placement is None
    table = OLD.physical_to_logical[:, ::-1].copy()  # the same, mirrored
    mirrored = ExpertPlacement(table, EXPERTS, RANKS)
    answer = ask(made=maker(lambda loads, old, options: (mirrored, {})))
    assert answer.cause is Cause.NO_GAIN and answer.placement is None
    answer = ask(made=maker(lambda loads, old, options: (mirrored, {})), force=True)
    assert answer.placement is not None, "an operator may insist"


def test_a_dry_run_explains_and_moves_nothing() -> None:
    answer = ask(dry_run=True)
    assert answer.cause is Cause.DRY_RUN and answer.placement is None
    assert answer.explanation["moved_slots"] == ask().explanation["moved_slots"]


def test_a_given_table_is_taken_as_it_is_or_refused() -> None:
    rows = np.tile(np.array([7, 6, 5, 4, EMPTY, 3, 2, 1, 0, 0]), (LAYERS, 1))
    table = rows.astype("<i4").tobytes()
    answer = ask(table=table, loads=SKEWED * 0)
    assert answer.placement is not None
    halves = np.sort(answer.placement.physical_to_logical.reshape(LAYERS, RANKS, -1), axis=2)
    assert (halves == np.sort(rows.reshape(LAYERS, RANKS, -1), axis=2)).all()
    with pytest.raises(TableError, match="8 bytes.* 120 bytes"):
        ask(table=b"12345678")
    with pytest.raises(ValueError, match="experts without a slot"):
        ask(table=np.zeros((LAYERS, 10), "<i4").tobytes())


def test_windows_are_joined_and_options_reach_the_planner() -> None:
    seen: list[Any] = []

    def planner(loads: Any, old: ExpertPlacement, options: Any) -> Any:
        seen.append((loads.shape, dict(options)))
        return old, {}

    made = maker(planner, options={"robust": "max", "group_policy": "free"})
    question = Question(np.stack([SKEWED, SKEWED * 2]), OLD, options={"robust": "mean"})
    answer = made.answer(question)
    assert seen == [((2, LAYERS, EXPERTS), {"robust": "mean", "group_policy": "free"})]
    assert answer.explanation["picks"] == 3 * SKEWED.sum()


def test_too_little_staging_says_what_is_needed() -> None:
    with pytest.raises(StagingTooSmall, match="at least"):
        ask(made=maker(max_staging_bytes=99))


def test_options_that_the_planner_has_not_or_cannot_mind() -> None:
    group = EPGroup(0, RANKS, RANKS, object(), object())  # type: ignore[arg-type]
    plan = our_planner(group, 1, EXPERTS)
    with pytest.raises(PlanError, match=r"options=\['hope'\]: unknown; known: .*robust"):
        plan(SKEWED[None], OLD, {"hope": 1})
    with pytest.raises(PlanError, match="extra_slots_per_gpu"):
        plan(SKEWED[None], OLD, {"extra_slots_per_gpu": 1})


# -- settings -----------------------------------------------------------------------------------


def config(**rebalance: Any) -> ServeConfig:
    return ServeConfig.load(None, {"rebalance": rebalance})


def test_settings_that_cannot_work_are_refused_by_name() -> None:
    for given, words in (
        ({"robust": "max"}, "windows"),
        ({"interval_steps": 5}, "not used unless rebalance.enabled"),
        ({"threshold": 1.5}, "at most 1"),
        ({"group_policy": "nodes"}, "nearest: node"),
        ({"max_rate": "fast"}, "bytes"),
        ({"windows": 0}, "at least 1"),
    ):
        with pytest.raises(ConfigError, match=words):
            config(**given)
    two = EPGroup(0, 2, 2, object(), object())  # type: ignore[arg-type]
    alone = EPGroup.single()
    assert rebalance_problems(config(), alone, OLD, 1, EXPERTS) == []
    assert "one rank" in rebalance_problems(config(enabled=True), alone, OLD, 1, EXPERTS)[0]
    assert rebalance_problems(config(enabled=True), two, OLD, 1, EXPERTS) == []
    wrong = config(robust="mode", windows=2)
    assert "rebalance.robust='mode'" in rebalance_problems(wrong, two, OLD, 1, EXPERTS)[0]


def test_without_sections_its_settings_have_its_name() -> None:
    made = config_from("folder", 2, {"rebalance": True, "rebalance_max_rate": "5MB"})
    assert made.rebalance.enabled and made.rebalance.max_rate == 5_000_000
    with pytest.raises(ConfigError, match="enabled=True: unknown setting.*rebalance_deadline"):
        config_from("folder", 2, {"enabled": True})


# -- put together -------------------------------------------------------------------------------


class Slots:
    """A layer's slots on one rank: each byte of a slot is its expert's number."""

    def __init__(self, experts: list[int], size: int) -> None:
        self.num_slots = len(experts)
        self.data = torch.tensor(experts).clamp(0).to(torch.uint8)[:, None].repeat(1, size)

    def bundle(self, slot: int) -> Bundle:
        return Bundle(*self.data[slot].split(24))


class Model:
    def __init__(self, rank: int, layout: str = "plain", size: int = 64) -> None:
        self.layout, self.placement = layout, OLD
        self.slots = [Slots(OLD.experts_of(rank, layer), size) for layer in range(LAYERS)]

    def expert_weights(self) -> list[Any]:
        return self.slots

    def bundle_layouts(self) -> list[str]:
        return [self.layout] * LAYERS

    def routing_tables(self, placement: ExpertPlacement, rows: Any) -> dict[int, Any]:
        return dict.fromkeys(rows)

    def adopt_placement(self, placement: ExpertPlacement, tables: Any = None) -> None:
        self.placement = placement


class Recorder:
    """A window that always holds the same load, half of it on each of two ranks."""

    class window:  # noqa: N801
        @staticmethod
        def totals() -> Any:
            return SKEWED // 2


def open_one(group: EPGroup, model: Model, lines: list[str], notes: list[str], **given: Any) -> Any:
    planner = our_planner(group, 1, EXPERTS)
    return open_rebalancer(
        config(**given),
        group,
        model,
        OLD,
        Recorder(),
        planner,
        lines.append,
        notes,  # type: ignore
    )


@pytest.mark.parametrize("odd", [{"layout": "panels"}, {"size": 65}])
def test_ranks_with_other_bundles_do_not_exchange_them(world: World, odd: dict[str, Any]) -> None:
    def body(group: EPGroup) -> tuple[Any, list[str], str]:
        notes: list[str] = []
        model = Model(group.rank, **(odd if group.rank else {}))
        opened = open_one(group, model, [], notes)
        try:
            open_one(group, model, [], notes, enabled=True)
        except ConfigError as error:
            return opened, notes, str(error)
        raise AssertionError("not refused")

    for opened, notes, error in world(2, body):
        assert opened is None and len(notes) == 1
        assert "rebalancing: off" in notes[0] and "rank 1" in notes[0]
        assert error.startswith("rebalance.enabled=True: experts lie in memory in different forms")


def run(
    group: EPGroup, rebalancer: Rebalancer, until: Any, steps: int = 20_000
) -> list[StepAgreement]:
    lockstep, agreed = Lockstep(group), []
    for _ in range(steps):
        vote = Vote(
            has_work=True,
            rebalance=rebalancer.number,
            ballot=rebalancer.ballot(),
            placement_generation=rebalancer.placement.generation,
            wants_stop=bool(until()),
        )
        step = lockstep.agree(vote)
        rebalancer.advance(step)
        agreed.append(step)
        if all_want(group, bool(until())):
            return agreed
        time.sleep(0.0005)
    raise AssertionError("no end")


def all_want(group: EPGroup, mine: bool) -> bool:
    flag = torch.tensor([int(mine)])
    torch.distributed.all_reduce(flag, group=group.cpu_group)
    return int(flag) == group.size


def test_it_happens_by_itself_every_so_many_steps(world: World) -> None:
    def body(group: EPGroup) -> dict[str, Any]:
        lines: list[str] = []
        model = Model(group.rank)
        one = open_one(group, model, lines, [], enabled=True, interval_steps=7, min_picks=1)
        try:
            run(group, one, lambda: one.stats().done and one.stats().nothing)
            stats = one.stats()
        finally:
            one.close()
        assert model.placement is one.placement
        right = all(
            bool((model.slots[la].data[s] == e).all())
            for la in range(LAYERS)
            for s, e in enumerate(one.placement.experts_of(group.rank, la))
            if e != EMPTY
        )
        return {"right": right, "stats": stats, "lines": lines, "placement": one.placement}

    found = world(2, body)
    assert all(row["right"] for row in found)
    assert len({row["placement"] for row in found}) == 1
    first, second = (row["stats"] for row in found)
    assert first.enabled and first.done == second.done == 1
    assert first.generation == second.generation > 0
    assert first.utilisation_after > first.utilisation_before > 0
    # what is balanced now is left alone, and the reason is known
    assert first.look_reason == "balanced enough"
    assert [len(row["lines"]) for row in found] == [1, 0], "one line, by rank 0"
    assert "done in" in found[0]["lines"][0] and "utilisation" in found[0]["lines"][0]


def test_each_plan_has_a_staging_buffer_of_its_own_and_gives_it_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that was given up may still be written to: not into what the next one uses."""
    made: dict[int, list[weakref.ref[Tensor]]] = {}  # by the rank's thread

    def remembered(num_bytes: int) -> Tensor:
        mine = made.setdefault(threading.get_ident(), [])
        assert all(ref() is None for ref in mine), "held after the end of its plan"
        buffer = staging_buffer(num_bytes)
        mine.append(weakref.ref(buffer))
        return buffer

    monkeypatch.setattr("moeserve.rebalancing.rebalancer.staging_buffer", remembered)

    def body(group: EPGroup) -> None:
        one = open_one(group, Model(group.rank), [], [])
        try:
            for ask in (1, 2, 3):
                if group.rank == 0:
                    rows = np.random.default_rng(ask).permutation(EXPERTS)
                    table = np.tile(np.r_[rows, 0, 1], (LAYERS, 1)).astype("<i4").tobytes()
                    one.ask(Rebalance(ask, table=table))
                run(group, one, lambda ask=ask: one.stats().done == ask)
        finally:
            one.close()

    world(2, body)
    assert [len(buffers) for buffers in made.values()] == [3, 3]
    assert all(ref() is None for buffers in made.values() for ref in buffers)


def test_what_cannot_be_done_is_refused_and_is_no_failure(world: World) -> None:
    wishes = [
        Rebalance(1, options={"robust": "mode"}),
        Rebalance(2, table=b"short"),
        Rebalance(3, table=np.zeros((LAYERS, 10), "<i4").tobytes()),
    ]

    def body(group: EPGroup) -> Any:
        one = open_one(group, Model(group.rank), [], [])
        reports: list[RebalanceReport] = []
        try:
            for number, wish in enumerate(wishes, start=1):
                if group.rank == 0:
                    one.ask(wish)
                run(group, one, lambda number=number: one.number >> 32 == number and not one.moving)
                reports += one.take_reports()
            stats = one.stats()
            assert not stats.nothing and not stats.look_reason, "the job did not look"
            return reports, stats.abandoned
        finally:
            one.close()

    (reports, abandoned), (others, _) = world(2, body)
    assert [r.result for r in reports] == ["refused"] * 3 and abandoned == 0 and others == []
    words = ("robust='mode'", "5 bytes", "experts without a slot")
    for report, word in zip(reports, words, strict=True):
        assert word in report.reason


def test_wishes_are_answered_and_one_at_a_time(world: World) -> None:
    def body(group: EPGroup) -> list[RebalanceReport]:
        one = open_one(group, Model(group.rank), [], [])
        reports: list[RebalanceReport] = []
        try:
            one.ask(Rebalance(1, dry_run=True))
            one.ask(Rebalance(2))
            if group.rank:
                return one.take_reports()
            reports += one.take_reports()
        finally:
            if group.rank:
                run_quietly(group, one)
                one.close()

        def answered() -> bool:
            reports.extend(one.take_reports())
            return len(reports) == 2

        run(group, one, answered)
        assert not one.stats().nothing and not one.stats().look_reason, "a dry run is no look"
        one.close()
        return reports

    def run_quietly(group: EPGroup, one: Rebalancer) -> None:
        run(group, one, lambda: True)

    (first, others) = world(2, body)
    assert [(r.ask, r.result) for r in others] == [(1, "refused"), (2, "refused")]
    assert [(r.ask, r.result, r.reason) for r in first] == [
        (2, "refused", "a rebalance is under way; wait until it has ended"),
        (1, "nothing", "a dry run"),
    ]
    assert first[1].explanation["moved_slots"] > 0 and first[0].explanation == {}


# -- the front end's side -----------------------------------------------------------------------


def moving_stats() -> RebalanceStats:
    names = RebalanceStats.__struct_fields__[:16]
    return RebalanceStats(**dict.fromkeys(names, 0) | {"enabled": True, "state": "moving"})


def test_the_desk_waits_for_its_own_answer() -> None:
    async def main() -> None:
        sent: list[Any] = []
        desk = RebalanceDesk(lambda rank, message: sent.append((rank, message)), lambda: None)
        first = asyncio.ensure_future(desk.ask(dry_run=True))
        second = asyncio.ensure_future(desk.ask(force=True, options={"robust": "max"}))
        await asyncio.sleep(0)
        (_, a), (rank, b) = sent
        assert rank == 0 and a.dry_run and b.force and b.options == {"robust": "max"}
        desk.heard(RebalanceReport(0, b.ask, "done", "", {"x": 1}))
        desk.heard(RebalanceReport(0, 99, "done", ""))
        assert (await second).explanation == {"x": 1}
        assert not first.done()
        desk.lost("rank 1 died")
        with pytest.raises(NotReady, match="rank 1 died"):
            await first
        with pytest.raises(NotReady, match="0.01 s"):
            await desk.ask(seconds=0.01)
        assert desk.state() is None
        desk = RebalanceDesk(lambda rank, message: None, lambda: moving_stats())
        assert desk.state()["state"] == "moving"
        desk.lost("rank 1 died")
        assert desk.state()["state"] == "ended"

    asyncio.run(main())


def test_what_ranks_report_shows_in_health_and_metrics() -> None:
    stats = RebalanceStats(
        enabled=True, state="moving", seconds_in_state=1.23456, generation=7, batch=1,
        num_batches=4, done=3, nothing=5, abandoned=2, moved_slots=90, moved_bytes=12345,
        seconds=4.5,
        gather_seconds=0.25, switch_seconds=0.5, switch_seconds_most=0.01, refused_requests=0,
        last_result="abandoned", last_reason="rank 1: a source stopped answering",
        utilisation=0.8, utilisation_before=0.7, utilisation_after=0.95,
    )  # fmt: skip
    report = wire.RankStats(*range(15), 1.0, 0.5, 0.1, rebalance=stats)  # type: ignore[arg-type]
    heard = wire.decode_to_front_end(wire.encode(report))
    assert isinstance(heard, wire.RankStats) and heard.rebalance == stats
    desk = RebalanceDesk(lambda rank, message: None, lambda: stats)
    state = desk.state()
    assert state is not None and state["last_reason"] == "rank 1: a source stopped answering"
    assert (state["state"], state["seconds_in_state"], state["batch"]) == ("moving", 1.235, 1)
    client = SimpleNamespace(fleet=SimpleNamespace(ranks=[SimpleNamespace(stats=report)]))
    shown = {
        (s.name, *s.labels.values()): s.value
        for metric in metrics._rebalancing(client)  # type: ignore[arg-type]
        for s in metric.samples
    }
    assert shown["moeserve_rebalances_total", "abandoned"] == 2
    assert shown["moeserve_rebalances_total", "done"] == 3
    assert shown["moeserve_rebalance_moved_bytes_total",] == 12345
    assert shown["moeserve_rebalance_running",] == 1
    assert shown["moeserve_rebalance_stage_seconds",] == stats.seconds_in_state
    assert shown["moeserve_expert_utilisation", "after"] == 0.95
    client.fleet.ranks[0].stats = None
    assert list(metrics._rebalancing(client)) == []  # type: ignore[arg-type]
