"""Arguments of programs beside `moeserve` (`python -m ...`, scripts): what is wrong with one is
told in one line, with exit code 2.

Knows argparse, texts and paths; nothing of what they are for.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

WRONG = 2  # exit code
_PATHS = (
    FileNotFoundError,
    FileExistsError,
    NotADirectoryError,
    IsADirectoryError,
    PermissionError,
)


class Parser(argparse.ArgumentParser):
    """Its errors are one line, without the usage above it."""

    def error(self, message: str) -> NoReturn:
        self.exit(WRONG, f"{self.prog}: error: {message} (--help)\n")


@contextmanager
def told_in_a_line(*kinds: type[Exception]) -> Iterator[None]:
    """What arguments and files cause, told only while they are read: paths that are none, and
    errors of these kinds, whose text is for people. All others are bugs, with their tracebacks."""
    caught: tuple[type[Exception], ...] = (*_PATHS, *kinds)
    try:
        yield
    except caught as error:
        where = getattr(error, "filename", None)
        said = f"{where}: {error.strerror}" if isinstance(error, _PATHS) and where else str(error)
        print(f"error: {' '.join(said.split())}", file=sys.stderr)
        sys.exit(WRONG)


def folder(text: str) -> Path:
    """A folder that is there."""
    if not Path(text).is_dir():
        what = "no folder" if Path(text).exists() else "no such folder"
        raise argparse.ArgumentTypeError(f"{text!r}: {what}")
    return Path(text)


def checkpoint(text: str) -> Path:
    """A folder that is there, with a config.json."""
    path = folder(text)
    if not (path / "config.json").is_file():
        raise argparse.ArgumentTypeError(f"{text!r}: no checkpoint: has no config.json")
    return path


def file(text: str) -> Path:
    """A file that is there."""
    if not Path(text).is_file():
        what = "a folder, not a file" if Path(text).is_dir() else "no such file"
        raise argparse.ArgumentTypeError(f"{text!r}: {what}")
    return Path(text)


def at_least(least: float) -> Callable[[str], int]:
    """A whole number from so much on."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"{text}: must be at least {least:g}")
        return value

    return read


def between(least: float, most: float = 1e9) -> Callable[[str], float]:
    """Any number in between, both included."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r}: must be a number") from None
        if not least <= value <= most:
            valid = f"at least {least:g}" if most == 1e9 else f"{least:g} to {most:g}"
            raise argparse.ArgumentTypeError(f"{text}: must be {valid}")
        return value

    return read


def several(one: Callable[[str], float]) -> Callable[[str], str]:
    """Such numbers by commas; the text stays as it is."""

    def read(text: str) -> str:
        for part in text.split(","):
            one(part)
        return text

    return read
