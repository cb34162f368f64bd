"""What a dispatch of the second API leaves behind for its combine, or for another dispatch.

Knows: names and order of its parts, in 2.1 and in 2.5. Knows nothing of how they are filled.

Shape letters: T tokens, K top-k, U ranks, e local experts, N received rows (each once).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dispatch.emulation.errors import python_assert


class EPHandle:
    """psum_num_recv_tokens_per_scaleup_rank [U], psum_num_recv_tokens_per_expert [e] and
    num_unaligned_recv_tokens_per_expert [e] int32; recv_src_metadata [N, K + 2] int32: number of
    the token among all ranks' (rank * M + token), source rank * K + last pick that is here, then,
    where rows are expanded, the row of each pick or -1. dst_buffer_slot_idx [T, K] int32."""

    def __init__(
        self,
        do_expand: bool,
        num_experts: int,
        expert_alignment: int,
        num_max_tokens_per_rank: int,
        num_sms: int,
        topk_idx: Tensor,
        num_recv_tokens: int,
        num_expanded_tokens: int,
        num_recv_tokens_per_expert_list: list[int],
        psum_num_recv_tokens_per_scaleup_rank: Tensor,
        psum_num_recv_tokens_per_expert: Tensor,
        num_unaligned_recv_tokens_per_expert: Tensor,
        recv_src_metadata: Tensor,
        dst_buffer_slot_idx: Tensor,
        token_metadata_at_forward: Tensor | None,
        channel_linked_list: Tensor | None,
    ) -> None:
        python_assert(topk_idx is not None, "topk_idx is not None")
        self.do_expand = do_expand
        self.num_experts = num_experts
        self.expert_alignment = expert_alignment
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.num_sms = num_sms
        self._keep_picks(topk_idx)
        self.num_recv_tokens = num_recv_tokens
        self.num_expanded_tokens = num_expanded_tokens
        self.num_recv_tokens_per_expert_list = num_recv_tokens_per_expert_list
        self.psum_num_recv_tokens_per_scaleup_rank = psum_num_recv_tokens_per_scaleup_rank
        self.psum_num_recv_tokens_per_expert = psum_num_recv_tokens_per_expert
        self.num_unaligned_recv_tokens_per_expert = num_unaligned_recv_tokens_per_expert
        self.recv_src_metadata = recv_src_metadata
        self.dst_buffer_slot_idx = dst_buffer_slot_idx
        self.token_metadata_at_forward = token_metadata_at_forward
        self.channel_linked_list = channel_linked_list
        # Of the emulation: which buffer made it, and whether what it says has come.
        self._maker: object = None
        self._filled = False

    def deterministic_sort(
        self,
        do_cpu_sync: bool,
        is_cached_dispatch: bool,
        recv_x: Tensor,
        recv_sf: Tensor | None,
        recv_topk_idx: Tensor,
        recv_topk_weights: Tensor,
        channel_linked_list: Tensor | None,
    ) -> None:
        raise NotImplementedError("the emulation puts rows in order as it receives them")

    def _keep_picks(self, topk_idx: Tensor) -> None:
        self.topk_idx = topk_idx


class EPHandle25(EPHandle):
    """Holds the caller's picks themselves and notices when they were written to."""

    def _keep_picks(self, topk_idx: Tensor) -> None:
        self._topk_idx = topk_idx
        self._version = None if topk_idx.is_inference() else topk_idx._version

    @property
    def topk_idx(self) -> Tensor:  # type: ignore[override]
        python_assert(
            self._version is None or self._topk_idx._version == self._version,
            "topk_idx must not be written to while its handle is in use",
        )
        return self._topk_idx


def poison(tensor: Tensor) -> Tensor:
    """Filled with what nobody can take for a value: NaN; for whole numbers one far out of range."""
    if tensor.is_floating_point():
        return tensor.copy_(torch.full(tensor.shape, torch.nan))
    return tensor.fill_(_NO_INDEX)


_NO_INDEX = 2**30


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, strides: Any = None) -> Tensor:
    """strides None: contiguous."""
    if strides is None:
        return poison(torch.empty(shape, dtype=dtype))
    return poison(torch.empty_strided(shape, strides, dtype=dtype))
