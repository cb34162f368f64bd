"""The collective dispatcher over real gloo processes.

Run by pytest this file starts itself once as a script: a fresh process imports torch, then forks
the ranks (cheap, and nothing of the test runner's threads is inherited). Ranks meet through a file.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dispatch.base import CombineForm, DispatchConfig, DispatchError, PeerError
from dispatch.collective import CollectiveDispatcher
from dispatch.selfcheck import differences, expected, make_case, outputs, random_placement
from ep.group import EPGroup

ROOT = Path(__file__).parents[2]


@pytest.mark.dist
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_over_gloo(num_ranks: int, tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, __file__, str(num_ranks), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    reports = [json.loads((tmp_path / f"rank{r}.json").read_text()) for r in range(num_ranks)]
    for rank, report in enumerate(reports):
        assert report["differences"] == [], f"rank {rank}"
        assert report["cases"] == 64
        assert report["two_in_flight"] is True
        assert report["slot_counts"] == reports[0]["slot_counts"]
    said = [report["refusal"] for report in reports]
    assert said.pop(1).startswith("DispatchError: slots: ")
    assert set(said) == {"PeerError: dispatch: refused by ranks [1]; see their errors"}


def config_for(num_slots: int, dtype: torch.dtype = torch.bfloat16) -> DispatchConfig:
    return DispatchConfig(6, 3, num_slots, 64, dtype, True)


def check_cases(group: EPGroup) -> tuple[int, list[str], list[int]]:
    """Random work and corners, both forms, both dtypes; copies and placements change by case."""
    size, cases, found, slot_counts = group.size, 0, [], []
    for form in CombineForm:
        for dtype in (torch.float32, torch.bfloat16):
            for seed in range(2):
                placement = random_placement(8, size, 3 * seed, seed, generation=seed)
                slot_counts.append(placement.num_physical_experts)
                config = config_for(placement.num_physical_experts, dtype)
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
    config = config_for(placements[0].num_physical_experts)
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
    config = config_for(2 * group.size)
    d = CollectiveDispatcher(group, config)
    slots = torch.full((1, 3), 0 if group.rank != 1 else 99, dtype=torch.int32)
    try:
        d.dispatch_start(torch.zeros(1, 6, dtype=config.dtype), slots, torch.ones(1, 3))
    except (PeerError, DispatchError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def rank_main(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
    )
    group = EPGroup(rank, size, size, dist.group.WORLD, dist.group.WORLD)
    cases, found, slot_counts = check_cases(group)
    report = {
        "cases": cases,
        "differences": found,
        "slot_counts": slot_counts,
        "two_in_flight": check_two_in_flight(group),
        "refusal": check_refusal(group),
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    size, folder = int(sys.argv[1]), Path(sys.argv[2])
    parent, children = os.getpid(), []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
            code = 1
            try:
                if os.getppid() == parent:
                    rank_main(rank, size, folder)
                    code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return max(abs(code) for code in codes)


if __name__ == "__main__":
    sys.exit(main())
