"""DelayedDispatcher: nothing is handed out early, what was waited is counted, bits are inner's."""

from __future__ import annotations

import pytest
import torch

from dispatch.base import DispatchConfig, DispatchError, HandleError
from dispatch.delayed import DelayedDispatcher
from dispatch.local import LocalDispatcher
from ep.group import EPGroup

CONFIG = DispatchConfig(8, 2, 4, 16, torch.float32, deterministic=True)


class FakeTime:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


def local() -> LocalDispatcher:
    return LocalDispatcher(EPGroup.single(), CONFIG)


def inputs(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 8, generator=generator)
    slots = torch.arange(2 * tokens, dtype=torch.int32).remainder(4).view(tokens, 2)
    return x, slots, torch.rand(tokens, 2, generator=generator)


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_each_way_takes_its_time_and_bits_are_inners(tokens: int) -> None:
    time = FakeTime()
    slow = DelayedDispatcher(local(), 4.0, 0.5, clock=time, sleep=time.sleep)
    fast = local()
    results = []
    for d in (slow, fast):
        handle = d.dispatch_start(*inputs(tokens))
        if d is slow:
            time.now += 1.0  # computes meanwhile
        received = d.dispatch_finish(handle)
        if d is slow:
            assert time.now == 4.0 + 0.5 * tokens
        y = torch.cat([received.x, -received.x], 1).reshape(-1, 8)
        d.combine_start(handle, y)
        if d is slow:
            time.now += 100.0  # long enough: nothing is left to wait for
        results.append(d.combine_finish(handle))
    assert time.now == 104.0 + 0.5 * tokens and slow.waited == 3.0 + 0.5 * tokens
    assert torch.equal(*results)
    assert slow.stats is slow.inner.stats and slow.config is slow.inner.config
    assert "for show" in slow.notes[-1]


def test_two_in_flight_wait_each_for_its_own() -> None:
    time = FakeTime()
    d = DelayedDispatcher(local(), 10.0, clock=time, sleep=time.sleep)
    first = d.dispatch_start(*inputs(2))
    time.now = 7.0
    second = d.dispatch_start(*inputs(3))
    d.dispatch_finish(first)
    assert time.now == 10.0
    d.dispatch_finish(second)
    assert time.now == 17.0 and d.waited == 10.0


def test_handles_and_arguments_are_checked() -> None:
    d, other = DelayedDispatcher(local(), 0.0), DelayedDispatcher(local(), 0.0)
    handle = d.dispatch_start(*inputs(1))
    with pytest.raises(HandleError, match="not one that this dispatcher made"):
        other.dispatch_finish(handle)
    with pytest.raises(HandleError, match="next call is dispatch_finish"):
        d.combine_finish(handle)
    with pytest.raises(DispatchError, match="latency=-1"):
        DelayedDispatcher(local(), -1)
    d.close()
    with pytest.raises(DispatchError, match="closed"):
        d.dispatch_start(*inputs(1))
