"""A model over real gloo ranks: the same bits for every EP degree, redundancy and placement.

Run by pytest this file starts itself as a script, which forks the ranks; they meet through a file.
Each rank has sequences of its own, some have none, and all must say what one rank says alone.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import subprocess
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

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

ROOT = Path(__file__).parents[2]
NUM_SEQUENCES = 5
SMALL = {"num_hidden_layers": 3, "vocab_size": 128, "eos_token_id": 1}


@pytest.mark.dist
@pytest.mark.parametrize(("family", "num_ranks"), [("v3", 2), ("v3", 3), ("v3", 4), ("v2", 2)])
def test_same_bits_over_ranks(family: str, num_ranks: int, tmp_path: Path) -> None:
    config = family_config(family, **SMALL)
    fp8 = FP8_KINDS[0] if family == "v3" else None
    write_random_checkpoint(tmp_path / "c", config, fp8=fp8, num_shards=2, tokenizer=False)
    run = subprocess.run(
        [sys.executable, __file__, str(num_ranks), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    reports = [(tmp_path / f"rank{r}.txt").read_text() for r in range(num_ranks)]
    assert reports == ["same"] * num_ranks, reports


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


def rank_main(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=120),
    )
    group = EPGroup(rank, size, size, dist.group.WORLD, dist.group.WORLD)
    (folder / f"rank{rank}.txt").write_text(check(group, folder))
    dist.barrier()
    dist.destroy_process_group()


def main(size: int, folder: Path) -> int:
    kernels()  # built and imported once, before the fork
    children = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # die with the parent
            try:
                rank_main(rank, size, folder)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(pid)
    failed = sum(os.waitpid(pid, 0)[1] != 0 for pid in children)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2])))
