"""Every dispatcher passes one suite (dispatch_conformance.py) over real gloo processes.

Run as a script this file is the ranks (gloo_ranks.py). In `plan.json` of its folder lies what they
shall do.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from dispatch_conformance import (
    PATIENCE,
    conform,
    hand_back,
    layer,
    start,
)
from dispatch_contenders import CONTENDERS, Contender, trials_of
from dispatch_trials import Trial, Trials, row_of
from gloo_ranks import fork_ranks, run_ranks
from torch import Tensor

from dispatch.base import CombineForm, Dispatcher
from dispatch.combine import combine_pairs
from dispatch.local import LocalDispatcher
from dispatch.step_guard import StepGuard
from ep.group import EPGroup
from launch import failure

REFUSED_TOKENS, KERNEL, REFUSED_RESULTS = "refused tokens", "a kernel", "refused results"
BETWEEN, KILLED = "between layers", "killed"
# How a step breaks on rank 1 -> what its peers must read of it.
WAYS = {
    REFUSED_TOKENS: "DispatchError: slots: ",
    KERNEL: "an expert of rank 1 broke",
    REFUSED_RESULTS: "DispatchError: y: ",
    BETWEEN: "attention of rank 1 broke",
    KILLED: "its process ended without a word",
}


FEW_STEPS, MANY_STEPS = 50, 1000
# What else makes with many ranks what every contender does with two.
WIDE = ("allgather", "deepep_ll (emulated)")


@dataclass(frozen=True)
class Part:
    """What a contender is put to. checks: all of them, else the one of steps back to back."""

    name: str
    steps: int
    checks: bool = True


def put_to_it(num_ranks: int, folder: Path, parts: list[Part]) -> None:
    """One part after the other on the same processes."""
    plan = {"parts": [asdict(part) for part in parts]}
    (folder / "plan.json").write_text(json.dumps(plan))
    reports = run_ranks(__file__, num_ranks, folder, timeout=280)
    for rank, report in enumerate(reports):
        assert list(report) == [part.name for part in parts]
        passed(report, rank)


def passed(report: dict[str, Any], rank: int = 0) -> None:
    for name, (situations, found) in report.items():
        assert situations > 5
        assert found == dict.fromkeys(found, []), (rank, name)


def with_ranks(num_ranks: int) -> list[Contender]:
    return [c for c in CONTENDERS if num_ranks in c.ranks]


def backends(num_ranks: int) -> list[Contender]:
    """Each once: the first of those that differ in form or wire only."""
    first = {c.kind: c for c in reversed(with_ranks(num_ranks)) if c.registered}
    return [*reversed(first.values())]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As ranks have: a team of threads costs more than such small tensors."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_one_rank_conforms() -> None:
    alone = with_ranks(1)
    trials = trials_of(alone, 1)
    group = EPGroup.single()
    passed({c.name: conform(c, group, trials[c.name], FEW_STEPS) for c in alone})
    assert {c.name for c in alone} >= {"local", "deepep_ll (emulated)"}


def test_those_that_need_peers_say_so_to_one_rank() -> None:
    for contender in CONTENDERS:
        if 1 not in contender.ranks:
            config = row_of(contender.shapes, 1)[0].config
            probe = contender.kind.probe(EPGroup.single(), config)
            assert not probe.ok and re.search(r"two ranks|\b1 rank", probe.reason), probe


@pytest.mark.usefixtures("one_thread")
def test_the_suite_can_fail() -> None:
    def wrong(y: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return combine_pairs(y, index, weights) + 1e-6

    forms, hooks = (CombineForm.PAIRS,), {"combine_pairs": wrong}
    contender = Contender("wrong", LocalDispatcher, forms=forms, hooks=hooks)
    trials = trials_of([contender], 1)["wrong"]
    _, found = conform(contender, EPGroup.single(), trials, steps=3)
    assert not found.pop("check_by_name") and all(found.values())


@pytest.mark.dist
def test_every_backend_conforms_in_every_form_with_two_ranks(tmp_path: Path) -> None:
    put_to_it(2, tmp_path, [Part(c.name, FEW_STEPS) for c in with_ranks(2)])


@pytest.mark.dist
def test_every_backend_conforms_with_four_ranks(tmp_path: Path) -> None:
    put_to_it(4, tmp_path, [Part(c.name, FEW_STEPS) for c in backends(4)])


@pytest.mark.dist
@pytest.mark.slow
def test_every_backend_conforms_in_every_form_with_eight_ranks(tmp_path: Path) -> None:
    once = backends(8)
    put_to_it(8, tmp_path, [Part(c.name, FEW_STEPS if c in once else 7) for c in with_ranks(8)])


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_a_thousand_steps_back_to_back(num_ranks: int, tmp_path: Path) -> None:
    """Of every backend with two ranks, and of `torch` with more."""
    names = [c.name for c in backends(num_ranks) if num_ranks in c.thousand]
    put_to_it(num_ranks, tmp_path, [Part(name, MANY_STEPS, checks=False) for name in names])


@pytest.mark.dist
@pytest.mark.parametrize("num_ranks", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_a_step_that_breaks_on_one_rank_ends_on_all_and_names_the_cause(
    num_ranks: int, tmp_path: Path
) -> None:
    # With two ranks each backend in each way, but that attention knows of none; with more `torch`
    # in each way, others in one.
    pairs = [(c.name, way) for c in backends(num_ranks) for way in WAYS]
    if num_ranks > 2:
        pairs = [(n, way) for n, way in pairs if n == "torch" or (n in WIDE and way == KERNEL)]
    pairs = [(n, way) for n, way in pairs if n == "torch" or way != BETWEEN]
    (tmp_path / "plan.json").write_text(json.dumps({"break": pairs}))
    run_ranks(__file__, num_ranks, tmp_path, timeout=120)
    for number, (name, way) in enumerate(pairs):
        reports = [
            json.loads(file.read_text()) if file.exists() else None
            for file in (tmp_path / f"{number}" / f"rank{r}.json" for r in range(num_ranks))
        ]
        culprit = reports.pop(1)
        if way == KILLED:
            assert culprit is None
        else:
            assert culprit["code"] == 1 and WAYS[way] in culprit["text"], (name, way, culprit)
        for peer in reports:
            assert peer["seconds"] < PATIENCE, (name, way)
            assert peer["kind"] == "StepBroken" and peer["code"] == failure.LOST_PEER, (name, way)
            who = "rank 1 is gone" if way == KILLED else "rank 1 broke off the step: "
            assert peer["text"].startswith(who) and WAYS[way] in peer["text"], (name, way, peer)


# -- as a script: the ranks ----------------------------------------------------------------------


def conforming(parts: list[Part]) -> int:
    contenders = {c.name: c for c in CONTENDERS}
    trials: dict[str, Trials] = {}

    def before(_: Path) -> None:
        trials.update(trials_of([contenders[part.name] for part in parts], int(sys.argv[1])))

    def body(group: EPGroup, _: Path) -> dict[str, Any]:
        report = {}
        for part in parts:
            contender, mine = contenders[part.name], trials[part.name]
            report[part.name] = conform(contender, group, mine, part.steps, part.checks)
        return report

    return fork_ranks(body, before)


def break_in(way: str, group: EPGroup, d: Dispatcher, trial: Trial) -> None:
    """Rank 1's step, which breaks."""
    rank, x = group.rank, trial.case.xs[group.rank]
    if way == REFUSED_TOKENS:
        slots = torch.full((x.shape[0], trial.config.top_k + 1), 0, dtype=torch.int32)
        d.dispatch_start(trial.case.rows(rank, trial.config.wire), slots, slots.float())
    handle = start(d, trial, rank)
    received = d.dispatch_finish(handle)
    if way == KILLED:
        os.kill(os.getpid(), signal.SIGKILL)
    if way == KERNEL:
        raise ValueError(WAYS[KERNEL])
    if way == REFUSED_RESULTS:
        d.combine_start(handle, torch.zeros(1, 1))
    hand_back(d, handle, received, trial.case, rank)
    d.combine_finish(handle)
    raise ValueError(WAYS[BETWEEN])


