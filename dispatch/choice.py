"""Which backend each phase gets: what was asked, what every rank can run, what came of it.

Prefill has many tokens a step and wants bandwidth; decode has few and wants latency, with buffers
made for few. Pure but for `Choice.open`. Knows names, probes and phases; no backend by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
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
from dispatch.names import AUTO as AUTO
from dispatch.names import EMULATED as EMULATED
from dispatch.names import PHASES as PHASES
from dispatch.names import Wish as Wish
from dispatch.phased import PhasedDispatcher

_ORDER = {  # what "auto" takes of those that every rank can run, the best first
    "prefill": ("local", "deepep_v2", "deepep_normal", "torch", "allgather"),
    "decode": ("local", "deepep_ll", "deepep_v2", "nvshmem", "torch", "allgather"),
}
_MERITS = {  # why "auto" takes it before those behind it
    "local": "sends nothing",
    "deepep_v2": "is DeepEP's newer interface, for many tokens and few",
    "deepep_normal": "is made for many tokens",
    "deepep_ll": "is made for few tokens",
    "nvshmem": "never lets a GPU wait for the host",
    "torch": "sends fewer bytes",
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


def step_bounds(
    token_budget: int, max_num_sequences: int, num_ranks: int, drafts: int = 0, tile: int = 1
) -> dict[str, int]:
    """The most tokens a rank has in a step, by phase: what buffers are made for. A step that only
    decodes has a token for each sequence and draft; where those are more than the low-latency
    backends take, larger steps go by the prefill backend. Rounded up to what they can address, and
    so that an expert's room in the masked layout, that of all ranks' tokens, is whole tiles."""
    step = math.lcm(ll_token_step(num_ranks), tile // math.gcd(tile, num_ranks))
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
    """What all ranks take; refused: name -> why not, of all others. Nothing is open yet."""

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

    def expert_rows(self, group: Any) -> int:
        """`Dispatcher.expert_rows`, the most of both phases."""
        return max(part.kind.expert_rows(group, part.config) for part in self.parts)

    def shares(self, group: Any) -> bool:
        """Whether both phases have one buffer."""
        return shared_plan(group, [(part.kind, part.config) for part in self.parts]) is not None

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
        """A line for each phase (one where a dispatcher serves both): what and why; where "auto"
        chose, an indented line for each reason why not the others."""
        if len(self.parts) == 1:
            lines = [f"dispatcher {self._label(self.prefill)}: {self.prefill.reason}"]
        else:
            lines = [
                f"dispatcher {phase}={self._label(part)}: {part.reason}"
                for phase, part in zip(PHASES, self.parts, strict=True)
            ]
            bound = self.decode.config.max_tokens_per_rank
            lines[-1] += f"; decode steps above {bound} tokens as prefill"
        if not self.by_auto:  # nothing was refused in place of a name
            return "\n".join(lines)
        by_reason: dict[str, list[str]] = {}
        for name, reason in self.refused.items():
            by_reason.setdefault(reason, []).append(name)
        lines += [f"  not {', '.join(names)}: {why}" for why, names in by_reason.items()]
        return "\n".join(lines)

    @property
    def by_auto(self) -> bool:
        """Whether "auto" chose for a phase."""
        return AUTO in self.asked.replace("=", ",").split(",")

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
            "deterministic": self.prefill.config.deterministic,
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
            reason = said[key].reason
            if asked == AUTO:
                reason += f" (auto: {_why_best(name, phase, said)})"
            chosen[phase] = PhaseChoice(name, kind, configs[phase], reason, key != name)
            break
    missing = {phase: refusals[phase] for phase in PHASES if phase not in chosen}
    if missing:
        raise CannotRun(str(wish), missing)
    if chosen["decode"].kind is chosen["prefill"].kind:  # one serves both, of the larger bound
        chosen["decode"] = chosen["prefill"]
    refused = _refused(probes, wish, chosen)
    refused |= {name: why for name, why in clashes.items() if name in refused}
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


def _why_best(name: str, phase: str, said: Mapping[str, Probe]) -> str:
    """Why "auto" takes it for this phase: what it has before others that could run as well."""
    order = [n for n in _ORDER[phase] if n in said]
    rivals = [n for n in order[order.index(name) + 1 :] if said[n].ok]
    if rivals:
        return f"before {', '.join(rivals)}, for it {_MERITS[name]}"
    able = [n for n, probe in said.items() if probe.ok and n != name and not n.endswith(EMULATED)]
    return f"best for {phase}" if able else "no other can run here"


def _refused(probes: Probes, wish: Wish, chosen: Mapping[str, PhaseChoice]) -> dict[str, str]:
    """name -> why not, of all that were not taken. Where a backend would do for one phase only, or
    has another reason for each, the phase is named. That emulations cannot run is no news."""
    refused = {}
    taken = {part.backend for part in chosen.values()}
    for name in probes["prefill"]:
        if name in taken or name.endswith(EMULATED):
            continue
        said = {phase: _why_not(name, phase, probes, wish, chosen) for phase in PHASES}
        meant = [p for p in PHASES if name in _ORDER[p]] or ["prefill"]
        able = [p for p in meant if probes[p][name].ok]
        told = {p: said[p] for p in meant}
        if able and len(able) < len(meant):  # what it refuses, then who was better
            told = {p: said[p] for p in (*(p for p in meant if p not in able), *able)}
        reasons = list(dict.fromkeys(told.values()))
        refused[name] = (
            reasons[0]
            if len(reasons) == 1
            else "; ".join(f"for {phase}: {why}" for phase, why in told.items())
        )
    return refused


def _why_not(
    name: str, phase: str, probes: Probes, wish: Wish, chosen: Mapping[str, PhaseChoice]
) -> str:
    probe, winner = probes[phase][name], chosen[phase].backend
    if not probe.ok:
        return probe.reason
    if wish.of(phase) != AUTO:
        return f"could run; {winner} was asked for"
    return f"could run; {winner} {_MERITS.get(winner, 'was taken')}"
