"""What `moeserve bench serve` makes of its calls: figures, comparisons, and the knee of a sweep."""

from __future__ import annotations

import heapq
import json
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from server_world import checkpoint_folder  # noqa: F401  (fixture)

from launch.bench import sweep
from launch.bench.compare import ratios, unlike_settings
from launch.bench.serve_call import CUT, Call, Fault
from launch.bench.serve_figures import (
    Limits,
    errors_by_kind,
    figures,
    gaps,
    generator,
    latency,
    over_time,
    samples,
)
from launch.bench.serve_peer import Peer, Snapshot, acceptance, parse_samples, step_breakdown
from launch.bench.serve_run import FORMAT
from launch.bench.serve_text import check_texts
from launch.bench.sweep import faults, next_rate
from launch.bench.sweep_pace import pace_of
from launch.bench.sweep_show import verdict
from moeserve.errors import ConfigError


def call(
    number: int, sent: float, times: list[float], fault: str | None = None, **more: Any
) -> Call:
    made = Call(number, 0, 8, len(times), None, sent=sent, fault=fault, **more)
    made.times = array("d", times)
    made.ended = times[-1] if times else sent + 1
    made.output_tokens = len(times)
    made.prompt_tokens, made.cached_tokens = 8, 2
    return made


def test_figures_of_a_known_run() -> None:
    calls = [call(0, 0.0, [1.0, 1.5, 2.0]), call(1, 1.0, [1.5, 2.5, 5.0])]
    report = figures(calls, 2, 4, Limits(ttft_ms=600))
    assert report["seconds"] == 5.0 and report["goodput_requests_per_second"] == 0.2
    assert report["throughput"]["all"]["output_tokens_per_second"] == pytest.approx(6 / 5)
    assert report["throughput"]["per_node"]["computed_input_tokens_per_second"] == 12 / 5 / 2
    assert report["throughput"]["per_gpu"]["cached_input_tokens_per_second"] == 4 / 5 / 4
    assert report["cache_hit_share"] == 0.25
    held = report["latency_ms"]
    assert held["ttft"]["mean"] == 750 and held["ttft"]["p99"] == 1000
    assert held["tpot"]["least"] == 500 and held["tpot"]["most"] == pytest.approx(1750)
    assert held["itl"]["count"] == 4 and held["e2e"]["most"] == 4000
    series = over_time(calls, bins=5)
    assert sum(series["output_tokens_per_second"]) * 1.0 == pytest.approx(6)
    assert sum(series["in_flight"]) == pytest.approx(2 + 4)  # seconds that calls lasted


def test_calls_that_failed_count_apart() -> None:
    broken = call(1, 0.0, [0.5], Fault.SHORT, detail="1 of 3")
    calls = [call(0, 0.0, [1.0, 2.0]), broken, call(2, 0.0, [], CUT)]
    report = figures(calls, 1, 1, Limits())
    assert report["calls"] == {
        "sent": 3, "good": 1, "failed": 1, "cut_short_here": 1, "within_limits": 1,
    }  # fmt: skip
    assert report["latency_ms"]["ttft"]["count"] == 1
    assert errors_by_kind(calls) == {Fault.SHORT: {"count": 1, "examples": ["1 of 3"]}}
    empty = figures([], 1, 1, Limits())
    assert empty["latency_ms"]["ttft"] is None and empty["tokens"]["input"] is None


def test_itl_is_between_events_of_our_server_and_of_a_peer_alike() -> None:
    ours = call(0, 0.0, [1.0, 2.0])
    ours.counts = array("q", [1, 3])
    ours.output_tokens = None
    peers = call(0, 0.0, [1.0, 2.0])
    peers.output_tokens = 4  # by usage
    for several in (ours, peers):
        assert several.num_output == 4 and several.tpot == pytest.approx(1 / 3)
        assert gaps(several) == [1.0]
        assert figures([several], 1, 1, Limits())["tokens_an_event"] == 2.0
    for moments in ([1.0] * 4, [1.0, 1.00005, 1.0001, 1.00015]):
        pieces = call(0, 0.0, moments)  # nothing tells how long a token took
        assert pieces.tpot is None and gaps(pieces) == [] and pieces.in_one_piece
        assert Limits().kept_by(pieces) and not Limits(tpot_ms=1000).kept_by(pieces)
    assert not call(0, 0.0, [1.0, 1.0]).at_once and call(0, 0.0, [1.0, 1.0]).tpot == 0.0
    unknown = call(0, 0.0, [1.0, 2.0])
    unknown.output_tokens = None
    assert figures([peers, unknown], 1, 1, Limits())["tokens_an_event"] is None


