"""Prompts of `moeserve bench serve`: random tokens, or words whose tokens are known.

A pool comes from a tokenizer's folder or from the server's /tokenize; without either, lengths are
a guess and the server's usage tells what they were. Knows tokenizers; nothing of timing.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.bench.serve_load import Turn
from launch.bench.serve_text import open_tokenizer
from launch.bench.serve_trace import BLOCK_TOKENS

_GUESS = 1.4  # tokens a word, where nothing can tell
WORDS = tuple(
    """
    the of and to in is that for it as was with be by on not he his but at are this have from or
    had an they which one you were all her she there would their we him been has when who will no
    more if out so up said what its about than into them can only other time new some could these
    two may first then do any like my now over such our man me even most made after also did many
    must before back see through way where get much go well your know should down work year because
    come people just say each those take day good how long little use own place right small water
    under house world still night hand head great light story number part point form state group
    city system program question answer reason table river mountain letter paper music colour
    def return class import for while if else None True self print range list value index name
    """.split()  # noqa: SIM905
)


@dataclass(frozen=True)
class Pool:
    """ids: ordinary tokens to draw from; None where they are not known. costs: tokens of each word.
    source: in words, for the report."""

    source: str
    ids: tuple[int, ...] | None
    costs: tuple[float, ...]
    exact: bool = True

    @classmethod
    def guessed(cls, why: str) -> Pool:
        return cls(f"lengths of prompts are a guess ({why})", None, (_GUESS,) * len(WORDS), False)

    @classmethod
    def of_folder(cls, folder: Path) -> Pool:
        """From tokenizer.json. ConfigError where there is none that can be used."""
        tokenizer = open_tokenizer(folder)
        added = set(tokenizer.get_added_tokens_decoder())
        ids = sorted(set(tokenizer.get_vocab(with_added_tokens=False).values()) - added)
        costs = [
            len(tokenizer.encode(" " + word, add_special_tokens=False).ids) or 1 for word in WORDS
        ]
        return cls(f"the tokenizer {folder.name}", tuple(ids), tuple(costs))

    @classmethod
    def of_server(cls, tokenize: Callable[[str], list[int]]) -> Pool:
        """tokenize(text) -> ids, without any put around the text."""
        held = [tokenize(" " + word) for word in WORDS]
        ids = sorted({x for every in held for x in every})
        return cls("the server's /tokenize", tuple(ids), tuple(len(x) or 1 for x in held))

    def tokens(self, count: int, dice: random.Random) -> list[int]:
        assert self.ids is not None
        return dice.choices(self.ids, k=count)

    def text(self, count: int, dice: random.Random) -> str:
        """Words of about `count` tokens."""
        words: list[str] = []
        left = float(count)
        while left > 0 or not words:
            place = dice.randrange(len(WORDS))
            words.append(WORDS[place])
            left -= self.costs[place]
        return " ".join(words)


@dataclass(frozen=True)
class PromptMaker:
    """Prompts of turns: the same of the same seed. as_ids: token ids instead of text."""

    pool: Pool
    seed: int
    as_ids: bool

    def of(self, conversation: int, number: int, turn: Turn) -> Any:
        """Text or token ids; what was recorded, where it was."""
        if turn.given is not None:
            return turn.given
        if turn.blocks:
            return self._of_blocks(turn)
        own = random.Random(f"{self.seed} prompt {conversation} {number}")
        if not turn.shared:
            return self._piece(turn.input_tokens, own)
        common = self._piece(turn.shared, random.Random(f"{self.seed} prefix"))
        rest = turn.input_tokens - turn.shared
        return common if not rest else _joined([common, self._piece(rest, own)])

    def _piece(self, count: int, dice: random.Random) -> Any:
        return self.pool.tokens(count, dice) if self.as_ids else self.pool.text(count, dice)

    def _of_blocks(self, turn: Turn) -> Any:
        left, pieces = turn.input_tokens, []
        for block in turn.blocks:
            if left <= 0:
                break
            count = min(left, BLOCK_TOKENS)
            pieces.append(self._piece(count, random.Random(f"{self.seed} block {block}")))
            left -= count
        if left > 0:
            dice = random.Random(f"{self.seed} after {turn.blocks}")
            pieces.append(self._piece(left, dice))
        return _joined(pieces)


def _joined(pieces: list[Any]) -> Any:
    if isinstance(pieces[0], list):
        return [x for piece in pieces for x in piece]
    return " ".join(pieces)
