"""`ElasticBuffer`, the second API (2.0, 2.1): names, parameters, defaults and limits, on a CPU.

Knows: the parameter lists. What they mean is elastic_base.py's. Members for other uses than expert
parallelism are there by name only. Documented in `signatures_elastic.py`; tested against it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dispatch.deepep_v2_limits import ALIGNMENT, ELASTIC
from dispatch.emulation.elastic_base import (
    Bias,
    ElasticCommon,
    Rows,
    begin_after,
    finish,
    rows_of,
)
from dispatch.emulation.elastic_handle import EPHandle
from dispatch.emulation.errors import host_assert, python_assert
from dispatch.emulation.events import EventHandle, EventOverlap

_ELSEWHERE = "the emulation has dispatch and combine only"


class ElasticBuffer(ElasticCommon):
    """All ranks of the group count as one NVLink domain."""

    api = ELASTIC
    handle_type = EPHandle

    def __init__(
        self,
        group: Any,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        if num_cpu_bytes:
            python_assert(num_bytes is not None, "num_cpu_bytes needs num_bytes")
            host_assert(num_cpu_bytes % ALIGNMENT == 0, f"num_cpu_bytes is one of {ALIGNMENT}")
        self.prefer_overlap_with_compute = prefer_overlap_with_compute
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
        return ElasticBuffer._size_hint(
            group,
            num_max_tokens_per_rank,
            hidden,
            num_topk,
            use_fp8_dispatch,
            allow_multiple_reduction,
        )

    def barrier(
        self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True
    ) -> None:
        self._meet()

    @staticmethod
    def capture() -> EventHandle:
        return EventHandle()

    def get_comm_stream(self) -> Any:
        raise NotImplementedError("a CPU has no streams")

    def get_physical_domain_size(self) -> tuple[int, int]:
        return super().get_physical_domain_size()

    def get_logical_domain_size(self) -> tuple[int, int]:
        return super().get_logical_domain_size()

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 200,
        sm_write_gbs: float = 50,
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
        previous_event_before_epilogue: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Rows, Tensor | None, Tensor | None, EPHandle, EventOverlap]:
        call = self._resolved(
            x,
            topk_idx,
            topk_weights,
            cumulative_local_expert_recv_stats,
            num_experts,
            num_max_tokens_per_rank,
            expert_alignment,
            num_sms,
            num_qps,
            handle,
            do_handle_copy,
            do_cpu_sync,
            do_expand,
            do_zero_padding,
            use_tma_aligned_col_major_sf,
        )
        begin_after(previous_event, allocate_on_comm_stream)
        arrival = self._elastic.dispatch(call)
        if previous_event_before_epilogue is not None:
            previous_event_before_epilogue.current_stream_wait()
        event = EventOverlap(finish(async_with_compute_stream, arrival.fill))
        return rows_of(arrival), arrival.picks, arrival.weights, arrival.handle, event

    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None = None,
        bias: Bias = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        previous_event_before_epilogue: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        begin_after(previous_event, allocate_on_comm_stream)
        out, weights, fill = self._combined(x, handle, topk_weights, bias, num_sms, num_qps)
        if previous_event_before_epilogue is not None:
            previous_event_before_epilogue.current_stream_wait()
        return out, weights, EventOverlap(finish(async_with_compute_stream, fill))

    # -- not expert parallelism ------------------------------------------------------------

    @staticmethod
    def get_engram_storage_size_hint(
        num_entries: int,
        hidden: int,
        num_max_tokens_per_rank: int,
        dtype: torch.dtype = torch.bfloat16,
    ) -> tuple[int, int]:
        raise NotImplementedError(_ELSEWHERE)

    @staticmethod
    def get_pp_buffer_size_hint(num_max_tensor_bytes: int, num_max_inflight_tensors: int) -> int:
        raise NotImplementedError(_ELSEWHERE)

    @staticmethod
    def get_agrs_num_max_session_bytes(group: Any, shapes: Any, dtype: torch.dtype) -> int:
        raise NotImplementedError(_ELSEWHERE)

    @staticmethod
    def get_agrs_buffer_size_hint(group: Any, num_max_session_bytes: int) -> int:
        raise NotImplementedError(_ELSEWHERE)

    def engram_write(self, storage: Tensor, sf: Tensor | None = None) -> None:
        raise NotImplementedError(_ELSEWHERE)

    def engram_fetch(
        self, indices: Tensor, num_qps: int = 0, use_tma_aligned_col_major_sf: bool = False
    ) -> Callable[[], Any]:
        raise NotImplementedError(_ELSEWHERE)

    def pp_set_config(self, num_max_tensor_bytes: int, num_max_inflight_tensors: int) -> None:
        raise NotImplementedError(_ELSEWHERE)

    def pp_send(self, t: Tensor, dst_rank_idx: int, num_sms: int = 0) -> None:
        raise NotImplementedError(_ELSEWHERE)

    def pp_recv(self, t: Tensor, src_rank_idx: int, num_sms: int = 0) -> None:
        raise NotImplementedError(_ELSEWHERE)

    def create_agrs_session(self) -> None:
        raise NotImplementedError(_ELSEWHERE)

    def destroy_agrs_session(self) -> None:
        raise NotImplementedError(_ELSEWHERE)

    def agrs_new_session(self, enabled: bool = True) -> Any:
        raise NotImplementedError(_ELSEWHERE)

    def agrs_set_config(
        self, num_max_session_bytes: int, num_max_all_gathers_per_session: int
    ) -> None:
        raise NotImplementedError(_ELSEWHERE)

    def agrs_get_inplace_tensor(self, shapes: Any, dtype: torch.dtype) -> Any:
        raise NotImplementedError(_ELSEWHERE)

    def all_gather(self, t: Any) -> Any:
        raise NotImplementedError(_ELSEWHERE)
