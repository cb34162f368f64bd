"""EPGroup: who may be made, and which node a rank is on."""

from __future__ import annotations

from typing import Any

import pytest

from ep.group import EPGroup


def test_single_has_no_process_group() -> None:
    group = EPGroup.single()
    assert (group.rank, group.size, group.node, group.num_nodes) == (0, 1, 0, 1)
    assert group.device_group is None and group.cpu_group is None


def test_nodes() -> None:
    pg: Any = object()
    nodes = [EPGroup(rank, 8, 4, pg, pg).node for rank in range(8)]
    assert nodes == [0] * 4 + [1] * 4
    assert EPGroup(0, 8, 4, pg, pg).num_nodes == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((2, 2, 2), "rank 2 is not in"),
        ((-1, 2, 2), "rank -1 is not in"),
        ((0, 0, 1), "not in"),
        ((0, 4, 3), "ranks_per_node=3 does not divide size=4"),
        ((0, 4, 0), "ranks_per_node=0"),
        ((0, 2, 2), "needs a device group"),
    ],
)
def test_what_cannot_be_is_refused(arguments: tuple[int, int, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        EPGroup(*arguments, None, None)


def test_ranks_are_told_as_people_find_them():
    pg = object()
    far = EPGroup(0, 8, 4, pg, pg, node_names=("h0", "h1"))  # type: ignore[arg-type]
    assert far.where([5]) == "rank 5 on h1"
    assert far.where([1, 5]) == "ranks 1, 5 on h0, h1"
    assert far.where([4, 5, 6, 7]) == "node h1"
    near = EPGroup(0, 16, 16, pg, pg, node_names=("h0",))  # type: ignore[arg-type]
    assert near.where([3]) == "rank 3"
    assert near.where(list(range(10))) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"
