"""Rotary tables: cosines and sines for each position, with YaRN.

Knows: frequencies, the YaRN ramp, the multiplier of cos and sin. Knows nothing of heads or caches.
Angles are fp32 products of position and frequency, as in the code the models were trained with.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from models.deepseek.config import Rope, Yarn


def yarn_range(theta: float, yarn: Yarn, dim: int) -> tuple[float, float]:
    """Pair indices between which the ramp runs: unscaled below, divided by factor above."""

    def pair_index(rotations: float) -> float:
        turns = yarn.original_max_position_embeddings / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(theta))

    low, high = pair_index(yarn.beta_fast), pair_index(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    return low, high + 0.001 if low == high else high


def inverse_frequencies(rope: Rope, dim: int) -> Tensor:
    """[dim / 2] fp32."""
    plain = 1.0 / (rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if rope.yarn is None:
        return plain
    low, high = yarn_range(rope.theta, rope.yarn, dim)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / rope.yarn.factor * ramp + plain * (1 - ramp)


def cos_sin_table(rope: Rope, dim: int, num_positions: int) -> Tensor:
    """[num_positions, dim] fp32: dim / 2 cosines, then dim / 2 sines."""
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(rope, dim))
    factor = rope.yarn.cos_sin_factor() if rope.yarn else 1.0
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * factor
