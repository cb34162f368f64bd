"""Does the text of an answer hold as many tokens as the server's usage says? By a tokenizer.

Done after the run: the client's own time is in every figure. Knows calls and a function that counts
the tokens of a text; nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.bench.serve_call import Call, Fault
from moeserve.errors import ConfigError

Count = Callable[[str], int]
TIMES, MORE = 2, 4  # text may be cut into tokens in several ways: what an answer may differ by
SAME = 0.05  # share by which all answers together may differ before it is said
_BROKEN = "\N{REPLACEMENT CHARACTER}"  # bytes that are no character: more tokens than there were


@dataclass(frozen=True)
class TextCheck:
    """Tokens of all answers that could be looked at, by the tokenizer and by usage."""

    answers: int
    tokens: int
    usage: int

    @property
    def differs(self) -> bool:
        return abs(self.tokens - self.usage) > SAME * max(1, self.tokens)


def open_tokenizer(folder: Path) -> Any:
    """tokenizer.json of a folder, or the file. ConfigError where there is none to use."""
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json" if folder.is_dir() else folder
    if not file.is_file():
        raise ConfigError([f"--tokenizer {folder}: no tokenizer.json there"])
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises a bare Exception
        raise ConfigError([f"--tokenizer {folder}: {error}"]) from None


def token_counter(folder: Path) -> Count:
    tokenizer = open_tokenizer(folder)
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def check_texts(calls: Sequence[Call], count: Count) -> TextCheck:
    """A good call becomes a fault where its usage is far from its text. Left out: those whose ids
    were told, which are exact, and those that hold more than text."""
    answers = all_tokens = all_usage = 0
    for call in calls:
        usage = call.output_tokens
        if not call.good or usage is None or call.counts is not None or call.beside:
            continue
        tokens = count(call.text)
        silent = call.num_events - len(call.times)  # a token without text may be in each
        broken = _BROKEN in call.text
        too_many = usage > TIMES * tokens + silent + MORE
        if too_many or (tokens > TIMES * usage + MORE and not broken):
            call.fault = Fault.DISAGREES
            call.detail = f"{usage} tokens in usage, {tokens} in its text by --tokenizer"
        elif not broken:
            answers, all_tokens, all_usage = answers + 1, all_tokens + tokens, all_usage + usage
    return TextCheck(answers, all_tokens, all_usage)
