"""How much room rows and pairs need: by layout, by backend, by counts once they are here."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dispatch.allgather import AllGatherDispatcher
from dispatch.base import BufferPlan, DispatchConfig, WireFormat
from dispatch.choice import Choice, PhaseChoice
from dispatch.collective import CollectiveDispatcher
from dispatch.deepep_ll import LowLatencyDispatcher
from dispatch.deepep_normal import NormalDispatcher
from dispatch.handles import pairs_if_many
from dispatch.local import LocalDispatcher
from dispatch.nvshmem import SymmetricDispatcher

CONFIG = DispatchConfig(7168, 8, 256, 128, torch.bfloat16, False, WireFormat.FP8)


def ranks(size: int) -> Any:
    """As far as sizes go."""
    return SimpleNamespace(rank=0, size=size, ranks_per_node=8, device_group=None)


def test_rows_that_experts_are_handed_whatever_comes() -> None:
    eight = ranks(8)
    assert LowLatencyDispatcher.expert_rows(eight, CONFIG) == 32 * 8 * 128  # [e, R * M, D]
    few = replace(CONFIG, num_physical_experts=64)
    assert SymmetricDispatcher.expert_rows(eight, few) == 8 * 128 * 8 + 8 * 128  # K picks, e gaps
    for kind in (LocalDispatcher, CollectiveDispatcher, AllGatherDispatcher, NormalDispatcher):
        assert kind.expert_rows(eight, CONFIG) == 0  # as many as come
    prefill = PhaseChoice("deepep_normal", NormalDispatcher, replace(CONFIG), "-")
    decode = PhaseChoice("deepep_ll", LowLatencyDispatcher, CONFIG, "-")
    assert Choice("auto", prefill, decode, {}).expert_rows(eight) == 32 * 8 * 128


def test_pairs_are_counted_where_more_rows_come_than_a_rank_may_send() -> None:
    counts = torch.tensor([100, 0, 60])
    assert pairs_if_many(CONFIG, counts, 128) is None
    assert pairs_if_many(CONFIG, counts, 129) == 160


def test_collectives_on_gpus_plan_for_all_rows_of_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backends = iter(["cpu:gloo,cuda:gloo", *["cpu:gloo,cuda:nccl"] * 3])
    monkeypatch.setattr(dist, "get_backend_config", lambda group: next(backends))
    assert CollectiveDispatcher.plan(ranks(8), CONFIG) == BufferPlan()
    summed = CollectiveDispatcher.plan(ranks(8), CONFIG)
    pairs = CollectiveDispatcher.plan(ranks(8), replace(CONFIG, deterministic=True))
    twice = CollectiveDispatcher.plan(ranks(16), replace(CONFIG, deterministic=True))
    assert summed.held == 0 and summed.passing > 8 * 128 * 7168 * (2 + 1)
    assert pairs.passing > 8 * 128 * 8 * 7168 * 2 and twice.passing > 1.9 * pairs.passing
