"""An EAGLE head's arithmetic (Li et al. 2024, the first version): a decoder layer or more over the
target's features, autoregressive in features; weights under their published names.

For position i with the known next token t_{i+1}: x = fc([embedding of t_{i+1}, h_i]); Llama layers
over it, the first of which has no norm before its attention; what comes out is a guess at h_{i+1},
and the target's own head makes tokens of it. Fed back, it drafts further.

Published names, with or without "model." in front: `fc.weight`, `fc.bias`, `embed_tokens.weight`
(else the target's), `layers.{i}.self_attn.{q,k,v,o}_proj.weight`,
`layers.{i}.mlp.{gate,up,down}_proj.weight`, `layers.{i}.post_attention_layernorm.weight`,
`layers.{i}.input_layernorm.weight` (i > 0). EAGLE-3 heads (three features, `midlayer`, a vocabulary
of their own) are refused by name.

Knows: one sequence's rows and keys at a time. Knows nothing of requests (`eagle_drafter`).

Shape letters: m rows, P past positions, D hidden, F feed-forward, H heads, G key heads, d of a
head, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from moeserve.errors import ConfigError
from moeserve.speculate.head_file import HeadFile

PREFIXES = ("model.",)
Past = tuple[Tensor, Tensor]  # keys, values [P, G, d] of a layer, keys rotated
# A layer's number, q [m, H, d], k and v [m, G, d] of the rows alone -> [m, H, d] fp32
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class EagleLayer:
    input_norm: Tensor | None  # [D]
    q: Tensor  # [H * d, D]
    k: Tensor  # [G * d, D]
    v: Tensor
    o: Tensor  # [D, H * d]
    post_norm: Tensor  # [D]
    gate: Tensor  # [F, D]
    up: Tensor
    down: Tensor  # [D, F]

    def to(self, device: torch.device) -> EagleLayer:
        moved: dict[str, Any] = {
            name: None if x is None else x.to(device) for name, x in vars(self).items()
        }
        return EagleLayer(**moved)


@dataclass(frozen=True)
class EagleHead:
    """embed None: the target's."""

    fc: Tensor  # [D, 2 D]
    fc_bias: Tensor | None
    embed: Tensor | None  # [V, D]
    layers: tuple[EagleLayer, ...]
    num_heads: int
    head_dim: int
    rope_theta: float
    eps: float

    @property
    def nbytes(self) -> int:
        own = [x for x in (self.fc, self.fc_bias, self.embed) if x is not None]
        parts = [x for layer in self.layers for x in vars(layer).values() if x is not None]
        return sum(x.nbytes for x in [*own, *parts])

    @property
    def past_bytes(self) -> int:
        """Of a token: keys and values of all layers."""
        return sum(2 * layer.k.shape[0] * layer.k.dtype.itemsize for layer in self.layers)

    def to(self, device: torch.device) -> EagleHead:
        return replace(
            self,
            fc=self.fc.to(device),
            fc_bias=None if self.fc_bias is None else self.fc_bias.to(device),
            embed=None if self.embed is None else self.embed.to(device),
            layers=tuple(layer.to(device) for layer in self.layers),
        )

    def no_past(self) -> list[Past]:
        """Of a sequence that begins."""
        groups = self.layers[0].k.shape[0] // self.head_dim
        empty = self.fc.new_zeros(0, groups, self.head_dim)
        return [(empty, empty) for _ in self.layers]


