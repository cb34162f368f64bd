"""Recorded load: a file of JSON lines, each a call with its time, lengths and perhaps its prompt.

    {"at": 0.25, "conversation": 3, "input_tokens": 512, "output_tokens": 64, "prompt": [1, 2]}

Calls of one conversation are its turns: each goes at its time, or where the answer before comes
later than that, then. drawn: the prompt is of random tokens. Also read: lines with timestamp
(milliseconds), input_length, output_length and hash_ids, as public traces of serving clusters have
them. Knows files; nothing of HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from launch.bench.serve_load import Conversation, Turn
from moeserve.errors import ConfigError

BLOCK_TOKENS = 512  # that a hash id of a public trace stands for
_QUOTED = 60  # characters of a line that is none


def read_trace(path: Path) -> tuple[Conversation, ...]:
    """In order of beginning; the earliest call of all is at 0. ConfigError names file and line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError([f"--trace {path}: cannot be read: {error.strerror}"]) from None
    except UnicodeDecodeError:
        raise ConfigError([f"--trace {path}: not UTF-8 text"]) from None
    problems: list[str] = []
    found: dict[Any, list[tuple[float, Turn]]] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            held = _object(line)
            at, turn = _turn(held)
        except (ValueError, TypeError) as error:
            problems.append(f"--trace {path}, line {number}: {error}")
            if len(problems) == 5:
                break
            continue
        found.setdefault(_name(held, number), []).append((at, turn))
    if problems:
        raise ConfigError(problems)
    if not found:
        raise ConfigError([f"--trace {path}: holds no calls"])
    talks = [sorted(calls, key=lambda x: x[0]) for calls in found.values()]
    talks.sort(key=lambda calls: calls[0][0])
    first = talks[0][0][0]
    return tuple(
        Conversation(
            number, calls[0][0] - first, tuple(replace(turn, at=at - first) for at, turn in calls)
        )
        for number, calls in enumerate(talks)
    )


def _object(line: str) -> dict[str, Any]:
    """ValueError quotes what the line holds instead."""
    quoted = repr(line if len(line) <= _QUOTED else line[:_QUOTED] + "...")
    try:
        held = json.loads(line)
    except ValueError as error:
        where = f" (column {error.colno})" if isinstance(error, json.JSONDecodeError) else ""
        raise ValueError(f"{quoted} is no JSON{where}; must be a JSON object") from None
    if not isinstance(held, dict):
        raise ValueError(f"{quoted}: must be a JSON object")
    return held


def _name(held: dict[str, Any], number: int) -> Any:
    """Of its conversation; a call without one stands alone."""
    name = held.get("conversation")
    return ("line", number) if name is None else json.dumps(name)


def _turn(held: dict[str, Any]) -> tuple[float, Turn]:
    at = _number(held, "at", None, 1.0, "timestamp", 1e-3)
    given = held.get("prompt", held.get("messages"))
    if given is not None and (not isinstance(given, str | list) or not given):
        raise ValueError("prompt: must be a text, token ids or messages, not empty")
    blocks = held.get("hash_ids") or []
    if not isinstance(blocks, list) or not all(type(x) is int for x in blocks):
        raise ValueError("hash_ids: must be a list of integers")
    least = 0 if given is not None else None
    tokens = _number(held, "input_tokens", least, 1.0, "input_length")
    wanted = _number(held, "output_tokens", None, 1.0, "output_length")
    if wanted < 1 or (tokens < 1 and given is None):
        raise ValueError("input_tokens and output_tokens: must be at least 1")
    drawn = held.get("drawn") is True
    return at, Turn(int(tokens), int(wanted), given=given, blocks=tuple(blocks), drawn=drawn)


def _number(
    held: dict[str, Any],
    name: str,
    default: float | None,
    unit: float,
    other: str,
    scale: float = 1,
) -> float:
    """held[name], or what other traces call it, in our unit."""
    for key, factor in ((name, unit), (other, scale)):
        value = held.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e15:
            raise ValueError(f"{key}: {value!r} is no number >= 0")
        return float(value) * factor
    if default is None:
        raise ValueError(f"{name} (or {other}) is missing")
    return default


def write_trace(path: Path, calls: Iterable[tuple[float, int, Turn, Any]]) -> None:
    """Calls that were made, replayable by `--trace`: (seconds after the start, conversation, turn,
    what was sent)."""
    with path.open("w", encoding="utf-8") as file:
        for at, conversation, turn, sent in calls:
            line: dict[str, Any] = {
                "at": round(at, 6),
                "conversation": conversation,
                "input_tokens": turn.input_tokens,
                "output_tokens": turn.output_tokens,
            }
            if sent is not None:
                line["prompt"] = sent
            if turn.drawn:
                line["drawn"] = True
            file.write(json.dumps(line) + "\n")


def at_speed(trace: tuple[Conversation, ...], speed: float) -> tuple[Conversation, ...]:
    """The same calls, `speed` times as fast; every turn."""

    def sooner(at: float | None) -> float | None:
        return None if at is None else at / speed

    return tuple(
        replace(x, at=sooner(x.at), turns=tuple(replace(t, at=sooner(t.at)) for t in x.turns))
        for x in trace
    )
