"""Speculation over real gloo ranks: whatever the expert-parallel degree, redundancy, drafter, depth
and where requests run, tokens and log-probabilities are bitwise those of one rank without drafts,
and all ranks take the same steps and collectives.

One set of processes goes through all cases; rank 0 also computes the plain run, in a group of one.
Run as a script this file is the ranks (gloo_ranks.py).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_steps import steps_until_all_stop
from gloo_ranks import ROOT, fork_ranks, run_ranks
from speculate_world import Oracle, pick_there, requests

from ep.group import EPGroup
from ep.load import DECODE, LoadWindow
from models.deepseek.random_checkpoint import write_random_checkpoint
from models.deepseek.random_families import family_config
from moeserve.build import build_engine
from moeserve.cache import BlockCache
from moeserve.config import ServeConfig
from moeserve.engine import Engine
from moeserve.recorder import StepRecorder
from moeserve.request import Request
from moeserve.runner import ModelRunner
from moeserve.scheduler import ScheduleLimits, Scheduler
from moeserve.speculate.adaptive import AdaptiveDepth, FixedDepth
from moeserve.speculate.drafter import Drafter
from moeserve.speculate.mtp import MtpDrafter
from moeserve.speculate.ngram import NgramDrafter
from moeserve.speculate.speculator import Speculator

LENGTH = 80
RESTLESS = 0  # a depth: see `Restless`
CASES = (("v3", "float32", 0), ("v3", "bfloat16", 3), ("bundled", "bfloat16", 3))
HOMES = {
    "spread": lambda i, ranks: i % ranks,
    "all-on-0": lambda i, ranks: 0,
    "rank-0-drains-early": lambda i, ranks: 0 if i == 0 else ranks - 1,
}
# Drafter, depth (None: adaptive), where requests run, how they are scheduled.
RUNS: dict[str, tuple[str, int | None, str, dict[str, Any]]] = {
    "mtp-3": ("mtp", 3, "spread", {"prefix": True, "size": 16}),
    "mtp-1": ("mtp", 1, "all-on-0", {"chunk": 3, "size": 4, "prefix": True}),
    "mtp-auto": ("mtp", None, "spread", {"size": 4, "budget": 11}),
    # Drafting begins and ends in every few steps, so that rows kept in a pause are caught up with
    # while prompts of others are computed chunk by chunk.
    "mtp-restless": ("mtp", RESTLESS, "spread", {"size": 4, "chunk": 3}),
    "mtp-restless-narrow": ("mtp", RESTLESS, "all-on-0", {"size": 4, "chunk": 4, "budget": 16}),
    "mtp-pressed": (
        "mtp",
        2,
        "rank-0-drains-early",
        {"chunk": 5, "size": 4, "tokens": LENGTH, "rows": 12, "overlap": 6},
    ),
    "ngram-4": ("ngram", 4, "spread", {"size": 4, "prefix": True}),
    "oracle-tree-3": ("oracle", 3, "spread", {"size": 4, "chunk": 5, "nodes": 12}),
    "oracle-5": ("oracle", 5, "all-on-0", {"size": 4, "prefix": True, "chunk": 7}),
}


class Restless(AdaptiveDepth):
    """Off for some steps, on for some, whatever it costs."""

    looks = holds = True

    def agree_on(self, tokens: Any, rows: Any, costs: Any) -> int:
        self._on += 1
        self.depth = (0, 0, 0, 0, 0, 3, 0, 0, 2, 2, 1)[self._on % 11]
        return self.depth


@pytest.mark.dist
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_drafts_change_no_bit_on_ranks(num_ranks: int, tmp_path: Path) -> None:
    reports = run_ranks(__file__, num_ranks, tmp_path, timeout=250)
    plain = reports[0].pop("plain")
    for case in reports[0]:
        merged: dict[str, Any] = {}
        for report in reports:
            merged |= report[case]["outputs"]
        wanted = plain[case.split("/")[0]]
        assert merged.keys() == wanted.keys(), case
        for name, found in merged.items():
            assert found == wanted[name], f"{case}: request {name}"
        for what in ("steps", "calls", "rounds"):
            assert len({report[case][what] for report in reports}) == 1, (case, what)
        assert all(report[case]["leaked"] == 0 for report in reports)
        drafted = sum(report[case]["drafted"] for report in reports)
        assert drafted > 0 or "ngram" in case, case
        # Picks of the MTP layer's row: every row of its rounds, of all ranks.
        picks = sum(report[case]["mtp_picks"] for report in reports)
        assert (picks > drafted) == ("mtp" in case), (case, picks, drafted)
        if "bundled" in case and "mtp" in case:
            assert sum(report[case]["accepted"] for report in reports) > 0, case
    assert max(r[c]["preemptions"] for r in reports for c in r if c.endswith("pressed")) > 0


def load(folder: Path, dtype: str, redundant: int, group: EPGroup) -> Engine:
    settings: dict[str, dict[str, Any]] = {
        "model": {"checkpoint": folder, "dtype": dtype},
        "parallel": {"redundant_experts": redundant, "ep": group.size},
        "cache": {"kv_tokens": 256},
        "schedule": {"max_model_len": LENGTH},
        "engine": {"quiet": True},
    }
    return build_engine(ServeConfig.load(None, settings), group)


def serve(
    loaded: Engine,
    group: EPGroup,
    mine: list[Request],
    *,
    drafter: str | None = None,
    depth: int | None = None,
    known: dict[str, list[int]] | None = None,
    size: int = 16,
    tokens: int = 2048,
    rows: int = 8,
    budget: int = 512,
    chunk: int | None = None,
    prefix: bool = False,
    together: bool = True,
    overlap: int | None = None,
    nodes: int | None = None,
) -> dict[str, Any]:
    """This rank's part; every rank calls it, with requests or without, until all agree to stop."""
    model: Any = loaded.runner.model
    cache = BlockCache(tokens // size, size, rows, prefix)
    pages = model.cache_spec.allocate(tokens // size, size, torch.device("cpu"))
    limits = ScheduleLimits(rows, budget, chunk, LENGTH)
    placement = model.placement
    recorder = StepRecorder(LoadWindow(placement.num_layers, placement.num_logical_experts, 8))
    runner = ModelRunner(model, pages, cache.tables, recorder, overlap)
    scheduler = Scheduler(cache, limits)
    speculator: Speculator | None = None
    if drafter is not None:
        most = depth or 4
        made: Drafter
        if drafter == "mtp":
            layer, hidden = model.config.num_hidden_layers, model.config.hidden_size
            made = MtpDrafter(  # of some ranks the device chooses, of others the host, as they must
                runner, pages, layer, hidden, most, begin_round=lambda *x: told.begin_round(*x),
                pick=pick_there if group.rank % 2 else None,
            )  # fmt: skip
        elif drafter == "ngram":
            made = NgramDrafter(model.config.vocab_size, most, longest=3, shortest=1)
        else:
            assert known is not None
            made = Oracle(known, most, model.config.vocab_size, nodes)
        adaptive = Restless if depth == RESTLESS else AdaptiveDepth
        policy = FixedDepth(depth) if depth else adaptive(most)
        told = speculator = Speculator(made, policy, runner, scheduler, group.rank)
    engine = Engine(runner, scheduler, group, recorder, speculator=speculator)
    calls = model.dispatcher.stats.calls
    outputs: dict[str, list[Any]] = {}
    steps = 0
    for came in steps_until_all_stop(engine, mine, together):
        for output in came:
            assert output.error is None
            entries = outputs.setdefault(output.request_id, [])
            entries += output.token_ids
            entries += [[e.token_id, e.logprob.hex(), e.top] for e in output.logprobs]
            if output.finish_reason is not None:
                entries += [output.finish_reason, output.stop_token_id]
        steps += 1
    assert speculator is None or speculator.failure is None
    return {
        "outputs": {name: _in_order(entries) for name, entries in outputs.items()},
        "steps": steps,
        "calls": model.dispatcher.stats.calls - calls,
        "rounds": 0 if speculator is None else speculator.num_rounds,
        "leaked": cache.pool.num_blocks - cache.num_available,
        "preemptions": scheduler.counters.preemptions,
        "drafted": scheduler.counters.drafted_tokens,
        "accepted": scheduler.counters.accepted_tokens,
        "mtp_picks": int(recorder.totals[DECODE, -1].sum()),
    }


def _in_order(entries: list[Any]) -> list[Any]:
    """Tokens, then log-probabilities, then the end: outputs come in pieces of other sizes."""
    return [
        x
        for kind in (int, list, object)
        for x in entries
        if type(x) is kind or (kind is object and type(x) not in (int, list))
    ]


def rank_main(group: EPGroup, folder: Path) -> dict[str, Any]:
    rank, size = group.rank, group.size
    report: dict[str, Any] = {}
    plain: dict[str, Any] = {}
    for name, dtype, redundant in (CASES[0], CASES[2]) if size < 4 else CASES[1:2]:
        checkpoint = ROOT / "checkpoints/tiny" if name == "bundled" else folder / name
        loaded = load(checkpoint, dtype, redundant, group)
        asked = requests(loaded.runner.model.config.vocab_size, 12, LENGTH)
        alone = EPGroup.single()
        single = load(checkpoint, dtype, 0, alone)  # on every rank: oracles are told its tokens
        outputs = serve(single, alone, asked, together=False)["outputs"]
        plain[f"{name}-{dtype}"] = outputs
        known = {n: [x for x in entries if type(x) is int] for n, entries in outputs.items()}
        for run, (drafter, depth, home, variant) in RUNS.items():
            mine = [r for i, r in enumerate(asked) if HOMES[home](i, size) == rank]
            report[f"{name}-{dtype}/{redundant}/{run}"] = serve(
                loaded, group, mine, drafter=drafter, depth=depth, known=known, **variant
            )
        loaded.close()
    if rank == 0:
        report["plain"] = plain
    return report


def write_checkpoints(folder: Path) -> None:
    config = family_config("v3", num_hidden_layers=2, max_position_embeddings=256)
    write_random_checkpoint(folder / "v3", config, tokenizer=False)


if __name__ == "__main__":
    sys.exit(fork_ranks(rank_main, before=write_checkpoints))
