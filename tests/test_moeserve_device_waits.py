"""What makes the host wait for a device, as the walks without one count it (fake_cuda.py): of what
torch does on CUDA nothing goes unseen."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fake_cuda import CUDA, FakeCuda, fake_cuda
from torch import Tensor

from models.interface import ForwardBatch
from moeserve.device.api import CudaApi, ReplayedApi
from moeserve.device.staging import Staging

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="triton is built for Linux only")
Act = Callable[[Tensor, Tensor], Any]  # x [4] fp32 and i [2] int64 on the device

# Once each. Values are asked for:
ASKED: dict[str, Act] = {
    "item": lambda x, i: x.sum().item(),
    "tolist": lambda x, i: x.tolist(),
    "cpu": lambda x, i: x.cpu(),
    "to cpu": lambda x, i: x.to("cpu", torch.float16),
    "to where another is": lambda x, i: x.to(torch.zeros(1)),
    "type": lambda x, i: x.type("torch.FloatTensor"),
    "numpy": lambda x, i: x.numpy(),
    "array": lambda x, i: np.asarray(x),
    "if": lambda x, i: 1 if x.any() else 0,
    "or": lambda x, i: x[0] < 0 or 1,
    "is_nonzero": lambda x, i: x[0].is_nonzero(),
    "int": lambda x, i: int(i[0]),
    "float": lambda x, i: float(x[0]),
    "complex": lambda x, i: complex(x[0]),
    "range": lambda x, i: range(i[0]),
    "in": lambda x, i: 3 in x,
    "equal": lambda x, i: torch.equal(x, x),
    "allclose": lambda x, i: torch.allclose(x, x),
    "repr": lambda x, i: repr(x),
    "str": lambda x, i: str(x),
    "f-string": lambda x, i: f"{x}",
    "f-string of one": lambda x, i: f"{i[0]:03d}",
    "%": lambda x, i: "%d" % i[0],  # noqa: UP031
    "one as an index": lambda x, i: x[i[0]],
    "one as a fill": lambda x, i: x.masked_fill(x > 0, x[0]),
    "multinomial": lambda x, i: torch.multinomial(x, 1),
}
# Something is sent, and what was asked before waited for:
SENT: dict[str, Act] = {
    "tensor": lambda x, i: torch.tensor([1, 2], device=CUDA),
    "one": lambda x, i: torch.tensor(1, device=CUDA),
    "as_tensor": lambda x, i: torch.as_tensor(np.zeros(3), device=CUDA),
    "new_tensor": lambda x, i: x.new_tensor([1, 2]),
    "to": lambda x, i: torch.zeros(4).to(CUDA),
    "to, not pinned": lambda x, i: torch.zeros(4).to(CUDA, non_blocking=True),
    "to, blocking": lambda x, i: torch.zeros(4).pin_memory().to(CUDA),
    "to where another is, from the host": lambda x, i: torch.zeros(4).to(x),
    "type_as": lambda x, i: torch.zeros(4).type_as(x),
    "copy_, not pinned": lambda x, i: x.copy_(torch.zeros(4), non_blocking=True),
    "copy_, blocking": lambda x, i: x.copy_(torch.zeros(4).pin_memory()),
    "copy_ back, not pinned": lambda x, i: torch.zeros(4).copy_(x, non_blocking=True),
    "an index on the host": lambda x, i: x[torch.tensor([1])],
    "a list as an index": lambda x, i: x[[1, 2]],
    "values from the host": lambda x, i: x.__setitem__(slice(None), torch.zeros(4)),
    "a number to one element": lambda x, i: x.__setitem__(0, 1.0),
    "a number where a tensor says": lambda x, i: x.__setitem__(i, 1.0),
    "where, one on the host": lambda x, i: torch.where(x > 0, torch.tensor(1.0), x),
}
FREE: dict[str, Act] = {
    "len": lambda x, i: len(x),
    "shape": lambda x, i: (x.shape, x.dtype, x.device, x.numel(), x.stride()),
    "iterate": lambda x, i: list(x),
    "sum": lambda x, i: sum(x),
    "arithmetic": lambda x, i: x + 1 - torch.tensor(2.0),
    "full": lambda x, i: torch.full((3,), 2.0, device=CUDA),
    "where, a number": lambda x, i: torch.where(x > 0, 1.0, x),
    "fill": lambda x, i: x.masked_fill(x > 0, 0.0).fill_(x[0]),
    "slices": lambda x, i: x.__setitem__(slice(0, 1), 1.0),
    "masked": lambda x, i: x.__setitem__(x > 0, 1.0),
    "gather": lambda x, i: x[i],
    "scatter": lambda x, i: x.__setitem__(i, x[:2]),
    "scatter of one": lambda x, i: x.__setitem__(i, x.new_full((), 1.0)),
    "one on the host as an index": lambda x, i: x[torch.tensor(1)],
    "pinned": lambda x, i: x.copy_(torch.zeros(4).pin_memory(), non_blocking=True),
    "part of pinned": lambda x, i: x[1:].copy_(
        torch.zeros(4, pin_memory=True)[1:], non_blocking=True
    ),
    "back to pinned": lambda x, i: torch.zeros(4).pin_memory().copy_(x, non_blocking=True),
    "to, pinned": lambda x, i: torch.zeros(4).pin_memory().to(CUDA, non_blocking=True),
    "copied there": lambda x, i: x.copy_(x.clone()),
}
# No shapes without values: refused, in words.
REFUSED: dict[str, Act] = {
    "nonzero": lambda x, i: x.nonzero(),
    "where": lambda x, i: torch.where(x > 0),
    "argwhere": lambda x, i: torch.argwhere(x),
    "unique": lambda x, i: torch.unique(x),
    "bincount": lambda x, i: torch.bincount(i),
    "masked_select": lambda x, i: x.masked_select(x > 0),
    "a mask as an index": lambda x, i: x[x > 0],
    "put by a mask": lambda x, i: x.__setitem__(x > 0, x),
    "repeats": lambda x, i: torch.repeat_interleave(x[:2], i),
    "a size": lambda x, i: torch.zeros(i[0], device=CUDA),  # type: ignore[call-overload]
    "a slice's end": lambda x, i: x[: i[0]],
    "one_hot": lambda x, i: torch.nn.functional.one_hot(i),
}


def waits_of(act: Act) -> list[str]:
    with fake_cuda() as fake, torch.inference_mode():
        act(torch.zeros(4, device=CUDA), torch.zeros(2, dtype=torch.int64, device=CUDA))
        return fake.waits


@pytest.mark.parametrize("name", [*ASKED, *SENT])
@pytest.mark.filterwarnings("ignore")
def test_each_is_one_wait(name: str) -> None:
    (line,) = waits_of((ASKED | SENT)[name])
    assert "test_moeserve_device_waits.py:" in line


@pytest.mark.parametrize("name", FREE)
def test_these_wait_for_nothing(name: str) -> None:
    assert waits_of(FREE[name]) == []


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_shape_without_a_wait_is_refused(name: str) -> None:
    with pytest.raises(AssertionError, match="the host would wait"):
        waits_of(REFUSED[name])


class _Unpinned(ReplayedApi):
    def pinned(self, nbytes: int) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)


def _sent_batch(fake: FakeCuda, api: ReplayedApi) -> list[str]:
    one, small = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)
    batch = ForwardBatch(one, one, one, small, small, small[:, None], one, 1, 1)
    staging = Staging(api)
    for _ in range(4):  # a buffer is used again
        there = staging.send(batch)
        assert there.token_ids.device == CUDA and there.host is batch
    staging.send(replace(batch, token_ids=torch.zeros(1000, dtype=torch.int64)))  # a larger one
    return fake.waits


def test_a_batch_is_sent_from_memory_that_is_pinned() -> None:
    with fake_cuda() as fake, torch.inference_mode():
        assert _sent_batch(fake, ReplayedApi(CUDA)) == []
        waits = _sent_batch(fake, _Unpinned(CUDA))
        assert len(waits) == 5 and all("staging.py" in wait for wait in waits)


def test_what_cuda_gives_as_pinned_is() -> None:
    with fake_cuda() as fake:
        for api in (CudaApi(CUDA), ReplayedApi(CUDA)):
            assert fake.is_pinned(api.pinned(8)[2:])
        assert not fake.is_pinned(torch.zeros(8))
