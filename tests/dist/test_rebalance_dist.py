"""Experts move between real gloo ranks while they serve: the same tokens in the same steps, each
slot's bytes as the placement says; whatever goes wrong, the move is given up and serving goes on.

One set of processes goes through all cases. Run as a script this file is the ranks (gloo_ranks.py).
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gloo_ranks import ROOT, fork_ranks, run_ranks, script_environment

from ep.bundle_source import BundleSource
from ep.group import EPGroup, gather_objects
from ep.migrate import MigrationPlan
from ep.peer_loss import is_lost_peer
from ep.placement import EMPTY, ExpertPlacement
from ep.rebalance import Ballot
from models.deepseek.random_checkpoint import write_random_checkpoint
from models.deepseek.random_families import family_config
from moeserve.build import build_engine
from moeserve.config import ServeConfig
from moeserve.engine import Engine
from moeserve.rebalancing.rebalancer import Rebalancer
from moeserve.request import Request, SamplingParams
from moeserve.wire_rebalance import Rebalance

# Checkpoint, dtype, redundant experts, shared expert. 32 + 3 and 16 + 1 + 3 leave slots empty.
CASES = (
    ("v3", "float32", 0, "replicated"),
    ("v3", "bfloat16", 3, "hosted"),
    ("bundled", "bfloat16", 3, "replicated"),
)
BUNDLED = "/".join(map(str, CASES[2]))
DEADLINE = 1.5  # seconds, in the cases that wait for it


@pytest.mark.dist
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_experts_move_while_tokens_stay(num_ranks: int, tmp_path: Path) -> None:
    reports = run_ranks(__file__, num_ranks, tmp_path, timeout=250)
    first = reports[0]
    for case in first["moves"]:
        rows = [report["moves"][case] for report in reports]
        assert rows[0]["plain"] and len({r["steps"][0] for r in rows}) == 1, case
        for row in rows:
            assert row["moved"] == row["plain"], f"{case}: a token changed"
            assert row["wrong_slots"] == 0, case
            # as many steps with work as without moves: nothing waited for them
            assert row["steps"][1] == row["steps"][0], case
            assert row["done"] >= 3 and row["abandoned"] == 0, case
        assert len({r["generation"] for r in rows}) == 1 and rows[0]["generation"] > 3
        assert rows[0]["results"] == ["done"] * rows[0]["done"]
        assert sum(r["emptied"] for r in rows) > 0 or "/0/" in case
    for name in first["faults"]:
        rows = [report["faults"][name] for report in reports]
        for row in rows:
            assert row["moved"] == row["plain"], f"{name}: a token changed"
            assert row["wrong_slots"] == 0, name
        result, reason, _ = rows[0]["reports"][0]
        assert result == "abandoned" and FAULTS[name] in reason, (name, rows[0]["reports"][0])
        assert rows[0]["reports"][1][0] == "done", f"{name}: the next one works"
        assert {row["counts"] for row in map(_counts, rows)} == {(1, 1)}, name
        assert len({row["generation"] for row in rows}) == 1, name
        lines = [line for row in rows for line in row["lines"] if "abandoned" in line]
        assert len(lines) == 1 and FAULTS[name] in lines[0], name

    auto = [report["auto"] for report in reports]
    plain = {k: v for report in reports for k, v in report["moves"][BUNDLED]["plain"].items()}
    assert {k: v for row in auto for k, v in row["moved"].items()} == plain
    assert all(row["wrong_slots"] == row["abandoned"] == 0 for row in auto)
    assert len({(row["done"], row["generation"]) for row in auto}) == 1 and auto[0]["done"] >= 2
    assert auto[0]["after"] > auto[0]["before"] > 0


@pytest.mark.dist
def test_a_rank_that_dies_while_it_sends_leaves_nobody_waiting(tmp_path: Path) -> None:
    """The job ends as for any lost rank: the others' next step raises, and they can close."""
    run = subprocess.run(
        [sys.executable, __file__, "2", str(tmp_path)],
        env=script_environment() | {"DIES": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == signal.SIGKILL, run.stdout + run.stderr
    left = json.loads((tmp_path / "left.json").read_text())
    assert left["lost_peer"] and left["sent"] == "moving", left


def _counts(row: dict[str, Any]) -> dict[str, Any]:
    return {"counts": (row["done"], row["abandoned"])}


# -- the ranks ----------------------------------------------------------------------------------

FAULTS = {
    "stalled source": "a source stopped answering",
    "damaged bundle": "a bundle arrived damaged",
    "another digest": "ranks work out different moves",
    "no ready flag": "no progress within the deadline",
    "the planner fails": "the plan could not be made (ZeroDivisionError",
    "second batch fails": "a bundle arrived damaged",
}


def requests(vocab: int, num: int = 12) -> list[Request]:
    rng = random.Random(4)
    made = []
    for i in range(num):
        prompt = [rng.randrange(3, vocab) for _ in range(rng.randrange(3, 30))]
        sampling = SamplingParams(temperature=0, max_tokens=24 + i % 5, ignore_eos=True)
        made.append(Request(request_id=f"{i}", prompt_token_ids=tuple(prompt), sampling=sampling))
    return made


def serve(engine: Engine, mine: list[Request], between: Callable[[], bool]) -> dict[str, Any]:
    """Run these requests to their ends; between() is called before each step; False: go on with
    steps without work. Every rank calls it; all end at the same step."""
    tokens: dict[str, list[int]] = {}
    for request in mine:
        engine.add_request(request)
    first, leaving, deadline = engine.num_steps, False, time.monotonic() + 60
    while True:
        assert time.monotonic() < deadline, "no end"
        enough = between()
        for output in engine.step():
            assert output.error is None
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
        if engine.idle:
            time.sleep(0.001)
            leaving = all(gather_objects(engine.group, enough and not engine.has_work))
        if leaving:
            return {"tokens": tokens, "steps": engine.num_steps - first}


def random_table(seed: int, old: ExpertPlacement) -> bytes:
    """A placement with every expert, other slots any expert or empty: all slots change hands."""
    rng = np.random.default_rng(seed)
    experts, slots = old.num_logical_experts, old.num_physical_experts
    rows = []
    for _ in range(old.num_layers):
        rest = rng.integers(-1, experts, slots - experts)
        rest[:1] = EMPTY  # one at least, where there is room
        rows.append(rng.permutation(np.concatenate([np.arange(experts), rest])))
    return np.array(rows, dtype="<i4").tobytes()


def digests(engine: Engine) -> list[list[str]]:
    """Of each slot of each layer of this rank."""
    return [
        [
            blake2b(w.bundle(s).cut().numpy().tobytes(), digest_size=8).hexdigest()
            for s in range(w.num_slots)
        ]
        for w in engine.runner.model.expert_weights()  # type: ignore[attr-defined]
    ]


def contents(engine: Engine) -> dict[tuple[int, int], str]:
    """Digest of each (layer, expert) of the whole job."""
    assert engine.placement is not None
    found: dict[tuple[int, int], str] = {}
    for rank, theirs in enumerate(gather_objects(engine.group, digests(engine))):
        for layer, slots in enumerate(theirs):
            experts = engine.placement.experts_of(rank, layer)
            for expert, digest in zip(experts, slots, strict=True):
                if expert != EMPTY:
                    assert found.setdefault((layer, expert), digest) == digest
    return found


def wrong_slots(engine: Engine, wanted: dict[tuple[int, int], str]) -> int:
    assert engine.placement is not None
    wrong = 0
    for layer, slots in enumerate(digests(engine)):
        experts = engine.placement.experts_of(engine.group.rank, layer)
        for expert, digest in zip(experts, slots, strict=True):
            wrong += expert != EMPTY and digest != wanted[layer, expert]
    return wrong


def load(
    folder: Path, case: tuple[str, str, int, str], group: EPGroup, lines: list[str], **more: Any
) -> Engine:
    name, dtype, redundant, shared = case
    checkpoint = ROOT / "checkpoints/tiny" if name == "bundled" else folder / name
    settings: dict[str, dict[str, Any]] = {
        "model": {"checkpoint": checkpoint, "dtype": dtype},
        "parallel": {
            "redundant_experts": redundant,
            "ep": group.size,
            "shared_expert": shared,
            "overlap": 1 if shared == "hosted" else "auto",  # experts also move under halves
        },
        "cache": {"kv_tokens": 1024},
        "schedule": {"max_model_len": 64, "max_num_sequences": 16},
        "rebalance": more,
    }
    engine = build_engine(ServeConfig.load(None, settings), group)
    assert engine.rebalancer is not None
    engine.rebalancer._ledger.say = lines.append
    return engine


def asking(engine: Engine, times: int, results: list[list[Any]]) -> Callable[[], bool]:
    """Rank 0 asks for another random placement whenever the last has been answered."""
    asked = 0

    def between() -> bool:
        nonlocal asked
        if engine.group.rank != 0:
            return True
        results.extend([r.result, r.reason, r.explanation] for r in engine.take_rebalance_reports())
        if asked < times and len(results) == asked:
            assert engine.placement is not None
            asked += 1
            table = random_table(asked, engine.placement)
            engine.ask_rebalance(Rebalance(ask=asked, table=table))
        return len(results) == times

    return between


def run_case(
    engine: Engine, mine: list[Request], times: int, wanted: dict[tuple[int, int], str]
) -> dict[str, Any]:
    results: list[list[Any]] = []
    run = serve(engine, mine, asking(engine, times, results))
    assert engine.rebalancer is not None and engine.placement is not None
    stats = engine.rebalancer.stats()
    local = [
        engine.placement.experts_of(engine.group.rank, la) for la in range(len(digests(engine)))
    ]
    return {
        "moved": run["tokens"],
        "run_steps": run["steps"],
        "wrong_slots": wrong_slots(engine, wanted),
        "done": stats.done,
        "abandoned": stats.abandoned,
        "generation": stats.generation,
        "reports": results,
        "results": [r[0] for r in results],
        "emptied": sum(row.count(EMPTY) for row in local),
        "before": stats.utilisation_before,
        "after": stats.utilisation_after,
    }


# A fault: done to one rank's parts before the run -> called to undo it.
Undo = Callable[[], None]


def break_it(name: str, engine: Engine) -> Undo:
    rank, rebalancer = engine.group.rank, engine.rebalancer
    assert rebalancer is not None
    release = threading.Event()
    payload, ready = BundleSource._payload, Rebalancer._progress_of_batch
    maker = rebalancer._maker

    def stall(self: Any, *args: Any) -> Any:
        release.wait(30)
        return payload(self, *args)

    def damage(self: Any, *args: Any) -> Any:
        data = bytearray(payload(self, *args))
        data[len(data) // 2] ^= 4
        return data

    def damage_later(self: Any, *args: Any) -> Any:
        return (damage if self.opened.batch else payload)(self, *args)

    class OddMaker(type(maker)):  # type: ignore[misc]
        def migration(self, old: ExpertPlacement, new: ExpertPlacement) -> MigrationPlan:
            plan = super().migration(old, new)
            return MigrationPlan(plan.old, plan.new, plan.batches[:1], plan.layer_bytes)

        def answer(self, question: Any) -> Any:
            raise ZeroDivisionError("division by zero")

    if name == "stalled source" and rank == 1:
        BundleSource._payload = stall  # type: ignore[method-assign]
    elif name == "damaged bundle" and rank == 1:
        BundleSource._payload = damage  # type: ignore[method-assign]
    elif name == "second batch fails" and rank == 1:
        BundleSource._payload = damage_later  # type: ignore[method-assign]
    elif name == "no ready flag" and rank == 1:
        rebalancer._progress_of_batch = Ballot  # type: ignore[method-assign, assignment]
    elif (name == "another digest" and rank == 1) or (name == "the planner fails" and rank == 0):
        rebalancer._maker = OddMaker(**vars(maker))

    def undo() -> None:
        release.set()
        BundleSource._payload = payload  # type: ignore[method-assign]
        rebalancer._maker = maker
        rebalancer._progress_of_batch = ready.__get__(rebalancer)  # type: ignore[method-assign]

    return undo


def by_itself(group: EPGroup, folder: Path) -> dict[str, Any]:
    """It looks before every step and moves for any gain; 16 redundant experts."""
    eager = {"enabled": True, "interval_steps": 1, "threshold": 1.0, "min_gain": 0, "min_picks": 0}
    engine = load(folder, ("bundled", "bfloat16", 16, "replicated"), group, [], **eager)
    asked = requests(engine.runner.model.config.vocab_size)  # type: ignore[attr-defined]
    mine = [r for i, r in enumerate(asked) if i % group.size == group.rank]
    wanted = contents(engine)
    moved = serve(engine, mine, lambda: not engine.is_moving)["tokens"]
    row = run_case(engine, [], 0, wanted) | {"moved": moved}
    engine.close()
    return row


def die_while_sending(group: EPGroup, folder: Path) -> None:
    """Rank 1 kills itself at the first bundle it is asked for."""
    engine = load(folder, CASES[0], group, [])
    rebalancer = engine.rebalancer
    assert rebalancer is not None
    if group.rank == 1:
        BundleSource._payload = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore
    mine = requests(engine.runner.model.config.vocab_size)[group.rank :: 2]  # type: ignore
    try:
        serve(engine, mine, asking(engine, 1, []))
    except Exception as error:
        stage = rebalancer.stats().state
        engine.close()
        said = {"lost_peer": is_lost_peer(error), "sent": stage, "error": str(error)}
        (folder / "left.json").write_text(json.dumps(said))
        os._exit(0)
    raise AssertionError("nobody died")


def rank_main(group: EPGroup, folder: Path) -> dict[str, Any]:
    if "DIES" in os.environ:
        die_while_sending(group, folder)
    report: dict[str, Any] = {"moves": {}, "faults": {}}
    never: Callable[[], bool] = lambda: True  # noqa: E731
    for case in CASES if group.size == 2 else CASES[1:]:
        lines: list[str] = []
        engine = load(folder, case, group, lines)
        asked = requests(engine.runner.model.config.vocab_size)  # type: ignore[attr-defined]
        mine = [r for i, r in enumerate(asked) if i % group.size == group.rank]
        wanted = contents(engine)
        plain = serve(engine, mine, never)
        engine.reset_prefix_cache()
        row = run_case(engine, mine, 4, wanted)
        row |= {"plain": plain["tokens"], "steps": [plain["steps"], row["run_steps"]]}
        report["moves"]["/".join(map(str, case))] = row
        engine.close()
    report["auto"] = by_itself(group, folder)
    # Four ranks share two cores here: what does not depend on their number is left to two.
    for name in FAULTS if group.size == 2 else ("stalled source", "another digest"):
        lines = []
        engine = load(folder, CASES[0], group, lines, deadline=DEADLINE)
        asked = requests(engine.runner.model.config.vocab_size)  # type: ignore[attr-defined]
        mine = [r for i, r in enumerate(asked) if i % group.size == group.rank]
        wanted = contents(engine)
        plain = serve(engine, mine, never)
        engine.reset_prefix_cache()
        undo = break_it(name, engine)
        results: list[list[Any]] = []
        run = serve(engine, mine, asking(engine, 1, results))
        undo()
        later = run_case(engine, [], 1, wanted)
        later |= {
            "plain": plain["tokens"],
            "moved": run["tokens"],
            "reports": results + later["reports"],
            "lines": lines,
        }
        report["faults"][name] = later
        engine.close()
    return report


def write_checkpoints(folder: Path) -> None:
    small = {"num_hidden_layers": 3, "max_position_embeddings": 256, "num_nextn_predict_layers": 1}
    config = family_config("v3", **small)
    write_random_checkpoint(folder / "v3", config, tokenizer=False)


if __name__ == "__main__":
    sys.exit(fork_ranks(rank_main, before=write_checkpoints))
