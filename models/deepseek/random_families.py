"""Small (and one middling) Hugging Face configs for each family that can be served.

Knows: config.json keys as the real releases write them, with tiny dimensions. Knows nothing of
tensors; `random_checkpoint` writes those.
"""

from __future__ import annotations

from typing import Any

FAMILIES = ("v3", "v2-lite", "v2", "kimi", "moonlight", "glm-lite")
SIZES = ("tiny", "bench")

_TINY: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 384, "moe_intermediate_size": 128,
    "num_hidden_layers": 4, "first_k_dense_replace": 1, "num_attention_heads": 4,
    "num_key_value_heads": 4, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
    "q_lora_rank": 96, "kv_lora_rank": 128, "n_routed_experts": 16, "num_experts_per_tok": 4,
    "n_shared_experts": 1, "vocab_size": 512, "max_position_embeddings": 2048,
}  # fmt: skip
# About 1.7 B parameters: what benchmarks against other engines run on.
_BENCH: dict[str, Any] = _TINY | {
    "hidden_size": 1024, "intermediate_size": 4096, "moe_intermediate_size": 512,
    "num_hidden_layers": 16, "num_attention_heads": 8, "num_key_value_heads": 8,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "q_lora_rank": 512,
    "kv_lora_rank": 512, "n_routed_experts": 64, "num_experts_per_tok": 6, "vocab_size": 32768,
    "max_position_embeddings": 16384,
}  # fmt: skip
_COMMON: dict[str, Any] = {
    "hidden_act": "silu", "attention_bias": False, "moe_layer_freq": 1, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
    "torch_dtype": "bfloat16",
}  # fmt: skip
_SIGMOID: dict[str, Any] = {
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True,
}  # fmt: skip


def yarn(factor: float, original: int, fast: float = 32, mscale: float = 1.0) -> dict[str, Any]:
    """rope_scaling as DeepSeek's configs spell it."""
    return {
        "type": "yarn", "factor": factor, "original_max_position_embeddings": original,
        "beta_fast": fast, "beta_slow": 1, "mscale": mscale, "mscale_all_dim": mscale,
    }  # fmt: skip


def family_config(family: str, size: str = "tiny", **overrides: Any) -> dict[str, Any]:
    """config.json of a random checkpoint; overrides replace keys. ValueError for unknown names."""
    if family not in FAMILIES or size not in SIZES:
        raise ValueError(
            f"family={family!r}, size={size!r}: valid are {', '.join(FAMILIES)} and "
            f"{', '.join(SIZES)}"
        )
    base = _COMMON | (_TINY if size == "tiny" else _BENCH)
    original = 64 if size == "tiny" else 4096  # tiny prompts shall reach past it
    v3 = base | _SIGMOID | {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
    if family == "v3":
        config = v3 | {
            "n_group": 4 if size == "tiny" else 8, "topk_group": 2 if size == "tiny" else 4,
            "routed_scaling_factor": 2.5, "rope_theta": 10000,
            "rope_scaling": yarn(40, original),
            "num_nextn_predict_layers": 1 if size == "tiny" else 0,
        }  # fmt: skip
    elif family == "kimi":
        config = v3 | {
            "model_type": "kimi_k2", "n_group": 1, "topk_group": 1, "rope_theta": 50000.0,
            "routed_scaling_factor": 2.827, "rope_scaling": yarn(32.0, original, fast=1.0),
            "num_nextn_predict_layers": 0,
        }  # fmt: skip
    elif family == "moonlight":
        config = v3 | {
            "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.446, "q_lora_rank": None,
            "n_shared_experts": 2, "rms_norm_eps": 1e-5, "rope_theta": 50000.0,
            "rope_scaling": None, "num_nextn_predict_layers": 0,
        }  # fmt: skip
    elif family == "glm-lite":
        config = v3 | {
            "model_type": "glm4_moe_lite", "architectures": ["Glm4MoeLiteForCausalLM"],
            "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.8, "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
            "eos_token_id": [1, 2], "num_nextn_predict_layers": 1,
            "partial_rotary_factor": 1.0,
        }  # fmt: skip
        if size == "tiny":  # nope < v, unlike DeepSeek's
            config |= {"qk_nope_head_dim": 48, "v_head_dim": 64, "num_attention_heads": 5,
                       "num_key_value_heads": 5, "hidden_size": 320}  # fmt: skip
    else:
        config = base | {
            "model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"],
            "scoring_func": "softmax", "norm_topk_prob": False, "rope_theta": 10000,
            "n_shared_experts": 2,
        }  # fmt: skip
        if family == "v2":
            config |= {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
                       "routed_scaling_factor": 16.0,
                       "rope_scaling": yarn(40, original)}  # fmt: skip
        else:
            config |= {"topk_method": "greedy", "n_group": 1, "topk_group": 1, "q_lora_rank": None,
                       "routed_scaling_factor": 1.0,
                       "rope_scaling": yarn(40, original, mscale=0.707)}  # fmt: skip
    return config | overrides
