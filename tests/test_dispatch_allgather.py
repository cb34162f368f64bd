"""The all-gather dispatcher against its slow twin and against `torch`, a thread for each rank; its
bytes, its refusals.

What every backend must do, over real processes: tests/dist/test_dispatch_conformance.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from dispatch_cases import cases_of, config_for
from thread_ranks import World, thread_world  # noqa: F401

from dispatch import create_dispatcher
from dispatch.allgather import AllGatherDispatcher
from dispatch.base import CombineForm, DispatchError
from dispatch.collective import CollectiveDispatcher
from dispatch.selfcheck import differences, expected, make_case, random_placement, run_case
from ep.group import EPGroup

# SUMMED adds up to three rows of about 10 in bfloat16, each addition rounded to 8 bits.
ROUNDED = {torch.float32: 1e-5, torch.bfloat16: 0.25}


@pytest.mark.parametrize("form", list(CombineForm))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_equals_the_slow_twin(
    world: World, num_ranks: int, dtype: torch.dtype, form: CombineForm
) -> None:
    """Counts first, an agreed bound, and one that is larger than any rank may have."""
    cases = cases_of(num_ranks, dtype)
    wanted = [expected(case, form) for _, case in cases]
    tolerance = 0.0 if form is CombineForm.PAIRS else ROUNDED[dtype]

    def body(group: EPGroup) -> list[list[str]]:
        found = []
        for (config, case), want in zip(cases, wanted, strict=True):
            dispatcher = AllGatherDispatcher(group, config, combine_form=form)
            most = max(x.shape[0] for x in case.xs)
            for bound in (None, most + config.hidden_size % 2, 10**6):
                dispatcher.set_step_bound(bound)
                found.append(differences(dispatcher, case, group.rank, tolerance, want))
        return found

    for rank, found in enumerate(world(num_ranks, body)):
        assert found == [[]] * 3 * len(cases), f"rank {rank}"


def test_pairs_come_home_bitwise_as_over_torch(world: World) -> None:
    placement = random_placement(12, 4, 4, 3)
    config = config_for(placement, hidden=33, top_k=5)
    case = make_case(config, placement, [7, 0, 64, 1], 9, masked=0.2)
    for x in case.xs:
        x[:, ::3] = -0.0  # a zero's sign must not matter

    def body(group: EPGroup) -> bool:
        kinds = (AllGatherDispatcher, CollectiveDispatcher)
        (got, home), (got_too, home_too) = (
            run_case(kind(group, config), case, group.rank) for kind in kinds
        )
        assert torch.equal(got.x, got_too.x) and torch.equal(got.slots, got_too.slots)
        return torch.equal(home.view(torch.int32), home_too.view(torch.int32))

    assert world(4, body) == [True] * 4


@pytest.mark.parametrize("form", list(CombineForm))
@pytest.mark.parametrize("bound", [None, 6])
def test_bytes_and_rows_are_as_the_docstring_says(
    world: World, bound: int | None, form: CombineForm
) -> None:
    placement = random_placement(6, 3, 0, 0)
    config = config_for(placement, hidden=7, top_k=3)
    tokens = [5, 0, 2]
    case = make_case(config, placement, tokens, 1)

    def body(group: EPGroup) -> tuple[int, list[int], int]:
        d = AllGatherDispatcher(group, config, combine_form=form)
        d.set_step_bound(bound)
        run_case(d, case, group.rank)
        return d.stats.bytes_sent, d.stats.rows_sent_to_rank, d.stats.calls

    row_bytes, room = 16 + 12 + 8, bound or max(tokens)
    width = 3 if form is CombineForm.PAIRS else 1
    sent = 2 * (room + 1) * row_bytes + 2 * room * width * 7 * 2 + (4 if bound is None else 0)
    assert world(3, body) == [(sent, [t] * 3, 1) for t in tokens]


@pytest.mark.parametrize("bound", [None, 2])
def test_a_rank_that_refuses_stops_all_at_the_same_place(world: World, bound: int | None) -> None:
    placement = random_placement(6, 3, 0, 0)
    config = config_for(placement)
    case = make_case(config, placement, [2, 2, 2], 0)

    def body(group: EPGroup) -> list[str]:
        d, rank = AllGatherDispatcher(group, config), group.rank
        d.set_step_bound(bound)
        x, slots, weights = case.xs[rank], case.slots[rank], case.weights[rank]
        wrong = [(x, torch.full_like(slots, 6), weights), (x.double(), slots, weights)]
        if bound is not None:
            three = (x.new_zeros(3, 6), slots.new_zeros(3, 3), weights.new_zeros(3, 3))
            wrong.append(three)
        said = []
        for arguments in wrong:
            given = arguments if rank == 1 else (x, slots, weights)
            try:
                d.dispatch_finish(d.dispatch_start(*given))
            except DispatchError as error:
                said.append(f"{type(error).__name__}: {error}")
        assert differences(d, case, rank) == []  # and the next layer is in step again
        d.close()
        with pytest.raises(DispatchError, match="'allgather' is closed"):
            d.dispatch_start(x, slots, weights)
        return said

    first, second, third = world(3, body)
    number = 2 if bound is None else 3
    assert (
        first == third == ["PeerError: dispatch: refused by ranks [1]; see their errors"] * number
    )
    assert second[0].startswith("DispatchError: slots: 6..6; valid are -1 (masked) and 0..5")
    assert second[1].startswith("DispatchError: x: torch.float64")
    assert second[2:] == ["DispatchError: x: 3 tokens; the agreed bound is 2"] * (number - 2)


def test_it_is_chosen_by_name_alone_and_says_what_it_needs(world: World) -> None:
    config = config_for(random_placement(8, 2, 0, 0))
    with pytest.raises(DispatchError, match="'allgather' refuses: needs two ranks or more"):
        create_dispatcher("allgather", EPGroup.single(), config)

    def body(group: EPGroup) -> tuple[str, str]:
        with pytest.raises(DispatchError, match="'allgather': num_physical_experts=7 does not"):
            AllGatherDispatcher(group, replace(config, num_physical_experts=7))
        return tuple(create_dispatcher(n, group, config).describe() for n in ("auto", "allgather"))

    for auto, named in world(2, body):
        assert auto.startswith("dispatcher torch: ")
        assert named.startswith("dispatcher allgather: all-gather and reduce-scatter over threaded")


def test_its_plan_grows_with_ranks_and_the_mode() -> None:
    config = config_for(random_placement(8, 2, 0, 0), hidden=6, top_k=3)
    groups = [EPGroup(0, size, size, "a", "b") for size in (2, 4)]  # type: ignore[arg-type]
    small, large = (AllGatherDispatcher.plan(group, config).total for group in groups)
    assert small == 2 * 65 * (12 + 12 + 8) + 2 * 64 * 3 * 6 * 2 and large == 2 * small
    summed = AllGatherDispatcher.plan(groups[0], replace(config, deterministic=False)).total
    assert summed == small - 2 * 64 * 2 * 6 * 2
