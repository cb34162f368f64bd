"""How far a drafter is from the target: cross-entropy against what the target would say itself.

The teacher is half the target's distribution (sampled service) and half its choice (greedy). The
target's head is shared and frozen, so no gradient of it is made, and never all logits are held.

Shape letters: R rows, D hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

GREEDY = 0.5  # share of the choice in the teacher
CHUNK = 512


@torch.no_grad()
def teacher(hidden: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    """hidden [R, D], head [V, D] -> what a draft of each row's next token should be [R, V] in the
    head's dtype, and the target's choice [R]."""
    goal = torch.empty(len(hidden), len(head), dtype=head.dtype)
    choice = torch.empty(len(hidden), dtype=torch.long)
    for start in range(0, len(hidden), CHUNK):
        rows = slice(start, start + CHUNK)
        p = torch.softmax((hidden[rows].to(head.dtype) @ head.t()).float(), -1).mul_(1 - GREEDY)
        choice[rows] = p.argmax(-1)
        p[torch.arange(len(p)), choice[rows]] += GREEDY
        goal[rows] = p
    return goal, choice


class Disagreement(torch.autograd.Function):
    """Mean cross-entropy of softmax(feature @ head) against the goal; the gradient is made in the
    forward pass. Beside it, each row's choice."""

    @staticmethod
    def forward(ctx: Any, feature: Tensor, head: Tensor, goal: Tensor) -> tuple[Tensor, Tensor]:
        """feature [R, D]; head [V, D]; goal [R, V] -> loss, choice [R]."""
        grads = torch.empty_like(feature)
        choice = torch.empty(len(feature), dtype=torch.long)
        loss = torch.zeros(())
        for start in range(0, len(feature), CHUNK):
            rows = slice(start, start + CHUNK)
            low = torch.log_softmax((feature[rows].to(head.dtype) @ head.t()).float(), -1)
            choice[rows] = low.argmax(-1)
            aim = goal[rows].float()
            loss -= torch.linalg.vecdot(aim, low).sum()
            grad = low.exp_().sub_(aim).to(head.dtype)
            grads[rows] = (grad @ head).to(feature.dtype)
        ctx.save_for_backward(grads / len(feature))
        ctx.mark_non_differentiable(choice)
        return loss / len(feature), choice

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The stored gradient times the incoming one."""
        (grad,) = ctx.saved_tensors
        return grad * grads[0].to(grad.dtype), None, None
