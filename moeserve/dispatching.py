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
    emulated_names,
    parse_dispatch,
    probe_one,
    probe_phases,
)
from dispatch.base import DispatchConfig, DispatchError
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
    """What this rank says of each backend, by phase, and for which sizes it was asked."""

    group: EPGroup
    configs: dict[str, DispatchConfig]
    probes: Probes


def read_wish(config: ServeConfig, problems: list[str]) -> Wish | None:
    """None, and a problem more, where the setting names no backend."""
    asked = config.parallel.dispatch
    try:
        return parse_dispatch(asked, config.parallel.emulate)
    except DispatchError as error:
        problems.append(f"parallel.dispatch={asked!r}: {error}")
        return None


def make_offer(config: ServeConfig, group: EPGroup, dispatch: DispatchConfig) -> Offer:
    """Ask all backends. No collective. dispatch: its max_tokens_per_rank is not used."""
    schedule = config.schedule
    bounds = step_bounds(schedule.token_budget, schedule.max_num_sequences, group.size)
    configs = {p: replace(dispatch, max_tokens_per_rank=bounds[p]) for p in PHASES}
    return Offer(group, configs, probe_phases(group, configs))


def agree_on_dispatcher(
    group: EPGroup, wish: Wish | None, offer: Offer | None, problems: list[str]
) -> Choice | None:
    """Collective, also for a rank that has nothing to offer (it has other problems). None, and a
    problem more, where a phase has no backend."""
    everyone = gather_objects(group, None if offer is None else offer.probes)
    if wish is None or offer is None:
        return None
    whole = all(said is not None for said in everyone)
    try:  # where a rank is silent, what this one would say for itself is still worth telling
        choice = choose_dispatcher(wish, everyone if whole else [offer.probes], offer.configs)
    except CannotRun as error:
        problems.append(_cannot(wish, offer, error))
        return None
    return choice if whole else None


def _cannot(wish: Wish, offer: Offer, error: CannotRun) -> str:
    told = {phase: _reasons(wish.of(phase), said) for phase, said in error.refusals.items()}
    if len(told) == len(PHASES) and len(set(told.values())) == 1:
        problem = next(iter(told.values()))
    else:
        problem = "; ".join(f"for {phase} {text}" for phase, text in told.items())
        able = [phase for phase in PHASES if phase not in told]
        if able and wish.prefill == wish.decode != AUTO:
            problem += f"; for {able[0]} it can: {able[0]}={wish.of(able[0])}"
    hints = dict.fromkeys(_hints(wish, offer, error))
    if hints:
        problem += f"; give {' and '.join(hints)}"
    return f"parallel.dispatch={str(wish)!r}: {problem}"


def _reasons(asked: str, said: dict[str, str]) -> str:
    if asked == AUTO:
        return (
            "no dispatcher can run here (" + "; ".join(f"{n}: {w}" for n, w in said.items()) + ")"
        )
    return f"cannot run here: {said[asked]}"


def _hints(wish: Wish, offer: Offer, error: CannotRun) -> Iterator[str]:
    """Flags that take one of the reasons away, of those backends that were named."""
    for phase, said in error.refusals.items():
        name, config = wish.of(phase), offer.configs[phase]
        if name == AUTO:
            continue
        key = key_of(name, wish.emulate, offer.probes[phase])
        before, emulation = said[name], ""
        if not wish.emulate and name in emulated_names() and not torch.cuda.is_available():
            key = name + EMULATED
            emulated = offer.probes[phase][key]
            before = emulated.reason
            emulation = "--emulate for its emulation on CPUs"
            emulation += "" if emulated.ok else f" (which says: {before})"
        for change, flag in _REMEDIES:
            changed = replace(config, **change)
            if changed != config and probe_one(key, offer.group, changed).reason != before:
                yield flag
        if emulation:
            yield emulation
