"""The release form of the bundled model: tensor names, FP8 blocks, files; writing and reading.

Knows the Hugging Face V3 layout (one tensor an expert, MTP as the layer after the last, with its
own copies of embedding and head) and the 128 x 128 block scales. Knows nothing of training.
`python -m models.deepseek.tiny.release WORK OUT` exports the run saved in WORK.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.arguments import Parser, folder, told_in_a_line

from .network import Dense, Layer, MoE, Network, Shape
from .tokenizer import tokenizer_config

BLOCK = 128
TOP = 448.0  # the largest e4m3 value
MAX_POSITIONS = 2048


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in] fp32 -> (e4m3 [out, in], fp32 scale [ceil(out/128), ceil(in/128)])."""
    rows, columns = weight.shape
    blocks = _blocks(weight)
    scale = blocks.abs().amax((1, 3)).clamp_min(1e-4) / TOP
    low = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    whole = low.view(torch.uint8).flatten(2).flatten(0, 1)[:rows, :columns]
    return whole.contiguous().view(torch.float8_e4m3fn), scale.contiguous()


def dequantise(weight: Tensor, scale: Tensor) -> Tensor:
    """e4m3 [out, in] times its block's scale, in fp32."""
    rows, columns = weight.shape
    wide = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return weight.float() * wide[:rows, :columns]


def _blocks(weight: Tensor) -> Tensor:
    """[out, in] -> [out blocks, 128, in blocks, 128], ragged edges padded with zeros."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    return padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))


def _dense_names(prefix: str, block: Dense) -> dict[str, Tensor]:
    return {
        f"{prefix}.{part}.weight": getattr(block, part)
        for part in ("gate_proj", "up_proj", "down_proj")
    }


def _layer_tensors(prefix: str, layer: Layer) -> dict[str, Tensor]:
    """Views of one layer's parameters under their release names."""
    attention = layer.self_attn
    found: dict[str, Tensor] = {
        f"{prefix}.input_layernorm.weight": layer.input_layernorm.weight,
        f"{prefix}.post_attention_layernorm.weight": layer.post_attention_layernorm.weight,
        f"{prefix}.self_attn.q_a_layernorm.weight": attention.q_a_layernorm.weight,
        f"{prefix}.self_attn.kv_a_layernorm.weight": attention.kv_a_layernorm.weight,
    }
    for part in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"):
        found[f"{prefix}.self_attn.{part}.weight"] = getattr(attention, part)
    block = layer.mlp
    if isinstance(block, MoE):
        found[f"{prefix}.mlp.gate.weight"] = block.gate
        found[f"{prefix}.mlp.gate.e_score_correction_bias"] = block.bias
        found |= _dense_names(f"{prefix}.mlp.shared_experts", block.shared_experts)
        width = block.s.moe_intermediate_size
        for e in range(block.s.n_routed_experts):
            name = f"{prefix}.mlp.experts.{e}"
            found[f"{name}.gate_proj.weight"] = block.gate_up[e, :width]
            found[f"{name}.up_proj.weight"] = block.gate_up[e, width:]
            found[f"{name}.down_proj.weight"] = block.down[e]
    else:
        assert isinstance(block, Dense)
        found |= _dense_names(f"{prefix}.mlp", block)
    return found


def named_tensors(net: Network) -> dict[str, Tensor]:
    """Every release tensor as a view of the network's parameters (so reading can copy into it)."""
    found = {"model.embed_tokens.weight": net.embed_tokens.data}
    for i, layer in enumerate(net.layers):
        assert isinstance(layer, Layer)
        found |= _layer_tensors(f"model.layers.{i}", layer)
    found |= {"model.norm.weight": net.norm.weight, "lm_head.weight": net.lm_head}
    prefix = f"model.layers.{net.s.num_hidden_layers}"
    found |= _layer_tensors(prefix, net.mtp)
    found |= {
        f"{prefix}.embed_tokens.weight": net.embed_tokens,
        f"{prefix}.enorm.weight": net.enorm.weight,
        f"{prefix}.hnorm.weight": net.hnorm.weight,
        f"{prefix}.eh_proj.weight": net.eh_proj,
        f"{prefix}.shared_head.norm.weight": net.mtp_norm.weight,
        f"{prefix}.shared_head.head.weight": net.lm_head,
    }
    return {name: tensor.data for name, tensor in found.items()}


def is_quantised(name: str) -> bool:
    """Whether V3 stores this tensor in FP8: every linear but head, gate and eh_proj."""
    return name.endswith("_proj.weight") and "eh_proj" not in name or "kv_a_proj_with_mqa" in name


