"""What the second API asks of its arguments, in the order in which it asks.

Knows shapes, dtypes, strides and limits only. Documented limits that the library finds as it
compiles a kernel are RuntimeErrors there and here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dispatch import deepep_v2_limits as limits
from dispatch.deepep_v2_limits import Api
from dispatch.emulation.elastic_handle import EPHandle
from dispatch.emulation.errors import BufferRuleError, host_assert

DEVICE_SMS = 132  # of the device that is emulated


@dataclass(frozen=True)
class DispatchCall:
    """Arguments of a dispatch, defaults resolved."""

    x: Tensor
    scales: Tensor | None
    topk_idx: Tensor
    topk_weights: Tensor | None
    stats: Tensor | None
    max_tokens: int
    num_experts: int
    alignment: int
    num_sms: int
    cached: EPHandle | None
    copy_picks: bool
    cpu_sync: bool
    expand: bool
    zero_padding: bool
    column_scales: bool


def check_dispatch(api: Api, num_ranks: int, num_bytes: int, call: DispatchCall) -> None:
    check_sms(call.num_sms)
    host_assert(not call.zero_padding or call.expand, "do_zero_padding needs do_expand")
    host_assert(call.cached is None or not call.cpu_sync, "Cannot do CPU sync with cached mode")
    x, top_k = call.x, call.topk_idx.shape[-1]
    host_assert(x.dim() == 2 and x.is_contiguous(), f"x is [T, D], contiguous: {list(x.shape)}")
    tokens, hidden = x.shape
    row = hidden * x.dtype.itemsize
    host_assert(row % 16 == 0, f"a row of {row} bytes is a multiple of 16")
    m = call.max_tokens
    host_assert(tokens <= m, f"T={tokens} <= num_max_tokens_per_rank={m}")
    packs = 0
    if call.scales is not None:
        ok = call.scales.dim() == 2 and call.scales.shape[0] == tokens
        host_assert(ok, f"sf is [{tokens}, P], not {list(call.scales.shape)}")
        ok = call.scales.dtype.itemsize == 4
        host_assert(ok, f"sf has 4 bytes a pack, not {call.scales.dtype}")
        packs = call.scales.shape[1]
    fits = torch.float8_e4m3fn if call.scales is not None else torch.bfloat16
    if x.dtype != fits:
        raise BufferRuleError(f"x is {x.dtype}; documented are bfloat16, or e4m3 with sf")
    ok = call.topk_idx.dim() == 2 and call.topk_idx.shape[0] == tokens
    host_assert(ok, f"topk_idx is [{tokens}, K], not {list(call.topk_idx.shape)}")
    ok = call.topk_idx.dtype == torch.int64 and call.topk_idx.is_contiguous()
    host_assert(ok, f"topk_idx is int64, contiguous, not {call.topk_idx.dtype}")
    if call.topk_weights is not None:
        ok = call.topk_weights.shape == call.topk_idx.shape and call.topk_weights.is_contiguous()
        host_assert(ok, f"topk_weights is [{tokens}, {top_k}], contiguous")
        ok = call.topk_weights.dtype == torch.float32
        host_assert(ok, f"topk_weights is float32, not {call.topk_weights.dtype}")
    experts = call.num_experts
    host_assert(experts % num_ranks == 0, f"E={experts} divides by {num_ranks} ranks")
    local = experts // num_ranks
    if call.stats is not None:
        host_assert(call.cached is None, "a cached handle counts no tokens of experts")
        ok = call.stats.shape == (local,) and call.stats.dtype == torch.int32
        host_assert(ok, f"cumulative_local_expert_recv_stats is int32 [{local}]")
    host_assert(num_ranks <= limits.MAX_RANKS, f"R={num_ranks} <= {limits.MAX_RANKS}")
    host_assert(experts <= limits.MAX_EXPERTS, f"E={experts} <= {limits.MAX_EXPERTS}")
    most = api.max_local_experts
    host_assert(local <= most, f"{local} experts a rank <= {most}")
    host_assert(top_k <= limits.MAX_TOP_K, f"K={top_k} <= {limits.MAX_TOP_K}")
    host_assert(row % 32 == 0, f"a row of {row} bytes is a multiple of 32")
    needed = num_ranks * m * limits.row_bytes(api, row, 4 * packs, top_k, True)
    host_assert(needed <= num_bytes, f"dispatch needs {needed} <= num_bytes={num_bytes}")
    _check_picks(call.topk_idx, experts)


def _check_picks(topk_idx: Tensor, experts: int) -> None:
    """What the library looks at on the device, or not at all."""
    if not topk_idx.numel():
        return
    if not -1 <= int(topk_idx.min()) <= int(topk_idx.max()) < experts:
        raise BufferRuleError(f"topk_idx: valid are -1 (none) and 0..{experts - 1}")
    ordered = topk_idx.sort(1).values
    if bool(((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any()):
        raise BufferRuleError("topk_idx: a token picks an expert twice")


def check_combine(
    api: Api,
    num_ranks: int,
    num_bytes: int,
    multiple_reduction: bool,
    x: Tensor,
    handle: EPHandle,
    weights: Tensor | None,
    biases: list[Tensor],
) -> None:
    host_assert(x.dim() == 2 and x.is_contiguous(), f"x is [N, D], contiguous: {list(x.shape)}")
    host_assert(x.dtype == torch.bfloat16, f"x is bfloat16, not {x.dtype}")
    rows, hidden = x.shape
    tokens, top_k = handle.topk_idx.shape
    m = handle.num_max_tokens_per_rank
    host_assert(tokens <= m, f"T={tokens} <= num_max_tokens_per_rank={m}")
    kept = handle.num_expanded_tokens if handle.do_expand else handle.recv_src_metadata.shape[0]
    if handle.do_expand and rows != kept:
        raise BufferRuleError(f"x has {rows} rows; the dispatch gave {kept}")
    host_assert(rows == kept, f"x has {rows} rows; the dispatch gave {kept}")
    if weights is not None:
        shape = (rows,) if handle.do_expand else (rows, top_k)
        ok = weights.shape == shape and weights.dtype == torch.float32 and weights.is_contiguous()
        host_assert(ok, f"topk_weights is float32 {list(shape)}, contiguous")
        if handle.do_expand and not multiple_reduction:
            raise BufferRuleError("rows that go home one by one carry no weights")
    for bias in biases:
        ok = bias.shape == (tokens, hidden) and bias.dtype == x.dtype and bias.is_contiguous()
        host_assert(ok, f"bias is bfloat16 [{tokens}, {hidden}], contiguous")
    step = limits.HIDDEN_STEP
    host_assert(hidden % step == 0, f"Invalid hidden: D={hidden} is a multiple of {step}")
    held = min(num_ranks, top_k) if multiple_reduction else top_k
    needed = held * m * limits.row_bytes(api, 2 * hidden, 0, top_k, False)
    host_assert(needed <= num_bytes, f"combine needs {needed} <= num_bytes={num_bytes}")


def check_sms(num_sms: int) -> None:
    host_assert(0 < num_sms <= DEVICE_SMS, f"num_sms={num_sms} is one of 1..{DEVICE_SMS}")


def check_torch_deterministic() -> None:
    """AssertionError where torch would fill what the library leaves to another stream."""
    filled = getattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    if torch.are_deterministic_algorithms_enabled() and filled:
        raise AssertionError("deterministic algorithms with fill_uninitialized_memory")
