"""The bundled checkpoint is what its card says: layout, size, tokenizer, quality, expert load.

Reads `checkpoints/tiny` only; the last test asks transformers for a second opinion.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from models.deepseek.tiny.evaluate import distance, measure, windows
from models.deepseek.tiny.network import Network, Shape
from models.deepseek.tiny.release import (
    dequantise,
    is_quantised,
    load,
    plain_tensors,
    quantise,
    stored_tensors,
)
from moeserve.llm import LLM
from moeserve.request import SamplingParams

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "checkpoints" / "tiny"
SOURCES = ("bible", "chat", "pydoc", "python", "shakespeare", "wordnet")
SHAPE = Shape()


@pytest.fixture(scope="module")
def net() -> Network:
    torch.set_num_threads(1)  # spinning threads crawl on a busy machine
    return load(FOLDER)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@pytest.fixture(scope="module")
def measured(net: Network, tokenizer: Tokenizer) -> dict[str, dict[str, Any]]:
    """Figures of each held-out text's first 1300 tokens or so."""
    found = {}
    for name in SOURCES:
        text = (FOLDER / "heldout" / f"{name}.txt").read_text(encoding="utf-8")[:4_500]
        found[name] = measure(net, windows(tokenizer, text, 256))
    return found


def expected_shapes() -> dict[str, tuple[int, ...]]:
    """Every tensor name of section 2 of the model spec at this model's sizes."""
    s = SHAPE
    hidden, heads = s.hidden_size, s.num_attention_heads
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (s.vocab_size, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (s.vocab_size, hidden),
    }

    def mlp(prefix: str, width: int) -> None:
        for part in ("gate_proj", "up_proj"):
            found[f"{prefix}.{part}.weight"] = (width, hidden)
        found[f"{prefix}.down_proj.weight"] = (hidden, width)

    for i in range(s.num_hidden_layers + 1):
        layer = f"model.layers.{i}"
        attention = f"{layer}.self_attn"
        found |= {
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{attention}.q_a_proj.weight": (s.q_lora_rank, hidden),
            f"{attention}.q_a_layernorm.weight": (s.q_lora_rank,),
            f"{attention}.q_b_proj.weight": (
                heads * (s.qk_nope_head_dim + s.qk_rope_head_dim),
                s.q_lora_rank,
            ),
            f"{attention}.kv_a_proj_with_mqa.weight": (
                s.kv_lora_rank + s.qk_rope_head_dim,
                hidden,
            ),
            f"{attention}.kv_a_layernorm.weight": (s.kv_lora_rank,),
            f"{attention}.kv_b_proj.weight": (
                heads * (s.qk_nope_head_dim + s.v_head_dim),
                s.kv_lora_rank,
            ),
            f"{attention}.o_proj.weight": (hidden, heads * s.v_head_dim),
        }
        if i < s.first_k_dense_replace:
            mlp(f"{layer}.mlp", s.intermediate_size)
            continue
        found[f"{layer}.mlp.gate.weight"] = (s.n_routed_experts, hidden)
        found[f"{layer}.mlp.gate.e_score_correction_bias"] = (s.n_routed_experts,)
        mlp(f"{layer}.mlp.shared_experts", s.moe_intermediate_size)
        for e in range(s.n_routed_experts):
            mlp(f"{layer}.mlp.experts.{e}", s.moe_intermediate_size)
    last = f"model.layers.{s.num_hidden_layers}"
    found |= {
        f"{last}.embed_tokens.weight": (s.vocab_size, hidden),
        f"{last}.enorm.weight": (hidden,),
        f"{last}.hnorm.weight": (hidden,),
        f"{last}.eh_proj.weight": (hidden, 2 * hidden),
        f"{last}.shared_head.norm.weight": (hidden,),
        f"{last}.shared_head.head.weight": (s.vocab_size, hidden),
    }
    return found


def test_files_and_size() -> None:
    names = {p.name for p in FOLDER.iterdir()}
    wanted = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert wanted | {"model.safetensors.index.json", "README.md", "LICENSE.md"} <= names
    size = sum(p.stat().st_size for p in FOLDER.rglob("*") if p.is_file())
    assert size <= 25_000_000
    for name in SOURCES:
        assert (FOLDER / "heldout" / f"{name}.txt").stat().st_size > 10_000