@given(st.lists(st.floats(1e-4, 1e3), min_size=1, max_size=200))
def test_percentiles_are_values_that_were_measured(values: list[float]) -> None:
    held = latency(values)
    assert held is not None
    in_ms = sorted(1e3 * x for x in values)
    for name, percent in (("p50", 50), ("p90", 90), ("p99", 99)):
        assert held[name] in in_ms
        assert sum(x <= held[name] for x in in_ms) >= percent / 100 * len(in_ms) - 1e-9
        below = sum(x < held[name] for x in in_ms)
        assert below <= percent / 100 * len(in_ms)
    assert held["least"] <= held["p50"] <= held["p90"] <= held["p99"] <= held["most"]


def test_a_generator_that_is_late_or_busy_says_so() -> None:
    calls = [call(n, n + 0.0, [n + 0.1, n + 0.2]) for n in range(20)]
    for made in calls:
        made.due = made.sent
    assert not generator(calls, [0.0001] * 50, 0.1, 1)["was_limit"]
    assert "--workers" in generator(calls, [0.0001] * 50, 0.97, 1)["why"]
    assert "event loop" in generator(calls, [0.08] * 50, 0.1, 1)["why"]
    calls[3].due = calls[3].sent - 0.5
    told = generator(calls, [0.0001] * 50, 0.1, 1)
    assert told["was_limit"] and "500 ms after its time" in told["why"]
    # A server that does not keep up is the limit, unless the generator has no time itself.
    assert not generator(calls, [0.08] * 50, 0.1, 1, kept_up=False)["was_limit"]
    assert generator(calls, [0.08] * 50, 0.97, 1, kept_up=False)["was_limit"]


def test_how_late_timers_are_is_held_against_each_figure() -> None:
    """4 ms are nothing beside half a second to the first token and 150 ms of fifteen more, and
    much beside the 10 ms between two of them."""
    calls = [call(n, 0.0, [0.5 + 0.01 * k for k in range(16)]) for n in range(20)]
    told = generator(calls, [0.004] * 50, 0.1, 1)
    assert not told["was_limit"] and told["coarse"] == ["itl"]
    told = generator(calls, [0.06] * 50, 0.1, 1)
    assert told["coarse"] == ["tpot", "itl"] and "from first to last token" in told["why"]
    assert "of the TTFT" not in told["why"]


def test_a_usage_far_from_its_text_is_a_fault() -> None:
    def answer(number: int, text: str, usage: int, **more: Any) -> Call:
        made = call(number, 0.0, [1.0, 2.0], **more)
        made.text, made.output_tokens, made.num_events = text, usage, 2
        return made

    calls = [
        answer(0, "a b c d e f g h", 8),
        answer(1, "a", 16),
        answer(2, " ".join("x" * 30), 4),
        answer(3, "a", 16, beside=True),  # reasoning is no text
        answer(4, "\N{REPLACEMENT CHARACTER} " * 30, 4),
    ]
    found = check_texts(calls, lambda text: len(text.split()))
    assert [x.fault for x in calls] == [None, Fault.DISAGREES, Fault.DISAGREES, None, None]
    assert calls[1].detail == "16 tokens in usage, 1 in its text by --tokenizer"
    assert (found.answers, found.tokens, found.usage) == (1, 8, 8) and not found.differs
    assert check_texts([answer(0, "a b c d e f g h", 7)], lambda text: len(text.split())).differs


