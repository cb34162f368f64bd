"""A model over real gloo ranks: the same bits for every EP degree, redundancy and placement.

Each rank has sequences of its own, some have none, and all must say what one rank says alone. Run
as a script this file is the ranks (gloo_ranks.py).
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch
from gloo_ranks import fork_ranks, run_ranks

from dispatch import create_dispatcher
from ep.group import EPGroup
from ep.placement import EMPTY, ExpertPlacement
from models.deepseek.kernels.base import Kernels
from models.deepseek.kernels.errors import KernelsUnavailable
from models.deepseek.kernels.select import create_kernels
from models.deepseek.load import load_model
from models.deepseek.model import DeepSeekModel
from models.deepseek.random_checkpoint import FP8_KINDS, write_random_checkpoint
from models.deepseek.random_families import family_config
from models.offline import OfflineRunner

NUM_SEQUENCES = 5
SMALL = {"num_hidden_layers": 3, "vocab_size": 128, "eos_token_id": 1}


@pytest.mark.dist
@pytest.mark.parametrize(("family", "num_ranks"), [("v3", 2), ("v3", 3), ("v3", 4), ("v2", 2)])
def test_same_bits_over_ranks(family: str, num_ranks: int, tmp_path: Path) -> None:
    config = family_config(family, **SMALL)
    fp8 = FP8_KINDS[0] if family == "v3" else None
    write_random_checkpoint(tmp_path / "c", config, fp8=fp8, num_shards=2, tokenizer=False)
    assert run_ranks(__file__, num_ranks, tmp_path, timeout=200) == ["same"] * num_ranks


def kernels() -> Kernels:
    try:
        return create_kernels("native").kernels
    except KernelsUnavailable:
        return create_kernels("torch").kernels


def load(
    folder: Path, group: EPGroup, placement: ExpertPlacement | None, deterministic: bool
) -> DeepSeekModel:
    chosen = kernels()
    return load_model(
        folder / "c",
        dtype=torch.bfloat16,
        kernels=chosen,
        group=group,
        dispatcher_factory=lambda config: (
            create_dispatcher("auto", group, config, combine_pairs=chosen.combine_pairs).dispatcher
        ),
        placement=placement,
        deterministic=deterministic,
        max_tokens_per_rank=128,
    )


def prompt(sequence: int) -> list[int]:
    return [(7 * sequence + 3 * i * i) % 128 for i in range(6 + 4 * sequence)]


def run(model: DeepSeekModel, mine: list[int]) -> dict[int, torch.Tensor]:
    """Two chunks and a decode step of each sequence, then MTP drafts; all rows' logits."""
    runner = OfflineRunner(model, num_blocks=32, block_size=4)
    out: dict[int, list[torch.Tensor]] = {s: [] for s in mine}
    hidden: dict[int, list[torch.Tensor]] = {s: [] for s in mine}
    for begin, end in ((0, 5), (5, -1), (-1, None)):
        step = runner.step({s: prompt(s)[begin:end] for s in mine})
        for s in mine:
            out[s].append(step.logits[s])
            hidden[s].append(step.hidden[s])
    if model.num_mtp_layers:
        rows = {s: torch.cat(hidden[s]) for s in mine}
        drafts = runner.draft(rows, {s: [*prompt(s)[1:], 9] for s in mine})
        for s in mine:
            out[s].append(drafts.logits[s])
    return {s: torch.cat(parts) for s, parts in out.items()}


def placements(model: DeepSeekModel, size: int) -> list[ExpertPlacement | None]:
    """Trivial without copies, with few (some slots are empty), with one of each expert, and a
    shuffled one with an empty slot somewhere, and one that has all experts on the last rank."""
    rows, experts = model.config.num_placement_layers(), model.config.n_routed_experts
    shuffled = []
    for row in range(rows):
        slots = [*range(experts), *(3 * i % experts for i in range(size - 1)), EMPTY]
        random.Random(row).shuffle(slots)
        shuffled.append(slots)
    return [
        None,
        ExpertPlacement.trivial(rows, experts, size, num_redundant=3),
        ExpertPlacement.trivial(rows, experts, size, num_redundant=experts),
        ExpertPlacement.from_physical_to_logical(shuffled, num_ranks=size, num_experts=experts),
        ExpertPlacement.from_physical_to_logical(
            [[EMPTY] * (experts * (size - 1)) + [*range(experts)]] * rows, num_ranks=size
        ),
    ]


def check(group: EPGroup, folder: Path) -> str:
    alone = load(folder, EPGroup.single(), None, True)
    expected = run(alone, list(range(NUM_SEQUENCES)))
    for number, placement in enumerate(placements(alone, group.size)):
        model = load(folder, group, placement, True)
        # The last rank idles, then the first.
        for idle in (group.size - 1, 0):
            busy = [r for r in range(group.size) if r != idle]
            mine = [s for s in range(NUM_SEQUENCES) if busy[s % len(busy)] == group.rank]
            for s, logits in run(model, mine).items():
                if not torch.equal(logits, expected[s]):
                    return f"placement {number}, idle {idle}: sequence {s} differs"
        model.close()
    fast = run(load(folder, group, None, False), [group.rank])
    for s, logits in fast.items():
        error = float((logits - expected[s]).abs().max())
        if not error < 0.5 or logits.shape != expected[s].shape:
            return f"fast mode: sequence {s} is off by {error}"
    return "same"


if __name__ == "__main__":
    # Kernels are built and imported once, before the fork.
    sys.exit(fork_ranks(check, before=lambda folder: kernels()))
