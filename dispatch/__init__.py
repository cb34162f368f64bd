"""HOW tokens travel to the ranks that hold their experts, and back.

The registry: one line a backend, imported when it is asked for. Knows names, not transports.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from dispatch.base import DispatchConfig, Dispatcher, DispatchError, Probe

# name -> (module, class). The order is that in which `probe_all` lists them.
_BACKENDS = {
    "local": ("dispatch.local", "LocalDispatcher"),
    "torch": ("dispatch.collective", "CollectiveDispatcher"),
    "allgather": ("dispatch.allgather", "AllGatherDispatcher"),
}


@dataclass(frozen=True)
class DispatcherChoice:
    """What was chosen and why; the caller prints `describe()` once."""

    dispatcher: Dispatcher
    asked: str
    probes: dict[str, Probe]

    def describe(self) -> str:
        name = self.dispatcher.name
        line = f"dispatcher {name}: {self.probes[name].reason}"
        refused = "; ".join(f"not {n}: {p.reason}" for n, p in self.probes.items() if not p.ok)
        return f"{line} ({refused})" if refused else line


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


def create_dispatcher(
    name: str, group: Any, config: DispatchConfig, **hooks: Any
) -> DispatcherChoice:
    """The named backend, ready. "auto": local on one rank, torch otherwise.

    hooks go to the backend's constructor (combine_form, combine_pairs). DispatchError if the name
    is unknown or the backend refuses: nothing else is tried in its place.
    """
    chosen = name if name != "auto" else ("local" if group.size == 1 else "torch")
    backend = _load(chosen)
    probes = probe_all(group, config)
    if not probes[chosen].ok:
        raise DispatchError(f"dispatcher {chosen!r} refuses: {probes[chosen].reason}")
    return DispatcherChoice(backend(group, config, **hooks), name, probes)
