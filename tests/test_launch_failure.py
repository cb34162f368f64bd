"""Which of several deaths is the cause, and what is said of it."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from ep.peer_loss import is_lost_peer
from launch.failure import (
    LOST_PEER,
    Failure,
    describe_exit,
    exit_code_of,
    first_cause,
    is_typed,
    read,
    write,
    write_verdict,
)
from moeserve.errors import ConfigError, EngineFailed, RankDied
from moeserve.lockstep import PeerFailed


def gloo() -> RuntimeError:
    return RuntimeError("[gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:1")


def caused(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error, code",
    [
        (ConfigError(["x"]), 2),
        (RankDied(1, "x"), 3),
        (KeyError("x"), 1),
        (FileNotFoundError(2, "x"), 1),
        (gloo(), LOST_PEER),
        (caused(EngineFailed("forward failed"), gloo()), LOST_PEER),
        (caused(EngineFailed("forward failed"), ZeroDivisionError()), 1),
        (PeerFailed([1]), LOST_PEER),
    ],
)
def test_exit_codes(error, code):
    assert exit_code_of(error) == code


def test_a_model_that_is_refused_is_wrong_input():
    from models.deepseek.errors import UnsupportedModel

    error = UnsupportedModel.__new__(UnsupportedModel)
    assert exit_code_of(error) == 2


def test_an_error_raised_from_none_forgets_the_peer():
    error = ConfigError(["port taken"])
    error.__context__, error.__suppress_context__ = gloo(), True
    assert not is_lost_peer(error)


def test_typed_errors_need_no_traceback():
    assert is_typed(ConfigError(["x"])) and is_typed(FileNotFoundError(2, "x"))
    assert not is_typed(KeyError("x"))
    assert not is_typed(caused(EngineFailed("x"), KeyError("y")))


def test_reasons_travel_through_the_error_file(tmp_path):
    file = tmp_path / "gone" / "errors"  # torchrun's folder may have been cleaned meanwhile
    write(file, 3, ConfigError(["one", "two"]))
    assert json.loads(file.read_text())["message"]["message"] == "one\ntwo"  # torchrun's form
    try:
        {}["x"]
    except KeyError as error:
        write(file, 0, error)
    (typed, bug, silent), verdict = read({3: 2, 0: 1, 1: 1}, file.read_text())
    assert (typed.rank, typed.exit_code, typed.reason) == (3, 2, "one\ntwo")
    assert typed.details == "" and typed.when > 0
    assert bug.reason == "KeyError: 'x'" and "Traceback" in bug.details
    assert (silent.reason, verdict) == ("exit code 1", None)
    assert typed.when <= bug.when <= silent.when
    write(None, 0, KeyError("nobody asked"))
    write(Path("/proc/0/fd/7"), 0, KeyError("the launcher is gone"))


def test_a_process_that_said_nothing():
    (killed, left), _ = read({1: -9, 0: 7}, "")
    assert (killed.rank, killed.reason) == (1, "killed by SIGKILL (out of memory?)")
    assert (left.rank, left.reason) == (0, "exit code 7") and killed.when < left.when


def test_the_front_ends_verdict_is_the_launchers(tmp_path):
    write_verdict(tmp_path / "errors", 2)
    failures, verdict = read({0: -9, 1: LOST_PEER, 2: -9}, (tmp_path / "errors").read_text())
    assert first_cause(failures, verdict).rank == 2
    assert first_cause(failures).rank == 0
    # A rank that only lost a peer is never the cause, whoever says so.
    assert first_cause(failures, 1).rank == 0


def test_a_killed_rank_comes_before_what_others_made_of_it(tmp_path):
    write(tmp_path / "errors", 0, RuntimeError("a text that nobody knows"))
    failures, _ = read({0: 1, 1: -9, 2: -6}, (tmp_path / "errors").read_text())
    assert first_cause(failures).rank == 1
    assert describe_exit(-11) == "killed by SIGSEGV"


def test_first_cause():
    survivor = Failure(0, LOST_PEER, "lost", when=1.0)
    stopped = Failure(2, -signal.SIGTERM, "told to", when=0.5)
    killed = Failure(1, -9, "killed", when=2.0)
    later = Failure(3, 1, "bug", when=3.0)
    assert first_cause([survivor, stopped, killed, later]) is killed
    assert first_cause([survivor, stopped]) is stopped
