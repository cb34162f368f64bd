"""Medusa heads as a training network: residual blocks over one hidden state, the target's head.

Published heads bring a projection to the vocabulary each. These share the target's own, which is
frozen (`original_lm_head` in config.json): for a vocabulary of 4096 and a hidden size of 256 each
projection would be sixteen times as large as a block.

Shape letters: B sequences, S positions, D hidden.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEADS, BLOCKS = 4, 4


class MedusaNet(nn.Module):
    """Head i guesses the token i + 2 places after its row's own."""

    def __init__(self, size: int, heads: int = HEADS, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.heads, self.blocks = heads, blocks
        self.weights = nn.ParameterList(torch.zeros(size, size) for _ in range(heads * blocks))
        self.biases = nn.ParameterList(torch.zeros(size) for _ in range(heads * blocks))

    def forward(self, hidden: Tensor, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
        """hidden [B, S, D] -> what each head hands to the target's head, [B, S, D]."""
        found = []
        for head in range(self.heads):
            x = hidden.to(dtype)
            for block in range(head * self.blocks, (head + 1) * self.blocks):
                weight, bias = self.weights[block].to(dtype), self.biases[block].to(dtype)
                x = x + F.silu(F.linear(x, weight, bias))
            found.append(x)
        return found

    def published(self) -> dict[str, Tensor]:
        """Its tensors under the names that such heads are published with."""
        found = {}
        for head in range(self.heads):
            for block in range(self.blocks):
                name, at = f"{head}.{block}.linear", head * self.blocks + block
                found[f"{name}.weight"] = self.weights[at].data
                found[f"{name}.bias"] = self.biases[at].data
        return found

    def config(self, vocab_size: int) -> dict[str, object]:
        """config.json in the manner of published heads."""
        return {
            "hidden_size": self.weights[0].shape[0],
            "medusa_num_heads": self.heads,
            "medusa_num_layers": self.blocks,
            "original_lm_head": True,
            "torch_dtype": "bfloat16",
            "vocab_size": vocab_size,
        }
