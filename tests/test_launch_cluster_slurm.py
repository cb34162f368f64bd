"""`moeserve launch slurm --submit` with a Slurm of shell scripts: what is said while a job runs."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from fake_slurm import TINY, Cluster, Ranks, launch, open_cluster, until, watched

from launch.cluster import slurm_watch
from launch.cluster.jobs import Registry
from launch.cluster.slurm_commands import JobState


@pytest.fixture
def cluster(tmp_path, monkeypatch) -> Cluster:
    return open_cluster(tmp_path, monkeypatch)


def known_jobs(tmp_path: Path) -> list[str]:
    return [r.id for r in Registry(tmp_path / "home" / "moeserve" / "jobs").all()]


def test_ready_is_said_and_the_job_left_when_asked(cluster, tmp_path, capsys):
    code = watched(cluster, launch(tmp_path, detach=True), Ranks.serve)
    said = capsys.readouterr().err
    assert code == 0 and "submitted: job 77, 2 nodes, 4 ranks" in said
    assert "pending (Resources)" in said and "n1 (ranks 2-3): ready" in said
    assert ": http://n0:8000\n" in said and not any("scancel" in c for c in cluster.calls)
    assert known_jobs(tmp_path) == ["77"]


def test_submitted_and_left_at_once(cluster, tmp_path, capsys):
    assert launch(tmp_path, wait=0).run() == 0
    assert capsys.readouterr().out == "77\n"


def test_a_failure_before_it_is_ready_names_the_first_cause(cluster, tmp_path, capsys):
    def acts(ranks: Ranks) -> None:
        ranks.run()
        ranks.log("rank-2.log", "Traceback\nmoeserve: out of disk\n")
        ranks.say(0, "failed", text="lost a peer", code=75)
        ranks.say(2, "failed", text="out of disk", code=1)
        cluster.set_state("FAILED|NonZeroExitCode|n[0-1]")

    assert watched(cluster, launch(tmp_path), acts) == 1
    said = capsys.readouterr().err
    assert "moeserve: rank 2 on n1: out of disk\n" in said and "lost a peer" not in said
    assert "  | moeserve: out of disk" in said and not known_jobs(tmp_path)


def test_a_killed_rank_is_known_by_sruns_word(cluster, tmp_path, capsys):
    def acts(ranks: Ranks) -> None:
        ranks.serve()
        ranks.log("job.log", "srun: error: n1: task 3: Killed\n")
        ranks.say(0, "failed", text="a step broke", code=1)
        cluster.set_state("FAILED||n[0-1]")

    assert watched(cluster, launch(tmp_path), acts) == 3
    assert "rank 3 on n1: died: killed by SIGKILL" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("state", "words", "code"),
    [
        ("CANCELLED", "was cancelled, not by this terminal", 3),
        ("TIMEOUT", "its time limit was reached", 1),
        ("NODE_FAIL", "job 77: node fail", 1),
        ("COMPLETED", "job 77 has ended: stopped", 0),
    ],
)
def test_ends_that_no_rank_can_tell_of(cluster, tmp_path, capsys, state, words, code):
    def acts(ranks: Ranks) -> None:
        ranks.serve()
        cluster.set_state(f"{state}||n[0-1]")

    assert watched(cluster, launch(tmp_path), acts) == code
    assert words in capsys.readouterr().err


def test_a_job_that_starts_again_is_watched_on(cluster, tmp_path, capsys, monkeypatch):
    said: list[str] = []

    def acts(ranks: Ranks) -> None:
        ranks.serve()
        until(lambda: said.append(capsys.readouterr().err) or "ready after" in "".join(said))
        ranks.log("job.log", "srun: error: n1: task 3: Killed\n")
        ranks.say(0, "failed", text="lost a peer", code=75)
        until(lambda: said.append(capsys.readouterr().err) or "starts its ranks" in "".join(said))
        ranks.say(1, "failed", text="lost a peer", code=75)  # late, and of no more interest
        ranks.serve()
        until(
            lambda: said.append(capsys.readouterr().err) or "".join(said).count("ready after") > 1
        )
        cluster.set_state("COMPLETED||n[0-1]")

    monkeypatch.setattr(slurm_watch, "RESTART_REASONS", 0.2)
    code = watched(cluster, launch(tmp_path, "serve", TINY, "--max-restarts", "2"), acts)
    text = "".join(said) + capsys.readouterr().err
    assert text.count("rank 3 on n1: died") == 1 and "lost a peer" not in text
    assert code == 0 and not any(call.startswith("scancel") for call in cluster.calls)
    assert "--max-restarts" not in (tmp_path / "job" / "job.sbatch").read_text().split("run() {")[1]


def test_a_job_that_hangs_after_a_failure_is_cancelled(cluster, tmp_path, capsys):
    def acts(ranks: Ranks) -> None:
        ranks.run()
        ranks.say(1, "failed", text="no such file", code=2)

    assert watched(cluster, launch(tmp_path), acts) == 2
    assert "scancel 77" in cluster.calls


def test_too_slow(cluster, tmp_path, capsys):
    def acts(ranks: Ranks) -> None:
        cluster.set_state("RUNNING||n[0-1]")
        ranks.say(0, "rendezvous")

    assert watched(cluster, launch(tmp_path, wait=0.5), acts) == 1
    said = capsys.readouterr().err
    assert "3 ranks of 4 never started" in said and "n0: rendezvous" in said
    assert "scancel 77" in cluster.calls


def test_a_folder_that_nodes_do_not_see_is_guessed(cluster, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(slurm_watch, "SILENT_SECONDS", 0.05)
    said: list[str] = []

    def acts(ranks: Ranks) -> None:
        cluster.set_state("RUNNING||n[0-1]")
        until(
            lambda: said.append(capsys.readouterr().err) or "do all nodes see it" in "".join(said)
        )
        cluster.set_state("COMPLETED||n[0-1]")

    assert watched(cluster, launch(tmp_path), acts) == 0


def test_ctrl_c_cancels_what_is_not_ready(cluster, tmp_path, capsys):
    def acts(ranks: Ranks) -> None:
        ranks.run()
        os.kill(os.getpid(), signal.SIGINT)

    assert watched(cluster, launch(tmp_path), acts) == 130
    assert "job 77 is cancelled" in capsys.readouterr().err and "scancel 77" in cluster.calls


def test_ctrl_c_drains_what_is_ready(cluster, tmp_path, capsys):
    said: list[str] = []

    def acts(ranks: Ranks) -> None:
        ranks.serve()
        until(lambda: said.append(capsys.readouterr().err) or "ready after" in "".join(said))
        os.kill(os.getpid(), signal.SIGINT)

    assert watched(cluster, launch(tmp_path), acts) == 0
    assert [c for c in cluster.calls if c.startswith("scancel")] == ["scancel --signal=TERM 77"]


def test_a_controller_that_does_not_answer_is_no_end(cluster, tmp_path, capsys):
    def acts(ranks: Ranks) -> None:
        squeue = cluster.folder / "squeue"
        good = squeue.read_text()
        broken = cluster.folder / "broken"
        broken.write_text("#!/bin/sh\necho 'slurm_load_jobs error: timed out' >&2\nexit 1\n")
        broken.chmod(0o755)
        broken.rename(squeue)
        ranks.serve()
        said: list[str] = []
        until(lambda: said.append(capsys.readouterr().err) or "asking again" in "".join(said))
        broken.write_text(good)
        broken.chmod(0o755)
        broken.rename(squeue)
        cluster.set_state("COMPLETED||n[0-1]")

    assert watched(cluster, launch(tmp_path), acts) == 0


def test_a_job_that_slurm_has_forgotten_is_over():
    assert JobState("GONE").over and JobState("TIMEOUT").over
    assert not JobState("PENDING").over and not JobState("COMPLETING").over
