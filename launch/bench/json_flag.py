"""`--json` and `--out FILE` of the benchmarks whose results are kept: one meaning in all of them.

`--json` is a flag, as everywhere: one JSON document on stdout, and nothing else there. A file has
the same by `--out`. `--json FILE.json` and `--json=FILE`, as these commands were once called, go on
to mean `--out FILE`. Knows words of a command line; nothing of results.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from launch.commands import Command

FLAG, FILE_FLAG, ENDING = "--json", "--out", ".json"
JSON_HELP = "One JSON object on stdout, and nothing else there (tables are left out)"
OUT_HELP = "The same JSON in a file, beside the tables (--json FILE.json is short for it)"


class ResultCommand(Command):
    """A command that has both."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, list(with_file_flag(args)))


def with_file_flag(words: Iterable[str]) -> Iterator[str]:
    """`--json` with a file after it said as `--out`."""
    waiting = iter(words)
    for word in waiting:
        if word == "--":
            yield word
            yield from waiting
        elif word.startswith(f"{FLAG}="):
            yield f"{FILE_FLAG}={word.removeprefix(f'{FLAG}=')}"
        elif word == FLAG:
            after = next(waiting, None)
            if after is not None and after.endswith(ENDING) and not after.startswith("-"):
                yield from (FILE_FLAG, after)
                continue
            yield word
            if after is not None:
                yield from with_file_flag([after, *waiting])
        else:
            yield word
