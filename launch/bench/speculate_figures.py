"""What runs with drafts and runs without say of each other: the rows of `bench speculate`.

Leviathan's prediction uses what was measured: a, the rate that gives the measured tokens a step at
the depths that were used (a sequence for which nothing was drafted counts as refused), and c, a
round of drafting over a step without drafts. It takes a step over k + 1 tokens to be as long as one
over one token; how far that is wrong here is a figure of its own (`verify_ratio`), and with it the
same formula is `predicted_with_verify`.

Knows numbers; nothing of engines or of how they are shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from launch.bench.figures import Spread, paired_ratio, percentile
from launch.bench.speculate_flags import Cell
from moeserve.speculate.acceptance import expected_tokens
from moeserve.speculation_report import shares

Tokens = dict[str, tuple[int, ...]]  # of each prompt


@dataclass(frozen=True)
class Run:
    """One batch from prompts to the last token, over all ranks; `tokens` to `depths` are of the
    steps in which every sequence decodes. seconds: drafting included. slots: sequences a step,
    summed. depths: steps by the depth of the drafts made at their end. to_end: seconds from the
    last prompt's end to the last token. drafted, accepted: by position of a chain, of the whole
    run, like runs (verifications of drafts) and texts."""

    tokens: int
    seconds: float
    steps: int
    slots: int
    drafting: float
    rounds: int
    depths: tuple[int, ...]
    to_end: float
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    runs: int
    texts: Tokens

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    @property
    def step_seconds(self) -> float:
        """Of a step, without its drafting."""
        return (self.seconds - self.drafting) / self.steps


@dataclass(frozen=True)
class Pair:
    """The same prompts without drafts and with them, one right after the other."""

    off: Run
    on: Run


def row(
    cell: Cell, pairs: Sequence[Pair], compared: bool = True, tree_nodes: int = 0
) -> dict[str, Any]:
    """In JSON's types. pairs: one or more. compared: whether the same tokens are to come out.
    tree_nodes: drafts at most of a sequence's tree, 0 where they are chains."""
    on = [pair.on for pair in pairs]
    drafted = [sum(x) for x in zip(*(run.drafted for run in on), strict=True)]
    accepted = [sum(x) for x in zip(*(run.accepted for run in on), strict=True)]
    runs = sum(run.runs for run in on)
    step = Spread.of([pair.off.step_seconds for pair in pairs]).median
    round_seconds = sum(run.drafting for run in on) / max(sum(run.rounds for run in on), 1)
    cost = round_seconds / step
    depths = [sum(x) for x in zip(*(run.depths for run in on), strict=True)]
    a_step = sum(run.tokens for run in on) / max(sum(run.slots for run in on), 1)
    rate = rate_of(a_step, depths)
    ratios = [pair.on.rate / pair.off.rate for pair in pairs]
    verify = Spread.of([p.on.step_seconds / p.off.step_seconds for p in pairs]).median
    return {
        "drafter": cell.drafter,
        "depth": cell.depth,
        "tree_nodes": tree_nodes,
        "batch": cell.batch,
        "speedup": paired_ratio([p.on.rate for p in pairs], [p.off.rate for p in pairs]),
        "speedup_quartiles": list(quartiles(ratios)),
        "speedup_least": min(ratios),
        "speedup_most": max(ratios),
        "speedup_to_end": paired_ratio([p.off.to_end for p in pairs], [p.on.to_end for p in pairs]),
        "predicted": predicted(rate, cost, depths),
        "predicted_with_verify": predicted(rate, cost, depths, verify),
        "acceptance": shares(drafted, accepted),
        "drafted": drafted,
        "accepted": accepted,
        "mean_accepted": sum(accepted) / runs if runs else 0.0,
        "tokens_per_step": a_step,
        "mean_depth": sum(d * n for d, n in enumerate(depths)) / max(sum(depths), 1),
        "rate": rate,
        "cost_ratio": cost,
        "verify_ratio": verify,
        "tokens_per_second": Spread.of([run.rate for run in on]).median,
        "tokens_per_second_off": Spread.of([pair.off.rate for pair in pairs]).median,
        "step_ms_off": step * 1e3,
        "round_ms": round_seconds * 1e3,
        "runs": runs,
        "pairs": len(pairs),
        "ratios": [round(x, 4) for x in ratios],
        "same_tokens": same_tokens(pairs) if compared else None,
    }


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Where the middle half of them begins and ends."""
    ordered = sorted(values)
    return percentile(ordered, 25), percentile(ordered, 75)


def rate_of(tokens_per_step: float, depths: Sequence[int]) -> float:
    """The a of the theorem: with drafts accepted at this rate, steps of these depths (depths[k]: at
    depth k) would give so many tokens each. By bisection; 0 where nothing was drafted."""
    steps = sum(depths)
    if not any(depths[1:]) or tokens_per_step <= 1:
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        tokens = sum(n * expected_tokens(middle, k) for k, n in enumerate(depths)) / steps
        low, high = (middle, high) if tokens < tokens_per_step else (low, middle)
    return (low + high) / 2


def predicted(rate: float, cost: float, depths: Sequence[int], verify: float = 1.0) -> float:
    """Leviathan et al., Theorem 3.8, (1 - a^(k+1)) / ((1 - a) (1 + c k)), where the depth changed:
    expected tokens of all steps over their time in steps without drafts. depths[k]: steps at depth
    k. Without any step 1. verify: mean time of these steps, drafting left out, over one without
    drafts; the theorem's is 1."""
    tokens = sum(n * expected_tokens(rate, k) for k, n in enumerate(depths))
    time = sum(n * (verify + cost * k) for k, n in enumerate(depths))
    return tokens / time if time else 1.0


def same_tokens(pairs: Sequence[Pair]) -> bool:
    """Every prompt got the same tokens with drafts and without, and there were some."""
    return all(pair.off.texts == pair.on.texts and pair.off.texts for pair in pairs)
