"""Which interface ranks talk over: loopback at home; abroad a reachable one, or a reason."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest

from launch import interface
from launch.env import Launcher, RankEnv
from launch.interface import VARIABLE, choose_interface, resolve_master
from moeserve.errors import ConfigError

ONE_MACHINE = RankEnv(0, 2, 0, 2, "127.0.0.1", 1)
FIRST = RankEnv(0, 4, 0, 2, "node0", 1)  # a rank on each of two machines
SECOND = replace(FIRST, rank=2)
CARDS = {"lo": "127.0.0.1", "eth7": "10.0.0.5", "docker0": "172.17.0.1"}


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """Names resolve to 10.0.0.1, which is reached from eth7."""
    found = {n: [SimpleNamespace(family=socket.AF_INET, address=a)] for n, a in CARDS.items()}
    found["ib0"] = []
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
    monkeypatch.setenv(VARIABLE, "")  # put back to what it was when the test ends
    names(monkeypatch, "10.0.0.1", source="10.0.0.5")
    return monkeypatch


def names(monkeypatch, address: str | None, source: str) -> None:
    """What names resolve to (None: nothing), and from where this machine would send there."""

    def resolve(name, *rest):
        if name[0].isdigit():
            return [(0, 0, 0, "", (name, 9))]
        if address is None:
            raise socket.gaierror(-2, "Name or service not known")
        return [(0, 0, 0, "", (address, 9))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(interface, "_source_address", lambda target: source)


def refused(env: RankEnv, wanted: str | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        choose_interface(env, wanted)
    return str(caught.value)


def test_one_machine_uses_loopback():
    chosen = choose_interface(ONE_MACHINE)
    assert (chosen.name, chosen.address) == ("lo", "127.0.0.1")
    chosen.use()
    assert os.environ[VARIABLE] == "lo"


def test_several_machines_use_the_way_to_rank_0():
    chosen = choose_interface(SECOND)
    assert (chosen.name, chosen.address) == ("eth7", "10.0.0.5")
    assert chosen.why == "the way to rank 0's node 10.0.0.1"


def test_a_name_that_means_this_machine_is_refused_where_rank_0_is_not(machine):
    """Debian's /etc/hosts has 127.0.1.1 for the machine's own name."""
    names(machine, "127.0.1.1", source="127.0.1.1")
    text = refused(SECOND)
    assert "MASTER_ADDR='node0' resolves to 127.0.1.1" in text and "--local-addr" in text
    srun = refused(replace(SECOND, launcher=Launcher.SLURM))
    assert "export MASTER_ADDR" in srun and "torchrun" not in srun


def test_rank_0s_machine_may_know_itself_by_such_a_name_only_with_one_card(machine):
    names(machine, "127.0.1.1", source="127.0.1.1")
    text = refused(FIRST)
    assert "--interface NAME" in text and "docker0 (172.17.0.1), eth7 (10.0.0.5)" in text
    cards = {n: [SimpleNamespace(family=socket.AF_INET, address=CARDS[n])] for n in ("lo", "eth7")}
    machine.setattr(psutil, "net_if_addrs", lambda: cards)
    assert choose_interface(FIRST).name == "eth7"


def test_loopback_as_the_address_of_a_job_of_several_machines_is_refused():
    text = refused(replace(FIRST, master_addr="127.0.0.1"))
    assert "MASTER_ADDR='127.0.0.1' is this machine itself, but the job runs on 2 nodes" in text


def test_a_name_that_does_not_resolve(machine):
    names(machine, None, source="")
    assert "MASTER_ADDR='node0': does not resolve (Name or service not known)" in refused(SECOND)


@pytest.mark.parametrize(
    "wanted, name, address",
    [
        ("docker0", "docker0", "172.17.0.1"),
        ("10.0.0.5", "eth7", "10.0.0.5"),
        ("10.0.0.0/24", "eth7", "10.0.0.5"),
    ],
)
def test_the_users_choice_by_name_address_or_subnet(wanted, name, address):
    chosen = choose_interface(SECOND, wanted)
    assert (chosen.name, chosen.address, chosen.why) == (name, address, f"--interface {wanted}")


@pytest.mark.parametrize(
    "wanted, part",
    [
        ("eth0", "no such interface, address or subnet on this machine"),
        ("ib0", "has no IPv4 address on this machine"),
        ("10.9.0.0/24", "has no such address"),
    ],
)
def test_a_choice_that_is_not_there(wanted, part):
    text = refused(SECOND, wanted)
    assert text.startswith(f"parallel.interface={wanted!r}") and part in text
    assert "usable here: docker0 (172.17.0.1), eth7 (10.0.0.5)" in text


def test_the_variable_wins_over_routes_and_is_checked(machine):
    machine.setenv(VARIABLE, "docker0,eth7")
    chosen = choose_interface(SECOND)
    assert (chosen.name, chosen.address) == ("docker0,eth7", "172.17.0.1")
    assert choose_interface(SECOND, None).why == f"{VARIABLE} says so"
    assert "leave one of them out" in refused(SECOND, "eth7")
    machine.setenv(VARIABLE, "eth0")
    assert "no interface 'eth0'" in refused(ONE_MACHINE)
    machine.setenv(VARIABLE, "ib0")
    assert "no IPv4 address" in refused(SECOND)


def test_loopback_that_was_asked_for_may_be_where_ranks_meet():
    here = replace(SECOND, master_addr="127.0.0.1")
    assert choose_interface(here, "lo").is_loopback
    assert resolve_master(here, loopback=True) == "127.0.0.1"
