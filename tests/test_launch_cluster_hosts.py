"""`moeserve launch hosts` where ssh is a shell on this machine and torchrun a few lines: the line
to each host, what is said, and that nobody is left behind."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from launch.cluster import hosts, hosts_watch, remote
from launch.cluster.hosts import HostsFailed, HostsLaunch
from moeserve.errors import ConfigError, MoeserveError

ROOT = Path(__file__).parents[1]
TINY = str(ROOT / "checkpoints" / "tiny")
LIMIT = 30

# What stands where torchrun does: two ranks that are children of it, and what they write.
TORCHRUN = """
import json, os, subprocess, sys, time
act = os.environ["MOESERVE_TEST_ACT"]
node = int(next(a for a in sys.argv if a.startswith("--node-rank=")).split("=")[1])

def say(local, stage, **more):
    record = {"rank": 2 * node + local, "host": f"n{node}", "stage": stage, "when": time.time()}
    with open(os.environ["MOESERVE_STAGES"], "a") as file:
        file.write(json.dumps(record | more) + "\\n")

ranks = []
for local in (0, 1):
    say(local, "starting")
    ranks.append(subprocess.Popen(["sleep", "600"]))
print("moeserve: ranks", *(rank.pid for rank in ranks), flush=True)
if act == "fail" and node == 1:
    say(0, "failed", text="out of disk", code=1)
    sys.exit(1)
if act == "broken":
    sys.exit("no such module")
for local in (0, 1):
    say(local, "ready")
if node == 0:
    say(0, "serving", text="http://127.0.0.1:8000")
if act == "die" and node == 1:
    time.sleep(0.5)
    print("  rank      : 3 (local_rank: 1)")
    print("  exitcode  : -9 (pid: 5)", flush=True)
    sys.exit(1)
for rank in ranks:  # a drained job: the first host is told, all ranks end
    while rank.poll() is None:
        if node == 1 and os.path.exists(os.environ["MOESERVE_TEST_DRAINED"]):
            rank.kill()
        time.sleep(0.02)
open(os.environ["MOESERVE_TEST_DRAINED"], "w").close()
"""


class Place:
    """Programs that stand for ssh and Python, and all processes that came of them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.env = monkeypatch
        torchrun = folder / "torchrun.py"
        torchrun.write_text(TORCHRUN)
        python = shlex.quote(sys.executable)
        self.ssh = self._program("ssh", f'echo "$1" >> {folder}/asked; shift; exec sh -c "$*"')
        self.python = self._program(
            "python",
            f'case "$*" in *torch.distributed.run*) exec {python} {torchrun} "$@";; esac\n'
            f'exec {python} "$@"',
        )
        self.act("serve")
        monkeypatch.setenv("MOESERVE_TEST_DRAINED", str(folder / "drained"))
        monkeypatch.setenv("XDG_STATE_HOME", str(folder / "home"))

    def act(self, name: str) -> None:
        self.env.setenv("MOESERVE_TEST_ACT", name)

    def _program(self, name: str, body: str) -> str:
        path = self.folder / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return str(path)

    def launch(self, names: str = "a,b", **more: object) -> HostsLaunch:
        asked = {
            "hosts": names,
            "ranks_per_node": 2,
            "ssh": self.ssh,
            "python": self.python,
            "wait": None,
            "output": self.folder / "job",
            "words": ("serve", TINY),
        }
        return HostsLaunch(**{**asked, **more})

    def ranks(self) -> list[int]:
        """Pids by the logs that came over the line."""
        found = []
        for log in (self.folder / "job").glob("host-*.log"):
            for line in log.read_text().splitlines():
                if line.startswith("moeserve: ranks"):
                    found += [int(word) for word in line.split()[2:]]
        return found


