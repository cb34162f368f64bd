"""Normal-mode dispatch and combine of `Buffer` among several nodes, over messages.

A row goes once to each node that wants it, to the rank there with the sender's place in its node
(its lane), which passes it on to the node's ranks. Results go the same way back: summed in the
node by the lane, rounded to bfloat16, then summed at home. Rows arrive in order of source rank and
token, as within one node. Knows nothing of low-latency mode.

Passing on is done within the call, on the host, as the library's kernels do it without being asked:
who waits for an event waits for nobody's host.

Shape letters: T tokens, D hidden, K top-k, L local experts, R ranks, S nodes, G ranks a node,
N received rows, Q rows that this rank passes on, C channels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dispatch.emulation.calls import Arrivals, Call, aligned_counts, pack, width_of
from dispatch.emulation.errors import host_assert
from dispatch.emulation.events import Config
from dispatch.emulation.exchange import Exchange, Message
from dispatch.emulation.normal import Home, channel_prefix, check_combine, receive_all


@dataclass(frozen=True)
class Handle:
    """The library's tuple, named. in_rank [T, R]; channels and prefixes: int32, rows up to each;
    source [N, 8] uint8: node, and which of its ranks got the row; rdma_head [T, S] and nvl_head
    [Q, G]: a row's number in its queue, -1 where it does not go."""

    in_rank: Tensor
    rdma_channels: Tensor  # [S, C], sent
    rank_channels: Tensor  # [R, C], sent
    recv_rdma_channels: Tensor  # [S, C]
    recv_rdma_prefix: Tensor  # [S] of rows to pass on
    recv_rank_channels: Tensor  # [R, C]
    recv_rank_prefix: Tensor  # [R] of received rows
    source: Tensor
    rdma_head: Tensor
    nvl_head: Tensor


