"""Facts: what one rank knows of its node before any weight is read; `judge`: what does not fit.

Each rank looks at its own machine only; rank 0 compares. What one node has is said of the node
(`node h1: ...`), what only some of its ranks have of these. Nothing here talks to anybody
(`launch.rendezvous` does).
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import psutil

from launch.env import RankEnv
from launch.interface import SETTING, Interface, usable
from launch.version import HOME, commit_of
from moeserve.config import ServeConfig
from moeserve.folder import INDEX_NAME
from moeserve.terminal import counted

CLOCK_SECONDS = 0.5  # more than this apart is worth a word: logs and traces would mislead
SHARED_BYTES = 16 << 20  # of /dev/shm a rank: torch and NCCL keep their queues there
RANK_BYTES = 200_000_000  # private memory of a rank of the smallest model
# Settings that belong to one machine or to the front end, and paths (what lies there is compared).
_LOCAL = (
    "model.checkpoint",
    "model.chat_template",
    "model.kernel_table",
    "parallel.placement",
    "parallel.interface",
    "engine.threads",
    "engine.quiet",
)
_MUST_MATCH = ("moeserve", "torch", "python")
_MOST_FILES = 4  # of a checkpoint, named in one problem


@dataclass(frozen=True)
class Facts:
    """Plain data, so that it travels as JSON. machine: equal for ranks that share a kernel and a
    network. settings: those that all ranks need alike. problems: found on this rank alone, before
    it met the others."""

    rank: int
    node: int
    host: str
    machine: str
    interface: str = ""
    address: str = ""
    why: str = ""
    usable: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    commit: str = ""
    folder: str = ""  # of the checkpoint
    checkpoint: dict[str, str] | None = None  # file -> hash or size; None: not looked at
    settings: dict[str, Any] = field(default_factory=dict)
    local_size_given: bool = True
    problems: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Facts:
        return cls(**json.loads(text))

    @property
    def is_loopback(self) -> bool:
        return self.address.startswith("127.")


def look(
    env: RankEnv,
    config: ServeConfig | None,
    interface: Interface | None,
    problems: Sequence[str] = (),
) -> Facts:
    """This rank's facts. config, interface: None where there is none for one of `problems`."""
    leads = env.local_rank == 0
    found = [*problems]
    if leads and env.num_nodes > 1:
        found += room_problems(env.local_size)
    return Facts(
        rank=env.rank,
        node=env.node,
        host=env.here,
        machine=machine_identity(),
        interface="" if interface is None else interface.name,
        address="" if interface is None else interface.address,
        why="" if interface is None else interface.why,
        usable=usable(),
        versions=versions(),
        commit=_commit() if leads and env.num_nodes > 1 else "",
        folder="" if config is None else str(config.model.checkpoint),
        checkpoint=checkpoint_facts(config) if leads else None,
        settings={} if config is None else shared_settings(config),
        local_size_given=env.local_size_given,
        problems=found,
    )