def test_tensor_names_shapes_and_types() -> None:
    stored = stored_tensors(FOLDER)
    expected = expected_shapes()
    weights = {n for n in stored if not n.endswith("_scale_inv")}
    assert weights == expected.keys()
    assert {n.removesuffix("_scale_inv") for n in stored.keys() - weights} == {
        n for n in weights if is_quantised(n)
    }
    for name, shape in expected.items():
        tensor = stored[name]
        assert tuple(tensor.shape) == shape, name
        if is_quantised(name):
            scale = stored[f"{name}_scale_inv"]
            assert tensor.dtype == torch.float8_e4m3fn
            assert scale.dtype == torch.float32
            assert tuple(scale.shape) == tuple(math.ceil(n / 128) for n in shape)
            assert bool((scale > 0).all())
        elif name.endswith("e_score_correction_bias"):
            assert tensor.dtype == torch.float32
            assert float(tensor.std()) > 0.005  # trained, not left at zero
        else:
            assert tensor.dtype == torch.bfloat16, name
        assert bool(torch.isfinite(tensor.float()).all()), name
    last = f"model.layers.{SHAPE.num_hidden_layers}"
    assert torch.equal(stored[f"{last}.shared_head.head.weight"], stored["lm_head.weight"])
    assert torch.equal(stored[f"{last}.embed_tokens.weight"], stored["model.embed_tokens.weight"])
    assert not torch.equal(stored[f"{last}.shared_head.norm.weight"], stored["model.norm.weight"])


def test_index_names_every_tensor_and_parts_a_scale() -> None:
    index = json.loads((FOLDER / "model.safetensors.index.json").read_text())
    stored = stored_tensors(FOLDER)
    assert index["weight_map"].keys() == stored.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in stored.values())
    places = index["weight_map"]
    assert len(set(places.values())) == 2
    parted = [n for n in places if places.get(f"{n}_scale_inv", places[n]) != places[n]]
    assert parted, "one weight and its scale lie in different shards, as in DeepSeek-V3's files"


def test_config_is_v3() -> None:
    config = json.loads((FOLDER / "config.json").read_text())
    assert config["model_type"] == "deepseek_v3"
    assert config["architectures"] == ["DeepseekV3ForCausalLM"]
    assert config["scoring_func"] == "sigmoid"
    assert config["topk_method"] == "noaux_tc"
    assert config["num_nextn_predict_layers"] == 1
    assert config["quantization_config"]["weight_block_size"] == [128, 128]
    assert config["num_hidden_layers"] - config["first_k_dense_replace"] >= 4
    assert config["n_routed_experts"] >= 32
    assert config["n_group"] > 1
    assert config["num_experts_per_tok"] >= 4
    assert config["n_shared_experts"] == 1
    assert not config["tie_word_embeddings"]


def test_parameter_count(net: Network) -> None:
    assert 10e6 <= sum(p.numel() for p in net.parameters()) <= 30e6


@pytest.mark.parametrize("shape", [(96, 256), (256, 96), (200, 300), (1, 1)])
def test_block_quantisation_round_trip(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    low, scale = quantise(weight)
    assert low.shape == weight.shape
    back = dequantise(low, scale)
    bound = weight.abs() / 16 + scale.max() * 2**-9  # half an ulp of e4m3, or a subnormal's
    assert bool(((back - weight).abs() <= bound * 1.001).all())


def test_special_tokens(tokenizer: Tokenizer) -> None:
    raw = json.loads((FOLDER / "tokenizer.json").read_text(encoding="utf-8"))
    special = {t["content"]: t["special"] for t in raw["added_tokens"]}
    for number, text in enumerate(
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")
    ):
        assert tokenizer.token_to_id(text) == number
        assert special[text]
    for text in ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "<｜tool▁calls▁begin｜>"):
        assert special[text] is False
        assert len(tokenizer.encode(text).ids) == 1
    assert tokenizer.get_vocab_size() == SHAPE.vocab_size


@pytest.mark.parametrize(
    "text",
    [
        "In the beginning",
        "  def f(x):\n\treturn 12345\n",
        "naïve 日本語 🙂",
        "",
        "<think>a</think>",
    ],
)
def test_tokenizer_round_trip(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_digits_go_in_threes(tokenizer: Tokenizer) -> None:
    for token in tokenizer.encode("1234567").tokens:
        assert len(token) <= 3


def render(**values: Any) -> str:
    jinja2 = pytest.importorskip("jinja2")
    settings = json.loads((FOLDER / "tokenizer_config.json").read_text(encoding="utf-8"))
    return (
        jinja2.Environment()
        .from_string(settings["chat_template"])
        .render(bos_token="<｜begin▁of▁sentence｜>", **values)
    )


def test_chat_template() -> None:
    talk = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "hidden</think>b"},
        {"role": "user", "content": "c"},
    ]
    head = (
        "<｜begin▁of▁sentence｜>Be kind.<｜User｜>a<｜Assistant｜></think>b<｜end▁of▁sentence｜>"
        "<｜User｜>c"
    )
    assert render(messages=talk) == head
    plain = render(messages=talk, add_generation_prompt=True)
    assert plain == head + "<｜Assistant｜></think>"
    for flag in ("thinking", "enable_thinking"):
        asked = render(messages=talk, add_generation_prompt=True, **{flag: True})
        assert asked == head + "<｜Assistant｜><think>"


