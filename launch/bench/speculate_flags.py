"""The flags of `moeserve bench speculate`, checked together, and the cells that they ask for.

Knows drafters by name, depths and batch sizes; imports nothing heavy. Knows nothing of engines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.bench.dispatch_flags import picture_problems
from launch.choices import whole_number
from launch.output import no_file
from moeserve.errors import ConfigError
from moeserve.speculate.setting import AUTO, MAX_DEPTH, OFF, SpeculateWish, read_speculate

DRAFTERS = ("mtp:auto",)
DRAFTERS_AT_K = ("mtp",)  # where --k tells the depth
BATCHES = "1"
REPEAT, WARMUP = 9, 1
PROMPT, OUTPUT = 48, 64
MOST_BATCH, MOST_TOKENS = 4096, 1_000_000
HOTTEST = 2.0


@dataclass(frozen=True)
class Cell:
    """What is measured against no speculation: a drafter at a depth, None where it adapts."""

    wish: SpeculateWish
    batch: int

    @property
    def depth(self) -> int | str:
        """As in the results."""
        return AUTO if self.wish.depth is None else self.wish.depth

    @property
    def drafter(self) -> str:
        """name, or name:PATH."""
        path = self.wish.path
        return self.wish.name if path is None else f"{self.wish.name}:{path}"

    @property
    def has_trees(self) -> bool:
        return self.wish.name in ("eagle", "medusa")

    @property
    def text(self) -> str:
        """As `--speculate` takes it."""
        return self.drafter if self.wish.name == AUTO else f"{self.drafter}:{self.depth}"


@dataclass(frozen=True)
class Asked:
    """The flags, checked. wishes: each drafter at each depth, in the order given."""

    wishes: tuple[SpeculateWish, ...]
    batches: tuple[int, ...]
    repeat: int
    warmup: int
    prompt_length: int
    output_length: int
    temperature: float
    seed: int
    prompts: Path | None
    plot: Path | None

    def cells(self) -> list[Cell]:
        """Batch by batch, since a batch's cells share the measurement without drafts."""
        return [Cell(wish, batch) for batch in self.batches for wish in self.wishes]


@dataclass(frozen=True)
class SpeculateFlags:
    """As they were typed; None: not given."""

    speculate: Sequence[str] = ()
    k: str | None = None
    batch: str = BATCHES
    repeat: int | str = REPEAT
    warmup: int | str = WARMUP
    prompt_length: int | str = PROMPT
    output_length: int | str = OUTPUT
    temperature: float | str = 0.0
    seed: int | str = 0
    prompts: Path | None = None
    plot: Path | None = None

    def check(self, problems: list[str]) -> Asked | None:
        """What is wrong joins the problems; None where nothing can be made of the flags."""
        before = len(problems)
        asked = Asked(
            wishes=self._wishes(problems),
            batches=tuple(_list("--batch", self.batch, MOST_BATCH, problems)),
            repeat=whole_number("--repeat", self.repeat, 1, 1000, problems),
            warmup=whole_number("--warmup", self.warmup, 0, 1000, problems),
            prompt_length=whole_number(
                "--prompt-length", self.prompt_length, 1, MOST_TOKENS, problems
            ),
            output_length=whole_number(
                "--output-length", self.output_length, 4, MOST_TOKENS, problems, OUTPUT
            ),
            temperature=self._temperature(problems),
            seed=whole_number("--seed", self.seed, 0, 2**31, problems),
            prompts=self.prompts,
            plot=self.plot,
        )
        if self.prompts is not None and (why := no_file(self.prompts)) is not None:
            problems.append(f"--prompts {self.prompts}: {why}")
        if self.plot is not None:
            problems += picture_problems(self.plot)
        return None if len(problems) > before else asked

    def _wishes(self, problems: list[str]) -> tuple[SpeculateWish, ...]:
        depths: list[int | None] = [None]
        if self.k is not None:
            depths = _depths(self.k, problems)
        found: list[SpeculateWish] = []
        fixed: list[str] = []
        drafters = self.speculate or (DRAFTERS if self.k is None else DRAFTERS_AT_K)
        for text in drafters:
            try:
                wish = read_speculate(text)
            except ValueError as error:
                problems.append(f"--speculate {text}: {error}")
                continue
            if wish.is_off:
                problems.append(
                    f"--speculate {OFF}: is measured beside every drafter; name a drafter, such as "
                    "mtp"
                )
            elif _tells_depth(text, wish):
                fixed.append(text)
                found.append(wish)
            elif wish.name == AUTO:
                found.append(wish)
            else:
                found += [SpeculateWish(wish.name, depth, wish.path) for depth in depths]
        if self.k is not None and fixed and len(fixed) == len(drafters):
            problems.append(
                f"--k {self.k}: {', '.join(fixed)} says its depth itself; give --k or :K, not both"
            )
        return tuple(dict.fromkeys(found))

    def _temperature(self, problems: list[str]) -> float:
        try:
            value = float(self.temperature)
        except ValueError:
            value = math.nan
        if not 0 <= value <= HOTTEST:
            problems.append(
                f"--temperature {self.temperature}: must be a number from 0 to {HOTTEST:g}"
            )
            return 0.0
        return value


def _tells_depth(text: str, wish: SpeculateWish) -> bool:
    return wish.depth is not None or (wish.name != AUTO and text.strip().endswith(f":{AUTO}"))


def _list(flag: str, text: str, most: int, problems: list[str]) -> list[int]:
    parts = [part.strip() for part in str(text).split(",")]
    return sorted({whole_number(flag, part, 1, most, problems) for part in parts})


def _depths(text: str, problems: list[str]) -> list[int | None]:
    parts = [part.strip() for part in text.split(",")]
    numbers = {whole_number("--k", part, 1, MAX_DEPTH, problems) for part in parts if part != AUTO}
    return [*sorted(numbers), *([None] if AUTO in parts else [])]


def check(flags: SpeculateFlags) -> Asked:
    """ConfigError lists every problem."""
    problems: list[str] = []
    asked = flags.check(problems)
    if asked is None:
        raise ConfigError(problems)
    return asked
