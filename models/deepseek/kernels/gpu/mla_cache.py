"""What a layer keeps of a token: latent normalised, key rotated, both written into the paged cache.

One launch does it all, straight from the row that the projection gave; the queries' rotation is
rope.py's. How a position lies in the cache: mla_rows.py. Bound by memory and far too small to fill
it: what counts is that it is one launch. A token's bytes depend on that token alone (law 5).

FP8: the latent is quantised from fp32, as it comes out of the norm; a block with a NaN or an
infinity is NaN throughout. The rope key is rotated in fp32 and rounded to bf16 once.

Shape letters: T tokens, c latent width (rank), r rope width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.deepseek.kernels.gpu.aot import CompileCase
from models.deepseek.kernels.gpu.cost import KernelCost
from models.deepseek.kernels.gpu.errors import ShapeRefused
from models.deepseek.kernels.gpu.language import tl, triton
from models.deepseek.kernels.gpu.mla_rows import (
    cache_views,
    check_widths,
    row_bytes,
)
from models.deepseek.kernels.gpu.quant import block_scale, quantise_block
from models.deepseek.kernels.gpu.rounding import to_bf16


@triton.jit(do_not_specialize=["slots_left"])
def mla_cache_kernel(
    latent, key, weight, cos_sin, positions, slots, latents, scales, ropes, rows, latent_row,
    key_row, slots_left, eps,
    rank: tl.constexpr, rope: tl.constexpr, fp8: tl.constexpr, ue8m0: tl.constexpr,
    keep: tl.constexpr,
):  # fmt: skip
    """latent [T, c], key [T, r] bf16 by row strides, weight [c] fp32, cos_sin [P, r] fp32 (cosines,
    then sines), positions and slots [T] int64 (a slot of -1 is written nowhere; one of slots_left
    or more neither) -> cache rows at the slots; keep: rows [T, c + r] bf16 as well, not
    quantised. Bytes: 2 (c + r) + 4 r read, mla_rows.row_bytes written, a token. FLOPs
    none on matrix units: bound by bytes, about 4c + 3r operations a token (FP8: 9c + 3r). One
    program each.
    """
    token = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, rank)
    value = tl.load(latent + token * latent_row + c).to(tl.float32)
    mean = tl.sum(value * value, axis=0) / rank
    value = value * tl.div_rn(1.0, tl.sqrt_rn(mean + eps)) * tl.load(weight + c)

    pair = tl.arange(0, rope // 2)
    turn = cos_sin + tl.maximum(tl.load(positions + token), 0) * rope + pair
    cos, sin = tl.load(turn), tl.load(turn + rope // 2)
    source = key + token * key_row + 2 * pair
    even, odd = tl.load(source).to(tl.float32), tl.load(source + 1).to(tl.float32)
    real = to_bf16(even * cos - odd * sin)
    imaginary = to_bf16(even * sin + odd * cos)

    slot = tl.load(slots + token)
    written = (slot >= 0) & (slot < slots_left)
    if fp8:
        stride: tl.constexpr = rank + rank // 32 + 2 * rope
        groups: tl.constexpr = rank // 128
        blocks = value.reshape(groups, 128)
        scale, inverse = block_scale(blocks, ue8m0)
        at = latents + slot * stride + tl.arange(0, groups)[:, None] * 128
        at += tl.arange(0, 128)[None, :]
        inside = (tl.arange(0, groups)[:, None] >= 0) & written
        tl.store(at, quantise_block(blocks, scale, inverse, ue8m0), mask=inside)
        g = tl.arange(0, groups)
        tl.store(scales + slot * (stride // 4) + rank // 4 + g, scale, mask=(g >= 0) & written)
        to_rope = ropes + slot * (stride // 2) + (rank + rank // 32) // 2 + 2 * pair
    else:
        tl.store(latents + slot * (rank + rope) + c, to_bf16(value), mask=(c >= 0) & written)
        to_rope = ropes + slot * (rank + rope) + rank + 2 * pair
    tl.store(to_rope, real, mask=(pair >= 0) & written)
    tl.store(to_rope + 1, imaginary, mask=(pair >= 0) & written)
    if keep:
        own = rows + token * (rank + rope)
        tl.store(own + c, to_bf16(value))
        tl.store(own + rank + 2 * pair, real)
        tl.store(own + rank + 2 * pair + 1, imaginary)


def write_latents(
    latent: Tensor, key: Tensor, weight: Tensor, eps: float, positions: Tensor, cos_sin: Tensor,
    slots: Tensor, layer: Tensor, *, ue8m0: bool = False, keep: bool = False,
) -> Tensor | None:  # fmt: skip
    """latent [T, c], key [T, r] bf16, not yet normalised and rotated (columns of the projection:
    rows may be strided), weight [c] fp32, positions and slots [T] int64, cos_sin [P, r] fp32 ->
    written into layer (mla_rows.py) at the flat slots. keep: the rows [T, c + r] in bf16 come back
    as well. ue8m0: FP8 scales are powers of two. ShapeRefused for other shapes and dtypes."""
    tokens, rank = latent.shape
    rope = key.shape[1]
    views = cache_views(layer, rank, rope)
    check_widths(rank, rope, latent.dtype, f"latent {tuple(latent.shape)}")
    if key.shape[0] != tokens or weight.shape != (rank,) or cos_sin.shape[1] != rope:
        raise ShapeRefused(
            f"latent {tuple(latent.shape)}, key {tuple(key.shape)}, weight {tuple(weight.shape)}, "
            f"cos_sin {tuple(cos_sin.shape)}: must be [T, c], [T, r], [c], [P, r]"
        )
    if weight.dtype != torch.float32 or cos_sin.dtype != torch.float32:
        raise ShapeRefused(f"weight {weight.dtype}, cos_sin {cos_sin.dtype}: must be float32")
    if any(x.shape != (tokens,) or x.dtype != torch.int64 for x in (positions, slots)):
        raise ShapeRefused(
            f"positions {positions.dtype} {tuple(positions.shape)}, slots {slots.dtype} "
            f"{tuple(slots.shape)}: must be int64 [{tokens}]"
        )
    latent, key = (x if x.stride(1) == 1 else x.contiguous() for x in (latent, key))
    rows = latent.new_empty(tokens, rank + rope) if keep else None
    if tokens:
        mla_cache_kernel[(tokens,)](
            latent, key, weight, cos_sin, positions, slots, views.latents, views.scales,
            views.ropes, latent if rows is None else rows, latent.stride(0), key.stride(0),
            layer.shape[0] * layer.shape[1], eps,
            rank=rank, rope=rope, fp8=views.fp8, ue8m0=ue8m0, keep=keep, num_warps=1,
        )  # fmt: skip
    return rows


# -- twin, cost, compile cases --------------------------------------------------------------------


def write_latents_twin(
    latent: Tensor, key: Tensor, weight: Tensor, eps: float, positions: Tensor, cos_sin: Tensor
) -> Tensor:
    """What write_latents puts at each slot, [T, c + r] float64, not rounded."""
    wide = latent.double()
    normed = wide * torch.rsqrt(wide.square().mean(dim=1, keepdim=True) + eps) * weight.double()
    cos, sin = cos_sin[positions.clamp(min=0)].double().chunk(2, dim=1)
    even, odd = key.double()[:, 0::2], key.double()[:, 1::2]
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=2).flatten(1)
    return torch.cat((normed, turned), dim=1)


def cost(tokens: int, rank: int = 512, rope: int = 64, fp8: bool = False) -> KernelCost:
    """What is read and written of each token, and its angles; the norm's weight once."""
    read = 2 * (rank + rope) + 4 * rope + 16
    return KernelCost(tokens * (read + row_bytes(rank, rope, fp8)) + 4 * rank, 0)


def compile_cases() -> list[CompileCase]:
    cases = []
    for fp8, ue8m0, keep in (
        (False, False, False), (True, False, False), (True, False, True), (True, True, False),
    ):  # fmt: skip
        kind = f"fp8{' ue8m0' if ue8m0 else ''}" if fp8 else "bf16"
        signature = dict.fromkeys(("latent", "key", "ropes", "rows"), "*bf16")
        signature |= dict.fromkeys(("weight", "cos_sin", "scales"), "*fp32")
        signature |= dict.fromkeys(("positions", "slots"), "*i64")
        signature |= dict.fromkeys(("latent_row", "key_row"), "i32")
        cases.append(
            CompileCase(
                mla_cache_kernel,
                "mla_cache",
                f"{kind}{' keep' if keep else ''} w1",
                signature
                | {"latents": "*fp8e4nv" if fp8 else "*bf16", "slots_left": "i32", "eps": "fp32"},
                {"rank": 512, "rope": 64, "fp8": fp8, "ue8m0": ue8m0, "keep": keep},
                num_warps=1,
                divisible=("latent_row", "key_row"),
                wants={90: ("wide loads",), 100: ("wide loads",)},
            )
        )
    return cases
