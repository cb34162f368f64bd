"""`Buffer`, the first API: names, parameters, defaults and limits of the library, on a CPU.

Knows: what the library's Python does before its C++ side is called. The work is in low_latency.py,
normal.py (one node) and internode.py (several). Documented in `signatures.py`; tested against it.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from dispatch import deepep
from dispatch.emulation.calls import Rows, biases_of, call_of, dispatched
from dispatch.emulation.errors import host_assert, python_assert
from dispatch.emulation.events import (
    Config,
    EventHandle,
    EventOverlap,
    Hook,
    begin_after,
    check_async,
    finish,
    lazily,
)
from dispatch.emulation.exchange import Exchange
from dispatch.emulation.internode import Internode
from dispatch.emulation.low_latency import LowLatency
from dispatch.emulation.normal import Normal, layout
from dispatch.emulation.sizes import COMBINE_CHUNKS, DISPATCH_CHUNKS, check_sizes


class Buffer:
    """group: a process group that carries CPU tensors. timeout_seconds: how long a receiver waits
    for a peer; 100 s in the library, where it is compiled in. ranks_per_node: 8 there (`nodes_of`
    makes fewer)."""

    num_sms: int = 20
    timeout_seconds: float = 100.0
    ranks_per_node: int = deepep.RANKS_PER_NODE

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
    ) -> None:
        exchange = Exchange(group, comm, self.timeout_seconds)
        self.rank, self.group_size = exchange.rank, exchange.size
        self.group = group if group is not None else comm
        self.num_nvl_bytes = num_nvl_bytes
        self.num_rdma_bytes = num_rdma_bytes
        self.low_latency_mode = low_latency_mode
        self.explicitly_destroy = explicitly_destroy
        self.enable_shrink = enable_shrink
        check_sizes(
            self.group_size, self.ranks_per_node, num_nvl_bytes, num_rdma_bytes, low_latency_mode
        )
        # What the library would write into the environment; here it is only kept.
        self.environment: dict[str, str] = {}
        if self._several_nodes or low_latency_mode:
            python_assert(num_qps_per_rank > 0, "num_qps_per_rank > 0")
            depth = os.environ.get("NVSHMEM_QP_DEPTH", str(deepep.DEFAULT_QP_DEPTH))
            self.nvshmem_qp_depth = int(depth)  # as the library does
            self.environment = {
                "NVSHMEM_DISABLE_P2P": "0" if allow_nvlink_for_low_latency_mode else "1",
                "NVSHMEM_IB_ENABLE_IBGDA": "1",
                "NVSHMEM_IBGDA_NUM_RC_PER_PE": str(num_qps_per_rank),
                "NVSHMEM_QP_DEPTH": str(self.nvshmem_qp_depth),
                "NVSHMEM_MAX_TEAMS": "7",
                "NVSHMEM_DISABLE_NVLS": "1",
                "NVSHMEM_CUMEM_GRANULARITY": str(2**29),
            }
            if not allow_mnnvl:
                self.environment["NVSHMEM_DISABLE_MNNVL"] = "1"
        met = exchange.meet(exchange.begin(), list(range(self.group_size)))
        missing = [rank for rank, message in met.items() if message is None]
        if missing:
            raise RuntimeError(f"DeepEP error: ranks {missing} did not come to the rendezvous")
        self._exchange: Exchange | None = exchange
        self._ll = LowLatency(exchange, num_rdma_bytes, num_qps_per_rank, enable_shrink)
        self._normal = Normal(exchange, num_nvl_bytes)
        self._internode = Internode(exchange, num_nvl_bytes, num_rdma_bytes, self.ranks_per_node)

    def destroy(self) -> None:
        python_assert(self.explicitly_destroy, "`explicitly_destroy` flag must be set")
        if self._exchange is not None:
            self._exchange.close(broken=self._unfinished)
        self._exchange = None

    @staticmethod
    def is_sm90_compiled() -> bool:
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        python_assert(new_num_sms % 2 == 0, "The SM count must be even")
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        return EventOverlap(EventHandle())

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        return deepep.ll_buffer_bytes(num_max_dispatch_tokens_per_rank, hidden, num_experts)

    def get_comm_stream(self) -> Any:
        raise NotImplementedError("a CPU has no streams")

    def get_local_buffer_tensor(
        self,
        dtype: torch.dtype,
        size: torch.Size | None = None,
        offset: int = 0,
        use_rdma_buffer: bool = False,
    ) -> Tensor:
        raise NotImplementedError("the emulation has no buffer to look into")

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        python_assert(num_ranks in DISPATCH_CHUNKS, f"Unsupported number of EP ranks: {num_ranks}")
        return Config(Buffer.num_sms, *DISPATCH_CHUNKS[num_ranks])

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        python_assert(num_ranks in COMBINE_CHUNKS, f"Unsupported number of EP ranks: {num_ranks}")
        return Config(Buffer.num_sms, *COMBINE_CHUNKS[num_ranks])

    # -- normal mode -----------------------------------------------------------------------

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]:
        begin_after(previous_event, async_finish, allocate_on_comm_stream)
        found = layout(topk_idx, num_experts, self.group_size, self.ranks_per_node)
        return *found, finish(async_finish, lambda: None)

    def dispatch(
        self,
        x: Rows,
        handle: tuple[Any, ...] | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[
        Rows,
        Tensor | None,
        Tensor | None,
        list[int] | None,
        tuple[Any, ...] | None,
        EventOverlap,
    ]:
        self._open()
        if self._several_nodes:
            python_assert(
                num_worst_tokens == 0,
                "Internode dispatch does not support `num_worst_tokens > 0`",
            )
            known = (num_tokens_per_rank, num_tokens_per_rdma_rank, is_token_in_rank)
            picks = (num_tokens_per_expert, topk_idx, topk_weights)
            events = (previous_event, async_finish, allocate_on_comm_stream)
            return self.internode_dispatch(
                x, handle, *known, *picks, expert_alignment, config, *events
            )
        config = self.get_dispatch_config(self.group_size) if config is None else config
        begin_after(previous_event, async_finish, allocate_on_comm_stream)
        if handle is not None:
            is_token_in_rank = handle[4]
        counted = num_tokens_per_rank is not None
        picks = (num_tokens_per_expert, topk_idx, topk_weights)
        sizes = (expert_alignment, num_worst_tokens, config)
        call = call_of(x, handle, counted, is_token_in_rank, *picks, *sizes)
        self._ll.interrupt()
        arrivals, new_handle, receive = self._normal.dispatch(call)
        return dispatched(arrivals, handle, new_handle, finish(async_finish, receive))

    def combine(
        self,
        x: Tensor,
        handle: tuple[Any, ...],
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        self._open()
        if self._several_nodes:
            events = (previous_event, async_finish, allocate_on_comm_stream)
            return self.internode_combine(x, handle, topk_weights, bias, config, *events)
        config = self.get_combine_config(self.group_size) if config is None else config
        begin_after(previous_event, async_finish, allocate_on_comm_stream)
        self._ll.interrupt()
        out, weights, receive = self._normal.combine(
            x, handle, topk_weights, biases_of(bias), config
        )
        return out, weights, finish(async_finish, receive)

    def internode_dispatch(
        self,
        x: Rows,
        handle: tuple[Any, ...] | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[
        Rows,
        Tensor | None,
        Tensor | None,
        list[int] | None,
        tuple[Any, ...] | None,
        EventOverlap,
    ]:
        self._open()
        host_assert(self._several_nodes, f"R={self.group_size} are on several nodes")
        config = self.get_dispatch_config(self.group_size) if config is None else config
        begin_after(previous_event, async_finish, allocate_on_comm_stream)
        if handle is not None:
            is_token_in_rank = handle[0]
        counted = num_tokens_per_rank is not None and num_tokens_per_rdma_rank is not None
        picks = (num_tokens_per_expert, topk_idx, topk_weights)
        call = call_of(x, handle, counted, is_token_in_rank, *picks, expert_alignment, 0, config)
        self._ll.interrupt()
        arrivals, new_handle, receive = self._internode.dispatch(call, num_tokens_per_rdma_rank)
        return dispatched(arrivals, handle, new_handle, finish(async_finish, receive))

    def internode_combine(
        self,
        x: Tensor,
        handle: tuple[Any, ...],
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        self._open()
        host_assert(self._several_nodes, f"R={self.group_size} are on several nodes")
        config = self.get_combine_config(self.group_size) if config is None else config
        begin_after(previous_event, async_finish, allocate_on_comm_stream)
        self._ll.interrupt()
        out, weights, receive = self._internode.combine(
            x, handle, topk_weights, biases_of(bias), config
        )
        return out, weights, finish(async_finish, receive)

    # -- low latency -----------------------------------------------------------------------

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        self._open_for_low_latency()
        self._ll.clean(num_max_dispatch_tokens_per_rank, hidden, num_experts)

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Rows, Tensor, tuple[Any, ...], EventOverlap, Hook | None]:
        self._open_for_low_latency()
        self._check_depth(num_max_dispatch_tokens_per_rank)
        check_async(async_finish, return_recv_hook)
        recv, scales, count, src_info, layout_range, receive = self._ll.dispatch(
            x,
            topk_idx,
            num_max_dispatch_tokens_per_rank,
            num_experts,
            cumulative_local_expert_recv_stats,
            dispatch_wait_recv_cost_stats,
            use_fp8,
            round_scale,
            use_ue8m0,
        )
        handle = (
            src_info,
            layout_range,
            num_max_dispatch_tokens_per_rank,
            x.shape[1],
            num_experts,
        )
        event, hook = lazily(receive, async_finish, return_recv_hook)
        rows: Rows = recv if scales is None else (recv, scales)
        return rows, count, handle, event, hook

    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: tuple[Any, ...],
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
        combine_wait_recv_cost_stats: Tensor | None = None,
    ) -> tuple[Tensor, EventOverlap, Hook | None]:
        self._open_for_low_latency()
        self._check_depth(handle[2])
        check_async(async_finish, return_recv_hook)
        combined, receive = self._ll.combine(
            x,
            topk_idx,
            topk_weights,
            handle,
            use_logfmt,
            zero_copy,
            out,
            combine_wait_recv_cost_stats,
        )
        event, hook = lazily(receive, async_finish, return_recv_hook)
        return combined, event, hook

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        self._open_for_low_latency()
        self._ll.set_mask(rank_to_mask, mask)

    def low_latency_query_mask_buffer(self, mask_status: Tensor) -> None:
        self._open_for_low_latency()
        self._ll.query_mask(mask_status)

    def low_latency_clean_mask_buffer(self) -> None:
        self._open_for_low_latency()
        self._ll.clean_mask()

    def get_next_low_latency_combine_buffer(self, handle: object) -> Tensor:
        self._open_for_low_latency()
        assert isinstance(handle, tuple)
        return self._ll.next_combine_buffer(handle)

    # -- parts -----------------------------------------------------------------------------

    @property
    def _several_nodes(self) -> bool:
        return self.group_size > self.ranks_per_node

    @property
    def _unfinished(self) -> bool:
        return self._ll.unfinished or self._normal.unfinished or self._internode.unfinished

    def _open(self) -> None:
        host_assert(self._exchange is not None, "the buffer is not destroyed")

    def _open_for_low_latency(self) -> None:
        self._open()
        host_assert(self.low_latency_mode, "low_latency_mode=True")

    def _check_depth(self, max_tokens: int) -> None:
        python_assert(
            self.nvshmem_qp_depth >= (max_tokens + 1) * 2,
            f"NVSHMEM_QP_DEPTH={self.nvshmem_qp_depth} >= 2 * (M + 1), M={max_tokens}",
        )
