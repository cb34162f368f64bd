"""What a rehearsal computes: a router and experts so tiny that every token's output can be worked
out densely, by the same row arithmetic, in fp32.

Knows: routing by a true gate or by a trace's shares, experts as plain tensors. Knows nothing of
ranks, placement or transport.

Shape letters: T tokens, D hidden, K top-k, E logical experts, L layers, I intermediate, Q rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ep.presets import Layout
from models.deepseek.kernels.base import GateSpec
from models.deepseek.kernels.select import create_kernels

HIDDEN, INTERMEDIATE, TOP_K = 16, 8, 8
NUM_LAYERS = 4
_SPEC = GateSpec(TOP_K, 8, 4, "sigmoid", "top2", renormalise=True, scale=2.5)


@dataclass(frozen=True)
class Router:
    """random: the true gate, by groups, over a random router. Of a trace: experts drawn without
    return by their share of the layer's load, the gate's scores as weights."""

    seed: int
    gate: Any  # Kernels.gate
    weights: Tensor  # [L, 256, D]
    shares: Tensor | None  # [L, 256] log of the share
    hosted: bool

    @classmethod
    def draw(
        cls, g: torch.Generator, seed: int, layout: Layout, loads: NDArray[np.float64] | None
    ) -> Router:
        weights = torch.randn(NUM_LAYERS, layout.routed_experts, HIDDEN, generator=g)
        shares = None
        if loads is not None:
            # An expert that had none in the file may still be picked, now and then.
            smooth = loads + loads.mean(axis=1, keepdims=True) * 1e-3 + 1e-30
            shares = torch.from_numpy(smooth / smooth.sum(axis=1, keepdims=True)).float().log()
        gate = create_kernels("torch").kernels.gate
        return cls(seed, gate, weights, shares, layout.shared == "hosted")

    def choose(self, x: Tensor, step: int, layer: int, rank: int) -> tuple[Tensor, Tensor]:
        """x [T, D] of this step, layer and home rank -> ids [T, K'] int32, weights [T, K'] fp32; K'
        = K and the hosted shared expert, which every token picks with weight 1."""
        weight = self.weights[layer]
        if self.shares is None:
            ids, weights = self.gate(x, weight, None, _SPEC)
        else:
            g = torch.Generator().manual_seed(((self.seed * 64 + step) * 64 + layer) * 4096 + rank)
            drawn = torch.rand(x.shape[0], len(weight), generator=g).clamp(1e-20, 1 - 1e-7)
            ids = (
                (self.shares[layer] - (-drawn.log()).log())
                .topk(_SPEC.top_k)
                .indices.to(torch.int32)
            )
            scores = (x[:, None, :] * weight[ids.long()]).sum(-1).sigmoid()
            weights = scores / scores.sum(-1, keepdim=True) * _SPEC.scale
        if self.hosted:
            one = torch.ones(x.shape[0], 1)
            ids = torch.cat([ids, one.to(torch.int32) * len(weight)], 1)
            weights = torch.cat([weights, one], 1)
        return ids, weights


@dataclass(frozen=True)
class Experts:
    """relu(x up) down, so small that a row's own weights can be gathered for it. Sums run along the
    last dimension of each row alone, so a row's output does not depend on its company.

    up [L, E, I, D], down [L, E, D, I]; the last of E is the shared expert, hosted or not.
    """

    up: Tensor
    down: Tensor
    hosted: bool

    @classmethod
    def draw(cls, g: torch.Generator, layout: Layout) -> Experts:
        shape = (NUM_LAYERS, layout.routed_experts + 1, INTERMEDIATE, HIDDEN)
        up = torch.randn(shape, generator=g) * HIDDEN**-0.5
        down = torch.randn((*shape[:2], HIDDEN, INTERMEDIATE), generator=g) * 0.2
        return cls(up, down, layout.shared == "hosted")

    def rows(self, x: Tensor, layer: int, experts: Tensor) -> Tensor:
        """x [Q, D], experts [Q] int64 -> [Q, D]."""
        inner = (x[:, None, :] * self.up[layer, experts]).sum(-1).relu()
        return (inner[:, None, :] * self.down[layer, experts]).sum(-1)

    def shared(self, x: Tensor, layer: int) -> Tensor | float:
        """What each rank adds of its own where the shared expert is replicated."""
        last = torch.full((x.shape[0],), self.up.shape[1] - 1)
        return 0.0 if self.hosted else self.rows(x, layer, last)

    def dense(self, x: Tensor, layer: int, ids: Tensor, weights: Tensor) -> Tensor:
        """The reference: every expert for every token, then what the token chose, added up in
        routing order. [T, D] fp32. By the arithmetic of `rows`, so that it should be equal to the
        last bit: else a gate's near tie in a later layer could fall to the other side."""
        tokens, num_experts = x.shape[0], self.up.shape[1]
        number = torch.arange(num_experts).repeat(tokens)
        every = self.rows(x.repeat_interleave(num_experts, 0), layer, number)
        every = every.view(tokens, num_experts, HIDDEN)
        total = torch.zeros_like(x)
        for k in range(ids.shape[1]):
            total += every[torch.arange(tokens), ids[:, k].long()] * weights[:, k : k + 1]
        return total + self.shared(x, layer)
