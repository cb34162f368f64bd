"""Many greedy or sampled continuations at once, with a cache of keys and values.

Knows the training network's layers and one length for all prompts. Knows nothing of pages or eos:
a drafter is to learn what the target says next, whatever that is.

Shape letters: B sequences, P prompt tokens, S new rows, C positions of the cache, D hidden,
h heads, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..network import Attention, Layer, Network, linear, rotary, rotate


class Cache:
    """keys [B, h, C, nope + rope] and values [B, h, C, v] of each layer; used: positions filled."""

    def __init__(self, net: Network, batch: int, positions: int, dtype: torch.dtype) -> None:
        s = net.s
        wide = s.qk_nope_head_dim + s.qk_rope_head_dim
        shape = (batch, s.num_attention_heads, positions)
        self.keys = [torch.zeros(*shape, wide, dtype=dtype) for _ in net.layers]
        self.values = [torch.zeros(*shape, s.v_head_dim, dtype=dtype) for _ in net.layers]
        self.angles = rotary(positions, s)
        self.used = 0


def _attend(block: Attention, x: Tensor, cache: Cache, layer: int) -> Tensor:
    """x [B, S, D], normed, of the positions used .. used + S - 1 -> [B, S, D]."""
    s, (batch, length, _) = block.s, x.shape
    first, end = cache.used, cache.used + length
    cos, sin = (a[first:end] for a in cache.angles)
    q = linear(block.q_a_layernorm(linear(x, block.q_a_proj), x.dtype), block.q_b_proj)
    q = q.view(batch, length, s.num_attention_heads, -1)
    q_nope, q_rope = q.split((s.qk_nope_head_dim, s.qk_rope_head_dim), -1)
    latent, k_rope = linear(x, block.kv_a_proj_with_mqa).split(
        (s.kv_lora_rank, s.qk_rope_head_dim), -1
    )
    kv = linear(block.kv_a_layernorm(latent, x.dtype), block.kv_b_proj)
    kv = kv.view(batch, length, s.num_attention_heads, -1)
    k_nope, v = kv.split((s.qk_nope_head_dim, s.v_head_dim), -1)
    k_rope = rotate(k_rope[:, :, None], cos, sin).expand(-1, -1, s.num_attention_heads, -1)
    cache.keys[layer][:, :, first:end] = torch.cat((k_nope, k_rope), -1).transpose(1, 2)
    cache.values[layer][:, :, first:end] = v.transpose(1, 2)
    q = torch.cat((q_nope, rotate(q_rope, cos, sin)), -1).transpose(1, 2)
    mask = torch.arange(end) <= torch.arange(first, end)[:, None]
    keys, values = cache.keys[layer][:, :, :end], cache.values[layer][:, :, :end]
    out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
    return linear(out.transpose(1, 2).reshape(batch, length, -1), block.o_proj)


@torch.inference_mode()
def extend(net: Network, tokens: Tensor, cache: Cache, dtype: torch.dtype) -> Tensor:
    """tokens [B, S] behind what the cache holds -> hidden after the final norm [B, S, D]."""
    x = F.embedding(tokens, net.embed_tokens)
    for number, layer in enumerate(net.layers):
        assert isinstance(layer, Layer)
        x = x + _attend(layer.self_attn, layer.input_layernorm(x, dtype), cache, number)
        normed = layer.post_attention_layernorm(x, dtype)
        x = x + layer.mlp(normed.flatten(0, 1)).view_as(x)
    cache.used += tokens.shape[1]
    return net.norm(x, dtype)


@torch.inference_mode()
def continuations(
    net: Network,
    prompts: Tensor,
    count: int,
    temperature: float = 0.0,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """prompts [B, P] -> [B, P + count]; greedy at temperature 0."""
    batch, length = prompts.shape
    cache = Cache(net, batch, length + count, dtype)
    rng = torch.Generator().manual_seed(seed)
    head = net.lm_head.to(dtype)
    whole = [prompts]
    new = prompts
    for _ in range(count):
        logits = linear(extend(net, new, cache, dtype)[:, -1], head).float()
        if temperature == 0:
            new = logits.argmax(-1, keepdim=True)
        else:
            new = torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=rng)
        whole.append(new)
    return torch.cat(whole, 1)
