"""Which backend each phase gets: what was asked, what every rank can run, what came of it.

Prefill has many tokens a step and wants bandwidth; decode has few and wants latency, with buffers
made for few. Pure but for `Choice.open`. Knows names, probes and phases; no backend by itself.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dispatch.base import (
    BufferPlan,
    CombineForm,
    DispatchConfig,
    Dispatcher,
    DispatchError,
    Probe,
)
from dispatch.deepep import LL_MAX_TOKENS, ll_token_step
from dispatch.deepep_buffer import shared_hooks, shared_plan
from dispatch.phased import PhasedDispatcher

PHASES = ("prefill", "decode")
AUTO = "auto"
EMULATED = "_emulated"  # ends the registry's name of a backend's emulation
_ORDER = {  # what "auto" takes of those that every rank can run, the best first
    "prefill": ("local", "deepep_v2", "deepep_normal", "torch"),
    "decode": ("local", "deepep_ll", "deepep_v2", "nvshmem", "torch"),
}

Probes = dict[str, dict[str, Probe]]  # by phase and name


class CannotRun(DispatchError):
    """No rank may go on: nothing else is tried in place of what was asked for.

    refusals: of each phase without a backend, what its candidates say.
    """

    def __init__(self, asked: str, refusals: dict[str, dict[str, str]]) -> None:
        self.asked, self.refusals = asked, refusals
        by_reason: dict[str, list[str]] = {}
        for name, why in {pair: None for r in refusals.values() for pair in r.items()}:
            by_reason.setdefault(why, []).append(repr(name))
        said = "; ".join(
            f"{', '.join(names)} {'refuse' if len(names) > 1 else 'refuses'}: {why}"
            for why, names in by_reason.items()
        )
        super().__init__(f"dispatcher {said}")


@dataclass(frozen=True)
class Wish:
    """A name for each phase, "auto" included. emulate: of what is named, the emulation on CPUs
    where there is one; auto finds none."""

    prefill: str = AUTO
    decode: str = AUTO
    emulate: bool = False

    @classmethod
    def parse(cls, text: str, known: Sequence[str], emulate: bool = False) -> Wish:
        """A name, or `prefill=NAME,decode=NAME`. Raises DispatchError with all that is wrong.
        known: the registry's names."""
        names = [name for name in known if not name.endswith(EMULATED)]
        given: dict[str, str] = {}
        problems = []
        for part in text.split(",") if "=" in text else ():
            phase, _, name = part.partition("=")
            if phase in PHASES and phase not in given:
                given[phase] = name
            else:
                again = "given twice" if phase in given else "no phase"
                problems.append(f"{part!r}: {again}; valid is prefill=NAME,decode=NAME")
        given = given or ({} if problems else dict.fromkeys(PHASES, text))
        problems += [
            f"{'' if name == text else repr(name) + ': '}unknown; valid are "
            f"{', '.join([AUTO, *names])}, or prefill=NAME,decode=NAME{_nearest(name, names)}"
            for name in dict.fromkeys(given.values())
            if name not in (AUTO, *names)
        ]
        emulations = [name.removesuffix(EMULATED) for name in known if name.endswith(EMULATED)]
        if emulate and not problems and not set(given.values()) & set(emulations):
            problems.append(
                "emulate=True: names no backend that has an emulation; those that have: "
                + ", ".join(emulations)
            )
        if problems:
            raise DispatchError("; ".join(problems))
        return cls(given.get("prefill", AUTO), given.get("decode", AUTO), emulate)

    def __str__(self) -> str:
        if self.prefill == self.decode:
            return self.prefill
        return f"prefill={self.prefill},decode={self.decode}"

    def of(self, phase: str) -> str:
        return self.prefill if phase == "prefill" else self.decode


