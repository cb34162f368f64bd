"""The first signal drains, a later one stops at once, and two in a moment are one wish."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from launch import signals
from launch.signals import StopSignals

ROOT = Path(__file__).parents[1]


def raise_and_wait(number: int, event: threading.Event) -> None:
    os.kill(os.getpid(), number)
    assert event.wait(10)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_drains_second_stops(monkeypatch, number):
    monkeypatch.setattr(signals, "SAME_WISH_SECONDS", 0.0)
    drained, stopped = threading.Event(), threading.Event()
    with StopSignals(drained.set, stopped.set) as stop:
        raise_and_wait(number, drained)
        assert stop.asked.is_set() and not stopped.is_set()
        raise_and_wait(number, stopped)


def test_a_burst_is_one_wish():
    calls: list[str] = []
    seen = threading.Event()
    with StopSignals(lambda: calls.append("drain"), lambda: calls.append("now")) as stop:
        stop.drain = lambda: (calls.append("drain"), seen.set())  # may be replaced while entered
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        assert seen.wait(10)
    assert calls == ["drain"]


@pytest.mark.parametrize("hang_up", [signal.SIG_DFL, signal.SIG_IGN], ids=["plain", "nohup"])
def test_handlers_are_put_back(hang_up: signal.Handlers):
    outside = signal.signal(signal.SIGHUP, hang_up)
    try:
        before = {s: signal.getsignal(s) for s in StopSignals.SIGNALS}
        with StopSignals(lambda: None, lambda: None):
            kept = {s for s in before if signal.getsignal(s) == before[s]}
            assert kept == ({signal.SIGHUP} if hang_up is signal.SIG_IGN else set())
        assert all(signal.getsignal(s) == before[s] for s in before)
        assert signal.set_wakeup_fd(-1) == -1
    finally:
        signal.signal(signal.SIGHUP, outside)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_a_child_dies_with_its_parent():
    child = "from launch.signals import die_with_parent; import time, os; die_with_parent();"
    child += "print(os.getpid(), flush=True); time.sleep(600)"
    parent = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', sys.argv[1]]);"
    parent += "time.sleep(600)"
    process = subprocess.Popen(
        [sys.executable, "-c", parent, child], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.kill()
    process.wait()
    # The pipe's other end closes when the last process that holds it is gone.
    assert process.stdout.read() == ""
    with pytest.raises(ProcessLookupError):
        for _ in range(10_000_000):  # the kernel may still be taking it apart
            os.kill(pid, 0)


def test_a_child_whose_parent_is_gone_already_ends():
    code = "from launch.signals import die_with_parent; die_with_parent(1); print('alive')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1 and done.stdout == ""
