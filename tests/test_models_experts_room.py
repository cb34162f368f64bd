"""What experts allocate for rows as they arrive, at DeepSeek-V3's sizes and walked with fake
tensors, against what the memory plan has for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_cuda import CUDA, FakeCuda, UnlaunchedKernels
from walked_model import walking

from dispatch.base import CombineForm, Layout, Received, ScaleFormat
from models.deepseek.experts import run_experts
from moeserve.device.ledger import workspace_bytes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="triton is built for Linux only")
RANKS, TOKENS, PICKS, LOCAL, HIDDEN, WIDE = 8, 16384, 8, 32, 7168, 2048


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    with walking() as walked:
        yield walked


class Counting(UnlaunchedKernels):
    """calls: bytes that each call of `experts_routed` allocates, all together."""

    calls: list[int]

    def experts_routed(self, *args: Any, **more: Any) -> Any:
        sizes: list[int] = []
        real = torch.empty

        def empty(*shape: Any, **kind: Any) -> torch.Tensor:
            made = real(*shape, **kind)
            sizes.append(made.numel() * made.element_size())
            return made

        torch.empty = empty
        try:
            return super().experts_routed(*args, **more)
        finally:
            torch.empty = real
            self.calls.append(sum(sizes))


V3: Any = SimpleNamespace(
    q_lora_rank=1536, cache_width=576, num_attention_heads=128, qk_head_dim=192, kv_lora_rank=512,
    v_head_dim=128, hidden_size=HIDDEN, moe_intermediate_size=WIDE, num_experts_per_tok=PICKS,
    n_shared_experts=1, vocab_size=129280,
)  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "known", "calls"),
    [
        (TOKENS * RANKS * 6 // 10, TOKENS * PICKS, 1),  # evenly sent, and the host is told
        (TOKENS * RANKS * 6 // 10, None, 5),  # it is not
        (TOKENS * RANKS, TOKENS * RANKS * PICKS, RANKS),  # all ranks send all to this one
        (TOKENS, None, 1),  # of one rank
    ],
)
def test_experts_stay_within_the_plan(
    fake: FakeCuda, rows: int, known: int | None, calls: int
) -> None:
    kernels = Counting(CUDA)
    kernels.calls = []
    experts = kernels.allocate_fp8_experts(LOCAL, HIDDEN, WIDE, torch.bfloat16)
    received = Received(
        Layout.ROUTED,
        torch.empty(rows, HIDDEN, dtype=torch.float8_e4m3fn, device=CUDA),
        torch.empty(rows, PICKS, dtype=torch.int32, device=CUDA),
        torch.empty(rows, PICKS, device=CUDA),
        torch.empty(LOCAL, dtype=torch.int64, device=CUDA),
        torch.empty(rows, HIDDEN // 128, device=CUDA),
        ScaleFormat.F32_ROW,
        num_pairs=known,
    )
    most = TOKENS * PICKS
    y, _ = run_experts(
        kernels, received, experts, CombineForm.SUMMED, expected_pairs=most, most_pairs=most
    )
    assert y.shape == (rows, HIDDEN) and y.dtype == torch.bfloat16
    assert len(kernels.calls) == calls
    planned = workspace_bytes(V3, TOKENS, 256, 2)
    of_experts = TOKENS * (PICKS + 1) * (2 * HIDDEN + 3 * WIDE) * 2
    assert of_experts < planned
    assert 0.5 * of_experts < max(kernels.calls) < of_experts
    assert fake.waits == []
