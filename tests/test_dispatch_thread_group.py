"""Groups among threads: the collectives against plain tensors, the dispatchers over them, and what
happens to ranks that end, differ or stay away."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from dispatch_cases import cases_of, config_for

from dispatch.base import CombineForm, DispatchError
from dispatch.selfcheck import differences, expected, random_placement
from dispatch.thread_group import (
    ThreadBoard,
    ThreadedAllGather,
    ThreadedCollective,
    ThreadGroupBroken,
)
from ep.group import EPGroup


def test_collectives_say_what_a_network_would() -> None:
    size = 3
    board, got = ThreadBoard(size), {}

    def body(rank: int) -> None:
        pg = board.group(rank).device_group
        mine = torch.arange(6.0).view(6, 1) + 10 * rank
        # Rank r gives r, 1 and 5 - r rows to ranks 0, 1 and 2.
        splits = [rank, 1, 5 - rank]
        incoming = [[0, 1, 2], [1, 1, 1], [5, 4, 3]][rank]
        out = torch.full((sum(incoming), 1), -1.0)
        first = dist.all_to_all_single(out, mine, incoming, splits, group=pg, async_op=True)
        even = torch.empty(6, 1)
        second = dist.all_to_all_single(even, mine, group=pg, async_op=True)
        mine += 1000  # what was given was given
        second.wait()
        first.wait()
        parts = [torch.empty(2) for _ in range(size)]
        dist.all_gather(parts, torch.full((2,), float(rank)), group=pg)
        gathered, scattered = torch.empty(size), torch.empty(2)
        dist.all_gather_single(gathered, torch.full((1,), 2.0 * rank), group=pg)
        dist.reduce_scatter_single(scattered, torch.arange(6.0) * (rank + 1), group=pg)
        got[rank] = [t.flatten().tolist() for t in (out, even, *parts, gathered, scattered)]

    board.run(body)
    assert got[0][0] == [10, 20, 21] and got[1][0] == [0, 11, 22]
    assert got[2][0] == [1, 2, 3, 4, 5, 12, 13, 14, 15, 23, 24, 25]
    assert got[1][1] == [2, 3, 12, 13, 22, 23]
    assert got[0][2:6] == got[2][2:6] == [[0, 0], [1, 1], [2, 2], [0, 2, 4]]
    assert [got[r][6] for r in range(size)] == [[0, 6], [12, 18], [24, 30]]
    assert board.num_collectives == 5


@pytest.mark.parametrize("kind", [ThreadedCollective, ThreadedAllGather])
def test_dispatchers_over_threads_equal_the_slow_twin(kind: type[ThreadedCollective]) -> None:
    size, form = 8, CombineForm.PAIRS
    cases = cases_of(size, torch.bfloat16)
    wanted = [expected(case, form) for _, case in cases]
    board, found = ThreadBoard(size), []

    def body(rank: int) -> None:
        group = board.group(rank)
        for (config, case), want in zip(cases, wanted, strict=True):
            d = kind(group, config, combine_form=form)
            for bound in (None, max(x.shape[0] for x in case.xs)):
                d.set_step_bound(bound)
                found.extend(differences(d, case, rank, wanted=want))

    board.run(body)
    assert found == []


def test_their_probe_still_wants_slots_that_divide() -> None:
    config = config_for(random_placement(8, 2, 0, 0))
    for kind in (ThreadedCollective, ThreadedAllGather):
        with pytest.raises(DispatchError, match="num_physical_experts=8 does not divide by 3"):
            kind(ThreadBoard(3).group(1), config)


def broken(size: int, body: Callable[[EPGroup, int], None], patience: float = 30) -> list[str]:
    """What each rank got, the first error of all last."""
    board, said = ThreadBoard(size, patience), [""] * size

    def rank_main(rank: int) -> None:
        try:
            body(board.group(rank), rank)
        except Exception as error:
            said[rank] = f"{type(error).__name__}: {error}"
            raise

    with pytest.raises(Exception) as caught:  # noqa: B017 (whichever comes first)
        board.run(rank_main)
    return [*said, f"{type(caught.value).__name__}: {caught.value}"]


def test_the_first_rank_that_ends_frees_all_and_is_named() -> None:
    def body(group: EPGroup, rank: int) -> None:
        if rank == 2:
            raise ValueError("no more")
        dist.all_gather([torch.empty(1)] * 4, torch.zeros(1), group=group.cpu_group)

    said = broken(4, body)
    assert said[2] == said[4] == "ValueError: no more"
    cause = "ThreadGroupBroken: thread group: rank 2 ended: ValueError: no more"
    assert {said[0], said[1], said[3]} == {cause}


def test_ranks_that_differ_are_found() -> None:
    def another_kind(group: EPGroup, rank: int) -> None:
        if rank == 1:
            dist.all_gather_single(torch.empty(2), torch.zeros(1), group=group.cpu_group)
        else:
            dist.all_to_all_single(torch.empty(2), torch.zeros(2), group=group.cpu_group)

    assert all(
        "collective 0: rank " in line and "all_gather_single" in line
        for line in broken(2, another_kind)
    )

    def another_size(group: EPGroup, rank: int) -> None:
        out = torch.empty(3 - rank)
        dist.all_to_all_single(out, torch.zeros(2), [1, 2 - rank], [1, 1], group=group.cpu_group)

    said = broken(2, another_size)
    assert said[0] == said[2]
    assert said[0].endswith("rank 1 sends 1 rows to rank 0, which expects 2")

    def another_shape(group: EPGroup, rank: int) -> None:
        dist.all_gather_single(torch.empty(4), torch.zeros(1 + rank), group=group.cpu_group)

    assert "all_gather_single: ranks give [(1,), (2,)]" in broken(2, another_shape)[-1]


def test_a_rank_that_stays_away_is_named() -> None:
    over = threading.Event()

    def body(group: EPGroup, rank: int) -> None:
        if rank == 1:
            assert over.wait(30)
            return
        try:
            dist.all_gather_single(torch.empty(2), torch.zeros(1), group=group.cpu_group)
        finally:
            over.set()

    said = broken(2, body, patience=0.05)
    assert said[0] == said[2] and "no word of ranks [1] for 0.05 s" in said[0]
    assert said[0].startswith(ThreadGroupBroken.__name__)
