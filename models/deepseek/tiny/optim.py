"""The optimisers: Muon for matrices, Adam for the rest, the sign rule for the gate's bias.

Knows which parameter goes where, how a step is taken at a given learning-rate multiplier, and how
a step is divided between workers that share memory. Knows nothing of the schedule. Sources: Muon
(Jordan et al. 2024: momentum, then Newton-Schulz); auxiliary-loss-free balancing (arXiv
2408.15664; DeepSeek-V3 report 2.1.2).

Shape letters: n matrices of one shape, r rows, c columns, L MoE layers, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .network import Network

MATRIX_RATE, EMBED_RATE, OTHER_RATE = 0.01, 0.015, 0.002
MATRIX_DECAY = 0.02
BETA1, BETA2, EPSILON = 0.9, 0.97, 1e-10


def orthogonalise(g: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz in bf16: [n, r, c] -> nearly orthogonal [n, r, c] (singular values ~1)."""
    x = g.bfloat16()
    flip = x.shape[1] > x.shape[2]
    if flip:
        x = x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        poly = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, poly, x, beta=3.4445)
    return x.mT if flip else x


class Optimiser:
    """All state lies in shared memory; each worker updates the parameters that it owns.

    Steps of W workers: each calls `publish` with its gradients, all meet, each calls `step`, all
    meet. No gradient is ever copied twice and no state exists twice.
    """

    def __init__(self, net: Network, workers: int) -> None:
        self.params = dict(net.named_parameters())
        vectors = ("embed_tokens", "lm_head")
        self.is_matrix = {
            n: p.ndim > 1 and n not in vectors and not n.endswith("mlp.gate")
            for n, p in self.params.items()
        }
        self.first = {n: torch.zeros_like(p).share_memory_() for n, p in self.params.items()}
        self.second = {
            n: torch.zeros_like(p).share_memory_()
            for n, p in self.params.items()
            if not self.is_matrix[n]
        }
        self.grads = [
            {n: torch.zeros_like(p).share_memory_() for n, p in self.params.items()}
            for _ in range(workers)
        ]
        costs = [0.0] * workers  # matrices cost far more than their size: 10 products an element
        self.owner: dict[str, int] = {}
        for name, p in sorted(self.params.items(), key=lambda item: -item[1].numel()):
            self.owner[name] = costs.index(min(costs))
            costs[self.owner[name]] += p.numel() * (5.0 if self.is_matrix[name] else 1.0)

    @torch.no_grad()
    def publish(self, worker: int) -> None:
        """Moves this worker's gradients to where the owners read them."""
        for name, p in self.params.items():
            assert p.grad is not None, name
            self.grads[worker][name].copy_(p.grad)
            p.grad = None

    @torch.no_grad()
    def step(self, worker: int, number: int, rate: float) -> None:
        """Step `number` (from 1) of the owned parameters, at `rate` (0..1) of the base rates."""
        momentum = min(0.95, 0.85 + 0.1 * number / 300)
        for name, p in self.params.items():
            if self.owner[name] != worker:
                continue
            grad = self.grads[0][name]
            for other in self.grads[1:]:
                grad.add_(other[name])
            grad.div_(len(self.grads))
            if self.is_matrix[name]:
                self._muon(name, p, grad, rate, momentum)
            else:
                self._adam(name, p, grad, rate, number)

    def _muon(self, name: str, p: Tensor, grad: Tensor, rate: float, momentum: float) -> None:
        buffer = self.first[name].lerp_(grad, 1 - momentum)
        update = grad.lerp_(buffer, momentum)
        parts = 2 if name.endswith("gate_up") else 1  # gate and up are two matrices
        shaped = update.view(-1, update.shape[-2] // parts, update.shape[-1])
        scale = max(1.0, shaped.shape[1] / shaped.shape[2]) ** 0.5
        p.mul_(1 - MATRIX_RATE * rate * MATRIX_DECAY)
        for part, whole in zip(shaped.split(32), p.view_as(shaped).split(32), strict=True):
            whole.add_(orthogonalise(part).float(), alpha=-MATRIX_RATE * rate * scale)

    def _adam(self, name: str, p: Tensor, grad: Tensor, rate: float, number: int) -> None:
        first = self.first[name].lerp_(grad, 1 - BETA1)
        second = self.second[name].mul_(BETA2).addcmul_(grad, grad, value=1 - BETA2)
        root = (second / (1 - BETA2**number)).sqrt_().add_(EPSILON)
        base = EMBED_RATE if name == "embed_tokens" else OTHER_RATE
        p.addcdiv_(first, root, value=-base * rate / (1 - BETA1**number))

    def state(self) -> dict[str, Any]:
        """Everything that the next step depends on."""
        return {"first": self.first, "second": self.second}

    def load(self, state: dict[str, Any]) -> None:
        """Takes what `state` gave."""
        for kind in ("first", "second"):
            for name, buffer in state[kind].items():
                getattr(self, kind)[name].copy_(buffer)


@torch.no_grad()
def balance(net: Network, load: Tensor, speed: float) -> float:
    """b += speed * sign(mean load - load), load [L, E]. Returns the step's mean max/mean load."""
    mean = load.mean(1, keepdim=True)
    for block, row in zip(net.moe_layers(), torch.sign(mean - load), strict=True):
        block.bias += speed * row
    return float((load.max(1).values / mean[:, 0]).mean())
