"""The collective dispatcher against its slow twin, with a thread for each rank.

Real gloo processes are in tests/dist; threads reach more ranks and cases for the same time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dispatch.collective
from dispatch import create_dispatcher
from dispatch.base import (
    CombineForm,
    DispatchConfig,
    DispatchError,
    HandleError,
)
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

World = Callable[[int, Callable[[EPGroup], Any]], list[Any]]


@pytest.fixture
def world() -> Iterator[World]:
    """run(num_ranks, body): body(group) on a thread for each rank; its results in rank order."""
    pg = pytest.importorskip("torch.testing._internal.distributed.multi_threaded_pg")
    pg._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)

    def run(num_ranks: int, body: Callable[[EPGroup], Any]) -> list[Any]:
        store = dist.HashStore()
        results: list[Any] = [None] * num_ranks
        errors: list[tuple[int, BaseException]] = []

        def rank_main(rank: int) -> None:
            try:
                dist.init_process_group("threaded", rank=rank, world_size=num_ranks, store=store)
                pg = dist.group.WORLD
                results[rank] = body(EPGroup(rank, num_ranks, num_ranks, pg, pg))
            except BaseException as error:
                errors.append((rank, error))
                pgs.exception_handle(error)  # free the others from their collectives
            finally:
                dist.destroy_process_group()

        pgs = pg.ProcessLocalGroup
        pgs.reset()
        threads = [
            threading.Thread(target=rank_main, args=(rank,), daemon=True)
            for rank in range(num_ranks)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive(), "a rank hangs"
        if errors:
            # The first error is the cause; those after it may be ranks freed by it.
            raise errors[0][1]
        return results

    yield run
    torch._C._distributed_c10d._set_thread_isolation_mode(False)
    pg._uninstall_threaded_pg()


def config_for(
    placement: ExpertPlacement, dtype: torch.dtype = torch.bfloat16, hidden: int = 6, top_k: int = 3
) -> DispatchConfig:
    return DispatchConfig(hidden, top_k, placement.num_physical_experts, 64, dtype, True)


def cases_of(num_ranks: int, dtype: torch.dtype) -> list[tuple[DispatchConfig, CheckCase]]:
    """Random work, and the corners: idle ranks, no work at all, everything to one rank."""
    experts = 8
    cases = []
    for seed in range(3):
        placement = random_placement(experts, num_ranks, (num_ranks + 1) * seed, seed)
        config = config_for(placement, dtype, hidden=5 + seed)
        some = [(7 * rank + 3 * seed) % 6 for rank in range(num_ranks)]
        one_busy = [0] * num_ranks
        one_busy[seed % num_ranks] = 9
        for tokens, options in (
            (some, {}),
            (some, {"masked": 0.4}),
            (one_busy, {}),
            ([0] * num_ranks, {}),
            (some, {"to_rank": seed % num_ranks}),
            ([4] * num_ranks, {"masked": 1.1}),
        ):
            cases.append((config, make_case(config, placement, tokens, seed, **options)))
    return cases


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
    layer = [torch.int64, torch.uint8, torch.bfloat16]
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
        there = 8 * 3 + leaving * row_bytes if bound is None else 3 * (bound + 1) * row_bytes
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
        assert "not local: needs exactly one rank, the group has 2" in choice.describe()
        return bool((run_case(choice.dispatcher, case, group.rank)[1] == 42).all())

    assert world(2, body) == [True, True]


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
