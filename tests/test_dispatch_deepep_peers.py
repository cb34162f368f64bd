"""A rank that is lost in the middle of a layer, with DeepEP's emulation: its peers learn which, at
once, however it went. Whole jobs: tests/dist/test_dispatch_conformance.py."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from gloo_threads import gloo_threads

from dispatch.base import DispatchConfig, Dispatcher, DispatchError, PeerError, WireFormat
from dispatch.deepep_buffer import SharedBuffer
from dispatch.deepep_ll import EmulatedLowLatencyDispatcher
from dispatch.deepep_normal import EmulatedNormalDispatcher
from dispatch.selfcheck import make_case
from ep.group import EPGroup
from ep.placement import ExpertPlacement

CONFIG = DispatchConfig(2048, 2, 8, 4, torch.bfloat16, deterministic=False)
CASE = make_case(CONFIG, ExpertPlacement.trivial(1, 8, 4), [4, 2, 3, 0], 0)
LOST = 1
SOON = 10.0  # seconds
KINDS = [EmulatedLowLatencyDispatcher, EmulatedNormalDispatcher]


def start(d: Dispatcher, rank: int) -> Any:
    return d.dispatch_start(CASE.xs[rank], CASE.slots[rank], CASE.weights[rank])


def layer(d: Dispatcher, rank: int) -> torch.Tensor:
    handle = start(d, rank)
    y = d.dispatch_finish(handle).x.nan_to_num()
    d.combine_start(handle, y)
    return d.combine_finish(handle)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_closes_in_a_layer_is_named(kind: type[Any]) -> None:
    kept = []

    def body(group: EPGroup) -> float:
        d = kind(group, CONFIG)
        kept.append(d)
        layer(d, group.rank)
        began = time.monotonic()
        if group.rank == LOST:
            handle = start(d, LOST)
            d.dispatch_finish(handle)
            d.close()  # an expert broke
            return 0.0
        with pytest.raises(PeerError, match=f"dispatcher '{d.name}': .*from rank {LOST}"):
            layer(d, group.rank)
        return time.monotonic() - began

    assert max(gloo_threads(4, body, timeout=30.0)) < SOON


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_refuses_and_ends_is_named(kind: type[Any]) -> None:
    def body(group: EPGroup) -> float:
        d = kind(group, CONFIG)
        layer(d, group.rank)
        began = time.monotonic()
        if group.rank == LOST:
            with pytest.raises(DispatchError, match="slots: .* valid are"):
                d.dispatch_start(CASE.xs[LOST], CASE.slots[LOST] + 99, CASE.weights[LOST])
            return 0.0
        with pytest.raises(PeerError, match=f"from rank {LOST}"):
            layer(d, group.rank)
        return time.monotonic() - began

    assert max(gloo_threads(4, body, timeout=30.0, leaving=(LOST,))) < SOON


def test_with_masks_a_rank_that_closes_is_masked() -> None:
    kept = []

    def body(group: EPGroup) -> list[int]:
        shared = SharedBuffer.open(
            group, normal=CONFIG, low_latency=CONFIG, emulate=True, enable_shrink=True
        )
        d = EmulatedLowLatencyDispatcher(group, CONFIG, buffer=shared)
        kept.append(d)
        assert d.enable_shrink
        layer(d, group.rank)
        d.check_peers()
        if group.rank == LOST:
            start(d, LOST)
            d.close()
            return []
        layer(d, group.rank)
        with pytest.raises(PeerError, match=rf"ranks \[{LOST}\] did not answer"):
            d.check_peers()
        return d.active_mask()

    assert gloo_threads(4, body) == [[1, 0, 1, 1], [], [1, 0, 1, 1], [1, 0, 1, 1]]


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_rank_refuses_it_refuses_alone(kind: type[Any]) -> None:
    """Before the library is called: the next layer of all ranks is as if nothing had been."""
    config = replace(CONFIG, wire=WireFormat.FP8)

    def body(group: EPGroup) -> int:
        d = kind(group, config)
        rank = group.rank
        if rank == LOST:
            rows = CASE.rows(rank, WireFormat.MODEL if d.quantises else WireFormat.FP8)
            wrong = CASE.rows(rank, WireFormat.FP8 if d.quantises else WireFormat.MODEL)
            slots, weights = CASE.slots[rank], CASE.weights[rank]
            for x, s, w in (
                (wrong, slots, weights),
                (rows, slots.long(), weights),
                (rows, slots, weights[:1]),
                (rows, slots - 9, weights),
            ):
                with pytest.raises(DispatchError):
                    d.dispatch_start(x, s, w)
        wire = WireFormat.MODEL if d.quantises else WireFormat.FP8
        handle = d.dispatch_start(CASE.rows(rank, wire), CASE.slots[rank], CASE.weights[rank])
        return int(d.dispatch_finish(handle).counts.sum())

    assert sum(gloo_threads(4, body)) == sum(int((s >= 0).sum()) for s in CASE.slots)


@pytest.mark.parametrize("received", [False, True])
def test_the_group_outlives_a_buffer_closed_in_the_middle_of_a_layer(received: bool) -> None:
    """By all ranks, so that nobody ever takes what each has sent."""

    def body(group: EPGroup) -> int:
        d = EmulatedLowLatencyDispatcher(group, CONFIG)
        handle = start(d, group.rank)
        if received:
            d.dispatch_finish(handle)
        d.close()
        again = EmulatedLowLatencyDispatcher(group, CONFIG)
        layer(again, group.rank)
        again.close()
        return 1

    assert gloo_threads(4, body) == [1] * 4


def test_layers_whose_handles_are_dropped_are_received_all_the_same() -> None:
    def body(group: EPGroup) -> int:
        d = EmulatedLowLatencyDispatcher(group, CONFIG)
        for _ in range(8):
            start(d, group.rank)
            layer(d, group.rank)
        d.close()
        return 1

    assert gloo_threads(4, body) == [1] * 4
