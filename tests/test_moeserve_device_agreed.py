"""Ranks capture steps together: what one of them knows alone never parts them in an exchange."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from models.interface import ForwardBatch, ForwardOutput, PagedKVCache
from moeserve.device.api import ReplayedApi
from moeserve.device.graphs import WARM_UPS, Budget, StepGraphs
from moeserve.errors import EngineFailed

WAIT = 20.0  # s; only a rank that is left alone waits so long
RUNGS = (1, 2, 4)
PLACED = "placed"


class Together:
    """Of ranks that are threads: an exchange that all must be in, and votes."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks)
        self._votes: list[bool] = [True] * ranks

    def exchange(self) -> None:
        self._barrier.wait(WAIT)

    def agree(self, rank: int, vote: bool) -> bool:
        self._votes[rank] = vote
        self._barrier.wait(WAIT)
        agreed = all(self._votes)
        self._barrier.wait(WAIT)
        return agreed

    def leave(self) -> None:
        self._barrier.abort()


class Model:
    """Two layers, each an exchange. fails: the number of the forward that raises in the first."""

    def __init__(self, exchange: Callable[[], None], fails: int | None = None) -> None:
        self._exchange, self.fails = exchange, fails
        self.forwards: list[int] = []
        self.placement: object = PLACED

    def forward(self, batch: ForwardBatch, cache: PagedKVCache, observer: Any) -> ForwardOutput:
        rows = batch.num_tokens
        self.forwards.append(rows)
        if len(self.forwards) - 1 == self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        self._exchange()
        self._exchange()
        return ForwardOutput(hidden=torch.zeros(rows, 4), logits=torch.zeros(rows, 8))


class Narrow(ReplayedApi):
    """No memory for inputs, by the number of the rung."""

    def __init__(self, full: set[int]) -> None:
        super().__init__()
        self.full, self.number = full, -1

    def pinned(self, nbytes: int) -> torch.Tensor:
        self.number += 1
        if self.number in self.full:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().pinned(nbytes)


def ranks(act: Callable[[int, StepGraphs, Callable[[bool], bool]], Any], *made: Any) -> list[Any]:
    """made: api and failing forward of each rank. What each gave, or its error."""
    together = Together(len(made))
    got: list[Any] = [None] * len(made)

    def run(rank: int, api: ReplayedApi, fails: int | None) -> None:
        cache = PagedKVCache([torch.zeros(4, 16, 8)], 16)
        model = Model(together.exchange, fails)
        graphs = StepGraphs(model, cache, api, RUNGS, 64, collective=True)
        try:
            got[rank] = act(rank, graphs, lambda ok: together.agree(rank, ok)), model.forwards
        except Exception as error:
            together.leave()
            got[rank] = error

    threads = [
        threading.Thread(target=run, args=(rank, *one), daemon=True)
        for rank, one in enumerate(made)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * WAIT)
    assert not any(thread.is_alive() for thread in threads)
    return got


def of(size: int) -> list[int]:
    """Forwards of a rung."""
    return [size] * (WARM_UPS + 1)


def test_time_that_ends_between_two_clocks() -> None:
    """One rank's clock says that all time has gone, another's not yet."""

    def act(rank: int, graphs: StepGraphs, agree: Callable[[bool], bool]) -> Any:
        times = iter([0.0, 10.0, 19.999 + 0.002 * rank, 30.0, 40.0])
        graphs.capture_all(Budget(seconds=20.0), agree=agree, clock=lambda: next(times))
        return graphs.rungs, graphs.notes

    (one, forwards), (other, others) = ranks(act, (ReplayedApi(), None), (ReplayedApi(), None))
    assert one[0] == other[0] == (4,)
    assert forwards == others == of(4)
    assert any("another rank cannot" in note for note in one[1])
    assert other[1] == ["graphs: decode steps of 1, 2 rows are not captured: 20 s have gone"]


def test_no_memory_for_the_inputs_of_one_rank() -> None:
    """Nor when captured again, since experts moved."""

    def act(rank: int, graphs: StepGraphs, agree: Callable[[bool], bool]) -> Any:
        graphs.capture_all(agree=agree)
        started = graphs.rungs
        graphs._model.placement = "moved"
        return started, [graphs.ready(rows, True) for rows in (1, 4, 4)], graphs.notes

    both = ranks(act, (Narrow(set()), None), (Narrow({1, 4}), None))
    (one, forwards), (other, others) = both
    assert one[:2] == other[:2] == ((1, 4), [1, None, None])
    assert forwards == others == [*of(4), *of(1), *of(1)]
    for notes, why in ((one[2], "another rank cannot"), (other[2], "CUDA out of memory")):
        assert [why in note for note in notes] == [True, True]


def test_memory_that_only_one_rank_lacks_is_agreed_behind_the_exchanges() -> None:
    def act(rank: int, graphs: StepGraphs, agree: Callable[[bool], bool]) -> Any:
        graphs.capture_all(Budget(memory=250), agree=agree)
        return graphs.rungs, graphs._taken

    (one, forwards), (other, others) = ranks(
        act, (ReplayedApi(each=10), None), (ReplayedApi(each=100), None)
    )
    assert one[0] == other[0] == (2, 4) and forwards == others
    assert (one[1], other[1]) == (30, 300)  # of graphs that live: the double drops them late


@pytest.mark.parametrize(("fails", "doing"), [(0, "warming up"), (WARM_UPS, "capturing")])
def test_a_forward_that_one_rank_leaves_ends_the_start(fails: int, doing: str) -> None:
    """Its peers are in an exchange, or its dispatcher has counted fewer calls than theirs."""

    def act(rank: int, graphs: StepGraphs, agree: Callable[[bool], bool]) -> Any:
        graphs.capture_all(agree=agree)

    waits, failed = ranks(act, (ReplayedApi(), None), (ReplayedApi(), fails))
    assert isinstance(failed, EngineFailed)
    # Its peer ends too: in the exchange, or yet on its way out of the vote.
    assert isinstance(waits, EngineFailed | threading.BrokenBarrierError)
    assert str(failed).startswith(f"{doing} a step of 4 rows: RuntimeError: operation not")
    assert "--graphs off" in str(failed)
