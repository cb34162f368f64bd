"""Layouts that a search has priced, which of them matter, and pools that need not be priced at all.

Knows: who beats whom, what a pool gives if its experts were as even, and as near one another, as no
placement can make them.
Knows nothing of how layouts come about (`search`) or what they cost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from launch.capacity.deployment import Deployment
from launch.capacity.predict import Prediction

REFINED = 24  # layouts whose batch, or step, is then looked at more closely


@dataclass(frozen=True)
class Candidate:
    deployment: Deployment
    prediction: Prediction

    @property
    def latency(self) -> float:
        """TPOT of decode, TTFT of prefill."""
        p = self.prediction
        return p.tpot if p.tpot is not None else p.ttft or 0.0

    def keeps(self, limit: float | None) -> bool:
        return limit is None or self.latency <= limit

    def as_json(self) -> dict[str, Any]:
        d = self.deployment
        return {
            "phase": d.phase,
            "gpus": d.gpus,
            "redundant": d.redundant,
            "slots_per_gpu": d.slots_per_gpu,
            "shared_expert": d.shared,
            "balance": d.balance,
            "placement": {
                "groups": d.groups,
                "nodes_per_token": d.reach and d.reach.nodes,
                "gpus_per_token": d.reach and d.reach.ranks,
            },
            "dispatch": d.dispatch,
            "sequences": d.sequences if d.phase == "decode" else None,
            "tokens": d.tokens if d.phase == "prefill" else None,
            "drafts": d.drafts,
            "overlap": d.overlap,
            "kv_fp8": d.kv_fp8,
            "prediction": self.prediction.as_json(),
        }


def pareto(candidates: list[Candidate]) -> list[Candidate]:
    """By latency; each gives more tokens a second a GPU than all that answer sooner."""
    front: list[Candidate] = []
    for x in sorted(candidates, key=lambda x: (x.latency, -x.prediction.per_gpu)):
        if not front or x.prediction.per_gpu > front[-1].prediction.per_gpu:
            front.append(x)
    return front


def leaders(kept: list[Candidate]) -> list[Candidate]:
    """The `REFINED` best that differ in more than their batch or step."""
    found: dict[tuple[object, ...], Candidate] = {}
    for x in sorted(kept, key=lambda x: -x.prediction.per_gpu):
        d = x.deployment
        found.setdefault((d.gpus, d.redundant, d.shared, d.dispatch, d.drafts, d.overlap), x)
    return list(found.values())[:REFINED]


class Pools:
    """Layouts by pool. possible: of each pool, priced with a balance and a reach that no placement
    of its experts is below, so that none answers sooner or gives more than it. price: the same
    layouts as our planner places them, which is what takes time. progress: told pools that
    are done, and all."""

    def __init__(
        self,
        possible: list[list[Candidate]],
        price: Callable[[list[Candidate]], list[Candidate]],
        progress: Callable[[int, int], None],
    ) -> None:
        self._possible = possible
        self._price_pool = price
        self._progress = progress
        self._found: dict[int, list[Candidate]] = {}
        progress(0, len(possible))

    def priced(self) -> list[Candidate]:
        """In the order of pools, whatever order they were priced in."""
        return [x for i in sorted(self._found) for x in self._found[i]]

    def price_all(self) -> None:
        for i in range(len(self._possible)):
            self._price(i)

    def price_leaders(self, limit: float | None) -> None:
        """Those that `leaders` of all pools' layouts within the limit could be from."""
        most: dict[int, float] = {}
        for i, layouts in enumerate(self._possible):
            kept = [x.prediction.per_gpu for x in layouts if x.keeps(limit)]
            if kept:
                most[i] = max(kept)
        for i in sorted(most, key=lambda i: -most[i]):
            found = leaders([x for x in self.priced() if x.keeps(limit)])
            if len(found) == REFINED and found[-1].prediction.per_gpu > most[i]:
                break
            self._price(i)

    def price_front(self, others: list[Candidate]) -> None:
        """Those that could be in the front of all pools' layouts and others."""
        while True:
            left = [i for i in range(len(self._possible)) if i not in self._found]
            pool_of = {id(x): i for i in left for x in self._possible[i]}
            hopes = [x for i in left for x in self._possible[i]]
            front = pareto(self.priced() + others + hopes)
            worth = list(dict.fromkeys(pool_of[id(x)] for x in front if id(x) in pool_of))
            if not worth:
                self._progress(len(self._possible), len(self._possible))
                return
            self._price(worth[0])

    def _price(self, i: int) -> None:
        self._found[i] = self._price_pool(self._possible[i])
        self._progress(len(self._found), len(self._possible))
