"""The collective dispatcher against its slow twin, with a thread for each rank.

Real gloo processes are in tests/dist; threads reach more ranks and cases for the same time. What
the dispatcher promises beside its results: test_dispatch_collective_rules.py.
"""

from __future__ import annotations

import pytest
import torch
from dispatch_cases import cases_of, config_for
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from thread_ranks import World, thread_world  # noqa: F401

from dispatch.base import CombineForm
from dispatch.collective import CollectiveDispatcher
from dispatch.local import LocalDispatcher
from dispatch.selfcheck import (
    CheckCase,
    differences,
    expected,
    make_case,
    outputs,
    random_placement,
    run_case,
)
from ep.group import EPGroup
from ep.placement import ExpertPlacement


@pytest.mark.parametrize("form", list(CombineForm))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_equals_the_slow_twin(
    world: World, num_ranks: int, dtype: torch.dtype, form: CombineForm
) -> None:
    """Counts first, counts within padded blocks, and a bound too large for that."""
    cases = cases_of(num_ranks, dtype)
    wanted = [expected(case, form) for _, case in cases]

    def body(group: EPGroup) -> list[list[str]]:
        found = []
        for (config, case), want in zip(cases, wanted, strict=True):
            dispatcher = CollectiveDispatcher(group, config, combine_form=form)
            most = max(x.shape[0] for x in case.xs)
            for bound in (None, most + config.hidden_size % 2, 10**6):
                dispatcher.set_step_bound(bound)
                found.append(differences(dispatcher, case, group.rank, wanted=want))
        return found

    for rank, found in enumerate(world(num_ranks, body)):
        assert found == [[]] * 3 * len(cases), f"rank {rank}"


@given(st.data())
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_work_equals_the_slow_twin(world: World, data: st.DataObject) -> None:
    num_ranks = data.draw(st.sampled_from([2, 3, 4, 8]))
    experts, seed = data.draw(st.integers(1, 9)), data.draw(st.integers(0, 10**6))
    redundant = data.draw(st.integers(0, 25))
    placement = random_placement(experts, num_ranks, redundant, seed)
    top_k = data.draw(st.integers(1, min(4, experts)))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    config = config_for(placement, dtype, hidden=data.draw(st.integers(1, 9)), top_k=top_k)
    tokens = data.draw(st.lists(st.integers(0, 6), min_size=num_ranks, max_size=num_ranks))
    masked = data.draw(st.sampled_from([0.0, 0.3, 0.9]))
    to_rank = data.draw(st.none() | st.integers(0, num_ranks - 1))
    bound = data.draw(st.none() | st.integers(max(tokens), max(tokens) + 3))
    form = data.draw(st.sampled_from(list(CombineForm)))
    case = make_case(config, placement, tokens, seed, masked=masked, to_rank=to_rank)
    wanted = expected(case, form)

    def body(group: EPGroup) -> list[str]:
        d = CollectiveDispatcher(group, config, combine_form=form)
        d.set_step_bound(bound)
        return differences(d, case, group.rank, wanted=wanted)

    assert world(num_ranks, body) == [[]] * num_ranks


@pytest.mark.parametrize("form", list(CombineForm))
def test_local_equals_the_slow_twin(form: CombineForm) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for config, case in cases_of(1, dtype):
            dispatcher = LocalDispatcher(EPGroup.single(), config, combine_form=form)
            assert differences(dispatcher, case, 0) == []


