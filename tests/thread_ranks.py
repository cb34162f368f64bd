"""Ranks as threads of one process: more ranks and cases than real processes for the same time.

Collectives are torch's threaded process group. Tests import `thread_world`, which gives them the
fixture `world`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep.group import EPGroup

Body = Callable[[EPGroup], Any]


class World:
    """world(num_ranks, body): body(group) on a thread for each rank; the results in rank order."""

    def __init__(self, local_groups: Any) -> None:
        self._local_groups = local_groups

    def __call__(self, num_ranks: int, body: Body) -> list[Any]:
        """The first error of a rank frees the others from their collectives and is raised."""
        results, errors = self._run(num_ranks, body, self._local_groups.exception_handle)
        if errors:
            # The first error is the cause; those after it may be ranks freed by it.
            raise errors[0][1]
        return results

    def outcomes(self, num_ranks: int, body: Body) -> list[Any]:
        """A rank's error is its result, and frees nobody: all must end of themselves."""
        results, errors = self._run(num_ranks, body, lambda error: None)
        for rank, error in errors:
            results[rank] = error
        return results

    def _run(
        self, num_ranks: int, body: Body, on_error: Callable[[BaseException], object]
    ) -> tuple[list[Any], list[tuple[int, BaseException]]]:
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
                on_error(error)
            finally:
                dist.destroy_process_group()

        self._local_groups.reset()
        threads = [
            threading.Thread(target=rank_main, args=(rank,), daemon=True)
            for rank in range(num_ranks)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive(), "a rank hangs"
        return results, errors


@pytest.fixture(name="world")
def thread_world() -> Iterator[World]:
    pg = pytest.importorskip("torch.testing._internal.distributed.multi_threaded_pg")
    pg._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    yield World(pg.ProcessLocalGroup)
    torch._C._distributed_c10d._set_thread_isolation_mode(False)
    pg._uninstall_threaded_pg()