def test_nodes_are_counted_as_the_job_was_started() -> None:
    peer = Peer.__new__(Peer)
    ranks = [{"host": "one"}, {"host": "one"}]
    peer.health = {"ranks": ranks, "launch": {"nodes": [{"name": "a"}, {"name": "b"}]}}
    assert peer.num_nodes == 2  # two of one host name
    for launch in (None, {"nodes": []}):
        peer.health = {"ranks": ranks, "launch": launch}
        assert peer.num_nodes == 1
    peer.health = None
    assert peer.num_nodes is None


def test_what_metrics_say_is_what_they_grew_by() -> None:
    text = """# HELP moeserve_steps_total Steps
moeserve_steps_total{rank="0"} %d.0
moeserve_steps_total{rank="1"} 4.0
moeserve_step_seconds_total{rank="0"} %g
moeserve_step_part_seconds_total{part="gate",rank="0"} %g
moeserve_drafted_tokens_total{rank="0"} %d
moeserve_accepted_tokens_total{rank="0"} %d
moeserve_requests_in_flight 3.0
"""
    before = Snapshot(parse_samples(text % (4, 1.0, 0.5, 10, 10)))
    after = Snapshot(parse_samples(text % (14, 1.2, 0.6, 50, 40)))
    rows = step_breakdown(before, after)
    assert [x["steps"] for x in rows] == [10, 0]
    assert rows[0]["step_ms"] == pytest.approx(20) and rows[1]["step_ms"] == 0
    assert rows[0]["parts_ms"] == {"gate": pytest.approx(10)}
    waits = 'moeserve_step_part_seconds_total{part="lockstep",rank="0"} %g\n'
    later = Snapshot(parse_samples(text % (14, 1.2, 0.6, 50, 40) + waits % 0.05))
    (row, _) = step_breakdown(before, later)  # a step is all of it, as in traces
    assert row["parts_ms"]["lockstep"] == pytest.approx(5) and row["step_ms"] == pytest.approx(25)
    assert acceptance(before, after, 0.7)["accepted_share"] == 0.75
    assert acceptance(before, before, 0.7)["why"] == "nothing was drafted"
    assert acceptance(Snapshot(), Snapshot(), 0.7)["accepted_share"] is None


# ---- compare, sweep -----------------------------------------------------------------------


def report_of(calls: list[Call], **settings: Any) -> dict[str, Any]:
    made = figures(calls, 1, 1, Limits())
    return made | {"format": FORMAT, "samples": samples(calls), "settings": {"seed": 0} | settings}


def test_compare_pairs_calls_by_their_number() -> None:
    first = [call(n, 0.0, [1.0 + n, 2.0 + n]) for n in range(4)]
    second = [call(n, 0.0, [2 * (1.0 + n), 2 * (2.0 + n)]) for n in reversed(range(4))]
    second[0].fault = Fault.SHORT  # its pair is left out
    rows = {x["what"]: x for x in ratios(report_of(first), report_of(second))}
    ttft = rows["TTFT, ms, by call"]
    assert ttft["ratio"] == 2.0 and ttft["pairs"] == 3 and ttft["better"] == "less"
    assert rows["output tokens/s a node"]["better"] == "more"
    assert unlike_settings(report_of(first), report_of(first, seed=1)) == [("seed", 0, 1)]


def test_compare_of_sweeps_takes_what_the_knees_delivered() -> None:
    a: dict[str, Any] = {"format": sweep.FORMAT, "knee": 8.0, "knee_delivered": 7.0, "points": []}
    b = a | {"knee": 16.0, "knee_delivered": 14.0}
    (asked, row) = ratios(a, b)
    assert asked["what"] == "knee, calls/s asked for" and asked["ratio"] == 2.0
    assert row["what"] == "knee, steady answers/s" and (row["a"], row["ratio"]) == (7.0, 2.0)
    del a["knee_delivered"]
    assert ratios(a, b)[1]["ratio"] is None