def write_held_out(corpus: Path, folder: Path, limit: int = 40_000) -> None:
    """Held-out text of each source, up to `limit` characters, for evaluation without the corpus."""
    folder.mkdir(parents=True, exist_ok=True)
    texts: dict[str, list[str]] = {}
    with corpus.open(encoding="utf-8") as stream:
        for line in stream:
            row = json.loads(line)
            mine = texts.setdefault(row["source"], [])
            left = limit - sum(map(len, mine))
            if row["held_out"] and left > 0:
                mine.append(row["text"][: min(left, 8000)])
    for source, mine in texts.items():
        joint = "" if source == "chat" else "\n\n"
        (folder / f"{source}.txt").write_text(joint.join(mine) + "\n", encoding="utf-8")


def config(s: Shape) -> dict[str, object]:
    """config.json in V3's keys."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "ep_size": 1,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": MAX_POSITIONS,
        "model_type": "deepseek_v3",
        "moe_layer_freq": 1,
        "norm_topk_prob": True,
        "num_key_value_heads": s.num_attention_heads,
        "num_nextn_predict_layers": 1,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [BLOCK, BLOCK],
        },
        "rope_scaling": None,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "use_cache": True,
    } | asdict(s)


def as_stored(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As a release holds them: matrices in e4m3 beside their scales, the gate's bias in fp32, the
    rest in bf16."""
    stored: dict[str, Tensor] = {}
    for name, tensor in named.items():
        if is_quantised(name):
            stored[name], stored[f"{name}_scale_inv"] = quantise(tensor.float())
        elif name.endswith("e_score_correction_bias"):
            stored[name] = tensor.float().clone()
        else:
            stored[name] = tensor.bfloat16().clone()
    return stored


def export(net: Network, tokenizer: Path, out: Path) -> None:
    """Writes all release files but the model card into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    stored = as_stored(named_tensors(net))
    total = sum(t.nbytes for t in stored.values())
    shards: list[dict[str, Tensor]] = [{}, {}]
    filled = 0
    for name, tensor in stored.items():  # the cut may part a weight from its scale, as in V3
        shards[0 if filled < total * 0.5 else 1][name] = tensor
        filled += tensor.nbytes
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):06d}.safetensors"
        save_file(shard, out / file, metadata={"format": "pt"})
        (out / file).chmod(0o644)
        places |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    _write(out / "model.safetensors.index.json", index)
    _write(out / "config.json", dict(sorted(config(net.s).items())))
    _write(out / "tokenizer_config.json", tokenizer_config())
    _write(
        out / "generation_config.json",
        {
            "_from_model_config": True,
            "bos_token_id": 0,
            "do_sample": True,
            "eos_token_id": 1,
            "pad_token_id": 2,
            "temperature": 0.6,
            "top_p": 0.95,
        },
    )
    shutil.copyfile(tokenizer, out / "tokenizer.json")


def _write(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def stored_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a release as stored, through its index."""
    index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
    found: dict[str, Tensor] = {}
    for file in sorted(set(index["weight_map"].values())):
        found |= load_file(folder / file)
    return found


def plain_tensors(folder: Path) -> dict[str, Tensor]:
    """The same in fp32, scales applied and dropped."""
    stored = stored_tensors(folder)
    return {
        name: dequantise(t, stored[f"{name}_scale_inv"]) if is_quantised(name) else t.float()
        for name, t in stored.items()
        if not name.endswith("_scale_inv")
    }


def load(folder: Path) -> Network:
    """The training network with the released weights in it. Refuses missing or left-over names."""
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    net = Network(Shape(**{key: values[key] for key in asdict(Shape())}))
    target, source = named_tensors(net), plain_tensors(folder)
    if target.keys() != source.keys():
        raise ValueError(f"tensor names differ: {sorted(target.keys() ^ source.keys())[:8]}")
    for name, tensor in target.items():
        tensor.copy_(source[name])
    return net.eval()


def main() -> None:
    """Exports the last saved state of a run."""
    options = Parser(description="Export a training run as an FP8 release.")
    options.add_argument("work", type=folder)
    options.add_argument("out", type=Path)
    args = options.parse_args()
    net = Network(Shape())
    with told_in_a_line():
        net.load_state_dict(torch.load(args.work / "run.pt", weights_only=True)["net"])
        export(net, args.work / "tokenizer.json", args.out)
        write_held_out(args.work / "corpus.jsonl", args.out / "heldout")
    size = sum(p.stat().st_size for p in args.out.iterdir() if p.is_file())
    count = sum(p.numel() for p in net.parameters())
    print(f"wrote {args.out}: {size / 1e6:.2f} MB, {count:,} parameters")


if __name__ == "__main__":
    main()
