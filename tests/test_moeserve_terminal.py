"""One style for every line of the launching terminal."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from moeserve.terminal import LineFormatter, counted, log_to_terminal, say


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    loggers = [logging.getLogger(), logging.getLogger("moeserve")]
    before = [(x, x.level, x.handlers) for x in loggers]
    yield
    for logger, level, handlers in before:
        logger.setLevel(level)
        logger.handlers = handlers


def test_each_line_has_the_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    say("one\ntwo")
    assert capsys.readouterr().err == "moeserve: one\nmoeserve: two\n"


def test_records_say_their_level_unless_it_is_info(capsys: pytest.CaptureFixture[str]) -> None:
    log_to_terminal("info")
    logging.getLogger("moeserve.frontend").info("up")
    logging.getLogger("moeserve.frontend").warning("%d left\nof them", 3)
    logging.getLogger("uvicorn.error").info("Started server process [1]")
    logging.getLogger("uvicorn.error").error("broken")
    said = capsys.readouterr().err
    assert said == (
        "moeserve: up\nmoeserve: warning: 3 left\nmoeserve: warning: of them\n"
        "moeserve: error: broken\n"
    )


@pytest.mark.parametrize("level, theirs", [("debug", True), ("warning", False), ("error", False)])
def test_levels(capsys: pytest.CaptureFixture[str], level: str, theirs: bool) -> None:
    log_to_terminal(level)
    logging.getLogger("uvicorn.access").info("GET /")
    logging.getLogger("moeserve").info("news")
    said = capsys.readouterr().err
    assert ("GET /" in said) == theirs == ("news" in said)


def test_a_traceback_follows_its_line() -> None:
    try:
        raise KeyError("x")
    except KeyError as error:
        info = (KeyError, error, error.__traceback__)
    record = logging.LogRecord("m", logging.ERROR, "f", 1, "it failed", None, info)
    lines = LineFormatter().format(record).splitlines()
    assert lines[0] == "moeserve: error: it failed" and lines[-1] == "KeyError: 'x'"


def test_one_is_singular() -> None:
    assert [counted(n, "thread") for n in (0, 1, 2)] == ["0 threads", "1 thread", "2 threads"]
