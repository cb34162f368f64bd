"""DeepSeekConfig: the shape and the rules of one model, in one frozen object.

Knows: dimensions, gate rules, RoPE with YaRN, norm epsilons, token ids. Reading a Hugging Face
`config.json` as found in the wild is `config_hf`. Knows nothing of tensors, ranks or requests.

Norm epsilon: the layer norms use `rms_norm_eps`; the two norms inside MLA (q_a_layernorm,
kv_a_layernorm) use 1e-6 whatever the config says, as transformers does (its logits are our
yardstick; vLLM and SGLang use rms_norm_eps there, which differs for Moonlight, K2.5 and GLM).
`head_dim` of a config is never used: it means different things in different families.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from models.deepseek.kernels.base import GateSpec

LATENT_NORM_EPS = 1e-6  # transformers' rule for q_a_layernorm and kv_a_layernorm


@dataclass(frozen=True)
class Yarn:
    """YaRN as DeepSeek trains it. mscale scales cos and sin, mscale_all_dim the softmax."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True

    def cos_sin_factor(self) -> float:
        """The multiplier of cos and sin: 1 for every released model."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return _mscale(self.factor, self.mscale) / _mscale(self.factor, self.mscale_all_dim)
        return _mscale(self.factor, 1.0)

    def softmax_factor(self) -> float:
        """m(factor, mscale_all_dim)^2, or 1 when mscale_all_dim is absent or zero."""
        if not self.mscale_all_dim:
            return 1.0
        return _mscale(self.factor, self.mscale_all_dim) ** 2


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True)
class Rope:
    """interleaved: pairs (2i, 2i+1) rotate together; False: (i, i + r/2), "half-split"."""

    theta: float
    interleaved: bool = True
    yarn: Yarn | None = None


@dataclass(frozen=True)
class BlockFP8:
    """e4m3 weights with one scale a block. ue8m0: activation scales are powers of two as well."""

    block: tuple[int, int] = (128, 128)
    ue8m0: bool = False


@dataclass(frozen=True)
class DeepSeekConfig:
    """One model of the MLA + DeepSeekMoE family. Field names follow Hugging Face keys."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    first_k_dense_replace: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    routed_scaling_factor: float
    scoring_func: str  # "sigmoid" | "softmax"
    topk_method: str  # "noaux_tc" | "greedy" | "group_limited_greedy"
    norm_topk_prob: bool
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rms_norm_eps: float
    rope: Rope
    max_position_embeddings: int
    num_mtp_layers: int = 0
    tie_word_embeddings: bool = False
    quantization: BlockFP8 | None = None
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    latent_norm_eps: float = LATENT_NORM_EPS
    tensor_prefix: str = ""  # "language_model." inside a multimodal wrapper
    ignored_prefixes: tuple[str, ...] = ()  # towers of a wrapper that are not the text model

    @classmethod
    def from_hf(cls, source: dict[str, Any] | str | Path) -> DeepSeekConfig:
        """From a config dict, a config.json, or a checkpoint folder.

        A folder also yields the eos ids of generation_config.json and of the tokenizer.
        Raises UnsupportedModel (another model) or ConfigError (a broken config).
        """
        from models.deepseek.config_hf import read_config

        return read_config(source)

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cache_width(self) -> int:
        """Values a token a layer in the latent cache: 512 + 64 for the released models."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def cache_bytes(self, itemsize: int, fp8: bool = False) -> int:
        """Of a token in a layer of the latent cache. itemsize: of a value in the model's dtype.
        fp8: see kernels/fp8_latents.py; 656 for the released models in bf16, else 1152."""
        if not fp8:
            return self.cache_width * itemsize
        scales = 4 * -(-self.kv_lora_rank // 128)
        return self.kv_lora_rank + scales + self.qk_rope_head_dim * itemsize

    @property
    def softmax_scale(self) -> float:
        scale = float(self.qk_head_dim**-0.5)
        return scale * self.rope.yarn.softmax_factor() if self.rope.yarn else scale

    @property
    def num_moe_layers(self) -> int:
        """MoE layers of the main model; MTP layers come on top."""
        return self.num_hidden_layers - self.first_k_dense_replace

    @property
    def num_logical_experts(self) -> int:
        return self.n_routed_experts

    @property
    def has_gate_bias(self) -> bool:
        return self.topk_method == "noaux_tc"

    def num_placement_layers(self, with_mtp: bool = True) -> int:
        """Rows of an ExpertPlacement: the MoE layers in order, then the MTP layers."""
        return self.num_moe_layers + (self.num_mtp_layers if with_mtp else 0)

    def gate_spec(self) -> GateSpec:
        from models.deepseek.kernels.base import GateSpec  # torch, which a config does not need

        grouped = self.topk_method != "greedy"
        return GateSpec(
            top_k=self.num_experts_per_tok,
            num_groups=self.n_group if grouped else 1,
            topk_groups=self.topk_group if grouped else 1,
            scoring=self.scoring_func,
            group_score="top2" if self.scoring_func == "sigmoid" else "max",
            renormalise=self.norm_topk_prob,
            scale=self.routed_scaling_factor,
        )
