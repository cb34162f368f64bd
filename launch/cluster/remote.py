"""One host's part of `moeserve launch hosts`: started over ssh, it runs torchrun and reports.

    python -P -m launch.cluster.remote       standard input and output are the line to the launcher

Input: one line of orders (JSON: command, env, folder), then words: `drain` tells this host's ranks
to stop, `now` kills whoever is left a moment later. The end of input is the end of the launcher or
of the line to it: everything here is killed at once, so that nobody is left behind. Output: one
JSON object a line, `kind` says what: up, stage, log, end.

Knows processes and that line. Knows nothing of the other hosts.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import psutil

from launch.cluster import stages
from launch.front_end import python_environment
from launch.processes import leave
from launch.signals import adopt_orphans, die_with_parent
from moeserve.nameless import NamelessFile

POLL_SECONDS = 0.1
NOW_SECONDS = 2.5  # between `now` and the kill: streams get a last word
UP, STAGE, LOG, END = "up", "stage", "log", "end"
DRAIN, NOW = "drain", "now"


def main() -> None:
    line = _Line()
    line.send(UP, **who_am_i(os.environ))
    orders = sys.stdin.readline()
    if not orders.strip():
        leave(1)  # the launcher has changed its mind
    try:
        code = _run(json.loads(orders), line)
    except OSError as error:
        line.send(LOG, text=f"moeserve: {error}")
        code = 1
    line.send(END, code=code)
    leave(0)


def who_am_i(environ: Mapping[str, str]) -> dict[str, Any]:
    """host, address at which the other hosts reach this one ("": nothing here tells), a free port,
    versions."""
    connection = environ.get("SSH_CONNECTION", "").split()  # client, port, server, port
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    return {
        "host": socket.gethostname(),
        "address": connection[2] if len(connection) == 4 else _own_address(),
        "port": port,
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in ("moeserve", "torch")},
        },
    }


def _own_address() -> str:
    """Where its name leads, unless that is to itself alone."""
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(socket.gethostname())
        if not address.startswith("127."):
            return address
    return ""


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "from a checkout" if name == "moeserve" else "absent"


class _Line:
    """Standard output; one that is broken is the launcher's end, which standard input tells too."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def send(self, kind: str, **values: object) -> None:
        with self._lock, contextlib.suppress(OSError):
            sys.stdout.write(json.dumps({"kind": kind, **values}) + "\n")
            sys.stdout.flush()


def _run(orders: dict[str, Any], line: _Line) -> int:
    adopt_orphans()  # whoever loses torchrun is still found among our children
    told = NamelessFile()
    process = subprocess.Popen(
        orders["command"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        cwd=orders["folder"] if os.path.isdir(orders["folder"]) else None,
        env=python_environment(**orders["env"], **{stages.VARIABLE: str(told.path)}),
        start_new_session=True,
        preexec_fn=die_with_parent,
    )
    threading.Thread(target=_listen, daemon=True).start()
    reader = threading.Thread(target=_hand_on, args=(process, line), daemon=True)
    reader.start()
    sent = 0

    def report() -> int:
        lines = told.read().splitlines(keepends=True)
        whole = [text for text in lines if text.endswith("\n")]
        for text in whole[sent:]:
            line.send(STAGE, line=text)
        return len(whole)

    while process.poll() is None:
        sent = report()
        time.sleep(POLL_SECONDS)
    _kill_tree()  # a rank that lost its agent
    reader.join(2.0)
    report()
    told.close()
    return process.returncode


def _hand_on(process: subprocess.Popen[str], line: _Line) -> None:
    assert process.stdout is not None
    for text in process.stdout:
        line.send(LOG, text=text.rstrip("\n"))


def _listen() -> None:
    for word in sys.stdin:
        if word.strip() == DRAIN:
            _tell_ranks()
        elif word.strip() == NOW:
            _tell_ranks()
            threading.Timer(NOW_SECONDS, _kill_tree).start()
    _kill_tree()
    leave(1)


def _tell_ranks() -> None:
    # Not torchrun: its answer to a signal is to kill. It has no children but ranks.
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            for rank in child.children():
                rank.send_signal(signal.SIGTERM)


def _kill_tree() -> None:
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            process.kill()


if __name__ == "__main__":
    main()
