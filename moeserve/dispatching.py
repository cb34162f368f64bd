"""Which dispatcher a job takes: asked, agreed by all ranks and planned for before weights are read.

Knows settings, what backends say of this machine, how problems are told to users. Opens nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from dispatch import (
    choose_dispatcher,
    parse_dispatch,
    probe_one,
    probe_phases,
)
from dispatch.base import DispatchConfig, DispatchError, Probe
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
from ep.group import EPGroup
from moeserve.config import ServeConfig
from moeserve.lockstep import gather_objects

_REMEDIES: tuple[tuple[dict[str, Any], str], ...] = (
    ({"deterministic": False}, "--no-deterministic"),
    ({"dtype": torch.bfloat16}, "--dtype bfloat16"),
)


@dataclass(frozen=True)
class Offer:
    """What this rank says of each backend, by phase, and for which sizes it was asked. hints: flags
    by which a backend that was named would refuse less, by phase."""

    configs: dict[str, DispatchConfig]
    probes: Probes
    hints: dict[str, list[str]]


def read_wish(config: ServeConfig, problems: list[str]) -> Wish | None:
    """None, and a problem more, where the setting names no backend."""
    asked = config.parallel.dispatch
    try:
        return parse_dispatch(asked, config.parallel.emulate)
    except DispatchError as error:
        problems.append(f"parallel.dispatch={asked!r}: {error}")
        return None


def make_offer(
    config: ServeConfig, group: EPGroup, dispatch: DispatchConfig, wish: Wish | None
) -> Offer:
    """Ask all backends. No collective. dispatch: its max_tokens_per_rank is not used."""
    schedule = config.schedule
    bounds = step_bounds(schedule.token_budget, schedule.max_num_sequences, group.size)
    configs = {p: replace(dispatch, max_tokens_per_rank=bounds[p]) for p in PHASES}
    probes = probe_phases(group, configs)
    wish = wish or Wish()
    hints = {p: list(_hints(wish, group, p, configs[p], probes[p])) for p in PHASES}
    return Offer(configs, probes, hints)


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
        hints = {p: [hint for x in offers for hint in x.hints[p]] for p in error.refusals}
        problems.append(_cannot(wish, hints, error))
        return None
    return choice if whole else None


def _cannot(wish: Wish, hints: dict[str, list[str]], error: CannotRun) -> str:
    told = {phase: _reasons(wish.of(phase), said) for phase, said in error.refusals.items()}
    if len(told) == len(PHASES) and len(set(told.values())) == 1:
        problem = next(iter(told.values()))
    else:
        labels = {p: f"for {p}" if wish.of(p) == AUTO else f"{p}={wish.of(p)}" for p in told}
        problem = "; ".join(f"{labels[phase]} {text}" for phase, text in told.items())
        able = [phase for phase in PHASES if phase not in told]
        if able and wish.prefill == wish.decode != AUTO:
            problem += f"; {able[0]}={wish.of(able[0])} can, beside another for {next(iter(told))}"
    helps = dict.fromkeys(hint for phase in hints.values() for hint in phase)
    if helps:
        problem += f"; give {' and '.join(helps)}"
    return f"parallel.dispatch={str(wish)!r}: {problem}"


def _reasons(asked: str, said: dict[str, str]) -> str:
    if asked == AUTO:
        return (
            "no dispatcher can run here (" + "; ".join(f"{n}: {w}" for n, w in said.items()) + ")"
        )
    return f"cannot run here: {said[asked]}"


def _hints(
    wish: Wish, group: EPGroup, phase: str, config: DispatchConfig, probes: dict[str, Probe]
) -> Iterator[str]:
    """Flags that take one of the reasons away, where the phase's backend was named and refuses."""
    name = wish.of(phase)
    key = key_of(name, wish.emulate, probes)
    if name == AUTO or probes[key].ok:
        return
    emulation = ""
    if not wish.emulate and name + EMULATED in probes and not torch.cuda.is_available():
        key = name + EMULATED
        says = "" if probes[key].ok else f" (which says: {probes[key].reason})"
        emulation = f"--emulate for its emulation on CPUs{says}"
    for change, flag in _REMEDIES:
        changed = replace(config, **change)
        if changed != config and probe_one(key, group, changed).reason != probes[key].reason:
            yield flag
    if emulation:
        yield emulation
