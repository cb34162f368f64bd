"""What both versions of the second API's buffer do in their Python, before their C++ is called.

Knows: defaults, cached handles, events. The rows are elastic_rows.py's, the parameter lists those
of elastic.py (2.1) and elastic_25.py (2.5).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from dispatch import deepep_v2_limits as limits
from dispatch.deepep_v2_limits import Api
from dispatch.emulation.elastic_checks import (
    DEVICE_SMS,
    DispatchCall,
    check_sms,
    check_torch_deterministic,
)
from dispatch.emulation.elastic_handle import EPHandle
from dispatch.emulation.elastic_rows import Arrival, Elastic
from dispatch.emulation.errors import host_assert, python_assert
from dispatch.emulation.events import EventHandle
from dispatch.emulation.exchange import Exchange

Rows = Tensor | tuple[Tensor, Tensor]
Bias = Tensor | tuple[Tensor, Tensor] | None
_THEORETICAL_SMS = 24  # the library models bandwidths, which a CPU has not


class ElasticCommon:
    """group: of CPU tensors, where the library wants one of NCCL."""

    api: Api
    handle_type: type[EPHandle]

    def _open_buffer(
        self,
        group: Any,
        num_bytes: int | None,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int,
        use_fp8_dispatch: bool,
        deterministic: bool,
        allow_hybrid_mode: bool,
        allow_multiple_reduction: bool,
        num_allocated_qps: int,
        num_gpu_timeout_secs: int,
        explicitly_destroy: bool,
    ) -> None:
        exchange = Exchange(group, None, float(num_gpu_timeout_secs))
        self.group = group
        self.rank_idx, self.num_ranks = exchange.rank, exchange.size
        self.allow_hybrid_mode = allow_hybrid_mode
        self.allow_multiple_reduction = allow_multiple_reduction
        self.deterministic = deterministic
        if num_bytes is None:
            num_bytes = self.get_buffer_size_hint(
                group,
                num_max_tokens_per_rank,
                hidden,
                num_topk,
                use_fp8_dispatch,
                allow_hybrid_mode,
                allow_multiple_reduction,
            )
        aligned = num_bytes > 0 and num_bytes % limits.ALIGNMENT == 0
        host_assert(aligned, f"num_bytes={num_bytes} is a multiple of {limits.ALIGNMENT}, above 0")
        self.num_bytes = num_bytes
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.num_allocated_qps = num_allocated_qps or (129 if allow_hybrid_mode else 17)
        self.explicitly_destroy = explicitly_destroy
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        self.scaleout_rank_idx, self.scaleup_rank_idx = 0, self.rank_idx
        self.num_rdma_ranks, self.num_nvlink_ranks = self.get_physical_domain_size()
        self._exchange: Exchange | None = exchange
        self._elastic = Elastic(
            exchange,
            self.api,
            num_bytes,
            self.handle_type,
            allow_multiple_reduction,
            deterministic,
        )
        self._meet()

    @classmethod
    def _size_hint(
        cls,
        group: Any,
        max_tokens: int,
        hidden: int,
        num_topk: int,
        fp8: bool,
        multiple_reduction: bool,
    ) -> int:
        host_assert(max_tokens > 0 and hidden > 0, f"M={max_tokens} > 0 and D={hidden} > 0")
        host_assert(-(-hidden // 32) * 4 <= hidden, f"scales of D={hidden} are no more than values")
        size = int(group.size())
        return limits.buffer_bytes(
            cls.api,
            max_tokens=max_tokens,
            hidden=hidden,
            top_k=num_topk,
            fp8=fp8,
            ranks=size,
            domain=size,
            multiple_reduction=multiple_reduction,
        )

    def get_buffer_size_hint(self, *arguments: Any) -> int:
        raise NotImplementedError  # each version's own

    def get_physical_domain_size(self) -> tuple[int, int]:
        return 1, self.num_ranks

    def get_logical_domain_size(self) -> tuple[int, int]:
        return 1, self.num_ranks

    def _destroy(self) -> None:
        python_assert(self.explicitly_destroy, "`explicitly_destroy` flag must be set")
        if self._exchange is not None:
            self._exchange.meet(self._exchange.begin(), list(range(self.num_ranks)))
            self._exchange.close()
        self._exchange = None

    def _meet(self) -> None:
        host_assert(self._exchange is not None, "the buffer is not destroyed")
        assert self._exchange is not None
        met = self._exchange.meet(self._exchange.begin(), list(range(self.num_ranks)))
        missing = [rank for rank, message in met.items() if message is None]
        if missing:
            raise RuntimeError(f"DeepEP error: ranks {missing} did not come to the barrier")

    def _sms(self, num_experts: int, num_topk: int, num_scaleout_topk: int) -> int:
        python_assert(num_scaleout_topk == 0, "num_scaleout_topk == 0")
        python_assert(num_experts % self.num_ranks == 0, "num_experts % num_ranks == 0")
        return min(_THEORETICAL_SMS, DEVICE_SMS)

    def _qps(self, num_sms: int) -> int:
        wanted = num_sms * 16 + 1 if self.allow_hybrid_mode else min(num_sms, 9)
        return min(wanted, self.num_allocated_qps)

    def _resolved(
        self,
        x: Rows,
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        stats: Tensor | None,
        num_experts: int | None,
        max_tokens: int | None,
        alignment: int | None,
        num_sms: int,
        num_qps: int,
        handle: EPHandle | None,
        copy_picks: bool,
        cpu_sync: bool | None,
        expand: bool,
        zero_padding: bool,
        column_scales: bool,
    ) -> DispatchCall:
        """Arguments of a dispatch as the library's Python completes them."""
        host_assert(self._exchange is not None, "the buffer is not destroyed")
        check_torch_deterministic()
        values, scales = x if isinstance(x, tuple) else (x, None)
        if handle is not None:
            python_assert(topk_idx is None, "topk_idx is None where a handle brings its picks")
            python_assert(not cpu_sync, "Cannot do CPU sync with cached handle")
            topk_idx, cpu_sync = handle.topk_idx, False
            num_experts = handle.num_experts if num_experts is None else num_experts
            alignment = handle.expert_alignment if alignment is None else alignment
            max_tokens = handle.num_max_tokens_per_rank if max_tokens is None else max_tokens
            given = (num_experts, alignment, max_tokens)
            kept = (handle.num_experts, handle.expert_alignment, handle.num_max_tokens_per_rank)
            python_assert(given == kept, f"(E, alignment, M) are the handle's {kept}, not {given}")
            # The library does not look: rows would land by the other layout's numbers.
            host_assert(
                expand == handle.do_expand, f"do_expand={handle.do_expand}, as the handle's"
            )
        python_assert(topk_idx is not None, "topk_idx or a handle must be given")
        python_assert(num_experts is not None, "num_experts must be given")
        assert topk_idx is not None and num_experts is not None
        top_k = topk_idx.shape[-1]
        sms = num_sms or self._sms(num_experts, top_k, 0)
        check_sms(sms)
        qps = num_qps or self._qps(sms)
        python_assert(qps <= self.num_allocated_qps, "Allocated QPs are not enough")
        return DispatchCall(
            values,
            scales,
            topk_idx,
            topk_weights,
            stats,
            self.num_max_tokens_per_rank if max_tokens is None else max_tokens,
            num_experts,
            1 if alignment is None else alignment,
            sms,
            handle,
            copy_picks and handle is None,
            True if cpu_sync is None else cpu_sync,
            expand,
            zero_padding,
            column_scales,
        )

    def _combined(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None,
        bias: Bias,
        num_sms: int,
        num_qps: int,
    ) -> tuple[Tensor, Tensor | None, Callable[[], None]]:
        host_assert(self._exchange is not None, "the buffer is not destroyed")
        check_torch_deterministic()
        sms = num_sms or handle.num_sms
        check_sms(sms)
        qps = num_qps or self._qps(sms)
        python_assert(qps <= self.num_allocated_qps, "Allocated QPs are not enough")
        biases = [] if bias is None else [bias] if isinstance(bias, Tensor) else list(bias)
        if isinstance(bias, tuple):
            python_assert(len(bias) == 2, f"bias: a tensor or two of them, not {len(bias)}")
        return self._elastic.combine(x, handle, topk_weights, biases)


def begin_after(previous: EventHandle | None, allocate_on_comm_stream: bool) -> None:
    if previous is not None:
        host_assert(allocate_on_comm_stream, "previous_event needs allocate_on_comm_stream")
        previous.current_stream_wait()


def finish(asynchronous: bool, fill: Callable[[], None]) -> EventHandle | None:
    """The event of an asynchronous call; else everything is there on return."""
    if asynchronous:
        return EventHandle(fill)
    fill()
    return None


def rows_of(arrival: Arrival) -> Rows:
    return arrival.x if arrival.scales is None else (arrival.x, arrival.scales)
