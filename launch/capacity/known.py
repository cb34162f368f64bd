"""Models that can be planned by name, where no config.json is at hand: released shapes.

Knows: config files beside it, layouts that go with them. Knows nothing of weights.
"""

from __future__ import annotations

import difflib
import json
from importlib import resources
from pathlib import Path

from launch.capacity.shape import ModelShape
from models.deepseek.config import DeepSeekConfig
from moeserve.errors import ConfigError

MODELS = ("deepseek-v3", "kimi-k2")


def load_shape(model: str) -> ModelShape:
    """A name of `MODELS`, a config.json, or a folder with one. ConfigError if it is none."""
    if model.lower() in MODELS:
        file = resources.files("launch.capacity").joinpath("models", f"{model.lower()}.json")
        return ModelShape(DeepSeekConfig.from_hf(json.loads(file.read_text("utf-8"))))
    path = Path(model)
    if not path.exists():
        close = difflib.get_close_matches(model.lower(), MODELS, n=1)
        nearest = f"; nearest: {close[0]}" if close else ""
        raise ConfigError(
            [f"MODEL={model}: no such file or folder, nor one of {', '.join(MODELS)}{nearest}"]
        )
    return ModelShape(DeepSeekConfig.from_hf(path))
