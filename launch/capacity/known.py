"""Models that can be planned by name, where no config.json is at hand: released shapes.

Knows: config files beside it, layouts that go with them. Knows nothing of weights.
"""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

from ep.nearest import nearest_hint
from launch.capacity.shape import ModelShape
from models.deepseek.config import DeepSeekConfig
from models.deepseek.config_hf import read_json
from models.deepseek.errors import ConfigError as Broken
from models.deepseek.errors import UnsupportedModel
from moeserve.errors import ConfigError

MOST_EXPERTS = 1 << 12  # far beyond any model
MODELS = ("deepseek-v3", "kimi-k2")
# Checkpoints of the same shape, as they are called by their makers.
ALIASES = {
    "deepseek-r1": "deepseek-v3",
    "deepseek-r1-0528": "deepseek-v3",
    "deepseek-v3-0324": "deepseek-v3",
    "deepseek-v3.1": "deepseek-v3",
    "kimi-k2-instruct": "kimi-k2",
    "kimi-k2-instruct-0905": "kimi-k2",
    "kimi-k2-thinking": "kimi-k2",
}


def load_shape(model: str) -> ModelShape:
    """A name of `MODELS` or `ALIASES` (its maker before a slash or not), a config.json, or a folder
    with one. ConfigError if it is none, or holds another model."""
    path = Path(model)
    name = model.lower().removeprefix("deepseek-ai/").removeprefix("moonshotai/")
    if name in (*MODELS, *ALIASES) and not path.exists():
        file = resources.files("launch.capacity").joinpath(
            "models", f"{ALIASES.get(name, name)}.json"
        )
        return ModelShape(DeepSeekConfig.from_hf(json.loads(file.read_text("utf-8"))))
    if not path.exists():
        hint = nearest_hint(name, (*MODELS, *ALIASES))
        raise ConfigError(
            [f"MODEL={model}: no such file or folder, nor one of {', '.join(MODELS)}{hint}"]
        )
    try:
        shape = ModelShape(DeepSeekConfig.from_hf(_with_quantisation(path)))
    except Broken as error:
        raise ConfigError([f"MODEL={error.source}: {x}" for x in error.problems]) from error
    except UnsupportedModel as error:
        raise ConfigError([f"MODEL={model}: {error}"]) from error
    experts = shape.config.n_routed_experts
    if experts > MOST_EXPERTS:
        raise ConfigError(
            [f"MODEL={model}: n_routed_experts={experts}: at most {MOST_EXPERTS} can be planned"]
        )
    return shape


def _with_quantisation(path: Path) -> Path | dict[str, Any]:
    """A config that has another name than config.json, with what hf_quant_config.json beside it
    says, where it says nothing itself; any other is read so by the model's own reader."""
    side = path.parent / "hf_quant_config.json"
    if path.is_dir() or path.name == "config.json" or not side.is_file():
        return path
    config = read_json(path)
    if config.get("quantization_config") or (config.get("text_config") or {}).get(
        "quantization_config"
    ):
        return path
    said = read_json(side).get("quantization")
    kind = said.get("quant_algo", "") if isinstance(said, dict) else ""
    return config | {"quantization_config": {"quant_method": f"modelopt {kind}".strip()}}
