"""Ranks as threads of one process, each with a real gloo process group: point to point included,
which torch's threaded group has not. For tests of what talks over a group handed to it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ep.group import EPGroup

Body = Callable[[EPGroup], Any]


def gloo_threads(
    num_ranks: int, body: Body, timeout: float = 20.0, leaving: tuple[int, ...] = ()
) -> list[Any]:
    """body(group) on a thread for each rank -> the results in rank order. A rank's first error is
    raised here once all have ended; timeout in seconds, for a message and for all. leaving: ranks
    whose connections are closed once their body has returned; the others' stay until all have."""
    store = dist.HashStore()
    results: list[Any] = [None] * num_ranks
    errors: list[tuple[int, BaseException]] = []
    ended = threading.Barrier(num_ranks)

    def rank_main(rank: int) -> None:
        try:
            group = dist.ProcessGroupGloo(store, rank, num_ranks, timedelta(seconds=timeout))
            results[rank] = body(EPGroup(rank, num_ranks, num_ranks, group, group))
            if rank in leaving:
                del group
            ended.wait(timeout)  # who leaves early takes its connections away
        except threading.BrokenBarrierError:
            pass
        except BaseException as error:
            errors.append((rank, error))
            ended.abort()

    threads = [threading.Thread(target=rank_main, args=(r,), daemon=True) for r in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * timeout)
        assert not thread.is_alive(), "a rank hangs"
    if errors:
        raise errors[0][1]
    return results
