"""Which network interface the ranks talk over, at which address, and why that one.

One machine: loopback, whatever its name resolves to. Several: what --interface or
GLOO_SOCKET_IFNAME says, else the interface from which the system would send to the machine of
rank 0 (a look at the routing table; nothing is sent). Never by the host's name: Debian's resolves
to 127.0.1.1, and gloo would tell the other machines to connect to themselves. Loopback between
machines is refused, unless it was asked for: then ranks that share one machine may use it
(`launch.node_facts` looks whether they do).

Knows interfaces, addresses and names (IPv4). Knows nothing of process groups.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from dataclasses import dataclass

import psutil

from launch.env import Launcher, RankEnv
from moeserve.errors import ConfigError

VARIABLE = "GLOO_SOCKET_IFNAME"
SETTING = "parallel.interface"
_ANY_PORT = 9  # "discard": nothing is sent there


@dataclass(frozen=True)
class Interface:
    """name: as gloo takes it, one or several joined by commas. address: of the first one."""

    name: str
    address: str
    why: str

    @property
    def is_loopback(self) -> bool:
        return is_loopback(self.address)

    def use(self) -> None:
        """Have gloo listen there: before the first group is made."""
        os.environ[VARIABLE] = self.name


def choose_interface(env: RankEnv, wanted: str | None = None) -> Interface:
    """wanted: --interface, the name of an interface, an address of this machine or a subnet
    (10.1.0.0/16) of which it has one. ConfigError says which there are and what to do."""
    here = interfaces()
    variable = os.environ.get(VARIABLE) or None
    if wanted is not None:
        found = _wanted(wanted, here)
        if variable and variable != found.name:
            raise ConfigError(
                [
                    f"{SETTING}={wanted!r} is {found.name}, but {VARIABLE}={variable!r}: leave one "
                    "of them out"
                ]
            )
        return found
    if variable:
        names = variable.split(",")
        missing = [name for name in names if name not in here]
        if missing:
            raise ConfigError(
                [f"{VARIABLE}={variable!r}: no interface {missing[0]!r}; {usable(here)}"]
            )
        if not here[names[0]]:
            raise ConfigError([f"{VARIABLE}={variable!r}: has no IPv4 address; {usable(here)}"])
        return Interface(variable, here[names[0]][0], f"{VARIABLE} says so")
    if env.num_nodes == 1:
        name = next((n for n, found in here.items() if "127.0.0.1" in found), "")
        return Interface(name, "127.0.0.1", "all ranks are on this machine")
    return _towards_rank_0(env, here)


def interfaces() -> dict[str, list[str]]:
    """This machine's, by name: their IPv4 addresses."""
    return {
        name: [a.address for a in addresses if a.family == socket.AF_INET]
        for name, addresses in psutil.net_if_addrs().items()
    }


def usable(here: dict[str, list[str]] | None = None) -> str:
    """What could be chosen, for an error's last words."""
    found = interfaces() if here is None else here
    names = [
        f"{name} ({addresses[0]})"
        for name, addresses in sorted(found.items())
        if addresses and not is_loopback(addresses[0])
    ]
    return f"usable here: {', '.join(names) or 'none'}"


def is_loopback(address: str) -> bool:
    return address.startswith("127.")


def _wanted(wanted: str, here: dict[str, list[str]]) -> Interface:
    why = f"--interface {wanted}"
    if here.get(wanted):
        return Interface(wanted, here[wanted][0], why)
    try:
        subnet = ipaddress.ip_network(wanted, strict=False)
    except ValueError:
        what = "has no IPv4 address" if wanted in here else "no such interface, address or subnet"
        raise ConfigError(
            [f"{SETTING}={wanted!r}: {what} on this machine; {usable(here)}"]
        ) from None
    for name, addresses in here.items():
        for address in addresses:
            if ipaddress.ip_address(address) in subnet:
                return Interface(name, address, why)
    raise ConfigError([f"{SETTING}={wanted!r}: this machine has no such address; {usable(here)}"])


def _towards_rank_0(env: RankEnv, here: dict[str, list[str]]) -> Interface:
    master = resolve_master(env)
    source = _source_address(master)
    if not is_loopback(source):
        for name, addresses in here.items():
            if source in addresses:
                way = "its own" if source == master else f"the way to rank 0's node {master}"
                return Interface(name, source, way)
    # Rank 0's own machine, which knows itself as 127.0.1.1: unambiguous with one card only.
    cards = [
        Interface(name, found[0], "the only one that is not loopback")
        for name, found in here.items()
        if found and not is_loopback(found[0])
    ]
    if env.node == 0 and len(cards) == 1:
        return cards[0]
    raise ConfigError(
        [
            f"{SETTING}: {env.master_addr!r}, where ranks meet, is {master} on this machine, which "
            f"others cannot reach; give --interface NAME (or set {VARIABLE}); {usable(here)}"
        ]
    )


def resolve_master(env: RankEnv, loopback: bool = False) -> str:
    """The IPv4 address of the machine where ranks meet, as this one knows it. ConfigError where it
    has none, or where it means this machine itself and rank 0 runs on another. loopback: it was
    asked for, so that all nodes may be one machine."""
    try:
        found = socket.getaddrinfo(env.master_addr, _ANY_PORT, socket.AF_INET, socket.SOCK_DGRAM)
        address = str(found[0][4][0])
    except OSError as error:
        raise ConfigError(
            [
                f"MASTER_ADDR={env.master_addr!r}: does not resolve ({error.strerror}); "
                f"{_remedy(env)}"
            ]
        ) from None
    literal = address == env.master_addr
    abroad = env.num_nodes > 1 and (literal or env.node > 0)
    if is_loopback(address) and abroad and not loopback:
        raise ConfigError(
            [
                f"MASTER_ADDR={env.master_addr!r}"
                + ("" if literal else f" resolves to {address}, which")
                + f" is this machine itself, but the job runs on {env.num_nodes} nodes; "
                + _remedy(env)
            ]
        )
    return address


def _remedy(env: RankEnv) -> str:
    if env.launcher is Launcher.SLURM:
        return "export MASTER_ADDR=<address of the first node> before srun, or mend /etc/hosts"
    return "give torchrun --local-addr <address of this node> on each node, or mend /etc/hosts"


def _source_address(target: str) -> str:
    """The address from which this machine would send to that one; loopback where no route
    leads there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, _ANY_PORT))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])
