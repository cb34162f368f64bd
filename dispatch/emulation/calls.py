"""What a normal-mode call carries: its arguments, its results, rows as bytes.

Knows: what the library asks of arguments, whichever way rows then go (normal.py, internode.py).
Knows nothing of ranks' messages.

Shape letters: T tokens, D hidden, K top-k, E experts of all ranks, L local experts, R ranks,
N received rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dispatch import deepep
from dispatch.emulation.errors import host_assert, python_assert
from dispatch.emulation.events import Config, EventOverlap

Rows = Tensor | tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Call:
    """Arguments of `Buffer.dispatch`, as far as they say what travels. num_experts 0 where cached
    is the handle of an earlier call."""

    x: Rows
    in_rank: Tensor
    topk_idx: Tensor | None
    topk_weights: Tensor | None
    num_experts: int
    alignment: int
    worst: int
    config: Config
    cached: tuple[Any, ...] | None

    @property
    def values(self) -> Tensor:
        return self.x[0] if isinstance(self.x, tuple) else self.x

    @property
    def scales(self) -> Tensor | None:
        return self.x[1] if isinstance(self.x, tuple) else None

    @property
    def parts(self) -> list[Tensor]:
        """Of each token, what its ranks get: values, scales, picks, weights."""
        parts = [self.values, self.scales, self.topk_idx, self.topk_weights]
        return [part for part in parts if part is not None]

    def check(self, num_ranks: int) -> None:
        check_rows(num_ranks, self.values, self.scales, self.config)
        tokens = self.values.shape[0]
        ok = self.in_rank.dtype == torch.bool and self.in_rank.shape == (tokens, num_ranks)
        host_assert(ok, f"is_token_in_rank is bool [{tokens}, {num_ranks}]")
        local = self.num_experts // num_ranks
        host_assert(local <= deepep.NORMAL_MAX_LOCAL_EXPERTS, f"L={local} <= 1024")
        if self.topk_idx is not None:
            _check_picks(self.topk_idx, self.topk_weights, tokens)


@dataclass(frozen=True)
class Arrivals:
    """Results of a dispatch, poisoned until `fill`. counts: aligned, of local experts."""

    x: Rows
    topk_idx: Tensor | None
    topk_weights: Tensor | None
    counts: list[int]
    targets: list[Tensor]  # in the order of Call.parts

    @classmethod
    def poisoned(cls, call: Call, width: int, counts: list[int]) -> Arrivals:
        values, scales = call.values, call.scales
        recv = torch.full((width, values.shape[1]), torch.nan).to(values.dtype)
        targets = [recv]
        x: Rows = recv
        if scales is not None:
            recv_scales = scales.new_empty(width, scales.shape[1])
            recv_scales.fill_(-1 if recv_scales.dtype == torch.int32 else torch.nan)
            targets.append(recv_scales)
            x = (recv, recv_scales)
        if call.topk_idx is None:
            return cls(x, None, None, counts, targets)
        idx = torch.full((width, call.topk_idx.shape[1]), -1)
        weights = torch.full(idx.shape, torch.nan)
        return cls(x, idx, weights, counts, [*targets, idx, weights])

    def fill(self, rows: Tensor, first_expert: int, num_local: int) -> None:
        """rows: uint8, as `pack` made them of Call.parts. Picks become local, -1 those elsewhere,
        whose weights are 0."""
        n = rows.shape[0]
        for target, part in zip(self.targets, unpack(rows, self.targets), strict=True):
            target[:n] = part
        if self.topk_idx is not None and self.topk_weights is not None:
            local = self.topk_idx[:n] - first_expert
            here = (local >= 0) & (local < num_local)
            self.topk_idx[:n] = torch.where(here, local, -1)
            self.topk_weights[:n] = torch.where(here, self.topk_weights[:n], 0.0)


def call_of(
    x: Rows,
    handle: tuple[Any, ...] | None,
    counted: bool,
    in_rank: Tensor | None,
    per_expert: Tensor | None,
    topk_idx: Tensor | None,
    topk_weights: Tensor | None,
    alignment: int,
    worst: int,
    config: Config,
) -> Call:
    """counted: rows for each rank (and node) were given."""
    num_experts = 0
    if handle is not None:
        python_assert(topk_idx is None and topk_weights is None, "a handle brings its picks")
    else:
        complete = counted and in_rank is not None and per_expert is not None
        python_assert(complete, "the layout must be given")
        assert per_expert is not None
        num_experts = per_expert.shape[0]
    assert in_rank is not None
    return Call(x, in_rank, topk_idx, topk_weights, num_experts, alignment, worst, config, handle)


def dispatched(
    got: Arrivals, given: tuple[Any, ...] | None, handle: tuple[Any, ...], event: EventOverlap
) -> Any:
    """What the caller gets; by the handle of an earlier call, rows alone."""
    if given is not None:
        return got.x, None, None, None, None, event
    return got.x, got.topk_idx, got.topk_weights, got.counts, handle, event


def biases_of(bias: Tensor | tuple[Tensor, Tensor] | None) -> list[Tensor]:
    if isinstance(bias, tuple):
        python_assert(len(bias) == 2, f"bias: a tensor or two of them, not {len(bias)}")
        return list(bias)
    return [] if bias is None else [bias]


def pack(parts: list[Tensor]) -> Tensor:
    """[n, ..] of any dtype each -> uint8 [n, bytes of a row]."""
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], 1)


def width_of(parts: list[Tensor]) -> int:
    return sum(part.shape[1] * part.dtype.itemsize for part in parts)


def unpack(rows: Tensor, like: list[Tensor]) -> list[Tensor]:
    """uint8 [n, ..] -> [n, ..] with columns and dtype of each, from the first byte on."""
    found, start = [], 0
    for target in like:
        end = start + target.shape[1] * target.dtype.itemsize
        found.append(
            rows[:, start:end].clone(memory_format=torch.contiguous_format).view(target.dtype)
        )
        start = end
    return found


def aligned_counts(call: Call, rows: Tensor, first_expert: int, num_local: int) -> list[int]:
    """rows uint8 [N, ..] as Call.parts -> of each local expert, a multiple of the alignment."""
    if call.topk_idx is None:
        return [0] * num_local
    picks = unpack(rows, call.parts)[-2] - first_expert
    picks = torch.where((picks >= 0) & (picks < num_local), picks, -1)
    counts = torch.bincount(picks.reshape(-1) + 1, minlength=num_local + 1)[1:]
    return [-(-int(n) // call.alignment) * call.alignment for n in counts]


def check_rows(num_ranks: int, values: Tensor, scales: Tensor | None, config: Config) -> None:
    host_assert(num_ranks in deepep.NORMAL_RANKS, f"R={num_ranks} is one of {deepep.NORMAL_RANKS}")
    ok = values.dim() == 2 and values.is_contiguous()
    host_assert(ok, f"x is [T, D], contiguous, not {list(values.shape)}")
    row_bytes = values.shape[1] * values.dtype.itemsize
    host_assert(row_bytes % 16 == 0, f"a row of {row_bytes} bytes is a multiple of 16")
    if scales is None:
        host_assert(values.dtype == torch.bfloat16, f"x is bfloat16, not {values.dtype}")
    else:
        host_assert(values.dtype == torch.float8_e4m3fn, f"x is float8_e4m3fn: {values.dtype}")
        host_assert(scales.dtype in (torch.float32, torch.int32), "scales are float or int32")
        ok = scales.dim() == 2 and scales.shape[0] == values.shape[0]
        host_assert(ok, f"scales are [T, P], not {list(scales.shape)}")
    host_assert(config.num_sms % 2 == 0, f"num_sms={config.num_sms} is even")


def _check_picks(topk_idx: Tensor, topk_weights: Tensor | None, tokens: int) -> None:
    python_assert(topk_weights is not None, "topk_idx and topk_weights go together")
    assert topk_weights is not None
    ok = topk_idx.dim() == 2 and topk_idx.shape[0] == tokens and topk_idx.dtype == torch.int64
    host_assert(ok and topk_idx.is_contiguous(), f"topk_idx is int64 [{tokens}, K]")
    top_k = topk_idx.shape[1]
    host_assert(top_k <= deepep.NORMAL_MAX_TOP_K, f"K={top_k} <= {deepep.NORMAL_MAX_TOP_K}")
    ok = topk_weights.shape == topk_idx.shape and topk_weights.dtype == torch.float32
    host_assert(ok, f"topk_weights is float32 {list(topk_idx.shape)}")
