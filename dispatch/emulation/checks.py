"""What the library's C++ side asks of tensors, in the order in which it asks.

Knows shapes, dtypes and strides only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dispatch.emulation.errors import BufferRuleError, host_assert


def check_x(x: Tensor, dim: int) -> None:
    ok = x.dim() == dim and x.is_contiguous() and x.dtype == torch.bfloat16
    host_assert(
        ok, f"x is bfloat16, contiguous, of {dim} dimensions, not {x.dtype} {list(x.shape)}"
    )
    host_assert(x.shape[-1] % 128 == 0, f"D={x.shape[-1]} divides by 128")


def check_picks(topk_idx: Tensor) -> None:
    ok = topk_idx.dim() == 2 and topk_idx.is_contiguous() and topk_idx.dtype == torch.int64
    host_assert(ok, f"topk_idx is int64 [T, K], contiguous, not {topk_idx.dtype}")


def check_range(topk_idx: Tensor, num_experts: int) -> None:
    """The library does not look; on a GPU the write would land elsewhere."""
    if topk_idx.numel() and not -1 <= int(topk_idx.min()) <= int(topk_idx.max()) < num_experts:
        raise BufferRuleError(f"topk_idx: valid are -1 (none) and 0..{num_experts - 1}")


def check_wait_stats(stats: Tensor | None, size: int) -> None:
    if stats is not None:
        ok = stats.dtype == torch.int64 and stats.shape == (size,) and stats.is_contiguous()
        host_assert(ok, f"wait statistics are int64 [{size}]")
