"""The tensors that a checkpoint must hold: names and shapes, from the config alone.

Knows: Hugging Face names of the DeepSeek family, which tensor may be stored quantised, which expert
owns it. Knows nothing of files, ranks or dtypes in memory.

Shapes are [out, in], row-major. Shape letters as in model-spec: D hidden, E logical experts.
"""

from __future__ import annotations

from dataclasses import dataclass

from models.deepseek.config import DeepSeekConfig

SCALE_SUFFIX = "_scale_inv"


@dataclass(frozen=True)
class Expected:
    """One tensor. layer: model layer or -1; row: placement row of its MoE layer or -1; expert:
    routed expert or -1. matrix: a linear weight, which a block scale may accompany."""

    name: str
    shape: tuple[int, ...]
    kind: str
    matrix: bool = True
    layer: int = -1
    row: int = -1
    expert: int = -1


def layer_prefix(config: DeepSeekConfig, layer: int) -> str:
    return f"{config.tensor_prefix}model.layers.{layer}."


def embed_name(config: DeepSeekConfig) -> str:
    return f"{config.tensor_prefix}model.embed_tokens.weight"


def head_name(config: DeepSeekConfig) -> str:
    return f"{config.tensor_prefix}lm_head.weight"


def final_norm_name(config: DeepSeekConfig) -> str:
    return f"{config.tensor_prefix}model.norm.weight"


def expected_tensors(config: DeepSeekConfig) -> dict[str, Expected]:
    """All tensors of the main model and of its MTP layers, in order of layers."""
    c = config
    table = (c.vocab_size, c.hidden_size)
    out = [Expected(embed_name(c), table, "embed")]
    for layer in range(c.num_hidden_layers):
        out += _layer(c, layer, dense=layer < c.first_k_dense_replace)
    out.append(Expected(final_norm_name(c), (c.hidden_size,), "norm", matrix=False))
    if not c.tie_word_embeddings:
        out.append(Expected(head_name(c), table, "head"))
    for layer in mtp_layers(c):
        out += _layer(c, layer, dense=False)
        p, d = layer_prefix(c, layer), c.hidden_size
        out += [
            Expected(p + "embed_tokens.weight", table, "mtp", layer=layer),
            Expected(p + "shared_head.head.weight", table, "mtp", layer=layer),
            Expected(p + "eh_proj.weight", (d, 2 * d), "mtp", layer=layer),
        ]
        for norm in ("enorm", "hnorm", "shared_head.norm"):
            out.append(Expected(f"{p}{norm}.weight", (d,), "norm", matrix=False, layer=layer))
    return {e.name: e for e in out}


def mtp_layers(config: DeepSeekConfig) -> range:
    return range(config.num_hidden_layers, config.num_hidden_layers + config.num_mtp_layers)


def placement_row(config: DeepSeekConfig, layer: int) -> int:
    """MoE layers are counted from the first one; MTP layers follow without a gap."""
    return layer - config.first_k_dense_replace


def _layer(c: DeepSeekConfig, layer: int, dense: bool) -> list[Expected]:
    p, d = layer_prefix(c, layer), c.hidden_size

    def norm(name: str, width: int) -> Expected:
        return Expected(f"{p}{name}.weight", (width,), "norm", matrix=False, layer=layer)

    def attention(name: str, *shape: int) -> Expected:
        return Expected(f"{p}self_attn.{name}.weight", shape, "attention", layer=layer)

    heads = c.num_attention_heads
    out = [norm("input_layernorm", d), norm("post_attention_layernorm", d)]
    if c.q_lora_rank is None:
        out.append(attention("q_proj", heads * c.qk_head_dim, d))
    else:
        out += [
            attention("q_a_proj", c.q_lora_rank, d),
            norm("self_attn.q_a_layernorm", c.q_lora_rank),
            attention("q_b_proj", heads * c.qk_head_dim, c.q_lora_rank),
        ]
    out += [
        attention("kv_a_proj_with_mqa", c.cache_width, d),
        norm("self_attn.kv_a_layernorm", c.kv_lora_rank),
        attention("kv_b_proj", heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank),
        attention("o_proj", d, heads * c.v_head_dim),
    ]
    if dense:
        return out + _mlp(p + "mlp.", d, c.intermediate_size, "dense_mlp", layer)
    row = placement_row(c, layer)
    gate, experts = p + "mlp.gate.", c.n_routed_experts
    out.append(Expected(gate + "weight", (experts, d), "gate", layer=layer, row=row))
    if c.has_gate_bias:
        bias = gate + "e_score_correction_bias"
        out.append(Expected(bias, (experts,), "gate", matrix=False, layer=layer, row=row))
    if c.n_shared_experts:
        width = c.moe_intermediate_size * c.n_shared_experts
        out += _mlp(p + "mlp.shared_experts.", d, width, "shared_expert", layer, row)
    for expert in range(experts):
        prefix = f"{p}mlp.experts.{expert}."
        out += _mlp(prefix, d, c.moe_intermediate_size, "experts", layer, row, expert)
    return out


def _mlp(
    p: str, d: int, width: int, kind: str, layer: int, row: int = -1, expert: int = -1
) -> list[Expected]:
    shapes = {"gate_proj": (width, d), "up_proj": (width, d), "down_proj": (d, width)}
    return [
        Expected(f"{p}{name}.weight", shape, kind, layer=layer, row=row, expert=expert)
        for name, shape in shapes.items()
    ]
