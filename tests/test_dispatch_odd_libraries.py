"""Packages that are not what their name says: each probe answers in one line that names them."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from dispatch.base import DispatchConfig, DispatchError, WireFormat
from dispatch.deepep_ll import EmulatedLowLatencyDispatcher, LowLatencyDispatcher
from dispatch.deepep_normal import NormalDispatcher
from dispatch.deepep_v2 import ElasticDispatcher
from dispatch.nvshmem import SymmetricDispatcher
from ep.group import EPGroup

CONFIG = DispatchConfig(7168, 8, 256, 128, torch.bfloat16, False, WireFormat.FP8)
KINDS: tuple[Any, ...] = (LowLatencyDispatcher, NormalDispatcher, ElasticDispatcher)


def group_of(size: int) -> EPGroup:
    handle: Any = object()
    return EPGroup(0, size, size, handle, handle)


GROUP = group_of(8)


class Raising(BaseException):
    pass


class Finder:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name == "deep_ep":
            raise self.error


def reasons() -> list[str]:
    answers = [kind.probe(GROUP, CONFIG) for kind in KINDS]
    assert not any(answer.ok for answer in answers)
    for answer in answers:
        assert "\n" not in answer.reason and answer.reason.startswith("deep_ep"), answer.reason
    return [answer.reason for answer in answers]


@pytest.mark.parametrize(
    "error", [SystemExit(1), Raising("x"), GeneratorExit(), OSError("a\nb"), ImportError("\n")]
)
def test_whatever_its_import_raises(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "deep_ep", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Finder(error), *sys.meta_path])
    for said in reasons():
        assert said.startswith("deep_ep cannot be imported: ") and type(error).__name__ in said


def test_a_wish_to_stop_is_none_of_the_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "deep_ep", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Finder(KeyboardInterrupt()), *sys.meta_path])
    for kind in KINDS:
        with pytest.raises(KeyboardInterrupt):
            kind.probe(GROUP, CONFIG)


def package(monkeypatch: pytest.MonkeyPatch, **attributes: Any) -> None:
    module = ModuleType("deep_ep")
    for name, value in attributes.items():
        setattr(module, name, value)
    monkeypatch.setitem(sys.modules, "deep_ep", module)


def test_a_release_without_the_first_api(monkeypatch: pytest.MonkeyPatch) -> None:
    package(monkeypatch, __version__="2.5.0")
    gone = "deep_ep 2.5.0: has no Buffer (the first API was taken out in 2.5)"
    low_latency, normal, second = reasons()
    assert low_latency.startswith(gone) and normal == gone
    assert second.startswith("deep_ep 2.5.0 has neither ElasticBuffer (2.0) nor EPBuffer (2.5)")
    # What it would take is known all the same.
    assert NormalDispatcher.plan(GROUP, CONFIG).held > 0
    assert NormalDispatcher.buffer_need(GROUP, CONFIG).nvl > 0
    with pytest.raises(DispatchError, match="deepep_normal': deep_ep 2.5.0: has no Buffer"):
        NormalDispatcher(GROUP, CONFIG)


class Nothing:
    __init__: Any = property(lambda self: 1)
    dispatch, combine, get_dispatch_layout = 5, "x", print
    low_latency_dispatch = low_latency_combine = None


class Exits(type):
    def __getattr__(cls, name: str) -> Any:
        raise SystemExit(3)


@pytest.mark.parametrize("buffer", [3, Nothing, Exits("X", (), {})])
def test_buffers_that_are_none(buffer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    package(monkeypatch, Buffer=buffer, ElasticBuffer=buffer, __version__="9\n9")
    assert not any("\n" in said for said in reasons())


class Lazy(ModuleType):
    def __getattr__(self, name: str) -> Any:
        raise SystemExit("lazy load failed")


def test_a_module_that_loads_as_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", Lazy("deep_ep"))
    assert all("SystemExit: lazy load failed" in said for said in reasons())


def test_symmetric_memory_that_exits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dispatch.nvshmem_library._takes", lambda *_: sys.exit("no driver"))
    answer = SymmetricDispatcher.probe(GROUP, replace(CONFIG, num_physical_experts=64))
    assert not answer.ok and "SystemExit: no driver" in answer.reason


@pytest.mark.parametrize("depth", ["abc", "", "0x400", "1024.0", "-5", "0", "3", "99999999999"])
def test_a_queue_depth_that_is_none_is_refused_by_name(
    depth: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVSHMEM_QP_DEPTH", depth)
    answer = EmulatedLowLatencyDispatcher.probe(GROUP, CONFIG)
    assert not answer.ok and "at most -" not in answer.reason
    assert f"NVSHMEM_QP_DEPTH={depth!r}: must be a decimal number, 2 x (" in answer.reason
    assert "such as 1024" in answer.reason


@pytest.mark.parametrize("depth", ["1024", " 1024 ", "1_024", "+1024"])
def test_a_queue_depth_is_read_as_the_library_does(
    depth: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVSHMEM_QP_DEPTH", depth)
    assert EmulatedLowLatencyDispatcher.probe(GROUP, CONFIG).ok
    more = EmulatedLowLatencyDispatcher.probe(GROUP, replace(CONFIG, max_tokens_per_rank=512))
    assert "NVSHMEM_QP_DEPTH=1024: at most 511; a depth of 2048 would do" in more.reason
    monkeypatch.setenv("NVSHMEM_QP_DEPTH", "4")
    little = EmulatedLowLatencyDispatcher.probe(group_of(2), CONFIG)
    assert "NVSHMEM_QP_DEPTH=4: too small for any number of tokens; a depth of" in little.reason
