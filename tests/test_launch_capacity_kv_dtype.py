"""`plan --kv-cache-dtype`: what `serve` calls it; `--kv-fp8` is short for it."""

from __future__ import annotations

from typing import Any

import pytest

from launch.capacity.asked import Typed, read
from models.deepseek.config import DeepSeekConfig
from models.deepseek.random_families import family_config
from moeserve.errors import ConfigError


def asked(**given: Any) -> bool:
    (pool,) = read(Typed(preset="v3-decode-320", **given)).bases
    return pool.kv_fp8


@pytest.mark.parametrize(
    ("given", "fp8"),
    [({}, False), ({"kv_cache_dtype": "model"}, False), ({"kv_cache_dtype": "fp8"}, True),
     ({"kv_fp8": True}, True), ({"kv_fp8": True, "kv_cache_dtype": "fp8"}, True)],
)  # fmt: skip
def test_both_names(given: dict[str, Any], fp8: bool) -> None:
    assert asked(**given) is fp8


@pytest.mark.parametrize(
    "given", [{"kv_fp8": True, "kv_cache_dtype": "model"}, {"kv_cache_dtype": "fp9"}]
)
def test_what_cannot_be_meant(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="kv-cache-dtype"):
        asked(**given)


def test_plan_and_serve_count_the_same_bytes() -> None:
    from launch.capacity.shape import ModelShape

    for rank in (512, 96):
        config = DeepSeekConfig.from_hf(family_config("v3", kv_lora_rank=rank))
        shape = ModelShape(config)
        for fp8 in (False, True):
            each = config.cache_bytes(2, fp8)
            assert shape.kv_bytes(fp8) == each * config.num_hidden_layers
