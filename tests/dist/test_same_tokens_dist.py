"""Law 5 over real gloo ranks: whatever the expert-parallel degree, redundancy, where requests run
and how they are cut, tokens and log-probabilities are bitwise those of one rank alone.

One set of processes goes through all cases; rank 0 also computes the plain run, in a group of one.
Run as a script this file is the ranks (gloo_ranks.py).
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_steps import steps_until_all_stop
from gloo_ranks import ROOT, fork_ranks, run_ranks

from ep.group import EPGroup
from models.deepseek.random_checkpoint import write_random_checkpoint
from models.deepseek.random_families import family_config
from moeserve.build import build_engine
from moeserve.cache import BlockCache
from moeserve.config import ServeConfig
from moeserve.engine import Engine
from moeserve.request import Request, SamplingParams
from moeserve.runner import ModelRunner
from moeserve.scheduler import ScheduleLimits, Scheduler

LENGTH = 96
# Checkpoint, dtype, redundant experts: 0, 3 or as many as there are. 16 + 3 and 32 + 3 divide by
# neither 2 nor 4 (a slot is empty then), 17 + 3 by both.
CASES = (
    ("v3", "float32", 0),
    ("v3", "float32", 3),
    ("v3", "bfloat16", 16),
    ("kimi", "float32", 3),
    ("kimi", "bfloat16", 3),
    ("bundled", "float32", 32),
    ("bundled", "float32", 3),
    ("bundled", "bfloat16", 3),
    ("bundled", "bfloat16", 0),
)
# The others go over what "auto" chooses.
DISPATCH = {("kimi", "bfloat16", 3): "allgather", ("bundled", "bfloat16", 0): "allgather"}
# Where request i of n runs, for R ranks: everywhere, all on one rank, most on the last one.
HOMES = {
    "spread": lambda i, ranks: i % ranks,
    "all-on-0": lambda i, ranks: 0,
    "rank-0-drains-early": lambda i, ranks: 0 if i == 0 else ranks - 1,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "spread": {"prefix": True, "size": 16},  # prefix cache on, chunking off
    "all-on-0": {"chunk": 3, "size": 4, "prefix": True},
    # Preemption; steps of six tokens and more go in halves, of which some ranks have none.
    "rank-0-drains-early": {"chunk": 5, "size": 4, "tokens": LENGTH, "rows": 12, "overlap": 6},
}


@pytest.mark.dist
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_change_no_bit(num_ranks: int, tmp_path: Path) -> None:
    reports = run_ranks(__file__, num_ranks, tmp_path, timeout=250)
    plain = reports[0].pop("plain")
    compared = 0
    for case in reports[0]:
        merged: dict[str, Any] = {}
        for report in reports:
            merged |= report[case]["outputs"]
        wanted = plain[case.split("/")[0]]
        assert merged.keys() == wanted.keys(), case
        for name, found in merged.items():
            assert found == wanted[name], f"{case}: request {name}"
            compared += 1
        # The collectives are a function of what all agreed on: the same number on every rank.
        for what in ("steps", "calls"):
            assert len({report[case][what] for report in reports}) == 1, (case, what)
        assert all(report[case]["leaked"] == 0 for report in reports)
    pressed = [r[c]["preemptions"] for r in reports for c in r if c.endswith("early")]
    assert max(pressed) > 0
    assert compared >= 12 * len(reports[0]) > 0


def requests(vocab: int) -> list[Request]:
    rng = random.Random(1)
    base = [rng.randrange(3, vocab) for _ in range(50)]
    made = []
    for i in range(12):
        prompt = base[: rng.choice([0, 5, 17, 33, 50])]
        prompt = [*prompt, *(rng.randrange(3, vocab) for _ in range(rng.randrange(1, 8)))]
        sampling = SamplingParams(
            temperature=0, max_tokens=rng.randrange(4, 15), ignore_eos=True, logprobs=1
        )
        made.append(Request(request_id=f"{i}", prompt_token_ids=tuple(prompt), sampling=sampling))
    return made


def load(
    folder: Path, dtype: str, redundant: int, group: EPGroup, dispatch: str = "auto"
) -> Engine:
    settings: dict[str, dict[str, Any]] = {
        "model": {"checkpoint": folder, "dtype": dtype},
        "parallel": {"redundant_experts": redundant, "ep": group.size, "dispatch": dispatch},
        "cache": {"kv_tokens": 256},
        "schedule": {"max_model_len": LENGTH},
    }
    return build_engine(ServeConfig.load(None, settings), group)


def serve(
    loaded: Engine,
    group: EPGroup,
    mine: list[Request],
    *,
    size: int = 16,
    tokens: int = 2048,
    rows: int = 8,
    chunk: int | None = None,
    prefix: bool = False,
    together: bool = True,
    overlap: int | None = None,
) -> dict[str, Any]:
    """This rank's part; every rank calls it, with requests or without, until all agree to stop."""
    model = loaded.runner.model
    cache = BlockCache(tokens // size, size, rows, prefix)
    pages = model.cache_spec.allocate(tokens // size, size, torch.device("cpu"))
    limits = ScheduleLimits(rows, 512, chunk, LENGTH)
    runner = ModelRunner(model, pages, cache.tables, overlap_from=overlap)
    engine = Engine(runner, Scheduler(cache, limits), group)
    calls = model.dispatcher.stats.calls  # type: ignore[attr-defined]
    outputs: dict[str, list[Any]] = {}
    steps = 0
    for came in steps_until_all_stop(engine, mine, together):
        for output in came:
            assert output.error is None
            entries = outputs.setdefault(output.request_id, [])
            entries += [[e.token_id, e.logprob.hex(), e.top] for e in output.logprobs]
        steps += 1
    return {
        "outputs": outputs,
        "steps": steps,
        "calls": model.dispatcher.stats.calls - calls,  # type: ignore[attr-defined]
        "leaked": cache.pool.num_blocks - cache.num_available,
        "preemptions": engine.stats().preemptions,
    }


def rank_main(group: EPGroup, folder: Path) -> dict[str, Any]:
    rank, size = group.rank, group.size
    report: dict[str, Any] = {}
    plain: dict[str, Any] = {}
    # Four ranks share two cores here: two cases that the others cover are left to two ranks.
    for name, dtype, redundant in CASES if size < 4 else [*CASES[1:4], *CASES[5:]]:
        checkpoint = ROOT / "checkpoints/tiny" if name == "bundled" else folder / name
        if not (checkpoint / "config.json").is_file():
            continue
        over = DISPATCH.get((name, dtype, redundant), "auto")
        loaded = load(checkpoint, dtype, redundant, group, over)
        assert over in ("auto", loaded.runner.model.dispatcher.name)
        asked = requests(loaded.runner.model.config.vocab_size)
        if rank == 0 and f"{name}-{dtype}" not in plain:
            alone = EPGroup.single()
            single = load(checkpoint, dtype, 0, alone)
            plain[f"{name}-{dtype}"] = serve(single, alone, asked, together=False)["outputs"]
        for home, variant in VARIANTS.items():
            mine = [r for i, r in enumerate(asked) if HOMES[home](i, size) == rank]
            case = f"{name}-{dtype}/{redundant}/{home}"
            report[case] = serve(loaded, group, mine, **variant)
        loaded.close()
    if rank == 0:
        report["plain"] = plain
    return report


def write_checkpoints(folder: Path) -> None:
    small = {"num_hidden_layers": 3, "max_position_embeddings": 256}
    for family, more in (("v3", {}), ("kimi", {"n_routed_experts": 17})):
        config = family_config(family, **small, **more)
        write_random_checkpoint(folder / family, config, tokenizer=False)


if __name__ == "__main__":
    sys.exit(fork_ranks(rank_main, before=write_checkpoints))
