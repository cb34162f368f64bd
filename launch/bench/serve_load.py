"""The load of `moeserve bench serve`: when calls come, how long prompts and answers are.

Pure: the same seed gives the same load, whatever drives it. Conversation k has lengths of its own,
so that runs at other rates ask the same. Knows numbers and traces; nothing of HTTP or of text.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from moeserve.errors import ConfigError

KINDS = ("fixed", "normal", "uniform", "lognormal")
ARRIVALS = ("poisson", "fixed")


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths in tokens, at least 1. normal: mean, deviation; uniform: least,
    most; lognormal: median, deviation of the logarithm."""

    kind: str
    first: float
    second: float = 0.0

    @classmethod
    def parse(cls, flag: str, text: str, problems: list[str]) -> Lengths:
        """512, normal:512,128, uniform:100,900 or lognormal:512,0.5."""
        kind, colon, rest = text.partition(":")
        if not colon:
            kind, rest = "fixed", text
        valid = "must be N, normal:MEAN,DEVIATION, uniform:LEAST,MOST or lognormal:MEDIAN,SIGMA"
        try:
            numbers = [float(x) for x in rest.split(",")]
        except ValueError:
            numbers = []
        wanted = 1 if kind == "fixed" else 2
        if kind not in KINDS or len(numbers) != wanted or not all(map(math.isfinite, numbers)):
            problems.append(f"{flag} {text!r}: {valid}")
            return cls("fixed", 1)
        if numbers[0] < 1 or (kind == "fixed" and numbers[0] != int(numbers[0])):
            problems.append(f"{flag} {text!r}: lengths are whole tokens, at least 1; {valid}")
        if kind == "uniform" and numbers[1] < numbers[0]:
            problems.append(f"{flag} {text!r}: the most is below the least; {valid}")
        elif wanted == 2 and numbers[1] < 0:
            problems.append(f"{flag} {text!r}: a deviation is 0 or more; {valid}")
        return cls(kind, *numbers)

    def draw(self, dice: random.Random) -> int:
        if self.kind == "fixed":
            return int(self.first)
        if self.kind == "uniform":
            return dice.randint(round(self.first), round(self.second))
        if self.kind == "normal":
            value = dice.gauss(self.first, self.second)
        else:
            value = self.first * math.exp(dice.gauss(0.0, self.second))
        return max(1, round(value))

    @property
    def typical(self) -> int:
        """Tokens, to size what must hold one."""
        return round((self.first + self.second) / 2 if self.kind == "uniform" else self.first)

    def __str__(self) -> str:
        if self.kind == "fixed":
            return f"{self.first:g}"
        return f"{self.kind}:{self.first:g},{self.second:g}"


@dataclass(frozen=True)
class SharedPrefix:
    """What all prompts begin with: a share of each, or so many tokens."""

    share: float = 0.0
    tokens: int = 0

    @classmethod
    def parse(cls, text: str, problems: list[str]) -> SharedPrefix:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if 0 <= value < 1:
            return cls(share=value)
        if value >= 1 and value == int(value) and math.isfinite(value):
            return cls(tokens=int(value))
        problems.append(f"--shared-prefix {text!r}: must be a share below 1, or tokens")
        return cls()

    def of(self, prompt_tokens: int) -> int:
        return min(prompt_tokens, self.tokens or round(self.share * prompt_tokens))

    def __str__(self) -> str:
        return str(self.tokens) if self.tokens else f"{self.share:g}"


@dataclass(frozen=True)
class Turn:
    """One call to make. input_tokens: new ones, what was said before excluded. given: a recorded
    prompt (text, token ids or messages), drawn: of random tokens once; blocks: of a trace that only
    tells which blocks of prompts are the same. at: seconds after the start when a recorded one is
    due; it never comes before the answer to the turn before. None: as soon as that is there."""

    input_tokens: int
    output_tokens: int
    shared: int = 0  # of input_tokens, from the common prefix
    given: Any = None
    blocks: tuple[int, ...] = ()
    at: float | None = None
    drawn: bool = False


@dataclass(frozen=True)
class Conversation:
    """Turns one after another. at: seconds after the start when it begins; None: as soon as one of
    the clients is free."""

    number: int
    at: float | None
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Load:
    """Everything that is asked. One of rate (conversations a second), concurrency, trace."""

    input_tokens: Lengths
    output_tokens: Lengths
    seed: int = 0
    rate: float | None = None
    arrivals: str = "poisson"
    concurrency: int | None = None
    requests: int | None = None  # conversations; None: until the time is over
    seconds: float | None = None
    shared_prefix: SharedPrefix = SharedPrefix()
    turns: int = 1
    trace: tuple[Conversation, ...] | None = None

    @property
    def open_loop(self) -> bool:
        """Calls come at their times, whether the server keeps up or not."""
        return self.concurrency is None

    @property
    def total(self) -> int | None:
        """Calls, where that is known before."""
        if self.trace is not None:
            return sum(len(x.turns) for x in self.trace[: self.requests])
        return None if self.requests is None else self.requests * self.turns

    def conversations(self) -> Iterator[Conversation]:
        """All of them, in order of beginning; endless where neither number nor time bounds them."""
        made = iter(self.trace) if self.trace is not None else self._drawn()
        made = itertools.islice(made, self.requests)
        for conversation in made:
            if self.seconds is not None and (conversation.at or 0.0) > self.seconds:
                return
            yield conversation

    def _drawn(self) -> Iterator[Conversation]:
        times = self._times()
        for number in itertools.count():
            dice = random.Random(f"{self.seed} lengths {number}")
            turns = []
            for turn in range(self.turns):
                tokens = self.input_tokens.draw(dice)
                shared = 0 if turn else self.shared_prefix.of(tokens)
                turns.append(Turn(tokens, self.output_tokens.draw(dice), shared))
            yield Conversation(number, next(times), tuple(turns))

    def _times(self) -> Iterator[float | None]:
        if self.rate is None:
            yield from itertools.repeat(None)
            return
        yield from arrival_times(self.rate, self.arrivals, self.seed)


def arrival_times(rate: float, kind: str, seed: int) -> Iterator[float]:
    """Seconds after the start, without end: the first at 0, then `rate` a second on average."""
    dice = random.Random(f"{seed} arrivals")
    now = 0.0
    for number in itertools.count(1):
        yield now
        now = number / rate if kind == "fixed" else now + dice.expovariate(rate)


def check_load(load: Load) -> None:
    """ConfigError for what cannot be driven."""
    problems = []
    ways = {
        "--rate": load.rate,
        "--concurrency": load.concurrency,
        "--trace": load.trace,
    }
    given = [flag for flag, value in ways.items() if value is not None]
    if len(given) > 1:
        problems.append(f"{' and '.join(given)}: give one of them")
    if load.rate is not None and not (load.rate > 0 and math.isfinite(load.rate)):
        problems.append(f"--rate {load.rate:g}: must be above 0, in calls a second")
    if load.arrivals not in ARRIVALS:
        problems.append(f"--arrivals {load.arrivals!r}: valid are {', '.join(ARRIVALS)}")
    if load.seconds is not None and not load.seconds > 0:
        problems.append(f"--seconds {load.seconds:g}: must be above 0")
    if problems:
        raise ConfigError(problems)
