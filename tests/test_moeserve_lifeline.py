"""A child knows of its parent's end, however it came; shared files leave nothing behind."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import psutil

from moeserve.lifeline import LIFELINE
from moeserve.nameless import NamelessFile

ROOT = Path(__file__).parents[1]
CHILD = """
import sys, time
from moeserve.lifeline import when_parent_ends
import os
when_parent_ends(lambda: os._exit(7))
print(os.getpid(), flush=True)
time.sleep(600)
"""


def start() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=LIFELINE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )


def test_the_thread_that_started_the_child_may_end() -> None:
    started: list[subprocess.Popen[str]] = []
    thread = threading.Thread(target=lambda: started.append(start()))
    thread.start()
    thread.join()
    (child,) = started
    assert child.stdout is not None and child.stdin is not None
    try:
        assert int(child.stdout.readline()) == child.pid
        assert child.poll() is None
    finally:
        child.stdin.close()  # as the kernel does for a parent that is gone
        assert child.wait(20) == 7
        child.stdout.close()


def test_a_child_ends_with_a_killed_parent() -> None:
    code = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdin=subprocess.PIPE)
time.sleep(600)
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    assert parent.stdout.read() == ""  # closed by the last that held it
    gone, alive = psutil.wait_procs([child], timeout=20)
    assert not alive


def test_a_nameless_file_is_shared_and_vanishes() -> None:
    file = NamelessFile("one\n")
    code = "import sys; f = open(sys.argv[1], 'a'); f.write('two\\n')"
    subprocess.run([sys.executable, "-c", code, str(file.path)], check=True)
    assert file.path.read_text() == file.read() == "one\ntwo\n"
    file.close()
    assert not file.path.exists()
