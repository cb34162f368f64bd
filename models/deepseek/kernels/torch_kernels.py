"""The slow, obvious twin of the kernels: plain torch, fp32 inside, runs wherever torch runs.

Row-invariant by construction (law 5): each row is computed by itself, by calls whose shapes and
memory alignment never change, because the libraries underneath torch give other bits for another
number of rows, another place of a row in a tile and even another alignment of the same numbers.
Attention walks fixed partitions of absolute positions in order. Speed is not a goal.

Knows nothing of other implementations. Shape letters as in base.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ep.bundle import Bundle
from models.deepseek.fp8 import BLOCK, Fp8Rows, dequantise_weight, scale_shape
from models.deepseek.kernels.base import (
    AbsorbedMla,
    ExpertWeights,
    GateSpec,
    LinearWeight,
    MlaShape,
    MlaWeights,
)
from models.deepseek.kernels.errors import KernelArgumentError
from models.deepseek.kernels.fp8_latents import is_fp8, pack_rows, read_rows
from models.deepseek.kernels.mla_parts import latents_by_parts, mla_by_parts
from models.interface import ForwardBatch

PARTITION = 64  # absolute positions a softmax partition
ALIGNMENT = 64  # bytes; what torch's own allocator gives


class TorchLinearWeight:
    """A weight [N, C] as it is."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.out_features, self.in_features = weight.shape
        self.nbytes = weight.numel() * weight.element_size()

    def unpack(self) -> Tensor:
        return self.weight


class TorchExpertWeights:
    """[e, 3 * I * D]: a slot's gate [I, D], up [I, D] and down [D, I] lie in one row."""

    def __init__(self, num_slots: int, hidden: int, intermediate: int, dtype: torch.dtype) -> None:
        self.num_slots, self.hidden, self.intermediate = num_slots, hidden, intermediate
        self.data = torch.zeros(num_slots, 3 * intermediate * hidden, dtype=dtype)
        self.nbytes = self.data.numel() * self.data.element_size()

    def store(self, slot: int, gate: Tensor, up: Tensor, down: Tensor) -> None:
        for target, source in zip(self.fetch(slot), (gate, up, down), strict=True):
            target.copy_(source)

    def fetch(self, slot: int) -> tuple[Tensor, Tensor, Tensor]:
        """Views, so that store() can write through them."""
        gate, up, down = self.data[slot].view(3, -1)
        shape = (self.intermediate, self.hidden)
        return gate.view(shape), up.view(shape), down.view(self.hidden, self.intermediate)

    def bundle(self, slot: int) -> Bundle:
        return Bundle(self.data[slot].view(torch.uint8))


class TorchFp8LinearWeight:
    """Rows [N, C] in e4m3 with their scales; dequantised again at each use."""

    def __init__(self, rows: Fp8Rows, dtype: torch.dtype) -> None:
        self.values, self.scales, self.dtype = rows.values.clone(), rows.scales.clone(), dtype
        self.out_features, self.in_features = rows.values.shape
        self.nbytes = self.values.nbytes + self.scales.nbytes

    def unpack(self) -> Tensor:
        return Fp8Rows(self.values, self.scales).dequantise(self.dtype)


