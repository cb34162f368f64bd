"""Normal-mode dispatch and combine of `Buffer` within one node, over messages between CPU ranks.

Knows: a row once per destination rank, its picks and weights there, sums without weights. Knows
nothing of low-latency mode. Between nodes (more than 8 ranks) it refuses: not emulated.

Shape letters: T tokens, D hidden, K top-k, E experts of all ranks, L local experts, R ranks,
N received rows, C channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dispatch import deepep
from dispatch.emulation.errors import host_assert, python_assert
from dispatch.emulation.events import Config
from dispatch.emulation.exchange import Exchange, Message, timed_out

Rows = Tensor | tuple[Tensor, Tensor]


class Normal:
    """Handles hold all that is known of a dispatch; nothing is kept between calls."""

    def __init__(self, exchange: Exchange, num_nvl_bytes: int) -> None:
        self.exchange = exchange
        self.num_nvl_bytes = num_nvl_bytes

    def layout(
        self, topk_idx: Tensor, num_experts: int
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """-> rows for each rank [R] int32, None (one node), picks of each expert [E] int32, whether
        a token goes to a rank [T, R] bool."""
        size = self.exchange.size
        ok = topk_idx.dim() == 2 and topk_idx.is_contiguous() and topk_idx.dtype == torch.int64
        host_assert(ok, f"topk_idx is int64 [T, K], contiguous, not {topk_idx.dtype}")
        host_assert(num_experts > 0 and num_experts % size == 0, f"E={num_experts} divides by R")
        local = num_experts // size
        in_rank = torch.zeros(topk_idx.shape[0], size, dtype=torch.bool)
        for rank in range(size):
            in_rank[:, rank] = ((topk_idx >= 0) & (topk_idx // local == rank)).any(1)
        picks = torch.bincount(topk_idx.reshape(-1) + 1, minlength=num_experts + 1)[1:]
        return in_rank.sum(0, dtype=torch.int32), None, picks.to(torch.int32), in_rank

    def dispatch(
        self,
        x: Rows,
        in_rank: Tensor,
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        num_experts: int,
        alignment: int,
        worst: int,
        config: Config,
        cached: tuple[Any, ...] | None,
    ) -> tuple[Rows, Tensor | None, Tensor | None, list[int], tuple[Any, ...], Callable[[], None]]:
        """-> rows, their picks and weights, counts, handle, receive. num_experts 0 where cached."""
        size, me = self.exchange.size, self.exchange.rank
        values, scales = x if isinstance(x, tuple) else (x, None)
        self._check_rows(values, scales, config)
        tokens = values.shape[0]
        ok = in_rank.dtype == torch.bool and in_rank.shape == (tokens, size)
        host_assert(ok, f"is_token_in_rank is bool [{tokens}, {size}]")
        local = num_experts // size
        host_assert(local <= deepep.NORMAL_MAX_LOCAL_EXPERTS, f"L={local} <= 1024")
        if topk_idx is not None:
            _check_picks(topk_idx, topk_weights, tokens)
        parts = [values.view(torch.uint8)]
        if scales is not None:
            parts.append(scales.contiguous().view(torch.uint8))
        top_k = 0 if topk_idx is None else topk_idx.shape[1]
        channels = config.num_sms // 2
        prefix = _channel_prefix(in_rank, channels)  # [R, C]
        sent = in_rank.sum(0).tolist()
        operation = self.exchange.begin()
        for rank in range(size):
            rows = in_rank[:, rank].nonzero().squeeze(1)
            body = [part[rows] for part in parts]
            expert_counts = [0] * local
            if topk_idx is not None and topk_weights is not None:
                at_rank = topk_idx[rows] - rank * local
                here = (topk_idx[rows] >= 0) & (at_rank >= 0) & (at_rank < local)
                picks = torch.where(here, at_rank, -1)
                body.append(picks.contiguous().view(torch.uint8))
                shares = torch.where(here, topk_weights[rows], 0.0)
                body.append(shares.contiguous().view(torch.uint8))
                expert_counts = [int((picks == e).sum()) for e in range(local)]
            body.append(rows.to(torch.int32)[:, None].view(torch.uint8))
            header = [*sent, *prefix[rank].tolist(), *expert_counts]
            packed = torch.cat(body, 1)
            self.exchange.send(operation, rank, Message(header, packed.reshape(-1)))
        messages = self._all(operation, size + channels + local, "dispatch")

        headers = torch.tensor([messages[s].header for s in range(size)])
        rows_from = headers[:, me].tolist()
        total = sum(rows_from)
        host_assert(worst == 0 or total <= worst, f"{total} rows fit num_worst_tokens={worst}")
        width = worst or total
        counts = headers[:, size + channels :].sum(0)
        aligned = [-(-int(n) // alignment) * alignment for n in counts]
        # Rows are there once the caller has waited; until then, and beyond the last, poison.
        recv_values = torch.full((width, values.shape[1]), torch.nan).to(values.dtype)
        recv_scales = None if scales is None else scales.new_empty(width, scales.shape[1])
        if recv_scales is not None:
            recv_scales.fill_(-1 if recv_scales.dtype == torch.int32 else torch.nan)
        recv_idx = None if topk_idx is None else torch.full((width, top_k), -1)
        recv_weights = None if topk_idx is None else torch.full((width, top_k), torch.nan)
        src_idx = torch.full((width,), -1, dtype=torch.int32)
        targets = [t for t in (recv_values, recv_scales, recv_idx, recv_weights) if t is not None]
        targets.append(src_idx[:, None])
        row_bytes = sum(t.shape[1] * t.dtype.itemsize for t in targets)

        def receive() -> None:
            first = 0
            for source in range(size):
                arrived = messages[source].body.view(-1, row_bytes)
                at, start = slice(first, first + arrived.shape[0]), 0
                for target in targets:
                    end = start + target.shape[1] * target.dtype.itemsize
                    part = arrived[:, start:end]  # one row counts as contiguous, at any stride
                    part = part.clone(memory_format=torch.contiguous_format)
                    target[at] = part.view(target.dtype)
                    start = end
                first += arrived.shape[0]

        rank_prefix = headers[:, :size].cumsum(0).to(torch.int32)
        recv_prefix = headers[:, size : size + channels]
        before = torch.cat((torch.zeros(size, 1), recv_prefix[:, :-1]), 1).to(torch.int32)
        head = torch.where(in_rank, in_rank.cumsum(0) - 1, -1).to(torch.int32)
        handle = cached or (rank_prefix, prefix.to(torch.int32), before, src_idx, in_rank, head)
        recv: Rows = recv_values if recv_scales is None else (recv_values, recv_scales)
        return recv, recv_idx, recv_weights, [] if worst else aligned, handle, receive

    def combine(
        self,
        x: Tensor,
        handle: tuple[Any, ...],
        topk_weights: Tensor | None,
        biases: list[Tensor],
        config: Config,
    ) -> tuple[Tensor, Tensor | None, Callable[[], None]]:
        """-> sums [T, D] bf16, weights [T, K] fp32, receive."""
        size, me = self.exchange.size, self.exchange.rank
        rank_prefix, _, _, src_idx, in_rank, _ = handle
        self._check_rows(x, None, config)
        host_assert(x.dtype == torch.bfloat16, f"combine takes bfloat16, not {x.dtype}")
        host_assert(x.shape[0] == src_idx.shape[0], f"x has {src_idx.shape[0]} rows")
        tokens, hidden = in_rank.shape[0], x.shape[1]
        for bias in biases:
            ok = bias.shape == (tokens, hidden) and bias.dtype == torch.bfloat16
            host_assert(ok, f"bias is bfloat16 [{tokens}, {hidden}]")
        top_k = 0
        if topk_weights is not None:
            ok = topk_weights.dtype == torch.float32 and topk_weights.shape[0] == x.shape[0]
            host_assert(ok, f"topk_weights is float32 [{x.shape[0]}, K]")
            top_k = topk_weights.shape[1]
        ends = [0, *rank_prefix[:, me].tolist()]
        operation = self.exchange.begin()
        for rank in range(size):
            at = slice(ends[rank], ends[rank + 1])
            body = [src_idx[at, None].contiguous().view(torch.uint8), x[at].view(torch.uint8)]
            if topk_weights is not None:
                body.append(topk_weights[at].contiguous().view(torch.uint8))
            self.exchange.send(operation, rank, Message([], torch.cat(body, 1).reshape(-1)))
        out = torch.full((tokens, hidden), torch.nan, dtype=torch.bfloat16)
        weights = None if topk_weights is None else torch.full((tokens, top_k), torch.nan)
        row_bytes = 4 + 2 * hidden + 4 * top_k

        def receive() -> None:
            messages = self._all(operation, 0, "combine")
            total = torch.zeros(tokens, hidden)
            shares = torch.zeros(tokens, top_k)
            for bias in biases:
                total += bias.to(torch.float32)
            for source in range(size):
                arrived = messages[source].body.view(-1, row_bytes)
                numbers = arrived[:, :4].contiguous().view(torch.int32)[:, 0].to(torch.int64)
                rows = arrived[:, 4 : 4 + 2 * hidden].contiguous().view(torch.bfloat16)
                total[numbers] += rows.to(torch.float32)
                if top_k:
                    tail = arrived[:, 4 + 2 * hidden :].contiguous().view(torch.float32)
                    shares[numbers] += tail
            out.copy_(total)
            if weights is not None:
                weights.copy_(shares)

        return out, weights, receive

    def _all(self, operation: int, header: int, what: str) -> dict[int, Message]:
        found = self.exchange.receive(operation, list(range(self.exchange.size)), header)
        complete = {}
        for source, message in found.items():
            if message is None:
                raise timed_out(source, what)
            complete[source] = message
        return complete

    def _check_rows(self, values: Tensor, scales: Tensor | None, config: Config) -> None:
        size = self.exchange.size
        if size > deepep.RANKS_PER_NODE:
            raise NotImplementedError("the emulation's normal mode is for 8 ranks at most")
        host_assert(size in deepep.NORMAL_RANKS, f"R={size} is one of {deepep.NORMAL_RANKS}")
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
        queue = config.num_max_nvl_chunked_recv_tokens * row_bytes
        needed = config.num_sms // 2 * size * queue
        host_assert(needed <= self.num_nvl_bytes, f"{needed} <= num_nvl_bytes={self.num_nvl_bytes}")


def _check_picks(topk_idx: Tensor, topk_weights: Tensor | None, tokens: int) -> None:
    python_assert(topk_weights is not None, "topk_idx and topk_weights go together")
    assert topk_weights is not None
    ok = topk_idx.dim() == 2 and topk_idx.shape[0] == tokens and topk_idx.dtype == torch.int64
    host_assert(ok and topk_idx.is_contiguous(), f"topk_idx is int64 [{tokens}, K]")
    top_k = topk_idx.shape[1]
    host_assert(top_k <= deepep.NORMAL_MAX_TOP_K, f"K={top_k} <= {deepep.NORMAL_MAX_TOP_K}")
    ok = topk_weights.shape == topk_idx.shape and topk_weights.dtype == torch.float32
    host_assert(ok, f"topk_weights is float32 {list(topk_idx.shape)}")


def _channel_prefix(in_rank: Tensor, channels: int) -> Tensor:
    """in_rank [T, R] -> [R, C] int64: rows for each rank in the channels up to each."""
    tokens, size = in_rank.shape
    each = -(-tokens // channels) if tokens else 1
    totals = torch.cat((torch.zeros(1, size, dtype=torch.int64), in_rank.cumsum(0)))
    ends = torch.tensor([min((c + 1) * each, tokens) for c in range(channels)])
    return totals[ends].t()
