"""Which dispatcher a job takes: asked, agreed by all ranks and planned for before weights are read.

Knows settings, what backends say of this machine, how problems are told to users. Opens nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from dispatch import (
    choose_dispatcher,
    nothing_to_emulate,
    probe_one,
    probe_phases,
    read_dispatch,
)
from dispatch.base import DispatchConfig, Probe
from dispatch.choice import (
    AUTO,
    EMULATED,
    PHASES,
    CannotRun,
    Choice,
    Probes,
    Wish,
    key_of,
    step_bounds,
)
from ep.group import EPGroup, gather_objects
from moeserve.config import ServeConfig

_ALLOWS = "; --no-deterministic allows it"  # of reasons (`deepep.mode_problems`), said once only
_REMEDIES: tuple[tuple[dict[str, Any], str], ...] = (
    ({"deterministic": False}, "--no-deterministic"),
    ({"dtype": torch.bfloat16}, "--dtype bfloat16"),
)


@dataclass(frozen=True)
class Way:
    """flags: with all of them it would run; none, where nothing helps. blocked: what keeps its
    emulation from running even with them."""

    flags: tuple[str, ...] = ()
    blocked: str = ""


@dataclass(frozen=True)
class Offer:
    """What this rank says of each backend, by phase, and for which sizes it was asked. ways: out of
    the refusal of a backend that was named, by phase."""

    configs: dict[str, DispatchConfig]
    probes: Probes
    ways: dict[str, Way]


def read_wish(config: ServeConfig, problems: list[str]) -> Wish | None:
    """None, and a problem more, where the setting names no backend."""
    asked, emulate = config.parallel.dispatch, config.parallel.emulate
    found: list[str] = []
    wish = read_dispatch(asked, found, emulate)
    problems += [f"parallel.dispatch={asked!r}: {problem}" for problem in found]
    if wish is not None and emulate and (why := nothing_to_emulate(wish)) is not None:
        problems.append(f"parallel.emulate: parallel.dispatch={asked} {why}")
        return None
    return wish


def make_offer(
    config: ServeConfig,
    group: EPGroup,
    dispatch: DispatchConfig,
    wish: Wish | None,
    drafts: int = 0,
) -> Offer:
    """Ask all backends. No collective. dispatch: its max_tokens_per_rank is not used. drafts: of a
    sequence, at most."""
    schedule = config.schedule
    bounds = step_bounds(
        schedule.token_budget, schedule.max_num_sequences, group.size, drafts, _masked_tile(config)
    )
    configs = {p: replace(dispatch, max_tokens_per_rank=bounds[p]) for p in PHASES}
    probes = probe_phases(group, configs)
    wish = wish or Wish()
    ways = {p: _way_out(wish, group, p, configs[p], probes[p]) for p in PHASES}
    return Offer(configs, probes, ways)


def _masked_tile(config: ServeConfig) -> int:
    """Of rows of an expert, in what libraries are to multiply. Ours takes any number."""
    if config.model.kernel_table is None:
        return 1
    from models.deepseek.kernels.gpu.gemm_deep_gemm import MASKED_TILE

    return MASKED_TILE


def agree_on_dispatcher(
    group: EPGroup, wish: Wish | None, offer: Offer | None, problems: list[str]
) -> Choice | None:
    """Collective, also for a rank that has nothing to offer (it has other problems). None, and a
    problem more, where a phase has no backend."""
    everyone: list[Offer | None] = gather_objects(group, offer)
    if wish is None or offer is None:
        return None
    offers = [said for said in everyone if said is not None]
    whole = len(offers) == len(everyone)
    if not whole:  # what this rank would say for itself is still worth telling
        offers = [offer]
    try:
        choice = choose_dispatcher(wish, [x.probes for x in offers], offer.configs)
    except CannotRun as error:
        ways = [[x.ways[phase] for phase in error.refusals] for x in offers]
        problems.append(_cannot(wish, [way for of_rank in ways for way in of_rank], error))
        return None
    return choice if whole else None


def _cannot(wish: Wish, ways: list[Way], error: CannotRun) -> str:
    """ways: of each rank and phase that refuses. Flags are recommended where they help all."""
    told = {phase: _reasons(wish.of(phase), said) for phase, said in error.refusals.items()}
    if len(told) == len(PHASES) and len(set(told.values())) == 1:
        problem = next(iter(told.values()))
    else:
        labels = {p: f"for {p}" if wish.of(p) == AUTO else f"{p}={wish.of(p)}" for p in told}
        problem = "; ".join(f"{labels[phase]} {text}" for phase, text in told.items())
        able = [phase for phase in PHASES if phase not in told]
        if able and wish.prefill == wish.decode != AUTO:
            problem += f"; {able[0]}={wish.of(able[0])} can, beside another for {next(iter(told))}"
    flags = dict.fromkeys(flag for way in ways for flag in way.flags)
    blocked = list(dict.fromkeys(way.blocked for way in ways if way.blocked))
    if blocked:
        problem += f"; its emulation on CPUs cannot run either: {'; '.join(blocked)}"
        if "hidden_size" in problem:
            problem += "; README, 'How tokens travel', writes a checkpoint that is wide enough"
    elif flags and all(way.flags for way in ways):
        problem = problem.replace(_ALLOWS, "") + f"; give {' and '.join(flags)}"
    return f"parallel.dispatch={str(wish)!r}: {problem}"


def _reasons(asked: str, said: dict[str, str]) -> str:
    if asked == AUTO:
        return (
            "no dispatcher can run here (" + "; ".join(f"{n}: {w}" for n, w in said.items()) + ")"
        )
    return f"cannot run here: {said[asked]}"


def _way_out(
    wish: Wish, group: EPGroup, phase: str, config: DispatchConfig, probes: dict[str, Probe]
) -> Way:
    """Where the phase's backend was named and refuses. The emulation is no way where there is a
    GPU, which the library would use."""
    name = wish.of(phase)
    key = key_of(name, wish.emulate, probes)
    if name == AUTO or probes[key].ok:
        return Way()
    flags = []
    emulated = name + EMULATED
    others = not wish.emulate and emulated in probes and not torch.cuda.is_available()
    if others:
        key = emulated
    says = probes[key]
    for change, flag in _REMEDIES:
        changed = replace(config, **change)
        answer = says if changed == config else probe_one(key, group, changed)
        if answer.reason != says.reason:
            flags.append(flag)
            config, says = changed, answer
    if not says.ok:
        return Way(blocked=_limits(says.reason)) if others else Way()
    return Way((*flags, "--emulate for its emulation on CPUs") if others else tuple(flags))


def _limits(reason: str) -> str:
    """An emulation's reason without its version, which is nobody's news."""
    _, found, limits = reason.partition("+emulated")
    return limits.partition(": ")[2] if found else reason