def load_eagle(file: HeadFile, hidden_size: int, vocab_size: int) -> EagleHead:
    """ConfigError if names, shapes or the kind are not those of an EAGLE head for such a target."""
    if any(file.has(name) for name in ("midlayer.hidden_norm.weight", "d2t", "t2d")):
        raise ConfigError([f"{file.where}: an EAGLE-3 head; valid are heads of EAGLE 1 and 2"])
    file.refuse_if_other("eagle")
    size = hidden_size
    heads = file.count("num_attention_heads")
    groups = file.count("num_key_value_heads", heads)
    dim = file.count("head_dim", size // max(heads, 1))
    wide = file.count("intermediate_size")
    num = file.count("num_hidden_layers", 1)
    if file.number("hidden_size", size) != size:
        file.problems.append(
            f"{file.where}: config.json hidden_size={file.config['hidden_size']}, the target's "
            f"is {size}"
        )
    if file.config.get("rope_scaling"):
        file.problems.append(f"{file.where}: config.json rope_scaling is not supported")
    if groups < 1 or heads % groups:
        file.problems.append(
            f"{file.where}: num_key_value_heads={groups} must divide num_attention_heads={heads}"
        )
    layers = []
    for i in range(num):
        at = f"layers.{i}"
        layers.append(
            EagleLayer(
                file.take(f"{at}.input_layernorm.weight", size)
                if i or file.has(f"{at}.input_layernorm.weight")
                else None,
                file.take(f"{at}.self_attn.q_proj.weight", heads * dim, size),
                file.take(f"{at}.self_attn.k_proj.weight", groups * dim, size),
                file.take(f"{at}.self_attn.v_proj.weight", groups * dim, size),
                file.take(f"{at}.self_attn.o_proj.weight", size, heads * dim),
                file.take(f"{at}.post_attention_layernorm.weight", size),
                file.take(f"{at}.mlp.gate_proj.weight", wide, size),
                file.take(f"{at}.mlp.up_proj.weight", wide, size),
                file.take(f"{at}.mlp.down_proj.weight", size, wide),
            )
        )
    made = EagleHead(
        fc=file.take("fc.weight", size, 2 * size),
        fc_bias=file.take("fc.bias", size) if file.has("fc.bias") else None,
        embed=file.take("embed_tokens.weight", vocab_size, size)
        if file.has("embed_tokens.weight")
        else None,
        layers=tuple(layers),
        num_heads=heads,
        head_dim=dim,
        rope_theta=float(file.number("rope_theta", 10000.0)),
        eps=float(file.number("rms_norm_eps", 1e-6)),
    )
    file.done()
    return made


def read_eagle(folder: str | Path, hidden_size: int, vocab_size: int) -> EagleHead:
    return load_eagle(HeadFile.read(folder, PREFIXES), hidden_size, vocab_size)


def eagle_forward(
    head: EagleHead,
    embedded: Tensor,
    hidden: Tensor,
    positions: Tensor,
    past: Seq[Past],
    mask: Tensor,
) -> tuple[Tensor, list[Past]]:
    """embedded, hidden [m, D]: of the next token of each row, and the row's feature; positions [m];
    mask [m, P + m]: what each row attends to, itself included -> features [m, D] and each layer's
    keys and values with these rows behind the past."""
    x, (grown,) = eagle_forward_many(head, embedded, hidden, positions, [past], [mask])
    return x, grown


def eagle_forward_many(
    head: EagleHead,
    embedded: Tensor,
    hidden: Tensor,
    positions: Tensor,
    pasts: Seq[Seq[Past]],
    masks: Seq[Tensor],
) -> tuple[Tensor, list[list[Past]]]:
    """The rows of several sequences, one sequence's behind another's: `eagle_forward` of each, with
    products over all rows at once."""
    counts = [len(mask) for mask in masks]
    grown: list[list[Past]] = [[] for _ in pasts]

    def attend(number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        new = (torch.split(x, counts) for x in (q, k, v))
        parts = []
        for s, (queries, own_keys, own_values) in enumerate(zip(*new, strict=True)):
            old_keys, old_values = pasts[s][number]
            keys, values = torch.cat([old_keys, own_keys]), torch.cat([old_values, own_values])
            grown[s].append((keys, values))
            parts.append(_attend(queries, keys, values, masks[s]))
        return torch.cat(parts)

    return eagle_layers(head, embedded, hidden, positions, attend), grown


def eagle_layers(
    head: EagleHead, embedded: Tensor, hidden: Tensor, positions: Tensor, attend: Attend
) -> Tensor:
    """All but attention, of rows of any sequences -> features [m, D]."""
    x = linear(torch.cat([embedded, hidden], -1).to(head.fc.dtype), head.fc, head.fc_bias)
    cos, sin = _angles(head, positions)
    for number, layer in enumerate(head.layers):
        m, dim = len(x), head.head_dim
        y = x if layer.input_norm is None else _norm(x, layer.input_norm, head.eps)
        q = _rotate(linear(y, layer.q).view(m, -1, dim), cos, sin)
        k = _rotate(linear(y, layer.k).view(m, -1, dim), cos, sin)
        v = linear(y, layer.v).view(m, -1, dim)
        x = x + linear(attend(number, q, k, v).to(x.dtype).reshape(m, -1), layer.o)
        y = _norm(x, layer.post_norm, head.eps)
        x = x + linear(silu(linear(y, layer.gate)) * linear(y, layer.up), layer.down)
    return x


def _attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """q [m, H, d], keys and values [P + m, G, d], mask [m, P + m] -> [m, H, d] fp32."""
    repeats = q.shape[1] // keys.shape[1]
    if repeats > 1:
        keys, values = keys.repeat_interleave(repeats, 1), values.repeat_interleave(repeats, 1)
    scores = q.float().transpose(0, 1) @ keys.float().permute(1, 2, 0) * q.shape[2] ** -0.5
    weights = torch.softmax(scores.masked_fill(mask.logical_not(), float("-inf")), dim=-1)
    return (weights @ values.float().transpose(0, 1)).transpose(0, 1)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y * weight.float()).to(x.dtype)


def _angles(head: EagleHead, positions: Tensor) -> tuple[Tensor, Tensor]:
    """[m, 1, d] each: Llama's, the two halves of a head turned together."""
    half = torch.arange(0, head.head_dim, 2, dtype=torch.float32, device=positions.device)
    angle = positions.float()[:, None] / head.rope_theta ** (half / head.head_dim)
    both = torch.cat([angle, angle], -1)[:, None]
    return both.cos(), both.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return (x.float() * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)


def eagle_slowly(head: EagleHead, embedded: Tensor, hidden: Tensor) -> Tensor:
    """The twin: a whole sequence from position 0, row by row and head by head, in fp32, without a
    cache -> features [m, D]."""

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).mean() + head.eps) * weight.float()

    def turn(x: Tensor, position: int) -> Tensor:
        half, out = len(x) // 2, x.clone()
        for i in range(half):
            angle = torch.tensor(position / head.rope_theta ** (2 * i / len(x)))
            out[i] = x[i] * angle.cos() - x[half + i] * angle.sin()
            out[half + i] = x[half + i] * angle.cos() + x[i] * angle.sin()
        return out

    bias = 0.0 if head.fc_bias is None else head.fc_bias.float()
    rows = [
        head.fc.float() @ torch.cat([e.float(), h.float()]) + bias
        for e, h in zip(embedded, hidden, strict=True)
    ]
    dim = head.head_dim
    for layer in head.layers:
        keys: list[list[Tensor]] = []
        values: list[list[Tensor]] = []
        out = []
        for position, x in enumerate(rows):
            y = x if layer.input_norm is None else norm(x, layer.input_norm)
            keys.append([turn(k, position) for k in torch.split(layer.k.float() @ y, dim)])
            values.append(list(torch.split(layer.v.float() @ y, dim)))
            parts = []
            for h, q in enumerate(torch.split(layer.q.float() @ y, dim)):
                group = h * len(keys[0]) // head.num_heads
                q = turn(q, position)
                scores = torch.stack([q @ k[group] for k in keys]) * dim**-0.5
                chances = torch.exp(scores - scores.max())
                parts.append(
                    sum(c * v[group] for c, v in zip(chances / chances.sum(), values, strict=True))
                )
            x = x + layer.o.float() @ torch.cat([torch.as_tensor(p) for p in parts])
            y = norm(x, layer.post_norm)
            gate = layer.gate.float() @ y
            out.append(
                x + layer.down.float() @ (gate * torch.sigmoid(gate) * (layer.up.float() @ y))
            )
        rows = out
    return torch.stack(rows)
