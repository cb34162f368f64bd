"""Every dispatcher passes one suite (dispatch_conformance.py) over real gloo processes.

Run as a script this file is the ranks (gloo_ranks.py). In `plan.json` of its folder lies what they
shall do.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from dispatch_conformance import (
    CONTENDERS,
    PATIENCE,
    Contender,
    conform,
    hand_back,
    start,
    trials_of,
)
from dispatch_trials import Trials, row_of
from gloo_ranks import fork_ranks, run_ranks
from torch import Tensor

from dispatch.base import CombineForm
from dispatch.combine import combine_pairs
from dispatch.local import LocalDispatcher
from ep.group import EPGroup
from launch import failure

BROKEN = "an expert of rank 1 broke"


def put_to_it(num_ranks: int, folder: Path, steps: int) -> list[dict[str, Any]]:
    (folder / "plan.json").write_text(json.dumps({"steps": steps}))
    return run_ranks(__file__, num_ranks, folder, timeout=280)


def passed(reports: list[dict[str, Any]], num_ranks: int) -> None:
    names = [c.name for c in CONTENDERS if num_ranks in c.ranks]
    for rank, report in enumerate(reports):
        assert list(report) == names
        for name in names:
            assert report[name]["situations"] > 40
            assert report[name]["found"] == dict.fromkeys(report[name]["found"], []), (rank, name)


def test_one_rank_conforms() -> None:
    alone = {c.name: c for c in CONTENDERS if 1 in c.ranks}
    assert list(alone) == ["local", "local, fp8"]
    reports = {}
    for contender in alone.values():
        trials = trials_of([contender], 1)[contender.name]
        report = conform(contender, EPGroup.single(), trials, steps=50)
        reports[contender.name] = report
    passed([reports], 1)


def test_the_suite_can_fail() -> None:
    def wrong(y: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return combine_pairs(y, index, weights) + 1e-6

    forms, hooks = (CombineForm.PAIRS,), {"combine_pairs": wrong}
    contender = Contender("wrong", LocalDispatcher, forms=forms, hooks=hooks)
    trials = trials_of([contender], 1)["wrong"]
    found = conform(contender, EPGroup.single(), trials, steps=3)["found"]
    assert not found.pop("by name") and all(found.values())


@pytest.mark.dist
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_backend_conforms(num_ranks: int, tmp_path: Path) -> None:
    passed(put_to_it(num_ranks, tmp_path, steps=50), num_ranks)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "steps"), [(2, 1000), (4, 1000), (8, 1000)])
def test_every_backend_conforms_for_a_thousand_steps(
    num_ranks: int, steps: int, tmp_path: Path
) -> None:
    passed(put_to_it(num_ranks, tmp_path, steps), num_ranks)


@pytest.mark.dist
def test_an_exception_in_the_middle_of_a_step_ends_it_on_all_ranks(tmp_path: Path) -> None:
    names = [c.name for c in CONTENDERS if 4 in c.ranks]
    (tmp_path / "plan.json").write_text(json.dumps({"break": names}))
    run_ranks(__file__, 4, tmp_path, timeout=120)
    for name in names:
        folder = tmp_path / name
        reports = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(4)]
        assert max(report["seconds"] for report in reports) < PATIENCE
        codes = {rank: report["code"] for rank, report in enumerate(reports)}
        assert codes == {0: failure.LOST_PEER, 1: 1, 2: failure.LOST_PEER, 3: failure.LOST_PEER}
        failures, _ = failure.read(codes, (folder / "reasons").read_text())
        cause = failure.first_cause(failures)
        assert cause.rank == 1 and cause.reason == f"ValueError: {BROKEN}"


# -- as a script: the ranks ----------------------------------------------------------------------


def conforming(steps: int) -> int:
    contenders = [c for c in CONTENDERS if int(sys.argv[1]) in c.ranks]
    trials: dict[str, Trials] = {}

    def before(_: Path) -> None:
        trials.update(trials_of(contenders, int(sys.argv[1])))

    def body(group: EPGroup, _: Path) -> dict[str, Any]:
        return {c.name: conform(c, group, trials[c.name], steps) for c in contenders}

    torch.set_num_threads(1)  # before: what is computed ahead leaves no team of threads behind
    return fork_ranks(body, before)


def breaking(name: str) -> int:
    (contender,) = [c for c in CONTENDERS if c.name == name]

    def body(group: EPGroup, folder: Path) -> None:
        """Rank 1 raises once its tokens have arrived; each rank ends as a rank of a job does."""
        rank, row, form = group.rank, row_of(contender.shapes, group.size), contender.forms[0]
        d = contender.make(group, row[0].config, form)
        torch.distributed.barrier()
        began, code = time.monotonic(), 0
        try:
            for step, trial in enumerate(row):
                case = trial.case
                d.set_step_bound(trial.bound)
                handle = start(d, trial, rank)
                received = d.dispatch_finish(handle)
                if rank == 1 and step == 2:
                    raise ValueError(BROKEN)
                hand_back(d, handle, received, case, rank)
                d.combine_finish(handle)
        except Exception as error:
            code = failure.exit_code_of(error)
            failure.write(folder / "reasons", rank, error)
        report = {"seconds": time.monotonic() - began, "code": code}
        (folder / f"rank{rank}.json").write_text(json.dumps(report))
        os._exit(0)

    return fork_ranks(body)


def script() -> int:
    folder = Path(sys.argv[2])
    plan = json.loads((folder / "plan.json").read_text())
    if "break" in plan:
        codes = []
        for name in plan["break"]:
            sys.argv[2] = str(folder / name)
            Path(sys.argv[2]).mkdir()
            codes.append(breaking(name))
        for rank in range(int(sys.argv[1])):
            (folder / f"rank{rank}.json").write_text("null")
        return max(codes)
    return conforming(plan["steps"])


if __name__ == "__main__":
    sys.exit(script())
