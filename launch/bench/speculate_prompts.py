"""Prompts of `bench speculate`: pieces of text, for acceptance depends on what is written.

From a file of text; else from `heldout/*.txt` beside the checkpoint; else words without sense: the
acceptance says little then, and that is told. Knows text and tokens; nothing of engines.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from launch.bench.serve_prompts import WORDS
from moeserve.errors import ConfigError
from moeserve.tokenizer import Tokenizer

HELD_OUT = "heldout"
_WORDS = 20_000
_MOST_CHARACTERS = 2_000_000  # of a file


@dataclass(frozen=True)
class Prompts:
    """texts: tokens of each text. first: tokens that begin every prompt. source: in words."""

    texts: tuple[tuple[int, ...], ...]
    first: tuple[int, ...]
    length: int
    seed: int
    source: str

    def take(self, number: int, count: int) -> list[tuple[int, ...]]:
        """The prompts of pair `number`: the same whatever is measured, texts in turn."""
        rng = random.Random(f"{self.seed} {number}")
        size = self.length - len(self.first)
        found = []
        for i in range(count):
            text = self.texts[(number + i) % len(self.texts)]
            start = rng.randrange(len(text) - size + 1)
            found.append((*self.first, *text[start : start + size]))
        return found


def read_prompts(checkpoint: Path, file: Path | None, length: int, seed: int) -> Prompts:
    """ConfigError where there is no tokenizer, or no text that is long enough."""
    tokenizer = Tokenizer(checkpoint)
    first = tuple(tokenizer.encode("", add_special_tokens=True))[: length - 1]
    paths = [file] if file is not None else sorted((checkpoint / HELD_OUT).glob("*.txt"))
    texts = [
        _encode(tokenizer, path.read_text(encoding="utf-8", errors="replace")) for path in paths
    ]
    long = tuple(text for text in texts if len(text) >= length)
    if file is not None and not long:
        raise ConfigError(
            [f"--prompts {file}: {len(texts[0])} tokens; --prompt-length {length} needs as many"]
        )
    if long:
        source = f"from {file.name}" if file is not None else f"from the checkpoint's {HELD_OUT}/"
        return Prompts(long, first, length, seed, source)
    rng = random.Random(seed)
    text = " ".join(rng.choice(WORDS) for _ in range(_WORDS + length))
    source = "words without sense (no text is at hand; --prompts FILE): acceptance says little"
    return Prompts((_encode(tokenizer, text),), first, length, seed, source)


def _encode(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text[:_MOST_CHARACTERS], add_special_tokens=False))
