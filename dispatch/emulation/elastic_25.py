"""`deep_ep` 2.5 on CPUs: `EPBuffer`, its handle and its events, as a module of that library.

Knows: what differs from 2.1: epilogues may be deferred (an event's wait then returns the results),
picks are held by reference, no 2.1 names. Members for other uses than expert parallelism are there
by name only. Documented in `signatures_elastic.py`; tested against it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dispatch.deepep_v2_limits import ALIGNMENT, EP
from dispatch.emulation.elastic_base import (
    Bias,
    ElasticCommon,
    Rows,
    begin_after,
    finish,
    rows_of,
)
from dispatch.emulation.elastic_handle import EPHandle25 as EPHandle
from dispatch.emulation.errors import host_assert, python_assert
from dispatch.emulation.events import EventHandle
from dispatch.emulation.events import EventOverlap as _EventOverlap

__version__ = "2.5.0+emulated"
topk_idx_t = torch.int64

_ELSEWHERE = "the emulation has dispatch and combine only"


class EventOverlap(_EventOverlap):
    """As in 2.1, but a wait returns what the hook returns."""

    def current_stream_wait(self, release_handle: bool = False) -> Any:
        python_assert(self.event is not None, "the call was not asynchronous: it has no event")
        assert self.event is not None
        self.event.current_stream_wait()
        hook, self._after_wait = self._after_wait, None
        result = None if hook is None else hook()
        if release_handle:
            self.event = None
        return result

    def wait(self) -> Any:
        return self.current_stream_wait()

    def register_hook_after_wait(self, hook_after_wait: Callable[[], Any]) -> None:
        super().register_hook_after_wait(hook_after_wait)


class EPBuffer(ElasticCommon):
    """All ranks of the group count as one NVLink domain."""

    api = EP
    handle_type = EPHandle

    def __init__(
        self,
        group: Any,
        num_bytes: int | None = None,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        lb_allocation_plan_or_num_bytes: int = 0,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int | None = None,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        extra = lb_allocation_plan_or_num_bytes
        python_assert(isinstance(extra, int) and extra >= 0, "bytes for load balance, 0 or more")
        host_assert(extra % ALIGNMENT == 0, f"bytes for load balance divide by {ALIGNMENT}")
        self.prefer_overlap_with_compute, self.num_lb_bytes = prefer_overlap_with_compute, extra
        self._open_buffer(
            group,
            num_bytes,
            num_max_tokens_per_rank,
            hidden,
            num_topk,
            use_fp8_dispatch,
            deterministic,
            allow_hybrid_mode,
            allow_multiple_reduction,
            num_allocated_qps,
            num_gpu_timeout_secs,
            explicitly_destroy,
        )

    def destroy(self) -> None:
        self._destroy()

    @staticmethod
    def get_buffer_size_hint(
        group: Any,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        return EPBuffer._size_hint(
            group,
            num_max_tokens_per_rank,
            hidden,
            num_topk,
            use_fp8_dispatch,
            allow_multiple_reduction,
        )

    @staticmethod
    def capture() -> EventHandle:
        return EventHandle()

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 0,
        sm_write_gbs: float = 0,
    ) -> int:
        return self._sms(num_experts, num_topk, num_scaleout_topk)

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        return self._qps(num_sms)

    def dispatch(
        self,
        x: Rows,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = False,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
        defer_epilogue: bool = False,
    ) -> Any:
        """(rows, picks, weights, handle, event); with defer_epilogue the event alone, whose wait
        returns the first four."""
        python_assert(not do_handle_copy, "do_handle_copy must be False")
        call = self._resolved(
            x,
            topk_idx,
            topk_weights,
            cumulative_local_expert_recv_stats,
            num_experts,
            num_max_tokens_per_rank,
            expert_alignment,
            _even(num_sms),
            num_qps,
            handle,
            False,
            do_cpu_sync,
            do_expand,
            do_zero_padding,
            use_tma_aligned_col_major_sf,
        )
        begin_after(previous_event, allocate_on_comm_stream)
        if not defer_epilogue:
            arrival = self._elastic.dispatch(call)
            event = EventOverlap(finish(async_with_compute_stream, arrival.fill))
            return rows_of(arrival), arrival.picks, arrival.weights, arrival.handle, event
        host_assert(async_with_compute_stream, "defer_epilogue needs async_with_compute_stream")
        arrive = self._elastic.launch(call)

        def epilogue() -> tuple[Rows, Tensor | None, Tensor | None, EPHandle]:
            arrival = arrive()
            arrival.fill()
            made = arrival.handle
            assert isinstance(made, EPHandle)
            return rows_of(arrival), arrival.picks, arrival.weights, made

        return self._later(epilogue)

    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None = None,
        bias: Bias = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        defer_epilogue: bool = False,
    ) -> Any:
        """(rows, weights, event); with defer_epilogue the event alone, whose wait returns the first
        two."""
        host_assert(
            not defer_epilogue or async_with_compute_stream,
            "defer_epilogue needs async_with_compute_stream",
        )
        begin_after(previous_event, allocate_on_comm_stream)
        sms = _even(num_sms)
        out, weights, fill = self._combined(x, handle, topk_weights, bias, sms, num_qps)
        if not defer_epilogue:
            return out, weights, EventOverlap(finish(async_with_compute_stream, fill))

        def epilogue() -> tuple[Tensor, Tensor | None]:
            fill()
            return out, weights

        return self._later(epilogue)

    def _later(self, epilogue: Callable[[], Any]) -> EventOverlap:
        event = EventOverlap(EventHandle())
        event.register_hook_after_wait(self._elastic.defer(epilogue))
        return event

    # -- by reference in the library: functions of its `comm` ------------------------------

    def barrier(
        self,
        wait_comm_stream: bool = True,
        with_cpu_sync: bool = False,
        sequential: bool = True,
        context_idx: int | None = None,
    ) -> None:
        self._meet()

    def get_comm_stream(self) -> Any:
        raise NotImplementedError("a CPU has no streams")

    def get_physical_domain_size(self) -> tuple[int, int]:
        return super().get_physical_domain_size()

    def get_logical_domain_size(self, allow_hybrid_mode: bool | None = None) -> tuple[int, int]:
        return super().get_logical_domain_size()

    # -- not expert parallelism ------------------------------------------------------------

    def lb_get_theoretical_num_sms(self) -> int:
        raise NotImplementedError(_ELSEWHERE)

    def lb_prefetch_weights(
        self,
        redundant_expert_weights: Any,
        expert_weights: Any,
        redundancy_mapping: Tensor,
        num_sms: int = 0,
        previous_event: EventHandle | None = None,
    ) -> EventOverlap:
        raise NotImplementedError(_ELSEWHERE)

    def lb_reduce_grads(
        self,
        redundant_expert_grads: Tensor,
        expert_grads: Tensor,
        redundancy_mapping: Tensor,
        num_sms: int = 0,
        previous_event: EventHandle | None = None,
    ) -> EventOverlap:
        raise NotImplementedError(_ELSEWHERE)


def _even(num_sms: int) -> int:
    return num_sms + num_sms % 2


__all__ = ["EPBuffer", "EPHandle", "EventHandle", "EventOverlap", "topk_idx_t"]
