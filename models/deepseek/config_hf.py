"""Hugging Face config.json, as found in the wild, to a DeepSeekConfig, or a refusal by name.

Knows: which model types are ours, the defaults their configs leave out, the two spellings of RoPE
settings, the text model inside a multimodal wrapper, where eos ids hide. Missing keys take the
default that transformers gives the family, except for two: a missing tie_word_embeddings never
ties and a missing number of MTP layers is none (the wrapper classes would tie, and V3's class
would promise an MTP layer that many checkpoints lack).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from models.deepseek.config import BlockFP8, DeepSeekConfig, Rope, Yarn
from models.deepseek.config_fields import Fields
from models.deepseek.errors import ConfigError, UnsupportedModel

_REFUSED = {
    "deepseek_v32": "V3.2 attends sparsely through an indexer (DSA); only dense MLA is built",
    "glm_moe_dsa": "GLM-5 attends sparsely through an indexer (DSA); only dense MLA is built",
    "deepseek_v4": "V4 has compressed sparse attention, hyper-connections and FP4 experts",
    "deepseek_v41": "V4.1 has V4's attention, Engram tables and 32x32 FP8 blocks",
    "deepseek_v41_text": "V4.1 has V4's attention, Engram tables and 32x32 FP8 blocks",
    "kimi_linear": "Kimi-Linear / K3 mixes linear attention (KDA) with MLA without RoPE",
    "kimi_k3": "K3 mixes linear attention (KDA) with MLA without RoPE",
    "glm4_moe": "GLM-4.5 / 4.6 attend by grouped queries (GQA), not by MLA",
    "deepseek": "DeepSeek-MoE 16B (V1) attends by heads of its own (MHA), not by MLA",
}
_V3_DEFAULTS: dict[str, Any] = {
    "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "num_experts_per_tok": 8,
    "n_shared_experts": 1, "norm_topk_prob": True, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "first_k_dense_replace": 3, "rms_norm_eps": 1e-6,
}  # fmt: skip
_V2_DEFAULTS: dict[str, Any] = {
    "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "n_shared_experts": 2,
    "norm_topk_prob": False, "scoring_func": "softmax", "topk_method": "greedy",
    "first_k_dense_replace": 0, "rms_norm_eps": 1e-6,
}  # fmt: skip
_GLM_DEFAULTS = _V3_DEFAULTS | {
    "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.8, "num_experts_per_tok": 4,
    "first_k_dense_replace": 1, "rms_norm_eps": 1e-5,
}  # fmt: skip
_DEFAULTS = {
    "deepseek_v2": _V2_DEFAULTS,
    "deepseek_v3": _V3_DEFAULTS,
    "kimi_k2": _V3_DEFAULTS,
    "glm4_moe_lite": _GLM_DEFAULTS,
}
_DIMENSIONS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
    "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok", "kv_lora_rank",
    "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "max_position_embeddings",
)  # fmt: skip
_Q_LORA = {"glm4_moe_lite": 768}
_NULL_MEANS = {"n_group": 1, "topk_group": 1, "n_shared_experts": 0}
# Keys that would change the model if they were set to anything else.
_MUST_BE = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "moe_layer_freq": 1,
}
# Keys of neighbouring architectures: set to anything, they mean another model than the one built.
_FOREIGN = (
    "index_topk", "index_n_heads", "sliding_window", "swiglu_limit", "compress_ratios", "hc_mult",
    "o_lora_rank", "num_hash_layers", "expert_dtype", "use_qk_norm", "zero_expert_num",
    "mla_scale_q_lora", "mla_scale_kv_lora", "mla_use_nope", "linear_attn_config",
    "final_logit_softcapping", "attn_logit_softcapping",
)  # fmt: skip
_ROPE_KEYS = {
    "type", "rope_type", "rope_theta", "partial_rotary_factor", "factor", "beta_fast", "beta_slow",
    "original_max_position_embeddings", "mscale", "mscale_all_dim", "attention_factor", "truncate",
}  # fmt: skip


def read_config(source: dict[str, Any] | str | Path) -> DeepSeekConfig:
    """See DeepSeekConfig.from_hf."""
    if isinstance(source, dict):
        return _parse(source, "config", ())
    path = Path(source)
    if path.is_dir():
        folder: Path | None = path
        path = path / "config.json"
    else:
        folder = path.parent if path.name == "config.json" else None
    config = read_json(path)
    extra: tuple[int, ...] = ()
    if folder is not None:
        side = folder / "hf_quant_config.json"
        if side.is_file() and "quantization_config" not in config:
            config = config | {"quantization_config": {"quant_method": _side_method(side)}}
        extra = _folder_eos(folder)
    return _parse(config, str(path), extra)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ConfigError when it is absent or is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(str(path), ["file not found"]) from error
    except (ValueError, OSError) as error:
        raise ConfigError(str(path), [f"not readable as JSON: {error}"]) from error
    if not isinstance(value, dict):
        raise ConfigError(str(path), [f"holds a {type(value).__name__}, not an object"])
    return value


def _parse(top: dict[str, Any], source: str, extra_eos: tuple[int, ...]) -> DeepSeekConfig:
    try:
        return _parse_text(top, source, extra_eos)
    except (ConfigError, UnsupportedModel):
        raise
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(source, [f"a value of the wrong kind: {error!r}"]) from error


def _parse_text(top: dict[str, Any], source: str, extra_eos: tuple[int, ...]) -> DeepSeekConfig:
    model_type = str(top.get("model_type") or "")
    text, prefix, ignored = top, "", ()  # type: dict[str, Any], str, tuple[str, ...]
    if model_type == "kimi_k25":
        if not isinstance(top.get("text_config"), dict):
            raise ConfigError(source, ["kimi_k25 without a text_config object"])
        text = top["text_config"]
        prefix, ignored = "language_model.", ("vision_tower.", "mm_projector.")
    inner = str(text.get("model_type") or "")
    if inner not in _DEFAULTS:
        reason = _REFUSED.get(inner, "no such architecture is built" if inner else "no model_type")
        raise UnsupportedModel(inner or model_type, reason)
    named = model_type if model_type == inner else f"{model_type} ({inner} inside)"
    ungrouped = {k: v for k, v in _NULL_MEANS.items() if k in text and text[k] is None}
    merged = _DEFAULTS[inner] | {k: v for k, v in text.items() if v is not None} | ungrouped
    _check_fixed(named, merged)
    problems: list[str] = []
    fields, outer = Fields(merged, problems), Fields(top, problems)
    dimensions = {key: fields.integer(key, 1) for key in _DIMENSIONS}
    # null or 0: queries come straight from the hidden state
    merged.setdefault("q_lora_rank", text.get("q_lora_rank", _Q_LORA.get(inner, 1536)))
    eos = outer.ids("eos_token_id") + extra_eos
    eos += fields.ids("eos_token_id") if text is not top else ()
    mtp_key = "num_nextn_predict_layers"
    if merged.get(mtp_key) is None and merged.get("num_mtp_layers") is not None:
        mtp_key = "num_mtp_layers"
    values: dict[str, Any] = dimensions | {
        "first_k_dense_replace": _first_dense(named, text, fields),
        "n_shared_experts": fields.integer("n_shared_experts", 0),
        "n_group": fields.integer("n_group", 1),
        "topk_group": fields.integer("topk_group", 1),
        "routed_scaling_factor": fields.number("routed_scaling_factor"),
        "norm_topk_prob": fields.flag("norm_topk_prob", True),
        "q_lora_rank": fields.integer("q_lora_rank", 0, default=0) or None,
        "rms_norm_eps": fields.number("rms_norm_eps"),
        "rope": _rope(named, text, problems),
        "num_mtp_layers": fields.integer(mtp_key, 0, default=0),
        "tie_word_embeddings": Fields(text, problems).flag("tie_word_embeddings", False),
        "bos_token_id": (fields if "bos_token_id" in text else outer).optional_integer(
            "bos_token_id"
        ),
        "pad_token_id": (fields if "pad_token_id" in text else outer).optional_integer(
            "pad_token_id", least=-1
        ),
    }
    quant = Fields(text, problems).table("quantization_config") or outer.table(
        "quantization_config"
    )
    if problems:
        raise ConfigError(source, sorted(set(problems), key=problems.index))
    config = DeepSeekConfig(
        model_type=inner,
        scoring_func=merged["scoring_func"],
        topk_method=merged["topk_method"],
        quantization=_quantization(named, quant),
        eos_token_ids=tuple(sorted(set(eos))),
        tensor_prefix=prefix,
        ignored_prefixes=ignored,
        **values,
    )
    problems = _inconsistencies(config)
    if problems:
        raise ConfigError(source, problems)
    return config


def _check_fixed(model_type: str, merged: dict[str, Any]) -> None:
    for key, wanted in _MUST_BE.items():
        if key in merged and merged[key] != wanted:
            raise UnsupportedModel(model_type, f"{key}={merged[key]!r}; only {wanted!r} is built")
    foreign = [f"{k}={merged[k]!r}" for k in _FOREIGN if merged.get(k)]
    if foreign:
        raise UnsupportedModel(
            model_type, f"{', '.join(foreign)}: another architecture's setting, which is not built"
        )
    kinds = merged.get("layer_types")
    if kinds is not None and any(kind != "full_attention" for kind in kinds):
        raise UnsupportedModel(
            model_type, f"layer_types={kinds!r}: only full attention in every layer is built"
        )
    softmax = merged["model_type"] == "deepseek_v2"
    allowed = ("greedy", "group_limited_greedy") if softmax else ("noaux_tc",)
    scoring = "softmax" if softmax else "sigmoid"
    if merged["scoring_func"] != scoring or merged["topk_method"] not in allowed:
        raise UnsupportedModel(
            model_type,
            f"gate scoring_func={merged['scoring_func']!r}, topk_method={merged['topk_method']!r}; "
            f"this family is built with {scoring!r} and {' or '.join(map(repr, allowed))}",
        )
    if softmax and merged["norm_topk_prob"]:
        raise UnsupportedModel(
            model_type,
            "norm_topk_prob=true with a softmax gate: reference codes disagree on the scaling",
        )


def _first_dense(model_type: str, text: dict[str, Any], fields: Fields) -> int:
    value = fields.integer("first_k_dense_replace", 0)
    types = text.get("mlp_layer_types")
    if types is None:
        return value
    dense = list(types).count("dense")
    if list(types) != ["dense"] * dense + ["sparse"] * (len(types) - dense):
        raise UnsupportedModel(
            model_type, f"mlp_layer_types={types!r}: only dense layers first, then sparse, is built"
        )
    layers = fields.values.get("num_hidden_layers")
    if len(types) != layers:
        fields.problems.append(
            f"mlp_layer_types has {len(types)} entries; num_hidden_layers={layers} are needed"
        )
    if text.get("first_k_dense_replace") is not None and value != dense:
        fields.problems.append(
            f"first_k_dense_replace={value}, but mlp_layer_types says {dense}: both must agree"
        )
    return dense


def _rope(model_type: str, text: dict[str, Any], problems: list[str]) -> Rope:
    """`rope_parameters` (always filled by transformers 5, also without scaling) or `rope_scaling`
    with `rope_theta` beside it. Whether there is scaling is told by the type, not by presence."""
    top = Fields(text, problems)
    settings = top.table("rope_scaling")
    for key, value in top.table("rope_parameters").items():
        if settings.get(key, value) != value:
            problems.append(
                f"rope_parameters.{key}={value!r}, but rope_scaling has {settings[key]!r}: one of "
                "them must go"
            )
        settings[key] = value
    unknown = [f"{k}={v!r}" for k, v in settings.items() if k not in _ROPE_KEYS]
    if unknown:
        raise UnsupportedModel(model_type, f"RoPE settings {', '.join(unknown)} are not built")
    if any(d.get("partial_rotary_factor", 1.0) not in (1.0, None) for d in (settings, text)):
        raise UnsupportedModel(model_type, "partial_rotary_factor other than 1 is not built")
    fields = Fields(settings, problems, "rope ")
    with_theta = fields if "rope_theta" in settings else top
    theta = with_theta.number("rope_theta", above=1.0, default=10000.0)
    interleaved = top.flag("rope_interleave", True)
    kinds = {settings[k] for k in ("rope_type", "type") if k in settings} or {"default"}
    kind = kinds.pop()
    if kinds:
        problems.append(f"rope type={kind!r} and {kinds.pop()!r}: one of them must go")
    if kind == "default":
        if settings.get("factor", 1) != 1:
            problems.append(
                f"rope factor={settings['factor']!r} with type 'default': 'yarn' is needed to scale"
            )
        return Rope(theta=theta, interleaved=interleaved)
    if kind not in ("yarn", "deepseek_yarn"):
        raise UnsupportedModel(model_type, f"RoPE scaling {kind!r}; only yarn is built")
    original = fields.integer("original_max_position_embeddings", 1)
    positions = text.get("max_position_embeddings")
    if "factor" not in settings and isinstance(positions, int):
        settings["factor"] = max(positions / original, 1.0)
    fast = fields.number("beta_fast", default=32.0)
    slow = fields.number("beta_slow", default=1.0)
    if fast < slow:
        problems.append(f"rope beta_fast={fast:g}: at least beta_slow={slow:g} is needed")
    yarn = Yarn(
        factor=fields.number("factor", least=1.0),
        original_max_position_embeddings=original,
        beta_fast=fast,
        beta_slow=slow,
        mscale=fields.optional_number("mscale"),
        mscale_all_dim=fields.optional_number("mscale_all_dim"),
        attention_factor=fields.optional_number("attention_factor"),
        truncate=fields.flag("truncate", True),
    )
    return Rope(theta=theta, interleaved=interleaved, yarn=yarn)


def _quantization(model_type: str, quant: dict[str, Any]) -> BlockFP8 | None:
    if not quant:
        return None
    method = str(quant.get("quant_method", quant.get("quant_algo", "?")))
    if method != "fp8":
        detail = quant.get("quant_algo") or quant.get("format") or quant.get("bits")
        named = f"{method} ({detail})" if detail else method
        raise UnsupportedModel(
            model_type, f"quantisation {named}; only fp8 e4m3 with 128x128 block scales is built"
        )
    fmt, block = quant.get("fmt", "e4m3"), quant.get("weight_block_size")
    if fmt != "e4m3" or block != [128, 128]:
        raise UnsupportedModel(
            model_type,
            f"fp8 with fmt={fmt!r}, weight_block_size={block}; only e4m3 with [128, 128] is built",
        )
    if quant.get("activation_scheme", "dynamic") != "dynamic":
        raise UnsupportedModel(
            model_type, f"fp8 activation_scheme={quant['activation_scheme']!r}; only dynamic"
        )
    return BlockFP8(block=(128, 128), ue8m0=quant.get("scale_fmt") == "ue8m0")


def _inconsistencies(c: DeepSeekConfig) -> list[str]:
    problems = []
    if not 0 <= c.first_k_dense_replace < c.num_hidden_layers:
        problems.append(
            f"first_k_dense_replace={c.first_k_dense_replace}: valid are 0 to "
            f"{c.num_hidden_layers - 1} (one MoE layer at least)"
        )
    if c.num_experts_per_tok > c.n_routed_experts:
        problems.append(
            f"num_experts_per_tok={c.num_experts_per_tok}: at most "
            f"n_routed_experts={c.n_routed_experts}"
        )
    if c.n_routed_experts % c.n_group:
        problems.append(f"n_group={c.n_group}: must divide n_routed_experts={c.n_routed_experts}")
    elif not 1 <= c.topk_group <= c.n_group:
        problems.append(f"topk_group={c.topk_group}: valid are 1 to n_group={c.n_group}")
    elif c.topk_method != "greedy":
        size = c.n_routed_experts // c.n_group
        if c.topk_group * size < c.num_experts_per_tok:
            problems.append(
                f"num_experts_per_tok={c.num_experts_per_tok} > topk_group * group size "
                f"= {c.topk_group * size}"
            )
        if c.scoring_func == "sigmoid" and size < 2:
            problems.append(
                f"n_group={c.n_group}: groups of {size}, but a group scores by its two best"
            )
    if c.qk_rope_head_dim % 2:
        problems.append(f"qk_rope_head_dim={c.qk_rope_head_dim}: must be even")
    bad = [t for t in c.eos_token_ids if not 0 <= t < c.vocab_size]
    if bad:
        problems.append(f"eos_token_id={bad}: valid are 0 to {c.vocab_size - 1} (vocab_size)")
    return problems


def _folder_eos(folder: Path) -> tuple[int, ...]:
    """eos ids of generation_config.json and of the tokenizer: real releases disagree."""
    ids: tuple[int, ...] = ()
    generation = folder / "generation_config.json"
    if generation.is_file():
        problems: list[str] = []
        ids += Fields(read_json(generation), problems).ids("eos_token_id")
        if problems:
            raise ConfigError(str(generation), problems)
    settings = folder / "tokenizer_config.json"
    if not settings.is_file():
        return ids
    try:
        return ids + _tokenizer_eos(read_json(settings), folder / "tokenizer.json")
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        problem = f"the id of eos_token cannot be read: {error!r}"
        raise ConfigError(str(settings), [problem]) from error


def _tokenizer_eos(config: dict[str, Any], tokenizer: Path) -> tuple[int, ...]:
    eos = config.get("eos_token")
    text = eos.get("content") if isinstance(eos, dict) else eos
    if text is None:
        return ()
    added = config.get("added_tokens_decoder") or {}
    found = [int(i) for i, t in added.items() if t.get("content") == text]
    if not found and tokenizer.is_file():
        tokens = read_json(tokenizer).get("added_tokens") or []
        found = [int(t["id"]) for t in tokens if t.get("content") == text]
    return tuple(found)


def _side_method(path: Path) -> str:
    quant = Fields(read_json(path), []).table("quantization")
    return f"modelopt {quant.get('quant_algo', '')}".strip()