@pytest.fixture
def place(tmp_path, monkeypatch) -> Iterator[Place]:
    monkeypatch.setattr(hosts_watch, "MORE_REASONS", 0.5)
    place = Place(tmp_path, monkeypatch)
    yield place
    left = [pid for pid in place.ranks() if psutil.pid_exists(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def all_gone(place: Place) -> bool:
    return not any(psutil.pid_exists(pid) for pid in place.ranks())


def test_everything_wrong_is_said_at_once(place):
    (place.folder / "file").write_text("")
    asked = place.launch(
        "a,b;c,a,a", ssh="/gone/ssh", words=("serve", "/gone", "--ep", "5"),
        output=place.folder / "file" / "job",
    )  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        asked.run()
    assert [p.split(":")[0] for p in caught.value.problems] == [
        "host 'b;c'",
        "host 'a'",
        "--ssh '/gone/ssh'",
        f"--output {str(place.folder / 'file' / 'job')!r}",
        "--ep 5 (by a flag, --layout or --config)",
        "CHECKPOINT '/gone'",
    ]


def test_hosts_that_do_not_answer_are_named_with_sshs_word(place):
    place._program(
        "ssh", 'echo "ssh: connect to host $1 port 22: Connection refused" >&2; exit 255'
    )
    with pytest.raises(HostsFailed) as caught:
        place.launch().run()
    assert str(caught.value).splitlines() == [
        f"host {name}: ssh: connect to host {name} port 22: Connection refused" for name in "ab"
    ]


def test_a_host_with_other_versions_is_named():
    first = hosts.Host("a", None, up={"versions": {"torch": "2.13", "python": "3.11"}})
    other = hosts.Host("b", None, up={"versions": {"torch": "2.12", "python": "3.11"}})
    assert hosts._skew([first, other]) == ["host b: has torch 2.12, but a has 2.13"]


def test_ranks_a_host_by_ep():
    assert hosts._ranks_of(("serve", "x", "--ep", "8"), 2) == 4
    assert hosts._ranks_of(("serve", "x", "--ep=8"), 4) == 2
    assert hosts._ranks_of(("serve", "x"), 4) == 1


def test_ctrl_c_drains_and_nobody_is_left(place, capfd):
    said: list[str] = []

    def act() -> None:
        until(lambda: said.append(capfd.readouterr().err) or "ready after" in "".join(said))
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=act)
    thread.start()
    code = place.launch().run()
    thread.join()
    text = "".join(said) + capfd.readouterr().err
    assert code == 0, text
    assert "2 hosts answer" in text and "n0 (ranks 0-1): ready" in text
    assert text.endswith("moeserve: stopped\n") and len(place.ranks()) == 4
    until(lambda: all_gone(place))
    assert sorted((place.folder / "asked").read_text().split()) == ["a", "b"]


def test_the_first_cause_is_told_and_all_hosts_end(place, capfd):
    place.act("fail")
    assert place.launch().run() == 1
    said = capfd.readouterr().err
    assert "moeserve: rank 2 on n1: out of disk\n" in said
    until(lambda: all_gone(place))


def test_a_rank_that_was_killed_is_known_by_torchruns_table(place, capfd):
    place.act("die")
    assert place.launch().run() == 3
    assert "rank 3 on n1: died: killed by SIGKILL" in capfd.readouterr().err
    until(lambda: all_gone(place))


def test_all_hosts_start_again_as_often_as_they_may(place, capfd, monkeypatch):
    place.act("die")
    monkeypatch.setattr(hosts, "MOST_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(hosts.time, "sleep", lambda seconds: None)
    words = ("serve", TINY, "--max-restarts", "1")
    assert place.launch(words=words).run() == 3
    said = capfd.readouterr().err
    assert said.count("rank 3 on n1: died") == 2 and said.count("ready after") == 2
    assert "all hosts start again in 1 s" in said and len(place.ranks()) == 8
    until(lambda: all_gone(place))


def test_too_slow_is_no_reason_to_start_again(place, capfd):
    asked = place.launch(wait=0.0, words=("serve", TINY, "--max-restarts", "9"))
    with pytest.raises(MoeserveError, match="not ready within --wait 0 s"):
        asked.run()


def test_a_torchrun_that_cannot_start_is_told(place, capfd):
    place.act("broken")
    assert place.launch().run() == 1
    assert "no such module" in capfd.readouterr().err


@pytest.mark.parametrize("by", ["kill", "ctrl-c"])
def test_all_ranks_end_with_the_launcher_however_it_ends(place, by):
    code = (
        "import sys; from launch.cluster.hosts import HostsLaunch; from pathlib import Path; "
        f"sys.exit(HostsLaunch('a,b', 2, {place.ssh!r}, {place.python!r}, None, "
        f"Path({str(place.folder / 'job')!r}), ('serve', {TINY!r})).run())"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        until(lambda: len(place.ranks()) == 4)
        process.send_signal(signal.SIGKILL if by == "kill" else signal.SIGINT)
        process.wait(LIMIT)
        until(lambda: all_gone(place))
    finally:
        process.kill()
        process.wait()


def test_what_a_host_says_of_itself():
    said = remote.who_am_i({"SSH_CONNECTION": "10.0.0.1 5 10.0.0.2 22"})
    assert said["address"] == "10.0.0.2" and said["versions"]["torch"].startswith("2.")
    assert json.loads(json.dumps(said)) == said


def test_ranks_meet_where_the_other_hosts_come_too(monkeypatch):
    def at(name: str, address: str, count: int = 2) -> str:
        up = {"address": address, "port": 7}
        named = [hosts.Host(name, None, up=up) for _ in range(count)]
        return hosts._meeting_point(named, words)[0]

    words = ["--ep", "2", "--interface", "lo"]
    assert at("localhost", "") == "127.0.0.1", "as asked for: names of one machine"
    words = ["--ep", "2"]

    assert at("me@node1", "10.0.0.2") == "10.0.0.2"
    assert at("me@node1", "") == at("node1", "127.0.0.1") == "node1"
    assert at("localhost", "", 1) == "127.0.0.1"
    for name, address in (("localhost", ""), ("127.0.0.2", "127.0.0.1"), ("::1", "::1")):
        with pytest.raises(HostsFailed, match="name the first host by an address"):
            at(name, address)
    monkeypatch.setattr(remote.socket, "gethostbyname", lambda name: "127.0.1.1")
    assert remote.who_am_i({})["address"] == ""


def test_what_hosts_get_of_the_environment():
    given = {
        "NCCL_IB_HCA": "mlx5",
        "MOESERVE_ADMIN_KEY": "k",
        "MOESERVE_STAGES": "/x",
        "HOME": "/me",
    }
    assert hosts._environment(given) == {
        "NCCL_IB_HCA": "mlx5",
        "MOESERVE_ADMIN_KEY": "k",
        "MOESERVE_ONE_TERMINAL": "1",
    }
