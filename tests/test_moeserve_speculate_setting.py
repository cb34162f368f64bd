"""`--speculate`: what can be asked for; what is said of the rest, before weights are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from speculate_world import write_heads

from ep.group import EPGroup
from models.deepseek.config import DeepSeekConfig
from models.deepseek.random_checkpoint import write_random_checkpoint
from models.deepseek.random_families import family_config
from moeserve.build import build_engine
from moeserve.config import ServeConfig
from moeserve.errors import ConfigError
from moeserve.llm import config_from
from moeserve.speculate.adaptive import AdaptiveDepth, FixedDepth
from moeserve.speculate.build import SpeculatePlan, plan_speculation
from moeserve.speculate.setting import SpeculateWish, read_speculate

BUNDLED = Path(__file__).parents[1] / "checkpoints" / "tiny"


@pytest.mark.parametrize(
    ("text", "wish"),
    [
        ("off", SpeculateWish("off")),
        (" auto ", SpeculateWish("auto")),
        ("mtp", SpeculateWish("mtp")),
        ("mtp:auto", SpeculateWish("mtp")),
        ("mtp:3", SpeculateWish("mtp", 3)),
        ("ngram:8", SpeculateWish("ngram", 8)),
        ("eagle:some/head", SpeculateWish("eagle", None, Path("some/head"))),
        ("eagle:a:b:2", SpeculateWish("eagle", 2, Path("a:b"))),
        ("medusa:c:auto", SpeculateWish("medusa", None, Path("c"))),
        ("draft:2:auto", SpeculateWish("draft", None, Path("2"))),
    ],
)
def test_what_can_be_asked_for(text: str, wish: SpeculateWish) -> None:
    assert read_speculate(text) == wish


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["must be off, auto"]),
        ("mpt:3", ["must be off, auto", "nearest", "mtp"]),
        ("MTP", ["mtp"]),
        ("mtp:0", ["K=0", "1 to 8", "nearest valid: 1", "off"]),
        ("mtp:9", ["K=9", "nearest valid: 8"]),
        ("ngram:-2", ["K=-2", "nearest valid: 1"]),
        ("mtp:x", ["'x'", "mtp:3"]),
        ("mtp:", ["''"]),
        ("off:2", ["takes nothing"]),
        ("eagle", ["needs a folder"]),
        ("draft:", ["needs a folder"]),
        ("draft::3", ["needs a folder"]),
    ],
)
def test_what_cannot_names_field_value_and_what_would(text: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        ServeConfig.load(None, {"speculate": {"method": text}})
    (problem,) = caught.value.problems
    assert problem.startswith(f"speculate.method={text!r}: ")
    for part in parts:
        assert part in problem, (part, problem)


def test_names_of_the_settings_where_there_are_no_sections() -> None:
    config = config_from(BUNDLED, 1, {"speculate": "eagle:x:4", "speculate_nodes": 9})
    assert (config.speculate.method, config.speculate.nodes) == ("eagle:x:4", 9)
    with pytest.raises(ConfigError, match=r"speculate.rule='rejection': not used"):
        config_from(BUNDLED, 1, {"speculate_rule": "rejection"})
    with pytest.raises(ConfigError, match="must be one of same, rejection"):
        config_from(BUNDLED, 1, {"speculate": "mtp", "speculate_rule": "leviathan"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("speculate") / "v3"
    config = family_config("v3", num_hidden_layers=2, max_position_embeddings=256)
    return write_random_checkpoint(made, config)


def plan(checkpoint: Path, method: str, **more: Any) -> tuple[SpeculatePlan | None, list[str]]:
    sections: dict[str, dict[str, Any]] = {"model": {"checkpoint": checkpoint}}
    for name, value in more.items():
        section, _, field = name.partition("__")
        sections.setdefault(section, {})[field] = value
    sections.setdefault("speculate", {})["method"] = method
    problems: list[str] = []
    model = DeepSeekConfig.from_hf(checkpoint)
    return plan_speculation(ServeConfig.load(None, sections), model, problems), problems


def test_auto_is_mtp_where_there_is_one(folder: Path) -> None:
    planned, problems = plan(folder, "auto")
    assert planned is not None and not problems
    assert planned.wish == SpeculateWish("mtp") and "auto: the checkpoint has MTP" in planned.note
    planned, problems = plan(folder, "auto", model__mtp=False)
    assert planned is not None and planned.wish.name == "ngram" and not problems
    assert plan(folder, "off") == (None, [])


def test_what_the_checkpoint_cannot_do_is_said(folder: Path, tmp_path: Path) -> None:
    def problem(method: str, checkpoint: Path = folder, **more: Any) -> str:
        planned, problems = plan(checkpoint, method, **more)
        assert planned is None and len(problems) == 1, problems
        return problems[0]

    without = tmp_path / "v2"
    write_random_checkpoint(without, family_config("v2"))
    assert "no MTP layer; valid: ngram" in problem("mtp:2", without)
    assert "left out by model.mtp; valid" in problem("mtp:2", model__mtp=False)
    assert "is no folder" in problem(f"eagle:{tmp_path}/gone")
    assert "speculate.nodes=9: mtp drafts chains" in problem("mtp", speculate__nodes=9)
    model = DeepSeekConfig.from_hf(folder)
    heads = write_heads(tmp_path / "m", "medusa", model.hidden_size, model.vocab_size)
    assert "K=5, and there are 4 heads; nearest valid: 4" in problem(f"medusa:{heads}:5")
    said = problem(f"medusa:{heads}:3", speculate__nodes=2)
    assert "speculate.nodes=2: a tree 3 deep" in said and "nearest valid: 3" in said
    other = write_heads(tmp_path / "e", "eagle", model.hidden_size + 8, model.vocab_size)
    planned, problems = plan(folder, f"eagle:{other}")
    assert planned is None and all(p.startswith("speculate.method='eagle:") for p in problems)
    assert any("must be [" in p for p in problems)


def test_a_draft_model_must_have_the_targets_tokens(folder: Path, tmp_path: Path) -> None:
    planned, problems = plan(BUNDLED, f"draft:{folder}:2")
    assert planned is None and "its vocabulary has" in problems[0]
    twin = tmp_path / "twin"
    write_random_checkpoint(twin, family_config("v3", num_hidden_layers=2))
    file = twin / "tokenizer.json"
    made = json.loads(file.read_text())
    vocab = made["model"]["vocab"]
    (a, i), (b, j) = list(vocab.items())[100:102]
    vocab[a], vocab[b] = j, i
    file.write_text(json.dumps(made))
    planned, problems = plan(folder, f"draft:{twin}")
    assert planned is None and "the draft model has other tokens (2 differ" in problems[0]
    (twin / "model.safetensors").rename(twin / "model.gone")
    planned, problems = plan(folder, f"draft:{twin}")
    assert planned is None and problems
    planned, problems = plan(folder, f"draft:{folder}:2")
    assert planned is not None and not problems
    assert planned.memory_bytes(4) > 0 and planned.cache_bytes(4) > 0


def test_what_heads_remember_of_a_token_takes_memory(folder: Path, tmp_path: Path) -> None:
    model = DeepSeekConfig.from_hf(folder)
    sizes = {}
    for kind in ("eagle", "medusa"):
        heads = write_heads(tmp_path / kind, kind, model.hidden_size, model.vocab_size)
        planned, problems = plan(folder, f"{kind}:{heads}:2")
        assert planned is not None and not problems
        sizes[kind] = planned.cache_bytes(2)
    assert sizes == {"eagle": 2 * 2 * 32 * 4, "medusa": 0}  # keys and values in fp32, padded


def test_too_many_drafts_for_the_budget_are_a_note(folder: Path) -> None:
    planned, problems = plan(folder, "mtp:7", schedule__max_num_sequences=100)
    assert planned is not None and not problems
    assert "100 sequences with 7 drafts each are 800 tokens" in planned.note
    assert "--token-budget 512" in planned.note


def test_an_engine_says_what_drafts(folder: Path, tmp_path: Path) -> None:
    def build(method: str) -> Any:
        settings: dict[str, dict[str, Any]] = {
            "model": {"checkpoint": folder},
            "cache": {"kv_tokens": 256},
            "speculate": {"method": method},
            "engine": {"quiet": True},
        }
        return build_engine(ServeConfig.load(None, settings), EPGroup.single())

    engine = build("mtp:2")
    assert engine.info["speculate"] == {
        "drafter": "mtp",
        "depth": 2,
        "max_depth": 2,
        "max_nodes": 2,
        "path": None,
        "rule": "same",
    }
    assert isinstance(engine.speculator.policy, FixedDepth)
    assert any(note.startswith("speculate: mtp, 2 deep") for note in engine.info["notes"])
    assert engine.stats().speculation.drafter == "mtp"
    engine = build(f"draft:{folder}:auto")
    assert isinstance(engine.speculator.policy, AdaptiveDepth)
    assert engine.info["memory_bytes"]["drafter"] > 0
    assert engine.speculator.drafter.memory_bytes() > engine.info["memory_bytes"]["drafter"]
    engine = build("off")
    assert engine.info["speculate"] is None and engine.stats().speculation is None
