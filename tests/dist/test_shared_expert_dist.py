"""The shared expert in slots, and rows in FP8, over real gloo ranks: tokens and log-probabilities
are bitwise those of one rank that computes it for its own tokens, whatever the degree, copies,
dtype or format; of each format of rows by itself, for FP8 rounds them. Those in FP8 overlap too.

One set of processes goes through all cases; rank 0 also computes the plain run, in a group of one.
Run as a script this file is the ranks (gloo_ranks.py).
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
from gloo_ranks import ROOT, fork_ranks, run_ranks

from ep.group import EPGroup
from models.deepseek.random_checkpoint import write_random_checkpoint
from models.deepseek.random_families import family_config
from moeserve.build import build_engine
from moeserve.config import ServeConfig
from moeserve.engine import Engine
from moeserve.request import Request, SamplingParams

# Checkpoint, dtype, weights in memory, where the shared expert is, redundant experts, rows. The
# bundled model has FP8 blocks and widths of 96, which are no whole panels; v2-lite has a shared
# expert of two pieces.
CASES = (
    ("bundled", "float32", "fp8", "hosted", 0, "model"),
    ("bundled", "bfloat16", "dequantised", "hosted", 3, "model"),
    ("bundled", "bfloat16", "fp8", "hosted", 31, "fp8"),
    ("v2-lite", "float32", "auto", "hosted", 0, "model"),
    ("v2-lite", "bfloat16", "auto", "hosted", 5, "model"),
    ("v2-lite", "bfloat16", "auto", "replicated", 3, "model"),
    ("v2-lite-fp8", "bfloat16", "fp8", "hosted", 3, "fp8"),
    ("v2-lite-fp8", "bfloat16", "fp8", "replicated", 0, "fp8"),
    ("v2-lite-fp8", "float32", "dequantised", "hosted", 18, "fp8"),
)
FEW = (CASES[0], CASES[4], CASES[5], CASES[6])  # for two ranks: what four cover is left to them
LENGTH = 96


@pytest.mark.dist
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_hosted_changes_no_bit(num_ranks: int, tmp_path: Path) -> None:
    reports = run_ranks(__file__, num_ranks, tmp_path, timeout=250)
    plain = reports[0].pop("plain")
    fast = reports[0].pop("fast")
    for report in reports[1:]:
        fast |= report.pop("fast")
    assert len(reports[0]) == len(CASES if num_ranks > 2 else FEW)
    for case in reports[0]:
        merged: dict[str, Any] = {}
        for report in reports:
            merged |= report[case]["outputs"]
        wanted = plain["/".join(case.split("/")[:3])]
        assert merged.keys() == wanted.keys(), case
        for name, found in merged.items():
            assert found == wanted[name], f"{case}: request {name}"
        copies = [report[case]["copies"] for report in reports]
        if "hosted" in case:
            # Of each piece the same number on every rank's tables, more than one if there is room.
            assert copies == [copies[0]] * num_ranks and min(copies[0]) >= 1
            assert min(copies[0]) > 1 or case.endswith("/0")
    # Without determinism a rank sums its experts before sending: close, not equal.
    for name, found in fast.items():
        first, wanted = (
            float.fromhex(x[name][0][1]) for x in (fast, plain["bundled/float32/model"])
        )
        assert abs(first - wanted) < 1e-3 and len(found) > 0, name
    if num_ranks > 2:
        assert plain["bundled/bfloat16/fp8"] != plain["bundled/bfloat16/model"], "none was rounded"


def requests(vocab: int) -> list[Request]:
    rng = random.Random(3)
    base = [rng.randrange(3, vocab) for _ in range(40)]
    made = []
    for i in range(7):
        prompt = [*base[: 9 * (i % 4)], *(rng.randrange(3, vocab) for _ in range(1 + i))]
        sampling = SamplingParams(temperature=0, max_tokens=4 + 2 * i, ignore_eos=True, logprobs=1)
        made.append(Request(request_id=f"{i}", prompt_token_ids=tuple(prompt), sampling=sampling))
    return made


def load(
    folder: Path, group: EPGroup, dtype: str, weights: str = "auto", shared: str = "replicated",
    redundant: int = 0, wire: str = "model", deterministic: bool = True,
) -> Engine:  # fmt: skip
    settings: dict[str, dict[str, Any]] = {
        "model": {"checkpoint": folder, "dtype": dtype, "weights": weights},
        "parallel": {
            "redundant_experts": redundant, "ep": group.size, "shared_expert": shared,
            "wire": wire, "overlap": 4 if wire == "fp8" and group.size > 1 else None,
        },
        "engine": {"deterministic": deterministic},
        "cache": {"kv_tokens": 1024},
        "schedule": {"max_model_len": LENGTH, "chunk_size": 7 if group.size > 1 else None},
    }  # fmt: skip
    return build_engine(ServeConfig.load(None, settings), group)


def serve(engine: Engine, mine: list[Request]) -> dict[str, list[Any]]:
    """This rank's part, until all ranks agree to stop."""
    for request in mine:
        engine.add_request(request)
    engine.request_stop()
    outputs: dict[str, list[Any]] = {}
    while not engine.stopped:
        for output in engine.step():
            assert output.error is None
            entries = outputs.setdefault(output.request_id, [])
            entries += [[e.token_id, e.logprob.hex()] for e in output.logprobs]
    engine.close()
    return outputs


def rank_main(group: EPGroup, folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = {}
    plain: dict[str, Any] = {}
    for name, dtype, weights, shared, redundant, wire in CASES if group.size > 2 else FEW:
        checkpoint = ROOT / "checkpoints/tiny" if name == "bundled" else folder / name
        engine = load(checkpoint, group, dtype, weights, shared, redundant, wire)
        asked = requests(engine.runner.model.config.vocab_size)
        key = f"{name}/{dtype}/{wire}"
        if group.rank == 0 and key not in plain:
            plain[key] = serve(load(checkpoint, EPGroup.single(), dtype, wire=wire), asked)
        # The last rank has nothing to do.
        mine = [r for i, r in enumerate(asked) if i % max(1, group.size - 1) == group.rank]
        placement = engine.info["placement"]
        assert isinstance(placement, dict) and placement["shared_expert"] == shared
        report[f"{key}/{weights}/{shared}/{redundant}"] = {
            "copies": placement["shared_replicas"],
            "outputs": serve(engine, mine),
        }
    fast = load(
        ROOT / "checkpoints/tiny", group, "float32", "auto", "hosted", 3, deterministic=False
    )
    asked = requests(fast.runner.model.config.vocab_size)
    report["fast"] = serve(fast, asked[group.rank :: group.size])
    if group.rank == 0:
        report["plain"] = plain
    return report


def write_checkpoints(folder: Path) -> None:
    config = family_config("v2-lite", num_hidden_layers=3, max_position_embeddings=256)
    write_random_checkpoint(folder / "v2-lite", config, tokenizer=False)
    write_random_checkpoint(folder / "v2-lite-fp8", config, fp8="fp32", tokenizer=False)


if __name__ == "__main__":
    sys.exit(fork_ranks(rank_main, before=write_checkpoints))
