"""Multi-head latent attention over the paged latent cache.

Knows: projections, RoPE, the absorbed and the naive form and when each is used. Knows nothing of
blocks' owners, requests or experts.

Absorbed: queries are brought into latent space (W_UK) and attend to the cache as it is; the result
comes back through W_UV. Deterministic mode uses it for every row. Fast mode expands keys and
values (naive form) for sequences with many new tokens, where that costs less.

Shape letters: T tokens, D hidden, H heads, c kv_lora_rank, r rope dim, n nope dim, v value dim.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from models.crossing import sent_all
from models.deepseek.config import DeepSeekConfig
from models.deepseek.kernels.base import AbsorbedMla, Kernels, MlaShape
from models.deepseek.weights import AttentionWeights
from models.interface import ForwardBatch


def naive_from(config: DeepSeekConfig) -> int:
    """New tokens of a sequence from which the naive form needs fewer multiplications.

    A context position costs c * (n + v) a head to expand once; then each query saves
    (2c + r) - (n + r + v) a head on it.
    """
    c = config
    saved = 2 * c.kv_lora_rank - c.qk_nope_head_dim - c.v_head_dim
    if saved <= 0:
        return 1 << 30
    return -(-c.kv_lora_rank * (c.qk_nope_head_dim + c.v_head_dim) // saved)


@dataclass(frozen=True)
class AttentionPlan:
    """Which of a step's sequences attend in which form, each part as a batch of its own, with the
    rows [T'] of the whole batch that it covers; a part that is None has no sequences."""

    absorbed: ForwardBatch | None
    absorbed_rows: Tensor | None  # None: all rows
    naive: ForwardBatch | None
    naive_rows: Tensor | None


def plan_attention(batch: ForwardBatch, threshold: int | None) -> AttentionPlan:
    """threshold: new tokens from which a sequence goes the naive way; None: never.

    Mixed steps are cut in two by sequences, by what the host knows of them; where only the device
    knows (`batch.host`), by a look at it.
    """
    if threshold is None or batch.max_query_len < threshold:
        return AttentionPlan(batch, None, None, None)
    starts = (batch if batch.host is None else batch.host).query_start
    is_long = starts[1:] - starts[:-1] >= threshold
    if bool(is_long.all()):
        return AttentionPlan(None, None, batch, None)
    long_part, long_rows = _select(batch, is_long.nonzero().squeeze(1))
    short_part, short_rows = _select(batch, (~is_long).nonzero().squeeze(1))
    return AttentionPlan(short_part, short_rows, long_part, long_rows)


def _select(batch: ForwardBatch, sequences: Tensor) -> tuple[ForwardBatch, Tensor]:
    """sequences [S']: where the lengths are known. -> their part, and its rows on the device."""
    known = batch if batch.host is None else batch.host
    lengths = (known.query_start[1:] - known.query_start[:-1])[sequences].to(torch.int64)
    starts = torch.zeros(len(sequences) + 1, dtype=torch.int64, device=lengths.device)
    torch.cumsum(lengths, 0, out=starts[1:])
    first = known.query_start[:-1][sequences].to(torch.int64) - starts[:-1]
    rows = torch.arange(int(starts[-1]), device=lengths.device)
    rows = rows + first.repeat_interleave(lengths)
    longest = int(lengths.max()), int(known.context_len[sequences].max())
    starts = starts.to(known.query_start.dtype)
    part = _part(known, sequences, rows, starts, *longest)
    if batch.host is None:
        return part, rows
    sequences, rows, starts = sent_all([sequences, rows, starts], batch.positions.device)
    return replace(_part(batch, sequences, rows, starts, *longest), host=part), rows


def _part(
    batch: ForwardBatch, sequences: Tensor, rows: Tensor, starts: Tensor,
    max_query_len: int, max_context_len: int,
) -> ForwardBatch:  # fmt: skip
    return ForwardBatch(
        token_ids=batch.token_ids[rows],
        positions=batch.positions[rows],
        slot_mapping=batch.slot_mapping[rows],
        query_start=starts,
        context_len=batch.context_len[sequences],
        block_tables=batch.block_tables[sequences],
        logits_rows=rows[:0],
        max_query_len=max_query_len,
        max_context_len=max_context_len,
        ancestors=None if batch.ancestors is None else batch.ancestors[rows],
        total_context=batch.total_context,
    )


class Attention:
    """The attention of all layers: weights and cache come with each call."""

    def __init__(self, config: DeepSeekConfig, kernels: Kernels, cos_sin: Tensor) -> None:
        self.config, self.kernels, self.cos_sin = config, kernels, cos_sin
        self._whole: dict[int, AbsorbedMla] = {}  # by id of the weights, which each keeps alive

    def __call__(
        self, x: Tensor, weights: AttentionWeights, layer: Tensor, batch: ForwardBatch,
        plan: AttentionPlan,
    ) -> Tensor:  # fmt: skip
        """x [T, D] normed, layer: the cache [blocks, block, c + r], or in FP8, written here ->
        [T, D]."""
        if plan.naive is None:
            assert plan.absorbed is not None
            return self._absorbed_layer(weights)(x, layer, plan.absorbed)
        c, k, w = self.config, self.kernels, weights
        heads, n, v = c.num_attention_heads, c.qk_nope_head_dim, c.v_head_dim
        joined = k.linear(x, w.qkv_a)
        split = joined.shape[1] - c.cache_width
        q, latent, k_rope = joined.tensor_split((split, split + c.kv_lora_rank), dim=1)
        if w.q_b is not None:
            assert w.q_a_norm is not None
            q = k.linear(k.rms_norm(q, w.q_a_norm, c.latent_norm_eps), w.q_b)
        eps = c.latent_norm_eps
        k.write_latents(layer, latent, k_rope, batch, w.kv_a_norm, eps, self.cos_sin)
        q = q.reshape(-1, heads, c.qk_head_dim)  # [T, H, n + r]
        q_nope = q[..., :n]
        q_rope = k.rope(q[..., n:], batch.positions, self.cos_sin)
        if plan.absorbed is None:
            out = self._naive(q_nope, q_rope, w, layer, plan.naive)
        else:
            out = q.new_empty(q.shape[0], heads, v)
            few, many = plan.absorbed_rows, plan.naive_rows
            assert few is not None and many is not None
            out[few] = self._absorbed(q_nope[few], q_rope[few], w, layer, plan.absorbed)
            out[many] = self._naive(q_nope[many], q_rope[many], w, layer, plan.naive)
        return k.linear(out.reshape(-1, heads * v), w.o)

    def _absorbed_layer(self, weights: AttentionWeights) -> AbsorbedMla:
        """The whole layer as one kernel, made at its first use."""
        layer = self._whole.get(id(weights))
        if layer is None:
            layer = self.kernels.absorbed_mla(weights, attention_shape(self.config), self.cos_sin)
            self._whole[id(weights)] = layer
        return layer

    def _absorbed(
        self, q_nope: Tensor, q_rope: Tensor, w: AttentionWeights, layer: Tensor,
        batch: ForwardBatch,
    ) -> Tensor:  # fmt: skip
        heads, scale = self.config.num_attention_heads, self.config.softmax_scale
        q_latent = self.kernels.per_head(q_nope, w.w_uk, heads)  # [T, H, c]
        attended = self.kernels.latent_attention(q_latent, q_rope, layer, batch, scale)
        return self.kernels.per_head(attended, w.w_uv, heads)  # [T, H, v]

    def _naive(
        self, q_nope: Tensor, q_rope: Tensor, w: AttentionWeights, layer: Tensor,
        batch: ForwardBatch,
    ) -> Tensor:  # fmt: skip
        assert w.kv_b is not None
        q = torch.cat((q_nope, q_rope), dim=-1)
        scale, v = self.config.softmax_scale, self.config.v_head_dim
        return self.kernels.naive_attention(q, layer, w.kv_b, batch, scale, v)


def attention_shape(config: DeepSeekConfig) -> MlaShape:
    return MlaShape(
        num_heads=config.num_attention_heads,
        nope_dim=config.qk_nope_head_dim,
        rope_dim=config.qk_rope_head_dim,
        rank=config.kv_lora_rank,
        value_dim=config.v_head_dim,
        scale=config.softmax_scale,
        norm_eps=config.latent_norm_eps,
    )
