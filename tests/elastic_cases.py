"""What the tests of the second API's emulation share: a small buffer, and work for it."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from gloo_threads import gloo_threads
from torch import Tensor

import dispatch.emulation as library_21
import dispatch.emulation.elastic_25 as library_25
from ep.group import EPGroup

M, D, E, K, R = 6, 256, 6, 3, 2
L = E // R
TOKENS = (5, 3)  # of each rank
LIBRARIES: dict[str, ModuleType] = {"2.1.0": library_21, "2.5.0": library_25}
VERSIONS = pytest.mark.parametrize("version", list(LIBRARIES))


class Alone:
    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


def make(version: str, group: Any = None, **options: Any) -> Any:
    options = {"num_max_tokens_per_rank": M, "hidden": D, "num_topk": K, **options}
    kind = "ElasticBuffer" if version == "2.1.0" else "EPBuffer"
    return getattr(LIBRARIES[version], kind)(group or Alone(), **options)


def inputs(rank: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(rank)
    x = torch.randn(tokens, D, generator=g).bfloat16()
    idx = torch.rand(tokens, E, generator=g).argsort(1)[:, :K].contiguous()
    idx[torch.rand(tokens, K, generator=g) < 0.3] = -1
    return x, idx, torch.rand(tokens, K, generator=g)


def on_ranks(body: Callable[[EPGroup], Any]) -> list[Any]:
    return gloo_threads(R, body)
