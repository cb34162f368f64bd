"""The collective dispatcher over real gloo processes.

Run as a script this file is the ranks (gloo_ranks.py).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from dispatch_cases import config_for
from gloo_ranks import fork_ranks, run_ranks

from dispatch.base import CombineForm, DispatchError, PeerError
from dispatch.collective import CollectiveDispatcher
from dispatch.selfcheck import differences, expected, make_case, outputs, random_placement
from ep.group import EPGroup


@pytest.mark.dist
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_over_gloo(num_ranks: int, tmp_path: Path) -> None:
    reports = run_ranks(__file__, num_ranks, tmp_path, timeout=120)
    for rank, report in enumerate(reports):
        assert report["differences"] == [], f"rank {rank}"
        assert report["cases"] == 64
        assert report["two_in_flight"] is True
        assert report["slot_counts"] == reports[0]["slot_counts"]
    said = [report["refusal"] for report in reports]
    assert said.pop(1).startswith("DispatchError: slots: ")
    assert set(said) == {"PeerError: dispatch: refused by ranks [1]; see their errors"}


def check_cases(group: EPGroup) -> tuple[int, list[str], list[int]]:
    """Random work and corners, both forms, both dtypes; copies and placements change by case."""
    size, cases, found, slot_counts = group.size, 0, [], []
    for form in CombineForm:
        for dtype in (torch.float32, torch.bfloat16):
            for seed in range(2):
                placement = random_placement(8, size, 3 * seed, seed, generation=seed)
                slot_counts.append(placement.num_physical_experts)
                config = config_for(placement, dtype)
                dispatcher = CollectiveDispatcher(group, config, combine_form=form)
                busy = [9 if rank == seed % size else 0 for rank in range(size)]
                some = [(3 * rank + seed) % 5 for rank in range(size)]
                for tokens, to_rank in ((some, None), (busy, None), ([0] * size, None), (some, 1)):
                    case = make_case(config, placement, tokens, seed, masked=0.2, to_rank=to_rank)
                    wanted = expected(case, form)
                    for bound in (None, max(tokens)):
                        dispatcher.set_step_bound(bound)
                        found += differences(dispatcher, case, group.rank, wanted=wanted)
                        cases += 1
    return cases, found, slot_counts


def check_two_in_flight(group: EPGroup) -> bool:
    placements = [random_placement(8, group.size, group.size, seed, seed) for seed in (0, 1)]
    config = config_for(placements[0])
    tokens = [40 - 13 * rank for rank in range(group.size)]
    cases = [make_case(config, p, tokens, p.generation) for p in placements]
    d, rank = CollectiveDispatcher(group, config), group.rank
    handles = [d.dispatch_start(c.xs[rank], c.slots[rank], c.weights[rank]) for c in cases]
    got = [d.dispatch_finish(handle) for handle in handles]
    for handle, received, case in zip(handles, got, cases, strict=True):
        d.combine_start(handle, outputs(received, case, rank, d.combine_form))
    home = [d.combine_finish(handle) for handle in handles]
    wanted = [expected(case, d.combine_form)[1][rank] for case in cases]
    return all(torch.equal(a, b) for a, b in zip(home, wanted, strict=True))


def check_refusal(group: EPGroup) -> str:
    config = config_for(random_placement(8, group.size, 0, 0))
    d = CollectiveDispatcher(group, config)
    slots = torch.tensor([[0, 1, 2 if group.rank != 1 else 99]], dtype=torch.int32)
    try:
        d.dispatch_start(torch.zeros(1, 6, dtype=config.dtype), slots, torch.ones(1, 3))
    except (PeerError, DispatchError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def rank_main(group: EPGroup, folder: Path) -> dict[str, Any]:
    cases, found, slot_counts = check_cases(group)
    return {
        "cases": cases,
        "differences": found,
        "slot_counts": slot_counts,
        "two_in_flight": check_two_in_flight(group),
        "refusal": check_refusal(group),
    }


if __name__ == "__main__":
    sys.exit(fork_ranks(rank_main))
