"""`moeserve bench serve`: drive any OpenAI-style server, ours or a peer's; report what it gave.

Joins flags, run, screen and files. Exit code 1 where calls failed or answers were missing, 130
after Ctrl-C; the report is made all the same.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from launch.bench.serve_call import Call
from launch.bench.serve_drive import Driven
from launch.bench.serve_flags import Ask
from launch.bench.serve_load import Load
from launch.bench.serve_run import Run
from moeserve.errors import ConfigError
from moeserve.terminal import say

INTERRUPTED = 130


def serve(ask: Ask) -> None:
    """The command. Raises SystemExit with its exit code."""
    from launch.bench.screen import only_json, wide_console
    from launch.bench.serve_show import show

    load = ask.load()
    if ask.html is not None:
        need_pictures("--html")
    run = Run.open(ask, load)
    try:
        run.warm_up(load)
        report, driven = run.measure(load)
    finally:
        run.peer.close()
    write_json(ask.out, report)
    if ask.record is not None:
        _record(ask.record, load, driven)
    if ask.html is not None:
        from launch.bench.report_html import page

        ask.html.write_text(page(report), encoding="utf-8")
    if ask.json:
        only_json(report)
    else:
        show(report, wide_console())
    for file in (ask.out, ask.html, ask.record):
        if file is not None:
            say(f"written: {file}")
    leave(report, ask.allow_errors)


def leave(report: dict[str, Any], allow_errors: bool) -> None:
    """Exit as the report demands; says loudly what was wrong."""
    for problem in report["problems"]:
        say(f"PROBLEM: {problem}")
    if report["problems"]:
        say("these answers are missing or not what was asked: the figures are no measurement of it")
    if report["interrupted"]:
        raise SystemExit(INTERRUPTED)
    if report["problems"] and not allow_errors:
        raise SystemExit(1)


def write_json(path: Path | None, report: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(report, indent=1, default=str) + "\n", encoding="utf-8")


def need_pictures(flag: str) -> None:
    """ConfigError where there is nothing to draw with: before anything is measured."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError(
            [f"{flag}: needs matplotlib, which is not installed (the extra `pictures` brings it)"]
        ) from None


def _record(path: Path, load: Load, driven: Driven) -> None:
    from launch.bench.serve_load import Turn
    from launch.bench.serve_trace import write_trace

    def turn_of(call: Call) -> Turn:
        drawn = True
        if load.trace is not None:
            told = load.trace[call.conversation].turns[call.turn]
            drawn = told.given is None or told.drawn
        return Turn(call.prompt_tokens or call.asked_input, call.asked_output, drawn=drawn)

    made = zip(driven.calls, driven.prompts, strict=True)
    ordered = sorted(made, key=lambda pair: pair[0].sent)
    first = ordered[0][0].sent if ordered else 0.0
    write_trace(
        path,
        ((call.sent - first, call.conversation, turn_of(call), prompt) for call, prompt in ordered),
    )