def breaking(contender: Contender, row: list[Trial], way: str) -> int:
    def body(group: EPGroup, folder: Path) -> None:
        """Each rank ends as a rank of a job does: whatever it has open is closed with it."""
        d = contender.make(group, row[0].config, contender.forms[0])
        guard = StepGuard(group)
        began = time.monotonic()
        try:
            for step, trial in enumerate(row):
                with guard:
                    d.set_step_bound(trial.bound)
                    if group.rank == 1 and step == 2:
                        break_in(way, group, d, trial)
                    layer(d, trial, group.rank)
        except Exception as error:
            report = {
                "seconds": time.monotonic() - began,
                "code": failure.exit_code_of(error),
                "kind": type(error).__name__,
                "text": f"{type(error).__name__}: {error}" if group.rank == 1 else str(error),
            }
            (folder / f"rank{group.rank}.json").write_text(json.dumps(report))
        os._exit(0)

    return fork_ranks(body)


def script() -> int:
    size, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)  # what is computed ahead leaves no team of threads behind
    plan = json.loads((folder / "plan.json").read_text())
    if "break" not in plan:
        return conforming([Part(**part) for part in plan["parts"]])
    contenders = {c.name: c for c in CONTENDERS if size in c.ranks}
    rows = {name: row_of(c.shapes, size) for name, c in contenders.items()}
    for number, (name, way) in enumerate(plan["break"]):
        sys.argv[2] = str(folder / f"{number}")
        Path(sys.argv[2]).mkdir()
        code = breaking(contenders[name], rows[name], way)
        if code != (signal.SIGKILL if way == KILLED else 0):
            return 1
    for rank in range(size):
        (folder / f"rank{rank}.json").write_text("null")
    return 0


if __name__ == "__main__":
    sys.exit(script())