def test_pairs_come_home_bitwise_equal_for_every_degree_and_placement(world: World) -> None:
    """The same 24 tokens over 1, 2, 4 and 8 ranks, with and without copies."""
    experts, total = 16, 24
    g = torch.Generator().manual_seed(3)
    x = torch.randn(total, 7, generator=g).bfloat16()
    ids = torch.rand(total, experts, generator=g).argsort(1)[:, :4].int()
    weights = torch.rand(total, 4, generator=g)
    results = []
    for num_ranks, redundant in ((1, 0), (1, 5), (2, 0), (2, 3), (3, 0), (4, 3), (4, 16), (8, 8)):
        placement = random_placement(experts, num_ranks, redundant, seed=num_ranks + redundant)
        slots = torch.tensor(
            [
                [int(placement.logical_to_physical[0, e, (t + e) % n]) for e, n in row]
                for t, row in enumerate(
                    [[(int(e), placement.replica_count[0, int(e)]) for e in i] for i in ids]
                )
            ],
            dtype=torch.int32,
        )
        # Unequal shares: rank 0 gets the most, the last ones nothing.
        cuts = [0] + [min(total, 10 + 5 * r) for r in range(num_ranks - 1)] + [total]
        parts = [slice(a, b) for a, b in zip(cuts, cuts[1:], strict=False)]
        case = CheckCase(
            [x[p] for p in parts], [slots[p] for p in parts], [weights[p] for p in parts], placement
        )
        config = config_for(placement, hidden=7, top_k=4)
        if num_ranks == 1:
            results.append(run_case(LocalDispatcher(EPGroup.single(), config), case, 0)[1])
        else:

            def body(group: EPGroup, config=config, case=case) -> torch.Tensor:
                return run_case(CollectiveDispatcher(group, config), case, group.rank)[1]

            results.append(torch.cat(world(num_ranks, body)))
    assert results[0].abs().sum() > 0
    for other in results[1:]:
        assert torch.equal(results[0], other)


def test_two_in_flight_under_two_placements(world: World) -> None:
    """A second layer starts, under a newer placement, before the first has come home."""
    placements = [random_placement(8, 4, 4, seed, generation=seed) for seed in (0, 1)]
    config = config_for(placements[0])
    cases = [make_case(config, p, [3, 0, 5, 1], p.generation) for p in placements]
    wanted = [expected(case, CombineForm.PAIRS)[1] for case in cases]

    def body(group: EPGroup) -> bool:
        d = CollectiveDispatcher(group, config)
        rank, form = group.rank, d.combine_form
        handles = [d.dispatch_start(c.xs[rank], c.slots[rank], c.weights[rank]) for c in cases]
        got = [d.dispatch_finish(h) for h in handles]
        for handle, received, case in zip(handles, got, cases, strict=True):
            d.combine_start(handle, outputs(received, case, rank, form))
        home = [d.combine_finish(handles[i]) for i in (1, 0)]
        return torch.equal(home[1], wanted[0][rank]) and torch.equal(home[0], wanted[1][rank])

    assert world(4, body) == [True] * 4


def wide(world: World, num_ranks: int, experts: int, redundant: int) -> None:
    """One slot a rank, the ranks beyond the experts host copies or nothing; unequal work, idle
    ranks."""
    placement = ExpertPlacement.trivial(1, experts, num_ranks, redundant)
    assert placement.num_local_experts == 1
    config = config_for(placement, hidden=4, top_k=8)
    case = make_case(config, placement, [rank % 3 for rank in range(num_ranks)], 0)
    wanted_received, wanted = expected(case, CombineForm.PAIRS)

    def body(group: EPGroup) -> bool:
        d = CollectiveDispatcher(group, config)
        d.set_step_bound(2 if num_ranks < 100 else None)
        received, home = run_case(d, case, group.rank)
        rows = wanted_received[group.rank]
        return torch.equal(home, wanted[group.rank]) and torch.equal(received.x, rows.x)

    assert all(world(num_ranks, body))


def test_wide_64_ranks_with_16_redundant_hosts(world: World) -> None:
    wide(world, 64, 48, 16)


def test_wide_64_ranks_of_which_10_host_nothing(world: World) -> None:
    wide(world, 64, 48, 6)


@pytest.mark.slow
def test_wide_320_ranks_with_64_redundant_hosts(world: World) -> None:
    wide(world, 320, 256, 64)
