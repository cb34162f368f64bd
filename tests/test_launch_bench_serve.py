"""`moeserve bench serve` against a server that fails in every way, and our own front end."""

from __future__ import annotations

import json
import signal
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bench_peer import FIRST_SECONDS, HELD_SECONDS, OVERTOLD, USAGE, Peer
from server_world import checkpoint_folder, scripted_job  # noqa: F401  (fixtures)
from typer.testing import CliRunner, Result

from launch.bench.serve_call import Fault
from launch.cli import app
from moeserve.errors import ConfigError, MoeserveError
from moeserve.server.rehearsal import Rehearsal


@pytest.fixture(autouse=True)
def no_git(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking for the commit takes longer than the rest of a run."""
    monkeypatch.setattr("launch.bench.machine.commit_of", lambda home: "")


@pytest.fixture
def peer() -> Iterator[Peer]:
    made = Peer()
    yield made
    made.close()


def bench(url: str, folder: Path, *flags: str) -> tuple[Result, dict[str, Any]]:
    """The command's result, and its report; {} where it made none."""
    file = folder / "result.json"
    length = [] if any(x.startswith("--trace") for x in flags) else ["--input-tokens=6"]
    words = ["bench", "serve", url, f"--out={file}", *length, *flags]
    result = CliRunner().invoke(app, words)
    return result, json.loads(file.read_text()) if file.exists() else {}


KINDS = {
    "500": "http 500",
    "json": Fault.NO_STREAM,
    "empty": Fault.EMPTY,
    "blank": Fault.BLANK,
    "short": Fault.SHORT,
    "long": Fault.LONG,
    "cut": Fault.NO_DONE,
    "broken": Fault.NO_DONE,
    "reset": Fault.BROKEN,
    "told": Fault.TOLD,
    "bad": Fault.BAD_EVENT,
    "nameless": Fault.NO_FINISH,
    "refused": Fault.BAD_FINISH,
}


def test_each_failure_is_counted_by_its_kind(peer: Peer, tmp_path: Path) -> None:
    peer.handler.ways = ["fine", *KINDS]
    flags = ("--requests=28", "--concurrency=1", "--output-tokens=4", "--ignore-eos", "--warmup=0")
    result, report = bench(peer.url, tmp_path, *flags)
    assert result.exit_code == 1, result.output
    expected = Counter(KINDS.values())
    assert {k: x["count"] for k, x in report["errors"].items()} == {
        kind: 2 * count for kind, count in expected.items()
    }
    assert [x["fault"] for x in report["samples"]] == 2 * [None, *KINDS.values()]
    assert report["calls"] == {
        "sent": 28, "good": 2, "failed": 26, "cut_short_here": 0, "within_limits": 2,
    }  # fmt: skip
    assert report["errors"]["http 500"]["examples"] == ["it broke"]
    for kind in expected:
        assert any(kind in x for x in report["problems"])
    assert "PROBLEM: 2 of 28 calls: http 500 (it broke)" in result.output
    assert bench(peer.url, tmp_path, *flags, "--allow-errors")[0].exit_code == 0


def test_a_usage_that_cannot_be_is_a_fault_and_in_no_sum(peer: Peer, tmp_path: Path) -> None:
    peer.handler.ways = ["fine", *USAGE]
    flags = (f"--requests={1 + len(USAGE)}", "--concurrency=1", "--output-tokens=4", "--warmup=0")
    result, report = bench(peer.url, tmp_path, *flags)
    assert result.exit_code == 1, result.output
    assert [x["fault"] for x in report["samples"]] == [None] + len(USAGE) * [Fault.IMPOSSIBLE]
    assert report["errors"][Fault.IMPOSSIBLE]["examples"][0] == "prompt_tokens -3"
    assert report["tokens"]["input"] == 7 and report["tokens"]["cached_input"] is None
    assert report["tokens"]["output"] == 4 * (1 + len(USAGE))  # as they were seen
    peer.handler.bodies.clear()
    peer.handler.ways = ["cached"]
    _, report = bench(peer.url, tmp_path, "--requests=1", "--output-tokens=4", "--warmup=0")
    assert "cached_tokens 500 of prompt_tokens 7" in report["problems"][0]
    assert report["tokens"]["input"] is None and report["cache_hit_share"] is None


def test_a_usage_that_the_text_cannot_hold_is_a_fault_and_in_no_sum(
    peer: Peer, tmp_path: Path
) -> None:
    peer.handler.ways = ["fine", *OVERTOLD]
    flags = ("--requests=3", "--concurrency=1", "--output-tokens=16", "--warmup=0")
    result, report = bench(peer.url, tmp_path, *flags)
    assert result.exit_code == 1, result.output
    assert [x["fault"] for x in report["samples"]] == [None, Fault.DISAGREES, Fault.DISAGREES]
    assert report["tokens"]["output"] == 16 + 1 + 1  # of a call that failed what was seen
    (said,) = report["problems"]
    assert "(for example: 16 tokens in usage, 1 bytes of text in 2 events)" in said
    peer.handler.bodies.clear()
    peer.handler.ways = ["long"]
    _, report = bench(peer.url, tmp_path, *flags)
    assert report["errors"].keys() == {Fault.LONG}
    assert report["tokens"]["output"] == 3 * 16  # at most what was asked for


def test_answers_in_one_event_are_named_and_keep_no_limit_of_tpot(
    peer: Peer, tmp_path: Path
) -> None:
    peer.handler.ways = ["one"]
    flags = ("--requests=3", "--warmup=0", "--tpot-limit=60000")
    _, report = bench(peer.url, tmp_path, *flags, "--output-tokens=4")
    assert report["calls"]["good"] == 3 and report["calls"]["within_limits"] == 0
    assert report["not_streamed"]["in_one_event"] == 3
    assert any("3 answers came in one event: not streamed" in x for x in report["caveats"])
    _, report = bench(peer.url, tmp_path, *flags, "--output-tokens=1")  # has no TPOT
    assert report["calls"]["within_limits"] == 3 and report["not_streamed"]["in_one_event"] == 0


def test_tokens_an_event_are_told_beside_itl(peer: Peer, tmp_path: Path) -> None:
    peer.handler.ways = ["packs"]
    result, report = bench(peer.url, tmp_path, "--requests=3", "--output-tokens=8", "--warmup=0")
    assert report["tokens_an_event"] == 2.0
    assert "ITL, between events" in result.output
    assert any("an event brought 2.00 tokens" in x for x in report["caveats"])


def test_a_cache_hit_share_is_of_calls_that_told_it(peer: Peer, tmp_path: Path) -> None:
    peer.handler.ways = ["fine", "tells cached"]
    flags = ("--requests=4", "--concurrency=1", "--output-tokens=4", "--warmup=0")
    _, report = bench(peer.url, tmp_path, *flags)
    assert report["cache_hit_share"] == 3 / 7 and report["tokens"]["computed_input"] == 8
    assert report["tokens"]["input"] == 28 and report["tokens"]["input_with_cached_told"] == 14
    said = "2 of 4 calls told no cached tokens"
    assert any(said in x and "the share is 21.4%" in x for x in report["caveats"])


def test_text_is_held_against_usage_by_a_tokenizer(
    peer: Peer, folder: Path, tmp_path: Path
) -> None:
    flags = ("--requests=2", "--output-tokens=4", "--warmup=0", f"--tokenizer={folder}")
    assert bench(peer.url, tmp_path, *flags)[0].exit_code == 0
    result, _ = bench(peer.url, tmp_path, "--requests=2", f"--tokenizer={tmp_path}")
    assert isinstance(result.exception, ConfigError) and "tokenizer.json" in str(result.exception)


RECORDED = """
{"at": 10.0, "conversation": "a", "input_tokens": 8, "output_tokens": 2}
{"at": 13.0, "conversation": "a", "input_tokens": 8, "output_tokens": 3}
{"at": 11.0, "conversation": "a", "input_tokens": 8, "output_tokens": 4}
{"at": 10.5, "conversation": "b", "input_tokens": 8, "output_tokens": 5}
{"at": 12.0, "conversation": "b", "input_tokens": 8, "output_tokens": 6}
"""


def test_every_turn_of_a_trace_goes_at_its_time(peer: Peer, tmp_path: Path) -> None:
    trace, again = tmp_path / "trace.jsonl", tmp_path / "again.jsonl"
    trace.write_text(RECORDED)
    flags = (f"--trace={trace}", "--speed=10", "--warmup=1", f"--record={again}")
    result, report = bench(peer.url, tmp_path, *flags)
    assert result.exit_code == 0, result.output
    sent = {(x["conversation"], x["turn"]): x["sent"] for x in report["samples"]}
    due = {(0, 0): 0.0, (1, 0): 0.05, (0, 1): 0.1, (1, 1): 0.2, (0, 2): 0.3}
    assert sent.keys() == due.keys()
    assert all(due[key] - 0.005 <= sent[key] for key in due), sent  # timers count milliseconds
    asked = sorted(x["max_tokens"] for x in peer.handler.bodies)
    assert asked == [2, 2, 3, 4, 5, 6]  # one of them to warm up
    assert any("never before the answer to the one before" in x for x in report["caveats"])
    # What was sent so is sent so again: the same conversations at the same times.
    result, replayed = bench(peer.url, tmp_path, f"--trace={again}", "--warmup=0")
    assert result.exit_code == 0, result.output
    times = {(x["conversation"], x["turn"]): x["sent"] for x in replayed["samples"]}
    assert times.keys() == due.keys()
    assert all(sent[key] - sent[0, 0] - 0.005 <= times[key] for key in due), (sent, times)


def test_a_turn_waits_for_the_answer_before_and_that_is_said(peer: Peer, tmp_path: Path) -> None:
    peer.handler.ways = ["slow"]
    trace = tmp_path / "trace.jsonl"
    trace.write_text(RECORDED)
    _, report = bench(peer.url, tmp_path, f"--trace={trace}", "--speed=1000", "--warmup=0")
    told = {(x["conversation"], x["turn"]): x for x in report["samples"]}
    for (conversation, turn), x in told.items():
        if turn:
            before = told[conversation, turn - 1]
            assert x["sent"] >= before["sent"] + 1e-3 * before["e2e_ms"] - 1e-3
    said = "3 of 3 later turns were late because of slow answers"
    assert any(said in x for x in report["caveats"]), report["caveats"]
    assert report["generator"]["late_ms"]["count"] == 5  # against when they could go
    _, cut = bench(peer.url, tmp_path, f"--trace={trace}", "--seconds=1.2", "--warmup=0")
    assert [(x["conversation"], x["turn"]) for x in cut["samples"]] == [(0, 0), (0, 1), (1, 0)]


def test_turns_after_one_that_failed_are_counted(peer: Peer, tmp_path: Path) -> None:
    peer.handler.ways = ["fine", "500", "fine", "fine", "fine"]
    flags = ("--requests=2", "--turns=3", "--concurrency=1", "--output-tokens=2", "--warmup=0")
    _, report = bench(peer.url, tmp_path, *flags)
    assert report["calls"]["sent"] == 5
    assert "1 turns were not asked: one before them failed" in report["caveats"]


def test_white_space_beside_reasoning_or_as_one_token_is_an_answer(
    peer: Peer, tmp_path: Path
) -> None:
    peer.handler.ways = ["thinks"]
    flags = ("--requests=1", "--concurrency=1", "--warmup=0", "--endpoint=chat")
    assert bench(peer.url, tmp_path, *flags, "--output-tokens=4")[0].exit_code == 0
    peer.handler.ways = ["blank"]
    assert bench(peer.url, tmp_path, *flags, "--output-tokens=1")[0].exit_code == 0
    assert bench(peer.url, tmp_path, *flags, "--output-tokens=4")[0].exit_code == 1


def test_a_good_run_of_a_peer_tells_what_is_not_known(peer: Peer, tmp_path: Path) -> None:
    flags = ("--requests=5", "--concurrency=2", "--output-tokens=4", "--temperature=0.5")
    result, report = bench(peer.url, tmp_path, *flags, "--nodes=2", "--gpus=16")
    assert result.exit_code == 0, result.output
    assert report["problems"] == [] and report["errors"] == {}
    assert report["tokens"]["output"] == 20 and report["tokens"]["input"] == 35
    assert report["tokens"]["cached_input"] is None and report["cache_hit_share"] is None
    whole, gpu = report["throughput"]["all"], report["throughput"]["per_gpu"]
    assert gpu["output_tokens_per_second"] == pytest.approx(whole["output_tokens_per_second"] / 16)
    node = report["throughput"]["per_node"]["input_tokens_per_second"]
    assert node == pytest.approx(whole["input_tokens_per_second"] / 2)
    assert report["steps"] == [] and report["experts"] is None and report["preemptions"] is None
    assert any("none of ours" in x for x in report["caveats"])
    body = peer.handler.bodies[-1]
    assert body["temperature"] == 0.5 and body["stream_options"] == {"include_usage": True}
    assert "ignore_eos" not in body and "return_token_ids" not in body


def test_without_usage_events_count_and_that_is_said(peer: Peer, tmp_path: Path) -> None:
    peer.handler.ways = ["silent"]
    result, report = bench(peer.url, tmp_path, "--requests=3", "--output-tokens=4", "--warmup=0")
    assert result.exit_code == 0 and report["tokens"]["output"] == 12
    assert report["tokens_are"] == "events" and any("usage" in x for x in report["caveats"])


def test_a_slow_first_token_is_seen_in_ttft_only(peer: Peer, tmp_path: Path) -> None:
    peer.handler.ways = ["slow"]
    limit = f"--ttft-limit={500 * FIRST_SECONDS:g}"
    flags = ("--requests=3", "--concurrency=3", "--output-tokens=3", "--warmup=0", limit)
    _, report = bench(peer.url, tmp_path, *flags)
    assert report["latency_ms"]["ttft"]["least"] >= 1e3 * FIRST_SECONDS
    assert report["latency_ms"]["tpot"]["most"] < report["latency_ms"]["ttft"]["least"]
    assert report["calls"]["good"] == 3 and report["calls"]["within_limits"] == 0


def test_a_silent_server_is_not_waited_for_longer_than_asked(peer: Peer, tmp_path: Path) -> None:
    peer.handler.ways = ["fine", "slow"]
    flags = ("--requests=2", "--concurrency=1", f"--timeout={FIRST_SECONDS / 3}", "--warmup=0")
    result, report = bench(peer.url, tmp_path, *flags, "--output-tokens=2")
    assert result.exit_code == 1
    assert [x["fault"] for x in report["samples"]] == [None, Fault.TIMEOUT]


def test_conversations_take_the_answers_along(peer: Peer, tmp_path: Path) -> None:
    flags = ("--requests=2", "--turns=3", "--concurrency=1", "--output-tokens=2", "--warmup=0")
    _, report = bench(peer.url, tmp_path, *flags, '--extra-body={"top_k": 3}')
    assert report["calls"]["good"] == 6 and peer.handler.bodies[0]["top_k"] == 3
    roles = [[m["role"] for m in x["messages"]] for x in peer.handler.bodies]
    assert roles[:3] == [["user", "assistant"] * n + ["user"] for n in range(3)]
    assert peer.handler.bodies[2]["messages"][1]["content"] == "xx"
    first = [x["messages"][0]["content"] for x in peer.handler.bodies]
    assert first[0] == first[1] != first[3]


def test_what_was_sent_can_be_sent_again(peer: Peer, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    drawn = ("--requests=4", "--rate=200", "--output-tokens=uniform:1,5", "--warmup=0")
    assert bench(peer.url, tmp_path, *drawn, f"--record={trace}")[0].exit_code == 0
    sent = [(x["prompt"], x["max_tokens"]) for x in peer.handler.bodies]
    peer.handler.bodies.clear()
    result, report = bench(peer.url, tmp_path, f"--trace={trace}", "--speed=2", "--warmup=0")
    assert result.exit_code == 0, result.output
    assert sorted((x["prompt"], x["max_tokens"]) for x in peer.handler.bodies) == sorted(sent)
    assert report["settings"]["trace"]
    assert any("random tokens, recorded when they were drawn" in x for x in report["caveats"])
    lines = [json.loads(x) | {"drawn": False} for x in trace.read_text().splitlines()]
    trace.write_text("".join(json.dumps(x) + "\n" for x in lines))  # real prompts
    _, report = bench(peer.url, tmp_path, f"--trace={trace}", "--speed=2", "--warmup=0")
    assert not any("random" in x for x in report["caveats"])


def test_a_server_that_is_not_there_is_named(tmp_path: Path) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        result, _ = bench(f"http://127.0.0.1:{held.getsockname()[1]}", tmp_path)
    assert isinstance(result.exception, MoeserveError)
    assert "no server answers" in str(result.exception)


def test_a_warm_up_that_fails_altogether_ends_it(peer: Peer, tmp_path: Path) -> None:
    peer.handler.ways = ["500"]
    result, report = bench(peer.url, tmp_path)
    assert isinstance(result.exception, MoeserveError) and not report
    assert "every call failed: http 500: it broke" in str(result.exception)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--rate=1", "--concurrency=2"), "give one of them"),
        (("--input-tokens=0",), "--input-tokens"),
        (("--output-tokens=normal:5",), "--output-tokens"),
        (("--arrivals=poisson",), "--arrivals"),
        (("--rate=1", "--arrivals=bursts"), "valid are poisson, fixed"),
        (("--shared-prefix=-1",), "--shared-prefix"),
        (("--turns=2", "--endpoint=completions"), "--turns 2"),
        (("--extra-body=[]",), "--extra-body"),
        (("--speed=2",), "--trace"),
        (("--rate=0",), "--rate 0"),
        (("--html=nowhere/at/all.html",), "no such folder: 'nowhere/at'"),
        (("--out=/nowhere/all.json",), "no such folder: '/nowhere'"),
    ],
)
def test_wrong_flags_are_named_before_anything_is_sent(
    tmp_path: Path, flags: tuple[str, ...], named: str
) -> None:
    words = ["bench", "serve", "http://127.0.0.1:1", *flags]
    error = CliRunner().invoke(app, words).exception
    assert isinstance(error, ConfigError) and named in str(error), error