def machine_identity() -> str:
    """Equal for processes that reach each other over loopback: one kernel, one network."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/net')}"
    except OSError:  # no Linux
        return platform.node()


def versions() -> dict[str, str]:
    from importlib import metadata

    found = {"python": platform.python_version()}
    for library in ("moeserve", "torch"):
        try:
            found[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            found[library] = "not installed"
    return found


def _commit() -> str:
    """Of a checkout; "" where this is none or git does not say."""
    found = re.match(r" \(commit (\w+)", commit_of(HOME))
    return found[1] if found else ""


def shared_settings(config: ServeConfig) -> dict[str, Any]:
    """By section.field, as JSON has them."""
    flat: dict[str, Any] = {}
    for section, values in config.model_dump(mode="json", exclude={"server"}).items():
        flat |= {f"{section}.{name}": value for name, value in values.items()}
    return {name: value for name, value in flat.items() if name not in _LOCAL}


def checkpoint_facts(config: ServeConfig | None) -> dict[str, str] | None:
    """Hashes of config.json and of the index, sizes of the weight files. None without a folder."""
    if config is None or "checkpoint" not in config.model.model_fields_set:
        return None
    folder = config.model.checkpoint
    facts: dict[str, str] = {}
    for name in ("config.json", INDEX_NAME):
        try:
            facts[name] = blake2b((folder / name).read_bytes(), digest_size=8).hexdigest()
        except OSError:
            continue  # what has to be there is `moeserve.folder`'s to say
    for path in sorted(folder.glob("*.safetensors")):
        facts[path.name] = f"{path.stat().st_size} bytes"
    return facts


def room_problems(num_ranks: int) -> list[str]:
    """Too little memory, or shared memory, for the ranks of this node to start at all; whether a
    model fits is known once its config is read (`moeserve.startup`)."""
    problems = []
    memory = psutil.virtual_memory().available
    if memory < num_ranks * RANK_BYTES:
        problems.append(
            f"{memory / 1e9:.1f} GB of free memory are too little for "
            f"{counted(num_ranks, 'rank')}: {RANK_BYTES / 1e9:.1f} GB each before any weight"
        )
    try:
        shared = shutil.disk_usage("/dev/shm").free
    except OSError:
        return problems  # a system without
    if shared < num_ranks * SHARED_BYTES:
        problems.append(
            f"/dev/shm has {shared / 1e6:.0f} MB free for {counted(num_ranks, 'rank')}: needs "
            f"{SHARED_BYTES / 1e6:.0f} MB each (in a container: --shm-size)"
        )
    return problems


# -- comparing ----------------------------------------------------------------------------------


def node_names(everyone: Sequence[Facts]) -> list[str]:
    """A name of each node: its host's, with its number where two nodes share one."""
    hosts = {f.node: f.host for f in reversed(everyone)}
    names = [hosts[node] for node in sorted(hosts)]
    return [n if names.count(n) == 1 else f"{n}#{i}" for i, n in enumerate(names)]


def judge(everyone: Sequence[Facts], names: Sequence[str]) -> list[str]:
    """All problems of all nodes, in the order of ranks. everyone: by rank. names: of nodes."""
    several = len(names) > 1
    leaders = {f.node: f for f in reversed(everyone)}
    first = everyone[0]
    problems = _own_problems(everyone, names)
    problems += _network_problems(everyone, names)
    for node, facts in sorted(leaders.items()):
        if node == 0 or not several:
            continue
        who = f"node {names[node]}: "
        problems += [f"{who}{p}" for p in _version_problems(facts, first, names[0])]
        problems += [f"{who}{p}" for p in _checkpoint_problems(facts, first, names[0])]
    return problems + _setting_problems(everyone, names)


def warnings(names: Sequence[str], clocks: Mapping[int, Clock]) -> list[str]:
    """What does no harm to answers, but is worth a word."""
    said = []
    there = f"node {names[0]}'s"
    for node, clock in sorted(clocks.items()):
        if clock.surely > CLOCK_SECONDS:
            word = "ahead of" if clock.offset > 0 else "behind"
            said.append(
                f"warning: node {names[node]}: its clock is {abs(clock.offset):.1f} s {word} "
                f"{there} (measured to {clock.error * 1e3:.0f} ms); logs and traces of the two "
                "will not line up: set up NTP"
            )
    return said


@dataclass(frozen=True)
class Clock:
    """Seconds by which a node's clock is ahead of rank 0's, within +- error."""

    offset: float
    error: float

    @property
    def surely(self) -> float:
        """What it is off at least."""
        return max(0.0, abs(self.offset) - self.error)


def _own_problems(everyone: Sequence[Facts], names: Sequence[str]) -> list[str]:
    """Of each rank, said once where several have it."""
    lines: dict[str, list[int]] = {}
    for facts in everyone:
        for line in facts.problems:
            lines.setdefault(line, []).append(facts.rank)
    return [_told(line, ranks, everyone, names) for line, ranks in lines.items()]


def _told(line: str, ranks: Sequence[int], everyone: Sequence[Facts], names: Sequence[str]) -> str:
    """With the nodes or ranks that it is about in front; nothing in front where it is all."""
    if len(ranks) == len(everyone):
        return line
    nodes = sorted({everyone[r].node for r in ranks})
    of_nodes = [f.rank for f in everyone if f.node in nodes]
    if len(names) == 1:
        return f"rank {spans(ranks)}: {line}"
    # Some things only the first rank of a node looks at: they hold for the node.
    leaders = [min(f.rank for f in everyone if f.node == n) for n in nodes]
    where = ", ".join(names[n] for n in nodes)
    if list(ranks) in (of_nodes, leaders):
        return f"node {where}: {line}"
    return f"node {where} (rank {spans(ranks)}): {line}"