def test_chat_template_with_tools() -> None:
    tool = {"name": "define", "description": "Look up a word.", "parameters": {"type": "object"}}
    call = {"function": {"name": "define", "arguments": '{"word": "house"}'}}
    talk = [
        {"role": "user", "content": "Define a house."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "n 1: a dwelling"},
    ]
    text = render(messages=talk, tools=[{"function": tool}], add_generation_prompt=True)
    assert "## Tools\n\n### define\nDescription: Look up a word.\nParameters: {" in text
    assert (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>define<｜tool▁sep｜>"
        '{"word": "house"}<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>'
        "<｜tool▁output▁begin｜>n 1: a dwelling<｜tool▁output▁end｜><｜Assistant｜></think>"
    ) in text


def test_held_out_loss(measured: dict[str, dict[str, Any]]) -> None:
    """A uniform guess costs 8.3 nats; the bounds leave a little room above the card's figures."""
    bounds = json.loads((FOLDER / "eval.json").read_text(encoding="utf-8"))["sources"]
    for name, found in measured.items():
        assert found["loss"] < 4.5, name
        assert found["loss"] < bounds[name]["loss"] + 0.5, name


def test_mtp_agrees_at_least_half_of_the_time(measured: dict[str, dict[str, Any]]) -> None:
    rates = {name: found["agree"] for name, found in measured.items()}
    assert sum(rates.values()) / len(rates) >= 0.5, rates


def test_experts_are_loaded_unevenly_and_by_text(measured: dict[str, dict[str, Any]]) -> None:
    for name, found in measured.items():
        assert float(found["load"].max()) * SHAPE.n_routed_experts > 1.5, name
    loads = {name: found["load"] for name, found in measured.items()}
    for other in ("bible", "shakespeare", "wordnet"):
        assert distance(loads["python"], loads[other]) > 0.25, other


def test_chat_answers_look_like_their_corpus(tokenizer: Tokenizer) -> None:
    """Through the engine: the training network has no cache and needs minutes for this."""
    asked = [
        f"<｜begin▁of▁sentence｜><｜User｜>{text}<｜Assistant｜></think>"
        for text in ("Define a house.", "def get_name")
    ]
    greedy = SamplingParams(temperature=0, max_tokens=60)
    with LLM(FOLDER, dtype="float32", kv_tokens=2048, max_model_len=256) as llm:
        found = llm.generate([tokenizer.encode(text).ids for text in asked], greedy)
    answer, code = (tokenizer.decode(o.token_ids, skip_special_tokens=False) for o in found)
    assert re.match(r"(n|v|adj|adv)( 1)?: ", answer), answer
    assert code.startswith("```python\ndef "), code


def test_transformers_gives_the_same_logits_and_drafts(
    net: Network, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second opinion on layout, RoPE pairs, gate and MTP: fp32 on the dequantised weights."""
    transformers = pytest.importorskip("transformers")
    layers = pytest.importorskip("transformers.modeling_layers")
    config = json.loads((FOLDER / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
    plain = {n: t.contiguous() for n, t in plain_tensors(FOLDER).items()}
    save_file(plain, tmp_path / "model.safetensors", metadata={"format": "pt"})
    kind = transformers.DeepseekV3ForCausalLM  # it looks for the MTP layer at 61 only
    monkeypatch.setattr(kind, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.5.*"])
    other = kind.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    text = (FOLDER / "heldout" / "bible.txt").read_text(encoding="utf-8")[:800]
    tokens = torch.tensor([[0, *tokenizer.encode(text).ids]])
    with torch.no_grad():
        main, mtp = net(tokens[:, :-1], tokens[:, 1:])
        hidden = other.model(tokens[:, :-1]).last_hidden_state
        theirs = other.lm_head(hidden)
        ours = main @ net.lm_head.t()
    assert float((theirs - ours).abs().max()) < 1e-4 * max(1.0, float(ours.abs().max()))
    drafter = layers.MtpModel.from_pretrained(other).eval()
    with torch.no_grad():
        positions = torch.arange(1, tokens.shape[1])[None]
        drafts = drafter.forward_layer(0, hidden, positions, None, input_ids=tokens[:, 1:])
    assert mtp is not None
    assert float((drafts - mtp).abs().max()) < 1e-4 * max(1.0, float(mtp.abs().max()))
