"""Which interface gloo listens on: loopback at home, a reachable one or a reason abroad."""

from __future__ import annotations

import os
import socket
from types import SimpleNamespace

import psutil
import pytest

from launch.env import RankEnv
from launch.groups import INTERFACE, Job, choose_interface, open_job, reachable_host
from moeserve.errors import ConfigError

TWO_MACHINES = RankEnv(0, 4, 0, 2, "10.0.0.1", 1)
ONE_MACHINE = RankEnv(0, 2, 0, 2, "127.0.0.1", 1)


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine with loopback and one card, whose name resolves to Debian's 127.0.1.1."""
    card = {"lo": "127.0.0.1", "eth7": "10.0.0.5"}
    found = {n: [SimpleNamespace(family=socket.AF_INET, address=a)] for n, a in card.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
    monkeypatch.setattr(socket, "gethostname", lambda: "node5")
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    monkeypatch.setenv(INTERFACE, "")  # put back to what it was when the test ends
    return monkeypatch


def test_one_machine_uses_loopback():
    choose_interface(ONE_MACHINE)
    assert os.environ[INTERFACE] == "lo"
    assert reachable_host(ONE_MACHINE) == "127.0.0.1"


def test_several_machines_refuse_a_name_that_means_this_one():
    with pytest.raises(ConfigError) as caught:
        choose_interface(TWO_MACHINES)
    text = str(caught.value)
    assert "'node5'" in text and "127.0.1.1" in text and INTERFACE in text
    assert "eth7 (10.0.0.5)" in text


def test_several_machines_with_a_name_that_does_not_resolve(machine):
    def fail(name):
        raise socket.gaierror(-2, "Name or service not known")

    machine.setattr(socket, "gethostbyname", fail)
    with pytest.raises(ConfigError, match="does not resolve"):
        choose_interface(TWO_MACHINES)


def test_several_machines_with_a_reachable_name(machine):
    machine.setattr(socket, "gethostbyname", lambda name: "10.0.0.5")
    choose_interface(TWO_MACHINES)
    assert not os.environ[INTERFACE]
    assert reachable_host(TWO_MACHINES) == "10.0.0.5"


def test_the_users_choice_wins_and_is_checked(machine):
    machine.setenv(INTERFACE, "eth7")
    choose_interface(TWO_MACHINES)
    assert reachable_host(TWO_MACHINES) == "10.0.0.5"
    machine.setenv(INTERFACE, "eth0")
    with pytest.raises(ConfigError, match="no interface 'eth0'; usable here: eth7"):
        choose_interface(ONE_MACHINE)


def test_a_job_of_one_shares_with_itself():
    job = open_job(RankEnv.alone())
    assert isinstance(job, Job) and job.group.size == 1
    assert job.share("address", "tcp://x") == "tcp://x"
    assert not job.said("ready")
    assert job.say("ready")
    assert job.said("ready")