def test_a_model_that_is_not_served_is_a_wrong_flag(peer: Peer) -> None:
    error = CliRunner().invoke(app, ["bench", "serve", peer.url, "--model=foo"]).exception
    assert isinstance(error, ConfigError) and error.exit_code == 2
    assert "--model 'foo'" in str(error) and "served there: peer" in str(error)


def test_our_own_server_tells_everything(job: Rehearsal, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    # Few tokens: more of them at one moment, as this server answers, would have no TPOT.
    flags = ("--requests=8", "--concurrency=4", "--output-tokens=3", "--ignore-eos")
    result, report = bench(job.url, tmp_path, *flags, f"--html={page}", "--shared-prefix=3")
    assert result.exit_code == 0, result.output
    assert report["gpus"] == 2 and report["nodes"] == 1 and report["server"]["ours"]
    assert report["tokens_are"] == "usage" and report["tokens"]["output"] == 24
    assert report["tokens"]["input"] == 48 and report["tokens"]["cached_input"] == 32  # 4 a call
    assert report["throughput"]["all"]["cached_input_tokens_per_second"] > 0
    assert any("forced" in x for x in report["caveats"])
    text = page.read_text()
    assert text.count("<svg") == 3 and "http://" not in text.replace(job.url, "").replace(
        "http://www.w3.org", ""
    ).replace("http://purl.org", "").replace("http://creativecommons.org", "")
    assert "src=" not in text and "<script" not in text and "@import" not in text


def test_more_tokens_than_the_model_holds_are_refused_first(job: Rehearsal, tmp_path: Path) -> None:
    result, _ = bench(job.url, tmp_path, "--output-tokens=5000")
    assert isinstance(result.exception, ConfigError) and "5006" in str(result.exception)


def test_several_processes_share_the_load(peer: Peer, tmp_path: Path) -> None:
    flags = ("--requests=6", "--concurrency=3", "--output-tokens=3", "--workers=2", "--warmup=1")
    result, report = bench(peer.url, tmp_path, *flags)
    assert len(peer.handler.bodies) == 6 + 1 + 2  # one looks whether it answers, each warms up
    assert any("1 calls before these in each of 2 processes" in x for x in report["caveats"])
    assert result.exit_code == 0 and report["generator"]["workers"] == 2
    assert [x["conversation"] for x in report["samples"]] == list(range(6))
    assert report["tokens"]["output"] == 18


def test_a_sweep_finds_what_is_served(peer: Peer, tmp_path: Path) -> None:
    file, page, plot = (tmp_path / f"sweep.{x}" for x in ("json", "html", "png"))
    flags = ("--rates=40,80", "--requests=6", "--input-tokens=6", "--output-tokens=3")
    limits = ("--ttft-limit=5000", "--tpot-limit=5000")
    words = ["bench", "sweep", peer.url, *flags, *limits, f"--out={file}", f"--html={page}"]
    result = CliRunner().invoke(app, [*words, f"--plot={plot}"])
    assert result.exit_code == 0, result.output
    report = json.loads(file.read_text())
    assert [x["rate"] for x in report["points"]] == [40, 80] and "knee: " in result.output
    assert report["limits"] == {"ttft_ms": 5000, "tpot_ms": 5000}
    assert plot.stat().st_size > 1000
    text = page.read_text()
    assert (
        "<svg" in text and "<li>knee: " in text and ("<b>knee at " in text or "<b>no knee " in text)
    )
    for point in report["points"]:
        assert point["pace"]["delivered"] is None or point["pace"]["delivered"] <= point["rate"]
    peer.handler.ways = ["short"]  # fewer tokens than asked, by finish_reason length
    result = CliRunner().invoke(app, ["bench", "sweep", peer.url, *flags, "--warmup=0"])
    assert "fewer tokens than asked for" in str(result.exception)


@pytest.mark.parametrize("command", ["serve", "sweep"])
def test_with_json_nothing_else_is_on_stdout(peer: Peer, tmp_path: Path, command: str) -> None:
    """The same as --out writes; what is told beside it goes to stderr."""
    file = tmp_path / "a.json"
    load = ("--requests=4", "--input-tokens=6", "--output-tokens=3", "--warmup=0")
    flags = ("--rates=40", "--ttft-limit=5000") if command == "sweep" else ()
    words = ["bench", command, "--json", peer.url, *load, *flags, f"--out={file}"]
    before = signal.getsignal(signal.SIGINT)
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == json.loads(file.read_text())
    assert signal.getsignal(signal.SIGINT) is before, "a later Ctrl-C would be swallowed"
    assert f"written: {file}" in result.stderr


def test_a_rate_that_was_never_served_is_no_knee(peer: Peer, tmp_path: Path) -> None:
    """A burst that ends before any limit is passed."""
    peer.handler.ways = ["queue"]
    file = tmp_path / "sweep.json"
    flags = ("--rates=100", "--requests=40", "--input-tokens=6", "--output-tokens=3", "--warmup=0")
    words = ["bench", "sweep", peer.url, *flags, "--ttft-limit=60000", f"--out={file}"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    report = json.loads(file.read_text())
    point = report["points"][0]
    # On a machine that stalls, calls are answered in any order and read at one moment: then it is
    # too short to tell.
    keeps_up = point["pace"]["keeps_up"]
    assert point["calls"]["within_limits"] == 40 and keeps_up is not True
    assert keeps_up is None or point["pace"]["delivered"] < 1.2 / HELD_SECONDS
    assert report["knee"] is None and report["knee_delivered"] is None
    assert "knee: none" in result.output
    assert ("did not keep up" if keeps_up is False else "too short to tell") in result.output
