"""What a model's config says about work: parameters and FLOPs by part, bytes of a token's cache.

Knows: `DeepSeekConfig`. Knows nothing of GPUs, layouts or times. All per layer, of one token, where
not said otherwise; a multiplication and its addition are two FLOPs.

Shape letters: D hidden, H heads, q and c query and latent ranks, n, r, v head dims (nope, rope,
value), I expert intermediate, K top-k, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from models.deepseek.config import DeepSeekConfig


@dataclass(frozen=True)
class ModelShape:
    config: DeepSeekConfig

    # -- parameters ------------------------------------------------------------------------

    @property
    def attention(self) -> int:
        """Projections of a layer: q_a, q_b (or q), kv_a, kv_b, o."""
        m = self.config
        heads = m.num_attention_heads
        query = m.hidden_size * heads * m.qk_head_dim
        if m.q_lora_rank is not None:
            query = m.q_lora_rank * (m.hidden_size + heads * m.qk_head_dim)
        return query + m.hidden_size * m.cache_width + self.up + self.output_projection

    @property
    def up(self) -> int:
        """kv_b: from the latent to keys and values; absorbed in decode, where it stays BF16."""
        m = self.config
        return m.kv_lora_rank * m.num_attention_heads * (m.qk_nope_head_dim + m.v_head_dim)

    @property
    def output_projection(self) -> int:
        m = self.config
        return m.num_attention_heads * m.v_head_dim * m.hidden_size

    @property
    def expert(self) -> int:
        """One routed expert: gate, up, down."""
        return 3 * self.config.hidden_size * self.config.moe_intermediate_size

    @property
    def shared(self) -> int:
        return self.expert * self.config.n_shared_experts

    @property
    def dense(self) -> int:
        """The feed-forward part of a dense layer."""
        return 3 * self.config.hidden_size * self.config.intermediate_size

    @property
    def gate(self) -> int:
        return self.config.hidden_size * self.config.n_routed_experts

    @property
    def embedding(self) -> int:
        """The table, and as much again for the head (one of both where they are tied)."""
        return self.config.vocab_size * self.config.hidden_size

    @property
    def layers(self) -> int:
        return self.config.num_hidden_layers

    @property
    def moe_layers(self) -> int:
        return self.config.num_moe_layers

    @property
    def total(self) -> int:
        """Parameters of the main model."""
        tables = 1 if self.config.tie_word_embeddings else 2
        moe = self.expert * self.config.n_routed_experts + self.shared + self.gate
        dense = (self.layers - self.moe_layers) * self.dense
        attention = self.layers * self.attention
        return tables * self.embedding + attention + self.moe_layers * moe + dense

    @property
    def active(self) -> int:
        """Parameters that one token is multiplied with: the head too, not the table that it is
        looked up in."""
        moe = self.expert * self.config.num_experts_per_tok + self.shared + self.gate
        dense = (self.layers - self.moe_layers) * self.dense
        return self.layers * self.attention + self.moe_layers * moe + dense + self.embedding

    # -- FLOPs of a token --------------------------------------------------------------------

    def core_flops(self, context: float, absorbed: bool) -> float:
        """Scores and values over `context` positions. Absorbed: all heads over the latent, keys of
        c + r and values of c; else keys of n + r and values of v."""
        m = self.config
        widths = m.qk_head_dim + m.v_head_dim
        if absorbed:
            widths = m.cache_width + m.kv_lora_rank
        return 2.0 * m.num_attention_heads * context * widths

    # -- bytes -------------------------------------------------------------------------------

    def kv_bytes(self, fp8: bool = False, mtp_layers: int = 0) -> int:
        """Of a token in all layers, and in so many MTP layers. FP8: the latent in e4m3 with an fp32
        scale a 128 channels, the rope part in BF16 (DeepSeek's layout: 656 bytes a layer for
        c = 512, r = 64)."""
        m = self.config
        width = 2 * m.cache_width
        if fp8:
            width = m.kv_lora_rank + 4 * -(-m.kv_lora_rank // 128) + 2 * m.qk_rope_head_dim
        return width * (m.num_hidden_layers + mtp_layers)

    @property
    def weight_bytes(self) -> float:
        """Bytes of a quantised weight: e4m3 with a scale a 128 x 128 block, or BF16."""
        return 1 + 4 / (128 * 128) if self.config.quantization else 2.0

    @property
    def weights_in(self) -> str:
        """As the config says: quantised ones, or BF16 where it names no quantisation."""
        return "fp8" if self.config.quantization else "bf16"

    def dispatch_bytes(self, fp8: bool = True) -> float:
        """A token's row on its way to one rank: values and scales, or BF16."""
        hidden = self.config.hidden_size
        return hidden + 4 * -(-hidden // 128) if fp8 else 2 * hidden

    @property
    def combine_bytes(self) -> float:
        return 2 * self.config.hidden_size
