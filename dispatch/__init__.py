"""HOW tokens travel to the ranks that hold their experts, and back.

The registry: one line a backend, imported when it is asked for. Knows names, not transports.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from dispatch.base import DispatchConfig, Dispatcher, DispatchError, Probe

# name -> (module, class). The order is that in which `probe_all` lists them.
_BACKENDS = {
    "local": ("dispatch.local", "LocalDispatcher"),
    "torch": ("dispatch.collective", "CollectiveDispatcher"),
    "allgather": ("dispatch.allgather", "AllGatherDispatcher"),
    "deepep_ll": ("dispatch.deepep_ll", "LowLatencyDispatcher"),
    "deepep_normal": ("dispatch.deepep_normal", "NormalDispatcher"),
    "deepep_ll_emulated": ("dispatch.deepep_ll", "EmulatedLowLatencyDispatcher"),
    "deepep_normal_emulated": ("dispatch.deepep_normal", "EmulatedNormalDispatcher"),
}


# What "auto" may take, the first that every rank can: each is the fastest where it can run at all.
# `allgather` never is: it sends each token to ranks that have no use for it.
_AUTO = ("local", "torch")


@dataclass(frozen=True)
class DispatcherChoice:
    """What was chosen and why; the caller prints `describe()` once. probes: what all ranks together
    say of each backend."""

    dispatcher: Dispatcher
    asked: str
    probes: dict[str, Probe]

    def describe(self) -> str:
        name = self.dispatcher.name
        line = f"dispatcher {name}: {self.probes[name].reason}"
        # Emulations are for whoever asks for one: that they cannot run is no news to others.
        by_reason: dict[str, list[str]] = {}
        for n, p in self.probes.items():
            if not p.ok and not n.endswith("_emulated"):
                by_reason.setdefault(p.reason, []).append(n)
        refused = "; ".join(f"not {', '.join(names)}: {why}" for why, names in by_reason.items())
        line = f"{line} ({refused})" if refused else line
        return "; ".join([line, *getattr(self.dispatcher, "notes", [])])


def dispatcher_names() -> list[str]:
    """Every name that `create_dispatcher` knows, besides "auto"."""
    return list(_BACKENDS)


def _load(name: str) -> Any:
    if name not in _BACKENDS:
        known = ", ".join(["auto", *_BACKENDS])
        raise DispatchError(f"dispatcher {name!r}: unknown; valid are {known}")
    module, attribute = _BACKENDS[name]
    return getattr(importlib.import_module(module), attribute)


def probe_all(group: Any, config: DispatchConfig) -> dict[str, Probe]:
    """What each backend says of this group. No collective; a backend that cannot even be imported
    answers with the reason."""
    probes = {}
    for name in _BACKENDS:
        try:
            probes[name] = _load(name).probe(group, config)
        except Exception as error:  # a broken library may raise anything at import
            probes[name] = Probe(False, f"{type(error).__name__}: {error}".splitlines()[0])
    return probes


def join_probes(everyone: list[dict[str, Probe]]) -> dict[str, Probe]:
    """What each rank says of each backend -> what holds for all: a backend is ok where every rank
    can run it. Where only some refuse, or for different reasons, they are named."""
    joined = {}
    for name, first in everyone[0].items():
        refusals = {
            rank: said[name].reason for rank, said in enumerate(everyone) if not said[name].ok
        }
        reasons = list(dict.fromkeys(refusals.values()))
        if not refusals:
            joined[name] = first
        elif len(refusals) == len(everyone) and len(reasons) == 1:
            joined[name] = Probe(False, reasons[0])
        else:
            by_reason = [
                (why, [r for r, said in refusals.items() if said == why]) for why in reasons
            ]
            told = "; ".join(
                f"rank {ranks[0]}{f' and {len(ranks) - 1} more' * (len(ranks) > 1)}: {why}"
                for why, ranks in by_reason
            )
            joined[name] = Probe(False, told)
    return joined


def create_dispatcher(
    name: str, group: Any, config: DispatchConfig, **hooks: Any
) -> DispatcherChoice:
    """The named backend, ready. "auto": local on one rank, torch otherwise. Collective: ranks first
    tell one another over the CPU group what they can run, so that all take the same or none any.

    hooks go to the backend's constructor (combine_form, combine_pairs). DispatchError, on every
    rank alike, if the name is unknown or a rank refuses: nothing else is tried in its place.
    """
    if name != "auto":
        _load(name)
    probes = join_probes(_gather(group, probe_all(group, config)))
    candidates = _AUTO if name == "auto" else (name,)
    chosen = next((n for n in candidates if probes[n].ok), None)
    if chosen is None:
        refusals = "; ".join(f"{n!r} refuses: {probes[n].reason}" for n in candidates)
        raise DispatchError(f"dispatcher {refusals}")
    return DispatcherChoice(_load(chosen)(group, config, **hooks), name, probes)


def _gather(group: Any, mine: dict[str, Probe]) -> list[dict[str, Probe]]:
    if group.size == 1:
        return [mine]
    everyone: list[Any] = [None] * group.size
    dist.all_gather_object(everyone, mine, group=group.cpu_group)
    return everyone
