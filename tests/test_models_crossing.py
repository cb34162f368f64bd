"""Tensors that cross in one pack come out as they went in; on CPUs they do not move."""

from __future__ import annotations

import sys

import pytest
import torch
from fake_cuda import CUDA, fake_cuda

from models.crossing import EDGE, brought, packed, sent, sent_all, unpacked

PARTS = [
    torch.tensor([True, False, True]),
    torch.arange(3),
    torch.zeros(0, 4),
    torch.randn(2, 3, generator=torch.Generator().manual_seed(3)).double(),
    torch.arange(5, dtype=torch.int32),
    torch.arange(12.0).view(3, 4).t(),  # not contiguous
    torch.tensor(7),
]


@pytest.mark.parametrize("edge", [1, EDGE])
@pytest.mark.parametrize("count", range(len(PARTS) + 1))
def test_packed_and_unpacked(count: int, edge: int) -> None:
    parts = PARTS[len(PARTS) - count :]
    if not parts:
        assert brought([]) == sent_all([], torch.device("cpu")) == []
        return
    memory = packed(parts, edge)
    assert memory.dtype is torch.uint8
    assert len(memory) == sum(-(-x.nbytes // edge) * edge for x in parts)
    for got, want in zip(unpacked(memory, parts, edge), parts, strict=True):
        assert got.dtype is want.dtype and torch.equal(got, want)
        assert got.storage_offset() * got.element_size() % edge == 0


def test_on_a_cpu_nothing_moves() -> None:
    cpu = torch.device("cpu")
    assert sent(PARTS[1], cpu) is PARTS[1]
    assert all(a is b for a, b in zip(sent_all(PARTS, cpu), PARTS, strict=True))
    assert all(a is b for a, b in zip(brought(PARTS), PARTS, strict=True))


@pytest.mark.skipif(sys.platform != "linux", reason="the double wants triton")
def test_over_and_back_is_waited_for_once() -> None:
    with fake_cuda() as fake, torch.inference_mode():
        there = sent_all(PARTS, CUDA)
        assert fake.waits == [] and all(x.device == CUDA for x in there)
        assert [x.shape for x in there] == [x.shape for x in PARTS]
        assert [x.dtype for x in brought(there)] == [x.dtype for x in PARTS]
        assert len(fake.waits) == 1
        PARTS[1].to(CUDA, non_blocking=True)  # not from pinned memory
        there[1][[0, 2]]  # an index on the host
        there[1].cpu()
        assert len(fake.waits) == 4
