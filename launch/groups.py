"""Process groups of the job: gloo over the right interface (on GPUs NCCL too), with timeouts,
handed on as EPGroup.

Knows addresses, interfaces and torch.distributed. Knows nothing of experts or requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from ep.group import EPGroup
from launch.env import RankEnv
from launch.interface import Interface, choose_interface
from launch.last_words import LastWords
from launch.node_facts import look
from launch.rendezvous import BRIEF, PATIENCE, Meeting, alone, meet, open_store
from moeserve.config import ServeConfig
from moeserve.device.choose import DeviceUnavailable, choose_device
from moeserve.device.choose import look as look_for_cuda
from moeserve.errors import ConfigError, Unmet
from moeserve.terminal import say

# A rank may still read weights when another waits for it; a dead peer is noticed at once anyway.
GROUP_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class Job:
    """The group and the store by which ranks tell each other small facts at the start."""

    group: EPGroup
    store: Store | None
    meeting: Meeting = Meeting()
    said_alone: set[str] = field(default_factory=set)

    def share(self, key: str, value: str | None) -> str:
        """The owner gives a value, all others (None) wait for it. One rank: the value itself."""
        if self.store is None:
            assert value is not None, "a job of one rank has no one to wait for"
            return value
        if value is not None:
            self.store.set(key, value)
            return value
        return self.store.get(key).decode()

    def say(self, key: str) -> bool:
        """Say something to all ranks; True for the first one that says it."""
        if self.store is None:
            self.said_alone.add(key)
            return True
        try:
            return self.store.add(f"said/{key}", 1) == 1
        except RuntimeError:  # the store is gone, and with it the process that hosted it
            return False

    def said(self, key: str) -> bool:
        """True once any rank said it."""
        if self.store is None:
            return key in self.said_alone
        try:
            return self.store.check([f"said/{key}"])
        except RuntimeError:
            return False


def open_job(
    env: RankEnv,
    config: ServeConfig | None = None,
    problems: Sequence[str] = (),
    *,
    on_store: Callable[[LastWords], None] = lambda words: None,
    on_problems: Callable[[Sequence[str]], None] = lambda problems: None,
) -> Job:
    """Meet the other ranks, then join the job's groups. These end with the process: taking gloo
    apart while a peer still runs can abort this one.

    config: None where this rank's settings cannot be used, for the `problems` that are given.
    on_store: hears of the way to tell peers, before anything that can fail on all ranks alike.
    on_problems: hears of this rank's own before the others are told of them, which can take BRIEF.
    ConfigError: what is wrong on any rank, the same on all.
    """
    if env.size == 1:
        if problems:
            raise ConfigError([*problems])
        return Job(EPGroup.single(), None, Meeting((env.here,), (), alone(env)))
    found = [*problems]
    interface = _interface(env, config, found)
    # Between nodes it was asked for, or it would have been a problem.
    loopback = interface is not None and interface.is_loopback
    if found:
        on_problems(found)
    try:
        store = open_store(env, loopback=loopback, patience=BRIEF if found else PATIENCE)
    except Unmet as error:
        if found:
            raise ConfigError([*found, str(error)]) from None
        raise
    except ConfigError as error:
        raise ConfigError(list(dict.fromkeys([*found, *error.problems]))) from None
    words = LastWords(store, env)
    on_store(words)
    usable = config if not problems else None
    meeting = meet(PrefixStore("meet", store), env, look(env, usable, interface, found))
    words.names = meeting.names
    store.set_timeout(GROUP_TIMEOUT)
    quiet = config is not None and config.engine.quiet
    if env.num_nodes > 1 and not quiet and words.first_to("notes"):
        for note in meeting.notes:
            say(note)
    assert interface is not None, "without one there was a problem"
    interface.use()
    backend = _backend(env, config)
    dist.init_process_group(
        backend,
        store=PrefixStore("default_pg", store),
        rank=env.rank,
        world_size=env.size,
        timeout=GROUP_TIMEOUT,
    )
    # Lockstep gets a group of its own: its messages must not queue behind the all-to-alls.
    cpu_group = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT)
    group = EPGroup(
        rank=env.rank,
        size=env.size,
        ranks_per_node=env.local_size,
        device_group=dist.group.WORLD,
        cpu_group=cpu_group,
        host=interface.address,
        node_names=meeting.names,
    )
    return Job(group, PrefixStore("job", store), meeting)


def _backend(env: RankEnv, config: ServeConfig | None) -> str:
    """gloo; beside it NCCL for tensors on GPUs, where this rank computes on one. A device that
    cannot be had is said later, with all other problems."""
    try:
        asked = "cpu" if config is None else config.engine.device
        choice = choose_device(asked, look_for_cuda(), env.rank, env.local_size)
    except DeviceUnavailable:
        return "gloo"
    if choice.on_cpu or not dist.is_nccl_available():
        return "gloo"
    torch.cuda.set_device(choice.device)
    return "cpu:gloo,cuda:nccl"


def _interface(env: RankEnv, config: ServeConfig | None, problems: list[str]) -> Interface | None:
    try:
        return choose_interface(env, None if config is None else config.parallel.interface)
    except ConfigError as error:
        problems += error.problems
        return None
