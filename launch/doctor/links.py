"""Links between ranks: which pairs are measured when, and which of them are slow. Pure.

Pairs go in rounds in which no rank has two partners, so that all of them take as many rounds as
there are ranks (round-robin by the circle method). Where ranks are many, one of each node stands
for it between nodes, and within nodes all nodes measure at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

MOST_RANKS = 16  # of which every pair is measured
SLOW = 0.5  # of the median

Pair = tuple[int, int]


@dataclass(frozen=True)
class Link:
    """Between two ranks. latency: half of a small message's round trip, seconds; there, back: bytes
    a second from a to b, and from b to a."""

    a: int
    b: int
    latency: float
    there: float
    back: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class SlowLink:
    """what: latency or bandwidth; value and median in seconds or bytes a second. scope: among which
    links the median is."""

    a: int
    b: int
    what: str
    value: float
    median: float
    scope: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def rounds_of(members: Sequence[int]) -> list[list[Pair]]:
    """Every pair of these once, in len(members) rounds or one less; no member twice in a round."""
    places: list[int | None] = [*members]
    if len(places) % 2:
        places.append(None)
    rounds = []
    for _ in range(len(places) - 1):
        pairs = [(places[i], places[-1 - i]) for i in range(len(places) // 2)]
        rounds.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        places = [places[0], places[-1], *places[1:-1]]
    return [made for made in rounds if made]


def schedule(size: int, per_node: int, most: int = MOST_RANKS) -> list[list[Pair]]:
    """Rounds for so many ranks: of every pair, or, of more than `most`, within nodes (all at once)
    and then between the first ranks of the nodes."""
    if size <= most:
        return rounds_of(range(size))
    within = rounds_of(range(per_node))
    nodes = range(0, size, per_node)
    joined = [[(first + a, first + b) for first in nodes for a, b in made] for made in within]
    return joined + rounds_of([*nodes])


def partner_of(rank: int, pairs: Sequence[Pair]) -> int | None:
    """Whom this rank measures with in a round."""
    for a, b in pairs:
        if rank in (a, b):
            return b if rank == a else a
    return None


def slow_links(links: Sequence[Link], per_node: int) -> list[SlowLink]:
    """Those under half of the median speed, or with twice the median latency: among links within
    nodes, and among links between nodes, apart. The slowest first."""
    found = []
    for scope, chosen in _scopes(links, per_node):
        if len(chosen) < 3:
            continue  # of one or two, none is the odd one
        usual = median(link.latency for link in chosen)
        found += [
            SlowLink(x.a, x.b, "latency", x.latency, usual, scope)
            for x in chosen
            if x.latency * SLOW > usual
        ]
        speed = median(rate for x in chosen for rate in (x.there, x.back))
        for x in chosen:
            for a, b, rate in ((x.a, x.b, x.there), (x.b, x.a, x.back)):
                if rate < SLOW * speed:
                    found.append(SlowLink(a, b, "bandwidth", rate, speed, scope))
    return sorted(found, key=_badness, reverse=True)


def suspect(slow: Sequence[SlowLink], per_node: int) -> int | None:
    """The node that most slow links between nodes begin or end at; None where no one stands out."""
    ends = Counter(
        node
        for x in slow
        if x.a // per_node != x.b // per_node
        for node in (x.a // per_node, x.b // per_node)
    ).most_common(2)
    if not ends or (len(ends) == 2 and ends[0][1] == ends[1][1]):
        return None
    return ends[0][0]


def _badness(link: SlowLink) -> float:
    low, high = sorted((link.value, link.median))
    return high / max(low, 1e-12)


def _scopes(links: Sequence[Link], per_node: int) -> list[tuple[str, list[Link]]]:
    same = [x for x in links if x.a // per_node == x.b // per_node]
    other = [x for x in links if x.a // per_node != x.b // per_node]
    return [("within nodes", same), ("between nodes", other)]


def matrix(links: Sequence[Link], what: str, size: int, every: int = 1) -> list[list[float | None]]:
    """[from][to] latency or bandwidth; None where nothing was measured. every: of ranks so many
    apart only (the first of each node)."""
    count = -(-size // every)
    cells: list[list[float | None]] = [[None] * count for _ in range(count)]
    for x in links:
        if x.a % every or x.b % every:
            continue
        a, b = x.a // every, x.b // every
        cells[a][b] = x.latency if what == "latency" else x.there
        cells[b][a] = x.latency if what == "latency" else x.back
    return cells


def clock_offset(samples: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """samples: (asked, the other's clock, answered), the first and last by our clock -> (seconds by
    which the other is ahead, how wrong that may be), by the quickest of them."""
    asked, there, answered = min(samples, key=lambda x: x[2] - x[0])
    return there - (asked + answered) / 2, (answered - asked) / 2
