"""StepGuard with a store of one process: who says what, who finds what. With real ranks:
tests/dist/test_dispatch_conformance.py, tests/dist/test_engine_dist.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch.distributed as dist

from dispatch import step_guard
from dispatch.base import PeerError
from dispatch.step_guard import StepBroken, StepGuard
from ep.group import EPGroup
from ep.peer_loss import is_lost_peer
from launch.failure import LOST_PEER, exit_code_of

CLOSED = "gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:2450"


def group_of(rank: int, size: int = 3, ranks_per_node: int | None = None) -> EPGroup:
    any_group: Any = object()
    return EPGroup(rank, size, ranks_per_node or size, any_group, any_group)


def guards(store: Any, size: int = 3) -> list[StepGuard]:
    return [StepGuard(group_of(rank, size), store) for rank in range(size)]


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_guard, "PATIENCE", 0.2)
    monkeypatch.setattr(step_guard, "_GRACE", 0.02)


def test_peers_name_the_rank_and_its_reason() -> None:
    first, second, third = guards(dist.HashStore())
    own = ValueError("no memory\nfor 3 tensors")
    with pytest.raises(ValueError) as raised, second:
        raise own
    assert raised.value is own
    for guard, error in ((first, RuntimeError(CLOSED)), (third, PeerError("refused by ranks [1]"))):
        with pytest.raises(StepBroken) as broken, guard:
            raise error
        assert str(broken.value) == "rank 1 broke off the step: ValueError: no memory"
        assert broken.value.rank == 1 and broken.value.__cause__ is error
        assert is_lost_peer(broken.value) and exit_code_of(broken.value) == LOST_PEER


def test_the_first_of_two_reasons_is_told_with_its_step() -> None:
    first, second, third = guards(dist.HashStore())
    assert isinstance(third.explain(OSError("disk"), step=7), OSError)
    assert isinstance(second.explain(ValueError("too late"), step=7), ValueError)
    told = first.explain(RuntimeError(CLOSED), step=7)
    assert isinstance(told, StepBroken) and (told.rank, told.step) == (2, 7)
    assert str(told) == "rank 2 broke off step 7: OSError: disk"
    assert first.explain(told) is told, "once"


def test_a_rank_that_waits_gets_a_reason_that_comes_later() -> None:
    first, second, _ = guards(dist.HashStore())
    told: list[Exception] = []
    waiting = threading.Thread(target=lambda: told.append(first.explain(RuntimeError(CLOSED))))
    waiting.start()
    second.explain(ValueError("slow to say it"))
    waiting.join(10)
    assert "rank 1 broke off the step: ValueError: slow to say it" in str(told[0])


def test_what_no_peers_need_is_left_alone() -> None:
    error = RuntimeError(CLOSED)
    assert StepGuard(EPGroup.single()).explain(error) is error
    assert StepGuard(group_of(0), None).explain(error) is error, "a group that met by no store"


def test_leaving_by_a_signal_is_told_too() -> None:
    first, second, _ = guards(dist.HashStore())
    with pytest.raises(KeyboardInterrupt), second:
        raise KeyboardInterrupt
    told = first.explain(RuntimeError(CLOSED))
    assert str(told) == "rank 1 broke off the step: KeyboardInterrupt: no message"


class CountingStore:
    """Counts calls; `broken` makes each raise what a store without a server raises."""

    def __init__(self) -> None:
        self.store, self.calls, self.broken = dist.HashStore(), 0, False

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            self.calls += 1
            if self.broken:
                raise dist.DistNetworkError("Broken pipe")
            return getattr(self.store, name)(*args)

        return call


def test_a_good_step_asks_the_store_nothing() -> None:
    store = CountingStore()
    guard = StepGuard(group_of(0), store)
    made = store.calls
    for _ in range(3):
        with guard:
            pass
    assert (made, store.calls) == (1, 1)


@pytest.mark.usefixtures("hasty")
def test_a_store_that_is_gone_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for agent, ending in (("True", "reached"), ("", "reached (rank 0 hosts it)")):
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agent)
        store = CountingStore()
        first, second, _ = guards(store)
        store.broken = True
        told = second.explain(RuntimeError(CLOSED))
        assert str(told).startswith("a peer is gone: the last words of peers cannot be read")
        assert str(told).endswith(ending)
        own = ValueError("mine")
        assert first.explain(own) is own


@pytest.mark.usefixtures("hasty")
def test_a_store_that_never_answers_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    store = CountingStore()
    first, *_ = guards(store)
    never = threading.Event()
    monkeypatch.setattr(store, "check", lambda keys: never.wait(30), raising=False)
    told = first.explain(RuntimeError(CLOSED))
    never.set()
    assert "cannot be read" in str(told)


@pytest.mark.usefixtures("hasty")
def test_nobody_is_blamed_without_need() -> None:
    """All processes run, and nobody gave a reason."""
    first, *_ = guards(dist.HashStore())
    told = first.explain(RuntimeError(CLOSED))
    assert isinstance(told, StepBroken) and told.rank is None
    assert str(told) == "a peer is gone: which one could not be found out"


def ended_process() -> tuple[int, str]:
    """Its number and time of start; it has ended, and is a zombie or gone."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = step_guard._started(process.pid)
    process.communicate(b"\n")
    return process.pid, started


def say_process(store: Any, rank: int, pid: int, started: str, space: str | None = None) -> None:
    where = step_guard._process_space() if space is None else space
    store.set(step_guard._process_key(rank), json.dumps([pid, started, where]))


@pytest.mark.usefixtures("hasty")
def test_a_rank_that_was_killed_is_found_by_its_process() -> None:
    store = dist.HashStore()
    first, second, _ = guards(store)
    say_process(store, 2, *ended_process())
    told = second.explain(RuntimeError(CLOSED))
    assert isinstance(told, StepBroken) and (told.rank, told.cause) == (2, None)
    assert str(told) == "rank 2 is gone: its process ended without a word"
    assert str(first.explain(RuntimeError(CLOSED))) == str(told), "found once, told to all"


@pytest.mark.usefixtures("hasty")
def test_a_number_that_another_process_has_now_is_not_the_rank() -> None:
    store = dist.HashStore()
    first, *_ = guards(store)
    say_process(store, 1, os.getpid(), "1")
    assert "rank 1 is gone" in str(first.explain(RuntimeError(CLOSED)))


@pytest.mark.usefixtures("hasty")
def test_processes_that_cannot_be_seen_are_not_judged() -> None:
    pid, started = ended_process()
    store = dist.HashStore()
    first, *_ = guards(store)
    say_process(store, 1, pid, started, space="pid:[7]")  # in a container of its own
    assert "which one could not be found out" in str(first.explain(RuntimeError(CLOSED)))
    store = dist.HashStore()
    apart = StepGuard(group_of(0, 4, ranks_per_node=2), store)
    say_process(store, 2, pid, started)  # on another machine
    assert "which one could not be found out" in str(apart.explain(RuntimeError(CLOSED)))


@pytest.mark.usefixtures("hasty")
def test_a_survivor_that_left_earlier_is_not_the_reason() -> None:
    store = dist.HashStore()
    first, second, _ = guards(store)
    second.explain(RuntimeError(CLOSED))
    say_process(store, 1, *ended_process())
    assert "which one could not be found out" in str(first.explain(RuntimeError(CLOSED)))
