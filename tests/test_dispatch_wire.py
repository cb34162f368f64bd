"""Padded blocks: rows lie where they are looked for, few of them or many."""

from __future__ import annotations

import pytest
import torch

from dispatch.base import WireFormat
from dispatch.wire import PaddedBlocks, RowFormat, SendPlan, SentRows

HIDDEN, TOP_K, EACH = 8, 2, 3


@pytest.mark.parametrize("tokens", [0, 1, 5, 31, 32, 33, 200])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_rows_come_back_in_order(tokens: int, ranks: int) -> None:
    torch.manual_seed(tokens)
    form = RowFormat.choose(HIDDEN, TOP_K, torch.bfloat16, EACH, WireFormat.MODEL)
    slots = torch.rand(tokens, ranks * EACH).argsort(1)[:, :TOP_K].to(torch.int32)
    x, weights = torch.randn(tokens, HIDDEN).to(torch.bfloat16), torch.rand(tokens, TOP_K)
    plan = SendPlan.make(slots, ranks, EACH)
    local = plan.local_slots(slots, EACH)
    sent = weights.index_select(0, plan.tokens)
    blocks = PaddedBlocks(form, ranks, tokens)  # no room to spare
    buffer = blocks.pack(plan, SentRows(form, plan.tokens, x, None, sent, local))
    assert blocks.counts(buffer) == plan.row_counts
    size = tokens + 1
    for rank, count in enumerate(plan.row_counts):  # a block: its header, then its rows
        rows = form.split(buffer[rank * size + 1 : rank * size + 1 + count])
        own = plan.ranks == rank
        for got, want in zip(rows, (x[plan.tokens[own]], sent[own], local[own]), strict=True):
            assert torch.equal(got, want.to(got.dtype))
    for got, want in zip(
        blocks.unpack(buffer, plan.row_counts), (x[plan.tokens], sent, local), strict=True
    ):
        assert torch.equal(got, want.to(got.dtype))
