"""What the launching terminal shows: one style for every line of every process of a job.

`moeserve: TEXT` on stderr; what goes through logging says its level when that is not info. Knows
the style; nothing of what is said. Commands' results (text, JSON, tables) go to stdout, unstyled.
"""

from __future__ import annotations

import logging
import sys

PREFIX = "moeserve: "


def say(text: str) -> None:
    """Show this, each line of it with the prefix."""
    lines = "".join(f"{PREFIX}{line}\n" for line in text.splitlines())
    print(lines, end="", file=sys.stderr, flush=True)


def counted(number: int, noun: str) -> str:
    """A number with its noun, whose plural ends in -s: 1 thread, 2 threads, 0 threads."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


class LineFormatter(logging.Formatter):
    """The style for log records. A traceback follows its line as it is."""

    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        text = "\n".join(f"{PREFIX}{level}{line}" for line in record.getMessage().splitlines())
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def log_to_terminal(level: str) -> None:
    """Send all log records of this process to the terminal. level: debug, info, ...; that of other
    people's libraries is warning at least, except with debug: their info is no news to operators.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter())
    root = logging.getLogger()
    root.handlers = [handler]
    wanted = getattr(logging, level.upper())
    root.setLevel(wanted if wanted in (logging.DEBUG, logging.ERROR) else logging.WARNING)
    logging.getLogger("moeserve").setLevel(wanted)
