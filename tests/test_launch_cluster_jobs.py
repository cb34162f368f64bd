"""Which jobs are known, what `moeserve status` says of them, and how `moeserve stop` ends them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from launch.cluster import stages, targets
from launch.cluster.jobs import (
    HOSTS,
    LOCAL,
    SLURM,
    JobRecord,
    Registry,
    record_of_this_process,
    registered,
)
from launch.cluster.slurm_commands import JobState
from launch.cluster.stages import StageFile
from launch.cluster.status import nodes_of, status
from launch.cluster.stop import stop
from launch.cluster.urls import public_url
from launch.cluster.watch import Progress
from moeserve.errors import ConfigError

HEALTH = {
    "status": "ready",
    "ready": True,
    "reason": "",
    "model": "tiny",
    "uptime_seconds": 200.0,
    "requests_in_flight": 1,
    "dispatch": {"prefill": {"backend": "torch"}, "decode": {"backend": "deepep_ll"}},
    "ranks": [{"rank": 0, "state": "ready", "host": "n0"}, {"rank": 1, "state": "ready"}],
}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv(stages.VARIABLE, raising=False)
    return tmp_path / "state" / "moeserve" / "jobs"


@pytest.fixture
def server() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(HEALTH).encode()
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    http = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{http.server_port}"
    http.shutdown()
    thread.join()
    http.server_close()


@pytest.fixture(params=["quick"])
def launcher(request) -> Iterator[subprocess.Popen[str]]:
    """A process that ends when it is told to; one that is not quick drains for ever, and ends at a
    second signal that is no part of the first."""
    code = (
        "import signal, sys, time\n"
        "seen = []\n"
        "def hear(*a):\n"
        "    seen.append(time.monotonic())\n"
        "    if len(sys.argv) > 1 or len(seen) > 1 and seen[-1] - seen[0] > 1: sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, hear)\n"
        "print('up', flush=True)\n"
        "while True: time.sleep(1)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, *filter(None, [request.param])],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    yield process
    process.kill()
    process.wait()


def record_of(pid: int, job: str = "", **more: object) -> JobRecord:
    mine = record_of_this_process(LOCAL, None, 1, 2, ("serve", "x"))
    started = psutil.Process(pid).create_time()
    job = job or f"local-{pid}"
    folder = str(Path(mine.folder).parent / job)
    return replace(mine, id=job, pid=pid, pid_started=started, folder=folder, **more)


def write_stages(record: JobRecord, url: str = "") -> None:
    environ = {stages.VARIABLE: stages.pattern(Path(record.folder))}
    for rank in (0, 1):
        StageFile(environ, rank).tell("ready")
    if url:
        StageFile(environ, 0).tell("serving", text=url)


def test_a_job_is_known_while_it_runs_and_leaves_nothing(home):
    record = record_of_this_process(HOSTS, None, 2, 4, ("serve", "x"))
    with registered(record):
        assert [r.id for r in Registry(home).all()] == [record.id]
        assert os.environ[stages.VARIABLE] == stages.pattern(Path(record.folder))
        write_stages(record)
    assert not list(home.iterdir())


def test_keys_stand_in_no_record():
    words = ("serve", "x", "--api-key", "secret", "--admin-key=hidden", "--port", "1")
    record = record_of_this_process(LOCAL, None, 1, 1, words)
    assert record.command == (
        *("serve", "x", "--api-key", "...", "--admin-key=...", "--port", "1"),
    )


def test_what_a_killed_launcher_left_is_removed(home, launcher):
    record = record_of(launcher.pid)
    Registry(home).add(record)
    write_stages(record)
    assert [r.pid for r in Registry(home).all()] == [launcher.pid]
    launcher.kill()
    launcher.wait()
    assert Registry(home).all() == [] and not list(home.iterdir())


def test_a_process_that_has_the_number_of_a_gone_one_is_another(home):
    record = record_of(os.getpid())
    Registry(home).add(replace(record, pid_started=record.pid_started - 100))
    assert Registry(home).all() == []


def test_of_other_machines_nothing_is_known(home, launcher):
    elsewhere = replace(record_of(launcher.pid), host="elsewhere", pid=1)
    Registry(home).add(elsewhere)
    assert [r.host for r in Registry(home).all()] == ["elsewhere"]
    with pytest.raises(ConfigError, match="started on elsewhere; stop it there"):
        stop(None, now=False)


def test_files_that_are_no_records_are_left_alone(home):
    home.mkdir(parents=True)
    (home / "x.json").write_text("{}")
    (home / "y.json").write_text("no")
    assert Registry(home).all() == [] and len(list(home.iterdir())) == 2


def test_a_state_folder_that_cannot_be_written_is_said_and_nothing_else(tmp_path, capsys):
    (tmp_path / "state").write_text("a file")
    with registered(record_of_this_process(LOCAL, None, 1, 1, ())):
        pass
    assert capsys.readouterr().err.count("\n") == 1


def test_status_of_the_only_job(home, launcher, server, capsys):
    record = record_of(launcher.pid)
    Registry(home).add(record)
    write_stages(record, server)
    assert status(None, as_json=True) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["id"], report["state"], report["url"]) == (record.id, "ready", server)
    assert report["nodes"][0]["ranks"] == [0, 1] and report["requests_in_flight"] == 1
    assert status(record.id, as_json=False) == 0
    shown = capsys.readouterr().out
    for words in (server, "1 request in flight", "prefill torch, decode deepep_ll", "up 3 min"):
        assert words in shown, shown


def test_status_of_a_url_that_nobody_here_started(server, capsys):
    assert status(server, as_json=True) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["id"] is None and report["num_ranks"] == 2
    assert [n["host"] for n in report["nodes"]] == ["n0", "?"]
    assert status("127.0.0.1:9", as_json=False) == 1
    assert "unreachable" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="not one that was started from this machine"):
        stop(server, now=False)


def test_several_jobs_are_listed_and_one_has_to_be_named(home, launcher, capsys):
    Registry(home).add(record_of(os.getpid()))
    Registry(home).add(record_of(launcher.pid))
    assert status(None, as_json=False) == 0
    assert capsys.readouterr().out.count("starting") == 2
    with pytest.raises(ConfigError, match=f"local-{launcher.pid}"):
        stop(None, now=False)


def test_no_job(capsys):
    assert status(None, as_json=False) == 0 and "no job of yours" in capsys.readouterr().out
    assert status(None, as_json=True) == 0 and json.loads(capsys.readouterr().out) == {"jobs": []}
    with pytest.raises(ConfigError, match="JOB 'nope': must be a URL, the folder of a job"):
        status("nope", as_json=False)


def test_a_job_by_its_folder(tmp_path, launcher, capsys):
    record = replace(record_of(launcher.pid), folder=str(tmp_path))
    (tmp_path / "job.json").write_text(record.text())
    write_stages(record)
    assert status(str(tmp_path), as_json=True) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["stage"] == "ready" and report["state"] == "starting" and not report["ready"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_job_whose_ranks_start_again_keeps_its_address_and_says_why(home, launcher, capsys):
    record = record_of(launcher.pid, restarts=5)
    Registry(home).add(record)
    url = f"http://127.0.0.1:{free_port()}"
    write_stages(record, url)
    environ = {stages.VARIABLE: stages.pattern(Path(record.folder))}

    def told() -> dict[str, Any]:
        assert status(url, as_json=True) == 1
        return json.loads(capsys.readouterr().out)

    # Its front end is gone, whoever named rank 1 or not.
    assert told()["state"] == "restarting" and told()["id"] == record.id
    StageFile(environ, 0).name_first(1)
    assert told()["restarts"]["reasons"][0].startswith("rank 1: died")
    StageFile(environ, 1).tell("starting")
    StageFile(environ, 0).tell("starting")
    report = told()
    assert (report["state"], report["stage"], report["url"]) == ("restarting", "starting", url)
    assert report["restarts"]["count"] == 1 and report["restarts"]["max"] == 5
    assert report["restarts"]["reasons"][0].startswith("rank 1: died")
    assert status(None, as_json=False) == 1
    assert "restarts: 1 of 5, last: rank 1: died" in capsys.readouterr().out
    assert stop(url, now=False) == 0 and launcher.wait(5) in (0, -signal.SIGTERM)


def test_a_job_that_never_starts_again_has_failed(home, launcher, capsys):
    record = record_of(launcher.pid)
    Registry(home).add(record)
    write_stages(record)
    environ = {stages.VARIABLE: stages.pattern(Path(record.folder))}
    StageFile(environ, 1).tell("failed", text="no memory", code=1)
    assert status(None, as_json=True) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["state"] == "failed" and report["restarts"] is None


def test_an_ended_job_says_how_and_its_time_stands_still(tmp_path, launcher, capsys):
    record = replace(record_of(launcher.pid), folder=str(tmp_path))
    (tmp_path / "job.json").write_text(record.text())
    lines = [stages.Record(r, "n0", "ready", 100.0 + r) for r in (0, 1)]
    text = "".join(json.dumps(asdict(line)) + "\n" for line in lines)
    (tmp_path / "node-n0.jsonl").write_text(text)
    launcher.kill()
    launcher.wait()
    assert status(str(tmp_path), as_json=True) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["state"], report["stage"], report["uptime_seconds"]) == ("ended", "stopped", 1.0)
    stages.write_failure(tmp_path, 1, "n0", "died: killed by SIGKILL", 3)
    status(str(tmp_path), as_json=True)
    report = json.loads(capsys.readouterr().out)
    assert report["stage"] == "failed"
    assert report["failures"] == [{"rank": 1, "host": "n0", "reason": "died: killed by SIGKILL"}]


def test_nodes_that_share_a_host_name_are_told_apart():
    ranks = [{"rank": r, "host": "vm", "state": "ready"} for r in range(4)]
    nodes = [{"name": "vm#0", "ranks": [0, 1]}, {"name": "vm#1", "ranks": [2, 3]}]
    found = nodes_of({"ranks": ranks, "launch": {"nodes": nodes}})
    assert [(n["host"], n["ranks"]) for n in found] == [("vm#0", [0, 1]), ("vm#1", [2, 3])]


def test_slurms_word_stands_where_ranks_say_nothing(home, monkeypatch, capsys):
    state = JobState("PENDING", "Priority", "")
    monkeypatch.setattr(targets, "state_of", lambda job: state)
    record = replace(record_of(os.getpid()), id="12", kind=SLURM, pid=0, folder="/gone")
    Registry(home).add(record)
    assert status("12", as_json=False) == 1
    assert "Slurm: pending (Priority)" in capsys.readouterr().out
    state = JobState("COMPLETED", "", "")
    assert status(None, as_json=False) == 0
    assert Registry(home).all() == [], "it has ended, so it is forgotten"


@pytest.mark.parametrize(("launcher", "now"), [("quick", False), ("", True)], indirect=["launcher"])
def test_stop_waits_for_the_launchers_end(home, launcher, now):
    Registry(home).add(record_of(launcher.pid))
    assert stop(None, now=now) == 0
    assert launcher.wait(5) in (0, -signal.SIGTERM)
    with pytest.raises(ConfigError):
        stop(f"local-{launcher.pid}", now=False)


def test_a_server_on_all_addresses_is_reached_by_its_nodes_name():
    progress = Progress(url="http://0.0.0.0:81", front_host="n3")
    assert public_url(progress) == "http://n3:81"
    progress.front_host = socket.gethostname()
    assert public_url(progress) == "http://127.0.0.1:81"
    progress.url = "http://10.0.0.1:81"
    assert public_url(progress) == progress.url
