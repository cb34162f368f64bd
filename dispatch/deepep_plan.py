"""What DeepEP's two modes take of a device: the library's buffer, and what each layer allocates.

Knows: sizes, from configuration and group alone, so that they are there before the KV cache is
sized. Knows nothing of buffers that exist. M bounds T of any step, drafts counted: with d drafts a
sequence it is max_num_sequences * (1 + d).

Shape letters: T tokens, D hidden, K top-k, P physical slots, R ranks, M max tokens a rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dispatch import deepep
from dispatch.base import DispatchConfig, WireFormat
from dispatch.fp8 import scale_bytes
from ep.group import EPGroup

LL_IN_FLIGHT = 2  # the library has two buffers, each result is [e, R * M, D]
_PICK = 8 + 4  # bytes of a pick on the wire: int64 and fp32


@dataclass(frozen=True)
class BufferNeed:
    """What a dispatcher asks of `Buffer`. nvl, rdma: bytes. queue_pairs: a rank; 0: the library's
    own number. max_tokens: M of the low-latency mode; 0: only normal mode."""

    nvl: int = 0
    rdma: int = 0
    queue_pairs: int = 0
    max_tokens: int = 0

    def __or__(self, other: BufferNeed) -> BufferNeed:
        """What serves both, one after the other."""
        return BufferNeed(
            max(self.nvl, other.nvl),
            max(self.rdma, other.rdma),
            max(self.queue_pairs, other.queue_pairs),
            max(self.max_tokens, other.max_tokens),
        )

    @property
    def size(self) -> int:
        return self.nvl + self.rdma


def row_bytes(config: DispatchConfig) -> int:
    """Hidden values of a row on its way to the experts, with their scales."""
    if config.wire is WireFormat.MODEL:
        return config.hidden_size * config.dtype.itemsize
    return config.hidden_size + scale_bytes(config.hidden_size, config.wire)


def ll_need(group: EPGroup, config: DispatchConfig) -> BufferNeed:
    size = deepep.ll_buffer_bytes(
        config.max_tokens_per_rank, config.hidden_size, config.num_physical_experts
    )
    local = config.num_physical_experts // group.size
    return BufferNeed(rdma=size, queue_pairs=local, max_tokens=config.max_tokens_per_rank)


def ll_passing(group: EPGroup, config: DispatchConfig) -> int:
    """Two layers in flight, each with its rows [e, R*M, D] and scales, their sources (int32), what
    experts hand back (bf16) and the result [T, D], bf16 and fp32. e * R = P: R plays no part."""
    slots = config.num_physical_experts * config.max_tokens_per_rank
    received = slots * (row_bytes(config) + 4)
    handed_back = slots * config.hidden_size * 2
    home = config.max_tokens_per_rank * config.hidden_size * (2 + 4)
    return LL_IN_FLIGHT * (received + handed_back + home)


def normal_need(library: Any, group: EPGroup, config: DispatchConfig) -> BufferNeed:
    """Enough for both directions, by the library's own hints."""
    both = [library.Buffer.get_dispatch_config(group.size)]
    both.append(library.Buffer.get_combine_config(group.size))
    row = config.hidden_size * 2  # results: bf16, never smaller than rows in FP8
    nvl = max(c.get_nvl_buffer_size_hint(row, group.size) for c in both)
    rdma = 0
    if group.size > deepep.ranks_per_node(library):
        rdma = max(c.get_rdma_buffer_size_hint(row, group.size) for c in both)
    return BufferNeed(nvl, rdma)


def normal_passing(group: EPGroup, config: DispatchConfig) -> int:
    """One layer (or two halves of one) in the worst case, all tokens of all ranks to this one: rows
    with picks (int64, then int32) and weights, what experts hand back (bf16), the result [T, D],
    bf16 and fp32; rows in FP8 are there once more, dequantised."""
    rows = group.size * config.max_tokens_per_rank
    bf16 = config.hidden_size * 2
    row = row_bytes(config) + config.top_k * (_PICK + 4) + bf16
    if config.wire is not WireFormat.MODEL:
        row += bf16
    return rows * row + config.max_tokens_per_rank * config.hidden_size * (2 + 4)
