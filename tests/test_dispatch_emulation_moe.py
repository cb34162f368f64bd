"""Real experts behind the low-latency adapter: rows MASKED, weights applied by the library."""

from __future__ import annotations

import pytest
import torch
from gloo_threads import gloo_threads

from dispatch.base import DispatchConfig, WireFormat
from dispatch.deepep_ll import EmulatedLowLatencyDispatcher
from dispatch.selfcheck import make_case
from ep.group import EPGroup
from ep.placement import ExpertPlacement
from models.deepseek.experts import run_experts
from models.deepseek.kernels.torch_kernels import TorchExpertWeights, TorchKernels

HIDDEN, WIDTH, EXPERTS, TOP_K = 2048, 8, 6, 2


@pytest.mark.parametrize(
    ("wire", "tolerance"),
    [(WireFormat.MODEL, 0.01), (WireFormat.FP8, 0.06), (WireFormat.FP8_UE8M0, 0.06)],
)
def test_each_weight_is_applied_once(wire: WireFormat, tolerance: float) -> None:
    config = DispatchConfig(HIDDEN, TOP_K, EXPERTS, 4, torch.bfloat16, False, wire)
    case = make_case(config, ExpertPlacement.trivial(1, EXPERTS, 2), [4, 2], 0, masked=0.1)
    generator = torch.Generator().manual_seed(1)
    all_weights = TorchExpertWeights(EXPERTS, HIDDEN, WIDTH, torch.bfloat16)
    all_weights.data.copy_(torch.randn(all_weights.data.shape, generator=generator) / 32)

    def dense(rank: int) -> torch.Tensor:
        total = torch.zeros(case.xs[rank].shape)
        for t, picks in enumerate(case.slots[rank].tolist()):
            for k, slot in enumerate(picks):
                if slot >= 0:
                    gate, up, down = (w.float() for w in all_weights.fetch(slot))
                    row = case.xs[rank][t].float()
                    y = down @ (torch.nn.functional.silu(gate @ row) * (up @ row))
                    total[t] += case.weights[rank][t, k] * y
        return total

    def body(group: EPGroup) -> float:
        rank, local = group.rank, EXPERTS // 2
        mine = TorchExpertWeights(local, HIDDEN, WIDTH, torch.bfloat16)
        mine.data.copy_(all_weights.data[rank * local : (rank + 1) * local])
        d = EmulatedLowLatencyDispatcher(group, config)
        handle = d.dispatch_start(case.xs[rank], case.slots[rank], case.weights[rank])
        received = d.dispatch_finish(handle)
        y, index = run_experts(TorchKernels(), received, mine, d.combine_form)
        assert index is None
        d.combine_start(handle, y, index)
        want = dense(rank)
        return float((d.combine_finish(handle) - want).norm() / want.norm())

    assert max(gloo_threads(2, body)) < tolerance
