"""The EAGLE head as a training network: a Llama layer over (token after, feature), run on itself.

In service the head meets the target's features only up to the last certain token; behind it, it
reads its own. So it is trained in passes: pass 0 reads the target's features, pass j at position i
what pass j - 1 made of position i - 1, and its attention sees what it would see in service: pass
0's rows up to i - j and the drafts' rows behind them.

Knows the layer and its published names. Knows nothing of losses or data.

Shape letters: B sequences, S positions, D hidden, F feed-forward, h heads, d of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..network import Norm, linear, matrix

HEADS, WIDTH, THETA = 4, 768, 10000.0


class EagleNet(nn.Module):
    """embed [V, D]: the target's, frozen."""

    def __init__(self, embed: Tensor, eps: float, heads: int = HEADS, width: int = WIDTH) -> None:
        super().__init__()
        size = embed.shape[1]
        self.embed, self.heads = embed, heads
        self.fc = nn.Parameter(torch.cat([torch.zeros(size, size), torch.eye(size)], 1))
        self.fc_bias = nn.Parameter(torch.zeros(size))
        self.q, self.k, self.v = (matrix(size, size) for _ in range(3))
        self.o = matrix(size, size, zero=True)
        self.norm = Norm(size, eps)
        self.gate, self.up = matrix(width, size), matrix(width, size)
        self.down = matrix(size, width, zero=True)

    def forward(
        self, following: Tensor, hidden: Tensor, passes: int, dtype: torch.dtype = torch.bfloat16
    ) -> list[Tensor]:
        """following [B, S]: the token after each position; hidden [B, S, D], the target's ->
        guesses at the next position's feature, [B, S, D] a pass. The first j rows of pass j are
        void: no draft that deep can stand there."""
        cos, sin = _angles(hidden.shape[1], self.q.shape[0] // self.heads)
        embedded = F.embedding(following, self.embed)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        found: list[Tensor] = []
        feature = hidden.float()
        for number in range(passes):
            x = torch.cat([embedded, feature], -1).to(dtype)
            x = F.linear(x, self.fc.to(dtype), self.fc_bias.to(dtype))
            keys.append(_turn(self._split(linear(x, self.k)), cos, sin))
            values.append(self._split(linear(x, self.v)))
            q = _turn(self._split(linear(x, self.q)), cos, sin)
            x = x + linear(_attend(q, keys, values, number), self.o)
            y = self.norm(x, dtype)
            x = x + linear(F.silu(linear(y, self.gate)) * linear(y, self.up), self.down)
            found.append(x)
            feature = _down(x.float(), 1, 1)
        return found

    def _split(self, x: Tensor) -> Tensor:
        """[B, S, D] -> [B, h, S, d]."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def published(self) -> dict[str, Tensor]:
        """Its tensors under the names that such heads are published with; no embedding of its own:
        the target's is meant then."""
        layer = "layers.0"
        return {
            "fc.weight": self.fc.data,
            "fc.bias": self.fc_bias.data,
            f"{layer}.post_attention_layernorm.weight": self.norm.weight.data,
        } | {
            f"{layer}.{part}_proj.weight": getattr(self, part.split(".")[1]).data
            for part in (
                *("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o"),
                *("mlp.gate", "mlp.up", "mlp.down"),
            )
        }

    def config(self, vocab_size: int) -> dict[str, object]:
        """config.json in the manner of published heads."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "bias": True,
            "hidden_act": "silu",
            "hidden_size": self.q.shape[0],
            "intermediate_size": self.gate.shape[0],
            "num_attention_heads": self.heads,
            "num_hidden_layers": 1,
            "num_key_value_heads": self.heads,
            "rms_norm_eps": self.norm.eps,
            "rope_theta": THETA,
            "torch_dtype": "bfloat16",
            "vocab_size": vocab_size,
        }


def _down(x: Tensor, by: int, dim: int) -> Tensor:
    """Row i becomes row i + by, zeros come first."""
    if not by:
        return x
    lost = x.narrow(dim, 0, x.shape[dim] - by)
    return torch.cat([torch.zeros_like(x.narrow(dim, 0, by)), lost], dim)


def _attend(q: Tensor, keys: list[Tensor], values: list[Tensor], number: int) -> Tensor:
    """q [B, h, S, d] of pass `number`; keys and values of the passes 0 .. number -> [B, S, D]."""
    length, dim = q.shape[2], q.shape[3]
    rows = torch.arange(length)
    seen = rows <= rows[:, None] - number
    scores = (q @ keys[0].transpose(2, 3)).float().masked_fill(~seen, float("-inf"))
    drafts = range(1, number + 1)
    own = [(q * _down(keys[m], number - m, 2)).float().sum(-1, keepdim=True) for m in drafts]
    weights = torch.softmax(torch.cat([scores, *own], -1) * dim**-0.5, -1).to(q.dtype)
    out = weights[..., :length] @ values[0]
    for m in drafts:
        at = length + m - 1
        out = out + weights[..., at : at + 1] * _down(values[m], number - m, 2)
    return out.transpose(1, 2).flatten(2)


def _angles(length: int, dim: int) -> tuple[Tensor, Tensor]:
    """[S, d] each: Llama's, the two halves of a head turned together."""
    half = torch.arange(0, dim, 2, dtype=torch.float32)
    angle = torch.arange(length, dtype=torch.float32)[:, None] / THETA ** (half / dim)
    both = torch.cat([angle, angle], -1)
    return both.cos(), both.sin()


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return (x.float() * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)