class TorchFp8ExpertWeights:
    """[e, bytes]: a slot's gate, up and down in e4m3, then their scales, a block of rows each."""

    def __init__(self, num_slots: int, hidden: int, intermediate: int, dtype: torch.dtype) -> None:
        self.num_slots, self.hidden, self.intermediate = num_slots, hidden, intermediate
        self.dtype = dtype
        wide, tall = (intermediate, hidden), (hidden, intermediate)
        self._shapes = (wide, wide, tall)
        values = sum(rows * columns for rows, columns in self._shapes)
        self._scales_at = -(-values // 4) * 4  # fp32 begins at a multiple of its size
        scales = sum(math.prod(scale_shape(shape)) for shape in self._shapes)
        self.data = torch.zeros(num_slots, self._scales_at + 4 * scales, dtype=torch.uint8)
        self.nbytes = self.data.nbytes

    def store(self, slot: int, gate: Tensor, up: Tensor, down: Tensor) -> None:
        raise KernelArgumentError("these experts are kept in e4m3: use store_fp8")

    def store_fp8(self, slot: int, gate: Fp8Rows, up: Fp8Rows, down: Fp8Rows) -> None:
        for (values, scales), rows in zip(self._parts(slot), (gate, up, down), strict=True):
            of_blocks = rows.scales_of_groups(BLOCK)
            if of_blocks is None:
                raise KernelArgumentError(f"scales differ among rows of one {BLOCK}")
            values.copy_(rows.values.view(torch.uint8))
            scales.copy_(of_blocks)

    def fetch(self, slot: int) -> tuple[Tensor, Tensor, Tensor]:
        gate, up, down = (
            dequantise_weight(values.view(torch.float8_e4m3fn), scales, self.dtype)
            for values, scales in self._parts(slot)
        )
        return gate, up, down

    def bundle(self, slot: int) -> Bundle:
        return Bundle(self.data[slot])

    def _parts(self, slot: int) -> list[tuple[Tensor, Tensor]]:
        """Views of each matrix's bytes [N, C] and scales."""
        parts: list[tuple[Tensor, Tensor]] = []
        values, scales = self.data[slot].split(
            [self._scales_at, self.data.shape[1] - self._scales_at]
        )
        scales = scales.view(torch.float32)
        for shape in self._shapes:
            grid = scale_shape(shape)
            of_matrix, of_scales = values[: math.prod(shape)], scales[: math.prod(grid)]
            parts.append((of_matrix.view(shape), of_scales.view(grid)))
            values, scales = values[math.prod(shape) :], scales[math.prod(grid) :]
        return parts


def aligned(x: Tensor) -> Tensor:
    """x contiguous at an address that does not depend on where it was cut from."""
    x = x.contiguous()
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()


def by_rows(x: Tensor, width: int, call: Callable[[Tensor], Tensor]) -> Tensor:
    """x [T, C] -> call on each row [C] alone, in fp32, joined to [T, width] fp32."""
    out = torch.empty(x.shape[0], width)
    for target, row in zip(out, x, strict=True):
        target.copy_(call(aligned(row.float())))
    return out


def matmul_rows(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, C], weight [N, C] -> [T, N] fp32, whatever T is: the same bits for the same row."""
    wide = aligned(weight.float())
    return by_rows(x, weight.shape[0], lambda row: torch.mv(wide, row))


def gated(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """down(silu(gate(x)) * up(x)), rounded to the model dtype before down and at the end."""
    both = torch.cat((matmul_rows(x, gate), matmul_rows(x, up)), dim=-1)

    def activate(row: Tensor) -> Tensor:
        left, right = row.chunk(2)
        return F.silu(left) * right

    hidden = by_rows(both, gate.shape[0], activate).to(x.dtype)
    return matmul_rows(hidden, down).to(x.dtype)


def context_slots(batch: ForwardBatch, sequence: int, row: int, block_size: int) -> Tensor:
    """[p + 1] int64: where the positions 0..p that a row at position p attends to lie in the cache.
    Through its sequence's blocks, but for the nodes of a tree of drafts on its path."""
    positions = torch.arange(int(batch.positions[row]) + 1)
    blocks = batch.block_tables[sequence].long()
    path = batch.token_ids[:0] if batch.ancestors is None else batch.ancestors[row].long()
    path = path[path >= 0]
    before = positions[: len(positions) - len(path)]
    return torch.cat((blocks[before // block_size] * block_size + before % block_size, path))


class TorchKernels:
    name = "torch"
    fp8_is_fast = False

    def misfit(self, shape: MlaShape, dtype: torch.dtype, deterministic: bool) -> str | None:
        return None

    def fp8_cache_misfit(self, shape: MlaShape) -> str | None:
        return None

    # -- weights ---------------------------------------------------------------------------
    def linear_weight(self, weight: Tensor, dtype: torch.dtype) -> TorchLinearWeight:
        return TorchLinearWeight(weight.detach().to(dtype).contiguous())

    def allocate_experts(
        self, num_slots: int, hidden: int, intermediate: int, dtype: torch.dtype
    ) -> TorchExpertWeights:
        return TorchExpertWeights(num_slots, hidden, intermediate, dtype)

    def fp8_linear_weight(self, rows: Fp8Rows, dtype: torch.dtype) -> TorchFp8LinearWeight:
        return TorchFp8LinearWeight(rows, dtype)

    def allocate_fp8_experts(
        self, num_slots: int, hidden: int, intermediate: int, dtype: torch.dtype
    ) -> TorchFp8ExpertWeights:
        return TorchFp8ExpertWeights(num_slots, hidden, intermediate, dtype)

    # -- dense -----------------------------------------------------------------------------
    def linear(
        self, x: Tensor, weight: LinearWeight, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        return matmul_rows(x, weight.unpack()).to(out_dtype or x.dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        gain = weight.float()

        def norm(row: Tensor) -> Tensor:
            return row * torch.rsqrt(row.square().mean() + eps) * gain

        return by_rows(x, x.shape[1], norm).to(x.dtype)

    def add_rms_norm(self, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual.copy_(residual.float() + x.float())
        return self.rms_norm(residual, weight, eps)

    def mlp(self, x: Tensor, gate_up: LinearWeight, down: LinearWeight) -> Tensor:
        gate, up = gate_up.unpack().chunk(2)
        return gated(x, gate, up, down.unpack())

    # -- experts ---------------------------------------------------------------------------
    def gate(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, spec: GateSpec
    ) -> tuple[Tensor, Tensor]:
        logits = matmul_rows(x, weight)  # [T, E]
        num_rows, num_experts = logits.shape
        if spec.scoring == "sigmoid":
            scores = by_rows(logits, num_experts, torch.sigmoid)
        elif spec.scoring == "softmax":
            scores = by_rows(logits, num_experts, lambda row: torch.softmax(row, dim=0))
        else:
            raise ValueError(f"scoring={spec.scoring!r}: must be 'sigmoid' or 'softmax'")
        choice = scores if bias is None else scores + bias.float()
        if spec.num_groups > 1:
            grouped = choice.view(num_rows, spec.num_groups, num_experts // spec.num_groups)
            best = grouped.sort(dim=-1, descending=True).values
            counted = 2 if spec.group_score == "top2" else 1
            group_scores = best[..., :counted].sum(dim=-1)
            order = group_scores.sort(dim=-1, descending=True, stable=True).indices
            keep = torch.zeros(num_rows, spec.num_groups, dtype=torch.bool)
            keep.scatter_(1, order[:, : spec.topk_groups], True)
            fill = float("-inf") if spec.scoring == "sigmoid" else 0.0
            choice = grouped.masked_fill(~keep.unsqueeze(-1), fill).view(num_rows, num_experts)
        # A stable sort gives equal scores to the lowest id.
        ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, : spec.top_k]
        weights = scores.gather(1, ids)
        if spec.renormalise:
            total = torch.zeros(num_rows, 1)
            for k in range(spec.top_k):
                total = total + weights[:, k : k + 1]
            weights = weights / (total + 1e-20)
        return ids.to(torch.int32), weights * spec.scale

    def experts(
        self, x: Tensor, pair_rows: Tensor, offsets: Tensor, weights: ExpertWeights
    ) -> Tensor:
        out = x.new_zeros(pair_rows.shape[0], x.shape[1])
        bounds = offsets.tolist()
        for slot in range(weights.num_slots):
            start, stop = bounds[slot], bounds[slot + 1]
            if start == stop:
                continue
            gate, up, down = weights.fetch(slot)
            out[start:stop] = gated(x[pair_rows[start:stop].long()], gate, up, down)
        return out

    def sort_pairs(self, slots: Tensor, num_slots: int) -> tuple[Tensor, Tensor, Tensor]:
        flat = slots.flatten().long()
        order = flat.argsort(stable=True)[int((flat < 0).sum()) :]  # the -1 come first
        offsets = torch.zeros(num_slots + 1, dtype=torch.int32)
        offsets[1:] = torch.bincount(flat[order], minlength=num_slots).cumsum(0)
        index = torch.full_like(flat, -1)
        index[order] = torch.arange(order.shape[0])
        return (order // slots.shape[1]).int(), offsets, index.view(slots.shape)

    def combine_pairs(self, y: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros(index.shape[0], y.shape[1])
        for k in range(index.shape[1]):
            present = index[:, k] >= 0
            term = y[index[present, k]].float() * weights[present, k].float().unsqueeze(1)
            total[present] += term
        return total

    # -- attention -------------------------------------------------------------------------
    def rope(self, x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
        cos, sin = cos_sin[positions].float().unsqueeze(1).chunk(2, dim=-1)  # [T, 1, r / 2]
        even, odd = x.float()[..., 0::2], x.float()[..., 1::2]
        rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
        return rotated.flatten(-2).to(x.dtype)

    def write_cache(
        self, layer: Tensor, latent: Tensor, k_rope: Tensor, slot_mapping: Tensor
    ) -> None:
        block_size = layer.shape[1]
        if is_fp8(layer):
            rows = pack_rows(latent, k_rope)
        else:
            rows = torch.cat((latent, k_rope), dim=-1).to(layer.dtype)
        layer[slot_mapping // block_size, slot_mapping % block_size] = rows

    def write_latents(
        self, layer: Tensor, latent: Tensor, k_rope: Tensor, batch: ForwardBatch, norm: Tensor,
        eps: float, cos_sin: Tensor,
    ) -> None:  # fmt: skip
        latents_by_parts(self, layer, latent, k_rope, batch, norm, eps, cos_sin)

    def per_head(self, x: Tensor, weight: LinearWeight, num_heads: int) -> Tensor:
        stacked = weight.unpack().view(num_heads, -1, weight.in_features)
        heads = [matmul_rows(x[:, h], stacked[h]) for h in range(num_heads)]
        return torch.stack(heads, dim=1).to(x.dtype)

    def latent_attention(
        self, q_latent: Tensor, q_rope: Tensor, layer: Tensor, batch: ForwardBatch, scale: float
    ) -> Tensor:
        rank = q_latent.shape[-1]
        query = torch.cat((q_latent, q_rope), dim=-1)

        def keys_and_values(slots: Tensor) -> tuple[Tensor, Tensor]:
            rows = cached_rows(layer, slots, rank, query.dtype)  # shared by all heads
            return rows.unsqueeze(0), rows[:, :rank].unsqueeze(0)

        return attend(query, batch, layer.shape[1], scale, rank, keys_and_values)

    def naive_attention(
        self,
        q: Tensor,
        layer: Tensor,
        kv_b: LinearWeight,
        batch: ForwardBatch,
        scale: float,
        value_dim: int,
    ) -> Tensor:
        num_heads = q.shape[1]
        rank = kv_b.in_features

        def keys_and_values(slots: Tensor) -> tuple[Tensor, Tensor]:
            rows = cached_rows(layer, slots, rank, q.dtype)
            wide = matmul_rows(rows[:, :rank], kv_b.unpack()).to(q.dtype).float()
            wide = wide.view(len(slots), num_heads, -1).transpose(0, 1)
            nope, value = wide[..., :-value_dim], wide[..., -value_dim:]
            rope = rows[:, rank:].expand(num_heads, -1, -1)
            return torch.cat((nope, rope), dim=-1), value

        return attend(q, batch, layer.shape[1], scale, value_dim, keys_and_values)

    def absorbed_mla(self, weights: MlaWeights, shape: MlaShape, cos_sin: Tensor) -> AbsorbedMla:
        return mla_by_parts(self, weights, shape, cos_sin)


def cached_rows(layer: Tensor, slots: Tensor, rank: int, dtype: torch.dtype) -> Tensor:
    """What lies at slots [p] of a cache of a model in dtype -> [p, c + r] fp32."""
    rows = layer.flatten(0, 1)[slots]
    return (read_rows(rows, rank, dtype) if is_fp8(layer) else rows).float()


def attend(
    query: Tensor,
    batch: ForwardBatch,
    block_size: int,
    scale: float,
    value_dim: int,
    keys_and_values: Callable[[Tensor], tuple[Tensor, Tensor]],
) -> Tensor:
    """query [T, H, a] over keys [H or 1, p, a] and values [H or 1, p, value_dim], which
    keys_and_values finds at slots [p] of the cache -> [T, H, v].

    Each query goes by itself over whole partitions of absolute positions in ascending order, with
    the running maximum and sum of an online softmax. Positions after it are zero rows with a score
    of -inf, so that nothing that lies there can leak.
    """
    out = query.new_zeros(query.shape[0], query.shape[1], value_dim)
    starts = batch.query_start.tolist()
    for sequence in range(batch.num_sequences):
        for row in range(starts[sequence], starts[sequence + 1]):
            slots = context_slots(batch, sequence, row, block_size)
            heads = aligned(query[row].float())  # [H, a]
            peak = torch.full((query.shape[1], 1), float("-inf"))
            total = torch.zeros(query.shape[1], 1)
            summed = torch.zeros(query.shape[1], value_dim)
            for start in range(0, len(slots), PARTITION):
                part = slots[start : start + PARTITION]
                keys, values = keys_and_values(part)
                pad = (0, 0, 0, PARTITION - len(part))
                keys, values = aligned(F.pad(keys, pad)), aligned(F.pad(values, pad))
                scores = times(heads, keys.transpose(1, 2)) * scale  # [H, PARTITION]
                scores[:, len(part) :] = float("-inf")
                new_peak = torch.maximum(peak, scores.amax(dim=-1, keepdim=True))
                shrink = torch.exp(peak - new_peak)
                chance = torch.exp(scores - new_peak)
                total = total * shrink + chance.sum(dim=-1, keepdim=True)
                summed = summed * shrink + times(chance, values)
                peak = new_peak
            out[row] = (summed / total).to(query.dtype)
    return out


def times(left: Tensor, right: Tensor) -> Tensor:
    """left [H, a] by right [1, a, b] (shared by the heads) or [H, a, b] -> [H, b]."""
    if right.shape[0] == 1:
        return left @ right[0]
    return torch.bmm(left.unsqueeze(1), right).squeeze(1)
