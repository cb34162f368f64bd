"""`moeserve launch hosts a,b,c`: torchrun on each host over ssh, watched from this terminal.

The ranks of a host live as long as its line to this process: Ctrl-C, a failure anywhere and the end
of this process end all of them. Knows ssh as a command that runs another one with our pipes; what
happens on a host is `launch.cluster.remote`.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import json
import os
import queue
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.cluster import remote
from launch.cluster.hosts_watch import INTERRUPTED, HostsWatch
from launch.cluster.jobs import (
    FOLDERS,
    HOSTS,
    JOB_FILE,
    keys_apart,
    record_of_this_process,
    registered,
)
from launch.cluster.served import Served, check_served
from launch.output import unwritable_folder
from moeserve.errors import ConfigError, MoeserveError
from moeserve.terminal import counted, say

SSH = "ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 -o ServerAliveCountMax=3"
STEADY_SECONDS, MOST_PAUSE_SECONDS = 300.0, 30.0  # as launch.job restarts
UP_SECONDS = 60.0  # until every host has answered
HANDED_ON = ("GLOO_", "NCCL_", "NVSHMEM_", "UCX_", "FI_", "OMP_NUM_THREADS", "TORCH_", "MOESERVE_")
_NOT_HANDED_ON = ("MOESERVE_STAGES",)
_HOST = re.compile(r"(?:[\w.-]+@)?[\w.:-]+")


class HostsFailed(MoeserveError):
    """Hosts could not be reached, or cannot run this."""


@dataclass
class Host:
    """One host: its ssh, and what it said of itself."""

    name: str
    process: subprocess.Popen[str]
    up: dict[str, Any] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)  # of ssh, or of Python before we ran
    code: int | None = None

    def send(self, text: str) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # it is gone, which its output says
            self.process.stdin.write(text + "\n")
            self.process.stdin.flush()

    def cut(self) -> None:
        """Close the line: everything there ends."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()


@dataclass(frozen=True)
class HostsLaunch:
    """The command line, as typed."""

    hosts: str
    ranks_per_node: int | None
    ssh: str
    python: str | None
    wait: float | None
    output: Path | None
    words: tuple[str, ...]

    def run(self) -> int:
        """The exit code. ConfigError: wrong flags, all of them; HostsFailed: hosts that are not
        there."""
        problems: list[str] = []
        names = self._names(problems)
        ssh = shlex.split(self.ssh)
        if not ssh or shutil.which(ssh[0]) is None:
            problems.append(f"--ssh {self.ssh!r}: there is no such program here")
        problems += unwritable_folder("--output", self.output or FOLDERS)
        ranks = self.ranks_per_node or _ranks_of(self.words, len(names))
        served = check_served(self.words, len(names) * ranks, problems)
        if problems:
            raise ConfigError(problems)
        if served is None:
            return 0  # its help was asked for
        if served.listens_anywhere:
            say(f"--host {served.host}: the first host listens on all its addresses")
        folder = (self.output or FOLDERS / f"hosts-{time.strftime('%Y%m%d-%H%M%S')}").absolute()
        record = record_of_this_process(
            HOSTS,
            folder,
            len(names),
            len(names) * ranks,
            ("serve", *served.words),
            served.drain_seconds,
            served.max_restarts,
        )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / JOB_FILE).write_text(record.text())
        except OSError as error:
            raise ConfigError([f"--output {folder}: {error.strerror}"]) from None
        try:
            with registered(record):
                return self._launch_again(names, ranks, ssh, served, folder)
        finally:
            self._drop_if_nothing_ran(folder)

    def _drop_if_nothing_ran(self, folder: Path) -> None:
        """No rank was started (an unknown host, versions that differ): nothing to look at later."""
        with contextlib.suppress(OSError):
            if self.output is None and [p.name for p in folder.iterdir()] == [JOB_FILE]:
                shutil.rmtree(folder)
                folder.parent.rmdir()  # if it is empty now

    def _names(self, problems: list[str]) -> list[str]:
        names = [name.strip() for name in self.hosts.split(",")]
        if not all(names):
            problems.append(f"HOSTS {self.hosts!r}: a name is empty; give names such as a,b,c")
        names = [name for name in names if name]
        problems += [
            f"host {name!r}: must be a name or an address, such as node1 or me@10.0.0.1"
            for name in names
            if not _HOST.fullmatch(name)
        ]
        twice = sorted({name for name in names if names.count(name) > 1})
        problems += [f"host {name!r}: is named twice" for name in twice]
        return names

    def _launch_again(
        self, names: Sequence[str], ranks: int, ssh: Sequence[str], served: Served, folder: Path
    ) -> int:
        """All of it, and again after a rank died as often as --max-restarts says; not after wrong
        settings or files, which would end the same way."""
        pause, left = 1.0, served.max_restarts
        while True:
            began = time.monotonic()
            code = self._launch(names, ranks, ssh, served, folder)
            if left == 0 or code in (0, ConfigError.exit_code, INTERRUPTED):
                return code
            pause = 1.0 if time.monotonic() - began > STEADY_SECONDS else pause
            left -= 1
            say(f"all hosts start again in {pause:g} s (--max-restarts; {left} left)")
            time.sleep(pause)
            pause = min(2 * pause, MOST_PAUSE_SECONDS)

    def _launch(
        self, names: Sequence[str], ranks: int, ssh: Sequence[str], served: Served, folder: Path
    ) -> int:
        news: queue.Queue[tuple[Host, dict[str, Any]]] = queue.Queue()
        python = self.python or sys.executable
        home = str(Path(__file__).resolve().parents[2])
        command = shlex.join(["env", f"PYTHONPATH={home}", python, "-P", "-m", remote.__name__])
        hosts = [_start(name, [*ssh, name, command], news) for name in names]
        watch = HostsWatch(hosts, news, len(names) * ranks, folder, served.drain_seconds, self.wait)
        try:
            self._wait_until_up(hosts, news)
            address, port = _meeting_point(hosts, served.words)
            answer = f"{counted(len(hosts), 'host')} {'answers' if len(hosts) == 1 else 'answer'}"
            say(f"{answer}; ranks meet at {address}:{port}")
            words, keys = keys_apart(served.words)
            for number, host in enumerate(hosts):
                torchrun = [
                    *(python, "-P", "-m", "torch.distributed.run"),
                    f"--nnodes={len(hosts)}",
                    f"--nproc-per-node={ranks}",
                    f"--node-rank={number}",
                    f"--master-addr={address}",
                    f"--master-port={port}",
                    *("-m", "moeserve", "serve", *words),
                ]
                environment = _environment() | keys
                orders = {"command": torchrun, "env": environment, "folder": os.getcwd()}
                host.send(json.dumps(orders))
            return watch.run()
        finally:
            for host in hosts:
                host.cut()
            _end(hosts)

    def _wait_until_up(
        self, hosts: Sequence[Host], news: queue.Queue[tuple[Host, dict[str, Any]]]
    ) -> None:
        deadline = time.monotonic() + UP_SECONDS
        while any(not host.up and host.code is None for host in hosts):
            try:
                host, said = news.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            if said["kind"] == remote.UP:
                host.up = said
            elif said["kind"] == "gone":
                host.code = said["code"]
        problems = [f"host {h.name}: {why}" for h in hosts if (why := _why_not(h))]
        problems += _skew(hosts)
        if problems:
            raise HostsFailed("\n".join(problems))