def _network_problems(everyone: Sequence[Facts], names: Sequence[str]) -> list[str]:
    problems = []
    for node, name in enumerate(names):
        here = [f for f in everyone if f.node == node]
        strangers = [f for f in here if f.machine != here[0].machine]
        if strangers:
            other = strangers[0]
            given = "" if other.local_size_given else " (LOCAL_WORLD_SIZE is not set)"
            problems.append(
                f"rank {here[0].rank} on {here[0].host} and rank {other.rank} on {other.host} were "
                f"taken to be on one node{given}: use torchrun or srun on every node"
            )
            continue
        facts = here[0]
        if len(names) > 1 and facts.is_loopback and facts.machine != everyone[0].machine:
            problems.append(
                f"node {name}: {SETTING}={facts.interface!r} ({facts.why}) is loopback, at which "
                f"node {names[0]} cannot reach it; {facts.usable}"
            )
    first = everyone[0]
    others = [f for f in everyone if f.machine != first.machine]
    if len(names) > 1 and first.is_loopback and others:
        problems.append(
            f"node {names[0]}: {SETTING}={first.interface!r} ({first.why}) is loopback, at which "
            f"node {names[others[0].node]} cannot reach it; {first.usable}"
        )
    return problems


def _version_problems(facts: Facts, first: Facts, first_name: str) -> list[str]:
    problems = []
    for name in _MUST_MATCH:
        here, there = facts.versions.get(name, ""), first.versions.get(name, "")
        if name == "python":  # a patch release changes nothing that travels
            here, there = (".".join(v.split(".")[:2]) for v in (here, there))
        if here != there:
            problems.append(
                f"{name} {here}, but {there} on node {first_name}: all nodes need the same"
            )
    here, there = facts.commit, first.commit
    if here and there and here != there:
        problems.append(
            f"moeserve is of commit {here}, but {there} on node {first_name}: all nodes need the "
            "same"
        )
    return problems


def _checkpoint_problems(facts: Facts, first: Facts, first_name: str) -> list[str]:
    if not facts.checkpoint or not first.checkpoint:
        return []  # a folder that cannot be read is a problem of its own
    differing = []
    for name in sorted(facts.checkpoint.keys() | first.checkpoint.keys()):
        here, there = facts.checkpoint.get(name), first.checkpoint.get(name)
        if here == there:
            continue
        if here is None or there is None:
            differing.append(f"{name} is {'not there' if here is None else 'there only'}")
        elif here.endswith("bytes"):
            differing.append(f"{name} has {here}, not {there}")
        else:
            differing.append(f"{name} differs")
    if not differing:
        return []
    more = len(differing) - _MOST_FILES
    shown = "; ".join(differing[:_MOST_FILES]) + (f"; and {more} more" if more > 0 else "")
    where = f"model.checkpoint={facts.folder!r}"
    return [f"{where}: is not what node {first_name} has in {first.folder!r}: {shown}"]


def _setting_problems(everyone: Sequence[Facts], names: Sequence[str]) -> list[str]:
    first = everyone[0]
    lines: dict[str, list[int]] = {}
    at = f"node {names[0]}" if len(names) > 1 else "rank 0"
    for facts in everyone:
        if not facts.settings or not first.settings:
            continue  # settings that cannot be used are a problem of their own
        for name in sorted(facts.settings.keys() | first.settings.keys()):
            here, there = facts.settings.get(name), first.settings.get(name)
            if here != there:
                line = f"{name}={here!r}, but {there!r} on {at}: all ranks need the same"
                lines.setdefault(line, []).append(facts.rank)
    return [_told(line, ranks, everyone, names) for line, ranks in lines.items()]


def spans(numbers: Sequence[int]) -> str:
    """0, 1, 2, 5 -> "0-2, 5"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


def describe_network(everyone: Sequence[Facts], names: Sequence[str]) -> str:
    """One line: which interface, which address, why, on all nodes."""
    leaders = [next(f for f in everyone if f.node == n) for n in range(len(names))]
    if len(names) == 1:
        return f"network: {leaders[0].interface} ({leaders[0].address}): {leaders[0].why}"
    shown = [f"{n} {f.interface} {f.address}" for n, f in zip(names, leaders, strict=True)]
    if len(shown) > 8:
        shown = [*shown[:4], f"... {len(shown) - 5} more ...", shown[-1]]
    whys = list(dict.fromkeys(f.why for f in leaders[1:]))
    return f"network: {', '.join(shown)} ({'; '.join(whys[:2])})"