def test_compare_takes_no_ratio_of_itl_of_another_kind() -> None:
    first = report_of([call(n, 0.0, [1.0, 2.0]) for n in range(3)])
    twice = [call(n, 0.0, [1.0, 2.0]) for n in range(3)]
    for made in twice:
        made.output_tokens = 4
    second = report_of(twice)

    def itl(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
        return {x["what"]: x for x in ratios(a, b)}["ITL p50, ms"]

    assert itl(first, first)["ratio"] == 1.0
    row = itl(first, second)
    assert row["ratio"] is None and row["a"] == row["b"] == 1000
    assert row["why"] == "not compared: tokens an event 1.00 in A, 2.00 in B"
    del second["tokens_an_event"]
    assert "older result" in itl(first, second)["why"]


def test_compare_says_what_ranks_are_and_what_its_ratio_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from launch.bench.compare import Compare

    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file in files:
        file.write_text(
            json.dumps(report_of([call(0, 0.0, [1.0, 2.0])]) | {"gpus_are": "CPU ranks"})
        )
    Compare(*files, force=False, as_json=False).run()
    said = capsys.readouterr().out
    assert "output tokens/s a CPU rank" in said and "a GPU" not in said
    assert "B / A is the median of the pairs' own ratios" in " ".join(said.split())
    files[1].write_text(
        json.dumps({"format": sweep.FORMAT, "settings": {}, "points": [], "knee": None})
    )
    with pytest.raises(
        ConfigError, match="is a result of `bench serve`, .* of `bench sweep`: only"
    ):
        Compare(*files, force=True, as_json=False).run()


def test_compare_refuses_unlike_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from launch.bench.compare import Compare

    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for seed, file in enumerate(files):
        file.write_text(json.dumps(report_of([call(0, 0.0, [1.0, 2.0])], seed=seed)))
    with pytest.raises(ConfigError, match="seed: 0 in A, 1 in B"):
        Compare(*files, force=False, as_json=False).run()
    Compare(*files, force=True, as_json=True).run()
    assert json.loads(capsys.readouterr().out)["unlike"] == [["seed", 0, 1]]
    Compare(*files, force=True, as_json=False).run()
    assert "SETTING DIFFERS: seed: 0 / 1" in capsys.readouterr().out
    whole = json.loads(files[0].read_text())
    for lost in ("samples", "settings", "latency_ms"):
        files[0].write_text(json.dumps({k: v for k, v in whole.items() if k != lost}))
        with pytest.raises(ConfigError, match=f"a.json: is no whole result: {lost} missing"):
            Compare(*files, force=True, as_json=False).run()
    files[0].write_text(json.dumps(whole | {"throughput": {}}))
    with pytest.raises(ConfigError, match="is no whole result .KeyError: 'per_node'"):
        Compare(*files, force=True, as_json=False).run()
    files[0].write_text("{}")
    with pytest.raises(ConfigError, match="no result of bench"):
        Compare(*files, force=True, as_json=False).run()


@given(st.floats(0.01, 1000), st.floats(0.01, 1000))
def test_the_ladder_ends_just_below_the_knee(first: float, knee: float) -> None:
    tried: list[tuple[float, bool]] = []
    while (rate := next_rate(tried, first)) is not None:
        tried.append((rate, rate <= knee))
        assert len(tried) <= 12
    served = [rate for rate, fine in tried if fine]
    if len(tried) < 12 and served:
        assert max(served) <= knee <= 1.2 * max(served) * 1.0001


def test_refusals_beyond_the_knee_are_no_faults() -> None:
    def point(kept: int) -> dict[str, Any]:
        problems = ["3 of 10 calls: http 429 (full)", "1 of 10 calls: empty answer"]
        calls = {"sent": 10, "cut_short_here": 0, "within_limits": kept}
        return {"calls": calls, "problems": problems, "pace": {"keeps_up": True}}

    assert len(faults(point(9))) == 2
    assert faults(point(5)) == ["1 of 10 calls: empty answer"]


def queued(rate: float, capacity: float, count: int, alone: float = 0.02) -> list[Call]:
    """Calls at a steady rate to a server that ends at most `capacity` a second."""
    made, free = [], 0.0
    for number in range(count):
        at = number / rate
        free = max(free, at) + 1 / capacity
        made.append(call(number, at, [free, free + alone]))
    return made


@pytest.mark.parametrize("rate", [10.8, 12.0, 20.0, 40.0])
def test_what_a_server_delivers_is_seen_in_a_short_burst(rate: float) -> None:
    pace = pace_of(queued(rate, 10.0, 30))
    assert pace.keeps_up is False
    assert pace.offered == pytest.approx(rate) and pace.delivered == pytest.approx(10.0)


def test_a_server_keeps_up_where_late_calls_take_no_longer() -> None:
    pace = pace_of(queued(8.0, 10.0, 30))
    assert pace.keeps_up and pace.delivered == pytest.approx(8.0)
    slow = queued(8.0, 10.0, 30, alone=2.0)  # calls came for 3.6 s: nothing is steady yet
    assert pace_of(slow).keeps_up is None
    assert pace_of(slow[:2]).keeps_up is None and pace_of([]).delivered is None
    refused = queued(8.0, 10.0, 30)
    for made in refused[::8]:
        made.fault = "http 429"
    told = pace_of(refused)
    assert told.keeps_up is False and told.delivered is not None and told.delivered < 7.6
    for made in refused:
        made.fault = "http 429"
    assert pace_of(refused).delivered == 0.0 and pace_of(refused).keeps_up is False


def test_the_knee_names_what_was_delivered_and_what_it_cannot_tell() -> None:
    def point(rate: float, keeps_up: bool | None, limited: bool) -> dict[str, Any]:
        return {
            "rate": rate,
            "pace": {"keeps_up": keeps_up},
            "generator": {"was_limit": limited},
        }

    report: dict[str, Any] = {
        "settings": {"turns": 1},
        "knee": 8.0,
        "knee_delivered": 7.9,
        "knee_whole_run": 6.4,
        "knee_came": 8.1,
        "limits": {"ttft_ms": 5.0, "tpot_ms": None},
        "limits_are": "as given",
        "points": [point(8, True, False), point(12, False, False)],
    }
    assert verdict(report) == [
        "knee: 8 calls/s asked for, the highest rate that was served",
        "  steady: 7.90 answers/s there while calls kept coming (8.10 calls/s came)",
        "  answers/s: 6.40 there from the first call to the last answer, the server's filling and "
        "emptying included",
        "limits: TTFT 5.00 ms (as given)",
    ]
    report["points"] = [point(8, True, True), point(12, None, False), point(16, False, True)]
    said = "\n".join(verdict(report))
    assert "the load generator was the limit there: of the server it says little" in said
    assert "at 12 calls/s too short to tell" in said
    assert "at 16 calls/s the load generator was the limit" in said
    report |= {"knee": None, "knee_delivered": None}
    assert verdict(report)[0].startswith("knee: none was found")


@pytest.mark.parametrize("rate", [3.0, 6.0, 8.0, 16.0])
def test_conversations_cannot_be_delivered_faster_than_their_answers(rate: float) -> None:
    """Two turns each, of a server that gives ten answers a second, in order of coming."""
    capacity, made, free = 10.0, [], 0.0
    waiting = [(n / rate, n, 0) for n in range(60)]
    while waiting:
        at, number, turn = heapq.heappop(waiting)
        free = max(free, at) + 1 / capacity
        answered = call(number, at, [free - 0.01, free])
        answered.turn = turn
        made.append(answered)
        if not turn:
            heapq.heappush(waiting, (free, number, 1))
    pace = pace_of(made)
    assert pace.delivered is not None and pace.keeps_up is (rate == 3.0)
    assert pace.delivered == pytest.approx(min(rate, capacity / 2), rel=0.06)


def test_calls_that_come_unevenly_are_no_lack_of_the_server() -> None:
    """In the last two thirds fewer come than on average, each answered at once."""
    made = [call(n, 0.02 * n, [0.02 * n + 0.01, 0.02 * n + 0.02]) for n in range(20)]
    made += [call(20 + n, 0.4 + n / 10, [0.41 + n / 10, 0.42 + n / 10]) for n in range(40)]
    pace = pace_of(made)
    assert pace.keeps_up and pace.delivered == pytest.approx(pace.offered, rel=0.01)


def test_no_more_is_delivered_than_was_asked_for() -> None:
    pace = pace_of(queued(8.0, 10.0, 30))
    assert pace.capped(7.5).delivered == 7.5 and pace.capped(7.5).offered == pace.offered
    assert pace.capped(9.0) == pace and pace_of([]).capped(1.0).delivered is None