def _start(
    name: str, command: Sequence[str], news: queue.Queue[tuple[Host, dict[str, Any]]]
) -> Host:
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # the terminal's Ctrl-C is ours: we tell the hosts
    )
    host = Host(name, process)

    def complain() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            host.complaints.append(line.rstrip("\n"))

    def listen() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            try:
                said = json.loads(line)
                said["kind"]
            except (ValueError, TypeError, KeyError):
                host.complaints.append(line.rstrip("\n"))  # a shell's greeting
                continue
            news.put((host, said))
        complaining.join(1.0)
        news.put((host, {"kind": "gone", "code": process.wait()}))

    complaining = threading.Thread(target=complain, daemon=True)
    complaining.start()
    threading.Thread(target=listen, daemon=True).start()
    return host


def _why_not(host: Host) -> str | None:
    if host.up:
        return None
    if host.code is None:
        return f"no answer within {UP_SECONDS:g} s"
    said = [line for line in host.complaints if line.strip()]
    return said[-1].strip() if said else f"ssh ended with exit code {host.code}"


def _meeting_point(hosts: Sequence[Host], words: Sequence[str]) -> tuple[str, int]:
    """Address and port of the first host's store: as ssh came to it, or as it knows itself, or by
    the name that was typed. Loopback is for one host, or where --interface asks for it (several
    names of one machine). HostsFailed: others would look for the store on themselves."""
    first = hosts[0]
    port = int(first.up["port"])
    if len(hosts) == 1 or {"--interface=lo", "--interface lo"} & _pairs(words):
        return first.up["address"] or "127.0.0.1", port
    typed = first.name.rpartition("@")[2]
    address = next((x for x in (first.up["address"], typed) if x and not _is_itself(x)), None)
    if address is None:
        raise HostsFailed(
            f"host {first.name}: {first.up['address'] or typed} leads each host to itself, so "
            "ranks of the others would not find it; name the first host by an address or a name at "
            "which the others reach it, such as 10.0.0.1 (or, where all are one machine, give "
            "serve --interface lo)"
        )
    return address, port


def _pairs(words: Sequence[str]) -> set[str]:
    return {*words, *(f"{a} {b}" for a, b in itertools.pairwise(words))}


def _is_itself(address: str) -> bool:
    """Whether this means, on every machine, that machine. Names are not looked up: Debian's own
    host is 127.0.1.1 to itself, and right for all others."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return address == "localhost" or address.endswith(".localhost")


def _skew(hosts: Sequence[Host]) -> list[str]:
    """Versions that differ from the first host's."""
    first = hosts[0]
    return [
        f"host {host.name}: has {name} {version}, but {first.name} has {wanted}"
        for host in hosts[1:]
        if host.up and first.up
        for name, wanted in first.up["versions"].items()
        if (version := host.up["versions"].get(name)) != wanted
    ]


def _ranks_of(words: Sequence[str], num_hosts: int) -> int:
    """Ranks a host, where only --ep says how many there are in all; else one."""
    text = " ".join(words)
    match = re.search(r"--ep[= ](\d+)(?!\S)", text)
    total = int(match[1]) if match else num_hosts
    return max(1, total // max(1, num_hosts))


def _environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What hosts get of our environment: how libraries talk to the network, and our own."""
    kept = {
        name: value
        for name, value in environ.items()
        if name.startswith(HANDED_ON) and name not in _NOT_HANDED_ON
    }
    return {**kept, "MOESERVE_ONE_TERMINAL": "1"}


def _end(hosts: Sequence[Host], seconds: float = 5.0) -> None:
    """Each ssh ends with what it runs; one that does not is killed, and the host then sees its line
    cut."""
    deadline = time.monotonic() + seconds
    for host in hosts:
        try:
            host.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            host.process.kill()
            host.process.wait()
