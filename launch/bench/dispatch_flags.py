"""The flags of `moeserve bench dispatch`, checked together, and what they ask to be measured.

Knows names and limits; imports nothing heavy before it must. Knows nothing of how it is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from dispatch import dispatcher_names, emulated_names
from launch.choices import not_one_of, whole_number
from launch.experts.units import parse_numbers
from launch.output import no_file, unwritable
from moeserve.errors import ConfigError

# How results come home where a backend does it one way only: its class says so too, but to ask that
# would load torch; a test holds the two together.
ONLY_FORM = dict.fromkeys(("deepep_ll", "deepep_normal", "deepep_v2"), "summed") | {
    "nvshmem": "pairs"
}
ALL, AUTO = "all", "auto"
WIRES = ("model", "fp8", "fp8_ue8m0")
FORMS = ("pairs", "summed")
EXPERTS, TOKENS, HIDDEN = 256, (1, 8, 64, 512), (7168,)
# With --emulate: a size that every library takes on 2 to 16 ranks (nvshmem at most 16 experts a
# rank, deepep_ll hidden sizes of a list), and that its emulation in Python does in seconds.
EMULATED_EXPERTS, EMULATED_TOKENS, EMULATED_HIDDEN = 32, (1, 8, 64), (2048,)
MOST_RANKS, MOST = 1024, 10**9
DEVICES = ("auto", "cpu", "cuda")
SWEEPS = ("ranks", "tokens", "hidden")
SKEWS = ("uniform", "zipf:S", "trace")
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
    named: tuple[str, ...]  # backends that must be measured; none of them with "all"
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
    """As they were typed; None: not given."""

    backends: str = ALL
    ep: int | str | None = None
    tokens: str | None = None
    hidden: str | None = None
    top_k: int | str = 8
    experts: int | str | None = None
    redundant: int | str = 0
    skew: str = "uniform"
    trace: Path | None = None
    array: str | None = None
    wire: str = "model,fp8"
    form: str = AUTO
    steps: int | str = 20
    warmup: int | str = 3
    emulate: bool = False
    device: str = "auto"
    sweep: str | None = None
    seed: int | str = 0
    plot: Path | None = None

    def check(self, of_job: int | None = None) -> Asked:
        """ConfigError lists every problem; TraceError for a file of loads that is none. of_job:
        ranks of the job that this process is in, where it is in one. Loads no torch."""
        problems: list[str] = []
        wires = _names("--wire", self.wire, WIRES, problems)
        forms = _names("--form", self.form, (AUTO, *FORMS), problems)
        backends = self._backends(problems)
        most = self._most_ranks(of_job, problems)
        for flag, value, valid in (
            ("--device", self.device, DEVICES),
            ("--sweep", self.sweep, SWEEPS),
        ):
            if value is not None and value not in valid:
                problems.append(not_one_of(flag, value, valid))
        top_k = whole_number("--top-k", self.top_k, 1, MOST, problems)
        redundant = whole_number("--redundant", self.redundant, 0, MOST, problems)
        steps = whole_number("--steps", self.steps, 1, MOST, problems)
        warmup = whole_number("--warmup", self.warmup, 0, MOST, problems)
        seed = whole_number("--seed", self.seed, 0, MOST, problems)
        skew = self._skew(problems)
        experts = self._experts(skew, problems)
        if experts is not None and top_k > experts:
            problems.append(
                f"--top-k {top_k}: of {experts} experts; must be at most {experts}; nearest valid: "
                f"{experts}"
            )
        if self.plot is not None:
            problems += picture_problems(self.plot)
        cells = self._cells(most, problems)
        if problems:
            raise ConfigError(problems)
        assert experts is not None
        contenders = [
            Contender(name, wire, ONLY_FORM.get(name, FORMS[0]) if form == AUTO else form, emulated)
            for name, emulated in backends
            for wire in wires
            for form in forms
        ]
        return Asked(
            cells=cells,
            contenders=tuple(dict.fromkeys(contenders)),
            named=() if self.backends.strip() == ALL else tuple(name for name, _ in backends),
            top_k=top_k,
            experts=experts,
            redundant=redundant,
            skew=skew,
            steps=steps,
            warmup=warmup,
            device=self.device,
            sweep=self.sweep,
            seed=seed,
            plot=self.plot,
        )

    def _most_ranks(self, of_job: int | None, problems: list[str]) -> int:
        default = of_job or (SWEPT_RANKS if self.sweep == "ranks" else RANKS)
        if self.ep is None:
            most = default
        else:
            most = whole_number("--ep", self.ep, 1, MOST_RANKS, problems, default)
        if of_job is not None and most != of_job:
            problems.append(
                f"--ep {most}: this job was started with WORLD_SIZE={of_job} ranks; leave it "
                f"out or give --ep {of_job}"
            )
        if self.sweep == "ranks" and most < 3:
            problems.append(
                f"--sweep ranks: up to {most} there is no growth to see; give --ep 4 or more"
            )
        return most

    def _backends(self, problems: list[str]) -> list[tuple[str, bool]]:
        """Names, and which are to be emulated."""
        names, emulations = dispatcher_names(), emulated_names()
        if self.backends.strip() != ALL:
            names = _names("--dispatch", self.backends, names, problems, ALL)
        if self.emulate and names and not set(names) & set(emulations):
            problems.append(
                f"--emulate: of {self.backends} there is no emulation; name one of "
                f"{', '.join(emulations)}, or all"
            )
        return [(name, self.emulate and name in emulations) for name in names]

    def _experts(self, skew: Skew, problems: list[str]) -> int | None:
        """None: not known, for the file of loads is not there."""
        given = None
        if self.experts is not None:
            given = whole_number("--experts", self.experts, 1, MOST, problems)
        if skew.trace is None or not skew.trace.is_file():
            return given or (EMULATED_EXPERTS if self.emulate else EXPERTS)
        from ep.trace import read_trace

        held = int(read_trace(skew.trace, skew.array).totals.shape[1])
        if given not in (None, held):
            problems.append(
                f"--experts {given}: {skew.trace} has {held} experts a layer; leave it out or give "
                f"--experts {held}"
            )
        return held

    def _skew(self, problems: list[str]) -> Skew:
        kind, _, value = self.skew.partition(":")
        trace = self.trace
        if kind == "trace":
            trace = Path(value) if value else self.trace
            if trace is None:
                problems.append("--skew trace: give the file too: --skew trace FILE")
            elif (why := no_file(trace)) is not None:
                problems.append(f"--skew trace {trace}: {why}")
            return Skew(trace=trace, array=self.array)
        if self.array is not None:
            problems.append(f"--array {self.array}: of a file, which goes with --skew trace")
        if trace is not None:
            problems.append(f"{trace}: a file of loads goes with --skew trace")
        if kind == "zipf":
            try:
                exponent = float(value)
            except ValueError:
                exponent = -1.0
            if 0 <= exponent < 100:
                return Skew(exponent)
            problems.append(
                f"--skew {self.skew}: must be zipf:S with a number S from 0 to 100, such as zipf:1"
            )
        elif self.skew != "uniform":
            problems.append(not_one_of("--skew", self.skew, SKEWS, {"zipf": "zipf:S"}))
        return Skew()

    def _cells(self, most: int, problems: list[str]) -> tuple[Cell, ...]:
        tokens: Sequence[int] = TOKENS if self.sweep in (None, "tokens") else OTHER_TOKENS
        hidden: Sequence[int] = SWEPT_HIDDEN if self.sweep == "hidden" else HIDDEN
        if self.emulate:
            tokens = [n for n in tokens if n <= EMULATED_TOKENS[-1]]
            hidden = hidden if self.sweep == "hidden" else EMULATED_HIDDEN
        if self.sweep == "tokens":
            tokens = SWEPT_TOKENS
        ranks = self._ranks(most)
        for flag, text in (("--tokens", self.tokens), ("--hidden", self.hidden)):
            if text is None:
                continue
            try:
                numbers = sorted(parse_numbers(flag, text, 1))
            except ConfigError as error:
                problems += [p.replace(repr(text), text or "''") for p in error.problems]
                continue
            if self.sweep == flag[2:] and len(numbers) == 1:
                problems.append(
                    f"--sweep {self.sweep}: {flag} {text} is one value, and a sweep wants several, "
                    f"such as {flag} {numbers[0]},{2 * numbers[0]},{4 * numbers[0]}"
                )
            if flag == "--tokens":
                tokens = numbers
            else:
                hidden = numbers
        return tuple(Cell(r, h, t) for r in ranks for h in sorted(hidden) for t in sorted(tokens))

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
        if name in others:
            problems.append(f"{flag} {text}: {name} goes alone")
        elif name not in valid:
            problems.append(not_one_of(flag, name, [*others, *valid]))
    return [name for name in names if name in valid]


def picture_problems(path: Path) -> list[str]:
    """Of a file that --plot names."""
    problems = []
    if path.suffix not in PICTURES:
        problems.append(f"--plot {path}: must end in {' or '.join(PICTURES)}")
    problems += unwritable("--plot", path)
    if find_spec("matplotlib") is None:  # to import it takes longer than all the rest
        problems.append("--plot: pictures need matplotlib; install moeserve[pictures]")
    return problems