def _nearest(name: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    return f"; nearest: {close[0]}" if close else ""


def step_bounds(
    token_budget: int, max_num_sequences: int, num_ranks: int, drafts: int = 0
) -> dict[str, int]:
    """The most tokens a rank has in a step, by phase: what buffers are made for. A step that only
    decodes has a token for each sequence and draft; where those are more than the low-latency
    backends take, larger steps go by the prefill backend. Rounded up to what they can address."""
    step = ll_token_step(num_ranks)
    decode = min(token_budget, max_num_sequences * (1 + drafts), LL_MAX_TOKENS)
    return {"prefill": -(-token_budget // step) * step, "decode": -(-decode // step) * step}


@dataclass(frozen=True)
class PhaseChoice:
    """backend: as whoever asks names it, also where it is emulated."""

    backend: str
    kind: type[Dispatcher]
    config: DispatchConfig
    reason: str
    emulated: bool = False

    def report(self) -> dict[str, Any]:
        told = {"backend": self.backend, "reason": self.reason}
        return told | ({"emulated": True} if self.emulated else {})


@dataclass(frozen=True)
class Choice:
    """What all ranks take; refused: name -> why not. Nothing is open yet."""

    asked: str
    prefill: PhaseChoice
    decode: PhaseChoice
    refused: dict[str, str]

    @property
    def parts(self) -> tuple[PhaseChoice, ...]:
        """One where a dispatcher serves both phases."""
        both = (self.prefill, self.decode)
        return both[:1] if self.prefill is self.decode else both

    def plan(self, group: Any) -> BufferPlan:
        """Bytes on this rank. Both phases hold theirs, or share a buffer; layers of one only are in
        flight."""
        shared = shared_plan(group, [(part.kind, part.config) for part in self.parts])
        if shared is not None:
            return shared
        plans = [part.kind.plan(group, part.config) for part in self.parts]
        return BufferPlan(sum(p.held for p in plans), max(p.passing for p in plans))

    def open(self, group: Any, **hooks: Any) -> Dispatcher:
        """Collective. hooks go to the backends. DispatchError if one refuses after all, or if the
        two hand results home in different forms; nothing stays open then."""
        made: list[Dispatcher] = []
        parts = [(part.kind, part.config) for part in self.parts]
        forms = [form for kind, _ in parts if (form := form_of(kind)) is not None]
        if forms and len(parts) > 1:  # one that can do both does as the other
            hooks.setdefault("combine_form", forms[0])
        hooks |= shared_hooks(group, parts, hooks.get("enable_shrink", False))
        try:
            for part in self.parts:
                made.append(part.kind.open(group, part.config, **hooks))
            return made[0] if len(made) == 1 else PhasedDispatcher(*made)
        except BaseException:
            for dispatcher in made:
                dispatcher.close()
            if "buffer" in hooks:
                hooks["buffer"].close()
            raise

    def describe(self) -> str:
        """One line: what, why, why not the others."""
        if len(self.parts) == 1:
            line = f"dispatcher {self._label(self.prefill)}: {self.prefill.reason}"
        else:
            line = "dispatcher " + "; ".join(
                f"{phase}={self._label(part)}: {part.reason}"
                for phase, part in zip(PHASES, self.parts, strict=True)
            )
            line += (
                f"; decode steps above {self.decode.config.max_tokens_per_rank} tokens as prefill"
            )
        by_reason: dict[str, list[str]] = {}
        for name, reason in self.refused.items():
            by_reason.setdefault(reason, []).append(name)
        refused = "; ".join(f"not {', '.join(names)}: {why}" for why, names in by_reason.items())
        return f"{line} ({refused})" if refused else line

    @staticmethod
    def _label(part: PhaseChoice) -> str:
        return f"{part.backend} (emulated)" if part.emulated else part.backend

    def report(self) -> dict[str, Any]:
        """For `/health`: JSON-able."""
        return {
            "asked": self.asked,
            "prefill": self.prefill.report(),
            "decode": self.decode.report(),
            "refused": self.refused,
            "wire": self.prefill.config.wire.value,
        }


def choose(
    wish: Wish,
    probes: Probes,
    configs: Mapping[str, DispatchConfig],
    load: Callable[[str], type[Dispatcher]],
) -> Choice:
    """probes: what all ranks together say (`join_probes`). load: the class of a registry's name.
    CannotRun where a phase has no backend."""
    chosen: dict[str, PhaseChoice] = {}
    refusals: dict[str, dict[str, str]] = {}
    clashes: dict[str, str] = {}
    for phase in sorted(PHASES, key=lambda p: wish.of(p) == AUTO):  # auto fits itself to a name
        said, asked = probes[phase], wish.of(phase)
        refusals[phase] = {}
        for name in [n for n in _ORDER[phase] if n in said] if asked == AUTO else [asked]:
            key = key_of(name, wish.emulate and asked != AUTO, said)
            if not said[key].ok:
                refusals[phase][name] = said[key].reason
                continue
            kind = load(key)
            clash = next((c for p, x in chosen.items() if (c := _clash(kind, p, x))), None)
            if clash is not None:
                refusals[phase][name] = clashes[name] = clash
                continue
            chosen[phase] = PhaseChoice(name, kind, configs[phase], said[key].reason, key != name)
            break
    missing = {phase: refusals[phase] for phase in PHASES if phase not in chosen}
    if missing:
        raise CannotRun(str(wish), missing)
    if chosen["decode"].kind is chosen["prefill"].kind:  # one serves both, of the larger bound
        chosen["decode"] = chosen["prefill"]
    taken = {part.backend for part in chosen.values()}
    refused = _refused(probes, taken) | {n: why for n, why in clashes.items() if n not in taken}
    return Choice(str(wish), **chosen, refused=refused)


def form_of(kind: type[Dispatcher]) -> CombineForm | None:
    """How its results come home; None where it can do both."""
    return getattr(kind, "combine_form", None)


def _clash(kind: type[Dispatcher], phase: str, other: PhaseChoice) -> str | None:
    """Why it cannot stand beside the backend of the other phase: the experts of a job hand back
    one form, so that a token's sums do not change with the phase."""
    mine, its = form_of(kind), form_of(other.kind)
    if mine is None or its is None or mine is its:
        return None
    return (
        f"hands results home as {mine.name}, {phase}={other.backend} as {its.name}; choose "
        f"{other.backend} for both, or torch, which can do either"
    )


def key_of(name: str, emulate: bool, known: Mapping[str, Any]) -> str:
    """The registry's name: that of the emulation, where one was asked for and there is one."""
    key = name + EMULATED
    return key if emulate and key in known else name


def _refused(probes: Probes, taken: set[str]) -> dict[str, str]:
    """name -> why not, of all that were not taken. Where a backend would do for one phase only, or
    has another reason for each, the phase is named. That emulations cannot run is no news."""
    refused = {}
    for name in probes["prefill"]:
        if name in taken or name.endswith(EMULATED):
            continue
        phases = [p for p in PHASES if name in _ORDER[p]] or ["prefill"]
        said = {p: probes[p][name].reason for p in phases if not probes[p][name].ok}
        if len(set(said.values())) == 1 and len(said) == len(phases):
            refused[name] = said[phases[0]]
        elif said:
            refused[name] = "; ".join(f"for {phase}: {why}" for phase, why in said.items())
    return refused
