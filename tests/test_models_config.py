"""Configs as found in the wild: parsed with the right numbers, or refused by name with a reason."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from models.deepseek.config import DeepSeekConfig
from models.deepseek.errors import SUPPORTED_FAMILIES, ConfigError, UnsupportedModel
from models.deepseek.layout import expected_tensors
from models.deepseek.random_families import FAMILIES, family_config, yarn
from models.deepseek.rope import inverse_frequencies, yarn_range

CONFIGS = Path(__file__).parent / "data" / "configs"
V2_LITE: dict[str, Any] = {
    "model_type": "deepseek_v2", "hidden_size": 2048, "num_hidden_layers": 27,
    "num_attention_heads": 16, "first_k_dense_replace": 1, "intermediate_size": 10944,
    "n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2,
    "moe_intermediate_size": 1408, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0,
    "scoring_func": "softmax", "topk_method": "greedy", "norm_topk_prob": False,
    "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "rope_theta": 10000, "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6, "vocab_size": 102400, "bos_token_id": 100000, "eos_token_id": 100001,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707,
                     "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096,
                     "type": "yarn"},
}  # fmt: skip
V2 = V2_LITE | {
    "hidden_size": 5120, "num_hidden_layers": 60, "num_attention_heads": 128, "n_group": 8,
    "intermediate_size": 12288, "n_routed_experts": 160, "moe_intermediate_size": 1536,
    "topk_group": 3, "routed_scaling_factor": 16.0, "topk_method": "group_limited_greedy",
    "q_lora_rank": 1536,
}  # fmt: skip
MOONLIGHT = V2_LITE | {
    "model_type": "deepseek_v3", "intermediate_size": 11264, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "norm_topk_prob": True, "routed_scaling_factor": 2.446,
    "rope_theta": 50000.0, "rope_scaling": None, "rms_norm_eps": 1e-5, "vocab_size": 163840,
    "max_position_embeddings": 8192, "bos_token_id": 163584, "eos_token_id": 163586,
}  # fmt: skip
GLM_FLASH = {
    "model_type": "glm4_moe_lite", "hidden_size": 2048, "num_hidden_layers": 47,
    "num_attention_heads": 20, "intermediate_size": 10240, "moe_intermediate_size": 1536,
    "n_routed_experts": 64, "num_experts_per_tok": 4, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "routed_scaling_factor": 1.8, "norm_topk_prob": True, "q_lora_rank": 768,
    "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
    "head_dim": 64, "max_position_embeddings": 202752, "rms_norm_eps": 1e-5, "vocab_size": 154880,
    "eos_token_id": [154820, 154827, 154829], "num_nextn_predict_layers": 1,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
}  # fmt: skip


def read(name: str) -> dict[str, Any]:
    return json.loads((CONFIGS / name).read_text())


@pytest.mark.parametrize("name", ["deepseek-ai--DeepSeek-V3", "deepseek-ai--DeepSeek-R1"])
def test_v3(name: str) -> None:
    c = DeepSeekConfig.from_hf(CONFIGS / f"{name}.json")
    assert (c.num_moe_layers, c.num_mtp_layers, c.num_placement_layers()) == (58, 1, 59)
    assert (c.n_group, c.topk_group, c.num_experts_per_tok) == (8, 4, 8)
    assert c.cache_width == 576 and c.eos_token_ids == (1,) and not c.tie_word_embeddings
    assert c.quantization is not None and not c.quantization.ue8m0
    assert c.softmax_scale == pytest.approx(0.135234, abs=1e-6)
    assert c.rope.yarn is not None and c.rope.yarn.cos_sin_factor() == 1.0
    assert yarn_range(c.rope.theta, c.rope.yarn, 64) == (10, 23)
    spec = c.gate_spec()
    assert (spec.scoring, spec.group_score, spec.renormalise, spec.scale) == (
        "sigmoid", "top2", True, 2.5,
    )  # fmt: skip


def test_kimi_k2() -> None:
    c = DeepSeekConfig.from_hf(CONFIGS / "moonshotai--Kimi-K2-Instruct.json")
    assert (c.n_routed_experts, c.num_attention_heads, c.first_k_dense_replace) == (384, 64, 1)
    assert c.rope.yarn is not None and c.rope.yarn.beta_fast == c.rope.yarn.beta_slow == 1
    assert yarn_range(c.rope.theta, c.rope.yarn, 64) == (19, 20)
    assert c.softmax_scale == pytest.approx(0.130861, abs=1e-6) and c.num_mtp_layers == 0


def test_the_text_model_inside_kimi_k25() -> None:
    outer = read("moonshotai--Kimi-K2.5.json")
    del outer["text_config"]["quantization_config"]
    outer["eos_token_id"] = 163586
    del outer["tie_word_embeddings"], outer["text_config"]["tie_word_embeddings"]
    c = DeepSeekConfig.from_hf(outer)
    assert c.model_type == "kimi_k2" and c.tensor_prefix == "language_model."
    assert c.eos_token_ids == (163585, 163586) and not c.tie_word_embeddings
    assert c.rms_norm_eps == 1e-5 and c.latent_norm_eps == 1e-6
    assert c.softmax_scale == pytest.approx(0.144680, abs=1e-6)


def test_v2_and_lite() -> None:
    lite, big = DeepSeekConfig.from_hf(V2_LITE), DeepSeekConfig.from_hf(V2)
    assert lite.q_lora_rank is None and not lite.has_gate_bias and lite.num_mtp_layers == 0
    assert lite.softmax_scale == pytest.approx(0.114721, abs=1e-6)
    assert lite.gate_spec().num_groups == 1 and lite.gate_spec().scoring == "softmax"
    assert big.q_lora_rank == 1536 and big.gate_spec().num_groups == 8
    assert big.gate_spec().group_score == "max" and not big.gate_spec().renormalise
    assert DeepSeekConfig.from_hf(V2_LITE | {"n_group": None, "topk_group": None}) == lite


def test_moonlight_and_glm_flash() -> None:
    moon, glm = DeepSeekConfig.from_hf(MOONLIGHT), DeepSeekConfig.from_hf(GLM_FLASH)
    assert moon.q_lora_rank is None and moon.rope.yarn is None and moon.rms_norm_eps == 1e-5
    assert moon.softmax_scale == pytest.approx(192**-0.5)
    assert (glm.qk_head_dim, glm.v_head_dim, glm.q_lora_rank) == (256, 256, 768)
    assert glm.rope.theta == 1e6 and glm.rope.yarn is None and glm.first_k_dense_replace == 1
    assert glm.eos_token_ids == (154820, 154827, 154829) and glm.num_mtp_layers == 1
    # head_dim means other things in other releases: it is never used
    assert DeepSeekConfig.from_hf(GLM_FLASH | {"head_dim": 192}) == glm
    layers = ["dense"] * 2 + ["sparse"] * 45
    assert DeepSeekConfig.from_hf(GLM_FLASH | {"mlp_layer_types": layers}).num_moe_layers == 45


@pytest.mark.parametrize(
    ("source", "main", "mtp"),
    [
        ("deepseek-ai--DeepSeek-V3.json", 671.03, 13.46),
        ("moonshotai--Kimi-K2-Instruct.json", 1026.4, 0),
        (V2_LITE, 15.71, 0),
        (V2, 235.7, 0),
        (MOONLIGHT, 15.96, 0),
        (GLM_FLASH, 29.9, 1.27),
    ],
    ids=["V3", "Kimi-K2", "V2-Lite", "V2", "Moonlight", "GLM-4.7-Flash"],
)
def test_released_sizes(source: Any, main: float, mtp: float) -> None:
    """Parameters in billions, as the releases count them: names and shapes are complete."""
    c = DeepSeekConfig.from_hf(CONFIGS / source if isinstance(source, str) else source)
    sizes = {True: 0, False: 0}
    for tensor in expected_tensors(c).values():
        sizes[tensor.layer >= c.num_hidden_layers] += math.prod(tensor.shape)
    assert sizes[False] / 1e9 == pytest.approx(main, rel=2e-3)
    assert sizes[True] / 1e9 == pytest.approx(mtp, rel=2e-2)


@pytest.mark.parametrize("family", FAMILIES)
def test_random_families(family: str) -> None:
    assert DeepSeekConfig.from_hf(family_config(family)).n_routed_experts == 16
    assert DeepSeekConfig.from_hf(family_config(family, "bench")).hidden_size == 1024


def test_rope_settings_in_both_spellings() -> None:
    old = family_config("v3")
    scaling = dict(old["rope_scaling"])
    new = {k: v for k, v in old.items() if k not in ("rope_scaling", "rope_theta")}
    kind = scaling.pop("type")
    new["rope_parameters"] = scaling | {"rope_type": kind, "rope_theta": 10000.0}
    assert DeepSeekConfig.from_hf(new) == DeepSeekConfig.from_hf(old)
    # transformers 5 fills rope_parameters also where nothing is scaled
    new["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "factor": None}
    assert DeepSeekConfig.from_hf(new).rope.yarn is None
    assert not DeepSeekConfig.from_hf(old | {"rope_interleave": False}).rope.interleaved


def test_yarn_frequencies_of_v3() -> None:
    c = DeepSeekConfig.from_hf(CONFIGS / "deepseek-ai--DeepSeek-V3.json")
    got = inverse_frequencies(c.rope, 64).tolist()
    for j, value in enumerate(got):
        plain = 10000 ** (-2 * j / 64)
        ramp = min(max((j - 10) / 13, 0), 1)
        assert math.isclose(value, plain / 40 * ramp + plain * (1 - ramp), rel_tol=1e-5)


REFUSED = {
    "deepseek-ai--DeepSeek-V3.2.json": ("deepseek_v32", "indexer"),
    "deepseek-ai--DeepSeek-V4-Flash.json": ("deepseek_v4", "hyper-connections"),
    "deepseek-ai--DeepSeek-V4-Pro.json": ("deepseek_v4", "hyper-connections"),
    "zai-org--GLM-5.json": ("glm_moe_dsa", "indexer"),
    "zai-org--GLM-5-FP8.json": ("glm_moe_dsa", "indexer"),
    "nvidia--GLM-5-NVFP4.json": ("glm_moe_dsa", "indexer"),
    "nvidia--GLM-5.2-NVFP4.json": ("glm_moe_dsa", "indexer"),
    "moonshotai--Kimi-K2.5.json": ("kimi_k25", "compressed-tensors"),
    "nvidia--Kimi-K2.6-NVFP4.json": ("kimi_k25", "NVFP4"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str) -> None:
    model_type, reason = REFUSED[name]
    with pytest.raises(UnsupportedModel) as caught:
        DeepSeekConfig.from_hf(CONFIGS / name)
    assert model_type in caught.value.model_type and reason in str(caught.value)
    assert all(family in str(caught.value) for family in SUPPORTED_FAMILIES)


def test_every_config_file_is_decided() -> None:
    parsed = {p.name for p in CONFIGS.glob("*.json")} - set(REFUSED)
    assert parsed == {
        "deepseek-ai--DeepSeek-V3.json", "deepseek-ai--DeepSeek-R1.json",
        "moonshotai--Kimi-K2-Instruct.json", "nvidia--DeepSeek-V3.1-NVFP4.json",
    }  # fmt: skip
    for name in parsed:
        DeepSeekConfig.from_hf(CONFIGS / name)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "deepseek_v41"}, "Engram"),
        ({"model_type": "kimi_linear"}, "KDA"),
        ({"model_type": "glm4_moe"}, "GQA"),
        ({"model_type": "llama"}, "no such architecture"),
        ({"model_type": None}, "no model_type"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "awq"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 32]}}, "32"),
        ({"quantization_config": {"quant_method": "fp8"}}, "weight_block_size=None"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"attention_bias": True}, "attention_bias"),
        ({"scoring_func": "softmax"}, "softmax"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "linear"),
        ({"index_topk": 2048}, "index_topk=2048"),
        ({"swiglu_limit": 10.0, "expert_dtype": "fp4"}, "swiglu_limit=10.0, expert_dtype='fp4'"),
        ({"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]}, "mlp_layer_types"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types"),
        ({"rope_scaling": yarn(4, 64) | {"attn_factor": 2.0}}, "attn_factor=2.0"),
        ({"rope_parameters": {"full_attention": {"factor": 3}}}, "full_attention"),
    ],
)
def test_refused_settings(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModel, match="Supported: ") as caught:
        DeepSeekConfig.from_hf(family_config("v3", **change))
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"kv_lora_rank": "512"}, "kv_lora_rank"),
        ({"n_group": 3}, "n_group=3"),
        ({"topk_group": 5}, "topk_group=5"),
        ({"num_experts_per_tok": 17}, "num_experts_per_tok=17"),
        ({"first_k_dense_replace": 4}, "first_k_dense_replace=4"),
        ({"qk_rope_head_dim": 15}, "qk_rope_head_dim=15"),
        ({"eos_token_id": 512}, "512"),
        ({"routed_scaling_factor": "much"}, "much"),
        ({"rope_scaling": {"type": "yarn", "factor": 40}}, "original_max_position_embeddings"),
        # never converted: "false" would be true, 1.5 experts would be one
        ({"norm_topk_prob": "false"}, "norm_topk_prob='false': true or false"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false': true or false"),
        ({"rope_interleave": 0}, "rope_interleave=0: true or false"),
        ({"n_shared_experts": 1.5}, "n_shared_experts=1.5: an integer"),
        ({"q_lora_rank": "96"}, "q_lora_rank='96': an integer"),
        ({"q_lora_rank": -3}, "q_lora_rank=-3"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace=-1"),
        ({"num_nextn_predict_layers": True}, "num_nextn_predict_layers=True: an integer"),
        ({"routed_scaling_factor": math.nan}, "routed_scaling_factor=nan: a finite number above 0"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps=-1.0: a finite number above 0"),
        ({"rope_theta": 0}, "rope_theta=0: a finite number above 1"),
        ({"rope_scaling": "yarn"}, "rope_scaling='yarn': an object"),
        ({"rope_scaling": {"factor": 4.0}}, "rope factor=4.0 with type 'default'"),
        ({"rope_scaling": yarn(0.5, 64)}, "rope factor=0.5: a finite number of at least 1"),
        ({"rope_scaling": yarn(4, 0)}, "rope original_max_position_embeddings=0: a positive"),
        ({"rope_scaling": yarn(4, 64, fast=0.5)}, "rope beta_fast=0.5: at least beta_slow=1"),
        ({"rope_scaling": yarn(4, 64) | {"mscale": "x"}}, "rope mscale='x'"),
        ({"rope_parameters": {"rope_type": "default"}}, "one of them must go"),
        ({"rope_parameters": {"factor": 2}}, "rope_parameters.factor=2, but rope_scaling has 40"),
        ({"eos_token_id": "</s>"}, "eos_token_id='</s>': a token id or a list"),
        ({"eos_token_id": [1, None]}, "eos_token_id=[1, None]"),
        ({"bos_token_id": "a"}, "bos_token_id='a'"),
        ({"quantization_config": "fp8"}, "quantization_config='fp8': an object"),
        ({"mlp_layer_types": ["dense", "sparse"]}, "2 entries; num_hidden_layers=4"),
    ],
)
def test_broken_values_are_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        DeepSeekConfig.from_hf(family_config("v3", **change))
    assert named in str(caught.value)


def test_all_broken_values_are_told_at_once() -> None:
    change = {"n_group": "4", "rms_norm_eps": 0, "vocab_size": 512.0, "eos_token_id": 1.5}
    with pytest.raises(ConfigError) as caught:
        DeepSeekConfig.from_hf(family_config("v3", **change))
    assert sorted(p.split("=")[0] for p in caught.value.problems) == sorted(change)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("generation_config.json", '{"eos_token_id": "x"}'),
        ("generation_config.json", "[]"),
        ("tokenizer_config.json", '{"eos_token": "<e>", "added_tokens_decoder": [1]}'),
        (
            "tokenizer_config.json",
            '{"eos_token": "e", "added_tokens_decoder": {"a": {"content": "e"}}}',
        ),
    ],
)
def test_broken_files_beside_the_config_are_named(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(family_config("v3")))
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        DeepSeekConfig.from_hf(tmp_path)


def test_eos_ids_are_the_union_of_all_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(family_config("v3")))
    assert DeepSeekConfig.from_hf(tmp_path).eos_token_ids == (1,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 7]}')
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<end>"}}')
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": [{"id": 9, "content": "<end>"}]}')
    assert DeepSeekConfig.from_hf(tmp_path).eos_token_ids == (1, 7, 9)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json"):
        DeepSeekConfig.from_hf(tmp_path)


def test_a_quantisation_named_only_beside_the_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(family_config("v3")))
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    with pytest.raises(UnsupportedModel, match="modelopt NVFP4"):
        DeepSeekConfig.from_hf(tmp_path)