class Internode:
    """node: ranks a node (G). Handles hold all that is known of a dispatch."""

    def __init__(self, exchange: Exchange, num_nvl_bytes: int, num_rdma_bytes: int, node: int):
        self.exchange, self.node = exchange, node
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.not_combined = 0

    @property
    def unfinished(self) -> bool:
        return self.not_combined > 0

    def dispatch(
        self, call: Call, per_node: Tensor | None
    ) -> tuple[Arrivals, tuple[Any, ...], Callable[[], None]]:
        """per_node: num_tokens_per_rdma_rank [S] int32 -> results, handle, receive."""
        size, me, node, nodes = self._shape()
        call.check(size)
        self._check_queues(call.values, call.config)
        in_node = call.in_rank.view(-1, nodes, node).any(2)
        if per_node is not None:
            ok = per_node.dtype == torch.int32 and per_node.tolist() == in_node.sum(0).tolist()
            host_assert(
                ok, f"num_tokens_per_rdma_rank is int32 [{nodes}], as is_token_in_rank says"
            )
        channels, local = call.config.num_sms // 2, call.num_experts // size
        to_node = channel_prefix(in_node, channels)  # [S, C]
        to_rank = channel_prefix(call.in_rank, channels)  # [R, C]

        first = self.exchange.begin()
        for n, lane in enumerate(self._lanes()):
            rows = in_node[:, n].nonzero().squeeze(1)
            ranks = slice(n * node, (n + 1) * node)
            header = [*to_node[n].tolist(), *to_rank[ranks].flatten().tolist()]
            body = pack([*(part[rows] for part in call.parts), call.in_rank[rows, ranks]])
            self.exchange.send(first, lane, Message(header, body))
        header_length = channels * (1 + node)
        relayed = receive_all(self.exchange, first, self._lanes(), header_length, "dispatch")

        row_bytes = width_of(call.parts)
        bodies = [relayed[lane].body.view(-1, row_bytes + node) for lane in self._lanes()]
        headers = torch.tensor([relayed[lane].header for lane in self._lanes()])
        from_rank = headers[:, channels:].view(nodes, node, channels)
        wanted = torch.cat([body[:, row_bytes:] for body in bodies]).to(torch.bool)  # [Q, G]
        second = self.exchange.begin()
        for place, peer in enumerate(self._peers()):
            picked = [b[b[:, row_bytes + place] != 0] for b in bodies]
            header = [*map(len, picked), *from_rank[:, place].flatten().tolist()]
            self.exchange.send(second, peer, Message(header, torch.cat(picked)))
        length = nodes * (1 + channels)
        found = receive_all(self.exchange, second, self._peers(), length, "dispatch")

        by_lane = [
            torch.split(found[peer].body.view(-1, row_bytes + node), found[peer].header[:nodes])
            for peer in self._peers()
        ]
        by_source = [by_lane[place][n] for n in range(nodes) for place in range(node)]
        rows = torch.cat(by_source)
        counts = aligned_counts(call, rows, me * local, local)
        arrivals = Arrivals.poisoned(call, rows.shape[0], counts)
        source = torch.full((rows.shape[0], 8), 255, dtype=torch.uint8)

        def receive() -> None:
            arrivals.fill(rows[:, :row_bytes], me * local, local)
            bits = rows[:, row_bytes:].to(torch.int32) << torch.arange(node, dtype=torch.int32)
            sizes = torch.tensor([len(part) for part in by_source])
            nodes_of_rows = torch.arange(size).repeat_interleave(sizes) // node
            meta = torch.stack((nodes_of_rows.to(torch.int32), bits.sum(1, dtype=torch.int32)), 1)
            source.copy_(meta.view(torch.uint8))

        each = torch.tensor([found[peer].header[nodes:] for peer in self._peers()])
        each = each.view(node, nodes, channels).transpose(0, 1).reshape(size, channels)
        made = Handle(
            call.in_rank,
            to_node.to(torch.int32),
            to_rank.to(torch.int32),
            headers[:, :channels].to(torch.int32),
            torch.tensor([len(b) for b in bodies]).cumsum(0).to(torch.int32),
            each.to(torch.int32),
            torch.tensor([len(part) for part in by_source]).cumsum(0).to(torch.int32),
            source,
            _numbers(in_node),
            _numbers(wanted),
        )
        self.not_combined += 1
        return arrivals, call.cached or tuple(vars(made).values()), receive

    def combine(
        self,
        x: Tensor,
        handle: tuple[Any, ...],
        topk_weights: Tensor | None,
        biases: list[Tensor],
        config: Config,
    ) -> tuple[Tensor, Tensor | None, Callable[[], None]]:
        """-> sums [T, D] bf16, weights [T, K] fp32, receive."""
        size, _, node, nodes = self._shape()
        known = Handle(*handle)
        tokens = known.in_rank.shape[0]
        host_assert(x.shape[0] == known.source.shape[0], f"x has {known.source.shape[0]} rows")
        check_combine(size, x, topk_weights, biases, tokens, config)
        self._check_queues(x, config)
        host_assert(x.shape[1] * 2 // 16 % 32 == 0, f"D={x.shape[1]}: D * 2 / 16 divides by 32")
        receives = config.num_max_nvl_chunked_recv_tokens
        host_assert(receives % nodes == 0, f"nvl receive chunks {receives} divide by {nodes} nodes")
        host_assert(
            config.num_max_nvl_chunked_send_tokens <= receives // nodes,
            f"nvl send chunks {config.num_max_nvl_chunked_send_tokens} <= {receives // nodes}",
        )
        rows = pack([part for part in (x, topk_weights) if part is not None])
        by_source = torch.split(rows, known.recv_rank_prefix.diff(prepend=_zero()).tolist())

        first = self.exchange.begin()
        for place, lane in enumerate(self._peers()):
            body = torch.cat([by_source[n * node + place] for n in range(nodes)])
            self.exchange.send(first, lane, Message([], body))
        in_node = receive_all(self.exchange, first, self._peers(), 0, "combine")
        passed = Home.poisoned(x, topk_weights, [], known.nvl_head.shape[0])
        passed.begin()
        for place, peer in enumerate(self._peers()):
            at = (known.nvl_head[:, place] >= 0).nonzero().squeeze(1)
            passed.add(at, passed.split(in_node[peer].body)[1])
        passed.finish()
        rows = pack([part for part in (passed.out, passed.weights) if part is not None])
        by_node = torch.split(rows, known.recv_rdma_prefix.diff(prepend=_zero()).tolist())

        second = self.exchange.begin()
        for n, lane in enumerate(self._lanes()):
            self.exchange.send(second, lane, Message([], by_node[n]))
        self.not_combined -= 1
        home = Home.poisoned(x, topk_weights, biases, tokens)

        def receive() -> None:
            messages = receive_all(self.exchange, second, self._lanes(), 0, "combine")
            home.begin()
            for n, lane in enumerate(self._lanes()):
                at = (known.rdma_head[:, n] >= 0).nonzero().squeeze(1)
                home.add(at, home.split(messages[lane].body)[1])
            home.finish()

        return home.out, home.weights, receive

    # -- parts -----------------------------------------------------------------------------

    def _shape(self) -> tuple[int, int, int, int]:
        """R, this rank, G, S."""
        size = self.exchange.size
        return size, self.exchange.rank, self.node, size // self.node

    def _lanes(self) -> list[int]:
        """[S] the rank of each node that has this one's place."""
        return list(range(self.exchange.rank % self.node, self.exchange.size, self.node))

    def _peers(self) -> list[int]:
        """[G] the ranks of this node."""
        first = self.exchange.rank // self.node * self.node
        return list(range(first, first + self.node))

    def _check_queues(self, values: Tensor, config: Config) -> None:
        row = values.shape[1] * values.dtype.itemsize
        for name, hint, given in (
            ("nvl", config.get_nvl_buffer_size_hint, self.num_nvl_bytes),
            ("rdma", config.get_rdma_buffer_size_hint, self.num_rdma_bytes),
        ):
            needed = hint(row, self.exchange.size)
            host_assert(needed <= given, f"{needed} <= num_{name}_bytes={given}")


def _numbers(goes: Tensor) -> Tensor:
    """goes [n, k] bool -> int32: the number of each row among those of its column, else -1."""
    return torch.where(goes, goes.cumsum(0) - 1, -1).to(torch.int32)


def _zero() -> Tensor:
    return torch.zeros(1, dtype=torch.int32)
