"""Two halves of a batch in turn: while rows of one travel, the other computes.

A half's work is a generator that yields wherever rows have just left (`Stages`). In turn, first
half first, a layer goes

    first   attention, gate | yield |  shared expert, experts  | yield | next layer ...
    second                  | attention, gate | yield | shared expert, experts | yield | ...

so that the first half's dispatch is covered by the second's attention and gate, the second's by the
first's experts, and the results' ways home alike. The second half is never ahead of the first:
what the first wrote to a layer's cache is there when the second attends to it. At most two layers
are between `dispatch_start` and `combine_finish` at any time.

Knows: generators, and what an observer is to be told. Knows nothing of layers or of what
travels.

Shape letters: T tokens, K top-k, D hidden, R ranks.
"""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor

from models.interface import StepObserver

Stages = Generator[None, None, Tensor]  # returns [T, D]


def drain(stages: Stages) -> Tensor:
    """All of it at once: nothing covers anything."""
    while True:
        try:
            next(stages)
        except StopIteration as done:
            result: Tensor = done.value
            return result


def interleave(first: Stages, second: Stages) -> tuple[Tensor, Tensor]:
    """A stage of each in turn until both have ended -> what they return. The order depends on the
    number of stages alone, so all ranks make the same collectives in the same order (law 1)."""
    running = [(0, first), (1, second)]
    results: dict[int, Tensor] = {}
    try:
        while running:
            for part in list(running):
                number, stages = part
                try:
                    next(stages)
                except StopIteration as done:
                    results[number] = done.value
                    running.remove(part)
    finally:
        first.close()
        second.close()
    return results[0], results[1]


class HalvesObserver:
    """Tells `observer` once a layer what two halves show, as if they were one batch: loads, and
    rows sent, are the same with and without overlap. Parts are told as they come; they never
    contain each other, for a half does not yield within one."""

    def __init__(self, observer: StepObserver) -> None:
        self._observer = observer
        self.wants_rows: bool = getattr(observer, "wants_rows", True)
        self._picks: tuple[int, Tensor] | None = None  # of the first half: layer, [T, K]
        self._rows: tuple[int, list[int]] | None = None

    def expert_picks(self, layer: int, ids: Tensor) -> None:
        if self._picks is None:
            self._picks = (layer, ids)
            return
        (of, first), self._picks = self._picks, None
        assert of == layer, "the halves have not gone in turn"
        self._observer.expert_picks(layer, torch.cat((first, ids)))

    def rows_sent(self, layer: int, rows: list[int]) -> None:
        if self._rows is None:
            self._rows = (layer, rows)
            return
        (of, first), self._rows = self._rows, None
        assert of == layer, "the halves have not gone in turn"
        self._observer.rows_sent(layer, [a + b for a, b in zip(first, rows, strict=True)])

    def part(self, name: str, seconds: float) -> None:
        self._observer.part(name, seconds)
