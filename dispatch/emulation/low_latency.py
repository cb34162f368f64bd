"""Low-latency dispatch and combine of `Buffer`, over messages between CPU ranks.

Knows: slots of fixed size for each local expert, what of them is valid, the rule of two buffers,
masked ranks. Results are poisoned (NaN, -1) until they are received, and stay so beyond what is
valid. The order of rows within an expert changes from call to call, as on a GPU, where it is
whatever order rows happen to arrive in.

Shape letters: T tokens, D hidden, K top-k, E experts of all ranks, L local experts, R ranks,
M max tokens a rank.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dispatch import deepep
from dispatch.emulation.checks import check_picks, check_range, check_wait_stats, check_x
from dispatch.emulation.errors import BufferRuleError, host_assert
from dispatch.emulation.exchange import Exchange, Message, timed_out
from dispatch.emulation.quantise import META, message_rows, through_logfmt
from dispatch.fp8 import BLOCK


@dataclass
class _Result:
    """A dispatch whose combine has not begun. It counts while anybody holds its handle."""

    alive: weakref.ref[Tensor]
    received: bool = False
    combined: bool = False


class LowLatency:
    """State of one buffer: which half is next, what is in flight, who is masked."""

    def __init__(
        self, exchange: Exchange, num_rdma_bytes: int, num_qps: int, enable_shrink: bool
    ) -> None:
        self.exchange = exchange
        self.num_rdma_bytes = num_rdma_bytes
        self.enable_shrink = enable_shrink
        self.dirty = False  # normal mode has used the buffer
        self.masked = [False] * exchange.size
        self._num_qps = num_qps
        self._results: dict[int, _Result] = {}  # by id of src_info
        self._combines_in_flight = 0
        self._not_combined = 0  # dispatches, whether or not anybody still holds their handles
        self._zero_copy: Tensor | None = None

    # -- there -----------------------------------------------------------------------------

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        max_tokens: int,
        num_experts: int,
        stats: Tensor | None,
        wait_stats: Tensor | None,
        use_fp8: bool,
        round_scale: bool,
        use_ue8m0: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor, Callable[[], None]]:
        """-> x [L, R*M, D], scales, counts [L], src_info [L, R*M], layout_range [L, R], receive."""
        size = self.exchange.size
        check_x(x, 2)
        check_picks(topk_idx)
        host_assert(x.shape[0] == topk_idx.shape[0], f"x {list(x.shape)} and topk_idx agree in T")
        host_assert(x.shape[0] <= max_tokens, f"T={x.shape[0]} <= M={max_tokens}")
        host_assert(num_experts % size == 0, f"E={num_experts} divides by R={size}")
        local, hidden = num_experts // size, x.shape[1]
        if stats is not None:
            ok = stats.dtype == torch.int32 and stats.shape == (local,) and stats.is_contiguous()
            host_assert(ok, f"cumulative_local_expert_recv_stats is int32 [{local}]")
        check_wait_stats(wait_stats, size)
        self._check_layout(max_tokens, hidden, num_experts)
        host_assert((size * max_tokens) % 4 == 0, f"(R*M) % 4 == 0, R={size}, M={max_tokens}")
        if use_fp8:
            host_assert(hidden % 512 == 0, f"D={hidden} divides by 512 for FP8")
            host_assert(round_scale or not use_ue8m0, "use_ue8m0 needs round_scale")
        self._check_kernels(hidden, topk_idx.shape[1], max_tokens)
        host_assert(local <= self._num_qps, f"num_qps_per_rank={self._num_qps} covers L={local}")
        check_range(topk_idx, num_experts)
        for column in range(1, topk_idx.shape[1]):
            before, picked = topk_idx[:, :column], topk_idx[:, column, None]
            twice = (before == picked) & (picked >= 0)
            if bool(twice.any()):
                raise BufferRuleError("topk_idx: a token picks an expert twice; slots overflow")
        self._check_clean()
        self._check_rules("dispatch")

        rows = message_rows(x, use_fp8, round_scale, use_ue8m0)
        operation = self.exchange.begin()
        turn = operation // 2  # changes the order of rows; a layer has two operations
        for rank in self._others():
            counts, tokens = [], []
            for expert in range(rank * local, (rank + 1) * local):
                picked = (topk_idx == expert).nonzero()[:, 0]
                counts.append(len(picked))
                tokens.append(picked.flip(0) if turn % 2 else picked)
            body = rows[torch.cat(tokens)].reshape(-1)
            self.exchange.send(operation, rank, Message(counts, body))

        width = size * max_tokens
        recv_x = torch.full((local, width, hidden), torch.nan, dtype=torch.bfloat16)
        scales = None
        if use_fp8:
            recv_x = recv_x.to(torch.float8_e4m3fn)
            scales = torch.full((local, hidden // BLOCK, width), torch.nan)
            if use_ue8m0:
                scales = torch.full((local, hidden // 512, width), -1, dtype=torch.int32)
            scales = scales.transpose(1, 2)
        count = torch.full((local,), -1, dtype=torch.int32)
        src_info = torch.full((local, width), -1, dtype=torch.int32)
        layout_range = torch.full((local, size), -1, dtype=torch.int64)
        self._not_combined += 1
        result = _Result(weakref.ref(src_info))
        self._results[id(src_info)] = result

        def receive() -> None:
            start = time.perf_counter()
            messages = self._receive(operation, local, "dispatch")
            _note_wait(wait_stats, messages, start)
            count.zero_()
            layout_range.zero_()
            for step in range(size):
                source = (turn + step) % size
                message = messages.get(source)
                if message is None:
                    continue
                for expert, arrived in enumerate(_rows_by_expert(message, rows.shape[1])):
                    first, n = int(count[expert]), arrived.shape[0]
                    layout_range[expert, source] = (first << 32) | n
                    at = slice(first, first + n)
                    src_info[expert, at] = arrived[:, :4].contiguous().view(torch.int32)[:, 0]
                    values = arrived[:, META : META + hidden * recv_x.dtype.itemsize]
                    recv_x[expert, at].view(torch.uint8).copy_(values)
                    if scales is not None:
                        tail = arrived[:, META + hidden :].contiguous()
                        scales[expert, at] = tail.view(scales.dtype)
                    count[expert] += n
            if stats is not None:
                stats.add_(count)
            result.received = True

        return recv_x, scales, count, src_info, layout_range, receive

    # -- and back --------------------------------------------------------------------------

    def combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: tuple[Any, ...],
        use_logfmt: bool,
        zero_copy: bool,
        out: Tensor | None,
        wait_stats: Tensor | None,
    ) -> tuple[Tensor, Callable[[], None]]:
        """-> combined [T, D] bf16, receive."""
        size = self.exchange.size
        src_info: Tensor = handle[0]
        _, layout_range, max_tokens, hidden, num_experts = handle
        local = num_experts // size
        check_x(x, 3)
        wanted = (local, size * max_tokens, hidden)
        host_assert(x.shape == wanted, f"x {list(x.shape)} is [L, R*M, D] = {list(wanted)}")
        check_picks(topk_idx)
        host_assert(
            topk_weights.shape == topk_idx.shape
            and topk_weights.dtype == torch.float32
            and topk_weights.is_contiguous(),
            f"topk_weights is float32 {list(topk_idx.shape)}, contiguous",
        )
        tokens = topk_idx.shape[0]
        host_assert(tokens <= max_tokens, f"T={tokens} <= M={max_tokens}")
        check_wait_stats(wait_stats, size)
        host_assert(not (zero_copy and use_logfmt), "zero_copy and use_logfmt exclude each other")
        self._check_layout(max_tokens, hidden, num_experts)
        if out is not None:
            ok = out.shape == (tokens, hidden) and out.dtype == torch.bfloat16
            host_assert(ok and out.is_contiguous(), f"out is bfloat16 [{tokens}, {hidden}]")
        self._check_kernels(hidden, topk_idx.shape[1], max_tokens)
        check_range(topk_idx, num_experts)
        self._check_clean()
        result = self._results.get(id(src_info))
        if result is None or id(result.alive()) != id(src_info):
            raise BufferRuleError("handle: not one that this buffer's low_latency_dispatch gave")
        if not result.received:
            raise BufferRuleError("handle: its dispatch has not been received (hook not called)")
        self._check_rules("combine", consumes=result)
        outputs = self._lent() if zero_copy else x
        self._zero_copy = None

        operation = self.exchange.begin()
        for rank in self._others():
            counts, parts = [], []
            for expert in range(local):
                packed = int(layout_range[expert, rank])
                first, n = packed >> 32, packed & 0xFFFFFFFF
                counts.append(n)
                rows = outputs[expert, first : first + n].contiguous()
                rows = through_logfmt(rows) if use_logfmt else rows
                numbers = src_info[expert, first : first + n].contiguous()[:, None]
                parts.append(torch.cat((numbers.view(torch.uint8), rows.view(torch.uint8)), 1))
            self.exchange.send(operation, rank, Message(counts, torch.cat(parts).reshape(-1)))
        result.combined = True
        self._not_combined -= 1
        self._combines_in_flight += 1
        poison = torch.full((tokens, hidden), torch.nan, dtype=torch.bfloat16)
        combined = poison if out is None else out.copy_(poison)
        picks, weights = topk_idx.clone(), topk_weights.clone()

        def receive() -> None:
            start = time.perf_counter()
            messages = self._receive(operation, local, "combine")
            _note_wait(wait_stats, messages, start)
            combined.copy_(self._weighted_sum(messages, picks, weights, num_experts, hidden))
            self._combines_in_flight -= 1

        return combined, receive

    def _weighted_sum(
        self,
        messages: dict[int, Message | None],
        picks: Tensor,
        weights: Tensor,
        num_experts: int,
        hidden: int,
    ) -> Tensor:
        """fp32 [T, D], summed in the order of picks. Picks of masked ranks add nothing."""
        local = num_experts // self.exchange.size
        tokens = picks.shape[0]
        table = torch.full((num_experts, tokens), -1, dtype=torch.int64)
        found, base = [torch.zeros(0, 4 + 2 * hidden, dtype=torch.uint8)], 0
        for source, message in messages.items():
            if message is None:
                continue
            for expert, arrived in enumerate(_rows_by_expert(message, 4 + 2 * hidden)):
                numbers = arrived[:, :4].contiguous().view(torch.int32)[:, 0].to(torch.int64)
                at = torch.arange(base, base + len(numbers))
                table[source * local + expert, numbers] = at
                found.append(arrived)
                base += len(numbers)
        rows = torch.cat(found)[:, 4:].contiguous().view(torch.bfloat16)
        masked = torch.tensor(self.masked).repeat_interleave(local)
        total = torch.zeros(tokens, hidden)
        for k in range(picks.shape[1]):
            wanted = picks[:, k]
            valid = (wanted >= 0) & ~masked[wanted.clamp(min=0)]
            t = valid.nonzero().squeeze(1)
            at = table[wanted[t], t]
            if bool((at < 0).any()):
                raise BufferRuleError(
                    "combine: topk_idx names an expert that was not dispatched to"
                )
            total[t] += rows[at].to(torch.float32) * weights[t, k : k + 1]
        return total

    @property
    def unfinished(self) -> bool:
        """Is there a layer that has not come home? Its peers may be waiting."""
        return bool(self._not_combined or self._combines_in_flight)

    def interrupt(self) -> None:
        """Normal mode is about to use the buffer, which afterwards must be cleaned."""
        self._forget()
        lost = [r for r in self._results.values() if not r.received]
        if lost or self._combines_in_flight:
            raise BufferRuleError(
                "normal mode while a low-latency result is in flight: call its hook first"
            )
        self.dirty = True

    # -- the rest --------------------------------------------------------------------------

    def next_combine_buffer(self, handle: tuple[Any, ...]) -> Tensor:
        """bf16 [L, R*M, D], strided as rows lie among their messages; poisoned."""
        _, _, max_tokens, hidden, num_experts = handle
        self._check_layout(max_tokens, hidden, num_experts)
        local, width = num_experts // self.exchange.size, self.exchange.size * max_tokens
        stride = hidden + hidden // 64  # a message: the row and D / 32 bytes for its other format
        storage = torch.full((local * width * stride,), torch.nan, dtype=torch.bfloat16)
        self._zero_copy = storage.as_strided((local, width, hidden), (width * stride, stride, 1))
        return self._zero_copy

    def _lent(self) -> Tensor:
        if self._zero_copy is None:
            raise BufferRuleError("zero_copy: get_next_low_latency_combine_buffer comes first")
        return self._zero_copy

    def clean(self, max_tokens: int, hidden: int, num_experts: int) -> None:
        self._check_layout(max_tokens, hidden, num_experts)
        operation = self.exchange.begin()
        met = self.exchange.meet(operation, self._others())
        self._mask_missing(met, "clean")
        self.dirty = False

    def set_mask(self, rank: int, masked: bool) -> None:
        host_assert(self.enable_shrink, "masks need enable_shrink=True")
        host_assert(0 <= rank < self.exchange.size, f"rank {rank} in [0, {self.exchange.size})")
        self.masked[rank] = masked

    def query_mask(self, status: Tensor) -> None:
        host_assert(self.enable_shrink, "masks need enable_shrink=True")
        ok = status.dtype == torch.int32 and status.shape == (self.exchange.size,)
        host_assert(ok, f"mask_status is int32 [{self.exchange.size}]")
        status.copy_(torch.tensor(self.masked))

    def clean_mask(self) -> None:
        host_assert(self.enable_shrink, "masks need enable_shrink=True")
        self.masked = [False] * self.exchange.size

    # -- parts -----------------------------------------------------------------------------

    def _others(self) -> list[int]:
        """Ranks that are not masked, this one among them."""
        return [r for r in range(self.exchange.size) if not self.masked[r]]

    def _receive(self, operation: int, header: int, what: str) -> dict[int, Message | None]:
        messages = self.exchange.receive(operation, self._others(), header)
        self._mask_missing(messages, what)
        return messages

    def _mask_missing(self, messages: dict[int, Message | None], what: str) -> None:
        for source, message in messages.items():
            if message is None:
                if not self.enable_shrink:
                    raise timed_out(source, what)
                self.masked[source] = True

    def _check_layout(self, max_tokens: int, hidden: int, num_experts: int) -> None:
        needed = deepep.ll_buffer_bytes(max_tokens, hidden, num_experts)
        host_assert(
            needed <= self.num_rdma_bytes, f"{needed} bytes <= num_rdma_bytes={self.num_rdma_bytes}"
        )

    def _check_kernels(self, hidden: int, top_k: int, max_tokens: int) -> None:
        """What the kernels were compiled for."""
        host_assert(
            hidden in deepep.LL_HIDDEN_SIZES, f"D={hidden} is one of {deepep.LL_HIDDEN_SIZES}"
        )
        host_assert(top_k <= deepep.LL_MAX_TOP_K, f"K={top_k} <= {deepep.LL_MAX_TOP_K}")
        if max_tokens > deepep.LL_MAX_TOKENS:
            raise BufferRuleError(f"M={max_tokens}: counts are wrong above {deepep.LL_MAX_TOKENS}")

    def _check_clean(self) -> None:
        if self.dirty:
            raise BufferRuleError("after normal mode clean_low_latency_buffer must come first")

    def _forget(self) -> None:
        """Results that nobody holds any more."""
        self._results = {k: r for k, r in self._results.items() if r.alive() is not None}

    def _check_rules(self, call: str, consumes: _Result | None = None) -> None:
        """Two buffers alternate, and what one call receives another's send would wipe."""
        self._forget()
        held = [r for r in self._results.values() if not r.combined and r is not consumes]
        if call == "dispatch" and self._combines_in_flight:
            raise BufferRuleError("dispatch while a combine is in flight: call its hook first")
        if call == "combine" and any(not r.received for r in held):
            raise BufferRuleError("combine while a dispatch is in flight: call its hook first")
        if len(held) + self._combines_in_flight >= 2:
            raise BufferRuleError(
                f"{call}: two low-latency results are outstanding; there are only two buffers"
            )


def _rows_by_expert(message: Message, row_bytes: int) -> tuple[Tensor, ...]:
    """uint8 [n, row_bytes] for each local expert."""
    return torch.split(message.body.view(-1, row_bytes), message.header)


def _note_wait(stats: Tensor | None, messages: dict[int, Message | None], start: float) -> None:
    """Add the microseconds waited; all sources are waited for together."""
    if stats is not None:
        waited = int(1e6 * (time.perf_counter() - start))
        for source in messages:
            stats[source] += waited
