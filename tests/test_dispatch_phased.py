"""Two dispatchers as one: which a step takes, whose handles, what shows of both."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dispatch.base import CombineForm, DispatchConfig, DispatchError, HandleError, PeerError
from dispatch.local import LocalDispatcher
from dispatch.phased import PhasedDispatcher
from ep.group import EPGroup

CONFIG = DispatchConfig(4, 2, 6, 8, torch.float32, deterministic=False)
X, WEIGHTS = torch.eye(2, 4), torch.full((2, 2), 0.5)
SLOTS = torch.tensor([[0, 1], [2, 5]], dtype=torch.int32)


class Told(LocalDispatcher):
    """Writes down what it was told; may have masks, quantise, count bytes."""

    def __init__(self, name: str, config: DispatchConfig, masked: Any = None) -> None:
        super().__init__(EPGroup.single(), config)
        self.name, self.told, self.masked, self.closed = name, [], masked, False

    def set_step_bound(self, max_tokens: int | None, decode_only: bool = False) -> None:
        self.told.append((max_tokens, decode_only))

    @property
    def notes(self) -> list[str]:
        return [f"{self.name} is slow"]

    def active_mask(self) -> list[int] | None:
        return None if self.masked is None else [int(r not in self.masked) for r in range(3)]

    def set_mask(self, rank: int, active: bool) -> None:
        if rank == 2:
            raise DispatchError("rank 2 stays")
        (self.masked.discard if active else self.masked.add)(rank)

    def check_peers(self) -> None:
        if self.masked:
            raise PeerError(f"{self.name}: {sorted(self.masked)}")

    def close(self) -> None:
        self.closed = True


def pair(**masked: Any) -> tuple[PhasedDispatcher, Told, Told]:
    one = Told("big", CONFIG, masked.get("prefill"))
    other = Told("small", replace(CONFIG, max_tokens_per_rank=3), masked.get("decode"))
    return PhasedDispatcher(one, other), one, other


def layer(d: PhasedDispatcher) -> torch.Tensor:
    handle = d.dispatch_start(X, SLOTS, WEIGHTS)
    received = d.dispatch_finish(handle)
    d.combine_start(handle, received.x * received.weights.sum(1, keepdim=True))
    return d.combine_finish(handle)


def test_only_what_was_agreed_decides() -> None:
    d, big, small = pair()
    assert torch.equal(layer(d), X)  # nothing agreed yet
    for bound, decode_only, taken in (
        (3, True, small),  # as many as its buffers hold
        (4, True, big),
        (3, False, big),
        (0, True, small),
        (None, True, big),
        (0, False, big),
    ):
        d.set_step_bound(bound, decode_only)
        assert d.in_use is taken and taken.told[-1] == (bound, decode_only)
        assert torch.equal(layer(d), X)
    assert len(small.told) == 2 and len(big.told) == 4
    assert (big.stats.calls, small.stats.calls, d.stats.calls) == (5, 2, 7)


def test_handles_go_home_to_their_maker_across_a_switch() -> None:
    d, big, small = pair()
    first = d.dispatch_start(X, SLOTS, WEIGHTS)
    d.set_step_bound(1, True)
    second = d.dispatch_start(X + 1, SLOTS, WEIGHTS)
    for handle, want in ((first, X), (second, X + 1)):
        d.combine_start(handle, d.dispatch_finish(handle).x)
        assert torch.equal(d.combine_finish(handle), want)
    assert (big.stats.calls, small.stats.calls) == (1, 1)
    with pytest.raises(HandleError, match="it is spent"):
        d.combine_finish(first)
    with pytest.raises(HandleError, match="not one that this dispatcher made"):
        d.dispatch_finish(pair()[0].dispatch_start(X, SLOTS, WEIGHTS))
    with pytest.raises(HandleError, match="not one that this dispatcher made"):
        d.dispatch_finish(big.dispatch_start(X, SLOTS, WEIGHTS))


def test_what_differs_follows_the_one_in_use_and_the_rest_is_of_both() -> None:
    one, other = Told("big", CONFIG), Told("small", CONFIG)
    one.graph_safe = False
    other.quantises, other.max_in_flight, other.graph_safe = True, 2, True
    d = PhasedDispatcher(one, other)
    assert (d.quantises, d.graph_safe, d.max_in_flight) == (False, False, 2)
    d.set_step_bound(1, True)
    assert (d.quantises, d.graph_safe, d.max_in_flight) == (True, True, 2)
    for stats, n in ((one.stats, 1), (other.stats, 10)):
        stats.sent(dispatch=n, combine=2 * n)
        stats.rows_sent_to_rank = [n]
    total = d.stats
    assert (total.bytes_sent, total.dispatch_bytes, total.combine_bytes) == (33, 11, 22)
    assert total.rows_sent_to_rank == [10]
    d.set_step_bound(1, False)
    assert d.stats.rows_sent_to_rank == [1] and d.quantises is False
    assert d.notes == ["prefill: big is slow", "decode: small is slow"]
    assert d.config is one.config and d.combine_form is one.combine_form
    d.close()
    assert one.closed and other.closed


def test_masks_are_of_both_or_refused() -> None:
    d, big, small = pair(prefill=set(), decode={1})
    assert d.active_mask() == [1, 0, 1]
    with pytest.raises(PeerError, match=r"small: \[1\]"):
        d.check_peers()
    d.set_mask(0, False)
    assert (big.masked, small.masked) == ({0}, {0, 1})
    with pytest.raises(PeerError, match=r"big: \[0\]"):
        d.check_peers()
    d.set_mask(0, True)
    with pytest.raises(DispatchError, match="rank 2 stays"):
        d.set_mask(2, False)
    assert big.masked == set()
    d, big, small = pair(decode=set())
    with pytest.raises(DispatchError, match="prefill: dispatcher 'big' cannot leave ranks out"):
        d.set_mask(0, False)
    assert small.masked == set() and d.active_mask() == [1, 1, 1]
    assert pair()[0].active_mask() is None


def test_two_forms_are_refused() -> None:
    pairs = LocalDispatcher(EPGroup.single(), CONFIG, combine_form=CombineForm.PAIRS)
    with pytest.raises(DispatchError, match="decode=local: .* PAIRS, but prefill=big SUMMED"):
        PhasedDispatcher(Told("big", CONFIG), pairs)
