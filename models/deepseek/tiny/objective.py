"""The joint loss: next token, token after next, and agreement of the MTP head with the main head.

Knows how to get loss and gradients of two hidden states through one shared head without ever
holding all logits. Knows nothing of the network that made them.

Shape letters: B sequences, M of them for the MTP head too, S positions, D hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class JointLoss(torch.autograd.Function):
    """Main cross-entropy + ce * MTP cross-entropy + agree * KL(main's next step || MTP).

    The main head's distribution at i+1 is the teacher of MTP row i and gets no gradient from it.
    Gradients are made in the forward pass, sequence by sequence, and only scaled afterwards.
    """

    @staticmethod
    def forward(
        ctx: Any, main: Tensor, mtp: Tensor, head: Tensor, tokens: Tensor, ce: float, agree: float
    ) -> tuple[Tensor, Tensor]:
        """main [B, S, D]; mtp [M <= B, S, D]; head [V, D]; tokens [B, S+2] -> loss, [main, mtp]."""
        batch, length, _ = main.shape
        totals = (batch * length, len(mtp) * length)
        weight = head.to(main.dtype)
        d_main, d_mtp = torch.empty_like(main), torch.empty_like(mtp)
        d_head = torch.zeros(head.shape, dtype=torch.float32)
        losses = torch.zeros(2)
        rows = torch.arange(length)
        for b in range(batch):
            first, second = tokens[b, 1 : length + 1], tokens[b, 2 : length + 2]
            p = torch.softmax((main[b] @ weight.t()).float(), -1)  # [S, V]
            losses[0] -= p[rows, first].clamp_min(1e-30).log().sum()
            parts = [(p, main, d_main, totals[0])]
            if b < len(mtp):
                m = torch.softmax((mtp[b] @ weight.t()).float(), -1)
                losses[1] -= m[rows, second].clamp_min(1e-30).log().sum()
                m[:-1] *= ce + agree
                m[-1] *= ce
                m[:-1].sub_(p[1:], alpha=agree)
                m[rows, second] -= ce
                parts.append((m, mtp, d_mtp, totals[1]))
            p[rows, first] -= 1.0
            for grad, hidden, out, total in parts:
                low = grad.mul_(1.0 / total).to(main.dtype)
                torch.mm(low, weight, out=out[b])
                d_head += low.t() @ hidden[b]
        ctx.save_for_backward(d_main, d_mtp, d_head)
        losses /= torch.tensor(totals)
        ctx.mark_non_differentiable(losses)
        return losses[0] + ce * losses[1], losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The stored gradients times the incoming one."""
        d_main, d_mtp, d_head = ctx.saved_tensors
        g = grads[0]
        return d_main * g.to(d_main.dtype), d_mtp * g.to(d_mtp.dtype), d_head * g, None, None, None
