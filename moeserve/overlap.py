"""Whether steps go through the model in two halves, one computing while rows of the other travel.

Decided once at start for the job (`decide_overlap`), then for each step by what all ranks agreed on
(`goes_in_halves`): ranks that differed would make different collectives. Pure; how halves are
computed: models/deepseek/overlap.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MOST_IN_FLIGHT = 2  # halves, so layers between a dispatch and its results

# Tokens a rank from which halves still fill a GPU's grouped GEMMs. From the sizes, not measured:
# below, each expert's weights are read twice for few rows, which costs more than a dispatch takes.
CUDA_FROM = 256


@dataclass(frozen=True)
class OverlapChoice:
    """tokens: agreed tokens of a step from which it goes in halves; None: never. note: why, to be
    printed once."""

    tokens: int | None
    note: str

    def report(self) -> dict[str, object]:
        """For `/health`."""
        return {"from_tokens": self.tokens, "reason": self.note.removeprefix("overlap: ")}


def decide_overlap(
    asked: int | Literal["off"] | None,
    token_budget: int,
    num_ranks: int,
    device_type: str,
    dispatcher: str,
    max_in_flight: int | None,
) -> OverlapChoice:
    """asked: a threshold, at least 1; None for auto. token_budget: the most tokens of a step.
    max_in_flight: `Dispatcher.max_in_flight` of the dispatcher of this name. The same on every
    rank, for all arguments are."""
    if asked == "off":
        return OverlapChoice(None, "overlap: off (asked for)")
    if max_in_flight is not None and max_in_flight < MOST_IN_FLIGHT:
        return OverlapChoice(
            None,
            f"overlap: off; dispatcher {dispatcher!r} has room for {max_in_flight} layer in "
            f"flight, two halves need {MOST_IN_FLIGHT}",
        )
    if asked is None and num_ranks == 1:
        return OverlapChoice(None, "overlap: off (auto: one rank sends nothing)")
    if asked is None and device_type == "cpu":
        return OverlapChoice(
            None,
            "overlap: off (auto: on CPUs the cores that would compute are those that send, and "
            "halves read each expert twice)",
        )
    tokens = CUDA_FROM if asked is None else asked
    why = "auto, not measured" if asked is None else "asked for"
    if tokens > token_budget:
        return OverlapChoice(
            None,
            f"overlap: off; from {tokens} tokens a rank on ({why}), but a step has at most "
            f"{token_budget}",
        )
    return OverlapChoice(
        tokens, f"overlap: from {tokens} token{'s' * (tokens > 1)} a rank on ({why})"
    )


def goes_in_halves(max_tokens: int | None, overlap_from: int | None) -> bool:
    """max_tokens: the most tokens of any rank in this step, agreed; None: nothing was agreed."""
    return overlap_from is not None and max_tokens is not None and max_tokens >= overlap_from
