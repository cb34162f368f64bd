"""How refusals are worded, and what is said of configurations that no backend could serve."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from dispatch.base import DispatchConfig, DispatchError
from dispatch.handles import check_slots
from dispatch.words import counted, nearest, raised, version_of

CONFIG = DispatchConfig(256, 8, 16, 64, torch.bfloat16, deterministic=False)


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("even this")


def test_words() -> None:
    assert [counted(n, "rank") for n in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
    assert nearest(100, 8) == "nearest are 96 and 104"
    assert nearest(100, 8, 100) == nearest(200, 8, 100) == "nearest is 96"
    assert nearest(100, 8, 104) == "nearest are 96 and 104"
    assert nearest(4, 8) == nearest(0, 8) == nearest(-3, 8) == "nearest is 8"


def test_what_was_raised_is_one_line_whatever_it_is() -> None:
    for error, said in (
        (OSError("libcuda.so.1: cannot open\nsecond"), "OSError: libcuda.so.1: cannot open"),
        (ImportError("\n\nx"), "ImportError: x"),
        (AssertionError(), "AssertionError: no message"),
        (SystemExit(3), "SystemExit: 3"),
        (Mute(), "Mute: without a text"),
    ):
        assert raised(error) == said


def test_versions_are_one_line() -> None:
    class Library:
        __version__: Any = None

    assert version_of(Library) == version_of(object()) == "of unknown version"
    Library.__version__ = "2.1\nand more\n"
    assert version_of(Library) == "2.1 and more"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        *(
            ({name: value}, f"{name}={value!r}: must be a whole number, at least 1")
            for name in ("hidden_size", "top_k", "num_physical_experts", "max_tokens_per_rank")
            for value in (0, -8, 1.0, True, None)
        ),
        ({"max_tokens_per_rank": 10**9}, "max_tokens_per_rank=1000000000: at most 268435455 with"),
        ({"dtype": torch.int32}, "dtype=torch.int32: must be a floating-point"),
        ({"dtype": "bf16"}, "dtype='bf16': must be a floating-point"),
        ({"wire": "fp8"}, "wire='fp8': must be one of WireFormat.MODEL, WireFormat.FP8, "),
        ({"hidden_size": 0, "top_k": -1}, "hidden_size=0: must be .*; top_k=-1: must be "),
    ],
)
def test_no_configuration_is_degenerate(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(DispatchError, match=said if ".*" in said else re.escape(said)):
        replace(CONFIG, **changes)


def test_the_most_that_is_said_is_valid() -> None:
    assert replace(CONFIG, max_tokens_per_rank=268435455)
    assert replace(CONFIG, top_k=1, max_tokens_per_rank=2**31 - 1)


@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_a_slot_is_picked_once_whatever_the_number_of_tokens(tokens: int) -> None:
    """Few are looked at in another way than many."""
    slots = torch.arange(8, dtype=torch.int32).repeat(tokens, 1)
    slots[:, 3] = slots[:, 6] = -1  # masked ones may be many
    check_slots(CONFIG, slots)
    for value, said in (
        (5, f"slots: token {tokens - 1} has slot 5 twice; must be distinct"),
        (16, "slots: -1..16; valid are -1 (masked) and 0..15"),
        (-2, "slots: -2..7; valid are -1 (masked) and 0..15"),
    ):
        wrong = slots.clone()
        wrong[-1, 3] = value
        with pytest.raises(DispatchError, match=re.escape(said)):
            check_slots(CONFIG, wrong)
