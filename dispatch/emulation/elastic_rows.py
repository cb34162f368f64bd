"""Rows of the second API on their way there and back, as messages between CPU ranks.

Knows: a row once per destination rank, where it lies on arrival, sums at home. Knows nothing of
events: what a call receives is filled in when `fill` is called, until then there is poison. All
ranks share one NVLink domain here (direct mode). Rows of one source come in no particular order, as
on GPUs: here backwards, so that who relies on an order will notice; `deterministic` sorts them.

Shape letters: T tokens, D hidden, K top-k, P scales a row, E experts of all ranks, L local experts,
R ranks, M max tokens a rank, N received rows (each once), Z expanded rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dispatch import deepep_v2_limits as limits
from dispatch.deepep_v2_limits import Api
from dispatch.emulation.elastic_checks import DispatchCall, check_combine, check_dispatch
from dispatch.emulation.elastic_handle import EPHandle, poisoned
from dispatch.emulation.elastic_messages import Operation, last_pick, split
from dispatch.emulation.errors import BufferRuleError
from dispatch.emulation.exchange import Exchange, Message
from dispatch.mib import round_up


@dataclass
class Arrival:
    """What a dispatch gives. fill: makes the poison results; once."""

    x: Tensor  # [N or Z, D]
    scales: Tensor | None  # [.., P]
    picks: Tensor | None  # [N, K]; None where expanded
    weights: Tensor | None  # [N, K] or [Z]
    handle: EPHandle
    fill: Callable[[], None] = lambda: None


class Elastic:
    """handle_type: EPHandle of the version. multiple_reduction: a rank adds up a token's rows
    before it returns them."""

    def __init__(
        self,
        exchange: Exchange,
        api: Api,
        num_bytes: int,
        handle_type: type[EPHandle],
        multiple_reduction: bool,
        deterministic: bool,
    ) -> None:
        self.exchange, self.api, self.num_bytes = exchange, api, num_bytes
        self.handle_type = handle_type
        self.multiple_reduction, self.deterministic = multiple_reduction, deterministic
        self._last: Operation | None = None
        self._deferred = False  # results still lie in the buffer

    # -- there -----------------------------------------------------------------------------

    def dispatch(self, call: DispatchCall) -> Arrival:
        return self.launch(call)()

    def launch(self, call: DispatchCall) -> Callable[[], Arrival]:
        """Send; what is returned makes room for what arrives, which with CPU sync waits for how
        much that is."""
        check_dispatch(self.api, self.exchange.size, self.num_bytes, call)
        self._may_begin()
        cached = call.cached
        if cached is not None:
            self._own_handle(cached)
        size, local = self.exchange.size, call.num_experts // self.exchange.size
        header = [call.max_tokens, call.num_experts, *call.x.shape[1:], call.topk_idx.shape[1]]
        operation = Operation(self.exchange, 1 + len(header) + local, "dispatch")
        self._last = operation
        owner = call.topk_idx.div(local, rounding_mode="floor")  # -1 stays below 0
        slot_idx = torch.full(call.topk_idx.shape, -1, dtype=torch.int32)
        parts = [call.x.view(torch.uint8)]
        if call.scales is not None:
            parts.append(call.scales.contiguous().view(torch.uint8))
        parts.append(call.topk_idx.to(torch.int32).view(torch.uint8))
        if call.topk_weights is not None:
            parts.append(call.topk_weights.view(torch.uint8))
        numbers = self.exchange.rank * call.max_tokens + torch.arange(call.x.shape[0])
        parts.append(numbers.to(torch.int32)[:, None].view(torch.uint8))
        for rank in range(size):
            here = owner == rank
            rows = here.any(1).nonzero().squeeze(1).flip(0)
            place = torch.arange(rows.shape[0], dtype=torch.int32)
            last = last_pick(here[rows])
            slot_idx[rows, last] = self.exchange.rank * call.max_tokens + place
            counts = [int((call.topk_idx == rank * local + e).sum()) for e in range(local)]
            body = torch.cat([part[rows] for part in parts], 1)
            said = [rows.shape[0], *header, *counts]
            self.exchange.send(operation.number, rank, Message(said, body.reshape(-1)))
        return lambda: self._arrival(call, operation, header, slot_idx, local)

    def _arrival(
        self,
        call: DispatchCall,
        operation: Operation,
        header: list[int],
        slot_idx: Tensor,
        local: int,
    ) -> Arrival:
        size, top_k, cached = self.exchange.size, call.topk_idx.shape[1], call.cached
        expert_list: list[int] = []
        if cached is not None:
            rows, expanded = cached.num_recv_tokens, cached.num_expanded_tokens
            expert_list = cached.num_recv_tokens_per_expert_list
        elif call.cpu_sync:
            messages = operation.messages()
            rows = sum(message.header[0] for message in messages.values())
            counts = torch.tensor([messages[s].header[-local:] for s in range(size)]).sum(0)
            expert_list = [round_up(n, call.alignment) for n in counts.tolist()]
            expanded = sum(expert_list)
        else:
            rows = size * call.max_tokens
            expanded = limits.expanded_rows(size, call.max_tokens, top_k, local, call.alignment)
        width = expanded if call.expand else rows
        x = poisoned((width, call.x.shape[1]), call.x.dtype)
        scales = None
        if call.scales is not None:
            packs = call.scales.shape[1]
            strides = (1, round_up(width, 4)) if call.column_scales else (packs, 1)
            scales = poisoned((width, packs), call.scales.dtype, strides)
        picks = None if call.expand else poisoned((width, top_k), torch.int64)
        weights = None
        if call.topk_weights is not None:
            weights = poisoned((width,) if call.expand else (width, top_k), torch.float32)
        handle = cached
        if handle is None:
            handle = self.handle_type(
                call.expand,
                call.num_experts,
                call.alignment,
                call.max_tokens,
                call.num_sms,
                call.topk_idx.clone() if call.copy_picks else call.topk_idx,
                rows,
                expanded,
                expert_list,
                poisoned((size,), torch.int32),
                poisoned((local,), torch.int32),
                poisoned((local,), torch.int32),
                poisoned((rows, top_k + 2), torch.int32),
                slot_idx,
                None,
                None,
            )
            handle._maker = self
        arrival = Arrival(x, scales, picks, weights, handle)
        arrival.fill = lambda: self._receive(call, operation, header, arrival)
        return arrival

    def _receive(
        self, call: DispatchCall, operation: Operation, header: list[int], to: Arrival
    ) -> None:
        size, me, top_k = self.exchange.size, self.exchange.rank, call.topk_idx.shape[1]
        handle, local = to.handle, call.num_experts // self.exchange.size
        messages = operation.messages()
        for source, message in messages.items():
            if message.header[1:-local] != header:
                raise BufferRuleError(
                    f"M, E, D, K differ: rank {source} says {message.header[1:-local]}, "
                    f"rank {me} {header}; must be the same on all ranks"
                )
        kinds = [(call.x.dtype, call.x.shape[1])]
        if call.scales is not None:
            kinds.append((call.scales.dtype, call.scales.shape[1]))
        kinds.append((torch.int32, top_k))
        if call.topk_weights is not None:
            kinds.append((torch.float32, top_k))
        kinds.append((torch.int32, 1))
        width = sum(dtype.itemsize * n for dtype, n in kinds)
        body = torch.cat([messages[s].body.view(-1, width) for s in range(size)])
        arrived = split(body, kinds)
        numbers = arrived[-1][:, 0].to(torch.int64)
        if self.deterministic:
            order = numbers.argsort()
            arrived = [part[order] for part in arrived]
            numbers = numbers[order]
        picks = arrived[1 if call.scales is None else 2].to(torch.int64) - me * local
        picks = torch.where((picks >= 0) & (picks < local), picks, -1)
        total = picks.shape[0]
        if call.cached is None:
            sent = torch.tensor([messages[s].header[0] for s in range(size)])
            handle.psum_num_recv_tokens_per_scaleup_rank.copy_(sent.cumsum(0))
            counts = torch.tensor([messages[s].header[-local:] for s in range(size)]).sum(0)
            handle.num_unaligned_recv_tokens_per_expert.copy_(counts)
            aligned = torch.tensor([round_up(n, call.alignment) for n in counts.tolist()])
            ends = aligned.cumsum(0) - aligned + counts if call.expand else aligned.cumsum(0)
            handle.psum_num_recv_tokens_per_expert.copy_(ends)
            if call.stats is not None:
                call.stats.add_(counts)
            meta = handle.recv_src_metadata
            meta[:total, 0] = numbers.to(torch.int32)
            ranks = numbers.div(call.max_tokens, rounding_mode="floor")
            meta[:total, 1] = (ranks * top_k + last_pick(picks >= 0)).to(torch.int32)
            if call.expand:
                meta[:total, 2:] = self._places(handle, picks)
        handle._filled = True
        weights = None if call.topk_weights is None else arrived[-2]
        if not call.expand:
            assert to.picks is not None
            to.x[:total], to.picks[:total] = arrived[0], picks
            if to.scales is not None:
                to.scales[:total] = arrived[1]
            if to.weights is not None and weights is not None:
                to.weights[:total] = weights
            return
        places = handle.recv_src_metadata[:total, 2:]
        rows, ks = (places >= 0).nonzero(as_tuple=True)
        at = places[rows, ks].to(torch.int64)
        if call.zero_padding:
            gaps = self._gaps(handle)
            for part in (to.x, to.scales, to.weights):
                if part is not None:
                    part[gaps] = 0
        to.x[at] = arrived[0][rows]
        if to.scales is not None:
            to.scales[at] = arrived[1][rows]
        if to.weights is not None and weights is not None:
            to.weights[at] = weights[rows, ks]

    @staticmethod
    def _places(handle: EPHandle, picks: Tensor) -> Tensor:
        """picks [N, K] local or -1 -> [N, K] int32: the row of each pair."""
        ends = handle.psum_num_recv_tokens_per_expert
        starts = ends - handle.num_unaligned_recv_tokens_per_expert
        places = torch.full(picks.shape, -1, dtype=torch.int32)
        for expert, start in enumerate(starts.tolist()):
            rows, ks = (picks == expert).nonzero(as_tuple=True)
            places[rows, ks] = start + torch.arange(rows.shape[0], dtype=torch.int32)
        return places

    @staticmethod
    def _gaps(handle: EPHandle) -> Tensor:
        """Rows between the last of an expert and the first of the next."""
        ends = handle.psum_num_recv_tokens_per_expert.tolist()
        gaps = [torch.arange(n, round_up(n, handle.expert_alignment)) for n in ends]
        return torch.cat(gaps)

    # -- back ------------------------------------------------------------------------------

    def combine(
        self, x: Tensor, handle: EPHandle, weights: Tensor | None, biases: list[Tensor]
    ) -> tuple[Tensor, Tensor | None, Callable[[], None]]:
        """-> [T, D] bf16, [T, K] fp32 where there are weights, and what fills them in."""
        self._own_handle(handle)
        picks = handle.topk_idx
        expanded_send = handle.do_expand and not self.multiple_reduction
        check_combine(
            self.api, self.exchange.size, self.num_bytes, self.multiple_reduction, x, handle,
            weights, biases,
        )  # fmt: skip
        if not handle._filled:
            raise BufferRuleError("combine: the dispatch of this handle was not waited for")
        self._may_begin()
        size, top_k, hidden = self.exchange.size, picks.shape[1], x.shape[1]
        operation = Operation(self.exchange, 0, "combine")
        self._last = operation
        total = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
        meta = handle.recv_src_metadata[:total].to(torch.int64)
        back, shares, keys = self._returned(x, handle, meta, weights, expanded_send)
        numbers = keys[:, 0]
        token = torch.stack((numbers % handle.num_max_tokens_per_rank, keys[:, 1]), 1)
        parts = [token.to(torch.int32).view(torch.uint8), back.view(torch.uint8)]
        if shares is not None:
            parts.append(shares.contiguous().view(torch.uint8))
        source = numbers.div(handle.num_max_tokens_per_rank, rounding_mode="floor")
        packed = torch.cat(parts, 1)
        for rank in range(size):
            body = packed[source == rank].reshape(-1)
            self.exchange.send(operation.number, rank, Message([], body))
        out = poisoned((picks.shape[0], hidden), torch.bfloat16)
        out_weights = None
        if weights is not None:
            out_weights = poisoned((picks.shape[0], top_k), torch.float32)
        kinds = [(torch.int32, 2), (torch.bfloat16, hidden)]
        if weights is not None:
            kinds.append((torch.float32, top_k))
        local = handle.num_experts // size

        def fill() -> None:
            messages = operation.messages()
            owner = handle.topk_idx.div(local, rounding_mode="floor")
            home = torch.zeros(out.shape)
            for bias in biases:
                home += bias.to(torch.float32)
            gains = torch.zeros(picks.shape)
            width = sum(dtype.itemsize * n for dtype, n in kinds)
            for rank in range(size):
                arrived = split(messages[rank].body.view(-1, width), kinds)
                tokens, ks = arrived[0].to(torch.int64).unbind(1)
                wanted = (owner == rank).nonzero() if expanded_send else None
                if wanted is None:
                    wanted = (owner == rank).any(1).nonzero()
                found = tokens[:, None] if not expanded_send else torch.stack((tokens, ks), 1)
                if sorted(found.tolist()) != wanted.tolist():
                    raise BufferRuleError(
                        "topk_idx was written to while its handle is in use (do_handle_copy=False)"
                    )
                home.index_add_(0, tokens, arrived[1].to(torch.float32))
                if weights is not None:
                    gains[tokens] += torch.where(owner[tokens] == rank, arrived[2], 0.0)
            out.copy_(home)
            if out_weights is not None:
                out_weights.copy_(gains)

        return out, out_weights, fill

    def _returned(
        self,
        x: Tensor,
        handle: EPHandle,
        meta: Tensor,
        weights: Tensor | None,
        expanded_send: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Rows to send, their weights [.., K], and keys [.., 2]: token among all ranks', pick."""
        none = torch.zeros(meta.shape[0], dtype=torch.int64)
        if not handle.do_expand:
            shares = None if weights is None else weights[: meta.shape[0]]
            return x[: meta.shape[0]], shares, torch.stack((meta[:, 0], none), 1)
        places = meta[:, 2:]
        if expanded_send:
            rows, ks = (places >= 0).nonzero(as_tuple=True)
            return x[places[rows, ks]], None, torch.stack((meta[rows, 0], ks), 1)
        valid = places >= 0
        at = places.clamp(min=0)
        total = torch.zeros(meta.shape[0], x.shape[1])
        for k in range(places.shape[1]):
            total += torch.where(valid[:, k, None], x[at[:, k]].to(torch.float32), 0.0)
        shares = None if weights is None else torch.where(valid, weights[at], 0.0)
        return total.to(torch.bfloat16), shares, torch.stack((meta[:, 0], none), 1)

    # -- rules -----------------------------------------------------------------------------

    def defer(self, epilogue: Callable[[], Any]) -> Callable[[], Any]:
        """The same, and until it is called nothing else may begin: rows lie in the buffer."""
        self._deferred = True

        def run() -> Any:
            self._deferred = False
            return epilogue()

        return run

    def _may_begin(self) -> None:
        if self._deferred:
            raise BufferRuleError(
                "a deferred epilogue was not run: its rows lie in the buffer that this call writes"
            )
        if self._last is not None:
            self._last.messages()  # one stream: what began earlier ends earlier

    def _own_handle(self, handle: EPHandle) -> None:
        if handle._maker is not self:
            raise BufferRuleError("the handle is not one that this buffer made")
