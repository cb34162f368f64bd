"""The flags of `moeserve bench dispatch`, checked together, and what they ask to be measured.

Knows names and limits; imports nothing heavy before it must. Knows nothing of how it is measured.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.experts.units import parse_numbers
from moeserve.errors import ConfigError

TOKENS, HIDDEN = (1, 8, 64, 512), (7168,)
WIRES = ("model", "fp8", "fp8_ue8m0")
FORMS = ("pairs", "summed")
DEVICES = ("auto", "cpu", "cuda")
SWEEPS = ("ranks", "tokens", "hidden")
PICTURES = (".png", ".svg")
# What a sweep tries where the flag itself does not say.
SWEPT_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
SWEPT_HIDDEN = (1024, 2048, 4096, 7168)
OTHER_TOKENS = (8, 512)  # beside a sweep of something else: a decode step, a prefill step
SWEPT_RANKS, RANKS = 8, 2


@dataclass(frozen=True, order=True)
class Cell:
    """One size: ranks that take part, tokens a rank, values a token."""

    ranks: int
    hidden: int
    tokens: int


@dataclass(frozen=True)
class Contender:
    """One way to do it, by names: a backend, how rows travel, how results come home."""

    backend: str
    wire: str
    form: str
    emulated: bool = False


@dataclass(frozen=True)
class Skew:
    """How often experts are picked. exponent: of a Zipf law (0: evenly); trace: a file instead,
    array: one of several in it."""

    exponent: float = 0.0
    trace: Path | None = None
    array: str | None = None

    def describe(self) -> str:
        if self.trace is not None:
            return f"trace {self.trace}"
        return f"zipf:{self.exponent:g}" if self.exponent else "uniform"


@dataclass(frozen=True)
class Asked:
    """The flags, checked: everything that a rank must know."""

    cells: tuple[Cell, ...]
    contenders: tuple[Contender, ...]
    top_k: int
    experts: int
    redundant: int
    skew: Skew
    steps: int
    warmup: int
    device: str
    sweep: str | None
    seed: int
    plot: Path | None

    @property
    def ranks(self) -> list[int]:
        return sorted({cell.ranks for cell in self.cells})


@dataclass(frozen=True)
class DispatchFlags:
    """As they were typed."""

    backends: str = "all"
    ep: int | None = None
    tokens: str | None = None
    hidden: str | None = None
    top_k: int = 8
    experts: int = 256
    redundant: int = 0
    skew: str = "uniform"
    trace: Path | None = None
    array: str | None = None
    wire: str = "model,fp8"
    form: str = "pairs"
    steps: int = 20
    warmup: int = 3
    emulate: bool = False
    device: str = "auto"
    sweep: str | None = None
    seed: int = 0
    plot: Path | None = None

    def num_ranks(self, of_job: int | None) -> int:
        """of_job: ranks of the job that this process is in, where it is in one."""
        default = SWEPT_RANKS if self.sweep == "ranks" else RANKS
        return self.ep or of_job or default

    def check(self, of_job: int | None = None) -> Asked:
        """ConfigError lists every problem."""
        problems: list[str] = []
        wires = _names("--wire", self.wire, WIRES, problems)
        forms = _names("--form", self.form, FORMS, problems)
        backends = self._backends(problems)
        most = self.num_ranks(of_job)
        if of_job is not None and self.ep not in (None, of_job):
            problems.append(
                f"--ep {self.ep}: this job was started with WORLD_SIZE={of_job} ranks; leave it "
                f"out or give --ep {of_job}"
            )
        if self.device not in DEVICES:
            problems.append(f"--device {self.device!r}: valid are {', '.join(DEVICES)}")
        if self.sweep is not None and self.sweep not in SWEEPS:
            problems.append(f"--sweep {self.sweep!r}: valid are {', '.join(SWEEPS)}")
        if self.sweep == "ranks" and most < 2:
            problems.append("--sweep ranks: with --ep 1 there is nothing to grow; give --ep 2 up")
        if self.top_k > self.experts:
            problems.append(
                f"--top-k {self.top_k}: of {self.experts} experts; at most {self.experts}"
            )
        skew = self._skew(problems)
        if self.plot is not None:
            problems += picture_problems(self.plot)
        cells = self._cells(most, problems)
        if problems:
            raise ConfigError(problems)
        return Asked(
            cells=cells,
            contenders=tuple(
                Contender(name, wire, form, emulated)
                for name, emulated in backends
                for wire in wires
                for form in forms
            ),
            top_k=self.top_k,
            experts=self.experts,
            redundant=self.redundant,
            skew=skew,
            steps=self.steps,
            warmup=self.warmup,
            device=self.device,
            sweep=self.sweep,
            seed=self.seed,
            plot=self.plot,
        )

    def _backends(self, problems: list[str]) -> list[tuple[str, bool]]:
        """Names, and which are to be emulated."""
        from dispatch import dispatcher_names, emulated_names

        known, emulations = dispatcher_names(), emulated_names()
        names = known
        if self.backends != "all":
            names = _names("--dispatch", self.backends, known, problems, "all")
        if self.emulate and names and not set(names) & set(emulations):
            problems.append(
                f"--emulate: of {self.backends} there is no emulation; name one of "
                f"{', '.join(emulations)}, or all"
            )
        return [(name, self.emulate and name in emulations) for name in names]

    def _skew(self, problems: list[str]) -> Skew:
        kind, _, value = self.skew.partition(":")
        valid = "uniform, zipf:S with S >= 0 such as zipf:1.0, or trace FILE"
        trace = self.trace
        if kind == "trace":
            trace = Path(value) if value else self.trace
            if trace is None:
                problems.append("--skew trace: give the file too: --skew trace FILE")
            elif not trace.is_file():
                problems.append(f"--skew trace {str(trace)!r}: no such file")
            return Skew(trace=trace, array=self.array)
        if self.array is not None:
            problems.append(f"--array {self.array!r}: of a file, which goes with --skew trace")
        if trace is not None:
            problems.append(f"{trace}: a file of loads goes with --skew trace")
        if kind == "zipf":
            try:
                exponent = float(value)
            except ValueError:
                exponent = -1.0
            if 0 <= exponent < 100:
                return Skew(exponent)
        elif self.skew == "uniform":
            return Skew()
        problems.append(f"--skew {self.skew!r}: valid are {valid}")
        return Skew()

    def _cells(self, most: int, problems: list[str]) -> tuple[Cell, ...]:
        tokens: Sequence[int] = TOKENS if self.sweep in (None, "tokens") else OTHER_TOKENS
        if self.sweep == "tokens":
            tokens = SWEPT_TOKENS
        hidden: Sequence[int] = SWEPT_HIDDEN if self.sweep == "hidden" else HIDDEN
        try:
            if self.tokens is not None:
                tokens = parse_numbers("--tokens", self.tokens, 1)
            if self.hidden is not None:
                hidden = parse_numbers("--hidden", self.hidden, 1)
        except ConfigError as error:
            problems += error.problems
            return ()
        return tuple(
            Cell(r, h, t) for r in self._ranks(most) for h in sorted(hidden) for t in sorted(tokens)
        )

    def _ranks(self, most: int) -> list[int]:
        if self.sweep != "ranks":
            return [most]
        powers = [2**n for n in range(1, most.bit_length()) if 2**n < most]
        return [*powers, most]


def _names(
    flag: str, text: str, valid: Sequence[str], problems: list[str], *others: str
) -> list[str]:
    """The names of a comma-separated list, each once."""
    names = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        if name not in valid:
            problems.append(f"{flag} {name!r}: unknown; valid are {', '.join([*others, *valid])}")
    return [name for name in names if name in valid]


def picture_problems(path: Path) -> list[str]:
    """Of a file that --plot names."""
    problems = []
    if path.suffix not in PICTURES:
        problems.append(f"--plot {str(path)!r}: must end in {' or '.join(PICTURES)}")
    folder = path.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        problems.append(f"--plot {str(path)!r}: {str(folder)!r} cannot be written to")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        problems.append(f"--plot: pictures need matplotlib ({error}); install moeserve[pictures]")
    return problems
