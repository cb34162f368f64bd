"""Finished latents and rope keys into the paged cache: a copy by slots, bf16 or fp32.

What mla_cache.py does at one go with norm and rotation, for callers that did these themselves.

Shape letters: T tokens, c latent width, r rope width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.deepseek.kernels.gpu.aot import CompileCase
from models.deepseek.kernels.gpu.cost import KernelCost
from models.deepseek.kernels.gpu.errors import ShapeRefused
from models.deepseek.kernels.gpu.language import tl, triton


@triton.jit(do_not_specialize=["slots_left"])
def scatter_kernel(
    latent, key, slots, layer, latent_row, key_row, slots_left,
    rank: tl.constexpr, rope: tl.constexpr, block_c: tl.constexpr, block_r: tl.constexpr,
):  # fmt: skip
    """latent [T, c], key [T, r] bf16 or fp32 -> layer [slots, c + r] of that dtype at
    slots [T] int64; a slot of -1, or of slots_left and more, is written nowhere. Bytes: 4T(c + r)
    in bf16. FLOPs none: bound by bytes, a copy. One program a token."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if (slot >= 0) & (slot < slots_left):
        c, r = tl.arange(0, block_c), tl.arange(0, block_r)
        target = layer + slot * (rank + rope)
        value = tl.load(latent + token * latent_row + c, mask=c < rank)
        tl.store(target + c, value, mask=c < rank)
        value = tl.load(key + token * key_row + r, mask=r < rope)
        tl.store(target + rank + r, value, mask=r < rope)


def scatter_rows(layer: Tensor, latent: Tensor, key: Tensor, slots: Tensor) -> None:
    """layer [blocks, block, c + r], latent [T, c], key [T, r] of its dtype (rows may be strided),
    slots [T] int64."""
    tokens, rank, rope = latent.shape[0], latent.shape[1], key.shape[1]
    if layer.shape[-1] != rank + rope or not layer.is_contiguous():
        raise ShapeRefused(
            f"layer is {tuple(layer.shape)}: must be [.., {rank + rope}], contiguous"
        )
    if latent.dtype != layer.dtype or key.dtype != layer.dtype:
        raise ShapeRefused(f"latent is {latent.dtype}, key {key.dtype}: must be {layer.dtype}")
    if slots.dtype != torch.int64 or slots.shape != (tokens,) or key.shape[0] != tokens:
        raise ShapeRefused(f"slots is {slots.dtype} {tuple(slots.shape)}: must be int64 [{tokens}]")
    latent, key = (x if x.stride(1) == 1 else x.contiguous() for x in (latent, key))
    if tokens:
        scatter_kernel[(tokens,)](
            latent, key, slots, layer, latent.stride(0), key.stride(0),
            layer.shape[:-1].numel(), rank=rank, rope=rope,
            block_c=triton.next_power_of_2(rank), block_r=triton.next_power_of_2(rope),
            num_warps=1,
        )  # fmt: skip


def scatter_rows_twin(layer: Tensor, latent: Tensor, key: Tensor, slots: Tensor) -> None:
    rows = layer.view(-1, layer.shape[-1])
    for row, slot in enumerate(slots.tolist()):
        if 0 <= slot < rows.shape[0]:
            rows[slot] = torch.cat((latent[row], key[row]))


def scatter_cost(tokens: int, rank: int = 512, rope: int = 64, itemsize: int = 2) -> KernelCost:
    return KernelCost(tokens * (2 * (rank + rope) * itemsize + 8), 0)


def compile_cases() -> list[CompileCase]:
    return [
        CompileCase(
            scatter_kernel,
            "scatter_rows",
            "bf16 512 64 w1",
            {"latent": "*bf16", "key": "*bf16", "slots": "*i64", "layer": "*bf16",
             "latent_row": "i32", "key_row": "i32", "slots_left": "i32"},
            {"rank": 512, "rope": 64, "block_c": 512, "block_r": 64},
            num_warps=1,
            divisible=("latent_row", "key_row"),
            wants={90: ("wide loads",), 100: ("wide loads",)},
        )
    ]  # fmt: skip
