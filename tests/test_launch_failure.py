"""Which of several deaths is the cause, and what is said of it."""

from __future__ import annotations

import json
import signal

import pytest

from launch.failure import (
    LOST_PEER,
    Failure,
    describe_exit,
    exit_code_of,
    first_cause,
    is_lost_peer,
    is_typed,
    read,
    write,
)
from moeserve.errors import ConfigError, EngineFailed, RankDied


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
    file = tmp_path / "error.json"
    write(file, ConfigError(["one", "two"]))
    failure = read(3, 2, json.loads(file.read_text()))
    assert (failure.rank, failure.exit_code, failure.reason) == (3, 2, "one\ntwo")
    assert failure.details == "" and failure.when > 0
    try:
        {}["x"]
    except KeyError as error:
        write(file, error)
    failure = read(0, 1, json.loads(file.read_text()))
    assert failure.reason == "KeyError: 'x'" and "Traceback" in failure.details
    write(None, KeyError("nobody asked"))


def test_a_process_that_said_nothing():
    assert read(1, -9, {}).reason == "killed by SIGKILL (out of memory?)"
    assert read(1, 7, None).reason == "exit code 7"
    assert describe_exit(-11) == "killed by SIGSEGV"


def test_first_cause():
    survivor = Failure(0, LOST_PEER, "lost", when=1.0)
    stopped = Failure(2, -signal.SIGTERM, "told to", when=0.5)
    killed = Failure(1, -9, "killed", when=2.0)
    later = Failure(3, 1, "bug", when=3.0)
    assert first_cause([survivor, stopped, killed, later]) is killed
    assert first_cause([survivor, stopped]) is stopped
