"""More copies of experts than ranks can use are refused before anything is made of the number."""

from __future__ import annotations

from typing import Any

import pytest

from ep.group import EPGroup
from models.deepseek.config import DeepSeekConfig
from models.deepseek.random_families import family_config
from moeserve.config import ServeConfig
from moeserve.placing import first_placement

MODEL = DeepSeekConfig.from_hf(family_config("v2-lite"))  # 16 routed experts, 2 shared


@pytest.mark.parametrize(
    "ranks, shared, most", [(1, "replicated", 16), (2, "replicated", 16), (4, "hosted", 54)]
)
def test_the_largest_number_is_named(ranks: int, shared: str, most: int) -> None:
    stand_in: Any = object()
    group = EPGroup(0, ranks, ranks, stand_in, stand_in) if ranks > 1 else EPGroup.single()
    for redundant in (most + 1, 10**9):
        parallel = {"ep": ranks, "shared_expert": shared, "redundant_experts": redundant}
        problems: list[str] = []
        config = ServeConfig.load(None, {"parallel": parallel})
        assert first_placement(config, MODEL, group, True, problems) is None
        (problem,) = problems
        assert problem.startswith(f"parallel.redundant_experts={redundant}: at most {most}")
        assert problem.endswith(f"nearest valid: {most}")
    config = ServeConfig.load(None, {"parallel": parallel | {"redundant_experts": most}})
    placement = first_placement(config, MODEL, group, True, problems)
    assert placement is not None and placement.num_redundant_experts == most
