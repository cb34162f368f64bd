"""Interfaces and names: which one a job on several machines would take, and what goes wrong there.

Knows what `launch.interface` knows. Opens nothing.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping

import psutil

from launch.doctor.check import Check, ok, warning

SECTION = "network"
VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME")


def network_checks(environ: Mapping[str, str] | None = None) -> Iterator[Check]:
    environ = os.environ if environ is None else environ
    here = {
        name: [a.address for a in addresses if a.family == socket.AF_INET]
        for name, addresses in psutil.net_if_addrs().items()
    }
    speeds = {name: stats.speed for name, stats in psutil.net_if_stats().items() if stats.isup}
    name = socket.gethostname()
    try:
        address: str | None = socket.gethostbyname(name)
    except OSError:
        address = None
    yield interfaces_check(here, speeds)
    yield name_check(name, address)
    yield choice_check(here, route_address(), environ)
    yield from variable_checks(here, environ)


def route_address() -> str | None:
    """The address from which this machine sends to the world; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # of a block that is kept for documentation
        except OSError:
            return None
        return str(probe.getsockname()[0])


def interfaces_check(here: Mapping[str, list[str]], speeds: Mapping[str, int]) -> Check:
    cards = [
        f"{name} {found[0]}" + (f" ({speeds[name]} Mbit/s)" if speeds.get(name) else "")
        for name, found in sorted(here.items())
        if found and not found[0].startswith("127.") and name in speeds
    ]
    if cards:
        return ok(SECTION, "interfaces", ", ".join(cards))
    return warning(
        SECTION,
        "interfaces",
        "loopback only",
        "no other machine reaches this one",
        "nothing for a job on this machine; else bring an interface up",
    )


def name_check(name: str, address: str | None) -> Check:
    """What the machine's own name means to itself."""
    if address is None:
        return warning(
            SECTION,
            "host name",
            f"{name} does not resolve",
            "torchrun and gloo ask for it, and wait for name servers",
            f"add a line `<address> {name}` to /etc/hosts",
        )
    if address.startswith("127."):
        return warning(
            SECTION,
            "host name",
            f"{name} is {address}",
            "loopback: a library that goes by the name tells other machines to connect to "
            "themselves (moeserve goes by the route; NCCL and torchrun's rendezvous may not)",
            f"in /etc/hosts give {name} the address of the network, not one of 127.*; torchrun may "
            "be told which node hosts its store by --rdzv-conf is_host=1 there, 0 elsewhere",
        )
    return ok(SECTION, "host name", f"{name} is {address}")


def choice_check(
    here: Mapping[str, list[str]], route: str | None, environ: Mapping[str, str]
) -> Check:
    """Which interface ranks on several machines would talk over."""
    asked = environ.get("GLOO_SOCKET_IFNAME")
    if asked:
        return ok(SECTION, "several machines", asked, "GLOO_SOCKET_IFNAME says so")
    name = next((n for n, found in here.items() if route in found), None)
    if route is None or name is None or route.startswith("127."):
        return warning(
            SECTION,
            "several machines",
            "-",
            "no route leads out: a job of several machines would have to be told",
            "give --interface NAME, or set GLOO_SOCKET_IFNAME",
        )
    return ok(
        SECTION,
        "several machines",
        f"{name} ({route})",
        "the way out of this machine; towards rank 0 the routing table decides, or --interface",
    )


def variable_checks(here: Mapping[str, list[str]], environ: Mapping[str, str]) -> Iterator[Check]:
    """Interfaces that the environment names. NCCL's may have a prefix: ^ for all but, = for exactly
    this name; else it is the beginning of one."""
    for variable in VARIABLES:
        text = environ.get(variable)
        if not text:
            continue
        names = [part.split(":")[0] for part in text.lstrip("^=").split(",")]
        exact = variable.startswith("GLOO") or text.startswith("=")
        lost = [
            n for n in names if not (n in here if exact else any(x.startswith(n) for x in here))
        ]
        if lost and not text.startswith("^"):
            yield warning(
                SECTION,
                variable,
                text,
                f"there is no interface {lost[0]!r} here",
                f"choose of {', '.join(sorted(here))}",
            )
        else:
            yield ok(SECTION, variable, text)
