"""Room that a benchmark needs: settings that were not given grow to it, given ones that are smaller
are refused. Knows settings; nothing of what is measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from moeserve.errors import ConfigError

if TYPE_CHECKING:
    from moeserve.config import ServeConfig


def with_room(config: ServeConfig, needs: Mapping[tuple[str, str], int]) -> ServeConfig:
    """needs: by section and field, the least that will do."""
    problems = []
    for (section, field), need in needs.items():
        part = getattr(config, section)
        value = getattr(part, field)
        if field in part.model_fields_set and value < need:
            problems.append(f"{section}.{field}={value}: this benchmark needs {need}")
        elif field == "kv_tokens" and part.kv_memory is not None:
            continue
        elif value is None or value < need:
            if field == "max_model_len":
                continue  # the model's own; build_engine checks against it
            part = part.model_copy(update={field: need})
            config = config.model_copy(update={section: part})
    if problems:
        raise ConfigError(problems)
    return config
