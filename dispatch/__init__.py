"""HOW tokens travel to the ranks that hold their experts, and back.

The registry: one line a backend, imported when it is asked for; and the way from a name to a
dispatcher. Knows names, not transports; what is chosen and why: `dispatch.choice`. Importing it
imports no torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dispatch.names import AUTO, EMULATED, PHASES, Wish, not_emulated

if TYPE_CHECKING:  # names are checked without torch
    from dispatch.base import DispatchConfig, Dispatcher, Probe
    from dispatch.choice import Choice, Probes

# name -> (module, class). The order is that in which probes are listed. A backend's emulation has
# its name and EMULATED: `--emulate` takes it, where there is one; it is no name for users.
_BACKENDS = {
    "local": ("dispatch.local", "LocalDispatcher"),
    "torch": ("dispatch.collective", "CollectiveDispatcher"),
    "allgather": ("dispatch.allgather", "AllGatherDispatcher"),
    "deepep_ll": ("dispatch.deepep_ll", "LowLatencyDispatcher"),
    "deepep_normal": ("dispatch.deepep_normal", "NormalDispatcher"),
    "deepep_v2": ("dispatch.deepep_v2", "ElasticDispatcher"),
    "nvshmem": ("dispatch.nvshmem", "SymmetricDispatcher"),
    "deepep_ll_emulated": ("dispatch.deepep_ll", "EmulatedLowLatencyDispatcher"),
    "deepep_normal_emulated": ("dispatch.deepep_normal", "EmulatedNormalDispatcher"),
    "deepep_v2_emulated": ("dispatch.deepep_v2", "EmulatedElasticDispatcher"),
    "nvshmem_emulated": ("dispatch.nvshmem", "EmulatedSymmetricDispatcher"),
}


@dataclass(frozen=True)
class DispatcherChoice:
    """A dispatcher that is ready, and why it is this one; the caller prints `describe()` once."""

    dispatcher: Dispatcher
    choice: Choice

    @property
    def asked(self) -> str:
        return self.choice.asked

    def describe(self) -> str:
        return "\n".join([self.choice.describe(), *(f"  {x}" for x in self.dispatcher.notes)])


def dispatcher_names() -> list[str]:
    """Every name that a user may give, besides "auto"."""
    return [name for name in _BACKENDS if not name.endswith(EMULATED)]


def parse_dispatch(text: str, emulate: bool = False) -> Wish:
    """What `--dispatch` says: a name, or `prefill=NAME,decode=NAME`. Raises DispatchError."""
    problems: list[str] = []
    wish = read_dispatch(text, problems, emulate)
    if wish is not None and emulate and (why := nothing_to_emulate(wish)) is not None:
        problems.append(f"{text} {why}")
    if problems or wish is None:
        from dispatch.base import DispatchError

        raise DispatchError("; ".join(problems))
    return wish


def read_dispatch(text: str, problems: list[str], emulate: bool = False) -> Wish | None:
    """The same, but that problems gets what is wrong. Whether there is anything to emulate is not
    looked at (`nothing_to_emulate`)."""
    return Wish.read(text, list(_BACKENDS), problems, emulate)


def nothing_to_emulate(wish: Wish) -> str | None:
    """Why `--emulate` has no use beside this, to be said of its name; None where it has."""
    return not_emulated(wish, list(_BACKENDS))


def emulated_names() -> list[str]:
    """Names of which there is an emulation on CPUs."""
    return [name.removesuffix(EMULATED) for name in _BACKENDS if name.endswith(EMULATED)]


def _load(name: str) -> Any:
    if name not in _BACKENDS:
        from dispatch.base import DispatchError

        known = ", ".join([AUTO, *_BACKENDS])
        raise DispatchError(f"dispatcher {name!r}: unknown; valid are {known}")
    module, attribute = _BACKENDS[name]
    return getattr(importlib.import_module(module), attribute)


def probe_one(name: str, group: Any, config: DispatchConfig) -> Probe:
    """What a backend says of this group. No collective; one that cannot even be imported answers
    with the reason."""
    from dispatch.base import Probe

    try:
        answer: Probe = _load(name).probe(group, config)
        return answer
    except Exception as error:  # a broken library may raise anything at import
        return Probe(False, f"{type(error).__name__}: {error}".splitlines()[0])


def probe_all(group: Any, config: DispatchConfig) -> dict[str, Probe]:
    """`probe_one` of each backend."""
    return {name: probe_one(name, group, config) for name in _BACKENDS}


def probe_phases(group: Any, configs: Mapping[str, DispatchConfig]) -> Probes:
    """`probe_all` for each phase, whose configs differ in max_tokens_per_rank."""
    probes = {"prefill": probe_all(group, configs["prefill"])}
    same = configs["decode"] == configs["prefill"]
    return probes | {"decode": probes["prefill"] if same else probe_all(group, configs["decode"])}


def join_probes(everyone: list[dict[str, Probe]]) -> dict[str, Probe]:
    """What each rank says of each backend -> what holds for all: a backend is ok where every rank
    can run it. Where only some refuse, or for different reasons, they are named."""
    from dispatch.base import Probe

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


def choose_dispatcher(
    wish: Wish, everyone: list[Probes], configs: Mapping[str, DispatchConfig]
) -> Choice:
    """everyone: each rank's `probe_phases`, gathered over the CPU group before any collective of a
    device: so that all take the same or none any. CannotRun (a DispatchError), on every rank alike,
    where a phase has no backend: nothing else is tried in place of a name."""
    from dispatch.choice import choose

    joined = {phase: join_probes([probes[phase] for probes in everyone]) for phase in PHASES}
    return choose(wish, joined, configs, _load)


def create_dispatcher(
    name: str, group: Any, config: DispatchConfig, **hooks: Any
) -> DispatcherChoice:
    """The named backend, or what "auto" finds for each phase, ready. Collective. hooks go to the
    backend's constructor (combine_form, combine_pairs). Raises DispatchError, on every rank alike.
    """
    if name != AUTO:
        _load(name)
    configs = dict.fromkeys(PHASES, config)
    everyone = _gather(group, probe_phases(group, configs))
    choice = choose_dispatcher(Wish(name, name), everyone, configs)
    return DispatcherChoice(choice.open(group, **hooks), choice)


def _gather(group: Any, mine: Probes) -> list[Probes]:
    from ep.group import gather_objects  # torch, which names alone do not need

    return gather_objects(group, mine)
