"""`moeserve experts record` against a job that computes: what it saves, says and refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from gated_toy import EXPERTS, real_job

from ep.recording import ExpertRecording
from launch.experts.record import Record
from moeserve.errors import ConfigError, MoeserveError
from moeserve.server.rehearsal import Rehearsal, write_tokenizer


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rehearsal]:
    folder: Path = tmp_path_factory.mktemp("checkpoint")
    write_tokenizer(folder)
    with real_job(folder) as running:
        yield running
        running.ranks[0].die()  # while somebody hears its last words


class Traffic:
    """Requests, one after the other, while the block runs."""

    def __init__(self, url: str) -> None:
        self._url, self._over = url, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=20) as http:
            while not self._over.is_set():
                body = {"prompt": [1, 2, 3], "max_tokens": 6, "ignore_eos": True}
                http.post("/v1/completions", json=body)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        self._thread.join(20)


def counted(job: Rehearsal) -> Any:
    return job.ranks[0].twin  # type: ignore[attr-defined]


def test_so_many_steps(job: Rehearsal, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "load.npz"
    with Traffic(job.url):
        Record(job.url, path, steps=20, interval_steps=8, as_json=True).run()
    report = json.loads(capsys.readouterr().out)
    recording = ExpertRecording.load(path)
    assert recording.num_steps.tolist() == [8, 8, 4] and not recording.missing_picks.any()
    assert report["steps"] == 20 and report["file"] == str(path)
    assert report["tokens"]["decode"] == recording.tokens[:, 1].sum() > 0
    assert report["bytes"] == path.stat().st_size


def test_so_many_seconds_and_nothing_to_do(job: Rehearsal, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "load.npz"
    Record(job.url.removeprefix("http://") + "/v1/", path, seconds=0.05).run()
    said = capsys.readouterr()
    assert "0 steps" in said.out and "nothing was computed" in said.err
    empty = ExpertRecording.load(path)
    assert empty.num_intervals == 0 and empty.num_experts == EXPERTS


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_and_what_was_recorded_is_saved(
    job: Rehearsal, tmp_path: Path, number: int
) -> None:
    path = tmp_path / "load.npz"
    command = [sys.executable, "-m", "moeserve", "experts", "record", job.url, "-o", str(path)]
    twin = counted(job)
    before = len(twin.steps)
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    try:
        assert process.stderr is not None
        assert "ends at Ctrl-C" in process.stderr.readline()
        body = {"prompt": [1, 2, 3], "max_tokens": 6, "ignore_eos": True}
        httpx.post(f"{job.url}/v1/completions", json=body, timeout=20).raise_for_status()
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    assert process.returncode == 0, err
    assert "6 steps in 1 intervals, 3 prefill and 5 decode tokens" in out and "saved" in err
    recording = ExpertRecording.load(path)
    assert (recording.counts.sum(axis=0) == np.sum(twin.steps[before:], axis=0)).all()


def test_what_is_wrong_is_said_before_anything_starts(job: Rehearsal, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        Record(job.url, tmp_path / "no" / "a.txt", seconds=1, steps=2).run()
    text = "\n".join(caught.value.problems)
    for part in ("not both", "end in .npz", "no such folder"):
        assert part in text
    for url in ("ftp://here", "http://"):
        with pytest.raises(ConfigError, match="URL"):
            Record(url, tmp_path / "a.npz").run()
    state = httpx.get(f"{job.url}/experts/recording").json()
    assert state["status"] in ("none", "finished")


def test_a_server_that_refuses_or_is_none(job: Rehearsal, tmp_path: Path) -> None:
    httpx.post(f"{job.url}/experts/recording/start").raise_for_status()
    with pytest.raises(MoeserveError, match="recording [0-9]+ runs"):
        Record(job.url, tmp_path / "a.npz", steps=1).run()
    httpx.post(f"{job.url}/experts/recording/stop").raise_for_status()
    with pytest.raises(MoeserveError, match="no answer"):
        Record("http://127.0.0.1:9", tmp_path / "a.npz", steps=1).run()
    assert list(tmp_path.iterdir()) == []


def test_what_was_recorded_is_saved_when_a_rank_dies(tmp_path: Path, capsys: Any) -> None:
    write_tokenizer(tmp_path / "c")
    path = tmp_path / "load.npz"
    with real_job(tmp_path / "c") as job:

        def work_and_die() -> None:
            body = {"prompt": [1, 2, 3], "max_tokens": 6, "ignore_eos": True}
            with httpx.Client(base_url=job.url, timeout=20) as http:
                while http.get("/experts/recording").json()["status"] != "recording":
                    pass
                while http.get("/experts/recording").json()["num_steps"] < 6:
                    http.post("/v1/completions", json=body).raise_for_status()
            job.on_loop(lambda: job.client._unreachable(0))

        working = threading.Thread(target=work_and_die)
        working.start()
        with pytest.raises(MoeserveError) as caught:
            Record(job.url, path, seconds=60, interval_steps=1, as_json=True).run()
        working.join(20)
        job.ranks[0].die()
    assert "cut short: rank 0" in str(caught.value) and f"saved in {path}" in str(caught.value)
    saved = ExpertRecording.load(path)
    assert saved.num_steps.sum() >= 6 and saved.counts.sum() > 0
    assert "rank 0" in json.loads(capsys.readouterr().out)["cut_short"]


def test_what_was_recorded_is_saved_when_the_server_stops(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "c")
    path = tmp_path / "load.npz"
    with real_job(tmp_path / "c") as job:

        def stop() -> None:
            while httpx.get(f"{job.url}/experts/recording").json()["status"] != "recording":
                pass
            job.on_loop(lambda: setattr(job.client, "draining", True))

        stopping = threading.Thread(target=stop)
        stopping.start()
        with pytest.raises(MoeserveError, match="cut short: the server is shutting down"):
            Record(job.url, path, seconds=60).run()
        stopping.join(20)
        job.ranks[0].die()
    assert ExpertRecording.load(path).num_experts == EXPERTS


def test_the_key_is_asked_for(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "c")
    with (
        Rehearsal(tmp_path / "c", server={"admin_key": "k"}) as locked,
        pytest.raises(MoeserveError, match="admin key is needed.*--admin-key"),
    ):
        Record(locked.url, tmp_path / "a.npz", steps=1).run()


# -- offline ------------------------------------------------------------------------------------


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "moeserve", *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


SMALL = ("--kv-tokens", "512", "--max-model-len", "64", "--threads", "1", "--dtype", "float32")


def test_generate_saves_the_load_of_what_it_computes(
    random_checkpoint: Path, tmp_path: Path
) -> None:
    path = tmp_path / "g.npz"
    flags = ("--prompt-ids", "5,6,7", "--max-tokens", "4", "--ignore-eos", "--json")
    done = command(
        "generate", str(random_checkpoint), *flags, *SMALL, "--record-experts", str(path)
    )
    assert done.returncode == 0 and f"expert load: {path}" in done.stderr, done.stderr
    recording = ExpertRecording.load(path)
    assert recording.tokens.sum(axis=0).tolist() == [3, 3] and not recording.missing_picks.any()
    done = command("generate", str(random_checkpoint), *flags, "--record-experts", "no/a.txt")
    assert done.returncode == 2 and "no such folder" in done.stderr and ".npz" in done.stderr


def test_bench_saves_the_load_of_its_runs(random_checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "b.npz"
    lengths = ("--prompt-length", "4", "--output-length", "5", "--prefill-length", "8")
    flags = ("--batch", "2", "--repeat", "1", *lengths, *SMALL, "--record-experts", str(path))
    done = command("bench", "offline", str(random_checkpoint), *flags)
    assert done.returncode == 0, done.stderr
    recording = ExpertRecording.load(path)
    assert recording.tokens.sum(axis=0).tolist() == [2 * 4 + 8, 2 * 4]
    assert not recording.missing_picks.any()
