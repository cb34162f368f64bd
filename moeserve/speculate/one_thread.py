"""One compute thread for a drafter's few rows.

A head's products over one row take microseconds; handing them to threads takes as long, and where
other processes want the cores each hand-over can wait for the scheduler: on a busy machine of two
cores a row of an EAGLE head took 146 ms with two threads and 0.9 ms with one.

Knows torch's number of threads; the target's own kernels run outside.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
