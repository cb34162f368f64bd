"""What the collective dispatcher promises beside its results: handles used once and in order, a
refusal that ends all ranks at one place, the same collectives whatever the work, its bytes.

A thread for each rank.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from dispatch_cases import config_for
from thread_ranks import World, thread_world  # noqa: F401

import dispatch.collective
from dispatch import create_dispatcher
from dispatch.base import CombineForm, DispatchError, HandleError
from dispatch.collective import CollectiveDispatcher
from dispatch.local import LocalDispatcher
from dispatch.selfcheck import differences, make_case, outputs, random_placement, run_case
from ep.group import EPGroup
from ep.placement import ExpertPlacement


def test_handles_are_single_use_and_in_order(world: World) -> None:
    placement = ExpertPlacement.trivial(1, 4, 2)
    config = config_for(placement, top_k=2)
    case = make_case(config, placement, [2, 1], 0)

    def body(group: EPGroup) -> int:
        rank = group.rank
        d, other = CollectiveDispatcher(group, config), CollectiveDispatcher(group, config)
        handle = d.dispatch_start(case.xs[rank], case.slots[rank], case.weights[rank])
        with pytest.raises(HandleError, match="next call is dispatch_finish"):
            d.combine_finish(handle)
        with pytest.raises(HandleError, match="not one that this dispatcher made"):
            other.dispatch_finish(handle)
        received = d.dispatch_finish(handle)
        with pytest.raises(HandleError, match="next call is combine_start"):
            d.dispatch_finish(handle)
        d.combine_start(handle, outputs(received, case, rank, d.combine_form))
        d.combine_finish(handle)
        with pytest.raises(HandleError, match="it is spent"):
            d.combine_finish(handle)
        with pytest.raises(HandleError):
            d.combine_start("not a handle", received.x)  # type: ignore[arg-type]
        d.close()
        with pytest.raises(DispatchError, match="closed"):
            d.dispatch_start(case.xs[rank], case.slots[rank], case.weights[rank])
        return 1

    assert world(2, body) == [1, 1]


@pytest.mark.parametrize("bound", [None, 2])
def test_a_rank_that_refuses_stops_all_at_the_same_place(world: World, bound: int | None) -> None:
    placement = ExpertPlacement.trivial(1, 6, 3)
    config = config_for(placement)
    case = make_case(config, placement, [2, 2, 2], 0)

    def body(group: EPGroup) -> list[str]:
        d = CollectiveDispatcher(group, config)
        d.set_step_bound(bound)
        rank = group.rank
        x, slots, weights = case.xs[rank], case.slots[rank], case.weights[rank]
        wrong = [
            (x, torch.tensor([[0, 6, 1], [2, 3, 4]], dtype=torch.int32), weights),
            (x, torch.full_like(slots, -2), weights),
            (x.double(), slots, weights),
            (x, slots.long(), weights),
            (x, slots, weights[:1]),
            (x[:, :2], slots, weights),
            (x.new_zeros(65, 6), slots.new_zeros(65, 3), weights.new_zeros(65, 3)),
        ]
        said = []
        for arguments in wrong:
            try:
                d.dispatch_finish(
                    d.dispatch_start(*(arguments if rank == 1 else (x, slots, weights)))
                )
            except DispatchError as error:
                said.append(f"{type(error).__name__}: {error}")
        assert differences(d, case, rank) == []  # and the next layer is in step again
        return said

    first, second, third = world(3, body)
    assert first == third == ["PeerError: dispatch: refused by ranks [1]; see their errors"] * 7
    wanted = (
        "DispatchError: slots: 0..6; valid are -1 (masked) and 0..5",
        "DispatchError: slots: -2..-2; valid are",
        "DispatchError: x: torch.float64",
        "DispatchError: slots: torch.int64",
        "DispatchError: weights: torch.float32 [1, 3]",
        "DispatchError: x: torch.bfloat16 [2, 2]; must be torch.bfloat16 [T, 6]",
        "DispatchError: x: 65 tokens; at most max_tokens_per_rank=64",
    )
    assert [m[: len(w)] for m, w in zip(second, wanted, strict=True)] == list(wanted)


@pytest.mark.parametrize("slot", [-2, 4])
def test_one_rank_refuses_slots_out_of_range(slot: int) -> None:
    config = config_for(ExpertPlacement.trivial(1, 4, 1))
    d = LocalDispatcher(EPGroup.single(), config)
    slots = torch.tensor([[0, 3, slot]], dtype=torch.int32)
    with pytest.raises(DispatchError, match="slots: .*valid are -1 .masked. and 0..3"):
        d.dispatch_finish(
            d.dispatch_start(torch.zeros(1, 6, dtype=config.dtype), slots, torch.ones(1, 3))
        )


def test_more_tokens_than_agreed_are_refused(world: World) -> None:
    placement = ExpertPlacement.trivial(1, 4, 2)
    config = config_for(placement, top_k=2)
    case = make_case(config, placement, [2, 3], 0)

    def body(group: EPGroup) -> str:
        d = CollectiveDispatcher(group, config)
        d.set_step_bound(2)
        rank = group.rank
        try:
            d.dispatch_finish(d.dispatch_start(case.xs[rank], case.slots[rank], case.weights[rank]))
        except DispatchError as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    assert world(2, body) == [
        "PeerError: dispatch: refused by ranks [1]; see their errors",
        "DispatchError: x: 3 tokens; the agreed bound is 2",
    ]


@pytest.mark.parametrize("form", list(CombineForm))
def test_every_rank_makes_the_same_collectives_whatever_its_work(
    world: World, monkeypatch: pytest.MonkeyPatch, form: CombineForm
) -> None:
    placement = random_placement(8, 4, 4, 1)
    config = config_for(placement)
    works = [[0, 0, 0, 0], [9, 0, 0, 1], [0, 3, 2, 0], [1, 1, 1, 1]]
    bounds = [None, None, 3, 64]
    cases = [make_case(config, placement, tokens, 5) for tokens in works]
    traces: dict[int, list[tuple[str, torch.dtype]]] = {rank: [] for rank in range(4)}

    class Recorder:
        def __getattr__(self, name: str) -> Any:
            original = getattr(dist, name)
            if name not in ("all_to_all_single", "all_to_all", "all_reduce", "barrier", "send"):
                return original

            def call(*args: Any, **kwargs: Any) -> Any:
                traces[dist.get_rank()].append((name, args[0].dtype))
                return original(*args, **kwargs)

            return call

    monkeypatch.setattr(dispatch.collective, "dist", Recorder())

    def body(group: EPGroup) -> None:
        d = CollectiveDispatcher(group, config, combine_form=form)
        for case, bound in zip(cases, bounds, strict=True):
            d.set_step_bound(bound)
            run_case(d, case, group.rank)

    world(4, body)
    layer = [torch.uint8, torch.uint8, torch.bfloat16]
    wanted = [*layer * 2, *layer[1:] * 2]  # with a bound the counts need no collective
    assert traces[0] == [("all_to_all_single", dtype) for dtype in wanted]
    assert traces[1] == traces[2] == traces[3] == traces[0]


@pytest.mark.parametrize("bound", [None, 9])
@pytest.mark.parametrize("form", list(CombineForm))
def test_bytes_are_those_of_the_formula(world: World, form: CombineForm, bound: int | None) -> None:
    num_ranks, hidden, top_k = 4, 7, 3
    placement = random_placement(8, num_ranks, 4, 2)
    config = config_for(placement, torch.bfloat16, hidden, top_k)
    case = make_case(config, placement, [5, 0, 8, 1], 4, masked=0.2)

    def body(group: EPGroup) -> tuple[int, list[int]]:
        d = CollectiveDispatcher(group, config, combine_form=form)
        d.set_step_bound(bound)
        run_case(d, case, group.rank)
        assert d.stats.calls == 1
        return d.stats.bytes_sent, d.stats.rows_sent_to_rank

    results = world(num_ranks, body)
    owner = [torch.where(s >= 0, s // placement.num_local_experts, -1) for s in case.slots]
    # Rows of x: 7 bf16 values padded to 16 bytes; weights 12; slots 6 padded to 8.
    row_bytes = 16 + 12 + 8
    for rank, (sent, rows) in enumerate(results):
        to_rank = [sum((o == r).any(1).sum().item() for o in [owner[rank]]) for r in range(4)]
        assert rows == to_rank
        others = [r for r in range(4) if r != rank]
        arrived = [(owner[r] == rank) for r in others]
        back = sum(int(a.sum() if form is CombineForm.PAIRS else a.any(1).sum()) for a in arrived)
        leaving = sum(to_rank[r] for r in others)
        there = 2 * 3 + leaving * row_bytes if bound is None else 3 * (bound + 1) * row_bytes
        assert sent == there + back * hidden * 2


def test_the_combine_hook_is_used(world: World) -> None:
    placement = ExpertPlacement.trivial(1, 4, 2)
    config = config_for(placement, top_k=2)
    case = make_case(config, placement, [2, 1], 0)

    def hook(y: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return torch.full((index.shape[0], y.shape[1]), 42.0)

    def body(group: EPGroup) -> bool:
        choice = create_dispatcher("auto", group, config, combine_pairs=hook)
        assert choice.dispatcher.name == "torch"
        assert (
            "not local: it sends nothing, which only one rank can do; here are 2"
            in choice.describe()
        )
        return bool((run_case(choice.dispatcher, case, group.rank)[1] == 42).all())

    assert world(2, body) == [True, True]
