"""Normal-mode dispatch and combine of `Buffer` within one node, over messages between CPU ranks.

Knows: a row once per destination rank, its picks and weights there, sums without weights. Knows
nothing of low-latency mode. Several nodes: internode.py.

Shape letters: T tokens, D hidden, K top-k, E experts of all ranks, L local experts, R ranks,
N received rows, C channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dispatch.emulation.calls import (
    Arrivals,
    Call,
    aligned_counts,
    check_rows,
    pack,
    unpack,
    width_of,
)
from dispatch.emulation.errors import host_assert
from dispatch.emulation.events import Config
from dispatch.emulation.exchange import Exchange, Message, timed_out


class Normal:
    """Handles hold all that is known of a dispatch; between calls it is only counted."""

    def __init__(self, exchange: Exchange, num_nvl_bytes: int) -> None:
        self.exchange = exchange
        self.num_nvl_bytes = num_nvl_bytes
        self.not_combined = 0

    @property
    def unfinished(self) -> bool:
        """Is there a layer that has not come home? Its peers may be waiting."""
        return self.not_combined > 0

    def dispatch(self, call: Call) -> tuple[Arrivals, tuple[Any, ...], Callable[[], None]]:
        """-> results, handle, receive."""
        size, me = self.exchange.size, self.exchange.rank
        call.check(size)
        self._check_queues(call.values, call.config)
        in_rank, local = call.in_rank, call.num_experts // size
        channels = call.config.num_sms // 2
        prefix = channel_prefix(in_rank, channels)  # [R, C]
        sent = in_rank.sum(0).tolist()
        operation = self.exchange.begin()
        for rank in range(size):
            rows = in_rank[:, rank].nonzero().squeeze(1)
            header = [*sent, *prefix[rank].tolist()]
            body = pack([rows.to(torch.int32)[:, None], *(part[rows] for part in call.parts)])
            self.exchange.send(operation, rank, Message(header, body))
        ranks = list(range(size))
        messages = receive_all(self.exchange, operation, ranks, size + channels, "dispatch")

        headers = torch.tensor([messages[s].header for s in ranks])
        total, row_bytes = int(headers[:, me].sum()), 4 + width_of(call.parts)
        rows = torch.cat([messages[s].body.view(-1, row_bytes) for s in ranks])
        host_assert(
            call.worst == 0 or total <= call.worst,
            f"{total} rows fit num_worst_tokens={call.worst}",
        )
        counts = [] if call.worst else aligned_counts(call, rows[:, 4:], me * local, local)
        arrivals = Arrivals.poisoned(call, call.worst or total, counts)
        src_idx = torch.full((call.worst or total,), -1, dtype=torch.int32)

        def receive() -> None:
            src_idx[:total] = unpack(rows, [src_idx[:, None]])[0][:, 0]
            arrivals.fill(rows[:, 4:], me * local, local)

        rank_prefix = headers[:, :size].cumsum(0).to(torch.int32)
        recv_prefix = headers[:, size : size + channels]
        before = torch.cat((torch.zeros(size, 1), recv_prefix[:, :-1]), 1).to(torch.int32)
        head = torch.where(in_rank, in_rank.cumsum(0) - 1, -1).to(torch.int32)
        made = (rank_prefix, prefix.to(torch.int32), before, src_idx, in_rank, head)
        self.not_combined += 1
        return arrivals, call.cached or made, receive

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
        host_assert(x.shape[0] == src_idx.shape[0], f"x has {src_idx.shape[0]} rows")
        check_combine(size, x, topk_weights, biases, in_rank.shape[0], config)
        self._check_queues(x, config)
        ends = [0, *rank_prefix[:, me].tolist()]
        operation = self.exchange.begin()
        for rank in range(size):
            at = slice(ends[rank], ends[rank + 1])
            parts = [src_idx[at, None], *(p[at] for p in (x, topk_weights) if p is not None)]
            self.exchange.send(operation, rank, Message([], pack(parts)))
        self.not_combined -= 1
        home = Home.poisoned(x, topk_weights, biases, in_rank.shape[0])

        def receive() -> None:
            messages = receive_all(self.exchange, operation, list(range(size)), 0, "combine")
            home.begin()
            for source in range(size):
                numbers, rows = home.split(messages[source].body, with_numbers=True)
                home.add(numbers, rows)
            home.finish()

        return home.out, home.weights, receive

    def _check_queues(self, values: Tensor, config: Config) -> None:
        queue = config.num_max_nvl_chunked_recv_tokens * values.shape[1] * values.dtype.itemsize
        needed = config.num_sms // 2 * self.exchange.size * queue
        host_assert(needed <= self.num_nvl_bytes, f"{needed} <= num_nvl_bytes={self.num_nvl_bytes}")


class Home:
    """What comes home: sums in fp32, order as added, one rounding at the end."""

    def __init__(self, out: Tensor, weights: Tensor | None, biases: list[Tensor]) -> None:
        self.out, self.weights, self._biases = out, weights, biases
        top_k = 0 if weights is None else weights.shape[1]
        self._total, self._shares = torch.empty(0), torch.empty(out.shape[0], top_k)

    @classmethod
    def poisoned(
        cls, x: Tensor, topk_weights: Tensor | None, biases: list[Tensor], tokens: int
    ) -> Home:
        out = torch.full((tokens, x.shape[1]), torch.nan, dtype=torch.bfloat16)
        weights = None
        if topk_weights is not None:
            weights = torch.full((tokens, topk_weights.shape[1]), torch.nan)
        return cls(out, weights, biases)

    def begin(self) -> None:
        self._total = torch.zeros(self.out.shape)
        self._shares.zero_()
        for bias in self._biases:
            self._total += bias.to(torch.float32)

    def split(self, body: Tensor, with_numbers: bool = False) -> tuple[Tensor, list[Tensor]]:
        """uint8 -> numbers [n] int64 (empty without), [values, weights if there are]."""
        like = [] if self.weights is None else [self.weights]
        targets = [torch.empty(0, 1, dtype=torch.int32)] if with_numbers else []
        targets += [self.out, *like]
        parts = unpack(body.view(-1, width_of(targets)), targets)
        if with_numbers:
            return parts[0][:, 0].to(torch.int64), parts[1:]
        return torch.empty(0, dtype=torch.int64), parts

    def add(self, tokens: Tensor, parts: list[Tensor]) -> None:
        self._total[tokens] += parts[0].to(torch.float32)
        if self.weights is not None:
            self._shares[tokens] += parts[1]

    def finish(self) -> None:
        self.out.copy_(self._total)
        if self.weights is not None:
            self.weights.copy_(self._shares)


# -- what both files use -----------------------------------------------------------------------


def layout(
    topk_idx: Tensor, num_experts: int, num_ranks: int, node: int
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """-> rows for each rank [R] int32, for each node of `node` ranks (None: there is one), picks of
    each expert [E] int32, whether a token goes to a rank [T, R] bool."""
    ok = topk_idx.dim() == 2 and topk_idx.is_contiguous() and topk_idx.dtype == torch.int64
    host_assert(ok, f"topk_idx is int64 [T, K], contiguous, not {topk_idx.dtype}")
    host_assert(num_experts > 0 and num_experts % num_ranks == 0, f"E={num_experts} divides by R")
    owner = torch.where(topk_idx >= 0, topk_idx // (num_experts // num_ranks), num_ranks)
    in_rank = torch.zeros(topk_idx.shape[0], num_ranks + 1, dtype=torch.bool)
    in_rank = in_rank.scatter_(1, owner, True)[:, :num_ranks].contiguous()
    picks = torch.bincount(topk_idx.reshape(-1) + 1, minlength=num_experts + 1)[1:]
    per_node = None
    if num_ranks > node:
        in_node = in_rank.view(topk_idx.shape[0], num_ranks // node, node).any(2)
        per_node = in_node.sum(0, dtype=torch.int32)
    return in_rank.sum(0, dtype=torch.int32), per_node, picks.to(torch.int32), in_rank


def receive_all(
    exchange: Exchange, operation: int, sources: list[int], header: int, what: str
) -> dict[int, Message]:
    found = exchange.receive(operation, sources, header)
    complete = {}
    for source, message in found.items():
        if message is None:
            raise timed_out(source, what)
        complete[source] = message
    return complete


def channel_prefix(goes: Tensor, channels: int) -> Tensor:
    """goes [T, R] bool -> [R, C] int64: rows for each rank in the channels up to each."""
    tokens, size = goes.shape
    each = -(-tokens // channels) if tokens else 1
    totals = torch.cat((torch.zeros(1, size, dtype=torch.int64), goes.cumsum(0)))
    ends = torch.tensor([min((c + 1) * each, tokens) for c in range(channels)])
    return totals[ends].t()


def check_combine(
    num_ranks: int,
    x: Tensor,
    topk_weights: Tensor | None,
    biases: list[Tensor],
    tokens: int,
    config: Config,
) -> None:
    check_rows(num_ranks, x, None, config)
    for bias in biases:
        ok = bias.shape == (tokens, x.shape[1]) and bias.dtype == torch.bfloat16
        host_assert(ok, f"bias is bfloat16 [{tokens}, {x.shape[1]}]")
    if topk_weights is not None:
        ok = topk_weights.dtype == torch.float32 and topk_weights.shape[0] == x.shape[0]
        host_assert(ok, f"topk_weights is float32 [{x.shape[0]}, K]")
