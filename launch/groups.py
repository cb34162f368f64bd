"""Process groups of the job: gloo over the right interface, with timeouts, handed on as EPGroup.

Knows addresses, interfaces and torch.distributed. Knows nothing of experts or requests.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from datetime import timedelta

import psutil
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from ep.group import EPGroup
from launch.env import RankEnv
from moeserve.errors import ConfigError

INTERFACE = "GLOO_SOCKET_IFNAME"
# A rank may still read weights when another waits for it; a dead peer is noticed at once anyway.
GROUP_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class Job:
    """The group and the store by which ranks tell each other small facts at the start."""

    group: EPGroup
    store: Store | None
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


def open_job(env: RankEnv) -> Job:
    """Join the job's groups. They end with the process: taking gloo apart while a peer still runs
    can abort this one."""
    if env.size == 1:
        return Job(EPGroup.single(), None)
    choose_interface(env)
    dist.init_process_group("gloo", init_method="env://", timeout=GROUP_TIMEOUT)
    # Lockstep gets a group of its own: its messages must not queue behind the all-to-alls.
    cpu_group = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT)
    group = EPGroup(
        rank=env.rank,
        size=env.size,
        ranks_per_node=env.local_size,
        device_group=dist.group.WORLD,
        cpu_group=cpu_group,
        host=reachable_host(env),
    )
    return Job(group, dist.distributed_c10d._get_default_store())


def choose_interface(env: RankEnv) -> None:
    """Set or check the interface gloo listens on, before the first group is made.

    One machine: loopback, whatever its name resolves to. Several: the user's choice, else the
    address the host name resolves to, which must not be loopback: gloo would tell the other
    machines to connect to themselves and all would wait for the timeout.
    """
    interfaces = {
        name: [a.address for a in addresses if a.family == socket.AF_INET]
        for name, addresses in psutil.net_if_addrs().items()
    }
    chosen = os.environ.get(INTERFACE)
    if chosen:
        missing = [name for name in chosen.split(",") if name not in interfaces]
        if missing:
            raise ConfigError(
                [f"{INTERFACE}={chosen!r}: no interface {missing[0]!r}; {_choices(interfaces)}"]
            )
        return
    if env.num_nodes == 1:
        loopback = [n for n, found in interfaces.items() if "127.0.0.1" in found]
        if loopback:
            os.environ[INTERFACE] = loopback[0]
        return
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        raise ConfigError(
            [
                f"host name {name!r} does not resolve ({error}); set {INTERFACE}; "
                f"{_choices(interfaces)}"
            ]
        ) from None
    if address.startswith("127."):
        raise ConfigError(
            [
                f"host name {name!r} resolves to {address}, which other machines cannot reach; set "
                f"{INTERFACE} or mend /etc/hosts; {_choices(interfaces)}"
            ]
        )


def reachable_host(env: RankEnv) -> str:
    """The address at which ranks on all machines reach a socket of this one."""
    if env.num_nodes == 1:
        return "127.0.0.1"
    chosen = os.environ.get(INTERFACE, "").split(",")[0]
    for address in psutil.net_if_addrs().get(chosen, []):
        if address.family == socket.AF_INET:
            return address.address
    return socket.gethostbyname(socket.gethostname())


def _choices(interfaces: dict[str, list[str]]) -> str:
    usable = [
        f"{name} ({addresses[0]})"
        for name, addresses in sorted(interfaces.items())
        if addresses and not addresses[0].startswith("127.")
    ]
    return f"usable here: {', '.join(usable) or 'none'}"
