"""Links between nodes: rounds, slow pairs, what differs between nodes, and how it is shown."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from launch.doctor.check import State, fails, ok, warning
from launch.doctor.compare import NodeReport, compare, joined, names_of
from launch.doctor.links import (
    Link,
    clock_offset,
    matrix,
    partner_of,
    rounds_of,
    schedule,
    slow_links,
    suspect,
)
from launch.doctor.measure import AllToAll, rows_between
from launch.doctor.nodes import JobReport
from launch.doctor.screen import show_matrix


@pytest.mark.parametrize("size", range(1, 18))
def test_every_pair_meets_once_in_as_many_rounds_as_ranks(size: int) -> None:
    rounds = rounds_of([10 + r for r in range(size)])
    assert len(rounds) <= size
    for pairs in rounds:
        busy = [rank for pair in pairs for rank in pair]
        assert len(set(busy)) == len(busy)
    everyone = sorted(pair for pairs in rounds for pair in pairs)
    assert everyone == [*combinations(range(10, 10 + size), 2)]


@pytest.mark.parametrize(("size", "per_node"), [(16, 8), (24, 8), (320, 8), (40, 1), (64, 64)])
def test_many_ranks_are_sampled_by_node(size: int, per_node: int) -> None:
    rounds = schedule(size, per_node)
    pairs = [pair for made in rounds for pair in made]
    assert len(set(pairs)) == len(pairs)
    for made in rounds:
        busy = [rank for pair in made for rank in pair]
        assert len(set(busy)) == len(busy)
    if size <= 16:
        assert len(pairs) == size * (size - 1) // 2
        return
    nodes = size // per_node
    assert len(rounds) <= per_node + nodes
    between = {(a // per_node, b // per_node) for a, b in pairs if a // per_node != b // per_node}
    assert between == set(combinations(range(nodes), 2))
    within = [(a, b) for a, b in pairs if a // per_node == b // per_node]
    assert len(within) == nodes * per_node * (per_node - 1) // 2


def test_partners() -> None:
    assert partner_of(3, [(0, 1), (2, 3)]) == 2 and partner_of(4, [(0, 1)]) is None


def mesh(size: int, per_node: int = 1) -> list[Link]:
    """Fast within nodes, a tenth of that between them."""
    return [
        Link(a, b, 1e-6, 1e10, 1e10)
        if a // per_node == b // per_node
        else Link(a, b, 1e-5, 1e9, 1e9)
        for made in schedule(size, per_node)
        for a, b in made
    ]


def spoilt(links: list[Link], a: int, b: int, **values: float) -> list[Link]:
    return [replace(x, **values) if (x.a, x.b) == (a, b) else x for x in links]


def test_slow_pairs_are_those_under_half_of_the_median_of_their_kind() -> None:
    good = mesh(8, 4)
    assert slow_links(good, 4) == []  # between nodes slower than within is no fault
    assert slow_links(spoilt(good, 1, 6, back=0.51e9), 4) == []
    (slow,) = slow_links(spoilt(good, 1, 6, back=0.4e9), 4)
    assert (slow.a, slow.b, slow.what, slow.scope) == (6, 1, "bandwidth", "between nodes")
    assert slow.value == 0.4e9 and slow.median == 1e9
    (slow,) = slow_links(spoilt(good, 0, 3, latency=3e-6), 4)
    assert (slow.a, slow.b, slow.what, slow.scope) == (0, 3, "latency", "within nodes")
    both = slow_links(spoilt(spoilt(good, 0, 3, there=4e9), 1, 6, there=1e8), 4)
    assert [(x.a, x.b) for x in both] == [(1, 6), (0, 3)]  # the slowest first
    assert slow_links(mesh(2), 1) == []  # of one pair none is the odd one


def test_a_node_at_which_slow_links_end_is_suspected() -> None:
    links = mesh(12, 4)
    for a in (0, 4):
        links = spoilt(links, a, 8, there=1e7)
    slow = slow_links(links, 4)
    assert len(slow) == 2 and suspect(slow, 4) == 2
    assert suspect(slow[:1], 4) is None and suspect([], 4) is None
    within = slow_links(spoilt(mesh(8, 4), 0, 3, there=1e7), 4)
    assert len(within) == 1 and suspect(within, 4) is None


def test_matrices() -> None:
    links = spoilt(mesh(3), 0, 2, back=5.0)
    cells = matrix(links, "rate", 3)
    assert cells[0][2] == 1e9 and cells[2][0] == 5.0 and cells[1][1] is None
    assert matrix(links, "latency", 3)[2][0] == 1e-5
    nodes = matrix(mesh(32, 8), "rate", 32, every=8)
    assert len(nodes) == 4 and nodes[0][3] == 1e9 and nodes[2][2] is None


def test_heat_maps_of_few_and_many(capsys: pytest.CaptureFixture[str]) -> None:
    cells = matrix(spoilt(mesh(4), 0, 2, there=1e8), "rate", 4)
    show_matrix(cells, ["a", "b", "c", "d"], "bandwidth", 1e6)
    shown = capsys.readouterr().out
    assert "median 1000.0" in shown and "100.0" in shown
    names = [f"node{i}" for i in range(20)]
    show_matrix(matrix(mesh(20), "rate", 20), names, "bandwidth", 1e6)
    lines = capsys.readouterr().out.splitlines()
    assert len([x for x in lines if x.strip().startswith("node")]) == 20
    show_matrix([[None]], ["a"], "bandwidth", 1.0)
    assert capsys.readouterr().out == ""


def test_clocks_by_the_quickest_round_trip() -> None:
    samples = [(0.0, 10.9, 1.0), (2.0, 12.06, 2.1), (3.0, 14.0, 4.0)]
    offset, error = clock_offset(samples)
    assert offset == pytest.approx(10.01) and error == pytest.approx(0.05)


def test_rows_of_the_all_to_all_are_uneven() -> None:
    rows = [[rows_between(a, b) for b in range(8)] for a in range(8)]
    assert any(0 in row for row in rows) and len({x for row in rows for x in row}) > 3
    assert rows[1][2] != rows[2][1]


# -- nodes side by side ---------------------------------------------------------------------------


def node(name: str, clock: float = 0.0, **values: str) -> NodeReport:
    usual = {"torch": "2.13.0", "python": "3.11", "checkpoint": "abc", "moeserve": "0.1"}
    checks = [ok("host", "cores", "8"), ok("checkpoint", "read rate", f"{name} MB/s")]
    return NodeReport(name, checks, usual | values, (clock, 0.001))


def test_what_differs_is_named_with_its_node() -> None:
    nodes = [node("h0"), node("h1"), node("h2", checkpoint="abd"), node("h3", clock=2.0)]
    found = {c.name: c for c in compare(nodes)}
    assert found["torch"].state is State.OK and "on all 4 nodes" in found["torch"].found
    assert found["checkpoint"].state is State.FAILS and "refuses" in found["checkpoint"].reason
    assert found["checkpoint"].found == "abc on 3 of 4 nodes; h2: abd"
    assert found["clocks"].state is State.WARNING and "h3: +2.00 s" in found["clocks"].found
    assert "driver" not in found  # nobody has one
    unsure = [node("h0"), NodeReport("h1", [], {}, (2.0, 1.9))]
    assert {c.name: c for c in compare(unsure)}["clocks"].state is State.OK


def test_what_all_say_alike_is_said_once() -> None:
    nodes = [node("h0"), node("h1")]
    bad = warning("host", "cores", "1", "few", "more")
    nodes[1] = replace(nodes[1], checks=[bad, *nodes[1].checks[1:]])
    found = [(c.name, c.node, c.found) for c in joined(nodes)]
    assert ("cores", "h0", "8") in found and ("cores", "h1", "1") in found
    assert ("read rate", "h1", "h1 MB/s") in found  # a figure of each
    assert [c.node for c in joined([node("h0"), node("h0")]) if c.name == "cores"] == ["all"]
    assert names_of(["a", "b", "a"]) == ["a#0", "b", "a#2"]


def report(links: list[Link], wrong: tuple[int, ...] = ()) -> JobReport:
    return JobReport([node("h0"), node("h1")], links, AllToAll(9, 99, 1e-3, wrong), 8, 4, "gloo")


def test_a_report_names_slow_pairs_and_wrong_rows(capsys: pytest.CaptureFixture[str]) -> None:
    good = report(mesh(8, 4))
    assert {c.state for c in good.link_checks()} == {State.OK}
    slow = report(spoilt(mesh(8, 4), 1, 6, back=1e7))
    (pair,) = [c for c in slow.checks if c.name == "pairs"]
    assert pair.state is State.WARNING
    assert "h1/2 -> h0/1: 10 MB/s, the median between nodes is 1000 MB/s" in pair.reason
    told = slow.as_json()
    assert told["slow"][0]["what"] == "bandwidth" and len(told["links"]) == 28
    assert told["all_to_all"]["correct"] and told["names"][6] == "h1/2"
    wrong = report(mesh(8, 4), wrong=(5,))
    (bad,) = [c for c in wrong.checks if c.state is State.FAILS]
    assert bad.name == "all-to-all" and "h1/1" in bad.reason and not wrong.as_json()["ok"]
    slow.show()
    shown = capsys.readouterr().out
    assert "bandwidth" in shown and "h1/2" in shown
    failing = replace(good, nodes=[replace(good.nodes[0], checks=[fails("a", "b", "c", "d", "e")])])
    assert not failing.as_json()["ok"]
