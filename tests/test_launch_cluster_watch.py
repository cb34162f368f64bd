"""What ranks say of themselves, and what a watcher makes of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.cluster import stages
from launch.cluster.hosts_watch import deaths_in_table
from launch.cluster.screen import LineScreen, describe, ranks_in_words
from launch.cluster.stages import Record, StageFile
from launch.cluster.watch import NodeFiles, Progress, deaths_in
from launch.failure import LOST_PEER


def said(rank: int, stage: str, when: float = 0.0, host: str = "", **more: object) -> Record:
    return Record(rank, host or f"n{rank // 2}", stage, when, **more)


def fed(*records: Record) -> Progress:
    progress = Progress()
    for record in records:
        progress.feed(record)
    return progress


def test_a_rank_writes_lines_that_a_watcher_reads(tmp_path, monkeypatch):
    monkeypatch.setattr(stages.socket, "gethostname", lambda: "n7")
    file = StageFile({stages.VARIABLE: stages.pattern(tmp_path)}, 3)
    file.tell("starting")
    file.tell("weights", 10, 100)
    file.tell("weights", 20, 100)  # too soon
    file.tell("weights", 100, 100)  # the end of a stage is always told
    file.tell("failed", text="two\nlines", code=2)
    reader = NodeFiles(tmp_path)
    records = reader.new()
    assert [(r.stage, r.done) for r in records] == [
        ("starting", 0),
        ("weights", 10),
        ("weights", 100),
        ("failed", 0),
    ]
    assert {(r.rank, r.host) for r in records} == {(3, "n7")}
    assert records[-1].text == "two\nlines" and records[-1].code == 2
    assert (tmp_path / "node-n7.jsonl").exists() and reader.new() == []


def test_half_a_line_waits_for_its_other_half(tmp_path):
    whole = json.dumps({"rank": 0, "host": "a", "stage": "starting", "when": 1.0})
    path = tmp_path / "node-a.jsonl"
    path.write_text(whole[:9])
    reader = NodeFiles(tmp_path)
    assert reader.new() == []
    path.write_text(whole + "\nno json\n")
    assert [r.rank for r in reader.new()] == [0]
    assert NodeFiles(tmp_path / "absent").new() == []


def test_nothing_is_written_unless_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    StageFile({}, 0).tell("starting")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path, capsys):
    file = StageFile({stages.VARIABLE: str(tmp_path / "gone" / "x")}, 0)
    file.tell("starting")
    file.tell("rendezvous")
    assert capsys.readouterr().err.count("\n") == 1


def test_a_node_is_as_far_as_its_slowest_rank():
    progress = fed(
        said(0, "starting", 1),
        said(1, "starting", 1),
        said(2, "starting", 1),
        said(0, "weights", 2, done=50, total=100),
        said(0, "weights", 4, done=100, total=100),
        said(0, "cache", 5),
        said(1, "weights", 2, done=40, total=100),
        said(1, "weights", 4, done=60, total=100),
    )
    first, second = progress.nodes()
    assert (first.host, first.ranks, first.stage) == ("n0", (0, 1), "weights")
    assert (first.done, first.total, first.rate) == (160, 200, 80.0)
    assert describe(first) == "weights: 80 % of 0.0 MB, 0 MB/s"
    assert (second.host, second.stage) == ("n1", "starting")


def test_a_restart_begins_anew():
    progress = fed(
        said(0, "ready", 1),
        said(0, "serving", 2, text="http://a:1"),
        said(0, "failed", 3, text="gone", code=1),
    )
    assert progress.url and progress.failing
    progress.feed(said(0, "starting", 4))
    assert not progress.url and not progress.failing


def test_the_earliest_reason_of_its_own_is_the_cause():
    progress = fed(
        *(said(r, "starting") for r in range(4)),
        said(0, "failed", 1, text="lost a peer", code=LOST_PEER),
        said(3, "failed", 3, text="later", code=1),
        said(2, "failed", 2, text="out of disk", code=1),
    )
    cause = progress.first_cause({2: "Exited with exit code 1", 0: "Exited with exit code 75"})
    assert cause is not None and (cause.rank, cause.host, cause.reason) == (2, "n1", "out of disk")


@pytest.mark.parametrize("by", ["srun", "front end"])
def test_a_rank_that_died_without_a_word_stands_before_what_others_say(by):
    progress = fed(
        *(said(r, "starting") for r in range(4)),
        said(0, "failed", 1, text="a step failed", code=1),
        said(1, "failed", 1, text="lost a peer", code=LOST_PEER),
    )
    if by == "srun":
        cause = progress.first_cause(deaths_in("srun: error: n1: task 3: Killed\n"))
    else:
        progress.feed(said(3, "verdict"))
        cause = progress.first_cause({})
    assert cause is not None and (cause.rank, cause.host, cause.code) == (3, "n1", 3)
    assert cause.reason.startswith("died: ")


def test_only_the_exit_code_of_a_rank_that_never_spoke_is_known():
    cause = fed(said(0, "starting")).first_cause({1: "Exited with exit code 127"})
    assert cause is not None and (cause.rank, cause.code) == (1, 127)
    assert fed(said(0, "ended")).first_cause({}) is None


def test_what_all_ranks_agreed_on_is_told_once_with_the_machine():
    text = "rank 2: model.checkpoint: differs\nrank 3: the same"
    progress = fed(
        *(said(r, "starting") for r in range(4)),
        *(said(r, "failed", 1, text=text, code=2) for r in range(4)),
    )
    cause = progress.first_cause({})
    assert cause is not None and cause.rank == -1 and cause.code == 2
    assert cause.reason == "rank 2 on n1: model.checkpoint: differs\nrank 3 on n1: the same"


def test_what_several_ranks_say_alike_is_no_ranks_own():
    text = "node n1: moeserve is of another commit"
    progress = fed(
        *(said(r, "starting") for r in range(2)),
        *(said(r, "failed", 1, text=text, code=2) for r in range(2)),
    )
    cause = progress.first_cause({})
    assert cause is not None and (cause.rank, cause.reason) == (-1, text)


def test_sruns_words():
    log = (
        "srun: error: n0: tasks 0-1,4: Exited with exit code 2\n"
        "slurmstepd: error: something else\n"
        "srun: error: n1: task 3: Segmentation fault\n"
        "srun: error: n1: task 4: Killed\n"
    )
    exited = "Exited with exit code 2"
    assert deaths_in(log) == {0: exited, 1: exited, 4: exited, 3: "Segmentation fault"}


def test_torchruns_table():
    table = [
        "  rank      : 0 (local_rank: 0)",
        "  exitcode  : 75 (pid: 10)",
        "  rank      : 3 (local_rank: 1)",
        "  exitcode  : -9 (pid: 11)",
        "  rank      : 2 (local_rank: 0)",
        "  exitcode  : -15 (pid: 12)",
        "  rank      : 1 (local_rank: 1)",
        "  exitcode  : -11 (pid: 13)",
    ]
    assert deaths_in_table(table) == {3: "Killed", 1: "Killed by SIGSEGV"}


def test_runs_of_ranks():
    assert ranks_in_words((3,)) == "rank 3"
    assert ranks_in_words((0, 1, 2, 5, 7, 8)) == "ranks 0-2, 5, 7-8"


def test_lines_are_said_when_something_is_new(capsys):
    screen, progress = LineScreen(), fed(said(0, "starting"))
    for _ in range(2):
        screen.show("job 1: starts", progress.nodes())
    progress.feed(said(0, "warmup"))
    screen.show("job 1: starts", progress.nodes())
    assert capsys.readouterr().err.splitlines() == [
        "moeserve: job 1: starts",
        "moeserve: n0 (rank 0): starting",
        "moeserve: n0 (rank 0): warm-up, graphs",
    ]


def test_node_files_of_all_nodes(tmp_path: Path):
    for node in ("a", "b"):
        file = StageFile({stages.VARIABLE: str(tmp_path / f"node-{node}.jsonl")}, ord(node))
        file.tell("starting")
    assert {r.rank for r in NodeFiles(tmp_path).new()} == {97, 98}
