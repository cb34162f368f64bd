"""The permutation between dispatch and experts against its slow twin."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatch.permute import permute, permute_slow, to_row_major
from dispatch.route import count_picks


def random_slots(rows: int, top_k: int, local: int, seed: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-1, local, (rows, top_k), generator=g, dtype=torch.int32)


@given(st.integers(0, 15), st.integers(1, 4), st.integers(1, 6), st.integers(0, 10**6))
@settings(max_examples=150, deadline=None)
def test_equals_the_slow_twin(rows: int, top_k: int, local: int, seed: int) -> None:
    slots = random_slots(rows, top_k, local, seed)
    counts = count_picks(slots, local)
    fast, slow = permute(slots, counts), permute_slow(slots, counts)
    assert fast.pair_rows.dtype == fast.offsets.dtype == torch.int32
    assert fast.index.dtype == torch.int64
    assert torch.equal(fast.pair_rows, slow.pair_rows)
    assert torch.equal(fast.offsets, slow.offsets)
    assert torch.equal(fast.index, slow.index)


@given(st.integers(0, 15), st.integers(1, 4), st.integers(1, 6), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_row_major_order_comes_back(rows: int, top_k: int, local: int, seed: int) -> None:
    slots = random_slots(rows, top_k, local, seed)
    p = permute(slots, count_picks(slots, local))
    valid = slots >= 0
    sorted_slots = torch.repeat_interleave(torch.arange(local), p.offsets.diff())
    y = torch.stack([p.pair_rows.long(), sorted_slots], 1).float()
    back = to_row_major(y, p.index)
    expected = torch.stack([valid.nonzero()[:, 0], slots[valid].long()], 1).float()
    assert torch.equal(back, expected)


def test_large_and_all_on_one_slot() -> None:
    slots = torch.full((1365, 6), 3, dtype=torch.int32)
    p = permute(slots, count_picks(slots, 8))
    assert p.offsets.tolist() == [0, 0, 0, 0, 8190, 8190, 8190, 8190, 8190]
    assert torch.equal(p.index.flatten(), torch.arange(8190))
